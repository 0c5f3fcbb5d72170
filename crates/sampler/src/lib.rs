//! Logits to tokens and log probabilities.
//!
//! **Owns** the step from a row of logits to a chosen token id, greedy ([`greedy()`]) or drawn from
//! the distribution that a request's [`SamplingParams`] leave ([`Distribution`], [`sample()`]), and
//! to the log probability of a given one ([`logprobs()`]). **Must not know** requests, layouts or
//! models; of drafts it knows that they count as generated in the rows behind them.
//!
//! Invariants: equal logits resolve to the lowest id, on every device; a row's result does not
//! depend on the other rows \[INV-11]; a draw is a pure function of seed, position and purpose;
//! only ids and asked-for log probabilities cross to the host, never logits; all rows go through
//! libtorch together, and only rows that need a processor pay for it.
//!
//! [`oracle`] has the same definitions as plain f64 loops, for tests.
//!
//! # Example
//!
//! ```
//! use sampler::{Purpose, SamplingParams, SamplingRow, TokenHistory, sample};
//! use tch::Tensor;
//!
//! let logits = Tensor::from_slice2(&[[0.5f32, 2.0, 2.0], [3.0, 1.0, 0.0]]);
//! let mut ids = Vec::new();
//! sampler::greedy(&logits, &mut ids)?;
//! assert_eq!(ids, [1, 0]);
//!
//! // Token 0 was generated once, and each time takes 2.5 off its logit.
//! let penalised = SamplingParams { frequency_penalty: 2.5, ..SamplingParams::default() };
//! let sampled = SamplingParams { temperature: 0.7, top_k: 2, seed: 1, ..Default::default() };
//! penalised.check(3)?;
//! sampled.check(3)?;
//! let mut history = TokenHistory::new(&[2, 2]);
//! history.extend(&[0]);
//! let row = |params| SamplingRow {
//!     params,
//!     history: &history,
//!     drafts: &[],
//!     position: 3,
//!     grammar_mask: None,
//! };
//! let ids = sample(&logits, &[row(&sampled), row(&penalised)], Purpose::Sample)?.ids;
//! assert!([1, 2].contains(ids[0].as_ref().unwrap()));
//! assert_eq!(ids[1], Ok(1));
//! # Ok::<(), sampler::SamplerError>(())
//! ```

mod distribution;
mod error;
mod greedy;
mod logprobs;
pub mod noise;
pub mod oracle;
mod params;
mod processors;
mod ranking;
mod sample;

pub use distribution::{Distribution, choose};
pub use error::{FaultCause, RowFault, SamplerError};
pub use greedy::{greedy, greedy_of_processed};
pub use logprobs::{LogprobsQuery, MAX_TOP_LOGPROBS, TokenLogprobs, logprobs, token_logprobs};
pub use noise::Purpose;
pub use params::{SamplingParams, SamplingRow, TokenHistory};
pub use processors::{explain, process};
pub use sample::{Sampled, sample, select_rows};

#[cfg(test)]
mod tests;
