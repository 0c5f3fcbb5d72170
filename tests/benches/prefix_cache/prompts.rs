//! Prompts that begin alike.

use std::collections::HashSet;

use anyhow::{Result, ensure};
use engine_types::TokenId;
use integration_tests::oracle::Checkpoint;

/// `n` prompts: the same `prefix_len` tokens from the text of the reference cases, then
/// `suffix_len` tokens each from places spread over the rest of that text. No two of these begin
/// with the same token, so that the prefix is all that prompts have in common.
pub(crate) fn with_prefix(
    prefix_len: usize,
    suffix_len: usize,
    n: usize,
) -> Result<Vec<Vec<TokenId>>> {
    let text = Checkpoint::TinyGlm52.text()?;
    let n_tokens = text.len();
    ensure!(prefix_len > 0 && suffix_len > 0, "a prefix and a suffix have tokens");
    ensure!(prefix_len + suffix_len <= n_tokens, "there are {n_tokens} tokens of text");
    let (prefix, rest) = text.split_at(prefix_len);
    let mut seen = HashSet::new();
    let suffixes = rest.windows(suffix_len).filter(|suffix| seen.insert(suffix[0]));
    let suffixes: Vec<&[TokenId]> = suffixes.collect();
    ensure!(n <= suffixes.len(), "at most {} different prompts", suffixes.len());
    let prompt = |idx| [prefix, suffixes[idx * suffixes.len() / n]].concat();
    Ok((0..n).map(prompt).collect())
}
