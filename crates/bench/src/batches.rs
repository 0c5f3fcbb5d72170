//! A fixed batch again and again: what a server takes for the whole of it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::record::{Outcome, Record};
use crate::run::run_closed;
use crate::session::{Measured, SETTLE, Watcher, counted_after};
use crate::target::{Failure, Target};
use crate::ticker::Ticker;
use crate::workload::Planned;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Batches {
    /// Requests that are sent at once; the next batch follows when all of them have ended.
    pub requests: Arc<[Planned]>,
    /// Batches that are not measured, and come before the others.
    pub n_warmup: usize,
    /// Batches that are.
    pub n: usize,
}

/// Measures batches. The times of records go on from batch to batch, without what is between them.
/// Returns the time of each whole batch beside the rest; once `stop` is cancelled, what there is
/// then is the result.
///
/// # Errors
///
/// If the warm-up fails, if the server does not tell its counts before the run, or if it was
/// started anew meanwhile.
pub async fn measure_batches(
    target: &Arc<dyn Target>,
    batches: &Batches,
    stop: &CancellationToken,
    watcher: &mut dyn Watcher,
) -> Result<(Measured, Vec<Duration>), Failure> {
    for _ in 0..batches.n_warmup {
        for record in run_batch(target, batches, stop).await.0 {
            if let Outcome::Failed { class, message } = record.outcome {
                return Err(Failure::new(class, format!("the warm-up failed: {message}")));
            }
        }
    }
    sleep(SETTLE).await;
    let before = target.counters().await?;
    watcher.begins();
    let (mut records, mut times): (Vec<Record>, Vec<Duration>) = (vec![], vec![]);
    let (mut start, mut kept_prompts) = (Duration::ZERO, false);
    let ticker = Ticker::start();
    for idx in 0..batches.n {
        let (batch, kept) = run_batch(target, batches, stop).await;
        kept_prompts |= kept;
        let took = batch.iter().map(|record| record.ended).max().unwrap_or_default();
        if !batch.is_empty() && batch.iter().all(|record| record.outcome == Outcome::Completed) {
            times.push(took);
        }
        for record in batch {
            let record = moved(record, idx * batches.requests.len(), start);
            watcher.ended(&record);
            records.push(record);
        }
        start += took;
    }
    let tick_lag_p99_ms = ticker.finish();
    sleep(SETTLE).await;
    let after = counted_after(target).await;
    let counters = after.zip(before).map(|(after, before)| after.since(&before)).transpose()?;
    let is_partial = times.len() < batches.n && stop.is_cancelled();
    let steps = vec![];
    let measured = Measured { records, counters, kept_prompts, tick_lag_p99_ms, steps, is_partial };
    Ok((measured, times))
}

/// One batch, and whether the server may know its prompts; nothing once it is stopped. A server
/// that fails to forget loses no run.
async fn run_batch(
    target: &Arc<dyn Target>,
    batches: &Batches,
    stop: &CancellationToken,
) -> (Vec<Record>, bool) {
    if stop.is_cancelled() {
        return (vec![], false);
    }
    let kept_prompts = !target.forget_prompts().await.unwrap_or(false);
    let (sender, mut ended) = mpsc::unbounded_channel();
    let requests = Arc::clone(&batches.requests);
    let n = requests.len();
    run_closed(Arc::clone(target), requests, n, stop.clone(), sender).await;
    let mut records = vec![];
    while let Some(record) = ended.recv().await {
        records.push(record);
    }
    records.sort_by_key(|record| record.index);
    (records, kept_prompts)
}

/// A record of a batch that begins later.
fn moved(mut record: Record, index: usize, by: Duration) -> Record {
    record.index += index;
    for time in [&mut record.due, &mut record.sent, &mut record.ended] {
        *time += by;
    }
    for message in &mut record.messages {
        message.at += by;
    }
    record
}
