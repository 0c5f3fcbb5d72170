//! Draft proposal with MTP layers.

use std::ops::Range;

use attention_backends::{DeviceLayout, Selection};
use batch_layout::{BatchLayout, SeqSpec};
use engine_types::{IndexerCounts, MAX_SPECULATIVE_TOKENS, TokenId};
use sampler::{Purpose, Sampled, SamplingParams, SamplingRow, TokenHistory};
use tch::{Device, Tensor};

use crate::draft_model::{DraftError, DraftInput, DraftModel};
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
    /// What the drafts are drawn with, [checked](SamplingParams::check) and without anything that
    /// looks at a history; the likeliest tokens are taken where it is absent or greedy.
    pub sampling: Option<&'a SamplingParams>,
}

/// What a draft step drew its drafts from.
#[derive(Debug)]
pub struct DraftDraws {
    /// Which step, so which draft of its sequences.
    pub step: usize,
    /// The sequences whose draft was drawn, ascending.
    pub seqs: Vec<usize>,
    /// Their distributions, f64 `[seqs.len(), vocab]`.
    pub probs: Tensor,
}

/// What a call of [`EagleProposer::propose`] made.
#[derive(Debug)]
pub struct Proposal<'a> {
    /// The drafts of each sequence, in the order of the sequences.
    pub drafts: &'a [Vec<TokenId>],
    /// What indexers did in each draft step.
    pub indexer: &'a [IndexerCounts; MAX_SPECULATIVE_TOKENS],
    /// What drafts were drawn from, in the order of the steps; nothing of steps that drew none.
    pub draws: Vec<DraftDraws>,
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
/// **Index sharing** ([`EagleProposer::share_index`], the config's
/// `index_share_for_mtp_iteration`): a recursive step attends exactly the keys that its layer's
/// prefix step chose for the sequence's last valid row, so not the positions that drafting itself
/// adds, and no indexer runs.
///
/// **Draws** ([`DraftSeq::sampling`]): the noise of a draft belongs to the position that it is for,
/// as that of its verification does.
///
/// The layout of each shape is built afresh: no map outlives its batch (fault case L07).
#[derive(Debug)]
pub struct EagleProposer {
    num_speculative_tokens: usize,
    num_layers: usize,
    index_share: bool,
    indexer: [IndexerCounts; MAX_SPECULATIVE_TOKENS],
    layout: BatchLayout,
    drafts: Vec<Vec<TokenId>>,
    draws: Vec<DraftDraws>,
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
            index_share: false,
            indexer: Default::default(),
            layout: BatchLayout::new(block_size),
            drafts: Vec::new(),
            draws: Vec::new(),
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

    /// Turns index sharing on or off from the next proposal on; it is off at first.
    pub fn share_index(&mut self, is_on: bool) {
        self.index_share = is_on;
    }

    /// Whether index sharing is on.
    #[must_use]
    pub fn shares_index(&self) -> bool {
        self.index_share
    }

    /// Runs the draft steps and returns the drafts of `seqs`.
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
    /// If a sequence breaks a bound of [`DraftSeq`], `model` has another number of layers, or index
    /// sharing is on and `model` cannot share.
    pub fn propose<M: DraftModel + ?Sized>(
        &mut self,
        model: &M,
        seqs: &[DraftSeq<'_>],
        hidden: &Tensor,
    ) -> Result<Proposal<'_>, SpecDecodeError> {
        self.drafts.truncate(seqs.len());
        self.drafts.iter_mut().for_each(Vec::clear);
        self.drafts.resize_with(seqs.len(), || Vec::with_capacity(MAX_SPECULATIVE_TOKENS));
        self.indexer = Default::default();
        self.draws.clear();
        if self.num_speculative_tokens > 0 && !seqs.is_empty() {
            assert_eq!(model.num_layers(), self.num_layers, "the proposer knows its layers");
            assert!(!self.index_share || model.can_share_selection(), "the model can share");
            seqs.iter().for_each(|seq| self.check(seq));
            let chain = self.prefix_steps(model, seqs, hidden)?;
            self.recursive_steps(model, seqs, chain)?;
        }
        let draws = std::mem::take(&mut self.draws);
        Ok(Proposal { drafts: &self.drafts, indexer: &self.indexer, draws })
    }

    fn check(&self, seq: &DraftSeq<'_>) {
        assert!(!seq.tokens.is_empty(), "a drafting sequence has a valid row");
        assert_eq!(seq.tokens.len(), seq.rows.len(), "one token for each valid row");
        assert!(!seq.following.is_empty(), "the token behind the last valid row is known");
        assert!(seq.n_propose <= self.num_speculative_tokens, "n_propose is within the limit");
    }

