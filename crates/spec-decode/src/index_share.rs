//! Whether draft steps share one selection of keys (`index_share_for_mtp_iteration`).

use std::fmt;

/// What a user wants of index sharing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IndexShare {
    /// What the checkpoint's config says.
    #[default]
    Auto,
    /// Share, whatever the config says; refused where nothing can be shared.
    On,
    /// Run the indexer at every draft step.
    Off,
}

impl fmt::Display for IndexShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        })
    }
}

/// How drafts are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DraftMethod {
    /// No drafts are made.
    None,
    /// The checkpoint's own MTP layers.
    Mtp,
    /// A separate draft model over the target's hidden states, such as EAGLE or EAGLE-3.
    Eagle,
}

/// What decides whether draft steps share a selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexShareFacts {
    /// How drafts are made.
    pub method: DraftMethod,
    /// The config's `index_share_for_mtp_iteration`.
    pub config_flag: bool,
    /// The config's `index_topk`; `None` where attention is dense.
    pub index_topk: Option<usize>,
    /// Whether the draft model takes a selection instead of running its indexer.
    pub draft_model_can_share: bool,
}

impl IndexShareFacts {
    /// Whether a selection can be shared at all, whatever the config says of it; the error says
    /// what is missing.
    ///
    /// # Errors
    ///
    /// The first reason against it.
    pub fn can_share(&self) -> Result<(), &'static str> {
        if self.method == DraftMethod::None {
            Err("no drafts are made (num_speculative_tokens is 0)")
        } else if self.method != DraftMethod::Mtp {
            Err("drafts do not come from MTP layers")
        } else if self.index_topk.is_none() {
            Err("the config has no index_topk: attention is dense and has no indexer")
        } else if !self.draft_model_can_share {
            Err("the draft model cannot reuse a selection")
        } else {
            Ok(())
        }
    }

    /// Whether the config alone turns sharing on: drafts come from MTP layers, the flag is set,
    /// attention is sparse, and the draft model can share.
    #[must_use]
    pub fn is_on_by_config(&self) -> bool {
        self.config_flag && self.can_share().is_ok()
    }
}

impl IndexShare {
    /// Whether draft steps after the first reuse its selection.
    ///
    /// # Errors
    ///
    /// If sharing is asked for ([`IndexShare::On`]) and impossible; the text says why.
    pub fn resolve(self, facts: &IndexShareFacts) -> Result<bool, &'static str> {
        match self {
            Self::Auto => Ok(facts.is_on_by_config()),
            Self::On => facts.can_share().map(|()| true),
            Self::Off => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(
        method: DraftMethod,
        config_flag: bool,
        index_topk: Option<usize>,
        draft_model_can_share: bool,
    ) -> IndexShareFacts {
        IndexShareFacts { method, config_flag, index_topk, draft_model_can_share }
    }

    #[test]
    fn four_gates_decide_and_the_user_overrides_the_flag_only() {
        use DraftMethod::{Eagle, Mtp, None as Off};
        let topk = Some(2048);
        // (facts, auto, on), with off always off.
        let table = [
            (facts(Mtp, true, topk, true), true, true),
            (facts(Mtp, false, topk, true), false, true),
            (facts(Eagle, true, topk, true), false, false),
            (facts(Mtp, true, None, true), false, false),
            (facts(Mtp, true, topk, false), false, false),
            (facts(Off, true, topk, true), false, false),
        ];
        for (facts, auto, on) in table {
            assert_eq!(facts.is_on_by_config(), auto, "{facts:?}");
            assert_eq!(IndexShare::Auto.resolve(&facts), Ok(auto), "{facts:?}");
            assert_eq!(IndexShare::On.resolve(&facts).is_ok(), on, "{facts:?}");
            assert_eq!(IndexShare::Off.resolve(&facts), Ok(false), "{facts:?}");
        }
    }
}
