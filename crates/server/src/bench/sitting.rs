//! One sitting: runs in their order, what the machine did meanwhile, and progress.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bench::{
    Batches, Build, GeneratorLoad, Load, MachineLoad, Measured, Metrics, Monitor, Outcome, Plan,
    Progress, Provenance, Record, ResultFile, RunResult, Series, Slo, Summary, Watcher, Workload,
    measure, measure_batches,
};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::args::Output;
use super::asked::Asked;
use super::subject::Subject;
use super::{Interrupted, complain, extras};
use crate::{output, program};

/// How long the machine is looked at before a run.
const BEFORE: Duration = Duration::from_secs(2);
/// How often progress is told.
const PROGRESS: Duration = Duration::from_secs(1);

/// What is the same for the runs of a command.
pub(super) struct Sitting<'a> {
    pub(super) result: ResultFile,
    pub(super) stop: CancellationToken,
    pub(super) seed: u64,
    pub(super) slo: Slo,
    output: &'a Output,
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
    pub(super) fn new(
        settings: Value,
        output: &'a Output,
        title: &str,
        stop: CancellationToken,
    ) -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let build = Build::of_this_program(program::version());
        let title = output.title.as_deref().unwrap_or(title);
        let result = ResultFile::new(Provenance::now(build, &arguments, settings), title);
        Self { result, stop, seed: 0, slo: Slo::default(), output }
    }

    /// Measures the runs in this order, until the sitting is stopped.
    pub(super) async fn measure_all(&mut self, runs: &[Run<'_>]) -> Result<()> {
        let mut whole = Whole::new(runs.iter().map(|run| run.asked.weight()).sum());
        for (idx, run) in runs.iter().enumerate() {
            if self.stop.is_cancelled() {
                break;
            }
            let (n, label, name) = (runs.len(), &run.label, &run.name);
            complain(&format!("run {} of {n}: {label}, {name}", idx + 1));
            self.measure(run, &mut whole).await?;
        }
        if self.stop.is_cancelled() {
            self.result.mark_partial();
        }
        Ok(())
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
        let mut watcher = Shown::new(&monitor, asked.requests.len(), whole, asked.weight());
        let (requests, warm_up) = (asked.requests.clone(), asked.warm_up.clone());
        let plan = Plan { requests, load: run.load, warm_up, seed: self.seed };
        let measured = measure(&subject.target, &plan, &self.stop, &mut watcher).await;
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
        let mut watcher = Shown::new(&monitor, n_requests, &whole, 1.0);
        let measured = measure_batches(target, &batches, &self.stop, &mut watcher).await;
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
            seed: self.seed,
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

    /// Prints what was measured and writes its files; nothing if nothing was.
    pub(super) fn end(self, subjects: &[&Subject]) -> Result<()> {
        for subject in subjects {
            subject.check()?;
        }
        let is_stopped = self.stop.is_cancelled();
        if is_stopped && self.result.runs().is_empty() {
            return Err(Interrupted.into());
        }
        output::text(&format!("{}\n", extras::markdown(&self.result)))?;
        if let Some(table) = extras::percentiles(&self.result, self.output) {
            output::text(&format!("{table}\n"))?;
        }
        if let Some(path) = &self.output.output {
            self.result.write(path)?;
            write_reports(&self.result, path)?;
        }
        if is_stopped { Err(Interrupted.into()) } else { Ok(()) }
    }
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
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
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

    /// How long the rest takes if it goes on like this, with so much more done than is counted.
    fn left(&self, more: f64) -> String {
        let done = self.done + more;
        let seconds = self.began.elapsed().as_secs_f64() / done * (self.all - done).max(0.0);
        match seconds {
            seconds if seconds < 90.0 => format!("about {seconds:.0} s left in all"),
            seconds => format!("about {:.0} min left in all", seconds / 60.0),
        }
    }
}

/// Shows progress once a second, and tells the monitor when a run begins.
struct Shown<'a> {
    monitor: &'a Monitor,
    n_requests: usize,
    n_ended: usize,
    progress: Option<Progress>,
    told: Instant,
    whole: &'a Whole,
    weight: f64,
}

impl<'a> Shown<'a> {
    fn new(monitor: &'a Monitor, n_requests: usize, whole: &'a Whole, weight: f64) -> Self {
        let told = Instant::now();
        Self { monitor, n_requests, n_ended: 0, progress: None, told, whole, weight }
    }
}

impl Watcher for Shown<'_> {
    fn begins(&mut self) {
        self.monitor.begin();
        self.progress = Some(Progress::new(self.n_requests));
        self.told = Instant::now();
    }

    fn ended(&mut self, record: &Record) {
        let Some(progress) = &mut self.progress else { return };
        progress.add(record);
        self.n_ended += 1;
        if self.told.elapsed() >= PROGRESS {
            let share = self.n_ended as f64 / self.n_requests.max(1) as f64;
            let left = self.whole.left(share * self.weight);
            complain(&format!("  {}, {left}", progress.line()));
            self.told = Instant::now();
        }
    }
}
