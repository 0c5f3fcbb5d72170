//! Runs against a mock server whose timing is scripted, in simulated time: the truth is known, and
//! every figure must be within 1 % of it.

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

mod server;
mod truth;

use std::sync::Arc;
use std::time::Duration;

use bench::{GrpcTarget, Metrics, Planned, Prompt, Record, Slo, run_closed, run_open};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::truth::Script;

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

#[tokio::test(start_paused = true)]
async fn a_closed_loop_is_measured_right_at_any_concurrency() {
    let script = Script::default();
    for concurrency in [1, 4, 16, 64, 256] {
        let n = u32::try_from(4 * concurrency).unwrap().max(100);
        let (sender, ended) = mpsc::unbounded_channel();
        let target = target(script).await;
        run_closed(target, requests(n), concurrency, CancellationToken::new(), sender).await;
        let measured = Metrics::of(&read(ended).await, &Slo::default());
        let truth = Metrics::of(&script.closed(n, concurrency), &Slo::default());
        truth::assert_close(&measured, &truth);
    }
}

#[tokio::test(start_paused = true)]
async fn an_open_loop_waits_for_nobody() {
    // A server that takes one request at a time, and a load of twice what it can take.
    let script = Script { one_at_a_time: true };
    let due: Vec<Duration> = (0..60).map(|i| Duration::from_millis(40 * i)).collect();
    let (sender, ended) = mpsc::unbounded_channel();
    let target = target(script).await;
    run_open(target, requests(60), due.clone(), CancellationToken::new(), sender).await;
    let records = read(ended).await;
    for (record, due) in records.iter().zip(&due) {
        let lag = record.sent.saturating_sub(*due);
        assert!(record.due == *due && lag <= Duration::from_millis(2), "{record:?}");
    }
    let measured = Metrics::of(&records, &Slo::default());
    truth::assert_close(&measured, &Metrics::of(&script.open(&due), &Slo::default()));
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
