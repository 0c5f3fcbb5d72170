//! A model on the device, and passes whose rows the host says.

use batch_layout::BatchLayout;
use gpu_runtime::{Buffer, Gpu, GpuError, Stream};
use model_config::{Architecture, ModelConfig};
use weights::TensorMap;

use crate::decode::Decoder;
use crate::device::{Device, PassLimits};
use crate::error::ModelError;
use crate::expansion::{ChunkViews, Chunks};
use crate::layer::{Keys, LayerCache};
use crate::loader::{Element, Loader};
use crate::outgoing::Outgoing;
use crate::parts::{Drafter, Target};
use crate::pass::{Bounds, Pass, RowArrays, Tables};
use crate::weights::{FeedForward, Layer, MtpLayer};
use crate::workspace::Workspace;

/// A model of the DeepSeek-V3 family with its MTP layers and caches, for weights, activations and
/// caches of type `E`.
///
/// The functions here queue one pass each, and wait only for what they return.
pub struct GpuModel<E> {
    pub(crate) config: ModelConfig,
    pub(crate) device: Device<E>,
    pub(crate) limits: PassLimits,
    pub(crate) table: Buffer<E>,
    pub(crate) layers: Vec<Layer<E>>,
    pub(crate) norm: Buffer<f32>,
    /// The embedding matrix serves where it is `None`.
    pub(crate) head: Option<Buffer<E>>,
    pub(crate) mtp: Vec<MtpLayer<E>>,
    /// The target's layers first.
    pub(crate) caches: Vec<LayerCache<E>>,
    pub(crate) work: Work<E>,
    pub(crate) decoder: Option<Decoder>,
}

/// What passes work in.
pub(crate) struct Work<E> {
    /// Of passes over all rows.
    pub(crate) all: Workspace<E>,
    /// Of passes with one row a sequence.
    pub(crate) single: Workspace<E>,
    /// Hidden states that a draft pass or the head reads.
    pub(crate) hidden: Buffer<E>,
    /// Those that the last pass of the target left.
    of_target: Buffer<E>,
    /// Those that the last draft pass left.
    of_draft: Buffer<E>,
    arrays: Arrays,
    /// Rows to be taken.
    chosen_rows: Buffer<i32>,
    outgoing: Outgoing,
    pub(crate) logits: Buffer<f32>,
}

/// The positions `[R, topk]` that rows attend, and how many of each count, `[R]`.
pub type Selected = (Vec<i32>, Vec<i32>);

/// Hidden states on the device, by their rows.
#[derive(Clone, Copy, Debug)]
pub struct HiddenRows<'a> {
    /// Whether they are those of the last draft pass, or of the target's last pass.
    pub of_draft: bool,
    /// Which rows of it.
    pub rows: &'a [i32],
}

/// A draft pass.
#[derive(Clone, Copy, Debug)]
pub struct DraftPass<'a> {
    /// The MTP layer.
    pub layer: usize,
    /// Token of each row.
    pub ids: &'a [i32],
    /// Hidden state of each row.
    pub hidden: HiddenRows<'a>,
    /// Where the rows are.
    pub layout: &'a BatchLayout,
    /// The rows that are wanted, with their layout, each as a sequence of its own; all if `None`.
    pub output: Option<(&'a [i32], &'a BatchLayout)>,
    /// Positions `[T, topk]` and counts `[T]` to attend in place of the indexer's choice.
    pub selection: Option<(&'a [i32], &'a [i32])>,
}

/// Whether there is a model of this architecture here.
///
/// # Errors
///
/// [`ModelError::Architecture`] if there is none.
pub fn check_architecture(config: &ModelConfig) -> Result<(), ModelError> {
    match config.architecture {
        Architecture::DeepseekV3 | Architecture::DeepseekV32 | Architecture::GlmMoeDsa => Ok(()),
        other => Err(ModelError::Architecture(other)),
    }
}

