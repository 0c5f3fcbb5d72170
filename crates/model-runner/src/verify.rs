//! Verification: from a step's logits to accepted runs and log probabilities.

use engine_types::{PlanRow, StepPlan, TokenId, TokenLogprobs};
use sampler::{
    FaultCause, LogprobsQuery, RowFault, SamplerError, SamplingParams, SamplingRow, TokenHistory,
    logprobs,
};
use spec_decode::{AcceptedRuns, DraftProbs, SpecDecodeMetadata, SyntheticAcceptance};
use tch::Tensor;

use crate::drawn::DrawnDrafts;
use crate::error::StepError;
use crate::samplers::Samplers;

/// What verification reads.
#[derive(Clone, Copy)]
pub(crate) struct StepInput<'a> {
    pub(crate) plan: &'a StepPlan,
    pub(crate) metadata: &'a SpecDecodeMetadata,
    pub(crate) samplers: &'a Samplers,
    pub(crate) drawn: &'a DrawnDrafts,
    pub(crate) vocab_size: u32,
}

/// What the target says to a step's rows; buffers are reused.
///
/// Sequences are the rows that sample, in the order of the plan.
#[derive(Debug, Default)]
pub(crate) struct Verifier {
    /// Accepts drafts in the target's place.
    synthetic: Option<SyntheticAcceptance>,
    target_ids: Vec<TokenId>,
    runs: AcceptedRuns,
    /// Sequences that alone have failed, and why.
    failures: Vec<(usize, String)>,
    /// Log probabilities of the runs that they are wanted of, one behind the other.
    pub(crate) logprobs: Vec<TokenLogprobs>,
}

impl Verifier {
    pub(crate) fn new(synthetic: Option<SyntheticAcceptance>) -> Self {
        Self { synthetic, ..Self::default() }
    }

    /// Verifies a step in which no row samples.
    pub(crate) fn clear(&mut self) {
        self.runs.verify_greedy(&SpecDecodeMetadata::default(), &[]);
        self.failures.clear();
        self.logprobs.clear();
    }

    /// Verifies the drafts of all rows that sample, `logits` being `[metadata.n_logits(), vocab]`.
    ///
    /// Where all are plainly greedy, that is one argmax.
    pub(crate) fn verify(&mut self, step: StepInput<'_>, logits: &Tensor) -> Result<(), StepError> {
        self.failures.clear();
        self.logprobs.clear();
        if self.synthetic.is_some() {
            self.verify_synthetic(step, logits)?;
        } else if !step.is_plain() || !self.verify_plain(step.metadata, logits)? {
            self.verify_rows(step, logits)?;
        }
        self.query_logprobs(step, logits)
    }

    /// Says whether every row has a token: one without it is to fail alone.
    fn verify_plain(
        &mut self,
        metadata: &SpecDecodeMetadata,
        logits: &Tensor,
    ) -> Result<bool, StepError> {
        match sampler::greedy(logits, &mut self.target_ids) {
            Err(SamplerError::NotANumber { .. }) => return Ok(false),
            result => result?,
        }
        self.runs.verify_greedy(metadata, &self.target_ids);
        Ok(true)
    }

    fn verify_rows(&mut self, step: StepInput<'_>, logits: &Tensor) -> Result<(), StepError> {
        let plain = (SamplingParams::default(), TokenHistory::default());
        let rows = step.sampling_rows(&plain);
        let drawn_from = step.drawn.rows(step.plan);
        let draft_probs = step.drawn.probs().map(|probs| DraftProbs { probs, rows: &drawn_from });
        self.runs.verify(step.metadata, logits, &rows, draft_probs)?;
        let faulty = (0..self.runs.n_seqs()).filter_map(|seq| Some((seq, self.runs.fault(seq)?)));
        self.failures.extend(faulty.map(|(seq, fault)| (seq, message(fault))));
        Ok(())
    }

