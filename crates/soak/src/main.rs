//! The program `soak`.

use std::process::ExitCode;

use clap::Parser as _;

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "it is a command")]
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match soak::run(&soak::Args::parse()).await {
        Ok((report, as_expected)) => {
            println!("{report}");
            if as_expected { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(fault) => {
            eprintln!("error: {fault}");
            ExitCode::FAILURE
        }
    }
}