impl<E: Element> GpuModel<E> {
    /// Puts the tensors of a checkpoint on the device and allocates workspaces.
    ///
    /// # Errors
    ///
    /// [`ModelError`] if the architecture has no model here, a tensor is missing, or the device
    /// fails or has no room.
    pub fn load(
        gpu: &Gpu,
        config: ModelConfig,
        tensors: TensorMap,
        (with_mtp, limits): (bool, PassLimits),
    ) -> Result<Self, ModelError> {
        check_architecture(&config)?;
        let stream = gpu.stream()?;
        let mut loader = Loader { config: &config, gpu, stream: &stream, tensors };
        let device = Device::new(gpu, &stream, &loader, &limits)?;
        let n_layers = config.num_hidden_layers;
        let table = loader.matrix("model.embed_tokens.weight")?;
        let layers = (0..n_layers).map(|idx| Layer::load(&mut loader, idx));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let norm = loader.floats("model.norm.weight")?;
        let head = match config.tie_word_embeddings {
            true => None,
            false => Some(loader.matrix("lm_head.weight")?),
        };
        let n_mtp = if with_mtp { config.num_mtp_layers } else { 0 };
        let mtp = (n_layers..n_layers + n_mtp).map(|idx| MtpLayer::load(&mut loader, idx));
        let mtp = mtp.collect::<Result<Vec<_>, _>>()?;
        let work = Work::new(&device, &layers, &limits)?;
        drop(loader);
        let (caches, decoder) = (vec![], None);
        Ok(Self { config, device, limits, table, layers, norm, head, mtp, caches, work, decoder })
    }

    /// Allocates the caches, whose size may depend on the memory that is left behind
    /// [`GpuModel::load`].
    ///
    /// # Errors
    ///
    /// [`GpuError`] if there is no room.
    pub fn allocate_caches(&mut self, num_blocks: usize) -> Result<(), GpuError> {
        self.limits.num_blocks = num_blocks;
        let n_layers = self.layers.len() + self.mtp.len();
        self.caches = caches(&self.device.gpu, &self.config, n_layers, &self.limits)?;
        Ok(())
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// MTP layers that were loaded.
    #[must_use]
    pub fn num_mtp_layers(&self) -> usize {
        self.mtp.len()
    }

    /// The target over all rows of a layout, whose hidden states after the final norm stay on the
    /// device until its next pass.
    ///
    /// # Errors
    ///
    /// [`GpuError`] if a launch fails.
    ///
    /// # Panics
    ///
    /// If the layout breaks a bound of [`PassLimits`].
    pub fn forward(&mut self, ids: &[i32], layout: &BatchLayout) -> Result<(), GpuError> {
        let uploaded = self.upload(ids, layout)?;
        let Self { device, layers, caches, work, .. } = self;
        let pass = work.arrays.pass(&uploaded);
        let target = Target { table: &self.table, layers, norm: &self.norm };
        target.forward(device, &pass, caches, &mut work.all)?;
        let n = ids.len() * device.sizes.hidden;
        device.stream.copy(work.all.x.slice(..n), work.of_target.slice_mut(..n))
    }

    /// Logits of hidden states, by the head of the target or of MTP layer `mtp`: `[R, vocab]`.
    ///
    /// # Errors
    ///
    /// [`GpuError`] if a launch fails.
    pub fn logits(
        &mut self,
        hidden: HiddenRows<'_>,
        mtp: Option<usize>,
    ) -> Result<Vec<f32>, GpuError> {
        let (width, vocab) = (self.device.sizes.hidden, self.device.sizes.vocab);
        let at_once = self.work.logits.len() / vocab;
        let mut logits = Vec::with_capacity(hidden.rows.len() * vocab);
        for rows in hidden.rows.chunks(at_once) {
            self.take_hidden(HiddenRows { rows, ..hidden })?;
            let own = mtp.and_then(|layer| self.mtp[layer].head.as_ref());
            let head = own.or(self.head.as_ref()).unwrap_or(&self.table);
            let work = &mut self.work;
            let x = (work.hidden.view(), width);
            self.device.linear(rows.len(), x, head, work.logits.view_mut())?;
            logits.extend(self.device.stream.download(work.logits.slice(..rows.len() * vocab))?);
        }
        Ok(logits)
    }

    /// One MTP layer over the rows of a layout. The hidden states of its output rows after
    /// `shared_head.norm` stay on the device until the next draft pass; the selection of its
    /// indexer is returned, if it ran.
    ///
    /// # Errors
    ///
    /// [`GpuError`] if a launch fails.
    ///
    /// # Panics
    ///
    /// If the pass breaks a bound of [`PassLimits`].
    pub fn draft(&mut self, draft: DraftPass<'_>) -> Result<Option<Selected>, GpuError> {
        let uploaded = self.upload(draft.ids, draft.layout)?;
        self.take_hidden(draft.hidden)?;
        let topk = self.device.sizes.topk;
        if let Some((indices, counts)) = draft.selection {
            let (stream, ws) = (&self.device.stream, &mut self.work.all);
            stream.upload(indices, ws.indices.slice_mut(..indices.len()))?;
            stream.upload(counts, ws.counts.slice_mut(..counts.len()))?;
        }
        let mtp = Drafter::of(&self.mtp[draft.layer], &self.table);
        let keys = mtp.keys(draft.selection.is_some());
        let cache = &mut self.caches[self.config.num_hidden_layers + draft.layer];
        let (device, work) = (&self.device, &mut self.work);
        let pass = work.arrays.pass(&uploaded);
        mtp.begin(device, &pass, work.hidden.view(), (cache, keys), &mut work.all)?;
        let n_rows = match draft.output {
            None => {
                mtp.end(device, &pass, (cache, keys), &mut work.all)?;
                draft.ids.len()
            }
            // Only the KV is wanted.
            Some(([], _)) => 0,
            Some((rows, layout)) => {
                let to = work.chosen_rows.slice_mut(..rows.len());
                work.outgoing.send(&device.stream, &mut [(rows, to)])?;
                let chosen = work.chosen_rows.slice(..rows.len());
                mtp.narrow(device, chosen, &work.all, &mut work.single)?;
                let ids = vec![0; rows.len()];
                let uploaded = upload(device, (&ids, layout), work, &self.limits)?;
                let pass = work.arrays.pass(&uploaded);
                mtp.end(device, &pass, (cache, keys), &mut work.single)?;
                rows.len()
            }
        };
        let work = &mut self.work;
        let ws = if draft.output.is_some() { &work.single } else { &work.all };
        let (stream, n) = (&device.stream, n_rows * device.sizes.hidden);
        stream.copy(ws.x.slice(..n), work.of_draft.slice_mut(..n))?;
        if keys != Keys::Choose {
            return Ok(None);
        }
        let indices = stream.download(ws.indices.slice(..n_rows * topk))?;
        Ok(Some((indices, stream.download(ws.counts.slice(..n_rows))?)))
    }

    /// Whether a draft pass can take the selection of another one.
    #[must_use]
    pub fn can_share_selection(&self) -> bool {
        self.mtp.iter().all(|layer| layer.block.indexer.is_some())
    }

    /// Waits for everything that is queued.
    ///
    /// # Errors
    ///
    /// [`GpuError`] if the device has failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.device.stream.synchronize()
    }

