//! One decoder layer as a list of launches.

use gpu_kernels::{
    ExpertSum, Experts, Heads, IndexBatch, IndexKeys, MlaBatch, MlaLatents, Norm, RopeTable,
    RouterWeights, Routing, RoutingMut, SelectedKeys, SelectionMut,
};
use gpu_runtime::{Buffer, Gemm, GpuError, Matrix, MatrixMut, View, ViewMut, WeightLayout};
use model_config::MoeConfig;

use crate::device::Device;
use crate::loader::Element;
use crate::pass::Pass;
use crate::sizes::Sizes;
use crate::weights::{FeedForward, IndexerWeights, Layer, Mlp, Moe};
use crate::workspace::{MoeSpace, Workspace, query_heads};

/// Added to the variance of index keys.
const KEY_NORM_EPS: f32 = 1e-6;

/// The caches of a layer.
#[derive(Debug)]
pub(crate) struct LayerCache<E> {
    /// `[n_slots, kv_lora_rank + rope_dim]`.
    pub(crate) latent: Buffer<E>,
    /// `[n_slots, index_head_dim]`, in layers with an indexer.
    pub(crate) index: Option<Buffer<E>>,
}

/// Which keys the rows of a layer attend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    /// All that they see.
    All,
    /// What the workspace says.
    Selected,
    /// What this layer's indexer chooses, and leaves in the workspace.
    Choose,
}

impl<E: Element> Layer<E> {
    /// Writes the latents of all rows, and their index keys if the indexer is to run. The input is
    /// `ws.x`; queries begin in `ws.q_a`, or in `ws.qkv` where they have no latent.
    pub(crate) fn write_kv(
        &self,
        device: &Device<E>,
        pass: &Pass<'_>,
        keys: Keys,
        cache: &mut LayerCache<E>,
        ws: &mut Workspace<E>,
    ) -> Result<(), GpuError> {
        let sizes = &device.sizes;
        let width = sizes.qkv(self.indexer.is_some());
        let n_rows = pass.rows.n_rows;
        device.linear(n_rows, (ws.x.view(), sizes.hidden), &self.qkv, ws.qkv.view_mut())?;
        let norm = |weight| device.norm(weight);
        let q_norm = match &self.q_b {
            Some((weight, _)) => Some((norm(weight), ws.q_a.view_mut())),
            None => None,
        };
        let latents = MlaLatents {
            qkv: ws.qkv.view(),
            row_stride: width,
            q_width: sizes.q,
            q_norm,
            kv_norm: norm(&self.kv_norm),
        };
        let table = device.rope.table();
        device.kernels.mla_latent(pass.rows, table, latents, cache.latent.view_mut())?;
        let (Some(indexer), Some(index)) = (&self.indexer, &mut cache.index) else { return Ok(()) };
        if keys != Keys::Choose {
            return Ok(());
        }
        let keys = IndexKeys {
            keys: ws.qkv.slice(sizes.q + sizes.cache()..),
            row_stride: width,
            weight: indexer.key_norm.view(),
            bias: indexer.key_bias.view(),
            eps: KEY_NORM_EPS,
        };
        let table = device.rope.index_table();
        device.kernels.index_key(pass.rows, table, &keys, index.view_mut())
    }

