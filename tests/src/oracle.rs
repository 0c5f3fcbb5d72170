//! The reference values under `tests/data`, made by a plain float32 implementation without cache.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use engine_types::TokenId;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use spec_decode::IndexShare;

/// A bundled checkpoint that the reference has values of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checkpoint {
    /// Dense attention.
    TinyDsv3,
    /// Sparse attention with `index_topk` 64, and drafts that share a selection of keys.
    TinyGlm52,
}

impl Checkpoint {
    /// Its bundled name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TinyDsv3 => "tiny-dsv3",
            Self::TinyGlm52 => "tiny-glm52",
        }
    }

    /// Its folder.
    ///
    /// # Errors
    ///
    /// If it is not there.
    pub fn dir(self) -> Result<PathBuf> {
        Ok(bundled_checkpoints::resolve(self.name(), None)?)
    }

    /// The ways in which its draft steps can select keys; one where it has nothing to select.
    #[must_use]
    pub fn index_shares(self) -> &'static [IndexShare] {
        match self {
            Self::TinyDsv3 => &[IndexShare::Auto],
            Self::TinyGlm52 => &[IndexShare::Auto, IndexShare::Off],
        }
    }

    /// Its 14 cases; the last two have prompts of 331 and 795 tokens, the others of less than 40.
    ///
    /// # Errors
    ///
    /// If the file is absent or has another shape.
    pub fn cases(self) -> Result<Vec<Case>> {
        self.read("cases.json")
    }

    /// The text of all cases, each prompt followed by its greedy continuation: about two thousand
    /// tokens of Python code.
    ///
    /// # Errors
    ///
    /// As [`Self::cases`].
    pub fn text(self) -> Result<Vec<TokenId>> {
        let both = |case: Case| [case.prompt_ids, case.greedy_ids].concat();
        Ok(self.cases()?.into_iter().flat_map(both).collect())
    }

    /// Its draft probes.
    ///
    /// # Errors
    ///
    /// If the file is absent or has another shape.
    pub fn probe_sets(self) -> Result<Vec<ProbeSet>> {
        self.read("draft_probes.json")
    }

    fn read<T: DeserializeOwned>(self, name: &str) -> Result<T> {
        let path = data_dir().join(format!("oracle-{}", self.name())).join(name);
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("parse {}", path.display()))
    }
}

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
    /// How far the logit of each of its tokens is above the next one.
    pub top2_margins: Vec<f64>,
    /// Log probability of each prompt token after the first.
    pub prompt_logprobs: Vec<f64>,
    first_drafts: Vec<TokenId>,
    first_drafts_without_index_share: Option<Vec<TokenId>>,
    speculation: HashMap<String, Speculation>,
}

impl Case {
    /// The reference's limit of generated tokens; one case ends before it.
    #[must_use]
    pub fn max_tokens(&self) -> u32 {
        if self.is_long() { 32 } else { 48 }
    }

    /// Whether its prompt is much longer than the `index_topk` of `tiny-glm52`.
    #[must_use]
    pub fn is_long(&self) -> bool {
        self.prompt_ids.len() >= 100
    }

    /// The three drafts behind the first generated token.
    #[must_use]
    pub fn first_drafts(&self, index_share: IndexShare) -> &[TokenId] {
        choose(index_share, &self.first_drafts, self.first_drafts_without_index_share.as_deref())
    }

    /// How `k` drafts a step fare, for the `k` of which the reference tells it: 1 and 3.
    #[must_use]
    pub fn speculation(&self, k: u32, index_share: IndexShare) -> Option<&Speculation> {
        let shared = self.speculation.get(&format!("k={k}"))?;
        let unshared = self.speculation.get(&format!("k={k},no_index_share"));
        Some(choose(index_share, shared, unshared))
    }
}

/// How drafts of one width fare on a case.
#[derive(Clone, Debug, PartialEq, Deserialize)]
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
    drafts: Vec<TokenId>,
    drafts_without_index_share: Option<Vec<TokenId>>,
}

impl Probe {
    /// The three drafts behind the greedy token.
    #[must_use]
    pub fn drafts(&self, index_share: IndexShare) -> &[TokenId] {
        choose(index_share, &self.drafts, self.drafts_without_index_share.as_deref())
    }
}

/// The value without sharing where that is asked for and the reference tells it apart.
fn choose<'a, T: ?Sized>(index_share: IndexShare, shared: &'a T, unshared: Option<&'a T>) -> &'a T {
    match index_share {
        IndexShare::Auto | IndexShare::On => shared,
        IndexShare::Off => unshared.unwrap_or(shared),
    }
}

/// The folder with the tests' data.
#[must_use]
pub fn data_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data")
}
