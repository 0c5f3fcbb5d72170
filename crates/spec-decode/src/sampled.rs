//! The device side of verification: all rows of a step at once.

use engine_types::TokenId;
use sampler::{Distribution, Purpose, SamplingRow, choose, greedy_of_processed, select_rows};
use tch::{Device, Kind, TchError, Tensor};

use crate::error::SpecDecodeError;
use crate::metadata::SpecDecodeMetadata;

/// Probabilities that are computed at once: 128 MiB of them. A larger step is verified in parts,
/// since each takes several times its logits' memory.
const N_ELEMENTS_MAX: usize = 1 << 24;

/// What the drafts of a step were drawn from.
#[derive(Clone, Copy, Debug)]
pub struct DraftProbs<'a> {
    /// Distributions, `[*, vocab]`, of any floating-point kind, on the device of the logits.
    pub probs: &'a Tensor,
    /// For each draft of the metadata the row of `probs` that it was drawn from; none if it was
    /// not drawn but chosen.
    pub rows: &'a [Option<u32>],
}

/// What the host needs of a verified step.
#[derive(Debug, PartialEq)]
pub(crate) struct Choices {
    /// The target's choice at each logits row of greedy sequences.
    greedy: Vec<i64>,
    /// Accepted drafts and the token behind them, of each sampled sequence.
    sampled: Vec<Option<(usize, i64)>>,
}

