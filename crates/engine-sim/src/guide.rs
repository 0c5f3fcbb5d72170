//! A grammar and texts to stop at, made of hashes.

use engine_types::{Guide, StopTexts, TokenId};

use crate::rng::mix;

/// Which tokens may follow depends on all tokens before.
#[derive(Clone, Debug)]
pub(crate) struct HashGrammar {
    /// One state for each token so far and one for the start.
    states: Vec<u64>,
    vocab_size: u32,
}

impl HashGrammar {
    pub(crate) fn new(seed: u64, vocab_size: u32) -> Self {
        Self { states: vec![seed], vocab_size }
    }

    fn state(&self) -> u64 {
        *self.states.last().expect("the start is never left")
    }

    /// There always is a token that may follow.
    fn allows(&self, token: TokenId) -> bool {
        let (state, token) = (self.state(), u64::from(token));
        token == state % u64::from(self.vocab_size) || !mix(state, token).is_multiple_of(3)
    }
}

impl Guide for HashGrammar {
    fn clone_guide(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }

    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(0);
        for token in (0..self.vocab_size).filter(|token| self.allows(*token)) {
            mask[(token / u32::BITS) as usize] |= 1 << (token % u32::BITS);
        }
    }

    fn accept(&mut self, token: TokenId) -> bool {
        let is_allowed = self.allows(token);
        if is_allowed {
            self.states.push(mix(self.state(), !u64::from(token)));
        }
        is_allowed
    }

    fn go_back(&mut self, n_tokens: usize) {
        self.states.truncate(self.states.len() - n_tokens);
    }

    fn is_complete(&mut self) -> bool {
        mix(self.state(), 0xe0d).is_multiple_of(32)
    }
}

/// What is chosen where `wanted` would be if any id of `vocab_size` could be: the first one from
/// there on that `mask` allows. An empty mask allows all.
pub(crate) fn choose(wanted: TokenId, mask: &[u32], vocab_size: u32) -> TokenId {
    let is_allowed = |token: &TokenId| {
        mask.is_empty() || mask[(token / u32::BITS) as usize] >> (token % u32::BITS) & 1 == 1
    };
    let mut ids = (wanted..vocab_size).chain(0..wanted);
    ids.find(is_allowed).expect("some token may follow")
}

/// Stop texts of one letter a token.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    pub(crate) words: Vec<Vec<TokenId>>,
    pub(crate) seen: Vec<TokenId>,
}

impl StopTexts for Words {
    fn clone_stop_texts(&self) -> Box<dyn StopTexts> {
        Box::new(self.clone())
    }

    fn push(&mut self, token: TokenId) -> Option<usize> {
        self.seen.push(token);
        let ends = self.words.iter().enumerate().filter(|(_, word)| self.seen.ends_with(word));
        // Of several, the longest one begins first.
        ends.max_by_key(|(idx, word)| (word.len(), usize::MAX - idx)).map(|(idx, _)| idx)
    }
}
