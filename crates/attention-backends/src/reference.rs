//! The plain backend: tensor operations, one sequence after the other, on any device.

use tch::{Kind, Tensor};
use torch_ext::TensorError;

use crate::backend::{AttentionBackend, MlaQuery, width};
use crate::device_layout::DeviceLayout;

/// Gathers the valid latent rows of a sequence through its block table and attends them in
/// float32. The oracle of the other backends, and what runs on devices that have none.
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
        let rows = Tensor::f_cat(&[latent, k_pe], -1)?.f_to_kind(cache.f_kind()?)?;
        let slots = layout.slot_mapping.f_to_kind(Kind::Int64)?;
        // A clone shares the storage, so this writes to the cache.
        let _ = cache.shallow_clone().f_index_copy_(0, &slots, &rows)?;
        Ok(())
    }

    fn mla(
        &self,
        query: MlaQuery<'_>,
        cache: &Tensor,
        scale: f64,
        layout: &DeviceLayout,
    ) -> Result<Tensor, TensorError> {
        let starts = layout.host().cu_seqlens_q();
        let mut outputs = Vec::with_capacity(layout.host().n_seqs());
        for (seq, bounds) in starts.windows(2).enumerate() {
            let (first, n_rows) = (i64::from(bounds[0]), i64::from(bounds[1] - bounds[0]));
            let slots =
                Tensor::f_from_slice(&valid_slots(layout, seq))?.f_to_device(cache.device())?;
            let keys = cache.f_index_select(0, &slots)?.f_to_kind(Kind::Float)?;
            let query = MlaQuery {
                q_latent: &query.q_latent.f_narrow(0, first, n_rows)?,
                q_pe: &query.q_pe.f_narrow(0, first, n_rows)?,
            };
            let positions = layout.positions.f_narrow(0, first, n_rows)?;
            outputs.push(attend(query, &keys, scale, &positions)?);
        }
        if outputs.is_empty() {
            return Ok(query.q_latent.f_zeros_like()?);
        }
        Ok(Tensor::f_cat(&outputs, 0)?.f_to_kind(query.q_latent.f_kind()?)?)
    }
}

/// The slots of a sequence's valid positions.
fn valid_slots(layout: &DeviceLayout, seq: usize) -> Vec<i64> {
    let host = layout.host();
    let block_size = i64::from(host.block_size());
    let table = &host.block_tables()[seq * host.max_blocks()..][..host.max_blocks()];
    let slot = |position: i64| {
        let block = table[(position / block_size) as usize];
        assert!(block >= 0, "a valid position has a block");
        i64::from(block) * block_size + position % block_size
    };
    (0..i64::from(host.kv_lens()[seq])).map(slot).collect()
}

/// `keys` `[L, kv_lora_rank + rope_dim]` are the sequence's keys in order, `positions` `[n]` those
/// of its query rows.
fn attend(
    query: MlaQuery<'_>,
    keys: &Tensor,
    scale: f64,
    positions: &Tensor,
) -> Result<Tensor, TensorError> {
    let q = Tensor::f_cat(&[query.q_latent, query.q_pe], -1)?.f_to_kind(Kind::Float)?;
    let scores = (q.f_matmul(&keys.f_tr()?)?).f_mul_scalar(scale)?;
    let key_positions = Tensor::f_arange(keys.size()[0], (Kind::Int, keys.device()))?;
    let hidden = key_positions.f_gt_tensor(&positions.f_view([-1, 1, 1])?)?;
    let weights = scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?.f_softmax(-1, Kind::Float)?;
    Ok(weights.f_matmul(&keys.f_narrow(1, 0, width(query.q_latent))?)?)
}