    /// Copies whole blocks in every cache, one after the other.
    ///
    /// # Errors
    ///
    /// [`GpuError`] if a copy fails.
    pub fn copy_block(&mut self, from: u32, to: u32) -> Result<(), GpuError> {
        let n_slots = self.limits.block_size;
        let (stream, sizes) = (&self.device.stream, &self.device.sizes);
        for cache in &mut self.caches {
            let n = n_slots * sizes.cache();
            copy_within(stream, &mut cache.latent, (from as usize * n, to as usize * n), n)?;
            if let Some(index) = &mut cache.index {
                let n = n_slots * sizes.index_dim;
                copy_within(stream, index, (from as usize * n, to as usize * n), n)?;
            }
        }
        Ok(())
    }

    fn upload(&mut self, ids: &[i32], layout: &BatchLayout) -> Result<Uploaded, GpuError> {
        upload(&self.device, (ids, layout), &mut self.work, &self.limits)
    }

    /// Puts hidden states side by side in `work.hidden`.
    fn take_hidden(&mut self, hidden: HiddenRows<'_>) -> Result<(), GpuError> {
        let (device, work, width) = (&self.device, &mut self.work, self.device.sizes.hidden);
        let n_rows = hidden.rows.len();
        if n_rows == 0 {
            return Ok(());
        }
        let to = work.chosen_rows.slice_mut(..n_rows);
        work.outgoing.send(&device.stream, &mut [(hidden.rows, to)])?;
        let rows = work.chosen_rows.slice(..n_rows);
        let from = if hidden.of_draft { &work.of_draft } else { &work.of_target };
        let to = work.hidden.slice_mut(..n_rows * width);
        device.kernels.gather_rows(rows, from.view(), width, to)
    }
}

/// What the host knows of an uploaded layout.
struct Uploaded {
    /// Rows and sequences.
    shape: (usize, usize),
    n_table: usize,
    block_size: usize,
    bounds: Bounds,
    chunks: Chunks,
}

/// Where a layout lies on the device.
pub(crate) struct Arrays {
    rows: RowArrays,
    tables: Buffer<i32>,
    /// As [`Chunks`] have them.
    places: Buffer<i32>,
}

