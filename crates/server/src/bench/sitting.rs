//! One sitting: runs in their order, what the machine did meanwhile, and progress.

use std::fs;
use std::path::Path;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bench::{
    Batches, Build, GeneratorLoad, Load, MachineLoad, Measured, Metrics, Monitor, Outcome, Plan,
    Progress, Provenance, Record, ResultFile, RunResult, Series, Slo, Summary, Watcher, Workload,
    measure, measure_batches,
};
use tokio_util::sync::CancellationToken;

use super::args::Output;
use super::asked::Asked;
use super::drive::Context;
use super::subject::Subject;
use super::{Interrupted, complain, extras};
use crate::{output, program};

/// How long the machine is looked at before a run.
const BEFORE: Duration = Duration::from_secs(2);
/// How often progress is told where requests end, and where none does.
const PROGRESS: Duration = Duration::from_secs(1);
const NO_PROGRESS: Duration = Duration::from_secs(5);

/// What is the same for the runs of a command.
pub(super) struct Sitting<'a> {
    pub(super) result: ResultFile,
    pub(super) stop: CancellationToken,
    pub(super) slo: Slo,
    output: &'a Output,
    /// Why the runs ended early.
    fault: Option<anyhow::Error>,
}

/// One run.
#[derive(Clone)]
pub(super) struct Run<'a> {
    /// The setting's name.
    pub(super) name: String,
    /// The server's name in the result.
    pub(super) label: String,
    pub(super) subject: &'a Subject,
    pub(super) load: Load,
    pub(super) repeat: u32,
    pub(super) asked: Asked,
}

impl<'a> Sitting<'a> {
    /// Begins, before anything is started: refuses an output that cannot be written at the end.
    pub(super) fn new(context: Context, output: &'a Output, title: &str) -> Result<Self> {
        if let Some(path) = output.path() {
            ensure_writable(&path).with_context(|| format!("--output {}", path.display()))?;
        }
        let Context { settings, stop } = context;
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let build = Build::of_this_program(program::version());
        let title = output.title.as_deref().unwrap_or(title);
        let result = ResultFile::new(Provenance::now(build, &arguments, settings), title);
        Ok(Self { result, stop, slo: Slo::default(), output, fault: None })
    }

