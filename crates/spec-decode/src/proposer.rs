//! Draft proposal with MTP layers.

use std::ops::Range;

use attention_backends::DeviceLayout;
use batch_layout::{BatchLayout, SeqSpec};
use engine_types::{MAX_SPECULATIVE_TOKENS, TokenId};
use tch::{Device, Tensor};

use crate::draft_model::{DraftInput, DraftModel};
use crate::error::SpecDecodeError;

/// What one sequence's step left behind for the drafter.
#[derive(Clone, Debug)]
pub struct DraftSeq<'a> {
    /// Position of the first row of this step.
    pub first_position: u32,
    /// The valid rows of this step in the target's hidden states, at least one: all queried rows
    /// but those of rejected drafts.
    pub rows: Range<usize>,
    /// Tokens at those rows, `[rows.len()]`.
    pub tokens: &'a [TokenId],
    /// Known tokens behind them, at least one: the newly sampled token, or what the prompt has
    /// behind a middle chunk (at most one token for each MTP layer is used).
    pub following: &'a [TokenId],
    /// Block table; covers the valid rows and `n_propose - 1` positions behind them.
    pub blocks: &'a [u32],
    /// Drafts wanted, at most the proposer's `num_speculative_tokens`; 0 only lets the draft
    /// layers' KV follow the rows.
    pub n_propose: usize,
}

/// Proposes drafts by running the MTP layers one step after the other, step `j` with layer
/// `j mod n` of `n`.
///
/// **Prefix steps**, `j < n`: layer `j` runs over all valid rows of all sequences, so that its own
/// KV covers the whole prefix. The row at position `p` embeds the token at `p + 1 + j` and
/// continues the target's hidden state (`j = 0`) or the layer before. They run for sequences that
/// propose nothing, too. Where the token at `p + 1 + j` is not known yet (behind a middle chunk
/// with one prompt token left, or with fewer drafts than layers), the last known one stands in:
/// only the drafts' quality depends on it, and neither batch mates nor timing do.
///
/// **Recursive steps**, `j >= n`: one row for each sequence that still proposes, at the
/// `j / n`-th position behind its valid ones. It embeds the previous draft and continues the
/// previous step's hidden state. The next target step overwrites those positions.
///
/// The layout of each shape is built afresh: no map outlives its batch (fault case L07).
#[derive(Debug)]
pub struct EagleProposer {
    num_speculative_tokens: usize,
    num_layers: usize,
    layout: BatchLayout,
    drafts: Vec<Vec<TokenId>>,
    chosen: Vec<TokenId>,
    ids: Vec<i64>,
    rows: Vec<i64>,
}

impl EagleProposer {
    /// A proposer of up to `num_speculative_tokens` drafts with `num_layers` MTP layers over KV
    /// blocks of `block_size` tokens.
    ///
    /// # Errors
    ///
    /// [`SpecDecodeError::NoMtpLayers`] if drafts are wanted and nothing can make them,
    /// [`SpecDecodeError::TooManyDrafts`] beyond [`MAX_SPECULATIVE_TOKENS`].
    pub fn new(
        num_speculative_tokens: usize,
        num_layers: usize,
        block_size: u32,
    ) -> Result<Self, SpecDecodeError> {
        if num_speculative_tokens > MAX_SPECULATIVE_TOKENS {
            return Err(SpecDecodeError::TooManyDrafts { num_speculative_tokens });
        }
        if num_speculative_tokens > 0 && num_layers == 0 {
            return Err(SpecDecodeError::NoMtpLayers { num_speculative_tokens });
        }
        Ok(Self {
            num_speculative_tokens,
            num_layers,
            layout: BatchLayout::new(block_size),
            drafts: Vec::new(),
            chosen: Vec::new(),
            ids: Vec::new(),
            rows: Vec::new(),
        })
    }

    /// Largest number of drafts of a sequence and step.
    #[must_use]
    pub fn num_speculative_tokens(&self) -> usize {
        self.num_speculative_tokens
    }

