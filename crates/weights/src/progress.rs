//! How far loading is.

use std::time::{Duration, Instant};

/// Time between two reports.
const PERIOD: Duration = Duration::from_secs(2);

/// Counts the bytes that were loaded and says in the log now and then how far that is.
#[derive(Debug)]
pub(crate) struct Progress {
    started: Instant,
    reported: Instant,
    n_total: u64,
    n_done: u64,
}

/// What is worth a line in the log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Report {
    pub(crate) n_done: u64,
    pub(crate) seconds: f64,
    pub(crate) is_last: bool,
}

impl Progress {
    pub(crate) fn new(n_total: u64, now: Instant) -> Self {
        Self { started: now, reported: now, n_total, n_done: 0 }
    }

    /// Counts bytes; a report is due every two seconds, and when all are there.
    pub(crate) fn add(&mut self, n_bytes: u64, now: Instant) -> Option<Report> {
        self.n_done += n_bytes;
        let is_last = n_bytes > 0 && self.n_done == self.n_total;
        if !is_last && now.duration_since(self.reported) < PERIOD {
            return None;
        }
        self.reported = now;
        let seconds = now.duration_since(self.started).as_secs_f64();
        Some(Report { n_done: self.n_done, seconds, is_last })
    }

    /// Counts bytes and logs what is due.
    pub(crate) fn log(&mut self, n_bytes: u64) {
        let Some(report) = self.add(n_bytes, Instant::now()) else { return };
        let mib = |n_bytes: u64| n_bytes >> 20;
        let (done, total) = (mib(report.n_done), mib(self.n_total));
        let mib_per_s = (done as f64 / report.seconds.max(1e-3)).round();
        let seconds = (report.seconds * 10.0).round() / 10.0;
        if report.is_last {
            tracing::info!(mib = done, seconds, mib_per_s, "weights loaded");
        } else {
            tracing::info!(mib = done, of_mib = total, seconds, mib_per_s, "loading weights");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_due_every_two_seconds_and_at_the_end() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs_f64(seconds);
        let mut progress = Progress::new(100, start);
        assert_eq!(progress.add(10, at(1.9)), None);
        let report = |n_done, seconds, is_last| Some(Report { n_done, seconds, is_last });
        assert_eq!(progress.add(10, at(2.5)), report(20, 2.5, false));
        assert_eq!(progress.add(10, at(4.0)), None);
        assert_eq!(progress.add(70, at(4.1)), report(100, 4.1, true));
        // What has no bytes ends nothing twice.
        assert_eq!(progress.add(0, at(4.2)), None);
    }
}
