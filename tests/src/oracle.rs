//! The reference values under `tests/data`, made by a plain float32 implementation without cache.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use engine_types::TokenId;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// One prompt with everything that greedy decoding of it must yield.
#[derive(Clone, Debug, Deserialize)]
pub struct Case {
    /// Name of the case.
    pub name: String,
    /// Prompt text.
    pub prompt: String,
    /// Prompt token ids.
    pub prompt_ids: Vec<TokenId>,
    /// Greedy continuation.
    pub greedy_ids: Vec<TokenId>,
    /// Its text.
    pub greedy_text: String,
    /// Log probability of each prompt token after the first.
    pub prompt_logprobs: Vec<f64>,
    /// The three drafts behind the first generated token.
    pub first_drafts: Vec<TokenId>,
    /// Acceptance by `k=1` and `k=3`.
    pub speculation: HashMap<String, Speculation>,
}

impl Case {
    /// The reference's limit of generated tokens; one case ends before it.
    #[must_use]
    pub fn max_tokens(&self) -> u32 {
        if self.prompt_ids.len() < 100 { 48 } else { 32 }
    }
}

/// How drafts of one width fare on a case.
#[derive(Clone, Debug, Deserialize)]
pub struct Speculation {
    /// Accepted drafts of each verify step; the limit cuts the last one.
    pub accepted_per_step: Vec<u32>,
    /// `1 +` their mean.
    pub accept_len: f64,
}

/// Drafts at many prefixes of one long prompt.
#[derive(Clone, Debug, Deserialize)]
pub struct ProbeSet {
    /// Name of the case that the prompt is from.
    pub case: String,
    /// The long prompt.
    pub prompt_ids: Vec<TokenId>,
    /// The probes.
    pub probes: Vec<Probe>,
}

/// What follows one prefix.
#[derive(Clone, Debug, Deserialize)]
pub struct Probe {
    /// Length of the prefix.
    pub prefix_len: usize,
    /// The target's greedy token.
    pub next_token: TokenId,
    /// The three drafts behind it.
    pub drafts: Vec<TokenId>,
}

/// The folder with the tests' data.
#[must_use]
pub fn data_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data")
}

/// The cases of `tiny-dsv3`.
///
/// # Errors
///
/// If the file is absent or has another shape.
pub fn cases() -> Result<Vec<Case>> {
    read("oracle-tiny-dsv3/cases.json")
}

/// The draft probes of `tiny-dsv3`.
///
/// # Errors
///
/// If the file is absent or has another shape.
pub fn probe_sets() -> Result<Vec<ProbeSet>> {
    read("oracle-tiny-dsv3/draft_probes.json")
}

fn read<T: DeserializeOwned>(name: &str) -> Result<T> {
    let path = data_dir().join(name);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("parse {}", path.display()))
}
