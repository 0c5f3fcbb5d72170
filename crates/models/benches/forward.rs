//! What does a pass over the bundled checkpoint cost with a context of 100 tokens, for one decoded
//! token and for a verify window of four, with plain and with fused layers?

use attention_backends::{AttentionBackend, CpuBackend, DeviceLayout, ReferenceBackend};
use batch_layout::{BatchLayout, SeqSpec};
use criterion::{Criterion, criterion_group, criterion_main};
use models::{
    ComputeDtype, ForwardContext, IndexCacheDtype, KvInit, LayerCache, LoadOptions, LoadedModel,
    load,
};
use nn_layers::Ops;
use spec_decode::{DraftInput, DraftModel};
use tch::{Device, Tensor};

const N_CONTEXT: u32 = 100;

struct Bench {
    model: LoadedModel,
    caches: Vec<LayerCache>,
    backend: &'static dyn AttentionBackend,
}

impl Bench {
    fn open(ops: Ops, dtype: ComputeDtype) -> Self {
        let dir = bundled_checkpoints::find("tiny-dsv3", None).expect("the checkpoint is bundled");
        let options =
            LoadOptions { drafting: true, ops: Some(ops), dtype, ..LoadOptions::default() };
        let model = load(&dir, options).expect("the checkpoint is whole");
        let caches = model.new_caches(256, IndexCacheDtype::Auto, KvInit::Zero);
        let caches = caches.expect("caches fit in memory");
        let backend: &dyn AttentionBackend = match ops {
            Ops::Torch => &ReferenceBackend,
            Ops::Fused => &CpuBackend,
        };
        let bench = Self { model, caches, backend };
        let _ = bench.target(0, N_CONTEXT);
        bench
    }

    /// A pass from upload to logits of all rows.
    fn target(&self, n_computed: u32, n_query: u32) -> (Tensor, Tensor) {
        let layout = layout(n_computed, n_query);
        let cx = ForwardContext { layout: &layout, caches: &self.caches, backend: self.backend };
        let output = self.model.target.forward(&tokens(n_query), &cx).expect("a pass succeeds");
        let hidden = output.hidden;
        let logits = self.model.target.logits(&hidden).expect("a pass succeeds");
        (hidden, logits)
    }

    fn draft(&self, hidden: &Tensor) -> Tensor {
        let mtp = self.model.mtp.as_ref().expect("MTP layers were loaded");
        let mtp = mtp.bind(&self.caches, self.backend);
        let input = DraftInput {
            layer: 0,
            token_ids: &tokens(1),
            hidden,
            layout: &layout(N_CONTEXT, 1),
            output_rows: None,
            selection: None,
        };
        let hidden = mtp.step(input).expect("a step succeeds").hidden;
        mtp.logits(0, &hidden).expect("a step succeeds")
    }
}

fn layout(n_computed: u32, n_query: u32) -> DeviceLayout {
    let mut layout = BatchLayout::new(16);
    let blocks: Vec<u32> = (0..16).collect();
    layout.push(SeqSpec { n_computed, n_query }, &blocks);
    layout.finish();
    DeviceLayout::upload(&layout, Device::Cpu)
}

fn tokens(n: u32) -> Tensor {
    Tensor::from_slice(&(0..i64::from(n)).map(|i| 300 + 7 * i).collect::<Vec<_>>())
}

fn forward(c: &mut Criterion) {
    // More threads only slow the plain layers down: their operations are too small.
    tch::set_num_threads(1);
    for (name, ops, dtype) in [
        ("plain float32", Ops::Torch, ComputeDtype::Float32),
        ("fused float32", Ops::Fused, ComputeDtype::Float32),
        ("fused bfloat16", Ops::Fused, ComputeDtype::Bfloat16),
    ] {
        let bench = Bench::open(ops, dtype);
        for n_query in [1, 4] {
            c.bench_function(&format!("{name}, {n_query} rows"), |b| {
                b.iter(|| bench.target(N_CONTEXT, n_query));
            });
        }
        let (hidden, _) = bench.target(N_CONTEXT, 1);
        c.bench_function(&format!("{name}, draft step"), |b| b.iter(|| bench.draft(&hidden)));
    }
}

criterion_group!(benches, forward);
criterion_main!(benches);
