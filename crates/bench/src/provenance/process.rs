//! The process of a server on this machine.

use std::fs;
use std::path::Path;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// What the kernel's times in `/proc` count, on every architecture in use.
const TICKS_PER_SECOND: u64 = 100;

/// What stands for a masked value.
const MASK: &str = "***";

/// The process of a server on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// When it started, to a second: a server that is older than the change it is to show has not
    /// got it.
    pub started_at: Timestamp,
    /// The program's file.
    pub program: String,
    /// Whether the file has been replaced since: the process runs an older build than is there.
    pub is_replaced: bool,
    /// Its arguments, secrets masked.
    pub arguments: Vec<String>,
    /// Its threads at the time.
    pub n_threads: u32,
}

impl Process {
    /// Of a process of this machine.
    ///
    /// # Errors
    ///
    /// If there is none, or it is not ours to look at; the text says which.
    pub fn of(pid: u32) -> Result<Self, String> {
        let folder = Path::new("/proc").join(pid.to_string());
        let read = |name: &str| {
            fs::read_to_string(folder.join(name)).map_err(|error| format!("{name}: {error}"))
        };
        let (stat, status) = (read("stat")?, read("status")?);
        let ticks = start_ticks(&stat).ok_or("stat: has no start time")?;
        let program = fs::read_link(folder.join("exe")).map_err(|error| format!("exe: {error}"))?;
        let program = program.to_string_lossy().into_owned();
        let line = fs::read(folder.join("cmdline")).map_err(|error| format!("cmdline: {error}"))?;
        let parts = line.split(|byte| *byte == 0).map(|part| String::from_utf8_lossy(part));
        let mut arguments: Vec<String> = parts.map(std::borrow::Cow::into_owned).collect();
        arguments.pop();
        let n_threads = status.lines().find_map(|line| line.strip_prefix("Threads:"));
        Ok(Self {
            pid,
            started_at: boot_time()? + SignedDuration::from_secs(seconds(ticks)),
            is_replaced: program.ends_with(" (deleted)"),
            program: program.trim_end_matches(" (deleted)").to_owned(),
            arguments: masked(&arguments),
            n_threads: n_threads.and_then(|n| n.trim().parse().ok()).ok_or("status: no Threads")?,
        })
    }
}

fn seconds(ticks: u64) -> i64 {
    i64::try_from(ticks / TICKS_PER_SECOND).unwrap_or(i64::MAX)
}

/// Field 22 of a process's `stat`; the name before the others may hold anything but ends with the
/// last parenthesis.
fn start_ticks(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn boot_time() -> Result<Timestamp, String> {
    let stat = fs::read_to_string("/proc/stat").map_err(|error| format!("/proc/stat: {error}"))?;
    let told = stat.lines().find_map(|line| line.strip_prefix("btime "));
    let seconds = told.and_then(|n| n.parse().ok()).ok_or("/proc/stat: no btime")?;
    Timestamp::from_second(seconds).map_err(|error| error.to_string())
}

/// Arguments without secrets: what follows a flag named for a key, token, secret or password.
#[must_use]
pub fn masked(arguments: &[String]) -> Vec<String> {
    let is_secret = |flag: &str| {
        let words = ["key", "keys", "token", "secret", "password"];
        flag.starts_with('-') && flag.split(['-', '_']).any(|word| words.contains(&word))
    };
    let mut follows_secret = false;
    let mask = |argument: &String| {
        let masked = match argument.split_once('=') {
            _ if follows_secret && !argument.starts_with('-') => MASK.to_owned(),
            Some((flag, _)) if is_secret(flag) => format!("{flag}={MASK}"),
            _ => argument.clone(),
        };
        follows_secret = is_secret(argument);
        masked
    };
    arguments.iter().map(mask).collect()
}
