//! The plain backend: tensor operations, one sequence after the other, on any device.

use kernels::FP8_SCALE_BYTES;
use tch::{Kind, Tensor};
use torch_ext::TensorError;

use crate::backend::{AttentionBackend, GqaQuery, IndexQuery, MlaQuery, kv_shape, width};
use crate::device_layout::DeviceLayout;
use crate::selection::Selection;

/// Largest value of an 8-bit float (e4m3).
const FP8_MAX: f64 = 448.0;
/// Keeps the scale of an index key above zero.
const FP8_MIN_AMAX: f64 = 1e-4;

/// Gathers the valid rows of a sequence through its block table and works on them in float32. The
/// oracle of the other backends, and what runs on devices that have none.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceBackend;

impl AttentionBackend for ReferenceBackend {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn write_latent(
        &self,
        cache: &Tensor,
        latent: &Tensor,
        k_pe: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError> {
        write_rows(cache, &Tensor::f_cat(&[latent, k_pe], -1)?, layout)
    }

    fn mla(
        &self,
        query: MlaQuery<'_>,
        cache: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<Tensor, TensorError> {
        let selected = match query.selection {
            Some(selection) => {
                selection.check(layout)?;
                Some(selection.to_rows()?)
            }
            None => None,
        };
        let mut outputs = Vec::with_capacity(layout.host().n_seqs());
        for seq in Sequences::of(layout) {
            let keys = cache.f_index_select(0, &seq.slots(cache)?)?.f_to_kind(Kind::Float)?;
            let rows = |query: &Tensor| query.f_narrow(0, seq.first, seq.n_rows);
            let q = Tensor::f_cat(&[rows(query.q_latent)?, rows(query.q_pe)?], -1)?;
            let q = q.f_to_kind(Kind::Float)?.f_mul_scalar(query.scale)?;
            let kv_rank = width(query.q_latent);
            outputs.push(match &selected {
                None => attend_visible(&q, &keys, kv_rank, &seq.positions(layout)?)?,
                Some(selected) => {
                    let selected = &selected[seq.first as usize..][..seq.n_rows as usize];
                    attend_selected(&q, &keys, kv_rank, (selected, seq.host_positions()))?
                }
            });
        }
        if outputs.is_empty() {
            return Ok(query.q_latent.f_zeros_like()?);
        }
        Ok(Tensor::f_cat(&outputs, 0)?.f_to_kind(query.q_latent.f_kind()?)?)
    }

    fn write_kv(
        &self,
        cache: &Tensor,
        k: &Tensor,
        v: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError> {
        write_rows(cache, &Tensor::f_stack(&[k, v], 2)?, layout)
    }

    fn gqa(
        &self,
        query: GqaQuery<'_>,
        cache: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<Tensor, TensorError> {
        let [n_kv_heads, head_dim] = kv_shape(cache, query.q)?;
        let mut outputs = Vec::with_capacity(layout.host().n_seqs());
        for seq in Sequences::of(layout) {
            let rows = cache.f_index_select(0, &seq.slots(cache)?)?.f_to_kind(Kind::Float)?;
            // `[H_kv, L, head_dim]`, and as many query heads as share a head of these.
            let half = |idx: i64| rows.f_select(2, idx)?.f_transpose(0, 1);
            let (keys, values) = (half(0)?, half(1)?);
            let q = query.q.f_narrow(0, seq.first, seq.n_rows)?.f_to_kind(Kind::Float)?;
            let q = q.f_mul_scalar(query.scale)?;
            let q = q.f_view([seq.n_rows, n_kv_heads, -1, head_dim])?.f_transpose(0, 1)?;
            let scores = q.f_matmul(&keys.f_transpose(1, 2)?.f_unsqueeze(1)?)?;
            let weights = softmax_visible(&scores, &seq.positions(layout)?)?;
            let attended = weights.f_matmul(&values.f_unsqueeze(1)?)?.f_transpose(0, 1)?;
            outputs.push(attended.f_reshape([seq.n_rows, -1, head_dim])?);
        }
        if outputs.is_empty() {
            return Ok(query.q.f_zeros_like()?);
        }
        Ok(Tensor::f_cat(&outputs, 0)?.f_to_kind(query.q.f_kind()?)?)
    }

    fn write_index_keys(
        &self,
        cache: &Tensor,
        keys: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError> {
        check_finite("index keys", keys)?;
        if cache.f_kind()? == Kind::Uint8 {
            write_rows(cache, &to_fp8_rows(keys)?, layout)
        } else {
            write_rows(cache, keys, layout)
        }
    }

    fn select(
        &self,
        query: IndexQuery<'_>,
        cache: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(Selection, u64), TensorError> {
        check_finite("index queries", query.q)?;
        check_finite("weights of index heads", query.weights)?;
        let device = cache.device();
        let topk = query.topk as i64;
        let (mut indices, mut counts, mut n_scored) = (Vec::new(), Vec::new(), 0);
        for seq in Sequences::of(layout) {
            let keys = index_keys(&cache.f_index_select(0, &seq.slots(cache)?)?)?;
            for (row, &position) in (seq.first..).zip(seq.host_positions()) {
                let n_visible = i64::from(position) + 1;
                let selected = if n_visible <= topk {
                    Tensor::f_arange(n_visible, (Kind::Int64, device))?
                } else {
                    n_scored += n_visible as u64;
                    let scores = index_scores(&query, row, &keys.f_narrow(0, 0, n_visible)?)?;
                    // Stable: of equal scores the lower position comes first.
                    let (_, order) = scores.f_sort_stable(true, 0, true)?;
                    order.f_narrow(0, 0, topk)?.f_sort(0, false)?.0
                };
                let n_selected = selected.size()[0];
                let selected = selected.f_to_kind(Kind::Int)?;
                indices.push(selected.f_pad([0, topk - n_selected], "constant", -1.0)?);
                counts.push(n_selected as i32);
            }
        }
        let indices = match indices.is_empty() {
            true => Tensor::f_empty([0, topk], (Kind::Int, device))?,
            false => Tensor::f_stack(&indices, 0)?,
        };
        let counts = Tensor::f_from_slice(&counts)?.f_to_device(device)?;
        Ok((Selection::new(indices, counts)?, n_scored))
    }
}

fn check_finite(what: &'static str, values: &Tensor) -> Result<(), TensorError> {
    if values.f_isfinite()?.f_all()?.f_int64_value(&[])? == 1 {
        Ok(())
    } else {
        Err(TensorError::NotFinite { what })
    }
}

/// A sequence of a layout.
struct Sequences<'a> {
    layout: &'a DeviceLayout,
    seq: usize,
    /// Its first row in the batch.
    first: i64,
    /// Its query rows.
    n_rows: i64,
}

impl<'a> Sequences<'a> {
    fn of(layout: &'a DeviceLayout) -> impl Iterator<Item = Self> {
        let bounds = layout.host().cu_seqlens_q().windows(2).enumerate();
        bounds.map(move |(seq, bounds)| {
            let (first, n_rows) = (i64::from(bounds[0]), i64::from(bounds[1] - bounds[0]));
            Self { layout, seq, first, n_rows }
        })
    }

    fn positions(&self, layout: &DeviceLayout) -> Result<Tensor, TensorError> {
        Ok(layout.positions.f_narrow(0, self.first, self.n_rows)?)
    }

    fn host_positions(&self) -> &'a [i32] {
        &self.layout.host().positions()[self.first as usize..][..self.n_rows as usize]
    }

    /// The slots of its valid positions, on the device of `cache`.
    fn slots(&self, cache: &Tensor) -> Result<Tensor, TensorError> {
        let host = self.layout.host();
        let block_size = i64::from(host.block_size());
        let table = &host.block_tables()[self.seq * host.max_blocks()..][..host.max_blocks()];
        let slot = |position: i64| {
            let block = table[(position / block_size) as usize];
            assert!(block >= 0, "a valid position has a block");
            i64::from(block) * block_size + position % block_size
        };
        let slots: Vec<i64> = (0..i64::from(host.kv_lens()[self.seq])).map(slot).collect();
        Ok(Tensor::f_from_slice(&slots)?.f_to_device(cache.device())?)
    }
}

fn write_rows(cache: &Tensor, rows: &Tensor, layout: &DeviceLayout) -> Result<(), TensorError> {
    let slots = layout.slot_mapping.f_to_kind(Kind::Int64)?;
    let rows = rows.f_to_kind(cache.f_kind()?)?;
    // A clone shares the storage, so this writes to the cache.
    let _ = cache.shallow_clone().f_index_copy_(0, &slots, &rows)?;
    Ok(())
}

/// Attends scaled queries `q` `[n, H, width]` at `positions` `[n]` to the keys `[L, width]` of
/// their sequence that they see.
fn attend_visible(
    q: &Tensor,
    keys: &Tensor,
    kv_rank: i64,
    positions: &Tensor,
) -> Result<Tensor, TensorError> {
    let weights = softmax_visible(&q.f_matmul(&keys.f_tr()?)?, positions)?;
    Ok(weights.f_matmul(&keys.f_narrow(1, 0, kv_rank)?)?)
}

/// Weights from scores `[.., n, H, L]` of rows at `positions` `[n]` and all keys of their sequence:
/// those behind a row count nothing.
fn softmax_visible(scores: &Tensor, positions: &Tensor) -> Result<Tensor, TensorError> {
    let key_positions = Tensor::f_arange(width(scores), (Kind::Int, scores.device()))?;
    let hidden = key_positions.f_gt_tensor(&positions.f_view([-1, 1, 1])?)?;
    Ok(scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?.f_softmax(-1, Kind::Float)?)
}

/// As [`attend_visible`], each row to its selected keys.
fn attend_selected(
    q: &Tensor,
    keys: &Tensor,
    kv_rank: i64,
    (selected, positions): (&[Vec<i32>], &[i32]),
) -> Result<Tensor, TensorError> {
    let mut rows = Vec::with_capacity(selected.len());
    for (row, (selected, &position)) in selected.iter().zip(positions).enumerate() {
        let is_visible = |&key: &i32| (0..=position).contains(&key);
        assert!(selected.iter().all(is_visible), "a row attends keys that it sees");
        let indices: Vec<i64> = selected.iter().map(|&key| i64::from(key)).collect();
        let indices = Tensor::f_from_slice(&indices)?.f_to_device(keys.device())?;
        let keys = keys.f_index_select(0, &indices)?;
        // Without keys this is an empty sum, hence zero.
        let weights = q.f_get(row as i64)?.f_matmul(&keys.f_tr()?)?.f_softmax(-1, Kind::Float)?;
        rows.push(weights.f_matmul(&keys.f_narrow(1, 0, kv_rank)?)?);
    }
    Ok(Tensor::f_stack(&rows, 0)?)
}

/// Index scores of row `row` over `keys` f32 `[n, index_head_dim]`, `[n]`.
fn index_scores(query: &IndexQuery<'_>, row: i64, keys: &Tensor) -> Result<Tensor, TensorError> {
    let q = query.q.f_get(row)?.f_to_kind(Kind::Float)?;
    let products = q.f_matmul(&keys.f_tr()?)?.f_mul_scalar(query.scale())?.f_relu()?;
    let weights = query.weights.f_get(row)?.f_unsqueeze(0)?;
    Ok(weights.f_matmul(&products)?.f_squeeze_dim(0)?)
}

/// The keys in rows of an index cache, f32 `[n, index_head_dim]`.
fn index_keys(rows: &Tensor) -> Result<Tensor, TensorError> {
    if rows.f_kind()? != Kind::Uint8 {
        return Ok(rows.f_to_kind(Kind::Float)?);
    }
    let scale_bytes = FP8_SCALE_BYTES as i64;
    let head_dim = width(rows) - scale_bytes;
    let codes = rows.f_narrow(1, 0, head_dim)?.f_contiguous()?;
    let scales = rows.f_narrow(1, head_dim, scale_bytes)?.f_contiguous()?;
    let codes = codes.f_view_dtype(Kind::Float8e4m3fn)?.f_to_kind(Kind::Float)?;
    Ok(codes.f_mul(&scales.f_view_dtype(Kind::Float)?)?)
}

/// Rows of an 8-bit index cache from `keys` `[n, index_head_dim]`.
fn to_fp8_rows(keys: &Tensor) -> Result<Tensor, TensorError> {
    let keys = keys.f_to_kind(Kind::Float)?;
    let amax = keys.f_abs()?.f_amax(-1, true)?.f_clamp_min(FP8_MIN_AMAX)?;
    let scales = amax.f_div_scalar(FP8_MAX)?.f_log2()?.f_ceil()?.f_exp2()?;
    let codes = keys.f_div(&scales)?.f_to_kind(Kind::Float8e4m3fn)?;
    let codes = codes.f_view_dtype(Kind::Uint8)?;
    Ok(Tensor::f_cat(&[codes, scales.f_view_dtype(Kind::Uint8)?], -1)?)
}
