//! One measurement: warm-up, the run itself, what the server counted of it.

use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::arrivals::{Load, schedule};
use crate::record::{Outcome, Record};
use crate::run::{run_closed, run_open};
use crate::series::StepCount;
use crate::target::{Counters, Failure, Target};
use crate::ticker::Ticker;
use crate::workload::Planned;

/// How long a server may take until its counts are those of an idle one.
pub(crate) const SETTLE: Duration = Duration::from_millis(200);
/// How long a server may take to tell its counts after a run.
const TELLS_WITHIN: Duration = Duration::from_secs(5);
/// Time between two looks at a server's counts while it is measured: a few small calls a second.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is asked, in this order.
    pub requests: Arc<[Planned]>,
    /// When.
    pub load: Load,
    /// What is asked before, so that the first requests measure no start-up; none of the prompts
    /// that are measured, which a prefix cache would know then.
    pub warm_up: Arc<[Planned]>,
    /// Seed of an open loop's times.
    pub seed: u64,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Measured {
    /// One record a request that was due, in the order of the requests.
    pub records: Vec<Record>,
    /// What the server counted between start and end, if it tells at both; at the end it has 5 s.
    pub counters: Option<Counters>,
    /// Whether it was not made to forget the prompts of what was before.
    pub kept_prompts: bool,
    /// 99th percentile of how late a task of this program that only sleeps woke up, milliseconds.
    pub tick_lag_p99_ms: Option<f64>,
    /// The steps it had done at moments of the run, the first and the last included; none if it
    /// does not tell.
    pub steps: Vec<StepCount>,
    /// Whether the run was stopped before its end.
    pub is_partial: bool,
}

/// Hears how a measurement goes.
pub trait Watcher: Send {
    /// The warm-up is over; what comes now is measured.
    fn begins(&mut self);

    /// A request has ended.
    fn ended(&mut self, record: &Record);
}

/// Measures once. Once `stop` is cancelled nothing more is sent, and what there is then is the
/// result.
///
/// # Errors
///
/// If the warm-up fails, if the server does not answer what is asked before the run, or if it was
/// started anew meanwhile; requests that fail in the run are counted.
pub async fn measure(
    target: &Arc<dyn Target>,
    plan: &Plan,
    stop: &CancellationToken,
    watcher: &mut dyn Watcher,
) -> Result<Measured, Failure> {
    warm_up(target, plan, stop).await?;
    let kept_prompts = !target.forget_prompts().await?;
    sleep(SETTLE).await;
    let before = target.counters().await?;
    watcher.begins();
    let (looked, mut looks) = mpsc::unbounded_channel();
    let looking = before
        .as_ref()
        .map(|before| tokio::spawn(look(Arc::clone(target), before.clone(), looked)));
    let ticker = Ticker::start();
    let (sender, mut ended) = mpsc::unbounded_channel();
    let run = tokio::spawn(run(Arc::clone(target), plan.clone(), stop.clone(), sender));
    let mut records = vec![];
    while let Some(record) = ended.recv().await {
        watcher.ended(&record);
        records.push(record);
    }
    run.await.expect("a run does not panic");
    let tick_lag_p99_ms = ticker.finish();
    if let Some(looking) = looking {
        looking.abort();
    }
    records.sort_by_key(|record| record.index);
    sleep(SETTLE).await;
    let after = counted_after(target).await;
    let mut steps: Vec<StepCount> = std::iter::from_fn(|| looks.try_recv().ok()).collect();
    let end = records.iter().map(|record| record.ended).max().unwrap_or_default();
    steps.extend(after.as_ref().map(|after| StepCount::new(end, after)));
    let counters = after.zip(before).map(|(after, before)| after.since(&before)).transpose()?;
    let is_partial = stop.is_cancelled() && records.len() < plan.requests.len()
        || records.iter().any(|record| record.outcome == Outcome::Cut);
    Ok(Measured { records, counters, kept_prompts, tick_lag_p99_ms, steps, is_partial })
}

