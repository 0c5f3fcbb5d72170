//! Runs the simulation from the command line.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use engine_sim::{Summary, run_seed};

const USAGE: &str = "usage: engine-sim [--seeds N] [--minutes M] [--start S] [--seed S]";

/// How many seeds are run unless something else is said.
const N_SEEDS: u64 = 2_000;

/// Time between two lines about how far a run is.
const PROGRESS: Duration = Duration::from_secs(30);

/// Which seeds to run, and for how long.
struct Options {
    start: u64,
    n_seeds: u64,
    limit: Option<Duration>,
}

/// Reads the arguments; `None` where they are wrong.
fn options(args: &[String]) -> Option<Options> {
    let mut options = Options { start: 0, n_seeds: N_SEEDS, limit: None };
    let mut n_seeds = None;
    for pair in args.chunks(2) {
        let [flag, value] = pair else { return None };
        let value = value.parse::<u64>().ok()?;
        match flag.as_str() {
            "--seeds" => n_seeds = Some(value),
            "--minutes" => options.limit = Some(Duration::from_secs(60 * value)),
            "--start" => options.start = value,
            "--seed" => (options.start, n_seeds) = (value, Some(1)),
            _ => return None,
        }
    }
    // Whoever bounds the time alone wants as many seeds as it has room for.
    let unbounded = if options.limit.is_some() { u64::MAX } else { N_SEEDS };
    options.n_seeds = n_seeds.unwrap_or(unbounded);
    Some(options)
}

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "it is a command")]
fn main() -> ExitCode {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let Some(Options { start, n_seeds, limit }) = options(&args) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let began = Instant::now();
    let (mut sum, mut next_report) = (Summary::default(), PROGRESS);
    for seed in start..start.saturating_add(n_seeds) {
        let time = began.elapsed();
        if limit.is_some_and(|limit| time >= limit) {
            break;
        }
        if time >= next_report {
            eprintln!("{:.0} s: {} seeds, {} steps", time.as_secs_f64(), sum.n_seeds, sum.n_steps);
            next_report += PROGRESS;
        }
        sum += run_seed(seed);
    }
    println!("{sum}");
    println!("{:.1} s", began.elapsed().as_secs_f64());
    ExitCode::SUCCESS
}
