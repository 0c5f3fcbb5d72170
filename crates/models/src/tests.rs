//! Tests against expected tensors of an independent implementation, with plain and fused layers.

mod dummy;
mod fixtures;
mod glm4_moe;
mod index_share;
mod made;
mod mtp;
mod oracle;
mod quantized;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use attention_backends::{AttentionBackend, CpuBackend, DeviceLayout, ReferenceBackend};
use batch_layout::{BatchLayout, SeqSpec};
use nn_layers::Ops;
use tch::{Device, Kind, Tensor};

use crate::{
    ComputeDtype, ForwardContext, ForwardOutput, IndexCacheDtype, KvInit, LayerCache, LoadOptions,
    LoadedModel, load,
};

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(path)
}

fn read_tensors(path: &str) -> HashMap<String, Tensor> {
    Tensor::read_safetensors(data(path)).unwrap().into_iter().collect()
}

/// Largest difference relative to the largest expected value.
fn relative_difference(found: &Tensor, expected: &Tensor) -> f64 {
    let expected = expected.to_kind(Kind::Double);
    let difference = (found.to_kind(Kind::Double) - &expected).abs().max().double_value(&[]);
    difference / expected.abs().max().double_value(&[])
}

fn ids(tokens: &[i64]) -> Tensor {
    Tensor::from_slice(tokens)
}

/// A model with caches full of NaN, so that a read of a slot that was not written shows.
struct Rig {
    model: LoadedModel,
    caches: Vec<LayerCache>,
    backend: &'static dyn AttentionBackend,
    block_size: u32,
}

impl Rig {
    fn open(dir: &Path, drafting: bool, ops: Ops, dtype: ComputeDtype) -> Self {
        let options = LoadOptions { drafting, ops: Some(ops), dtype, ..LoadOptions::default() };
        let model = load(dir, options).unwrap();
        let backend: &dyn AttentionBackend = match ops {
            Ops::Torch => &ReferenceBackend,
            Ops::Fused => &CpuBackend,
        };
        let mut rig = Self { model, caches: Vec::new(), backend, block_size: 4 };
        rig.reset(4, 1024);
        rig
    }

    fn fixture(name: &str, ops: Ops) -> Self {
        let dir = data("fixtures").join(name);
        Self::open(&dir, false, ops, ComputeDtype::Float32)
    }

    fn tiny(name: &str, ops: Ops, dtype: ComputeDtype) -> Self {
        Self::open(&bundled_checkpoints::find(name, None).unwrap(), true, ops, dtype)
    }

    fn reset(&mut self, block_size: u32, n_slots: i64) {
        self.block_size = block_size;
        self.caches = self.model.new_caches(n_slots, IndexCacheDtype::Auto, KvInit::Nan).unwrap();
    }

    /// Sequence `seq` owns every fourth block, from the top down, so that tables are not sorted.
    fn blocks(&self, seq: u32) -> Vec<u32> {
        let n_blocks = u32::try_from(self.caches[0].kv.size()[0]).unwrap() / self.block_size;
        (0..n_blocks / 4).rev().map(|block| block * 4 + seq).collect()
    }

    /// The layout of `(seq, n_computed, n_query)` each.
    fn layout(&self, seqs: &[(u32, usize, usize)]) -> DeviceLayout {
        let mut layout = BatchLayout::new(self.block_size);
        for &(seq, n_computed, n_query) in seqs {
            let as_u32 = |n: usize| u32::try_from(n).unwrap();
            let spec = SeqSpec { n_computed: as_u32(n_computed), n_query: as_u32(n_query) };
            layout.push(spec, &self.blocks(seq));
        }
        layout.finish();
        DeviceLayout::upload(&layout, Device::Cpu)
    }

    fn forward(&self, seqs: &[(u32, usize, usize)], tokens: &[i64]) -> Tensor {
        self.run(seqs, tokens).hidden
    }

    fn run(&self, seqs: &[(u32, usize, usize)], tokens: &[i64]) -> ForwardOutput {
        let layout = self.layout(seqs);
        let (caches, backend) = (&self.caches, self.backend);
        let cx = ForwardContext { layout: &layout, caches, backend };
        self.model.target.forward(&ids(tokens), &cx).unwrap()
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        self.model.target.logits(hidden).unwrap()
    }
}