impl Arrays {
    fn new(gpu: &Gpu, limits: &PassLimits) -> Result<Self, GpuError> {
        let max_seqs = limits.max_seqs;
        Ok(Self {
            rows: RowArrays::new(gpu, limits.most_rows(), max_seqs)?,
            tables: gpu.alloc(max_seqs * limits.table_stride())?,
            places: gpu.alloc(2 * max_seqs)?,
        })
    }

    /// Integers of all arrays.
    fn len(&self) -> usize {
        self.rows.len() + self.tables.len() + self.places.len()
    }

    /// The pass over a layout that lies here.
    fn pass<'a>(&'a self, uploaded: &'a Uploaded) -> Pass<'a> {
        let Uploaded { shape, n_table, block_size, bounds, ref chunks } = *uploaded;
        let tables = Tables { blocks: self.tables.slice(..n_table), block_size };
        let chunks = ChunkViews::new(chunks, &self.places);
        Pass { chunks, ..self.rows.pass(shape, tables, bounds) }
    }
}

fn upload<E: Element>(
    device: &Device<E>,
    (ids, layout): (&[i32], &BatchLayout),
    work: &mut Work<E>,
    limits: &PassLimits,
) -> Result<Uploaded, GpuError> {
    assert_eq!(ids.len(), layout.n_tokens(), "one token for each row");
    assert!(ids.len() <= limits.max_rows, "a pass has at most {} rows", limits.max_rows);
    let tables = layout.block_tables();
    let chunks = device.chunks_of(layout, limits.max_window);
    let places = &chunks.places;
    let to = &mut work.arrays;
    let mut parts = Vec::from(to.rows.parts_of(layout, ids));
    parts.push((tables, to.tables.slice_mut(..tables.len())));
    parts.push((places, to.places.slice_mut(..places.len())));
    work.outgoing.send(&device.stream, &mut parts)?;
    Ok(Uploaded {
        shape: (ids.len(), layout.n_seqs()),
        n_table: tables.len(),
        block_size: limits.block_size,
        bounds: Bounds::of_layout(layout, limits.max_window),
        chunks,
    })
}

fn copy_within<E: Element>(
    stream: &Stream,
    buffer: &mut Buffer<E>,
    (from, to): (usize, usize),
    n: usize,
) -> Result<(), GpuError> {
    let (low, high) = buffer.view_mut().split_at(from.max(to));
    let (low, high) = (low.slice(from.min(to)..from.min(to) + n), high.slice(..n));
    match from < to {
        true => stream.copy(low.as_view(), high),
        false => stream.copy(high.as_view(), low),
    }
}

fn caches<E: Element>(
    gpu: &Gpu,
    config: &ModelConfig,
    n_layers: usize,
    limits: &PassLimits,
) -> Result<Vec<LayerCache<E>>, GpuError> {
    let n_slots = limits.num_blocks * limits.block_size;
    let cache = |layer_idx| {
        let dsa = config.dsa.as_ref().filter(|_| config.has_indexer(layer_idx));
        let index = dsa.map(|dsa| gpu.alloc_zeroed(n_slots * dsa.index_head_dim)).transpose()?;
        let latent = gpu.alloc_zeroed(n_slots * config.attention.cache_width())?;
        Ok(LayerCache { latent, index })
    };
    (0..n_layers).map(cache).collect()
}

impl<E: Element> Work<E> {
    fn new(device: &Device<E>, layers: &[Layer<E>], limits: &PassLimits) -> Result<Self, GpuError> {
        let (gpu, sizes) = (&device.gpu, &device.sizes);
        let experts = layers.iter().find_map(|layer| match &layer.feed_forward {
            FeedForward::Moe(moe) => Some(&moe.experts),
            FeedForward::Dense(_) => None,
        });
        let of = |max_rows| {
            let moe = device.moe.as_ref().zip(experts);
            let moe = moe.map(|(moe, experts)| {
                (moe, experts.as_experts(moe.n_routed_experts, sizes.hidden))
            });
            Workspace::new(gpu, sizes, moe, max_rows)
        };
        let PassLimits { max_seqs, max_window, .. } = *limits;
        let most = limits.most_rows();
        let hidden = || gpu.alloc(most * sizes.hidden);
        let arrays = Arrays::new(gpu, limits)?;
        Ok(Self {
            all: of(most)?,
            single: of(max_seqs)?,
            hidden: hidden()?,
            of_target: hidden()?,
            of_draft: hidden()?,
            outgoing: Outgoing::new(gpu, arrays.len())?,
            arrays,
            chosen_rows: gpu.alloc(most)?,
            logits: gpu.alloc(max_seqs * max_window * sizes.vocab)?,
        })
    }
}
