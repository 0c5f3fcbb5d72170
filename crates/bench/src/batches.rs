//! A fixed batch again and again: what a server takes for the whole of it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::record::{Outcome, Record};
use crate::run::run_closed;
use crate::session::{Measured, SETTLE, Watcher};
use crate::target::{Failure, Target};
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
/// If the warm-up fails, or the server does not answer what is asked beside the requests.
pub async fn measure_batches(
    target: &Arc<dyn Target>,
    batches: &Batches,
    stop: &CancellationToken,
    watcher: &mut dyn Watcher,
) -> Result<(Measured, Vec<Duration>), Failure> {
    for _ in 0..batches.n_warmup {
        for record in run_batch(target, batches, stop).await? {
            if let Outcome::Failed { class, message } = record.outcome {
                return Err(Failure::new(class, format!("the warm-up failed: {message}")));
            }
        }
    }
    sleep(SETTLE).await;
    let before = target.counters().await?;
    watcher.begins();
    let (mut records, mut times): (Vec<Record>, Vec<Duration>) = (vec![], vec![]);
    let mut start = Duration::ZERO;
    for idx in 0..batches.n {
        let batch = run_batch(target, batches, stop).await?;
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
    sleep(SETTLE).await;
    let counters = target.counters().await?.zip(before).map(|(after, before)| after.since(&before));
    let is_partial = times.len() < batches.n && stop.is_cancelled();
    Ok((Measured { records, counters, steps: vec![], is_partial }, times))
}

/// One batch, whose prompts the server does not know; nothing once it is stopped.
async fn run_batch(
    target: &Arc<dyn Target>,
    batches: &Batches,
    stop: &CancellationToken,
) -> Result<Vec<Record>, Failure> {
    if stop.is_cancelled() {
        return Ok(vec![]);
    }
    target.forget_prompts().await?;
    let (sender, mut ended) = mpsc::unbounded_channel();
    let requests = Arc::clone(&batches.requests);
    let n = requests.len();
    run_closed(Arc::clone(target), requests, n, stop.clone(), sender).await;
    let mut records = vec![];
    while let Some(record) = ended.recv().await {
        records.push(record);
    }
    records.sort_by_key(|record| record.index);
    Ok(records)
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
