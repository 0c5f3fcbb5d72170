//! How late this program wakes up while it measures.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::summary::Summary;

/// Time between two ticks.
const EVERY: Duration = Duration::from_millis(10);

/// A task that does nothing but sleep, beside those that send and read: what it is late by, they
/// are late by too, also in a closed loop, which has no schedule that tells.
pub(crate) struct Ticker {
    task: JoinHandle<()>,
    lags: mpsc::UnboundedReceiver<Duration>,
}

impl Ticker {
    /// Ticks from now on in the runtime that this is called in.
    pub(crate) fn start() -> Self {
        let (sender, lags) = mpsc::unbounded_channel();
        let task = tokio::spawn(async move {
            loop {
                let due = Instant::now() + EVERY;
                sleep_until(due).await;
                // Whoever reads may have enough.
                let _ = sender.send(due.elapsed());
            }
        });
        Self { task, lags }
    }

    /// Ends with the 99th percentile of how late it woke up, milliseconds; none without a tick.
    pub(crate) fn finish(mut self) -> Option<f64> {
        self.task.abort();
        let lags = std::iter::from_fn(|| self.lags.try_recv().ok());
        Some(Summary::of(lags.map(|lag| lag.as_secs_f64() * 1e3))?.p99)
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::yield_now;
    use tokio::time::{advance, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_program_that_is_held_up_is_late_by_that_long() {
        let ticker = Ticker::start();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(ticker.finish(), Some(0.0));

        let ticker = Ticker::start();
        yield_now().await;
        advance(Duration::from_millis(50)).await;
        yield_now().await;
        assert_eq!(ticker.finish(), Some(40.0));
        assert_eq!(Ticker::start().finish(), None);
    }
}
