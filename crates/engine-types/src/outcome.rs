//! What a step did: per row the accepted run and the drafts for the next step.

use crate::ids::{RequestId, Span, TokenId};
use crate::indexer_stats::IndexerStats;
use crate::sampling::TokenLogprobs;

/// One request's result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutcomeRow {
    /// Whose result this is.
    pub request_id: RequestId,
    /// How many of the row's drafts the target accepted.
    pub n_accepted: u32,
    tokens: Span,
    drafts: Span,
    logprobs: Span,
    prompt_logprobs: Span,
    has_failed: bool,
}

/// One step's result. Every row of the plan has one row here, in any order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutcome {
    /// What the indexers of sparse attention did in this step.
    pub indexer: IndexerStats,
    rows: Vec<OutcomeRow>,
    tokens: Vec<TokenId>,
    drafts: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    failures: Vec<(RequestId, String)>,
}

impl StepOutcome {
    /// Empties the outcome and keeps its buffers.
    pub fn clear(&mut self) {
        self.indexer = IndexerStats::default();
        self.rows.clear();
        self.tokens.clear();
        self.drafts.clear();
        self.logprobs.clear();
        self.failures.clear();
    }

    /// Appends a row.
    ///
    /// `tokens` is the accepted run: `n_accepted` drafts that the target confirmed, then the one
    /// token that the target adds (recovered on a rejection, bonus if all passed). It is empty
    /// exactly for rows that do not sample, or continue a row of a failed step. `drafts` are
    /// proposals for the next step, as many as planned.
    ///
    /// # Panics
    ///
    /// If a run does not hold one token more than its accepted drafts.
    pub fn push_row(
        &mut self,
        request_id: RequestId,
        tokens: &[TokenId],
        n_accepted: u32,
        drafts: &[TokenId],
    ) {
        assert!(
            (tokens.is_empty() && n_accepted == 0) || tokens.len() == n_accepted as usize + 1,
            "{request_id}: an accepted run is the accepted drafts and one token of the target"
        );
        self.rows.push(OutcomeRow {
            request_id,
            n_accepted,
            tokens: Span::after(self.tokens.len(), tokens.len()),
            drafts: Span::after(self.drafts.len(), drafts.len()),
            logprobs: Span::default(),
            prompt_logprobs: Span::default(),
            has_failed: false,
        });
        self.tokens.extend_from_slice(tokens);
        self.drafts.extend_from_slice(drafts);
    }

    /// Appends a row that alone has failed, for instance because no token may be chosen; its
    /// request ends with `message`.
    pub fn push_failed_row(&mut self, request_id: RequestId, message: String) {
        self.push_row(request_id, &[], 0, &[]);
        self.rows.last_mut().expect("the row just pushed").has_failed = true;
        self.failures.push((request_id, message));
    }

    /// Appends the rows of another part of the same step, and adds what its indexers did.
    pub fn append(&mut self, part: &Self) {
        self.indexer += &part.indexer;
        for row in &part.rows {
            let logprobs = |span: Span| part.logprobs[span.range()].iter().cloned();
            self.push_row(row.request_id, part.tokens(row), row.n_accepted, part.drafts(row));
            if row.logprobs.len > 0 {
                self.push_logprobs(logprobs(row.logprobs));
            }
            if row.prompt_logprobs.len > 0 {
                self.push_prompt_logprobs(logprobs(row.prompt_logprobs));
            }
            self.rows.last_mut().expect("the row just pushed").has_failed = row.has_failed;
        }
        self.failures.extend_from_slice(&part.failures);
    }

    /// Leaves only the rows that `keep` says.
    pub fn keep_rows(&mut self, keep: impl FnMut(&OutcomeRow) -> bool) {
        self.rows.retain(keep);
    }

    /// Why `row` alone has failed, if it has.
    #[must_use]
    #[inline]
    pub fn failure(&self, row: &OutcomeRow) -> Option<&str> {
        let own = |(id, _): &&(RequestId, String)| *id == row.request_id;
        let failure = || self.failures.iter().find(own).map(|(_, message)| &message[..]);
        row.has_failed.then(failure).flatten()
    }