    /// Runs the draft steps and returns the drafts of each of `seqs`, in their order.
    ///
    /// `hidden` are the target's hidden states after its final norm, `[T, hidden]`; `seqs` are the
    /// sequences that are drafted for, each with rows of its own.
    ///
    /// # Errors
    ///
    /// [`SpecDecodeError`] if a draft step or the choice of a token fails.
    ///
    /// # Panics
    ///
    /// If a sequence breaks a bound of [`DraftSeq`], or `model` has another number of layers.
    pub fn propose<M: DraftModel + ?Sized>(
        &mut self,
        model: &M,
        seqs: &[DraftSeq<'_>],
        hidden: &Tensor,
    ) -> Result<&[Vec<TokenId>], SpecDecodeError> {
        self.drafts.truncate(seqs.len());
        self.drafts.iter_mut().for_each(Vec::clear);
        self.drafts.resize_with(seqs.len(), || Vec::with_capacity(MAX_SPECULATIVE_TOKENS));
        if self.num_speculative_tokens > 0 && !seqs.is_empty() {
            assert_eq!(model.num_layers(), self.num_layers, "the proposer knows its layers");
            seqs.iter().for_each(|seq| self.check(seq));
            let (active, last) = self.prefix_steps(model, seqs, hidden)?;
            self.recursive_steps(model, seqs, active, last)?;
        }
        Ok(&self.drafts)
    }

    fn check(&self, seq: &DraftSeq<'_>) {
        assert!(!seq.tokens.is_empty(), "a drafting sequence has a valid row");
        assert_eq!(seq.tokens.len(), seq.rows.len(), "one token for each valid row");
        assert!(!seq.following.is_empty(), "the token behind the last valid row is known");
        assert!(seq.n_propose <= self.num_speculative_tokens, "n_propose is within the limit");
    }

    /// Returns the sequences that the last prefix step drafted for, and their hidden states.
    fn prefix_steps<M: DraftModel + ?Sized>(
        &mut self,
        model: &M,
        seqs: &[DraftSeq<'_>],
        hidden: &Tensor,
    ) -> Result<(Vec<usize>, Tensor), SpecDecodeError> {
        let device = hidden.device();
        self.layout.clear();
        self.rows.clear();
        for seq in seqs {
            let n_query = as_u32(seq.rows.len());
            self.layout.push(SeqSpec { n_computed: seq.first_position, n_query }, seq.blocks);
            self.rows.extend(seq.rows.clone().map(|row| row as i64));
        }
        self.layout.finish();
        let layout = DeviceLayout::upload(&self.layout, device);
        let ends: Vec<i64> =
            self.layout.cu_seqlens_q()[1..].iter().map(|&end| i64::from(end)).collect();
        let mut hidden = hidden.f_index_select(0, &upload(&self.rows, device)?)?;

        let n_steps = self.num_layers.min(self.num_speculative_tokens);
        let mut active = Vec::new();
        for step in 0..n_steps {
            self.shifted_tokens(seqs, step);
            active = proposing(seqs, step);
            self.rows.clear();
            self.rows.extend(active.iter().map(|&seq| ends[seq] - 1));
            let last_rows = upload(&self.rows, device)?;
            let is_last_step = step + 1 == n_steps;
            let output = model.step(DraftInput {
                layer: step,
                token_ids: &upload(&self.ids, device)?,
                hidden: &hidden,
                layout: &layout,
                output_rows: is_last_step.then_some(&last_rows),
            })?;
            if is_last_step {
                self.choose(model, step, &active, &output)?;
            } else {
                self.choose(model, step, &active, &output.f_index_select(0, &last_rows)?)?;
            }
            hidden = output;
        }
        Ok((active, hidden))
    }

    fn recursive_steps<M: DraftModel + ?Sized>(
        &mut self,
        model: &M,
        seqs: &[DraftSeq<'_>],
        mut active: Vec<usize>,
        mut hidden: Tensor,
    ) -> Result<(), SpecDecodeError> {
        let device = hidden.device();
        for step in self.num_layers..self.num_speculative_tokens {
            let still = proposing(seqs, step);
            if still.is_empty() {
                break;
            }
            if still.len() < active.len() {
                self.rows.clear();
                let kept =
                    active.iter().enumerate().filter(|(_, seq)| seqs[**seq].n_propose > step);
                self.rows.extend(kept.map(|(row, _)| row as i64));
                hidden = hidden.f_index_select(0, &upload(&self.rows, device)?)?;
            }
            active = still;
            self.layout.clear();
            self.ids.clear();
            for &idx in &active {
                let seq = &seqs[idx];
                let behind = step / self.num_layers - 1;
                let n_computed = seq.first_position + as_u32(seq.rows.len() + behind);
                self.layout.push(SeqSpec { n_computed, n_query: 1 }, seq.blocks);
                self.ids.push(i64::from(self.drafts[idx][step - 1]));
            }
            self.layout.finish();
            let layer = step % self.num_layers;
            hidden = model.step(DraftInput {
                layer,
                token_ids: &upload(&self.ids, device)?,
                hidden: &hidden,
                layout: &DeviceLayout::upload(&self.layout, device),
                output_rows: None,
            })?;
            self.choose(model, layer, &active, &hidden)?;
        }
        Ok(())
    }

    /// Fills `ids` with the token that each valid row embeds in prefix step `step`.
    fn shifted_tokens(&mut self, seqs: &[DraftSeq<'_>], step: usize) {
        self.ids.clear();
        for (seq, drafts) in seqs.iter().zip(&self.drafts) {
            let known = seq.tokens.len() + seq.following.len();
            let token_at = |offset: usize| match offset.checked_sub(seq.tokens.len()) {
                None => seq.tokens[offset],
                Some(behind) if behind < seq.following.len() => seq.following[behind],
                Some(_) => drafts[offset - known],
            };
            let last = known + drafts.len() - 1;
            let offsets = (1 + step..).take(seq.tokens.len());
            self.ids.extend(offsets.map(|offset| i64::from(token_at(offset.min(last)))));
        }
    }

    /// Appends the likeliest token of each row of `hidden` to the drafts of its sequence.
    fn choose<M: DraftModel + ?Sized>(
        &mut self,
        model: &M,
        layer: usize,
        active: &[usize],
        hidden: &Tensor,
    ) -> Result<(), SpecDecodeError> {
        if active.is_empty() {
            return Ok(());
        }
        sampler::greedy(&model.logits(layer, hidden)?, &mut self.chosen)?;
        assert_eq!(self.chosen.len(), active.len(), "one row of logits for each sequence");
        for (&seq, &draft) in active.iter().zip(&self.chosen) {
            self.drafts[seq].push(draft);
        }
        Ok(())
    }
}

/// The sequences that propose a draft in step `step`.
fn proposing(seqs: &[DraftSeq<'_>], step: usize) -> Vec<usize> {
    (0..seqs.len()).filter(|&idx| seqs[idx].n_propose > step).collect()
}

fn upload(values: &[i64], device: Device) -> Result<Tensor, SpecDecodeError> {
    Ok(Tensor::f_from_slice(values)?.f_to_device(device)?)
}

fn as_u32(value: usize) -> u32 {
    u32::try_from(value).expect("positions are below 2^32")
}

#[cfg(test)]
mod tests;
