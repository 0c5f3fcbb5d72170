//! An answer on its way, and what is known of it.

use std::time::Instant;

use grpc_api::inference::v1::{FinishReason, GenerationFinished, TokenDelta};

/// An answer. Its figures are counted here, so that one that was stopped has them as well.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) text: String,
    asked: Instant,
    /// When its first tokens came, and how many they were.
    first: Option<(Instant, usize)>,
    last: Instant,
    n_tokens: usize,
    verify_steps: usize,
    n_drafts: usize,
    n_accepted: usize,
    pub(crate) finished: Option<GenerationFinished>,
}

impl Answer {
    pub(crate) fn new() -> Self {
        let asked = Instant::now();
        Self {
            text: String::new(),
            asked,
            first: None,
            last: asked,
            n_tokens: 0,
            verify_steps: 0,
            n_drafts: 0,
            n_accepted: 0,
            finished: None,
        }
    }

    pub(crate) fn push(&mut self, delta: &TokenDelta) {
        self.last = Instant::now();
        self.first.get_or_insert((self.last, delta.token_ids.len()));
        self.text.extend(delta.text_pieces.iter().map(String::as_str));
        self.n_tokens += delta.token_ids.len();
        self.n_drafts += delta.draft_token_ids.len();
        self.n_accepted += delta.n_accepted as usize;
        self.verify_steps += usize::from(!delta.draft_token_ids.is_empty());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.n_tokens == 0
    }

    /// What must be said about its end; an answer that the model ended itself needs no word.
    pub(crate) fn end(&self) -> Option<&'static str> {
        let Some(finished) = &self.finished else { return Some("(stopped)") };
        match finished.finish_reason() {
            FinishReason::MaxTokens => Some("(cut: --max-tokens allows longer answers)"),
            FinishReason::ModelLength => Some(
                "(cut: the conversation is as long as the model takes; /clear begins a new one)",
            ),
            FinishReason::OutOfBlocks => {
                Some("(cut: the engine has no more KV blocks; /clear begins a new conversation)")
            }
            FinishReason::Aborted => Some("(cut: the engine ended it)"),
            _ => None,
        }
    }

    /// Its figures, for `/stats`.
    pub(crate) fn figures(&self) -> String {
        let Some((first, n_first)) = self.first else { return "no token came".to_owned() };
        let wait = (first - self.asked).as_millis();
        let mut text = format!("{} tokens, the first after {wait} ms", self.n_tokens);
        let (n_timed, seconds) = (self.n_tokens - n_first, (self.last - first).as_secs_f64());
        if n_timed > 0 && seconds > 0.0 {
            text += &format!(", then {:.1} tokens/s", n_timed as f64 / seconds);
        }
        if let Some(usage) = self.finished.as_ref().and_then(|finished| finished.usage) {
            let (prompt, cached) = (usage.prompt_tokens, usage.cached_prompt_tokens);
            text += &format!("\n{prompt} prompt tokens, {cached} of them from the prefix cache");
        }
        if self.verify_steps > 0 {
            let length = 1.0 + self.n_accepted as f64 / self.verify_steps as f64;
            text += &format!(
                "\nacceptance length {length:.2}: {} of {} drafts accepted in {} verify steps",
                self.n_accepted, self.n_drafts, self.verify_steps
            );
        }
        text
    }
}