    /// Measures the runs in this order, until the sitting is stopped or one has a fault, which
    /// [`Self::end`] tells: it loses nothing of the runs before.
    pub(super) async fn measure_all(&mut self, runs: &[Run<'_>]) {
        let mut whole = Whole::new(runs.iter().map(|run| run.asked.weight()).sum());
        for (idx, run) in runs.iter().enumerate() {
            if self.stop.is_cancelled() || self.fault.is_some() {
                break;
            }
            let (n, label, name) = (runs.len(), &run.label, &run.name);
            complain(&format!("run {} of {n}: {label}, {name}", idx + 1));
            self.fault = self.measure(run, &mut whole).await.err();
        }
        if self.stop.is_cancelled() || self.fault.is_some() {
            self.result.mark_partial();
        }
    }

    /// Looks at the machine from some time before a run on; none once the sitting is stopped.
    async fn monitor(&self, subject: &Subject) -> Option<Monitor> {
        let monitor = Monitor::start(subject.process);
        tokio::select! {
            () = self.stop.cancelled() => None,
            () = tokio::time::sleep(BEFORE) => Some(monitor),
        }
    }

    async fn measure(&mut self, run: &Run<'_>, whole: &mut Whole) -> Result<()> {
        let Run { subject, asked, .. } = run;
        let Some(monitor) = self.monitor(subject).await else { return Ok(()) };
        let shown = Shown::new(&monitor, asked.requests.len(), whole, asked.weight());
        let (requests, warm_up) = (asked.requests.clone(), asked.warm_up.clone());
        let plan = Plan { requests, load: run.load, warm_up, seed: asked.seed };
        let mut watcher = &shown;
        let measuring = measure(&subject.target, &plan, &self.stop, &mut watcher);
        let measured = shown.during(measuring).await;
        whole.done += asked.weight();
        let machine = monitor.finish();
        let measured = measured.with_context(|| run.label.clone())?;
        subject.check()?;
        let is_cut = |record: &Record| record.outcome == Outcome::Cut;
        if self.stop.is_cancelled() && measured.records.iter().all(is_cut) {
            return Ok(());
        }
        let metrics = Metrics::of(&measured.records, &self.slo);
        self.push(run, Figures { measured, metrics, machine, batch_ms: None })
    }

    /// Measures the requests of a run as batches, each of them all at once.
    pub(super) async fn measure_batches(&mut self, run: &Run<'_>, batches: Batches) -> Result<()> {
        let target = &run.subject.target;
        complain(&format!("{}, {}", run.label, run.name));
        let Some(monitor) = self.monitor(run.subject).await else { return Ok(()) };
        let whole = Whole::new(1.0);
        let n_requests = batches.n * batches.requests.len();
        let shown = Shown::new(&monitor, n_requests, &whole, 1.0);
        let mut watcher = &shown;
        let measuring = measure_batches(target, &batches, &self.stop, &mut watcher);
        let measured = shown.during(measuring).await;
        let machine = monitor.finish();
        let (measured, times) = measured?;
        if times.is_empty() && self.stop.is_cancelled() {
            return Ok(());
        }
        let metrics = Metrics::of(&measured.records, &self.slo);
        let batch_ms = Summary::of(times.iter().map(|time| time.as_secs_f64() * 1e3));
        self.push(run, Figures { measured, metrics, machine, batch_ms })
    }

    /// Keeps what a run came to.
    fn push(&mut self, run: &Run<'_>, figures: Figures) -> Result<()> {
        let Figures { measured, metrics, machine, batch_ms } = figures;
        let Run { name, label, subject, load, repeat, asked } = run;
        let tick_lag = measured.tick_lag_p99_ms;
        let generator = GeneratorLoad::of(&machine, subject.process, &metrics, tick_lag);
        if measured.is_partial {
            self.result.mark_partial();
        }
        self.result.push(RunResult {
            name: name.clone(),
            server: label.clone(),
            load: *load,
            workload: Workload::of(asked.description.clone(), &asked.requests),
            repeat: *repeat,
            seed: asked.seed,
            n_warmup: u32::try_from(asked.warm_up.len()).unwrap_or(u32::MAX),
            kept_prompts: measured.kept_prompts,
            slo: self.slo,
            metrics,
            counters: measured.counters,
            machine,
            generator,
            is_partial: measured.is_partial,
            batch_ms,
            series: Series::with_steps(&measured.records, &measured.steps),
            records: self.output.save_detailed.then_some(measured.records),
        })?;
        Ok(())
    }

    /// Writes the files of what was measured and prints it, nothing if nothing was; then tells why
    /// it is not all.
    pub(super) fn end(self) -> Result<()> {
        let is_stopped = self.stop.is_cancelled();
        if !self.result.runs().is_empty() {
            // Whatever becomes of the one is no reason not to do the other.
            let written = self.write();
            self.print().and(written)?;
        }
        if is_stopped {
            return Err(Interrupted.into());
        }
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        if self.result.runs().iter().all(|run| run.metrics.n_completed == 0) {
            bail!("no request was completed");
        }
        Ok(())
    }

    fn write(&self) -> Result<()> {
        let Some(path) = self.output.path() else { return Ok(()) };
        self.result.write(&path)?;
        write_reports(&self.result, &path)
    }

    fn print(&self) -> Result<()> {
        output::text(&format!("{}\n", extras::markdown(&self.result)))?;
        match extras::percentiles(&self.result, self.output) {
            Some(table) => output::text(&format!("{table}\n")),
            None => Ok(()),
        }
    }
}

/// Makes the folder of a result and sees whether a file can be written there.
fn ensure_writable(path: &Path) -> Result<()> {
    let is_report = path.extension().is_some_and(|name| name == "md" || name == "html");
    ensure!(!is_report, "the .md and the .html lie beside the JSON: name that");
    ensure!(!path.is_dir(), "it is a folder");
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    let trial = path.with_extension(format!("{}.trial", std::process::id()));
    fs::write(&trial, "").and_then(|()| fs::remove_file(&trial))?;
    Ok(())
}

/// What a run came to.
struct Figures {
    measured: Measured,
    metrics: Metrics,
    machine: MachineLoad,
    batch_ms: Option<Summary>,
}

/// Writes the Markdown and HTML beside a result's JSON.
pub(super) fn write_reports(result: &ResultFile, path: &Path) -> Result<()> {
    for (extension, text) in [("md", extras::markdown(result)), ("html", ::bench::html(result)?)] {
        let path = path.with_extension(extension);
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// How far the whole sitting has come, in the unit of [`Asked::weight`].
struct Whole {
    began: Instant,
    all: f64,
    done: f64,
}

impl Whole {
    fn new(all: f64) -> Self {
        Self { began: Instant::now(), all, done: 0.0 }
    }

    /// How long the rest takes if it goes on like this, with so much more done than is counted;
    /// nothing while nothing is.
    fn left(&self, more: f64) -> String {
        let done = self.done + more;
        if done <= 0.0 {
            return String::new();
        }
        let seconds = self.began.elapsed().as_secs_f64() / done * (self.all - done).max(0.0);
        match seconds {
            seconds if seconds < 90.0 => format!(", about {seconds:.0} s left in all"),
            seconds => format!(", about {:.0} min left in all", seconds / 60.0),
        }
    }
}

/// Shows progress, and tells the monitor when a run begins.
struct Shown<'a> {
    monitor: &'a Monitor,
    n_requests: usize,
    whole: &'a Whole,
    weight: f64,
    state: Mutex<State>,
}

struct State {
    /// None during the warm-up.
    progress: Option<Progress>,
    n_ended: usize,
    told: Instant,
}

impl<'a> Shown<'a> {
    fn new(monitor: &'a Monitor, n_requests: usize, whole: &'a Whole, weight: f64) -> Self {
        let state = State { progress: None, n_ended: 0, told: Instant::now() };
        Self { monitor, n_requests, whole, weight, state: Mutex::new(state) }
    }

    /// Waits for what is measured, and tells how it goes even if no request ends.
    async fn during<T>(&self, measuring: impl Future<Output = T>) -> T {
        let mut measuring = pin!(measuring);
        let mut every = tokio::time::interval(NO_PROGRESS);
        loop {
            tokio::select! {
                measured = &mut measuring => return measured,
                _ = every.tick() => self.tell(&mut self.state(), NO_PROGRESS),
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells how it goes, if that was not told for so long.
    fn tell(&self, state: &mut State, after: Duration) {
        let State { progress, n_ended, told } = state;
        match progress {
            None => complain("  warming up"),
            Some(progress) if told.elapsed() >= after => {
                let share = *n_ended as f64 / self.n_requests.max(1) as f64;
                let left = self.whole.left(share * self.weight);
                complain(&format!("  {}{left}", progress.line()));
                *told = Instant::now();
            }
            Some(_) => {}
        }
    }
}

impl Watcher for &Shown<'_> {
    fn begins(&mut self) {
        self.monitor.begin();
        let progress = Some(Progress::new(self.n_requests));
        *self.state() = State { progress, n_ended: 0, told: Instant::now() };
    }

    fn ended(&mut self, record: &Record) {
        let mut state = self.state();
        if let Some(progress) = &mut state.progress {
            progress.add(record);
            state.n_ended += 1;
            self.tell(&mut state, PROGRESS);
        }
    }
}