    /// Adds log probabilities to the row appended last: one entry for each token of its run.
    ///
    /// # Panics
    ///
    /// If there is no row, or not as many entries as tokens.
    pub fn push_logprobs(&mut self, logprobs: impl IntoIterator<Item = TokenLogprobs>) {
        let start = self.logprobs.len();
        self.logprobs.extend(logprobs);
        let row = self.rows.last_mut().expect("a row with log probabilities");
        row.logprobs = Span::after(start, self.logprobs.len() - start);
        assert_eq!(row.logprobs.len, row.tokens.len, "one entry for each token");
    }

    /// Adds log probabilities of the prompt to the row appended last: one entry for the token
    /// behind each queried one, as far as it belongs to the prompt.
    ///
    /// # Panics
    ///
    /// If there is no row.
    pub fn push_prompt_logprobs(&mut self, logprobs: impl IntoIterator<Item = TokenLogprobs>) {
        let start = self.logprobs.len();
        self.logprobs.extend(logprobs);
        let row = self.rows.last_mut().expect("a row with log probabilities");
        row.prompt_logprobs = Span::after(start, self.logprobs.len() - start);
    }

    /// The log probabilities of the run of `row`, empty if nobody asked for them.
    #[must_use]
    #[inline]
    pub fn logprobs(&self, row: &OutcomeRow) -> &[TokenLogprobs] {
        &self.logprobs[row.logprobs.range()]
    }

    /// The log probabilities of the prompt that `row` has computed.
    #[must_use]
    #[inline]
    pub fn prompt_logprobs(&self, row: &OutcomeRow) -> &[TokenLogprobs] {
        &self.logprobs[row.prompt_logprobs.range()]
    }

    /// The rows, in any order.
    #[must_use]
    pub fn rows(&self) -> &[OutcomeRow] {
        &self.rows
    }

    /// The row of a request, if it has one. Linear; meant for tests and small batches.
    #[must_use]
    pub fn row(&self, request_id: RequestId) -> Option<&OutcomeRow> {
        self.rows.iter().find(|row| row.request_id == request_id)
    }

    /// The row of a request, which is likely to be row `hint`.
    #[must_use]
    pub fn row_near(&self, hint: usize, request_id: RequestId) -> Option<&OutcomeRow> {
        let likely = self.rows.get(hint).filter(|row| row.request_id == request_id);
        likely.or_else(|| self.row(request_id))
    }

    /// The accepted run of `row`.
    #[must_use]
    #[inline]
    pub fn tokens(&self, row: &OutcomeRow) -> &[TokenId] {
        &self.tokens[row.tokens.range()]
    }

    /// The drafts that `row` proposes for the next step.
    #[must_use]
    #[inline]
    pub fn drafts(&self, row: &OutcomeRow) -> &[TokenId] {
        &self.drafts[row.drafts.range()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_step_come_together() {
        let (mut whole, mut part) = (StepOutcome::default(), StepOutcome::default());
        whole.push_row(RequestId(1), &[5], 0, &[6, 7]);
        part.push_row(RequestId(2), &[8, 9], 1, &[10]);
        part.push_logprobs((0..2).map(|_| TokenLogprobs { logprob: -1.0, top: vec![] }));
        part.push_failed_row(RequestId(3), "no token".to_owned());
        part.indexer.target_verify.n_launches = 4;
        whole.append(&part);
        whole.append(&StepOutcome::default());
        assert_eq!((whole.rows().len(), whole.indexer.target_verify.n_launches), (3, 4));
        let row = whole.row(RequestId(2)).unwrap();
        assert_eq!((whole.tokens(row), whole.drafts(row)), (&[8, 9][..], &[10][..]));
        assert_eq!((row.n_accepted, whole.logprobs(row).len(), whole.failure(row)), (1, 2, None));
        assert_eq!(whole.failure(whole.row(RequestId(3)).unwrap()), Some("no token"));
        whole.keep_rows(|row| row.request_id != RequestId(1));
        let row = whole.row(RequestId(2)).unwrap();
        assert_eq!((whole.rows().len(), whole.tokens(row)), (2, &[8, 9][..]));
    }
}
