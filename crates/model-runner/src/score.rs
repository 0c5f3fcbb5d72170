//! Log probabilities of a prompt, outside of any plan.

use batch_layout::{BatchLayout, SeqSpec};
use engine_types::{ExecutorError, StepExecutor, TokenId};

use crate::error::StepError;
use crate::runner::Runner;

impl Runner {
    /// Log probability of each token of `ids` behind the first, f32 `[ids.len() - 1]`, computed in
    /// chunks of `chunk` tokens.
    ///
    /// Writes to blocks of the pool from the first on: not to be called while requests are in it.
    ///
    /// # Errors
    ///
    /// [`ExecutorError::Step`] if an id is outside the vocabulary, the prompt does not fit the
    /// pool or the model's length, or a tensor operation fails.
    ///
    /// # Panics
    ///
    /// If `chunk` is 0.
    pub fn prompt_logprobs(
        &mut self,
        ids: &[TokenId],
        chunk: usize,
    ) -> Result<Vec<f32>, ExecutorError> {
        let limits = self.limits();
        let n_tokens = ids.len() as u64;
        let n_blocks = n_tokens.div_ceil(u64::from(limits.block_size));
        let fault = if let Some(id) = ids.iter().find(|&&id| id >= limits.vocab_size) {
            Some(format!("token {id}, vocab_size is {}", limits.vocab_size))
        } else if n_tokens > u64::from(limits.max_model_len) {
            Some(format!("{n_tokens} tokens, max_model_len is {}", limits.max_model_len))
        } else if n_blocks > u64::from(limits.num_blocks) {
            Some(format!("{n_blocks} KV blocks needed, num_blocks is {}", limits.num_blocks))
        } else {
            None
        };
        let failed =
            |text: String| ExecutorError::Step(format!("prompt log probabilities: {text}"));
        fault.map_or(Ok(()), |text| Err(failed(text)))?;
        tch::no_grad(|| self.score(ids, chunk, n_blocks as u32))
            .map_err(|error| failed(error.to_string()))
    }

    fn score(&self, ids: &[TokenId], chunk: usize, n_blocks: u32) -> Result<Vec<f32>, StepError> {
        let ids: Vec<i64> = ids.iter().map(|&id| i64::from(id)).collect();
        let blocks: Vec<u32> = (0..n_blocks).collect();
        let mut layout = BatchLayout::new(self.limits().block_size);
        let mut logprobs = Vec::with_capacity(ids.len());
        // The last token has nothing behind it, so that its row is not needed.
        let queries = &ids[..ids.len().saturating_sub(1)];
        for (chunk_idx, query) in queries.chunks(chunk).enumerate() {
            let start = chunk_idx * chunk;
            layout.clear();
            let spec = SeqSpec { n_computed: start as u32, n_query: query.len() as u32 };
            layout.push(spec, &blocks);
            layout.finish();
            let logits = self.logits(&self.forward(query, &layout)?.hidden)?;
            let next = self.upload(&ids[start + 1..][..query.len()])?;
            let of_next = sampler::token_logprobs(&logits, &next)?;
            logprobs.extend(Vec::<f32>::try_from(of_next)?);
        }
        Ok(logprobs)
    }
}
