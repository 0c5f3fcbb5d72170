//! Ids to text, one at a time.

use std::sync::Arc;

use engine_types::TokenId;

use crate::pieces::PieceTable;

/// Decodes a run of ids as they come; see the crate's documentation for what it guarantees.
///
/// Made by [`Tokenizer::incremental_decoder`](crate::Tokenizer::incremental_decoder).
#[derive(Clone, Debug)]
pub struct IncrementalDecoder {
    pieces: Arc<PieceTable>,
    skip_special_tokens: bool,
    /// Whether no token has been decoded yet.
    at_start: bool,
    /// How many characters at the start of the text may still be dropped.
    strip_left: usize,
    /// Bytes of an incomplete character, at most 3 between calls.
    pending: Vec<u8>,
}

impl IncrementalDecoder {
    pub(crate) fn new(pieces: Arc<PieceTable>, skip_special_tokens: bool) -> Self {
        let strip_left = pieces.rules.strip_len;
        Self { pieces, skip_special_tokens, at_start: true, strip_left, pending: vec![] }
    }

    /// Decodes one more id and appends the characters that it completes to `text`.
    pub fn push(&mut self, id: TokenId, text: &mut String) {
        if self.skip_special_tokens && self.pieces.is_special(id) {
            return;
        }
        let Some(bytes) = self.pieces.bytes(id) else { return };
        let is_first = std::mem::replace(&mut self.at_start, false);
        if is_first && self.pieces.rules.drop_first_metaspace {
            self.pending.extend(bytes.iter().filter(|byte| **byte != b' '));
        } else {
            self.pending.extend_from_slice(bytes);
        }
        self.release(text);
    }

    /// Ends the run: an incomplete character becomes one U+FFFD, appended to `text`.
    pub fn finish(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// Moves whole characters, and what can never become one, out of `pending`.
    fn release(&mut self, text: &mut String) {
        let text_start = text.len();
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                continue;
            }
            // The last bytes may be the start of a character whose rest is in the next token.
            let at_end = done + invalid.len() == self.pending.len();
            if at_end && may_continue(invalid) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
        self.pending.drain(..done);
        self.strip(text, text_start);
    }

    /// Drops leading characters of the whole text as the tokenizer's Strip says.
    fn strip(&mut self, text: &mut String, text_start: usize) {
        if self.strip_left == 0 || text.len() == text_start {
            return;
        }
        let (first, c) = (&text[text_start..], self.pieces.rules.strip_char);
        let n_dropped = first.chars().take(self.strip_left).take_while(|&each| each == c).count();
        let n_bytes = n_dropped * c.len_utf8();
        self.strip_left = if n_bytes == first.len() { self.strip_left - n_dropped } else { 0 };
        text.drain(text_start..text_start + n_bytes);
    }
}

/// Whether `bytes`, which are no character, are the beginning of one.
fn may_continue(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
