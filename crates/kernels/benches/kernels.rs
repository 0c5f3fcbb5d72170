//! How close do the kernels come to the memory bandwidth (one row) and to the peak of the
//! multiply-add units (many rows)? Shapes are those of small and middle-sized checkpoints.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use kernels::{
    CacheRows, ExpertChoice, GqaBatch, GqaShape, IndexBatch, IndexCache, IndexShape, MlaBatch,
    MlaShape, MoeExperts, PackedLinear, PagedRows, Router, RouterConfig, RouterScoring,
    SelectedKeys, SwiGluMlp, argmax_rows, gqa_attention, lightning_index, mla_attention, rms_norm,
    store_fp8_key,
};
use quantization::{Codes, QuantizedMatrix, Scales};

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 1009) as f32 / 1009.0 - 0.5).collect()
}

fn narrow(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// Elements per second are multiply-adds per second.
fn linear(c: &mut Criterion) {
    let mut group = c.benchmark_group("linear");
    for (n_in, n_out) in [(256, 512), (256, 4096), (1536, 1536)] {
        let weight = values(n_in * n_out);
        for (storage, layer) in [
            ("f32", PackedLinear::from_f32(&weight, n_in)),
            ("bf16", PackedLinear::from_bf16(&narrow(&weight), n_in)),
        ] {
            for n_rows in [1, 2, 3, 4, 16, 64] {
                let x = values(n_rows * n_in);
                let mut y = vec![0.0; n_rows * n_out];
                group.throughput(Throughput::Elements((n_rows * n_in * n_out) as u64));
                let id = BenchmarkId::new(format!("{n_in}x{n_out}/{storage}"), n_rows);
                group.bench_function(id, |b| b.iter(|| layer.forward(black_box(&x), &mut y)));
            }
        }
    }
    group.finish();
}

/// What weights that stay quantised cost or save: from a near cache, and from memory, where calls
/// go around over more bytes of layers than caches hold.
fn quantized(c: &mut Criterion) {
    let mut group = c.benchmark_group("quantized");
    for (n_in, n_out, n_bytes) in [(256, 512, 0), (7168, 2048, 400 << 20)] {
        for storage in ["f32", "bf16", "fp8-block", "fp8-channel", "mxfp8", "mxfp4"] {
            let (layer, n_bits) = stored(storage, n_in, n_out);
            let layers = vec![layer; (8 * n_bytes / (n_in * n_out * n_bits)).max(1)];
            for n_rows in [1, 4, 64] {
                let x = values(n_rows * n_in);
                let mut y = vec![0.0; n_rows * n_out];
                let mut next = layers.iter().cycle();
                group.throughput(Throughput::Elements((n_rows * n_in * n_out) as u64));
                let id = BenchmarkId::new(format!("{n_in}x{n_out}/{storage}"), n_rows);
                group.bench_function(id, |b| {
                    b.iter(|| next.next().expect("a cycle").forward(black_box(&x), &mut y));
                });
            }
        }
    }
    group.finish();
}

/// A layer in a storage format, and the bits of one of its weights.
fn stored(storage: &str, n_in: usize, n_out: usize) -> (PackedLinear, usize) {
    let weight = || values(n_in * n_out);
    let bytes = |n| (0..n).map(|i| (i * 7919 % 126) as u8 | ((i % 2) << 7) as u8).collect();
    let blocks = |block: [usize; 2]| {
        let n_scales = n_out.div_ceil(block[0]) * n_in.div_ceil(block[1]);
        Scales::Blocks { block, values: vec![0.01; n_scales] }
    };
    let groups = || Scales::Groups { group: 32, exponents: vec![120; n_out * n_in / 32] };
    let e4m3 = || Codes::E4m3(bytes(n_in * n_out));
    let (codes, scales, n_bits) = match storage {
        "f32" => return (PackedLinear::from_f32(&weight(), n_in), 32),
        "bf16" => return (PackedLinear::from_bf16(&narrow(&weight()), n_in), 16),
        "fp8-block" => (e4m3(), blocks([128, 128]), 8),
        "fp8-channel" => (e4m3(), blocks([1, n_in]), 8),
        "mxfp8" => (e4m3(), groups(), 8),
        _ => (Codes::E2m1(bytes(n_in * n_out / 2)), groups(), 4),
    };
    let matrix = QuantizedMatrix::new([n_out, n_in], codes, scales).expect("scales fit");
    (PackedLinear::from_quantized(&matrix), n_bits)
}

/// One decode row of each of some sequences, and a verify window of four rows.
fn attention(c: &mut Criterion) {
    const BLOCK_SIZE: usize = 16;
    let mut group = c.benchmark_group("attention");
    let tiny = MlaShape { n_heads: 4, kv_lora_rank: 64, rope_dim: 16, scale: 0.2 };
    let large = MlaShape { n_heads: 16, kv_lora_rank: 512, rope_dim: 64, scale: 0.1 };
    for (name, shape, n_query) in [("tiny", tiny, 1), ("tiny-verify", tiny, 4), ("large", large, 1)]
    {
        for context in [100, 2000] {
            let width = shape.kv_lora_rank + shape.rope_dim;
            let max_blocks = context / BLOCK_SIZE + 1;
            let cache = values(max_blocks * BLOCK_SIZE * width);
            let narrow = narrow(&cache);
            let block_tables: Vec<i32> = (0..max_blocks as i32).rev().collect();
            let positions: Vec<i32> = (context - n_query..context).map(|p| p as i32).collect();
            let q_lat = values(n_query * shape.n_heads * shape.kv_lora_rank);
            let q_pe = values(n_query * shape.n_heads * shape.rope_dim);
            let batch = MlaBatch {
                q_lat: &q_lat,
                q_pe: &q_pe,
                rows: PagedRows {
                    token_to_seq: &vec![0; n_query],
                    positions: &positions,
                    block_tables: &block_tables,
                    max_blocks,
                    block_size: BLOCK_SIZE,
                },
                keys: None,
            };
            let mut out = vec![0.0; q_lat.len()];
            let caches = [("f32", CacheRows::F32(&cache)), ("bf16", CacheRows::Bf16(&narrow))];
            for (storage, cache) in caches {
                let id = BenchmarkId::new(format!("{name}/{storage}"), context);
                group.bench_function(id, |b| {
                    b.iter(|| mla_attention(&shape, black_box(cache), &batch, &mut out));
                });
            }
        }
    }
    group.finish();
}

/// Grouped-query attention in the shape of GLM-4.5-Air: a decode row and a verify window.
fn grouped(c: &mut Criterion) {
    const BLOCK_SIZE: usize = 16;
    let mut group = c.benchmark_group("grouped");
    let shape = GqaShape { n_heads: 96, n_kv_heads: 8, head_dim: 128, scale: 0.088 };
    for (n_query, context) in [(1, 2000), (4, 2000), (1, 16_000)] {
        let max_blocks = context / BLOCK_SIZE + 1;
        let cache = values(max_blocks * BLOCK_SIZE * shape.n_kv_heads * 2 * shape.head_dim);
        let narrow = narrow(&cache);
        let block_tables: Vec<i32> = (0..max_blocks as i32).rev().collect();
        let positions: Vec<i32> = (context - n_query..context).map(|p| p as i32).collect();
        let q = values(n_query * shape.n_heads * shape.head_dim);
        let rows = PagedRows {
            token_to_seq: &vec![0; n_query],
            positions: &positions,
            block_tables: &block_tables,
            max_blocks,
            block_size: BLOCK_SIZE,
        };
        let batch = GqaBatch { q: &q, rows };
        let mut out = vec![0.0; q.len()];
        let n_values = context * shape.n_kv_heads * 2 * shape.head_dim;
        group.throughput(Throughput::Elements(n_values as u64));
        for (storage, cache) in
            [("f32", CacheRows::F32(&cache)), ("bf16", CacheRows::Bf16(&narrow))]
        {
            let id = BenchmarkId::new(format!("{n_query}-rows/{storage}"), context);
            group.bench_function(id, |b| {
                b.iter(|| gqa_attention(&shape, black_box(cache), &batch, &mut out));
            });
        }
    }
    group.finish();
}

/// What selecting keys costs, and what attention to the selected ones saves: one verify window of
/// four rows, dense, sparse, and the indexer with each kind of cache.
fn sparse(c: &mut Criterion) {
    const BLOCK_SIZE: usize = 16;
    const N_QUERY: usize = 4;
    let tiny = MlaShape { n_heads: 4, kv_lora_rank: 64, rope_dim: 16, scale: 0.2 };
    let large = MlaShape { n_heads: 64, kv_lora_rank: 512, rope_dim: 64, scale: 0.1 };
    let tiny_index = IndexShape { n_heads: 4, head_dim: 32, topk: 64, scale: 0.18 };
    let large_index = IndexShape { n_heads: 32, head_dim: 128, topk: 2048, scale: 0.088 };
    for (name, context, shape, index) in
        [("tiny", 2000, tiny, tiny_index), ("large", 8192, large, large_index)]
    {
        let mut group = c.benchmark_group(format!("sparse/{name}"));
        let max_blocks = context / BLOCK_SIZE + 1;
        let n_slots = max_blocks * BLOCK_SIZE;
        let block_tables: Vec<i32> = (0..max_blocks as i32).rev().collect();
        let positions: Vec<i32> = (context - N_QUERY..context).map(|p| p as i32).collect();
        let rows = PagedRows {
            token_to_seq: &[0; N_QUERY],
            positions: &positions,
            block_tables: &block_tables,
            max_blocks,
            block_size: BLOCK_SIZE,
        };

        let keys = values(n_slots * index.head_dim);
        let narrow_keys = narrow(&keys);
        let mut fp8_keys = vec![0; n_slots * (index.head_dim + 4)];
        let stored = fp8_keys.chunks_exact_mut(index.head_dim + 4);
        for (key, stored) in keys.chunks_exact(index.head_dim).zip(stored) {
            store_fp8_key(key, stored);
        }
        let q = values(N_QUERY * index.n_heads * index.head_dim);
        let weights = values(N_QUERY * index.n_heads);
        let batch = IndexBatch { q: &q, weights: &weights, rows };
        let (mut indices, mut counts) = (vec![0; N_QUERY * index.topk], vec![0; N_QUERY]);
        for (storage, cache) in [
            ("f32", IndexCache::F32(&keys)),
            ("bf16", IndexCache::Bf16(&narrow_keys)),
            ("fp8", IndexCache::Fp8(&fp8_keys)),
        ] {
            group.bench_function(format!("index/{storage}"), |b| {
                b.iter(|| {
                    lightning_index(&index, black_box(cache), &batch, &mut indices, &mut counts)
                });
            });
        }

        let cache = values(n_slots * (shape.kv_lora_rank + shape.rope_dim));
        let q_lat = values(N_QUERY * shape.n_heads * shape.kv_lora_rank);
        let q_pe = values(N_QUERY * shape.n_heads * shape.rope_dim);
        let selected = SelectedKeys { indices: &indices, counts: &counts, topk: index.topk };
        let mut out = vec![0.0; q_lat.len()];
        for (kind, keys) in [("dense", None), ("selected", Some(selected))] {
            let batch = MlaBatch { q_lat: &q_lat, q_pe: &q_pe, rows, keys };
            group.bench_function(format!("attention/{kind}"), |b| {
                let cache = CacheRows::F32(&cache);
                b.iter(|| mla_attention(&shape, black_box(cache), &batch, &mut out));
            });
        }
        group.finish();
    }
}

/// Router and experts of the tiny checkpoint: hidden 256, 16 experts of width 64, top 4.
fn moe(c: &mut Criterion) {
    const HIDDEN: usize = 256;
    const TOP_K: usize = 4;
    let mut group = c.benchmark_group("moe");
    const WIDTH: usize = 64;
    let weight = values(WIDTH * HIDDEN);
    let config = RouterConfig {
        scoring: RouterScoring::Sigmoid,
        choice: ExpertChoice::NoauxTc,
        n_group: 4,
        topk_group: 2,
        top_k: TOP_K,
        norm_topk_prob: true,
        routed_scaling_factor: 2.5,
    };
    let router = Router::new(&values(16 * HIDDEN), HIDDEN, Some(&[0.0; 16]), config);
    let narrow = narrow(&weight);
    let mlp = |linear: &dyn Fn(usize) -> PackedLinear| {
        SwiGluMlp::new(linear(HIDDEN), linear(HIDDEN), linear(WIDTH))
    };
    let wide = mlp(&|n_in| PackedLinear::from_f32(&weight, n_in));
    let narrow = mlp(&|n_in| PackedLinear::from_bf16(&narrow, n_in));
    for (storage, expert) in [("f32", wide), ("bf16", narrow)] {
        let experts = MoeExperts::new(vec![expert; 16]);
        for n_tokens in [1, 4, 16, 64] {
            let x: Vec<f32> = (0..n_tokens * HIDDEN).map(|i| (i as f32 * 1.7).sin()).collect();
            let mut ids = vec![0; n_tokens * TOP_K];
            let mut weights = vec![0.0; n_tokens * TOP_K];
            let mut out = vec![0.0; x.len()];
            group.bench_function(BenchmarkId::new(storage, n_tokens), |b| {
                b.iter(|| {
                    router.route(black_box(&x), &mut ids, &mut weights);
                    experts.forward(&x, &ids, &weights, &mut out);
                });
            });
        }
    }
    group.finish();
}

fn small(c: &mut Criterion) {
    let (x, weight) = (values(256), values(256));
    let mut out = vec![0.0; 256];
    c.bench_function("rms_norm/256", |b| {
        b.iter(|| rms_norm(black_box(&x), &weight, 1e-6, &mut out));
    });
    let logits = values(4096);
    let mut token = [0];
    c.bench_function("argmax/4096", |b| {
        b.iter(|| argmax_rows(black_box(&logits), 4096, &mut token));
    });
}

criterion_group!(benches, linear, quantized, attention, grouped, sparse, moe, small);
criterion_main!(benches);
