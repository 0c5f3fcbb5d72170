//! Log probabilities of the prompts that a step's rows read.

use engine_types::{StepPlan, TokenLogprobs};
use sampler::{LogprobsQuery, logprobs};
use tch::Tensor;

use crate::error::StepError;
use crate::runner::Runner;
use crate::verify::to_contract;

/// Logits that are computed at once: 64 MiB of them.
const N_ELEMENTS_MAX: usize = 1 << 24;

impl Runner {
    /// Those of the prompt token behind each queried one, where they are wanted, row after row.
    pub(crate) fn prompt_logprobs_of(
        &self,
        plan: &StepPlan,
        hidden: &Tensor,
    ) -> Result<Vec<TokenLogprobs>, StepError> {
        let mut queries = Vec::new();
        for row in plan.rows() {
            let Some(sampler) = self.samplers.of(row) else { continue };
            let (ids, n_top) = (sampler.prompt_behind(row), sampler.n_prompt_logprobs.unwrap_or(0));
            let query = |(row_idx, &id)| LogprobsQuery { row_idx, id, n_top };
            queries.extend(row.token_span().range().zip(ids).map(query));
        }
        let n_rows_max = (N_ELEMENTS_MAX / self.vocab_size()).max(1);
        let mut answers = Vec::with_capacity(queries.len());
        for part in queries.chunks_mut(n_rows_max) {
            let rows: Vec<i64> = part.iter().map(|query| query.row_idx as i64).collect();
            let logits = self.logits(&hidden.f_index_select(0, &self.upload(&rows)?)?)?;
            part.iter_mut().enumerate().for_each(|(row_idx, query)| query.row_idx = row_idx);
            answers.extend(logprobs(&logits, part)?.into_iter().map(to_contract));
        }
        Ok(answers)
    }
}
