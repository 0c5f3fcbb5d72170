//! What else the machine did while something was measured.

mod proc;
mod server;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::metrics::Metrics;
use crate::summary::Summary;
pub(crate) use proc::n_cpus;
use proc::{Kernel, Scan};
pub use server::ServerProcess;

/// The share of all processors that others may use on a machine that is called quiet.
pub const QUIET_SHARE: f64 = 0.05;
/// The processors that others may use at a time, however many there are: work that is spread over
/// all of them waits for the one that is held up.
pub const HELD_CPUS: f64 = 0.5;
/// How long they may use more: so many seconds, or this share of a longer run.
pub const HELD_S: f64 = 1.0;
/// See above.
pub const HELD_SHARE: f64 = 0.02;
/// The share of one processor above which a generator is called the bottleneck.
pub const GENERATOR_SHARE: f64 = 0.8;
/// The 99th percentile of how late requests are sent, or a sleeping task wakes up, above which it
/// is, milliseconds.
pub const SEND_LAG_MS: f64 = 10.0;

/// Shorter times are not judged: a tick of the kernel's is much of them.
const JUDGED_S_MIN: f64 = 1.0;
/// The kernel's ticks in a second.
const TICKS_PER_S: f64 = 100.0;
/// Time between two looks at the machine.
const EVERY: Duration = Duration::from_millis(500);
/// Names of other processes that are told.
const N_NAMES: usize = 3;

/// What the machine did before and during a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineLoad {
    /// Logical processors.
    pub n_cpus: u32,
    /// What chooses their frequency, where the kernel tells.
    pub governor: Option<String>,
    /// Before the run; a warm-up included.
    pub before: LoadWindow,
    /// From its first request to its end.
    pub during: LoadWindow,
    /// Whether others than the server and this program used at most [`QUIET_SHARE`], and not more
    /// than [`HELD_CPUS`] for long; unset where nobody can say.
    pub is_quiet: Option<bool>,
    /// Why it is not quiet, or why nobody can say.
    pub why_not: Option<String>,
}

/// What the machine did over a time. Shares are of all processors: 1 is all of them, busy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadWindow {
    /// How long it was.
    pub seconds: f64,
    /// Mean number of tasks that ran or waited to over the last minute, at its end.
    pub load_average: f64,
    /// All work.
    pub busy: f64,
    /// The server's, its children included; 0 where its process is not known.
    pub server: f64,
    /// This program's.
    pub generator: f64,
    /// Everybody else's, that of other machines on the same hardware (`steal`) included.
    pub others: f64,
    /// Seconds in which they used [`HELD_CPUS`] or more, in steps of half a second.
    #[serde(default)]
    pub held_s: f64,
    /// Their share half second by half second.
    pub others_by_sample: Option<Summary>,
    /// This program's, the same way.
    pub generator_by_sample: Option<Summary>,
    /// Those who used most of `others`, by name.
    pub busiest: Vec<(String, f64)>,
    /// Frequency of the processors, megahertz, where the kernel tells.
    pub mhz: Option<Summary>,
}

/// Whether the generator of the load kept up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeneratorLoad {
    /// Processors that it used on average; 1 is one whole.
    pub cpus: f64,
    /// 99th percentile of how late requests were sent, milliseconds.
    pub send_lag_p99_ms: Option<f64>,
    /// 99th percentile of how late a task of it that only sleeps woke up, milliseconds: what it
    /// reads in a loop of any kind is timed as late as that.
    pub tick_lag_p99_ms: Option<f64>,
    /// Whether it may have been what limited the results.
    pub is_bottleneck: bool,
    /// Why.
    pub why: Option<String>,
}