    fn verify_synthetic(&mut self, step: StepInput<'_>, logits: &Tensor) -> Result<(), StepError> {
        sampler::greedy(logits, &mut self.target_ids)?;
        let synthetic = self.synthetic.as_ref().expect("the caller asked");
        let step_id = step.plan.step_id.0;
        self.runs.verify_synthetic(step.metadata, &self.target_ids, synthetic, step_id);
        for (seq, row) in step.plan.rows().iter().filter(|row| row.samples).enumerate() {
            let is_greedy = step.samplers.of(row).is_none_or(|s| s.params.is_plain_greedy());
            if !is_greedy || !step.plan.masks(row).is_empty() {
                let message = "with synthetic acceptance, tokens are not sampled and no token \
                               can be excluded";
                self.failures.push((seq, message.to_owned()));
            }
        }
        Ok(())
    }

    fn query_logprobs(&mut self, step: StepInput<'_>, logits: &Tensor) -> Result<(), StepError> {
        let (mut first, mut queries) = (0, Vec::new());
        let sampling = step.plan.rows().iter().filter(|row| row.samples);
        for (seq, row) in sampling.enumerate() {
            if let Some(n_top) = step.samplers.of(row).and_then(|sampler| sampler.n_logprobs) {
                let run = self.run(Some(seq)).unwrap_or_default();
                let query = |(row_idx, &id)| LogprobsQuery { row_idx, id, n_top };
                queries.extend((first..).zip(run).map(query));
            }
            first += row.n_draft as usize + 1;
        }
        self.logprobs.extend(logprobs(logits, &queries)?.into_iter().map(to_contract));
        Ok(())
    }

    /// The accepted run of a sequence; empty for a row that is none, as it does not sample.
    ///
    /// # Errors
    ///
    /// Why the sequence alone has failed.
    pub(crate) fn run(&self, seq: Option<usize>) -> Result<&[TokenId], &str> {
        let Some(seq) = seq else { return Ok(&[]) };
        match self.failures.iter().find(|(failed, _)| *failed == seq) {
            Some((_, why)) => Err(why),
            None => Ok(self.runs.run(seq)),
        }
    }
}

impl<'a> StepInput<'a> {
    /// Whether every row that samples chooses the largest of the model's own logits, and nobody
    /// asks for anything else.
    fn is_plain(self) -> bool {
        let is_plain = |row: &PlanRow| !row.has_sampler && self.plan.masks(row).is_empty();
        self.plan.rows().iter().filter(|row| row.samples).all(is_plain)
    }

    /// What each row of the logits is sampled with; `plain` is that of rows without a sampler.
    fn sampling_rows<'b>(self, plain: &'b (SamplingParams, TokenHistory)) -> Vec<SamplingRow<'b>>
    where
        'a: 'b,
    {
        let n_words = self.vocab_size.div_ceil(32) as usize;
        let mut rows = Vec::with_capacity(self.metadata.n_logits());
        for row in self.plan.rows().iter().filter(|row| row.samples) {
            let sampler = self.samplers.of(row);
            let (params, history) =
                sampler.map_or((&plain.0, &plain.1), |s| (&s.params, &s.history));
            let (drafts, masks) = (self.plan.drafts(row), self.plan.masks(row));
            let first = u64::from(row.n_computed + row.n_query - row.n_draft);
            rows.extend((0..=drafts.len()).map(|at| SamplingRow {
                params,
                history,
                drafts: &drafts[..at],
                position: first + at as u64,
                grammar_mask: masks.chunks_exact(n_words).nth(at),
            }));
        }
        rows
    }
}

/// The contract's form of log probabilities.
pub(crate) fn to_contract(logprobs: sampler::TokenLogprobs) -> TokenLogprobs {
    TokenLogprobs { logprob: logprobs.chosen, top: logprobs.top }
}

/// What a client is told of a row without a token.
fn message(fault: &RowFault) -> String {
    match &fault.cause {
        FaultCause::NotANumber => "the model's logits hold a NaN".to_owned(),
        FaultCause::Infinite => "the model's logits hold an infinity".to_owned(),
        FaultCause::NoTokenLeft { excluded_by } if !excluded_by.is_empty() => {
            format!("no token is left that may be chosen, after {excluded_by}")
        }
        _ => fault.to_string(),
    }
}
