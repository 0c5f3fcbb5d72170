//! What the server says of itself, and the system of its process, second by second.

use std::fs;
use std::time::{Duration, Instant};

use grpc_api::control::v1::{GetStatsRequest, GetStatsResponse};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::connection::Connection;

/// Samples of the first part of a run are left out of what is told of its memory.
const WARM_UP: f64 = 0.2;

/// One second.
#[derive(Clone, Copy, Debug)]
struct Sample {
    minutes: f64,
    /// Resident memory in MiB, open files and threads, where the process is known.
    process: Option<[f64; 3]>,
    engine: [f64; 4],
}

const PROCESS: [&str; 3] = ["resident memory, MiB", "open files", "threads"];
const ENGINE: [&str; 4] =
    ["running requests", "waiting requests", "used KV blocks", "preempted requests"];

/// The samples of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<Sample>);

impl Samples {
    /// Takes a sample each second, for ever.
    pub(crate) async fn take(&mut self, control: &Connection, pid: Option<u32>) -> String {
        let start = Instant::now();
        loop {
            let stats = match stats(control).await {
                Ok(stats) => stats,
                Err(fault) => return fault,
            };
            self.0.push(Sample {
                minutes: start.elapsed().as_secs_f64() / 60.0,
                process: pid.and_then(process),
                engine: [
                    stats.running_requests,
                    stats.waiting_requests,
                    stats.used_blocks,
                    stats.preempted_requests,
                ]
                .map(f64::from),
            });
            sleep(Duration::from_secs(1)).await;
        }
    }

    /// A Markdown table: what was seen after the warm-up, and how memory moved.
    pub(crate) fn table(&self) -> String {
        let mut table = "| each second, warm-up apart | min | median | max | slope a minute |\n\
             |---|---:|---:|---:|---:|\n"
            .to_owned();
        for (name, points) in self.rows() {
            let Some([min, median, max]) = spread(&points) else { continue };
            let slope = slope(&points);
            table += &format!("| {name} | {min:.1} | {median:.1} | {max:.1} | {slope:+.3} |\n");
        }
        table
    }

    pub(crate) fn json(&self) -> Value {
        let row = |(name, points): (_, Vec<(f64, f64)>)| {
            let (spread, slope) = (spread(&points), slope(&points));
            json!({ "name": name, "spread": spread, "slope": slope })
        };
        let memory = |sample: &Sample| sample.process.map(|process| process[0]);
        let n_minutes = self.0.last().map_or(0, |last| last.minutes as usize + 1);
        let of_minute = |minute: usize| {
            let within = self.0.iter().filter(|sample| sample.minutes as usize == minute);
            let points: Vec<_> = within.filter_map(memory).map(|value| (0.0, value)).collect();
            spread(&points)
        };
        json!({
            "rows": self.rows().into_iter().map(row).collect::<Vec<_>>(),
            "memory_by_minute": (0..n_minutes).map(of_minute).collect::<Vec<_>>(),
        })
    }

    /// Each quantity's name and values over time, in minutes.
    fn rows(&self) -> Vec<(&'static str, Vec<(f64, f64)>)> {
        let start = self.0.last().map_or(0.0, |last| last.minutes * WARM_UP);
        let warm = || self.0.iter().filter(move |sample| sample.minutes >= start);
        let of_process = |idx: usize| {
            let points = warm().filter_map(|sample| Some((sample.minutes, sample.process?[idx])));
            (PROCESS[idx], points.collect())
        };
        let of_engine = |idx: usize| {
            let points = warm().map(|sample| (sample.minutes, sample.engine[idx]));
            (ENGINE[idx], points.collect())
        };
        (0..PROCESS.len()).map(of_process).chain((0..ENGINE.len()).map(of_engine)).collect()
    }
}

pub(crate) async fn stats(control: &Connection) -> Result<GetStatsResponse, String> {
    let stats = control.control().get_stats(GetStatsRequest {}).await;
    Ok(stats.map_err(|status| format!("no statistics: {status:?}"))?.into_inner())
}

/// Whether the engine has nothing to do and holds nothing.
pub(crate) fn is_empty(stats: &GetStatsResponse) -> bool {
    stats.running_requests == 0 && stats.waiting_requests == 0 && stats.used_blocks == 0
}

/// Resident memory in MiB, open files and threads of a process.
fn process(pid: u32) -> Option<[f64; 3]> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| -> Option<f64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let n_files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    Some([field("VmRSS:")? / 1024.0, n_files as f64, field("Threads:")?])
}

/// Least, middle and greatest value.
pub(crate) fn spread(points: &[(f64, f64)]) -> Option<[f64; 3]> {
    let mut values: Vec<f64> = points.iter().map(|(_, value)| *value).collect();
    values.sort_by(f64::total_cmp);
    Some([*values.first()?, values[values.len() / 2], *values.last()?])
}

/// The slope of the straight line that fits best; 0 where no line does.
fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / n;
    let mean_y = points.iter().map(|(_, y)| y).sum::<f64>() / n;
    let variance: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let covariance: f64 = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    if variance > 0.0 { covariance / variance } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_and_spreads_are_those_of_the_points() {
        let line: Vec<_> = (0..9).map(|x| (f64::from(x), 3.0 - 2.0 * f64::from(x))).collect();
        assert!((slope(&line) + 2.0).abs() < 1e-9);
        assert_eq!(spread(&line), Some([-13.0, -5.0, 3.0]));
        assert_eq!((slope(&line[..1]), slope(&[]), spread(&[])), (0.0, 0.0, None));
    }

    #[test]
    fn a_process_has_memory_files_and_threads() {
        let [memory, n_files, n_threads] = process(std::process::id()).unwrap();
        assert!(memory > 0.5 && n_files >= 3.0 && n_threads >= 1.0);
        assert_eq!(process(u32::MAX), None);
    }
}