impl GeneratorLoad {
    /// Of a run with these figures; `None` where the engine runs in this process, so that its work
    /// and the generator's cannot be told apart.
    #[must_use]
    pub fn of(
        machine: &MachineLoad,
        server: ServerProcess,
        metrics: &Metrics,
        tick_lag_p99_ms: Option<f64>,
    ) -> Option<Self> {
        if server == ServerProcess::InProcess {
            return None;
        }
        let cpus = machine.during.generator * f64::from(machine.n_cpus);
        let send_lag_p99_ms = metrics.send_lag_ms.map(|lag| lag.p99);
        let mut why = vec![];
        if cpus > GENERATOR_SHARE {
            why.push(format!("it used {:.0} % of a processor", cpus * 100.0));
        }
        if let Some(lag) = send_lag_p99_ms.filter(|lag| *lag > SEND_LAG_MS) {
            why.push(format!("1 of 100 requests was sent {lag:.1} ms late or later"));
        }
        if let Some(lag) = tick_lag_p99_ms.filter(|lag| *lag > SEND_LAG_MS) {
            why.push(format!("1 of 100 times it woke up {lag:.1} ms late or later"));
        }
        let why = (!why.is_empty()).then(|| why.join("; "));
        Some(Self { cpus, send_lag_p99_ms, tick_lag_p99_ms, is_bottleneck: why.is_some(), why })
    }
}

/// Watches the machine in a thread of its own, from [`Self::start`] to [`Self::finish`].
#[derive(Debug)]
pub struct Monitor {
    begin: Sender<()>,
    thread: JoinHandle<MachineLoad>,
}

impl Monitor {
    /// Begins with the time before a run; 2 s of it say something.
    #[must_use]
    pub fn start(server: ServerProcess) -> Self {
        Self::watch(Kernel { proc: PathBuf::from("/proc"), sys: PathBuf::from("/sys") }, server)
    }

    fn watch(kernel: Kernel, server: ServerProcess) -> Self {
        let (begin, begun) = channel();
        let thread = std::thread::spawn(move || watch(&kernel, server, &begun));
        Self { begin, thread }
    }

    /// The run begins: what follows counts as during.
    pub fn begin(&self) {
        // The thread listens until this sender is gone.
        let _ = self.begin.send(());
    }

    /// Ends with what was seen; waits for a last look, some milliseconds.
    ///
    /// # Panics
    ///
    /// If the thread did.
    #[must_use]
    pub fn finish(self) -> MachineLoad {
        drop(self.begin);
        self.thread.join().expect("the thread that looks at the machine does not panic")
    }
}

