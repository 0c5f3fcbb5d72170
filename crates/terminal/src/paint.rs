//! How accepted drafts are told from what the target made.

use std::borrow::Cow;

use grpc_api::inference::v1::TokenDelta;

/// How accepted drafts are told from what the target made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paint {
    /// They are green: for terminals.
    Colour,
    /// They stand in ⟦ ⟧: for terminals without colour.
    Marks,
    /// Not at all, and no character is changed: for files and pipes.
    Plain,
}

impl Paint {
    /// The text that a step added.
    #[must_use]
    pub fn delta(self, delta: &TokenDelta) -> String {
        let n_accepted = (delta.n_accepted as usize).min(delta.text_pieces.len());
        let (accepted, target) = delta.text_pieces.split_at(n_accepted);
        format!("{}{}", self.accepted(&accepted.concat()), self.text(&target.concat()))
    }

    fn accepted(self, text: &str) -> String {
        let (open, close) = match self {
            Self::Colour => ("\x1b[32m", "\x1b[39m"),
            Self::Marks => ("⟦", "⟧"),
            Self::Plain => ("", ""),
        };
        if text.is_empty() { String::new() } else { format!("{open}{}{close}", self.text(text)) }
    }

    /// A text of the model. On a terminal, characters that would control it are spelled out.
    pub(crate) fn text(self, text: &str) -> Cow<'_, str> {
        let controls = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
        if self == Self::Plain || !text.contains(controls) {
            return Cow::Borrowed(text);
        }
        let spell = |c: char| if controls(c) { c.escape_default().to_string() } else { c.into() };
        Cow::Owned(text.chars().map(spell).collect())
    }

    /// What the chat says itself.
    pub(crate) fn note(self, text: &str) -> String {
        if self == Self::Colour { format!("\x1b[2m{text}\x1b[22m\n") } else { format!("{text}\n") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(n_accepted: u32, pieces: &[&str]) -> TokenDelta {
        let text_pieces = pieces.iter().map(|piece| (*piece).to_owned()).collect();
        TokenDelta { n_accepted, text_pieces, ..TokenDelta::default() }
    }

    #[test]
    fn accepted_drafts_stand_out() {
        let step = delta(2, &["a", "b", "c"]);
        assert_eq!(Paint::Colour.delta(&step), "\x1b[32mab\x1b[39mc");
        assert_eq!(Paint::Marks.delta(&step), "⟦ab⟧c");
        assert_eq!(Paint::Plain.delta(&step), "abc");
    }

    #[test]
    fn nothing_is_marked_where_no_draft_has_text() {
        for step in [delta(0, &["c"]), delta(1, &["", "c"])] {
            assert_eq!(Paint::Colour.delta(&step), "c");
        }
        // A server without a tokenizer sends no pieces.
        assert_eq!(Paint::Marks.delta(&delta(2, &[])), "");
    }

    #[test]
    fn the_model_cannot_control_the_terminal() {
        let step = delta(1, &["\x1b[2J", "\r\u{9b}x\n\t"]);
        assert_eq!(Paint::Marks.delta(&step), "⟦\\u{1b}[2J⟧\\r\\u{9b}x\n\t");
        assert_eq!(Paint::Plain.delta(&step), "\x1b[2J\r\u{9b}x\n\t");
    }
}
