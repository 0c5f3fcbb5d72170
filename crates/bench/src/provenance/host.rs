//! The machine that measures.

use std::{fmt, fs};

use serde::{Deserialize, Serialize};

use super::Fact;

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Model of its processor.
    pub cpu: Fact<String>,
    /// Logical processors.
    pub n_cpus: Fact<u32>,
    /// Its memory.
    pub memory_bytes: Fact<u64>,
    /// The kernel's name and release.
    pub kernel: Fact<String>,
}

impl Host {
    /// The one that runs this program.
    #[must_use]
    pub fn this() -> Self {
        let kernel = read("/proc/sys/kernel/osrelease");
        Self {
            cpu: read("/proc/cpuinfo").and_then(|text| field(&text, "model name")).into(),
            n_cpus: read("/proc/stat")
                .and_then(|text| {
                    u32::try_from(crate::machine::n_cpus(&text)).map_err(|error| error.to_string())
                })
                .into(),
            memory_bytes: read("/proc/meminfo").and_then(|text| memory_bytes(&text)).into(),
            kernel: kernel.map(|release| format!("Linux {}", release.trim())).into(),
        }
    }
}

fn read(path: &str) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
}

/// The first value under this key, in `key: value` lines.
fn field(text: &str, key: &str) -> Result<String, String> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let value = fields.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim());
    value.map(str::to_owned).ok_or_else(|| format!("the kernel does not tell {key}"))
}

fn memory_bytes(text: &str) -> Result<u64, String> {
    let told = field(text, "MemTotal")?;
    let kib = told.strip_suffix(" kB").and_then(|n| n.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| format!("MemTotal is {told}"))
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}, {}", self.n_cpus, self.cpu, self.kernel)
    }
}
