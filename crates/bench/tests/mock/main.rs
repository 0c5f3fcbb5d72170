//! Runs against a mock server whose timing is scripted, in simulated time: the truth is known, and
//! every figure must be within 1 % of it.

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod server;
mod truth;

use std::sync::Arc;
use std::time::Duration;

use bench::{
    GrpcTarget, Load, Measured, Metrics, Outcome, Plan, Planned, Prompt, Record, Series, Slo,
    Summary, Target, Watcher, measure, run_closed, run_open, schedule,
};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::truth::{LIMITS, Life, N_DRAFTS, Script, Step};

/// Requests whose only prompt id is their place.
fn requests(n: u32) -> Arc<[Planned]> {
    let request = |index| Planned::greedy(Prompt::TokenIds(vec![index]), 64);
    (0..n).map(request).collect()
}

async fn read(mut ended: mpsc::UnboundedReceiver<Record>) -> Vec<Record> {
    let mut records = vec![];
    while let Some(record) = ended.recv().await {
        records.push(record);
    }
    records.sort_by_key(|record| record.index);
    records
}

async fn target(script: Script) -> Arc<GrpcTarget> {
    Arc::new(GrpcTarget::over(server::start(script).await, None).unwrap())
}

/// The figures of a run, by the names that the truth gives them.
fn figures(records: &[Record]) -> Vec<(String, f64)> {
    let [ttft_ms, tpot_ms, e2el_ms] = LIMITS.map(Some);
    let metrics = Metrics::of(records, &Slo { ttft_ms, tpot_ms, e2el_ms });
    let count = |n: u64| f64::from(u32::try_from(n).unwrap());
    assert!(metrics.failures.keys().all(|class| class == "Unavailable") && metrics.n_cut == 0);
    let single = [
        ("requests", count(metrics.n_requests)),
        ("completed", count(metrics.n_completed)),
        ("failed", count(metrics.failures.values().sum())),
        ("duration", metrics.duration_s),
        ("output tokens", count(metrics.n_output_tokens)),
        ("requests/s", metrics.request_throughput),
        ("output tokens/s", metrics.output_throughput),
        ("tokens/s", metrics.total_throughput),
        ("goodput", metrics.goodput.unwrap()),
        ("peak", metrics.peak_output_throughput),
        ("concurrency", metrics.mean_concurrency),
    ];
    let summaries = [
        ("ttft", metrics.ttft_ms),
        ("tpot", metrics.tpot_ms),
        ("e2el", metrics.e2el_ms),
        ("itl by message", metrics.itl_message_ms),
        ("itl by token", metrics.itl_token_ms),
        ("tokens a message", metrics.tokens_per_message),
    ];
    let mut figures: Vec<_> = single.map(|(name, value)| (name.to_owned(), value)).to_vec();
    for (name, summary) in summaries {
        let Summary { n, mean, std, min, p50, p90, p95, p99, max } = summary.unwrap();
        let of = [count(n), mean, std, min, p50, p90, p95, p99, max];
        let names = ["n", "mean", "std", "min", "p50", "p90", "p95", "p99", "max"];
        figures.extend(names.iter().zip(of).map(|(of, value)| (format!("{name} {of}"), value)));
    }
    figures
}