impl Choices {
    pub(crate) fn of(
        metadata: &SpecDecodeMetadata,
        logits: &Tensor,
        rows: &[SamplingRow<'_>],
        draft_probs: Option<DraftProbs<'_>>,
    ) -> Result<Self, SpecDecodeError> {
        let vocab = logits.size2()?.1 as usize;
        Self::in_parts(metadata, logits, rows, draft_probs, N_ELEMENTS_MAX / vocab.max(1))
    }

    fn in_parts(
        metadata: &SpecDecodeMetadata,
        logits: &Tensor,
        rows: &[SamplingRow<'_>],
        draft_probs: Option<DraftProbs<'_>>,
        n_rows_max: usize,
    ) -> Result<Self, SpecDecodeError> {
        assert_eq!(rows.len(), metadata.n_logits(), "one row for each logits row");
        if let Some(DraftProbs { rows, .. }) = draft_probs {
            assert_eq!(rows.len(), metadata.draft_token_ids().len(), "one entry for each draft");
        }
        let (greedy_rows, sampled_rows): (Vec<usize>, Vec<usize>) =
            (0..rows.len()).partition(|&row_idx| rows[row_idx].params.is_greedy());
        let mut outputs = Vec::new();
        if !greedy_rows.is_empty() {
            let (logits, rows) = select_rows(logits, rows, &greedy_rows)?;
            outputs.push(greedy_of_processed(&logits, &rows)?);
        }
        let parts = Windows::parts(metadata, rows, draft_probs, n_rows_max);
        let mut later_rows = sampled_rows.as_slice();
        for windows in &parts {
            let (own_rows, later) = later_rows.split_at(windows.n_rows());
            later_rows = later;
            let (logits, rows) = select_rows(logits, rows, own_rows)?;
            let is_drawn = windows.q_rows.iter().any(|&q_row| q_row >= 0);
            let q = draft_probs.filter(|_| is_drawn).map(|draft_probs| draft_probs.probs);
            outputs.push(windows.verify(&Distribution::new(&logits, &rows)?, q)?.f_view(-1)?);
        }
        let mut choices =
            Self { greedy: vec![0; rows.len()], sampled: vec![None; metadata.n_seqs()] };
        if outputs.is_empty() {
            return Ok(choices);
        }
        let output = Vec::<i64>::try_from(&Tensor::f_cat(&outputs, 0)?)?;
        let (of_greedy, of_sampled) = output.split_at(greedy_rows.len());
        for (&row_idx, &code) in greedy_rows.iter().zip(of_greedy) {
            choices.greedy[row_idx] = code;
        }
        let sampled_seqs = parts.iter().flat_map(|windows| &windows.seqs);
        for (&seq, pair) in sampled_seqs.zip(of_sampled.chunks_exact(2)) {
            choices.sampled[seq] = Some((pair[0] as usize, pair[1]));
        }
        Ok(choices)
    }

    /// How many of `drafts` are accepted, and the token behind them or a negative code.
    pub(crate) fn of_window(&self, seq: usize, first: usize, drafts: &[TokenId]) -> (usize, i64) {
        self.sampled[seq].unwrap_or_else(|| {
            let choices = &self.greedy[first..=first + drafts.len()];
            let is_same = |(&draft, &choice): (&TokenId, &i64)| i64::from(draft) == choice;
            let n_accepted = drafts.iter().zip(choices).take_while(|&pair| is_same(pair)).count();
            (n_accepted, choices[n_accepted])
        })
    }
}

/// Verify windows of sampled sequences. Rows are counted among theirs, `R` of `B` windows.
#[derive(Debug, Default)]
struct Windows {
    /// Which sequence of the step each window is, `[B]`.
    seqs: Vec<usize>,
    /// First row of each window, `[B]`.
    first: Vec<i64>,
    n_drafts: Vec<i64>,
    /// Draft that each row checks, `[R]`; 0 for a bonus row.
    drafts: Vec<i64>,
    /// Row of the draft probabilities of each row, `[R]`; negative where there is none.
    q_rows: Vec<i64>,
    /// 1 for a row that checks a chosen draft, `[R]`, else 0.
    is_one_hot: Vec<i64>,
    /// Uniform numbers that accept drawn drafts, `[R]`; infinite for a bonus row, which accepts
    /// nothing.
    accept: Vec<f64>,
    /// Uniform numbers that choose, `[R]`: in the row of a drawn draft what replaces it, in the
    /// others the token that would be chosen without drafts.
    choose: Vec<f64>,
}

impl Windows {
    /// The windows of all sampled sequences, in parts of at most `n_rows_max` rows or one window.
    fn parts(
        metadata: &SpecDecodeMetadata,
        rows: &[SamplingRow<'_>],
        draft_probs: Option<DraftProbs<'_>>,
        n_rows_max: usize,
    ) -> Vec<Self> {
        let mut parts: Vec<Self> = Vec::new();
        let mut n_before = 0;
        for (seq, (first, drafts)) in metadata.windows().enumerate() {
            let own = &rows[first..=first + drafts.len()];
            let is_greedy = own[0].params.is_greedy();
            assert!(own.iter().all(|row| row.params.is_greedy() == is_greedy), "one request");
            if !is_greedy {
                let has_room = |last: &Self| last.n_rows() + own.len() <= n_rows_max;
                if !parts.last().is_some_and(has_room) {
                    parts.push(Self::default());
                }
                let windows = parts.last_mut().expect("one was pushed");
                windows.seqs.push(seq);
                windows.first.push(windows.drafts.len() as i64);
                windows.n_drafts.push(drafts.len() as i64);
                for (at, (row, &draft)) in own.iter().zip(drafts).enumerate() {
                    let q_row = draft_probs.and_then(|q| q.rows[n_before + at]);
                    windows.push_draft(row, draft, q_row);
                }
                windows.push_bonus(&own[drafts.len()]);
            }
            n_before += drafts.len();
        }
        parts
    }

    fn n_rows(&self) -> usize {
        self.drafts.len()
    }

    fn push_draft(&mut self, row: &SamplingRow<'_>, draft: TokenId, q_row: Option<u32>) {
        self.drafts.push(i64::from(draft));
        self.q_rows.push(q_row.map_or(-1, i64::from));
        self.is_one_hot.push(i64::from(q_row.is_none()));
        self.accept.push(row.uniform(Purpose::Accept));
        let replaces = if q_row.is_some() { Purpose::Recover } else { Purpose::Sample };
        self.choose.push(row.uniform(replaces));
    }

    fn push_bonus(&mut self, row: &SamplingRow<'_>) {
        self.drafts.push(0);
        self.q_rows.push(-1);
        self.is_one_hot.push(0);
        self.accept.push(f64::INFINITY);
        self.choose.push(row.uniform(Purpose::Sample));
    }

    /// Accepted drafts and the token behind them, i64 `[B, 2]`.
    ///
    /// Where a draft was chosen, the target's own choice is made as if there were none, and the
    /// draft is accepted if it is the same. That is rejection sampling against a one-hot
    /// distribution: `d` stays with probability `p(d)`, and what comes in its place is
    /// distributed as `p` without `d`. And it makes the tokens the same for any drafts.
    fn verify(&self, target: &Distribution, q: Option<&Tensor>) -> Result<Tensor, SpecDecodeError> {
        let p = target.probs();
        let device = p.device();
        let drafts = upload(&self.drafts, device)?;
        let p_of_draft = p.f_gather(-1, &drafts.f_unsqueeze(-1)?, false)?;
        let mut threshold = upload(&self.accept, device)?;
        if let Some(q) = q {
            let _ = threshold.f_mul_(&self.q_of_drafts(q)?)?;
        }
        // `u < p / q` without the division: a draft with q = 0 is accepted if p allows it at all.
        let is_below = threshold.f_lt_tensor(&p_of_draft.f_squeeze_dim(-1)?)?;
        let uniform = upload(&self.choose, device)?;
        let chosen = choose(p, &uniform)?;
        let has_choice = target.codes().f_ge(0)?;
        let is_same = chosen.f_eq_tensor(&drafts)?.f_logical_and(&has_choice)?;
        let is_one_hot = upload(&self.is_one_hot, device)?.f_gt(0)?;
        let is_accepted = is_same.f_where_self(&is_one_hot, &is_below)?;
        let n_accepted = self.first_stop(&is_accepted.f_logical_not()?)?;
        let stop = upload(&self.first, device)?.f_add(&n_accepted)?;

        let at_stop = |values: &Tensor| values.f_index_select(0, &stop);
        let mut chosen = at_stop(&chosen)?;
        if let Some(q) = q {
            let q_rows = at_stop(&upload(&self.q_rows, device)?)?;
            let weights = residual(&at_stop(p)?, q, &q_rows)?;
            let in_place = choose(&weights, &at_stop(&uniform)?)?;
            chosen = in_place.f_where_self(&q_rows.f_ge(0)?, &chosen)?;
        }
        let codes = at_stop(target.codes())?;
        let chosen = codes.f_where_self(&codes.f_lt(0)?, &chosen)?;
        Ok(Tensor::f_stack(&[n_accepted, chosen], -1)?)
    }

    /// `q(d)` of each row's draft, f64 `[R]`; 1 where it was chosen, and in bonus rows.
    fn q_of_drafts(&self, q: &Tensor) -> Result<Tensor, TchError> {
        let (_, vocab) = q.size2()?;
        let device = q.device();
        let drawn = (0..).zip(&self.q_rows).filter(|&(_, &q_row)| q_row >= 0);
        let (rows, elements): (Vec<i64>, Vec<i64>) =
            drawn.map(|(row, q_row)| (row, q_row * vocab + self.drafts[row as usize])).unzip();
        let of_drawn = q.f_reshape(-1)?.f_index_select(0, &upload(&elements, device)?)?;
        let ones = Tensor::f_ones(self.drafts.len() as i64, (Kind::Double, device))?;
        ones.f_index_copy(0, &upload(&rows, device)?, &of_drawn.f_to_kind(Kind::Double)?)
    }

    /// Place in its window of each window's first row that stops, i64 `[B]`. The bonus row stops.
    fn first_stop(&self, stops: &Tensor) -> Result<Tensor, TchError> {
        let width = 1 + self.n_drafts.iter().max().copied().unwrap_or(0);
        let places: Vec<i64> = (self.first.iter().zip(&self.n_drafts))
            .flat_map(|(&first, &n_drafts)| (0..width).map(move |at| first + at.min(n_drafts)))
            .collect();
        let stops =
            stops.f_to_kind(Kind::Int64)?.f_index_select(0, &upload(&places, stops.device())?)?;
        // The first of equal maxima.
        stops.f_view([-1, width])?.f_argmax(-1, false)
    }
}

/// `max(p - q, 0)` in rows with a `q_row` that is not negative; `p` in the others, and where that
/// is all zero.
fn residual(p: &Tensor, q: &Tensor, q_rows: &Tensor) -> Result<Tensor, TchError> {
    let has_none = q_rows.f_lt(0)?.f_unsqueeze(-1)?;
    let q = q.f_index_select(0, &q_rows.f_clamp_min(0)?)?.f_to_kind(Kind::Double)?;
    let q = q.f_masked_fill(&has_none, 0.0)?;
    let left = p.f_sub(&q)?.f_clamp_min(0.0)?;
    let is_empty = left.f_amax([-1i64].as_slice(), true)?.f_eq(0.0)?;
    p.f_where_self(&is_empty, &left)
}

fn upload<T: tch::kind::Element>(values: &[T], device: Device) -> Result<Tensor, TchError> {
    Tensor::f_from_slice(values)?.f_to_device(device)
}

#[cfg(test)]
mod tests {
    use sampler::{SamplingParams, TokenHistory};

    use super::*;

    /// Ragged windows, every third one greedy and some drafts drawn, in parts of every size.
    #[test]
    fn parts_of_a_step_make_the_same_choices() {
        let (vocab, history) = (6, TokenHistory::new(&[1]));
        let params: Vec<SamplingParams> = (0..12)
            .map(|seq| SamplingParams {
                temperature: if seq % 3 == 0 { 0.0 } else { 1.0 },
                top_k: seq % 4,
                seed: u64::from(seq),
                ..SamplingParams::default()
            })
            .collect();
        let mut metadata = SpecDecodeMetadata::default();
        let (mut rows, mut q_rows) = (Vec::new(), Vec::new());
        for (seq, params) in params.iter().enumerate() {
            let drafts = &[2, 4, 0, 3][..seq % 5];
            metadata.push(0..drafts.len() + 1, drafts);
            rows.extend((0..=drafts.len()).map(|at| SamplingRow {
                params,
                history: &history,
                drafts: &drafts[..at],
                position: 1 + at as u64,
                grammar_mask: None,
            }));
            q_rows.extend((0..drafts.len()).map(|at| (at % 2 == 0).then_some(at as u32)));
        }
        tch::manual_seed(6);
        let options = (Kind::Float, Device::Cpu);
        let logits = Tensor::randn([rows.len() as i64, vocab], options);
        let probs = Tensor::randn([4, vocab], options).softmax(-1, Kind::Double);
        let q = Some(DraftProbs { probs: &probs, rows: &q_rows });
        let whole = Choices::of(&metadata, &logits, &rows, q).unwrap();
        let n_accepted = whole.sampled.iter().flatten().map(|(n_accepted, _)| n_accepted);
        assert!(n_accepted.sum::<usize>() > 0);
        // Sampled windows have 2, 3, 5, 1, 3, 4, 1 and 2 rows.
        for (n_rows_max, n_parts) in [(0, 8), (1, 8), (4, 6), (7, 4), (100, 1)] {
            assert_eq!(Windows::parts(&metadata, &rows, q, n_rows_max).len(), n_parts);
            let parts = Choices::in_parts(&metadata, &logits, &rows, q, n_rows_max).unwrap();
            assert_eq!(parts, whole);
        }
    }
}
