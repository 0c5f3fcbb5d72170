//! A compiled constraint at some place of an output.

use std::fmt;
use std::sync::Arc;

use engine_types::{Guide, TokenId};
use llguidance::Matcher;
use llguidance::api::StopReason;

use crate::vocabulary::Vocabulary;

/// Follows one output.
///
/// The parser is bounded in what it may spend on one token. Where it runs out, nothing may follow
/// any more: every mask is empty and no token is accepted, so that the request fails.
pub(crate) struct LlGuide {
    matcher: Matcher,
    vocabulary: Arc<Vocabulary>,
    /// Whether the last token was an end-of-sequence id. The parser does not see these.
    has_ended: bool,
}

impl LlGuide {
    pub(crate) fn new(matcher: Matcher, vocabulary: Arc<Vocabulary>) -> Self {
        Self { matcher, vocabulary, has_ended: false }
    }

    /// Says once, in the log, why the parser gave up.
    fn give_up(&self, error: &dyn fmt::Display) {
        tracing::warn!("a request's grammar allows nothing more: {error}");
    }

    fn can_end(&mut self) -> bool {
        !self.has_ended && self.matcher.is_accepting().unwrap_or(false)
    }
}

impl Guide for LlGuide {
    /// Nothing is shared with the original, so that no request's masks depend on another's work.
    fn clone_guide(&self) -> Box<dyn Guide> {
        Box::new(Self {
            matcher: self.matcher.deep_clone(),
            vocabulary: Arc::clone(&self.vocabulary),
            has_ended: self.has_ended,
        })
    }

    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(0);
        if self.matcher.is_error() {
            return;
        }
        let can_end = self.has_ended || self.can_end();
        if !self.has_ended && !self.matcher.is_stopped() {
            match self.matcher.compute_mask() {
                Ok(allowed) => {
                    for (word, allowed) in mask.iter_mut().zip(allowed.as_slice()) {
                        *word = *allowed;
                    }
                }
                Err(error) => return self.give_up(&error),
            }
        }
        for id in self.vocabulary.end_ids() {
            let (word, bit) = (*id / u32::BITS, 1 << (*id % u32::BITS));
            let Some(word) = mask.get_mut(word as usize) else { continue };
            *word = if can_end { *word | bit } else { *word & !bit };
        }
    }

    fn accept(&mut self, token: TokenId) -> bool {
        if self.vocabulary.end_ids().contains(&token) {
            let can_end = self.can_end();
            self.has_ended |= can_end;
            return can_end;
        }
        if self.has_ended || token >= self.vocabulary.n_ids() || self.matcher.is_error() {
            return false;
        }
        match self.matcher.try_consume_tokens(&[token]) {
            Ok(n_accepted) => n_accepted == 1,
            Err(error) => {
                self.give_up(&error);
                false
            }
        }
    }

    fn go_back(&mut self, n_tokens: usize) {
        let n_ends = usize::from(self.has_ended && n_tokens > 0);
        self.has_ended = self.has_ended && n_tokens == 0;
        if self.matcher.is_error() {
            return;
        }
        if let Err(error) = self.matcher.rollback(n_tokens - n_ends) {
            self.give_up(&error);
        }
    }

    fn is_complete(&mut self) -> bool {
        self.has_ended || self.matcher.stop_reason() == StopReason::NoExtension
    }
}

impl fmt::Debug for LlGuide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (has_ended, stop) = (self.has_ended, self.matcher.stop_reason());
        write!(f, "LlGuide {{ has_ended: {has_ended}, stop: {stop} }}")
    }
}
