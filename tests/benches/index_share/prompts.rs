//! Prompts of any length from the text of the reference cases.

use anyhow::{Result, ensure};
use engine_types::TokenId;
use integration_tests::oracle::Checkpoint;

/// `n` different prompts of `length` tokens.
///
/// The text of the cases is read as a circle, from `n` evenly spaced places on, so that long
/// prompts have much in common; without a prefix cache nothing in the engine makes use of that.
pub(crate) fn of_length(length: usize, n: usize) -> Result<Vec<Vec<TokenId>>> {
    let text = Checkpoint::TinyGlm52.text()?;
    ensure!(n <= text.len(), "at most {} different prompts", text.len());
    let start = |idx: usize| idx * text.len() / n;
    let prompt = |idx| text.iter().copied().cycle().skip(start(idx)).take(length).collect();
    Ok((0..n).map(prompt).collect())
}