/// What a server counts after a run. A fault loses these counts, and not the run.
pub(crate) async fn counted_after(target: &Arc<dyn Target>) -> Option<Counters> {
    timeout(TELLS_WITHIN, target.counters()).await.ok()?.ok()?
}

async fn run(
    target: Arc<dyn Target>,
    plan: Plan,
    stop: CancellationToken,
    sender: mpsc::UnboundedSender<Record>,
) {
    let Plan { requests, load, seed, .. } = plan;
    match load {
        Load::Closed { concurrency } => {
            run_closed(target, requests, concurrency, stop, sender).await;
        }
        Load::Open { rate, burstiness } => {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let due = schedule(rate, burstiness, requests.len(), &mut rng);
            run_open(target, requests, due, stop, sender).await;
        }
    }
}

/// Looks at a server's counts now and then. A look that takes long is thrown away: nobody knows of
/// which moment it is. One that fails ends nothing; the last one, after the run, tells.
async fn look(target: Arc<dyn Target>, before: Counters, looked: mpsc::UnboundedSender<StepCount>) {
    let began = Instant::now();
    // Whoever reads may have enough.
    let _ = looked.send(StepCount::new(Duration::ZERO, &before));
    loop {
        sleep(LOOK_EVERY).await;
        let asked = Instant::now();
        if let Ok(Some(counters)) = target.counters().await
            && asked.elapsed() < LOOK_EVERY
        {
            let _ = looked.send(StepCount::new(began.elapsed(), &counters));
        }
    }
}

/// Asks what nobody measures; a fault shows here, before anything is measured.
async fn warm_up(
    target: &Arc<dyn Target>,
    plan: &Plan,
    stop: &CancellationToken,
) -> Result<(), Failure> {
    let concurrency = match plan.load {
        Load::Closed { concurrency } => concurrency,
        Load::Open { .. } => plan.warm_up.len().max(1),
    };
    let (sender, mut ended) = mpsc::unbounded_channel();
    let (target, requests) = (Arc::clone(target), plan.warm_up.clone());
    run_closed(target, requests, concurrency, stop.clone(), sender).await;
    while let Some(record) = ended.recv().await {
        if let Outcome::Failed { class, message } = record.outcome {
            return Err(Failure::new(class, format!("the warm-up failed: {message}")));
        }
    }
    Ok(())
}

/// Progress of a run with an estimate of the time that is left.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    started: Instant,
    n_requests: usize,
    n_ended: usize,
    n_failed: usize,
    n_output: u64,
}

impl Progress {
    /// Of a run of so many requests that starts now.
    #[must_use]
    pub fn new(n_requests: usize) -> Self {
        Self { started: Instant::now(), n_requests, n_ended: 0, n_failed: 0, n_output: 0 }
    }

    /// Counts a request that has ended.
    pub fn add(&mut self, record: &Record) {
        self.n_ended += 1;
        self.n_failed += usize::from(record.outcome != Outcome::Completed);
        self.n_output += u64::from(record.n_output());
    }

    /// One line: how many have ended, how many tokens a second there were, and how long the rest
    /// takes if it goes on like this.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^52")]
    pub fn line(&self) -> String {
        let elapsed = self.started.elapsed().as_secs_f64();
        let rate = if elapsed > 0.0 { self.n_output as f64 / elapsed } else { 0.0 };
        let left = match self.n_ended {
            0 => String::new(),
            n => {
                let n_left = self.n_requests.saturating_sub(n);
                format!(", about {:.0} s left", elapsed / n as f64 * n_left as f64)
            }
        };
        let failed = match self.n_failed {
            0 => String::new(),
            n => format!(", {n} failed"),
        };
        format!("{}/{}{failed}, {rate:.0} tokens/s{left}", self.n_ended, self.n_requests)
    }
}
