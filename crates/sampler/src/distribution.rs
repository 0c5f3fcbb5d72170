//! Processed logits to a distribution, and a distribution to a token.

use tch::{Kind, TchError, Tensor};

use crate::error::SamplerError;
use crate::noise::Purpose;
use crate::params::SamplingRow;
use crate::processors::{check_rows, process, upload};
use crate::ranking;

/// Most likely tokens that are ranked before the whole vocabulary is. More than `top_k` and `top_p`
/// usually leave, and few enough that picking them is cheap.
const N_CANDIDATES: i64 = 1024;

/// The distribution that each of some sampled rows chooses from.
#[derive(Debug)]
pub struct Distribution {
    probs: Tensor,
    codes: Tensor,
}

impl Distribution {
    /// The distribution of each row after [all processors](process) and then
    ///
    /// 1. `temperature` divides the logits,
    /// 2. `top_k` keeps exactly that many most likely tokens, of equally likely ones the lower ids,
    /// 3. `top_p` keeps, of what is left, each token for which the more likely ones have less than
    ///    `top_p` of the probability: the smallest set that reaches `top_p`, never empty,
    /// 4. `min_p` keeps tokens at least `min_p` times as likely as the most likely one,
    ///
    /// as in transformers, which differs where tokens are equally likely: its `top_k` keeps all
    /// that tie with the last one, its `top_p` any of them. Probabilities and their sums are
    /// computed in f64. A row's result has the same bits alone and in any batch on the CPU
    /// \[INV-11].
    ///
    /// `logits` are `[R, vocab]`, left alone. A row without a token to choose does not harm the
    /// others: its choices are negative codes, see [`Distribution::codes`].
    ///
    /// # Errors
    ///
    /// [`SamplerError::Tensor`] if a tensor operation fails.
    ///
    /// # Panics
    ///
    /// If there is not one row for each row of the logits, or a row is greedy.
    pub fn new(logits: &Tensor, rows: &[SamplingRow<'_>]) -> Result<Self, SamplerError> {
        assert!(rows.iter().all(|row| !row.params.is_greedy()), "greedy rows have no distribution");
        let processed = process(logits, rows)?;
        let max = processed.f_amax([-1i64].as_slice(), true)?;
        let codes = check_rows(&max, true)?.f_squeeze_dim(-1)?;
        // The largest logit becomes 0, so that no temperature is too small.
        let mut scaled = processed.f_to_kind(Kind::Double)?.f_sub_(&max)?;
        if rows.iter().any(|row| row.params.temperature != 1.0) {
            let temperatures: Vec<f64> =
                rows.iter().map(|row| f64::from(row.params.temperature)).collect();
            let temperatures = upload(&temperatures, logits.device())?.f_unsqueeze(-1)?;
            let _ = scaled.f_div_(&temperatures)?;
        }
        let mut probs = scaled.f_softmax(-1, None)?;
        truncate(&mut probs, &processed, rows)?;
        Ok(Self { probs, codes })
    }

    /// f64 `[R, vocab]`; each row sums to 1, or is NaN if it has no token to choose.
    pub fn probs(&self) -> &Tensor {
        &self.probs
    }

    /// i64 `[R]`: 0, or a negative code where a row has no token to choose, which
    /// [`explain`](crate::explain) turns into words.
    pub fn codes(&self) -> &Tensor {
        &self.codes
    }

    /// One token for each row, i64 `[R]` on the device of the logits; a negative code where there
    /// is none. `rows` are those of [`Distribution::new`]; `purpose` says what the draw is for.
    ///
    /// # Errors
    ///
    /// [`SamplerError::Tensor`] if a tensor operation fails.
    pub fn sample(
        &self,
        rows: &[SamplingRow<'_>],
        purpose: Purpose,
    ) -> Result<Tensor, SamplerError> {
        let noise: Vec<f64> = rows.iter().map(|row| row.uniform(purpose)).collect();
        let chosen = choose(&self.probs, &upload(&noise, self.probs.device())?)?;
        Ok(self.codes.f_where_self(&self.codes.f_lt(0)?, &chosen)?)
    }
}

/// For each row of f64 `weights`, `[R, vocab]`, at least 0 and in any scale, the token at the
/// point `uniform`, f64 `[R]` in `[0, 1)`, of its cumulative weights in the order of ids:
/// i64 `[R]`. A token of weight 0 is never chosen, unless all are.
///
/// # Errors
///
/// [`SamplerError::Tensor`] if a tensor operation fails.
pub fn choose(weights: &Tensor, uniform: &Tensor) -> Result<Tensor, SamplerError> {
    let (_, vocab) = weights.size2()?;
    let cumulative = weights.f_cumsum(-1, Kind::Double)?;
    let total = cumulative.f_narrow(-1, vocab - 1, 1)?;
    // Below the total for every number below 1, also after rounding: the chosen token is the
    // first whose cumulative weight is above the point.
    let point = total.f_mul(&uniform.f_unsqueeze(-1)?)?;
    let chosen = point.f_searchsorted(&cumulative, false, true, "right", None::<Tensor>)?;
    Ok(chosen.f_clamp_max(vocab - 1)?.f_squeeze_dim(-1)?)
}

/// Applies `top_k`, `top_p` and `min_p` to the rows that have one of them.
fn truncate(
    probs: &mut Tensor,
    processed: &Tensor,
    rows: &[SamplingRow<'_>],
) -> Result<(), TchError> {
    let (n_rows, vocab) = probs.size2()?;
    let device = probs.device();
    let truncated: Vec<i64> =
        (0..n_rows).filter(|&row| rows[row as usize].params.truncates()).collect();
    if truncated.is_empty() {
        return Ok(());
    }
    let is_all = truncated.len() == rows.len();
    let index = upload(&truncated, device)?;
    let of_rows = |tensor: &Tensor| {
        if is_all { Ok(tensor.shallow_clone()) } else { tensor.f_index_select(0, &index) }
    };
    let limits: Vec<Limits> =
        truncated.iter().map(|&row| Limits::of(&rows[row as usize], vocab)).collect();
    let (mut kept, keys) = (of_rows(probs)?, ranking::keys(&of_rows(processed)?)?);

    let n_candidates = limits.iter().map(Limits::n_candidates).max().unwrap_or(vocab).min(vocab);
    let cut = Cut::find(&kept, &keys, &limits, n_candidates)?;
    let Cut { mut last_key, mut mass, .. } = cut;
    if n_candidates < vocab {
        let is_open = Vec::<bool>::try_from(&cut.is_open)?;
        let open: Vec<i64> = (0..).zip(is_open).filter_map(|(r, is)| is.then_some(r)).collect();
        if !open.is_empty() {
            let index = upload(&open, device)?;
            let select = |tensor: &Tensor| tensor.f_index_select(0, &index);
            let limits: Vec<Limits> = open.iter().map(|&row| limits[row as usize]).collect();
            let cut = Cut::find(&select(&kept)?, &select(&keys)?, &limits, vocab)?;
            let _ = last_key.f_index_copy_(0, &index, &cut.last_key)?;
            let _ = mass.f_index_copy_(0, &index, &cut.mass)?;
        }
    }
    let _ = kept.f_masked_fill_(&keys.f_lt_tensor(&last_key)?, 0.0)?.f_div_(&mass)?;
    if !is_all {
        let _ = probs.f_index_copy_(0, &index, &kept)?;
    }
    Ok(())
}

/// How a row is truncated.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// At most the vocabulary.
    top_k: i64,
    top_p: f64,
    min_p: f64,
    vocab: i64,
}

impl Limits {
    fn of(row: &SamplingRow<'_>, vocab: i64) -> Self {
        let params = row.params;
        let top_k = if params.top_k == 0 { vocab } else { vocab.min(i64::from(params.top_k)) };
        let (top_p, min_p) = (f64::from(params.top_p), f64::from(params.min_p));
        // Rounding may bring the cumulative probability to 1 before the last token.
        let top_p = if top_p == 1.0 { f64::INFINITY } else { top_p };
        Self { top_k, top_p, min_p, vocab }
    }

    fn n_candidates(&self) -> i64 {
        self.top_k.min(N_CANDIDATES)
    }
}

/// Where each row's kept tokens end.
struct Cut {
    /// Key of the least likely kept token, i64 `[R, 1]`.
    last_key: Tensor,
    /// Probability of the kept tokens, f64 `[R, 1]`.
    mass: Tensor,
    /// Whether the candidates were too few to know the row's end, bool `[R]`.
    is_open: Tensor,
}

impl Cut {
    /// Ranks the `n_candidates` most likely tokens of each row. Prefix sums run in the order of
    /// ranks, so that they do not depend on how many candidates there are.
    fn find(
        probs: &Tensor,
        keys: &Tensor,
        limits: &[Limits],
        n_candidates: i64,
    ) -> Result<Self, TchError> {
        let device = probs.device();
        let column = |of: &dyn Fn(&Limits) -> f64| {
            let values: Vec<f64> = limits.iter().map(of).collect();
            upload(&values, device)?.f_unsqueeze(-1)
        };
        let (ranked_keys, ids) = keys.f_topk(n_candidates, -1, true, true)?;
        let ranked = probs.f_gather(-1, &ids, false)?;
        let cumulative = ranked.f_cumsum(-1, Kind::Double)?;
        let above = cumulative.f_narrow(-1, 0, n_candidates - 1)?.f_constant_pad_nd([1, 0])?;

        // What `top_k` leaves has this much probability; without it, all of it.
        let last: Vec<i64> = limits.iter().map(|l| l.top_k.min(n_candidates) - 1).collect();
        let of_top_k = cumulative.f_gather(-1, &upload(&last, device)?.f_unsqueeze(-1)?, false)?;
        let is_cut = column(&|l| f64::from(u8::from(l.top_k < l.vocab)))?.f_gt(0.0)?;
        let left = of_top_k.f_where_scalarother(&is_cut, 1.0)?;

        let rank = Tensor::f_arange(n_candidates, (Kind::Double, device))?;
        let is_kept = rank.f_lt_tensor(&column(&|l| l.top_k as f64)?)?;
        let in_top_p = above.f_lt_tensor(&left.f_mul(&column(&|l| l.top_p)?)?)?;
        let least = ranked.f_narrow(-1, 0, 1)?.f_mul(&column(&|l| l.min_p)?)?;
        let is_likely = ranked.f_ge_tensor(&least)?;
        let is_kept = is_kept.f_logical_and(&in_top_p)?.f_logical_and(&is_likely)?;
        let n_kept =
            is_kept.f_sum_dim_intlist([-1i64].as_slice(), true, Kind::Int64)?.f_clamp_min(1)?;

        let end = n_kept.f_sub_scalar(1)?;
        let knows_end = column(&|l| f64::from(u8::from(l.top_k <= n_candidates)))?.f_gt(0.0)?;
        let ends_within = n_kept.f_lt(n_candidates)?.f_logical_and(&is_cut.f_logical_not()?)?;
        let is_open = knows_end.f_logical_or(&ends_within)?.f_logical_not()?;
        Ok(Self {
            last_key: ranked_keys.f_gather(-1, &end, false)?,
            mass: cumulative.f_gather(-1, &end, false)?,
            is_open: is_open.f_squeeze_dim(-1)?,
        })
    }
}
