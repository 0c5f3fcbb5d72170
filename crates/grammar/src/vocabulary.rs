//! A tokenizer's vocabulary, as the parser searches it.

use std::sync::Arc;

use engine_types::TokenId;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use tokenization::Tokenizer;

use crate::error::GrammarError;

/// Which ids there are, and which of them end an output.
pub(crate) struct Vocabulary {
    n_ids: u32,
    end_ids: Vec<TokenId>,
}

impl Vocabulary {
    /// The vocabulary and its search tree.
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        end_ids: &[TokenId],
    ) -> Result<(Self, TokEnv), GrammarError> {
        let n_ids = tokenizer.n_ids();
        let Some(first) = end_ids.first() else { return Err(GrammarError::NoEndId) };
        if let Some(id) = end_ids.iter().find(|id| **id >= n_ids) {
            return Err(GrammarError::EndIdOutsideVocab { id: *id, n_ids });
        }
        let words: Vec<Vec<u8>> =
            (0..n_ids).map(|id| word(tokenizer, id, end_ids.contains(&id))).collect();
        let trie = TokTrie::from(&TokRxInfo::new(n_ids, *first), &words).with_eos_tokens(end_ids);
        // Any tokens that spell a text may follow, not only those that the tokenizer would choose:
        // otherwise a draft that spells it differently would be refused, and masks and drafts
        // would disagree.
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        Ok((Self { n_ids, end_ids: end_ids.to_vec() }, environment))
    }

    pub(crate) fn n_ids(&self) -> u32 {
        self.n_ids
    }

    pub(crate) fn end_ids(&self) -> &[TokenId] {
        &self.end_ids
    }
}

/// What a token stands for in the search tree. Special tokens are no text: a byte that no text has
/// sets them apart, and a Lark grammar may name them in angle brackets.
fn word(tokenizer: &Tokenizer, id: TokenId, is_end: bool) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    if !is_end && !tokenizer.is_special(id) {
        return bytes.to_vec();
    }
    let name = String::from_utf8_lossy(bytes);
    let name = name.trim_start_matches('<').trim_end_matches('>');
    [&[TokTrie::SPECIAL_TOKEN_MARKER, b'<'], name.as_bytes(), b">"].concat()
}