/// Looks at the machine until the sender is gone.
fn watch(kernel: &Kernel, server: ServerProcess, begun: &Receiver<()>) -> MachineLoad {
    let mut windows = vec![Tally::new(kernel.scan())];
    loop {
        let heard = begun.recv_timeout(EVERY);
        let scan = kernel.scan();
        if let (Some(scan), Some(window)) = (&scan, windows.last_mut()) {
            window.add(scan, server);
        }
        match heard {
            Ok(()) => windows.push(Tally::new(scan)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let n_cpus = windows[0].last.as_ref().map_or(0, |scan| scan.n_cpus);
    let during = windows.pop().map(Tally::window).unwrap_or_default();
    let before = windows.pop().map(Tally::window).unwrap_or_default();
    let (is_quiet, why_not) = judge(server, n_cpus, &before, &during);
    MachineLoad { n_cpus, governor: kernel.governor(), before, during, is_quiet, why_not }
}

fn judge(
    server: ServerProcess,
    n_cpus: u32,
    before: &LoadWindow,
    during: &LoadWindow,
) -> (Option<bool>, Option<String>) {
    if n_cpus == 0 {
        return (None, Some("the kernel does not tell how busy its processors are".to_owned()));
    }
    if during.seconds < JUDGED_S_MIN {
        return (None, Some(format!("a run of {:.1} s is too short to tell", during.seconds)));
    }
    let used = |window: &LoadWindow, when: &str| {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let names: Vec<String> = window
            .busiest
            .iter()
            .map(|(name, share)| format!("{name} {}", percent(*share)))
            .collect();
        let names =
            if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
        let others = percent(window.others);
        let held = if is_held(window) {
            format!(", and half a processor or more for {:.1} s of it", window.held_s)
        } else {
            String::new()
        };
        format!("others used {others} of all processors {when} the run{held}{names}")
    };
    let mut why: Vec<String> = vec![];
    for (window, when) in [(during, "during"), (before, "before")] {
        let is_disturbed = window.others > QUIET_SHARE || is_held(window);
        if window.seconds >= JUDGED_S_MIN && is_disturbed {
            why.push(used(window, when));
        }
    }
    match server {
        // What the server itself does is among what others do.
        ServerProcess::Unknown if !why.is_empty() => {
            let why = format!("the server's process is not known, and {}", why.join("; "));
            (None, Some(why))
        }
        _ => (Some(why.is_empty()), (!why.is_empty()).then(|| why.join("; "))),
    }
}

/// Whether others used a processor for long.
fn is_held(window: &LoadWindow) -> bool {
    window.held_s >= HELD_S.max(HELD_SHARE * window.seconds)
}

/// What adds up to a window.
struct Tally {
    began: Instant,
    seconds: f64,
    last: Option<Scan>,
    /// Ticks of all processors: all, busy, the server's, this program's.
    ticks: [u64; 4],
    held_s: f64,
    others: Vec<f64>,
    generator: Vec<f64>,
    mhz: Vec<f64>,
    by_name: BTreeMap<String, u64>,
    load_average: f64,
}

impl Tally {
    fn new(first: Option<Scan>) -> Self {
        Self {
            began: Instant::now(),
            seconds: 0.0,
            last: first,
            ticks: [0; 4],
            held_s: 0.0,
            others: vec![],
            generator: vec![],
            mhz: vec![],
            by_name: BTreeMap::new(),
            load_average: 0.0,
        }
    }

    fn add(&mut self, scan: &Scan, server: ServerProcess) {
        self.seconds = self.began.elapsed().as_secs_f64();
        self.load_average = scan.load_average;
        self.mhz.extend(scan.mhz);
        let Some(last) = self.last.replace(scan.clone()) else { return };
        let total = scan.total.saturating_sub(last.total);
        if total == 0 {
            return;
        }
        let busy = total.saturating_sub(scan.idle.saturating_sub(last.idle));
        let (mut of_server, mut of_generator) = (0, 0);
        let tree = server.pid().map(|pid| scan.tree(pid)).unwrap_or_default();
        for (pid, process) in &scan.processes {
            let before = last.processes.get(pid).filter(|before| before.started == process.started);
            let ticks = process.ticks.saturating_sub(before.map_or(0, |before| before.ticks));
            if *pid == scan.own_pid {
                of_generator += ticks;
            } else if tree.contains(pid) {
                of_server += ticks;
            } else if ticks > 0 {
                *self.by_name.entry(process.name.clone()).or_default() += ticks;
            }
        }
        let others = busy.saturating_sub(of_server + of_generator);
        self.others.push(share(others, total));
        let n_cpus = f64::from(scan.n_cpus.max(1));
        if share(others, total) * n_cpus >= HELD_CPUS {
            self.held_s += seconds(total) / n_cpus;
        }
        self.generator.push(share(of_generator, total));
        for (sum, ticks) in self.ticks.iter_mut().zip([total, busy, of_server, of_generator]) {
            *sum += ticks;
        }
    }

    fn window(self) -> LoadWindow {
        let [total, busy, server, generator] = self.ticks;
        let mut busiest: Vec<(String, f64)> =
            self.by_name.into_iter().map(|(name, ticks)| (name, share(ticks, total))).collect();
        busiest.sort_by(|a, b| b.1.total_cmp(&a.1));
        // What rounds to nothing is not worth a name.
        busiest.retain(|(_, share)| *share >= 0.005);
        busiest.truncate(N_NAMES);
        LoadWindow {
            seconds: self.seconds,
            load_average: self.load_average,
            busy: share(busy, total),
            server: share(server, total),
            generator: share(generator, total),
            others: share(busy.saturating_sub(server + generator), total),
            held_s: self.held_s,
            others_by_sample: Summary::of(self.others),
            generator_by_sample: Summary::of(self.generator),
            busiest,
            mhz: Summary::of(self.mhz),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "ticks stay far below 2^52")]
fn seconds(ticks: u64) -> f64 {
    ticks as f64 / TICKS_PER_S
}

#[expect(clippy::cast_precision_loss, reason = "ticks stay far below 2^52")]
fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}

#[cfg(test)]
mod tests;
