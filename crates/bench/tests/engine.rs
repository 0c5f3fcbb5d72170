//! An engine in this process as a target: counts, batches, and stopping between them.

use std::sync::Arc;

use bench::{
    Batches, EngineTarget, Load, Measured, Outcome, Plan, Planned, Prompt, Record, Target, Watcher,
    measure, measure_batches,
};
use test_engine::{FAIL_STEP, Setup, TestEngine};
use tokio_util::sync::CancellationToken;

/// Counts what it hears, and stops the rest after so many requests.
struct Heard {
    n_begun: usize,
    n_ended: usize,
    n_most: usize,
    stop: CancellationToken,
}

impl Heard {
    fn new(n_most: usize) -> Self {
        Self { n_begun: 0, n_ended: 0, n_most, stop: CancellationToken::new() }
    }
}

impl Watcher for Heard {
    fn begins(&mut self) {
        self.n_begun += 1;
    }

    fn ended(&mut self, _: &Record) {
        self.n_ended += 1;
        if self.n_ended == self.n_most {
            self.stop.cancel();
        }
    }
}

fn requests(n: u32, max_tokens: u32) -> Arc<[Planned]> {
    (0..n).map(|first| Planned::greedy(Prompt::TokenIds(vec![first, 7]), max_tokens)).collect()
}

fn target(of: &TestEngine) -> Arc<dyn Target> {
    Arc::new(EngineTarget::new(of.frontend.clone()))
}

async fn batches(of: &TestEngine, n_most: usize) -> (Measured, usize, Heard) {
    let batches = Batches { requests: requests(3, 10), n_warmup: 2, n: 4 };
    let mut heard = Heard::new(n_most);
    let stop = heard.stop.clone();
    let measured = measure_batches(&target(of), &batches, &stop, &mut heard).await;
    let (measured, times) = measured.expect("batches are measured");
    (measured, times.len(), heard)
}

#[tokio::test]
async fn an_engine_is_measured_without_a_port() {
    let of = TestEngine::start(Setup::default());
    let mut heard = Heard::new(usize::MAX);
    let load = Load::Closed { concurrency: 2 };
    let plan = Plan { requests: requests(6, 20), load, warm_up: requests(1, 4), seed: 0 };
    let stop = heard.stop.clone();
    let measured = measure(&target(&of), &plan, &stop, &mut heard).await.unwrap();
    assert_eq!((heard.n_begun, heard.n_ended), (1, 6));
    for record in &measured.records {
        assert_eq!((&record.outcome, record.n_prompt), (&Outcome::Completed, 2));
        assert_eq!(record.n_output(), 20);
    }
    let counters = measured.counters.unwrap();
    assert!(counters.decode_steps > 0 && counters.draft_tokens > 0, "{counters:?}");
}

#[tokio::test]
async fn batches_follow_each_other_and_their_times_go_on() {
    let of = TestEngine::start(Setup::default());
    let (measured, n_times, heard) = batches(&of, usize::MAX).await;
    assert_eq!((n_times, heard.n_begun, heard.n_ended), (4, 1, 12));
    assert!(!measured.is_partial);
    let indices: Vec<usize> = measured.records.iter().map(|record| record.index).collect();
    assert_eq!(indices, (0..12).collect::<Vec<_>>());
    for two in measured.records.chunks(3).collect::<Vec<_>>().windows(2) {
        let ended = two[0].iter().map(|record| record.ended).max().unwrap();
        assert!(two[1].iter().all(|record| record.due >= ended), "{two:?}");
    }
    // Those of the warm-up are not in it.
    let n_tokens: u32 = measured.records.iter().map(Record::n_output).sum();
    assert_eq!(n_tokens, 120);
}

#[tokio::test]
async fn batches_that_are_stopped_keep_the_whole_ones() {
    let of = TestEngine::start(Setup::default());
    let (measured, n_times, _) = batches(&of, 6).await;
    assert!(measured.is_partial);
    assert_eq!((n_times, measured.records.len()), (2, 6));
}

#[tokio::test]
async fn a_failure_in_the_warm_up_ends_the_measurement() {
    let of = TestEngine::start(Setup::default());
    of.fault.store(FAIL_STEP, std::sync::atomic::Ordering::SeqCst);
    let batches = Batches { requests: requests(1, 4), n_warmup: 1, n: 1 };
    let mut heard = Heard::new(usize::MAX);
    let stop = heard.stop.clone();
    let failure = measure_batches(&target(&of), &batches, &stop, &mut heard).await.unwrap_err();
    assert!(failure.message.contains("warm-up") && failure.message.contains("no luck"));
    assert_eq!(heard.n_begun, 0);
}
