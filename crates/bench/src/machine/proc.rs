//! What the kernel tells in `/proc` and `/sys`.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::PathBuf;

/// Where the kernel tells of the machine.
pub(super) struct Kernel {
    pub(super) proc: PathBuf,
    pub(super) sys: PathBuf,
}

/// A look at the machine. Times are ticks since its start, over all processors.
#[derive(Clone, Debug, Default)]
pub(super) struct Scan {
    pub(super) n_cpus: u32,
    pub(super) total: u64,
    /// Idle, or waiting for a disk.
    pub(super) idle: u64,
    pub(super) load_average: f64,
    pub(super) own_pid: u32,
    pub(super) processes: HashMap<u32, Process>,
    /// Mean frequency of the processors.
    pub(super) mhz: Option<f64>,
}

/// A process of a look.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) name: String,
    parent: u32,
    /// When it started: ids are used again.
    pub(super) started: u64,
    /// Ticks that its threads have used.
    pub(super) ticks: u64,
}

impl Kernel {
    /// `None` where the kernel counts no time of processors.
    pub(super) fn scan(&self) -> Option<Scan> {
        let stat = self.read("stat")?;
        let (total, idle) = cpu_times(&stat).filter(|(total, _)| *total > 0)?;
        let load = self.read("loadavg").unwrap_or_default();
        Some(Scan {
            n_cpus: u32::try_from(n_cpus(&stat)).ok()?,
            total,
            idle,
            load_average: load.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0.0),
            own_pid: std::process::id(),
            processes: self.processes(),
            mhz: self.read("cpuinfo").and_then(|text| mean_mhz(&text)),
        })
    }

    /// What chooses the first processor's frequency.
    pub(super) fn governor(&self) -> Option<String> {
        let path = self.sys.join("devices/system/cpu/cpu0/cpufreq/scaling_governor");
        Some(fs::read_to_string(path).ok()?.trim().to_owned())
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.proc.join(name)).ok()
    }

    /// Processes end while they are looked at: what cannot be read is left out.
    fn processes(&self) -> HashMap<u32, Process> {
        let entries = fs::read_dir(&self.proc).into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter_map(|pid| Some((pid, process(&self.read(&format!("{pid}/stat"))?)?))).collect()
    }
}

impl Scan {
    /// A process and all that come from it.
    pub(super) fn tree(&self, root: u32) -> HashSet<u32> {
        let mut tree = HashSet::from([root]);
        loop {
            let n_before = tree.len();
            let children = self.processes.iter().filter(|(_, of)| tree.contains(&of.parent));
            let children: Vec<u32> = children.map(|(pid, _)| *pid).collect();
            tree.extend(children);
            if tree.len() == n_before {
                return tree;
            }
        }
    }
}

/// Logical processors in `/proc/stat`.
pub(crate) fn n_cpus(stat: &str) -> usize {
    let names = stat.lines().filter_map(|line| line.strip_prefix("cpu"));
    names.filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit())).count()
}

/// All time and idle time. The first line of `/proc/stat` has user, nice, system, idle, iowait,
/// irq, softirq and steal; guests' time, which follows, is in the first two.
fn cpu_times(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let times: Vec<u64> = line.split_whitespace().take(8).flat_map(str::parse).collect();
    Some((times.iter().sum(), times.get(3)? + times.get(4)?))
}

/// Name, parent, start, and user and system time of a process's `stat`. The name may hold
/// anything, but ends with the last parenthesis.
fn process(stat: &str) -> Option<Process> {
    let (head, tail) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_owned();
    let fields: Vec<&str> = tail.split_whitespace().collect();
    let number = |idx: usize| fields.get(idx)?.parse::<u64>().ok();
    let parent = u32::try_from(number(1)?).ok()?;
    Some(Process { name, parent, started: number(19)?, ticks: number(11)? + number(12)? })
}

#[expect(clippy::cast_precision_loss, reason = "few processors")]
fn mean_mhz(cpuinfo: &str) -> Option<f64> {
    let fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let told = fields.filter(|(name, _)| name.trim() == "cpu MHz");
    let mhz: Vec<f64> = told.filter_map(|(_, mhz)| mhz.trim().parse().ok()).collect();
    (!mhz.is_empty()).then(|| mhz.iter().sum::<f64>() / mhz.len() as f64)
}