    /// Attention and feed-forward of rows whose latents are written; leaves the residual stream,
    /// and `next` of it in `ws.x`.
    pub(crate) fn attend(
        &self,
        device: &Device<E>,
        pass: &Pass<'_>,
        keys: Keys,
        cache: &LayerCache<E>,
        (ws, next): (&mut Workspace<E>, Norm<'_>),
    ) -> Result<(), GpuError> {
        if let (Keys::Choose, Some(indexer), Some(index)) = (keys, &self.indexer, &cache.index) {
            indexer.choose(device, pass, index, ws)?;
        }
        self.queries(device, pass, ws)?;
        // Layers that select keys have chunks like any other rows.
        let chunks = pass.chunks.filter(|_| keys == Keys::All);
        if chunks.is_none_or(|chunks| !chunks.is_whole_pass) {
            self.attend_latents(device, pass, keys, cache, ws)?;
        }
        if let Some(chunks) = chunks {
            device.attend_chunks(pass, chunks, &self.kv_b, cache, ws)?;
        }
        let (n_rows, sizes) = (pass.rows.n_rows, &device.sizes);
        let values = (ws.values.view(), sizes.n_heads * sizes.v);
        device.linear(n_rows, values, &self.o, ws.out.view_mut())?;
        let norm = device.norm(&self.post_norm);
        let (out, residual) = (ws.out.view(), ws.residual.view_mut());
        device.kernels.add_rms_norm(pass.rows, out, residual, norm, ws.x.view_mut())?;
        match &self.feed_forward {
            FeedForward::Dense(mlp) => {
                mlp.forward(device, pass, ws)?;
                let (out, residual) = (ws.out.view(), ws.residual.view_mut());
                device.kernels.add_rms_norm(pass.rows, out, residual, next, ws.x.view_mut())
            }
            FeedForward::Moe(moe) => moe.forward(device, pass, ws, next),
        }
    }

    /// Query heads, and their rotary part.
    fn queries(
        &self,
        device: &Device<E>,
        pass: &Pass<'_>,
        ws: &mut Workspace<E>,
    ) -> Result<(), GpuError> {
        let (sizes, n_rows) = (&device.sizes, pass.rows.n_rows);
        if let Some((_, weight)) = &self.q_b {
            device.linear(n_rows, (ws.q_a.view(), sizes.q), weight, ws.q.view_mut())?;
        }
        let (n_heads, rope) = (sizes.n_heads, sizes.rope);
        let (q, row_stride) = query_heads(sizes, (&ws.q, &ws.qkv), self.indexer.is_some());
        let from = Heads { n_heads, start: sizes.nope, row_stride, head_stride: sizes.qk() };
        let to = Heads { n_heads, start: 0, row_stride: n_heads * rope, head_stride: rope };
        let (table, out) = (device.rope.table(), ws.q_pe.view_mut());
        device.kernels.rope(pass.rows, table, (q, from), (out, to))
    }

    /// The values that rows attend over latents, in `ws.values`.
    fn attend_latents(
        &self,
        device: &Device<E>,
        pass: &Pass<'_>,
        keys: Keys,
        cache: &LayerCache<E>,
        ws: &mut Workspace<E>,
    ) -> Result<(), GpuError> {
        let sizes = &device.sizes;
        let Sizes { n_heads, kv_rank, nope, v, .. } = *sizes;
        let n_rows = pass.rows.n_rows;
        let (q, stride) = query_heads(sizes, (&ws.q, &ws.qkv), self.indexer.is_some());
        let of_head = (nope + v) * kv_rank;
        device.blas.gemm(&Gemm {
            n_rows,
            n_out: kv_rank,
            n_in: nope,
            n_batches: n_heads,
            x: Matrix::new(q, stride, sizes.qk()),
            w: Matrix::new(&self.kv_b, kv_rank, of_head),
            layout: WeightLayout::InOut,
            out: MatrixMut::new(&mut ws.q_latent, n_heads * kv_rank, kv_rank),
            alpha: 1.0,
            beta: 0.0,
        })?;
        let heads = n_rows * n_heads;
        let selection = SelectedKeys {
            indices: ws.indices.slice(..n_rows * sizes.topk),
            counts: ws.counts.slice(..n_rows),
        };
        let batch = MlaBatch {
            q_latent: ws.q_latent.slice(..heads * kv_rank),
            q_pe: ws.q_pe.slice(..heads * sizes.rope),
            cache: cache.latent.view(),
            rows: pass.paged,
            selection: (keys != Keys::All).then_some(selection),
            skipped: pass.chunks.filter(|_| keys == Keys::All).map(|chunks| chunks.group_of),
            max_kv_len: pass.bounds.max_kv_len,
            max_split_len: pass.bounds.max_split_len,
            rows_per_seq: pass.bounds.rows_per_seq,
        };
        let out = ws.attended.slice_mut(..heads * kv_rank);
        let mut scratch = device.mla_scratch.borrow_mut();
        device.mla.attend(&device.stream, &batch, scratch.view_mut(), out)?;
        device.blas.gemm(&Gemm {
            n_rows,
            n_out: v,
            n_in: kv_rank,
            n_batches: n_heads,
            x: Matrix::new(&ws.attended, n_heads * kv_rank, kv_rank),
            w: Matrix::new(self.kv_b.slice(nope * kv_rank..), kv_rank, of_head),
            layout: WeightLayout::OutIn,
            out: MatrixMut::new(&mut ws.values, n_heads * v, v),
            alpha: 1.0,
            beta: 0.0,
        })
    }
}

impl<E: Element> IndexerWeights<E> {
    fn choose(
        &self,
        device: &Device<E>,
        pass: &Pass<'_>,
        cache: &Buffer<E>,
        ws: &mut Workspace<E>,
    ) -> Result<(), GpuError> {
        let Some(indexer) = &device.indexer else { return Ok(()) };
        let sizes = &device.sizes;
        let (n_rows, n_heads, dim) = (pass.rows.n_rows, sizes.index_heads, sizes.index_dim);
        let (width, topk) = (n_heads * dim, sizes.topk);
        if pass.bounds.max_kv_len > topk {
            device.linear(n_rows, (ws.q_a.view(), sizes.q), &self.q, ws.index_q.view_mut())?;
            let heads = Heads { n_heads, start: 0, row_stride: width, head_stride: dim };
            let (table, queries) = (device.rope.index_table(), ws.index_q.view_mut());
            device.kernels.rope_in_place(pass.rows, table, queries, heads)?;
            device.blas.gemm(&Gemm {
                n_rows,
                n_out: n_heads,
                n_in: sizes.hidden,
                n_batches: 1,
                x: Matrix::new(&ws.x, sizes.hidden, 0),
                w: Matrix::new(&self.head_weights, sizes.hidden, 0),
                layout: WeightLayout::OutIn,
                out: MatrixMut::new(&mut ws.index_weights, n_heads, 0),
                alpha: (n_heads as f32).powf(-0.5),
                beta: 0.0,
            })?;
        }
        let batch = IndexBatch {
            q: ws.index_q.slice(..n_rows * width),
            weights: ws.index_weights.slice(..n_rows * n_heads),
            cache: cache.view(),
            rows: pass.paged,
            max_kv_len: pass.bounds.max_kv_len,
        };
        let out = SelectionMut {
            indices: ws.indices.slice_mut(..n_rows * topk),
            counts: ws.counts.slice_mut(..n_rows),
        };
        let mut scratch = device.index_scratch.borrow_mut();
        indexer.select(&device.stream, &batch, scratch.view_mut(), out)
    }
}

impl<E: Element> Mlp<E> {
    /// `ws.x` to `ws.out`.
    fn forward(
        &self,
        device: &Device<E>,
        pass: &Pass<'_>,
        ws: &mut Workspace<E>,
    ) -> Result<(), GpuError> {
        let (hidden, n_rows) = (device.sizes.hidden, pass.rows.n_rows);
        device.linear(n_rows, (ws.x.view(), hidden), &self.gate_up, ws.gate_up.view_mut())?;
        let (gate_up, act) = (ws.gate_up.view(), ws.act.view_mut());
        device.kernels.silu_and_mul(pass.rows, gate_up, self.inner, act)?;
        device.linear(n_rows, (ws.act.view(), self.inner), &self.down, ws.out.view_mut())
    }