    /// Returns what recursive steps continue.
    fn prefix_steps<M: DraftModel + ?Sized>(
        &mut self,
        model: &M,
        seqs: &[DraftSeq<'_>],
        hidden: &Tensor,
    ) -> Result<Chain, SpecDecodeError> {
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
        let (mut active, mut shared) = (Vec::new(), Vec::new());
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
                selection: None,
            })?;
            self.indexer[step] = output.indexer;
            let mut selection = output.selection;
            if is_last_step {
                self.choose(seqs, step, &active, &|| model.logits(step, &output.hidden))?;
            } else {
                let last = output.hidden.f_index_select(0, &last_rows)?;
                self.choose(seqs, step, &active, &|| model.logits(step, &last))?;
                selection = selection.map(|all| all.select_rows(&last_rows)).transpose()?;
            }
            if self.index_share && !active.is_empty() {
                let selection = selection.ok_or_else(|| no_selection(step))?;
                shared.push(SharedSelection { seqs: active.clone(), selection });
            }
            hidden = output.hidden;
        }
        Ok(Chain { active, hidden, shared })
    }

    fn recursive_steps<M: DraftModel + ?Sized>(
        &mut self,
        model: &M,
        seqs: &[DraftSeq<'_>],
        chain: Chain,
    ) -> Result<(), SpecDecodeError> {
        let Chain { mut active, mut hidden, mut shared } = chain;
        let device = hidden.device();
        for step in self.num_layers..self.num_speculative_tokens {
            let still = proposing(seqs, step);
            if still.is_empty() {
                break;
            }
            if still.len() < active.len() {
                let kept = rows_of(&still, &active);
                hidden = hidden.f_index_select(0, &upload(&kept, device)?)?;
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
            if let Some(shared) = shared.get_mut(layer) {
                shared.keep(&active, device)?;
            }
            let output = model.step(DraftInput {
                layer,
                token_ids: &upload(&self.ids, device)?,
                hidden: &hidden,
                layout: &DeviceLayout::upload(&self.layout, device),
                output_rows: None,
                selection: shared.get(layer).map(|shared| &shared.selection),
            })?;
            self.indexer[step] = output.indexer;
            hidden = output.hidden;
            self.choose(seqs, step, &active, &|| model.logits(layer, &hidden))?;
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

    /// Appends a token of each row of the `logits` of step `step` to the drafts of its sequence.
    fn choose(
        &mut self,
        seqs: &[DraftSeq<'_>],
        step: usize,
        active: &[usize],
        logits: &dyn Fn() -> Result<Tensor, DraftError>,
    ) -> Result<(), SpecDecodeError> {
        if active.is_empty() {
            return Ok(());
        }
        let logits = logits()?;
        if active.iter().any(|&seq| seqs[seq].is_drawn()) {
            return self.draw(seqs, step, active, &logits);
        }
        sampler::greedy(&logits, &mut self.chosen)?;
        assert_eq!(self.chosen.len(), active.len(), "one row of logits for each sequence");
        for (&seq, &draft) in active.iter().zip(&self.chosen) {
            self.drafts[seq].push(draft);
        }
        Ok(())
    }

    /// The same where some tokens are drawn.
    fn draw(
        &mut self,
        seqs: &[DraftSeq<'_>],
        step: usize,
        active: &[usize],
        logits: &Tensor,
    ) -> Result<(), SpecDecodeError> {
        let (greedy, history) = (SamplingParams::default(), TokenHistory::default());
        let row = |&seq: &usize| {
            let seq = &seqs[seq];
            // Behind the valid rows comes the known token, and behind that one the first draft.
            let position = u64::from(seq.first_position) + (seq.rows.len() + 1 + step) as u64;
            let params = seq.sampling.unwrap_or(&greedy);
            SamplingRow { params, history: &history, drafts: &[], position, grammar_mask: None }
        };
        let rows: Vec<SamplingRow<'_>> = active.iter().map(row).collect();
        let Sampled { ids, distribution } = sampler::sample(logits, &rows, Purpose::Draft)?;
        for (&seq, id) in active.iter().zip(ids) {
            let draft = id.map_err(|fault| DraftError::Model(fault.to_string()))?;
            self.drafts[seq].push(draft);
        }
        if let Some(distribution) = distribution {
            let seqs = active.iter().copied().filter(|&seq| seqs[seq].is_drawn()).collect();
            let probs = distribution.probs().shallow_clone();
            self.draws.push(DraftDraws { step, seqs, probs });
        }
        Ok(())
    }
}

impl DraftSeq<'_> {
    /// Whether its drafts are drawn.
    fn is_drawn(&self) -> bool {
        self.sampling.is_some_and(|params| !params.is_greedy())
    }
}

/// What recursive steps continue.
struct Chain {
    /// The sequences that the last prefix step drafted for.
    active: Vec<usize>,
    /// Their hidden states.
    hidden: Tensor,
    /// With index sharing, the selection of each layer.
    shared: Vec<SharedSelection>,
}

/// What a layer's prefix step chose for the last valid rows of some sequences.
struct SharedSelection {
    seqs: Vec<usize>,
    /// One row for each of `seqs`.
    selection: Selection,
}

impl SharedSelection {
    /// Narrows the selection to `seqs`, which are among its own.
    fn keep(&mut self, seqs: &[usize], device: Device) -> Result<(), SpecDecodeError> {
        if seqs.len() < self.seqs.len() {
            let kept = upload(&rows_of(seqs, &self.seqs), device)?;
            self.selection = self.selection.select_rows(&kept)?;
            self.seqs = seqs.to_vec();
        }
        Ok(())
    }
}

fn no_selection(step: usize) -> DraftError {
    DraftError::Model(format!("index sharing is on, and step {step} returned no selection"))
}

/// Where the sequences `some` are among `all`; both ascend.
fn rows_of(some: &[usize], all: &[usize]) -> Vec<i64> {
    let rows = all.iter().enumerate().filter(|(_, seq)| some.binary_search(seq).is_ok());
    rows.map(|(row, _)| row as i64).collect()
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
