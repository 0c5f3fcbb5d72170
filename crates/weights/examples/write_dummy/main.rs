//! Writes a checkpoint for a folder's config: dummy weights, for benches of loading, or with
//! `--sparse` shards of the right size with nothing behind their headers, which take no room.
//!
//! ```text
//! cargo run --release -p weights --example write_dummy -- CONFIG_DIR OUT_DIR [--sparse]
//! ```

mod shards;

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use model_config::ModelConfig;

use crate::shards::{Fill, write_checkpoint};

fn main() -> Result<()> {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let (flags, dirs): (Vec<_>, Vec<_>) =
        args.into_iter().partition(|arg| arg.to_string_lossy().starts_with("--"));
    ensure!(flags.iter().all(|flag| flag == "--sparse"), "the only flag is --sparse");
    let mut dirs = dirs.into_iter().map(PathBuf::from);
    let (from, to) = dirs.next().zip(dirs.next()).context("give CONFIG_DIR and OUT_DIR")?;
    std::fs::create_dir_all(&to)?;
    std::fs::copy(from.join("config.json"), to.join("config.json"))?;
    let fill = if flags.is_empty() { Fill::Dummy } else { Fill::Nothing };
    Ok(write_checkpoint(&to, &ModelConfig::load(&from)?, fill)?)
}
