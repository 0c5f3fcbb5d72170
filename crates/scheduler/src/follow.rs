//! What a request's grammar and stop texts say of its tokens.

use engine_types::{FinishReason, TokenId};

use crate::commit::Commit;
use crate::entry::Entry;

impl Entry {
    /// Whether the request has a grammar or stop texts.
    pub(crate) fn is_followed(&self) -> bool {
        self.guide.is_some() || self.stop_texts.is_some()
    }

    /// Lets the request's grammar and stop texts follow the tokens that `commit` keeps of `run`,
    /// and cuts it where they end the request before.
    pub(crate) fn follow(&mut self, run: &[TokenId], commit: Commit) -> Commit {
        let n_before = self.generated().len();
        for (idx, token) in run[..commit.n_kept].iter().enumerate() {
            let n_kept = idx + 1;
            let is_free = n_before + n_kept >= self.params.min_tokens as usize;
            if let Some(reason) = self.follow_one(*token, is_free) {
                let is_failure = matches!(reason, FinishReason::Failed(_));
                // An end by the token itself is the more exact reason.
                if n_kept < commit.n_kept || is_failure || !is_by_token(commit.reason.as_ref()) {
                    return Commit { n_kept, reason: Some(reason) };
                }
            }
        }
        commit
    }

    /// Goes on by one token; returns why the request ends with it, if it does.
    fn follow_one(&mut self, token: TokenId, is_free: bool) -> Option<FinishReason> {
        let text = self.stop_texts.as_mut().and_then(|texts| texts.0.push(token));
        if let Some(index) = text.filter(|_| is_free) {
            return Some(FinishReason::StopText(index));
        }
        let guide = &mut self.guide.as_mut()?.0;
        if !guide.accept(token) {
            let forbidden =
                || format!("token {token} was chosen, which the request's grammar forbids");
            return Some(FinishReason::Failed(guide.failure().unwrap_or_else(forbidden)));
        }
        guide.is_complete().then_some(FinishReason::GrammarComplete)
    }

    /// How many of the proposals, from the first on, the request's grammar allows.
    pub(crate) fn n_allowed_drafts(&mut self) -> u32 {
        let Some(guide) = &mut self.guide else { return self.drafts.len() as u32 };
        let n_allowed = self.drafts.iter().take_while(|draft| guide.0.accept(**draft)).count();
        guide.0.go_back(n_allowed);
        n_allowed as u32
    }

    /// Appends the masks of the choices behind the committed tokens and behind each of the first
    /// `n_draft` proposals, `n_words` words each. A grammar that gives up on the way allows nothing
    /// from there on.
    pub(crate) fn fill_masks(&mut self, n_draft: u32, n_words: usize, masks: &mut Vec<u32>) {
        let drafts = self.drafts;
        let Some(guide) = &mut self.guide else { return };
        let (start, n_draft) = (masks.len(), n_draft as usize);
        masks.resize(start + (n_draft + 1) * n_words, 0);
        let mut n_followed = 0;
        for (choice, mask) in masks[start..].chunks_exact_mut(n_words).enumerate() {
            guide.0.fill_mask(mask);
            if choice == n_draft || !guide.0.accept(drafts[choice]) {
                break;
            }
            n_followed += 1;
        }
        guide.0.go_back(n_followed);
    }
}

/// Whether the last token itself, or the tokens before it, are an end.
fn is_by_token(reason: Option<&FinishReason>) -> bool {
    use FinishReason::{Eos, StopSequence, StopToken};
    matches!(reason, Some(Eos(_) | StopToken(_) | StopSequence(_)))
}