    /// As experts of a mixture.
    pub(crate) fn as_experts(&self, n_experts: usize, hidden: usize) -> Experts<'_, E> {
        let (gate_up, down) = (self.gate_up.view(), self.down.view());
        Experts { n_experts, hidden, inner: self.inner, gate_up, down }
    }
}

impl<E: Element> Moe<E> {
    /// `ws.x`, through the experts and into the residual stream, and `next` of that to `ws.x`.
    fn forward(
        &self,
        device: &Device<E>,
        pass: &Pass<'_>,
        ws: &mut Workspace<E>,
        next: Norm<'_>,
    ) -> Result<(), GpuError> {
        if let Some(shared) = &self.shared {
            shared.forward(device, pass, ws)?;
        }
        let config: &MoeConfig = device.moe.as_ref().expect("a layer with experts has a config");
        let (rows, kernels) = (pass.rows, &device.kernels);
        let MoeSpace { ids, weights, router, experts } =
            ws.moe.as_mut().expect("a model with experts has room for them");
        let gate = RouterWeights {
            gate: self.gate.view(),
            bias: self.bias.as_ref().map(Buffer::view),
            config,
        };
        let out = RoutingMut { ids: ids.view_mut(), weights: weights.view_mut() };
        kernels.route(rows, ws.x.view(), gate, router, out)?;
        let top_k = config.num_experts_per_tok;
        let routing = Routing { top_k, ids: ids.view(), weights: weights.view() };
        let of = self.experts.as_experts(config.n_routed_experts, device.sizes.hidden);
        kernels.moe_experts(rows, ws.x.view(), routing, of, experts)?;
        let shared = self.shared.as_ref().map(|_| ws.out.view());
        let sum = ExpertSum { routing, scratch: experts, shared };
        let (residual, x) = (ws.residual.view_mut(), ws.x.view_mut());
        kernels.moe_combine_rms_norm(rows, &sum, residual, next, x)
    }
}

/// Cosines and sines of all positions.
#[derive(Debug)]
pub(crate) struct Rope {
    pub(crate) cos: Buffer<f32>,
    pub(crate) sin: Buffer<f32>,
    pub(crate) dim: usize,
    pub(crate) interleaved: bool,
    /// The style of indexers.
    pub(crate) index_interleaved: bool,
}

impl Rope {
    fn table(&self) -> RopeTable<'_> {
        self.in_style(self.interleaved)
    }

    fn index_table(&self) -> RopeTable<'_> {
        self.in_style(self.index_interleaved)
    }

    fn in_style(&self, interleaved: bool) -> RopeTable<'_> {
        let (cos, sin) = (self.cos.view(), self.sin.view());
        RopeTable { cos, sin, rope_dim: self.dim, interleaved }
    }
}

impl<E: Element> Device<E> {
    /// `x` `[n_rows, n_in]` times the transpose of `weight` `[n_out, n_in]`, to `out`.
    pub(crate) fn linear<O: gpu_runtime::GemmElement>(
        &self,
        n_rows: usize,
        (x, n_in): (View<'_, E>, usize),
        weight: &Buffer<E>,
        out: ViewMut<'_, O>,
    ) -> Result<(), GpuError> {
        let n_out = weight.len() / n_in;
        self.blas.gemm(&Gemm {
            n_rows,
            n_out,
            n_in,
            n_batches: 1,
            x: Matrix::new(x, n_in, 0),
            w: Matrix::new(weight, n_in, 0),
            layout: WeightLayout::OutIn,
            out: MatrixMut::new(out, n_out, 0),
            alpha: 1.0,
            beta: 0.0,
        })
    }

    pub(crate) fn norm<'a>(&self, weight: &'a Buffer<f32>) -> Norm<'a> {
        Norm { weight: weight.view(), eps: self.norm_eps }
    }
}
