//! Runs the simulation from the command line: `engine-sim [--seeds N] [--start S] [--seed N]`.

use std::process::ExitCode;

use engine_sim::run_seeds;

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "it is a command")]
fn main() -> ExitCode {
    let (mut start, mut n_seeds) = (0, 2_000);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().and_then(|value| value.parse::<u64>().ok());
        match (flag.as_str(), value) {
            ("--seeds", Some(n)) => n_seeds = n,
            ("--start", Some(seed)) => start = seed,
            ("--seed", Some(seed)) => (start, n_seeds) = (seed, 1),
            _ => {
                eprintln!("usage: engine-sim [--seeds N] [--start S] [--seed N]");
                return ExitCode::from(2);
            }
        }
    }
    println!("{}", run_seeds(start..start.saturating_add(n_seeds)));
    ExitCode::SUCCESS
}
