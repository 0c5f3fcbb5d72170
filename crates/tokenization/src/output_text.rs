//! The text of an output that stop texts may end.

use engine_types::{StopTexts, TokenId};

use crate::decoder::IncrementalDecoder;
use crate::matcher::StopMatcher;

/// Looks for stop texts in the text of ids as they come, in whatever tokens it is cut.
///
/// Made by [`Tokenizer::stop_text_detector`](crate::Tokenizer::stop_text_detector).
#[derive(Clone, Debug)]
pub struct StopTextDetector {
    decoder: IncrementalDecoder,
    matcher: StopMatcher,
    /// The text of the last id; kept for its memory.
    piece: String,
}

impl StopTextDetector {
    pub(crate) fn new(decoder: IncrementalDecoder, texts: &[String]) -> Self {
        Self { decoder, matcher: StopMatcher::new(texts), piece: String::new() }
    }
}

impl StopTexts for StopTextDetector {
    fn clone_stop_texts(&self) -> Box<dyn StopTexts> {
        Box::new(self.clone())
    }

    fn push(&mut self, token: TokenId) -> Option<usize> {
        self.piece.clear();
        self.decoder.push(token, &mut self.piece);
        self.matcher.push(&self.piece).map(|found| found.index)
    }
}

/// Which texts end an output, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopRules {
    /// The stop texts, none of them empty.
    pub texts: Vec<String>,
    /// Whether the text that ends the output belongs to it.
    pub include_stop_text: bool,
    /// Number of tokens before which no text ends the output.
    pub min_tokens: u32,
}

/// Decodes an output's ids to the text that a user sees.
///
/// The text ends where the first stop text begins, or behind it. What may become a stop text is
/// held back until more ids show whether it does; nothing else is. It agrees with a
/// [`StopTextDetector`] of the same texts, which finds the end among the ids.
///
/// Made by [`Tokenizer::output_text`](crate::Tokenizer::output_text).
#[derive(Clone, Debug)]
pub struct OutputText {
    decoder: IncrementalDecoder,
    matcher: StopMatcher,
    include_stop_text: bool,
    min_tokens: u32,
    n_tokens: u32,
    /// Text that was not handed out yet.
    held: String,
    has_ended: bool,
}

impl OutputText {
    pub(crate) fn new(decoder: IncrementalDecoder, rules: &StopRules) -> Self {
        Self {
            decoder,
            matcher: StopMatcher::new(&rules.texts),
            include_stop_text: rules.include_stop_text,
            min_tokens: rules.min_tokens,
            n_tokens: 0,
            held: String::new(),
            has_ended: false,
        }
    }

    /// Decodes one more id and appends what can no longer become a stop text to `text`: nothing
    /// once a stop text was found.
    pub fn push(&mut self, id: TokenId, text: &mut String) {
        self.n_tokens = self.n_tokens.saturating_add(1);
        let n_before = self.held.len();
        self.decoder.push(id, &mut self.held);
        self.look_at(n_before, self.n_tokens >= self.min_tokens);
        let n_held = if self.has_ended { 0 } else { self.matcher.n_held() };
        text.extend(self.held.drain(..self.held.len() - n_held));
    }

    /// Ends the output: appends what was held back, and one U+FFFD if it ends inside a character.
    pub fn finish(&mut self, text: &mut String) {
        let n_before = self.held.len();
        self.decoder.finish(&mut self.held);
        self.look_at(n_before, true);
        text.push_str(&self.held);
        self.held.clear();
    }

    /// Looks for stop texts in what `held` has behind its first `n_before` bytes, and cuts it at
    /// the first one.
    fn look_at(&mut self, n_before: usize, may_end: bool) {
        if self.has_ended {
            self.held.clear();
            return;
        }
        let found = self.matcher.push(&self.held[n_before..]);
        if let Some(found) = found.filter(|_| may_end) {
            let start = n_before.checked_add_signed(found.start);
            let start = start.expect("the beginning of a stop text is held back");
            let end = n_before + found.end;
            self.held.truncate(if self.include_stop_text { end } else { start });
            self.has_ended = true;
        }
    }
}
