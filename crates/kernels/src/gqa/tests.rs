//! Tests of grouped-query attention.

use half::bf16;

use super::{CacheRows, GqaBatch, GqaShape, gqa_attention_on};
use crate::test_util::{Pages, Random, assert_close, assert_same_bits, on_every_isa};

/// Widths of one vector, of less, of more and of many; groups of one, some and all heads, and more
/// heads in a group than a tile has rows.
const SHAPES: [GqaShape; 5] = [
    GqaShape { n_heads: 4, n_kv_heads: 2, head_dim: 16, scale: 0.25 },
    GqaShape { n_heads: 1, n_kv_heads: 1, head_dim: 5, scale: 0.5 },
    GqaShape { n_heads: 6, n_kv_heads: 6, head_dim: 33, scale: 0.3 },
    GqaShape { n_heads: 6, n_kv_heads: 2, head_dim: 48, scale: 0.2 },
    GqaShape { n_heads: 40, n_kv_heads: 2, head_dim: 128, scale: 0.1 },
];

/// A prefill chunk, decodes, verify windows and a chunk that crosses key blocks.
const SEQS: [(usize, usize); 6] = [(0, 5), (6, 1), (5, 4), (60, 9), (150, 1), (0, 1)];

/// Sequences with shuffled blocks; every slot that holds no token is NaN.
struct Case {
    shape: GqaShape,
    pages: Pages,
    cache: Vec<f32>,
    q: Vec<f32>,
}

impl Case {
    fn new(random: &mut Random, shape: GqaShape, seqs: &[(usize, usize)]) -> Self {
        let block_size = 1 + random.below(7);
        let pages = Pages::new(random, block_size, seqs);
        let cache = pages.cache(random, shape.n_kv_heads * 2 * shape.head_dim, seqs);
        let q = random.values(pages.n_tokens() * shape.n_heads * shape.head_dim);
        Self { shape, pages, cache, q }
    }

    fn row_len(&self) -> usize {
        self.shape.n_heads * self.shape.head_dim
    }

    fn run_on(&self, cache: CacheRows<'_>, tokens: std::ops::Range<usize>) -> Vec<f32> {
        let n = self.row_len();
        let q = &self.q[tokens.start * n..tokens.end * n];
        let batch = GqaBatch { q, rows: self.pages.rows(tokens.clone()) };
        on_every_isa(tokens.len() * n, |isa, out| {
            gqa_attention_on(isa, &self.shape, cache, &batch, out);
        })
    }

    fn run(&self, tokens: std::ops::Range<usize>) -> Vec<f32> {
        self.run_on(CacheRows::F32(&self.cache), tokens)
    }

    fn reference(&self) -> Vec<f64> {
        let GqaShape { n_heads, n_kv_heads, head_dim, scale } = self.shape;
        let mut out = Vec::new();
        for (row, q) in self.q.chunks_exact(head_dim).enumerate() {
            let (token, head) = (row / n_heads, row % n_heads);
            let seq = self.pages.token_to_seq[token] as usize;
            let kv_head = head / (n_heads / n_kv_heads);
            let pairs: Vec<(&[f32], &[f32])> = (0..=self.pages.positions[token] as usize)
                .map(|position| {
                    let start = self.pages.slot(seq, position) * n_kv_heads + kv_head;
                    self.cache[start * 2 * head_dim..][..2 * head_dim].split_at(head_dim)
                })
                .collect();
            let dot = |key: &[f32]| -> f64 {
                q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
            };
            let weights: Vec<f64> =
                pairs.iter().map(|(key, _)| (f64::from(scale) * dot(key)).exp()).collect();
            let total: f64 = weights.iter().sum();
            out.extend((0..head_dim).map(|i| {
                let terms = weights.iter().zip(&pairs).map(|(w, (_, v))| w * f64::from(v[i]));
                terms.sum::<f64>() / total
            }));
        }
        out
    }
}

#[test]
fn agrees_with_the_reference_and_never_reads_an_unused_slot() {
    let mut random = Random::new(21);
    for shape in SHAPES {
        let case = Case::new(&mut random, shape, &SEQS);
        assert_close(&case.run(0..case.pages.n_tokens()), &case.reference(), 1e-5);
    }
}

#[test]
fn a_bf16_cache_equals_its_widened_copy() {
    let mut random = Random::new(22);
    for shape in SHAPES {
        let mut case = Case::new(&mut random, shape, &SEQS);
        let narrow: Vec<bf16> = case.cache.iter().map(|&x| bf16::from_f32(x)).collect();
        case.cache = narrow.iter().map(|x| x.to_f32()).collect();
        let tokens = 0..case.pages.n_tokens();
        let out = case.run_on(CacheRows::Bf16(&narrow), tokens.clone());
        assert_same_bits(&case.run(tokens), &out, "bf16 and f32 cache");
    }
}

/// [INV-11]: chunks, windows and single tokens give the same bits.
#[test]
fn a_token_does_not_depend_on_its_window() {
    let mut random = Random::new(23);
    for shape in SHAPES {
        let case = Case::new(&mut random, shape, &[(0, 70), (5, 4), (63, 3)]);
        let n_tokens = case.pages.n_tokens();
        let (whole, n) = (case.run(0..n_tokens), case.row_len());
        for window in [1, 2, 4, 9, 17] {
            for first in (0..n_tokens).step_by(window) {
                let tokens = first..n_tokens.min(first + window);
                let expected = &whole[tokens.start * n..tokens.end * n];
                let what = format!("window of {window}");
                assert_same_bits(expected, &case.run(tokens), &what);
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut random = Random::new(24);
    let case = Case::new(&mut random, SHAPES[4], &[(0, 100), (150, 1)]);
    let run = |n_threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        pool.install(|| case.run(0..case.pages.n_tokens()))
    };
    assert_same_bits(&run(1), &run(3), "one and three threads");
}
