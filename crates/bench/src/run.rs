//! Sending a workload and keeping what comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;

use crate::record::{Arrival, Outcome, Record};
use crate::target::{Failure, Piece, Target, Totals};
use crate::workload::{Planned, Prompt};

/// A clock of the run's own, from its start on.
#[derive(Clone, Copy)]
struct Clock(Instant);

impl Clock {
    fn now(self) -> Duration {
        self.0.elapsed()
    }
}

/// Sends `requests` so that `concurrency` run at a time, and returns a record of each in the order
/// of their ends. Once `stop` is cancelled nothing more is sent, and what runs is cut.
pub async fn run_closed(
    target: Arc<dyn Target>,
    requests: Arc<[Planned]>,
    concurrency: usize,
    stop: CancellationToken,
    ended: mpsc::UnboundedSender<Record>,
) {
    let clock = Clock(Instant::now());
    let next = Arc::new(AtomicUsize::new(0));
    let place = |_| {
        let (target, requests) = (Arc::clone(&target), Arc::clone(&requests));
        let (next, stop, ended) = (Arc::clone(&next), stop.clone(), ended.clone());
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(request) = requests.get(index) else { return };
                let due = clock.now();
                let record = exchange(&*target, request, (index, due), clock, &stop).await;
                // Whoever reads may have enough.
                let _ = ended.send(record);
            }
        })
    };
    for place in (0..concurrency).map(place).collect::<Vec<_>>() {
        place.await.expect("a place does not panic");
    }
}

/// Sends `requests` at the `due` times, whatever the server does, and returns a record of each in
/// the order of their ends. Once `stop` is cancelled nothing more is sent, and what runs is cut.
pub async fn run_open(
    target: Arc<dyn Target>,
    requests: Arc<[Planned]>,
    due: Vec<Duration>,
    stop: CancellationToken,
    ended: mpsc::UnboundedSender<Record>,
) {
    let clock = Clock(Instant::now());
    let mut running = tokio::task::JoinSet::new();
    for (index, due) in due.into_iter().enumerate().take(requests.len()) {
        tokio::select! {
            () = stop.cancelled() => break,
            () = sleep_until(clock.0 + due) => {}
        }
        let (target, requests) = (Arc::clone(&target), Arc::clone(&requests));
        let (stop, ended) = (stop.clone(), ended.clone());
        running.spawn(async move {
            let record = exchange(&*target, &requests[index], (index, due), clock, &stop).await;
            // Whoever reads may have enough.
            let _ = ended.send(record);
        });
        // Those that have ended are forgotten as they come.
        while running.try_join_next().is_some() {}
    }
    while running.join_next().await.is_some() {}
}

/// One request from its sending to its end.
async fn exchange(
    target: &dyn Target,
    request: &Planned,
    (index, due): (usize, Duration),
    clock: Clock,
    stop: &CancellationToken,
) -> Record {
    let sent = clock.now();
    let mut messages = vec![];
    let mut totals = Totals::default();
    let outcome = tokio::select! {
        () = stop.cancelled() => Outcome::Cut,
        read = read(target, request, clock, (&mut messages, &mut totals)) => match read {
            Ok(()) => Outcome::Completed,
            Err(Failure { class, message }) => Outcome::Failed { class, message },
        },
    };
    let ended = clock.now();
    let n_planned = match &request.prompt {
        Prompt::TokenIds(ids) => u32::try_from(ids.len()).unwrap_or(u32::MAX),
        Prompt::Text(_) => 0,
    };
    let n_prompt = totals.n_prompt.unwrap_or(n_planned);
    Record { index, due, sent, messages, ended, outcome, n_prompt }
}

/// Reads an answer to its end.
async fn read(
    target: &dyn Target,
    request: &Planned,
    clock: Clock,
    (messages, totals): (&mut Vec<Arrival>, &mut Totals),
) -> Result<(), Failure> {
    let mut pieces = target.send(request).await?;
    let mut are_told = true;
    while let Some(piece) = pieces.next().await {
        let at = clock.now();
        match piece? {
            Piece::Tokens(n_tokens) => messages.push(Arrival { at, n_tokens }),
            Piece::Text => {
                are_told = false;
                messages.push(Arrival { at, n_tokens: 1 });
            }
            Piece::Finished(of_all) => {
                *totals = of_all;
                if !are_told {
                    share_out(messages, of_all.n_output);
                }
                return Ok(());
            }
        }
    }
    Err(Failure::new("incomplete", "the answer ended without its last message"))
}

/// Gives messages whose tokens were not told their share of the total: evenly, the earlier ones one
/// more where it does not come out even. So the total is right, and gaps by token are means.
fn share_out(messages: &mut [Arrival], n_output: Option<u32>) {
    let (Some(n_output), Ok(n_messages)) = (n_output, u32::try_from(messages.len())) else {
        return;
    };
    if n_messages == 0 || n_output < n_messages {
        return;
    }
    let (each, n_more) = (n_output / n_messages, (n_output % n_messages) as usize);
    for (index, message) in messages.iter_mut().enumerate() {
        message.n_tokens = each + u32::from(index < n_more);
    }
}
