//! Says which libraries of a vendor this machine has: `cargo run --example libraries -- cuda|rocm`.
//! Fails where one is missing that the vendor's packages bring; NVIDIA's driver comes with the GPU.
#![expect(clippy::print_stdout, reason = "an example")]

use std::process::ExitCode;

use anyhow::{Result, bail};
use gpu_runtime::{Api, Libraries};

fn main() -> Result<ExitCode> {
    let api = match std::env::args().nth(1).as_deref() {
        Some("cuda") => Api::Cuda,
        Some("rocm") => Api::Rocm,
        other => bail!("the vendor is cuda or rocm, not {other:?}"),
    };
    let mut is_complete = true;
    for (idx, found) in Libraries::system().needed(api).into_iter().enumerate() {
        is_complete &= found.is_ok() || (api == Api::Cuda && idx == 0);
        match found {
            Ok(file) => println!("{file}: found"),
            Err(error) => println!("{error}"),
        }
    }
    Ok(if is_complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
