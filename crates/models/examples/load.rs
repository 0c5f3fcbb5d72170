//! Loads a checkpoint and prints how long that took and what memory it took at most.
//!
//! ```text
//! cargo run --release -p models --example load -- DIR [bfloat16|float32]
//! ```

#![expect(clippy::print_stdout, reason = "its result goes to standard output")]

use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use models::{ComputeDtype, LoadOptions};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().context("give a checkpoint folder")?;
    let dtype = match args.next().as_deref() {
        None | Some("bfloat16") => ComputeDtype::Bfloat16,
        Some("float32") => ComputeDtype::Float32,
        Some(other) => bail!("{other}: give bfloat16 or float32"),
    };
    tch::set_num_threads(1);
    let start = Instant::now();
    let model = models::load(dir.as_ref(), LoadOptions { dtype, ..LoadOptions::default() })?;
    let seconds = start.elapsed().as_secs_f64();
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mib = |field: &str| {
        let line = status.lines().find(|line| line.starts_with(field));
        let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        kib.unwrap_or(0) / 1024
    };
    // In memory at most, and now: of its own, and of mapped files.
    println!(
        "{}",
        serde_json::json!({
            "seconds": seconds, "peak_mib": mib("VmHWM"), "anon_mib": mib("RssAnon"),
            "file_mib": mib("RssFile"), "layers": model.num_cache_layers(),
        })
    );
    Ok(())
}
