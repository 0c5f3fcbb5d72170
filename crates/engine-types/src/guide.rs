//! What follows a request's tokens from outside: grammars and stop texts.

use std::fmt;

use crate::ids::TokenId;

/// A grammar at some place of its text: which tokens may follow.
///
/// It is a state machine over the request's generated tokens, without clock or randomness.
pub trait Guide: Send + fmt::Debug {
    /// A guide at the same place.
    fn clone_guide(&self) -> Box<dyn Guide>;

    /// Fills `mask` with one bit for each id, the lowest bit of the first word for id 0: whether
    /// that token may follow. An end-of-sequence id may where the text can end.
    fn fill_mask(&mut self, mask: &mut [u32]);

    /// Goes on by a token, and says whether it may follow here; if not, nothing changes.
    fn accept(&mut self, token: TokenId) -> bool;

    /// Goes back by `n_tokens` tokens, which were accepted last.
    fn go_back(&mut self, n_tokens: usize);

    /// Whether the text can only end here.
    fn is_complete(&mut self) -> bool;

    /// Why nothing may follow here, or behind tokens from here on that were tried, where that is
    /// for a limit of the guide and not for the grammar. Read it where the request fails.
    fn failure(&self) -> Option<String> {
        None
    }
}

/// Looks for texts that end a request in the text of its tokens.
pub trait StopTexts: Send + fmt::Debug {
    /// Detectors in the same state.
    fn clone_stop_texts(&self) -> Box<dyn StopTexts>;

    /// Goes on by a generated token; returns which of the texts it completes, if any: the one that
    /// begins first, and of those the first that was asked for.
    fn push(&mut self, token: TokenId) -> Option<usize>;
}

/// A boxed [`Guide`] that can be cloned with its request.
#[derive(Debug)]
pub struct BoxedGuide(pub Box<dyn Guide>);

/// Boxed [`StopTexts`] that can be cloned with their request.
#[derive(Debug)]
pub struct BoxedStopTexts(pub Box<dyn StopTexts>);

impl Clone for BoxedGuide {
    fn clone(&self) -> Self {
        Self(self.0.clone_guide())
    }
}

impl Clone for BoxedStopTexts {
    fn clone(&self) -> Self {
        Self(self.0.clone_stop_texts())
    }
}