/// Asserts that every figure is within 1 % of the truth.
fn assert_true(records: &[Record], lives: &[Life]) {
    let (measured, truth) = (figures(records), truth::figures(lives));
    assert_eq!(measured.len(), truth.len());
    for ((name, measured), (of, truth)) in measured.iter().zip(&truth) {
        assert_eq!(name, of);
        let is_close = (measured - truth).abs() <= 0.01 * truth.abs() + 1e-9;
        assert!(is_close, "{name}: {measured}, the truth is {truth}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_closed_loop_is_measured_right_at_any_concurrency() {
    let script = Script::default();
    for concurrency in [1, 4, 16, 64, 256] {
        let n = u32::try_from(4 * concurrency).unwrap().max(100);
        let (sender, ended) = mpsc::unbounded_channel();
        let target = target(script).await;
        run_closed(target, requests(n), concurrency, CancellationToken::new(), sender).await;
        assert_true(&read(ended).await, &script.closed(n, concurrency));
    }
}

#[tokio::test(start_paused = true)]
async fn an_open_loop_is_measured_right_at_any_rate() {
    let script = Script::default();
    for (rate, burstiness) in [(2.0, 1.0), (40.0, 0.5), (900.0, 4.0)] {
        let due = schedule(rate, burstiness, 300, &mut ChaCha8Rng::seed_from_u64(5));
        // The clock of the test has whole milliseconds.
        let whole = |due: Duration| Duration::from_millis(due.as_millis().try_into().unwrap());
        let due: Vec<Duration> = due.into_iter().map(whole).collect();
        let (sender, ended) = mpsc::unbounded_channel();
        let target = target(script).await;
        run_open(target, requests(300), due.clone(), CancellationToken::new(), sender).await;
        let records = read(ended).await;
        assert!(records.iter().zip(&due).all(|(record, due)| record.due == *due));
        assert_true(&records, &script.open(&due));
    }
}

#[tokio::test(start_paused = true)]
async fn an_open_loop_waits_for_nobody() {
    // A server that takes one request at a time, and a load of twice what it can take.
    let script = Script { one_at_a_time: true, ..Script::default() };
    let due: Vec<Duration> = (0..60).map(|i| Duration::from_millis(40 * i)).collect();
    let (sender, ended) = mpsc::unbounded_channel();
    let target = target(script).await;
    run_open(target, requests(60), due.clone(), CancellationToken::new(), sender).await;
    let records = read(ended).await;
    for (record, due) in records.iter().zip(&due) {
        let lag = record.sent.saturating_sub(*due);
        assert!(record.due == *due && lag <= Duration::from_millis(2), "{record:?}");
    }
    assert_true(&records, &script.open(&due));
}

/// Counts what is told.
#[derive(Default)]
struct Heard {
    n_begun: usize,
    n_ended: usize,
}

impl Watcher for Heard {
    fn begins(&mut self) {
        self.n_begun += 1;
    }

    fn ended(&mut self, record: &Record) {
        assert_ne!(record.outcome, Outcome::Cut);
        self.n_ended += 1;
    }
}

/// A whole measurement, warm-up included.
async fn session(script: Script, n: u32, load: Load) -> Measured {
    let target: Arc<dyn Target> = target(script).await;
    // Those of the warm-up do not fail, but take steps and drafts.
    let warm_up = requests(3);
    let plan = Plan { requests: requests(n), load, warm_up, seed: 5 };
    let mut heard = Heard::default();
    let measured = measure(&target, &plan, &CancellationToken::new(), &mut heard).await.unwrap();
    assert_eq!((heard.n_begun, heard.n_ended), (1, n as usize));
    assert!(!measured.is_partial);
    measured
}

/// Asserts that the server's counts are those of the run alone, and that the timeline has each
/// step, `off` seconds from its time at most.
fn assert_steps_true(measured: &Measured, lives: &[Life], off: f64) {
    let counters = measured.counters.as_ref().unwrap();
    let all = |kind| u64::from(truth::n_steps(lives, kind, f64::INFINITY));
    let kinds = [Step::Decode, Step::Prefill, Step::Mixed];
    let counted = [counters.decode_steps, counters.prefill_steps, counters.mixed_steps];
    assert_eq!(counted, kinds.map(all));
    let later = || lives.iter().flat_map(|life| life.messages.iter().skip(1));
    let (n_verified, n_tokens) =
        later().fold((0_u32, 0), |(steps, all), (_, n)| (steps + 1, all + n));
    let length = f64::from(n_tokens) / f64::from(n_verified);
    for position in 0..N_DRAFTS {
        let n_accepted = later().map(|(_, n)| u64::from(*n > position + 1)).sum::<u64>();
        assert_eq!(counters.drafted_per_position[position as usize], u64::from(n_verified));
        assert_eq!(counters.accepted_per_position[position as usize], n_accepted);
    }
    assert!((counters.acceptance_length().unwrap() - length).abs() < 1e-9);
    let rate = counters.acceptance_rate().unwrap();
    assert!((1.0 + f64::from(N_DRAFTS) * rate - length).abs() < 1e-9);

    let timeline = Series::with_steps(&measured.records, &measured.steps).timeline;
    let rates = [&timeline.steps.decode, &timeline.steps.prefill, &timeline.steps.mixed];
    for (kind, rates) in kinds.into_iter().zip(rates) {
        assert_eq!(rates.len(), timeline.running.len());
        let (mut until, mut n) = (0.0, 0.0);
        for rate in rates {
            until += timeline.part_s;
            n += rate * timeline.part_s;
            let least = f64::from(truth::n_steps(lives, kind, until - off));
            let most = f64::from(truth::n_steps(lives, kind, until + off));
            assert!(least - 1e-6 <= n && n <= most + 1e-6, "{kind:?} at {until}: {n}");
        }
        assert!((n - f64::from(truth::n_steps(lives, kind, f64::INFINITY))).abs() < 1e-6);
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_counts_the_steps_of_its_run_over_time() {
    let script = Script::default();
    let measured = session(script, 200, Load::Closed { concurrency: 16 }).await;
    let lives = script.closed(200, 16);
    assert_true(&measured.records, &lives);
    assert_steps_true(&measured, &lives, 0.3);
    let measured = session(script, 200, Load::Open { rate: 40.0, burstiness: 0.5 }).await;
    let due = schedule(40.0, 0.5, 200, &mut ChaCha8Rng::seed_from_u64(5));
    let lives = script.open(&due);
    assert_true(&measured.records, &lives);
    assert_steps_true(&measured, &lives, 0.3);
}

#[tokio::test(start_paused = true)]
async fn looks_that_take_long_are_thrown_away_and_disturb_nothing() {
    let script = Script { stats_take: Duration::from_millis(300), ..Script::default() };
    let measured = session(script, 200, Load::Closed { concurrency: 16 }).await;
    let lives = script.closed(200, 16);
    assert_true(&measured.records, &lives);
    assert_eq!(measured.steps.len(), 2, "what is known is the start and the end");
    assert_steps_true(&measured, &lives, f64::INFINITY);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_stopped_keeps_what_it_has() {
    let script = Script::default();
    let stop = CancellationToken::new();
    let (sender, ended) = mpsc::unbounded_channel();
    let run =
        tokio::spawn(run_closed(target(script).await, requests(1000), 8, stop.clone(), sender));
    tokio::time::sleep(Duration::from_secs(3)).await;
    stop.cancel();
    run.await.unwrap();
    let metrics = Metrics::of(&read(ended).await, &Slo::default());
    assert!(metrics.n_cut > 0 && metrics.n_cut <= 8, "{metrics:?}");
    assert!(metrics.n_completed > 20 && metrics.duration_s <= 3.0, "{metrics:?}");
}
