//! Logits to processed logits: everything that comes before the temperature.

use tch::{Device, Kind, TchError, Tensor};

use crate::error::{FaultCause, RowFault, SamplerError};
use crate::params::SamplingRow;

/// Applies the processors of each row to its logits, `[R, vocab]`: f32 `[R, vocab]`, excluded
/// tokens at negative infinity. `logits` itself is left alone.
///
/// The order is that of transformers' `generate`, which has no presence and frequency penalties;
/// they follow the repetition penalty, so that they are taken off in full:
///
/// 1. `logit_bias` is added;
/// 2. `repetition_penalty` divides positive and multiplies negative logits of tokens in the prompt
///    or generated;
/// 3. `frequency_penalty` times the number of times that a token was generated, and
///    `presence_penalty` if it was at all, are taken off;
/// 4. `bad_words`, then `end_ids` below `min_tokens`, are excluded;
/// 5. all but `allowed_token_ids`, and all but the grammar's tokens, are excluded.
///
/// A bad word of several tokens looks at prompt and generated tokens. (transformers skips one
/// that is a single token longer than the history; here its prefix is enough.)
///
/// # Errors
///
/// [`SamplerError::Tensor`] if a tensor operation fails.
///
/// # Panics
///
/// If there is not one row for each row of the logits, or a parameter holds an id outside the
/// vocabulary.
pub fn process(logits: &Tensor, rows: &[SamplingRow<'_>]) -> Result<Tensor, SamplerError> {
    let (n_rows, vocab) = logits.size2().expect("logits are [R, vocab]");
    assert_eq!(n_rows as usize, rows.len(), "one row of parameters for each row of logits");
    let stages = Stages::of(rows, vocab as usize);
    let logits = logits.f_to_kind(Kind::Float)?;
    if stages.is_empty() {
        return Ok(logits);
    }
    let mut processed = logits.f_empty_like()?.f_contiguous()?;
    processed.f_copy_(&logits)?;
    stages.apply(&mut processed)?;
    Ok(processed)
}

/// What the rows of a step need, as flat arrays: token `id` of row `r` is element `r * vocab + id`.
#[derive(Debug, Default)]
struct Stages {
    biased: Vec<i64>,
    bias: Vec<f32>,
    penalised: Vec<i64>,
    repetition: Vec<f32>,
    taken_off: Vec<f32>,
    forbidden: Vec<i64>,
    masked_rows: Vec<i64>,
    /// Bits of the allowed tokens of each masked row, `ceil(vocab / 32)` words a row.
    masks: Vec<i32>,
}

impl Stages {
    fn of(rows: &[SamplingRow<'_>], vocab: usize) -> Self {
        let mut stages = Self::default();
        for (row_idx, row) in rows.iter().enumerate() {
            let element = |id: u32| {
                assert!((id as usize) < vocab, "token {id} is outside the vocabulary of {vocab}");
                (row_idx * vocab + id as usize) as i64
            };
            for &(id, bias) in &row.params.logit_bias {
                stages.biased.push(element(id));
                stages.bias.push(bias);
            }
            if row.params.has_penalties() {
                stages.penalise(row, element);
            }
            stages.forbidden.extend(row.forbidden().map(element));
            if row.params.allowed_token_ids.is_some() || row.grammar_mask.is_some() {
                stages.masked_rows.push(row_idx as i64);
                stages.mask(row, vocab);
            }
        }
        stages
    }

    fn is_empty(&self) -> bool {
        self.biased.is_empty()
            && self.penalised.is_empty()
            && self.forbidden.is_empty()
            && self.masked_rows.is_empty()
    }

    fn penalise(&mut self, row: &SamplingRow<'_>, element: impl Fn(u32) -> i64) {
        let params = row.params;
        let n_drafted = |id: u32| row.drafts.iter().filter(|&&draft| draft == id).count() as u32;
        let new_drafts = row.drafts.iter().enumerate().filter_map(|(at, &id)| {
            let is_first = !row.drafts[..at].contains(&id);
            (is_first && !row.history.contains(id)).then_some((id, 0))
        });
        for (id, n_before) in row.history.counts().chain(new_drafts) {
            let n_generated = n_before + n_drafted(id);
            if n_generated == 0 && params.repetition_penalty == 1.0 {
                continue;
            }
            let presence = if n_generated > 0 { params.presence_penalty } else { 0.0 };
            self.penalised.push(element(id));
            self.repetition.push(params.repetition_penalty);
            self.taken_off.push(n_generated as f32 * params.frequency_penalty + presence);
        }
    }

    /// Appends the row's mask: the tokens that both its list and its grammar allow.
    fn mask(&mut self, row: &SamplingRow<'_>, vocab: usize) {
        let start = self.masks.len();
        let n_words = vocab.div_ceil(32);
        match &row.params.allowed_token_ids {
            None => self.masks.resize(start + n_words, -1),
            Some(allowed) => {
                self.masks.resize(start + n_words, 0);
                for &id in allowed {
                    assert!((id as usize) < vocab, "token {id} is outside the vocabulary");
                    self.masks[start + id as usize / 32] |= 1 << (id % 32);
                }
            }
        }
        if let Some(grammar) = row.grammar_mask {
            let words = grammar.iter().copied().chain(std::iter::repeat(0));
            for (word, allowed) in self.masks[start..].iter_mut().zip(words) {
                *word &= allowed as i32;
            }
        }
    }

    /// Applies all stages to contiguous f32 logits in place.
    fn apply(&self, logits: &mut Tensor) -> Result<(), TchError> {
        let device = logits.device();
        let (_, vocab) = logits.size2()?;
        let mut flat = logits.f_view(-1)?;
        if !self.biased.is_empty() {
            let index = upload(&self.biased, device)?;
            let _ = flat.f_index_add_(0, &index, &upload(&self.bias, device)?)?;
        }
        if !self.penalised.is_empty() {
            let index = upload(&self.penalised, device)?;
            let repetition = upload(&self.repetition, device)?;
            let before = flat.f_index_select(0, &index)?;
            let divided = before.f_div(&repetition)?;
            let repeated = before.f_mul(&repetition)?.f_where_self(&before.f_lt(0.0)?, &divided)?;
            let penalised = repeated.f_sub(&upload(&self.taken_off, device)?)?;
            let _ = flat.f_index_copy_(0, &index, &penalised)?;
        }
        if !self.forbidden.is_empty() {
            let index = upload(&self.forbidden, device)?;
            let _ = flat.f_index_fill_(0, &index, f64::NEG_INFINITY)?;
        }
        if !self.masked_rows.is_empty() {
            let rows = upload(&self.masked_rows, device)?;
            let excluded = self.excluded(vocab, device)?;
            let masked = logits.f_index_select(0, &rows)?;
            let masked = masked.f_masked_fill(&excluded, f64::NEG_INFINITY)?;
            let _ = logits.f_index_copy_(0, &rows, &masked)?;
        }
        Ok(())
    }

    /// The tokens that each masked row excludes, bool `[masked rows, vocab]`.
    fn excluded(&self, vocab: i64, device: Device) -> Result<Tensor, TchError> {
        let n_rows = self.masked_rows.len() as i64;
        let words = upload(&self.masks, device)?.f_view([n_rows, -1, 1])?;
        let bits = Tensor::f_arange(32, (Kind::Int, device))?;
        let is_allowed = words.f_bitwise_right_shift(&bits)?.f_bitwise_and(1)?;
        is_allowed.f_view([n_rows, -1])?.f_narrow(1, 0, vocab)?.f_eq(0)
    }
}

pub(crate) fn upload<T: tch::kind::Element>(
    values: &[T],
    device: Device,
) -> Result<Tensor, TchError> {
    Tensor::f_from_slice(values)?.f_to_device(device)
}

/// What is wrong with a row whose code is negative, see [`check_rows`].
pub(crate) const NAN: i64 = -1;
const INFINITE: i64 = -2;
const NOTHING_LEFT: i64 = -3;

/// i64 `[R]`: 0 for each row of processed logits that has a token to choose, else a negative code.
/// Infinite logits have a largest one, but no distribution.
pub(crate) fn check_rows(max: &Tensor, is_sampled: bool) -> Result<Tensor, TchError> {
    let flag = |is: Tensor, code: i64| is.f_to_kind(Kind::Int64)?.f_mul_scalar(code);
    let mut codes = flag(max.f_isnan()?, NAN)?;
    let _ = codes.f_add_(&flag(max.f_eq(f64::NEG_INFINITY)?, NOTHING_LEFT)?)?;
    if is_sampled {
        let _ = codes.f_add_(&flag(max.f_eq(f64::INFINITY)?, INFINITE)?)?;
    }
    Ok(codes)
}

/// Explains a negative code of row `row_idx`, which is sampled with `row`.
#[must_use]
pub fn explain(code: i64, row_idx: usize, row: &SamplingRow<'_>) -> RowFault {
    let cause = match code {
        NAN => FaultCause::NotANumber,
        INFINITE => FaultCause::Infinite,
        NOTHING_LEFT => FaultCause::NoTokenLeft { excluded_by: excluded_by(row) },
        _ => unreachable!("{code} is no fault"),
    };
    RowFault { row_idx, cause }
}

fn excluded_by(row: &SamplingRow<'_>) -> String {
    let params = row.params;
    let mut names = Vec::new();
    if !params.bad_words.is_empty() {
        names.push("bad_words");
    }
    if row.is_too_short() && !params.end_ids.is_empty() {
        names.push("min_tokens");
    }
    if params.allowed_token_ids.is_some() {
        names.push("allowed_token_ids");
    }
    if row.grammar_mask.is_some() {
        names.push("the grammar");
    }
    names.join(", ")
}
