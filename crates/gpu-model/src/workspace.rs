//! What passes work in: one set of buffers serves all layers, in turn.

use gpu_kernels::{Experts, MoeScratch, RouterScratch};
use gpu_runtime::{Buffer, Gpu, GpuError, View};
use model_config::MoeConfig;

use crate::loader::Element;
use crate::sizes::Sizes;

/// Buffers of a pass of up to `max_rows` rows.
#[derive(Debug)]
pub(crate) struct Workspace<E> {
    /// The residual stream.
    pub(crate) residual: Buffer<f32>,
    /// Its normalised form, input of the next matrix; behind the last layer, hidden states.
    pub(crate) x: Buffer<E>,
    pub(crate) qkv: Buffer<E>,
    pub(crate) q_a: Buffer<E>,
    pub(crate) q: Buffer<E>,
    pub(crate) q_latent: Buffer<E>,
    pub(crate) q_pe: Buffer<E>,
    pub(crate) attended: Buffer<E>,
    pub(crate) values: Buffer<E>,
    pub(crate) out: Buffer<E>,
    pub(crate) gate_up: Buffer<E>,
    pub(crate) act: Buffer<E>,
    pub(crate) index_q: Buffer<E>,
    pub(crate) index_weights: Buffer<f32>,
    /// The keys that rows attend.
    pub(crate) indices: Buffer<i32>,
    pub(crate) counts: Buffer<i32>,
    /// Embeddings beside hidden states, input of an MTP layer.
    pub(crate) mtp: Buffer<E>,
    pub(crate) moe: Option<MoeSpace<E>>,
}

/// What a mixture of experts works in.
#[derive(Debug)]
pub(crate) struct MoeSpace<E> {
    pub(crate) ids: Buffer<i32>,
    pub(crate) weights: Buffer<f32>,
    pub(crate) router: RouterScratch,
    pub(crate) experts: MoeScratch<E>,
}

impl<E: Element> Workspace<E> {
    pub(crate) fn new(
        gpu: &Gpu,
        sizes: &Sizes,
        moe: Option<(&MoeConfig, Experts<'_, E>)>,
        max_rows: usize,
    ) -> Result<Self, GpuError> {
        let Sizes { hidden, n_heads, .. } = *sizes;
        let elements = |width: usize| gpu.alloc::<E>(max_rows * width);
        Ok(Self {
            residual: gpu.alloc(max_rows * hidden)?,
            x: elements(hidden)?,
            // One row more: index keys are read as a part of rows that begins inside of one.
            qkv: gpu.alloc((max_rows + 1) * sizes.qkv(true))?,
            q_a: elements(sizes.q)?,
            q: elements(n_heads * sizes.qk())?,
            q_latent: elements(n_heads * sizes.kv_rank)?,
            q_pe: elements(n_heads * sizes.rope)?,
            attended: elements(n_heads * sizes.kv_rank)?,
            values: elements(n_heads * sizes.v)?,
            out: elements(hidden)?,
            gate_up: elements(2 * sizes.inner)?,
            act: elements(sizes.inner)?,
            index_q: elements(sizes.index_heads * sizes.index_dim)?,
            index_weights: gpu.alloc(max_rows * sizes.index_heads)?,
            indices: gpu.alloc(max_rows * sizes.topk)?,
            counts: gpu.alloc(max_rows)?,
            mtp: elements(2 * hidden)?,
            moe: match moe {
                None => None,
                Some((config, experts)) => Some(MoeSpace {
                    ids: gpu.alloc(max_rows * sizes.moe_topk)?,
                    weights: gpu.alloc(max_rows * sizes.moe_topk)?,
                    router: RouterScratch::new(gpu, max_rows, config.n_routed_experts)?,
                    experts: MoeScratch::new(gpu, max_rows, sizes.moe_topk, &experts)?,
                }),
            },
        })
    }
}

/// The query heads, which lie in `q` or, without a query latent, in `qkv`; and the values from a
/// row to the next.
pub(crate) fn query_heads<'a, E: Element>(
    sizes: &Sizes,
    (q, qkv): (&'a Buffer<E>, &'a Buffer<E>),
    has_indexer: bool,
) -> (View<'a, E>, usize) {
    match sizes.has_latent {
        true => (q.view(), sizes.n_heads * sizes.qk()),
        false => (qkv.view(), sizes.qkv(has_indexer)),
    }
}
