//! Sending a workload and keeping what comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;

use crate::record::{Arrival, Counted, Outcome, Record};
use crate::target::{Failure, Piece, Target};
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
    let mut answer = Answer::default();
    let outcome = tokio::select! {
        () = stop.cancelled() => Outcome::Cut,
        read = read(target, request, clock, &mut answer) => match read {
            Ok(()) => Outcome::Completed,
            Err(Failure { class, message }) => Outcome::Failed { class, message },
        },
    };
    let ended = clock.now();
    let n_sent = match &request.prompt {
        Prompt::TokenIds(ids) => u32::try_from(ids.len()).unwrap_or(u32::MAX),
        Prompt::Text(_) => 0,
    };
    let Answer { messages, n_prompt, counted } = answer;
    let n_prompt = n_prompt.unwrap_or(n_sent);
    let n_planned = request.ignore_eos.then_some(request.max_tokens);
    Record { index, due, sent, messages, ended, outcome, n_prompt, n_planned, counted }
}

/// What has come of an answer.
#[derive(Default)]
struct Answer {
    messages: Vec<Arrival>,
    n_prompt: Option<u32>,
    counted: Counted,
}

/// Reads an answer to its end.
async fn read(
    target: &dyn Target,
    request: &Planned,
    clock: Clock,
    answer: &mut Answer,
) -> Result<(), Failure> {
    let mut pieces = target.send(request).await?;
    while let Some(piece) = pieces.next().await {
        let at = clock.now();
        match piece? {
            Piece::Tokens(n_tokens) => answer.messages.push(Arrival { at, n_tokens }),
            Piece::Text => {
                answer.counted = Counted::Messages;
                answer.messages.push(Arrival { at, n_tokens: 1 });
            }
            Piece::Finished(of_all) => {
                answer.n_prompt = of_all.n_prompt;
                let is_untold = answer.counted == Counted::Messages;
                if is_untold && share_out(&mut answer.messages, of_all.n_output) {
                    answer.counted = Counted::Usage;
                }
                return Ok(());
            }
        }
    }
    Err(Failure::new("incomplete", "the answer ended without its last message"))
}

/// Gives messages whose tokens were not told their share of the total: evenly, the earlier ones one
/// more where it does not come out even. So the total is right, and gaps by token are means. False
/// where there is no total, or one that cannot be.
fn share_out(messages: &mut [Arrival], n_output: Option<u32>) -> bool {
    let (Some(n_output), Ok(n_messages)) = (n_output, u32::try_from(messages.len())) else {
        return false;
    };
    if n_messages == 0 || n_output < n_messages {
        return false;
    }
    let (each, n_more) = (n_output / n_messages, (n_output % n_messages) as usize);
    for (index, message) in messages.iter_mut().enumerate() {
        message.n_tokens = each + u32::from(index < n_more);
    }
    true
}
