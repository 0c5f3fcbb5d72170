//! A compiled constraint at some place of an output.

use std::fmt;
use std::sync::Arc;

use engine_types::{Guide, TokenId};
use llguidance::Matcher;
use llguidance::api::StopReason;

use crate::grammars::first_part;
use crate::vocabulary::Vocabulary;

/// Follows one output.
///
/// The parser is bounded in what it may spend on one token. Where it runs out, nothing may follow
/// at that place, so that the request fails if it goes there. It can go back from there: a draft
/// that leads there does no harm.
pub(crate) struct LlGuide {
    matcher: Matcher,
    /// The compiled constraint, which is copied and never run.
    start: Arc<Matcher>,
    /// What was accepted since, without an end-of-sequence id.
    tokens: Vec<TokenId>,
    vocabulary: Arc<Vocabulary>,
    /// Whether the last token was an end-of-sequence id. The parser does not see these.
    has_ended: bool,
    /// Where the parser gave up last, as the number of tokens before, and why.
    gave_up: Option<(usize, String)>,
}

impl LlGuide {
    pub(crate) fn new(start: Arc<Matcher>, vocabulary: Arc<Vocabulary>) -> Self {
        let matcher = start.deep_clone();
        Self { matcher, start, tokens: vec![], vocabulary, has_ended: false, gave_up: None }
    }

    /// Takes a step of the parser; `None` where it gives up, and then it stays where it is.
    ///
    /// Part of what it may spend is counted from mask to mask or over its whole life, with what it
    /// tried in vain. Therefore it has a second try, in which only the accepted tokens count.
    fn attempt<T, E: fmt::Display>(
        &mut self,
        step: impl Fn(&mut Matcher) -> Result<T, E>,
    ) -> Option<T> {
        if let Ok(done) = step(&mut self.matcher) {
            return Some(done);
        }
        self.rebuild();
        // A mask gives it new fuel. If it fails, so does the step.
        drop(self.matcher.compute_mask());
        match step(&mut self.matcher) {
            Ok(done) => Some(done),
            Err(error) => {
                let why = first_part(&error.to_string()).to_owned();
                tracing::warn!("a request's grammar allows nothing at a place: {why}");
                self.gave_up = Some((self.tokens.len(), why));
                self.rebuild();
                None
            }
        }
    }

    /// Replaces a parser that has given up, which cannot go back. The new one has given up as well
    /// if the accepted tokens are too much for it.
    fn rebuild(&mut self) {
        // Masks give it fuel on the way, but take long and are seldom needed.
        for with_masks in [false, true] {
            self.matcher = self.start.deep_clone();
            let replayed = self.tokens.iter().try_for_each(|token| {
                if with_masks {
                    self.matcher.compute_mask()?;
                }
                self.matcher.consume_token(*token)
            });
            if replayed.is_ok() {
                return;
            }
        }
    }

    fn can_end(&mut self) -> bool {
        !self.has_ended && self.attempt(Matcher::is_accepting).unwrap_or(false)
    }
}

impl Guide for LlGuide {
    /// Nothing that changes is shared with the original, so that no request's masks depend on
    /// another's work.
    fn clone_guide(&self) -> Box<dyn Guide> {
        Box::new(Self {
            matcher: self.matcher.deep_clone(),
            start: Arc::clone(&self.start),
            tokens: self.tokens.clone(),
            vocabulary: Arc::clone(&self.vocabulary),
            has_ended: self.has_ended,
            gave_up: self.gave_up.clone(),
        })
    }

    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(0);
        let can_end = self.has_ended || self.can_end();
        if !self.has_ended && !self.matcher.is_stopped() {
            let Some(allowed) = self.attempt(Matcher::compute_mask) else { return };
            for (word, allowed) in mask.iter_mut().zip(allowed.as_slice()) {
                *word = *allowed;
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
        if self.is_complete() || token >= self.vocabulary.n_ids() {
            return false;
        }
        let n_accepted = self.attempt(|matcher| matcher.try_consume_tokens(&[token]));
        let is_accepted = n_accepted == Some(1);
        self.tokens.extend(is_accepted.then_some(token));
        is_accepted
    }

    fn go_back(&mut self, n_tokens: usize) {
        let n_ends = usize::from(self.has_ended && n_tokens > 0);
        self.has_ended = self.has_ended && n_tokens == 0;
        let n_tokens = n_tokens - n_ends;
        self.tokens.truncate(self.tokens.len().saturating_sub(n_tokens));
        if self.matcher.rollback(n_tokens).is_err() {
            self.rebuild();
        }
    }

    fn failure(&self) -> Option<String> {
        let (place, why) = self.gave_up.as_ref()?;
        let is_passed = *place < self.tokens.len();
        (!is_passed).then(|| format!("the grammar is too complex: {why}; simplify it"))
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
