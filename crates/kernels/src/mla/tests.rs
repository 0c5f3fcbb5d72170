//! Tests of latent attention.

use half::bf16;

use super::{CacheRows, MlaBatch, MlaShape, SelectedKeys, mla_attention, mla_attention_on};
use crate::test_util::{Pages, Random, assert_close, assert_same_bits, on_every_isa};

const TINY: MlaShape = MlaShape { n_heads: 4, kv_lora_rank: 64, rope_dim: 16, scale: 0.2 };
const SHAPES: [MlaShape; 4] = [
    TINY,
    MlaShape { n_heads: 1, kv_lora_rank: 5, rope_dim: 3, scale: 0.5 },
    MlaShape { n_heads: 3, kv_lora_rank: 33, rope_dim: 10, scale: 0.3 },
    MlaShape { n_heads: 20, kv_lora_rank: 48, rope_dim: 8, scale: 0.3 },
];

/// Sequences with shuffled blocks; every slot that holds no token is NaN.
struct Case {
    shape: MlaShape,
    pages: Pages,
    cache: Vec<f32>,
    q_lat: Vec<f32>,
    q_pe: Vec<f32>,
}

impl Case {
    /// One sequence per `(n_computed, n_query)`.
    fn new(random: &mut Random, shape: MlaShape, seqs: &[(usize, usize)]) -> Self {
        let block_size = 1 + random.below(7);
        let pages = Pages::new(random, block_size, seqs);
        let n_rows = pages.n_tokens() * shape.n_heads;
        Self {
            shape,
            cache: pages.cache(random, shape.kv_lora_rank + shape.rope_dim, seqs),
            q_lat: random.values(n_rows * shape.kv_lora_rank),
            q_pe: random.values(n_rows * shape.rope_dim),
            pages,
        }
    }

    fn slot(&self, seq: usize, position: usize) -> usize {
        self.pages.slot(seq, position)
    }

    fn batch(&self) -> MlaBatch<'_> {
        self.tokens(0..self.pages.positions.len())
    }

    /// The batch of some of the tokens.
    fn tokens(&self, tokens: std::ops::Range<usize>) -> MlaBatch<'_> {
        let rows = tokens.start * self.shape.n_heads..tokens.end * self.shape.n_heads;
        let (lora, rope) = (self.shape.kv_lora_rank, self.shape.rope_dim);
        MlaBatch {
            q_lat: &self.q_lat[rows.start * lora..rows.end * lora],
            q_pe: &self.q_pe[rows.start * rope..rows.end * rope],
            rows: self.pages.rows(tokens),
            keys: None,
        }
    }

    fn row_len(&self) -> usize {
        self.shape.n_heads * self.shape.kv_lora_rank
    }

    fn run(&self, tokens: std::ops::Range<usize>) -> Vec<f32> {
        let mut out = vec![f32::NAN; tokens.len() * self.row_len()];
        let cache = CacheRows::F32(&self.cache);
        mla_attention(&self.shape, cache, &self.tokens(tokens), &mut out);
        out
    }

    fn reference(&self, cache: &[f32]) -> Vec<f64> {
        let MlaShape { n_heads, kv_lora_rank, rope_dim, scale } = self.shape;
        let width = kv_lora_rank + rope_dim;
        let mut out = Vec::new();
        for (token, &position) in self.pages.positions.iter().enumerate() {
            let seq = self.pages.token_to_seq[token] as usize;
            let keys: Vec<&[f32]> = (0..=position as usize)
                .map(|position| &cache[self.slot(seq, position) * width..][..width])
                .collect();
            for head in 0..n_heads {
                let row = token * n_heads + head;
                let mut query = self.q_lat[row * kv_lora_rank..][..kv_lora_rank].to_vec();
                query.extend(&self.q_pe[row * rope_dim..][..rope_dim]);
                let weights: Vec<f64> =
                    keys.iter().map(|key| (f64::from(scale) * dot(&query, key)).exp()).collect();
                let total: f64 = weights.iter().sum();
                for i in 0..kv_lora_rank {
                    let sum: f64 =
                        weights.iter().zip(&keys).map(|(w, key)| w * f64::from(key[i])).sum();
                    out.push(sum / total);
                }
            }
        }
        out
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// A prefill chunk, decodes, verify windows and a chunk that crosses key blocks.
const SEQS: [(usize, usize); 6] = [(0, 5), (6, 1), (5, 4), (60, 9), (150, 1), (0, 1)];

#[test]
fn agrees_with_the_reference_and_never_reads_an_unused_slot() {
    let mut random = Random::new(1);
    for shape in SHAPES {
        let case = Case::new(&mut random, shape, &SEQS);
        let n_out = case.pages.positions.len() * case.row_len();
        let out = on_every_isa(n_out, |isa, out| {
            mla_attention_on(isa, &shape, CacheRows::F32(&case.cache), &case.batch(), out);
        });
        assert_close(&out, &case.reference(&case.cache), 1e-5);
    }
}

#[test]
fn a_bf16_cache_equals_its_widened_copy() {
    let mut random = Random::new(2);
    for shape in SHAPES {
        let mut case = Case::new(&mut random, shape, &SEQS);
        let narrow: Vec<bf16> = case.cache.iter().map(|&x| bf16::from_f32(x)).collect();
        case.cache = narrow.iter().map(|x| x.to_f32()).collect();
        let n_tokens = case.pages.positions.len();
        let out = on_every_isa(n_tokens * case.row_len(), |isa, out| {
            mla_attention_on(isa, &shape, CacheRows::Bf16(&narrow), &case.batch(), out);
        });
        assert_same_bits(&case.run(0..n_tokens), &out, "bf16 and f32 cache");
    }
}

/// Fault case L16: four verify rows over five committed keys see 6, 7, 8 and 9 keys.
#[test]
fn verify_rows_do_not_see_later_drafts() {
    let mut random = Random::new(3);
    let mut case = Case::new(&mut random, TINY, &[(5, 4), (9, 4)]);
    let before = case.run(0..8);
    let width = TINY.kv_lora_rank + TINY.rope_dim;
    let start = case.slot(0, 8) * width;
    case.cache[start..start + width].fill(f32::NAN);
    let after = case.run(0..8);
    let n = case.row_len();
    assert_same_bits(&before[..3 * n], &after[..3 * n], "rows before the changed draft");
    assert!(after[3 * n..4 * n].iter().all(|x| x.is_nan()), "the last row sees its own key");
    assert_same_bits(&before[4 * n..], &after[4 * n..], "the other sequence");
}

/// [INV-11]: chunks, windows and single tokens give the same bits.
#[test]
fn a_token_does_not_depend_on_its_window() {
    let mut random = Random::new(4);
    for shape in SHAPES {
        let case = Case::new(&mut random, shape, &[(0, 140), (5, 4), (63, 3)]);
        let n_tokens = case.pages.positions.len();
        let whole = case.run(0..n_tokens);
        for window in [1, 2, 3, 4, 5, 8, 16, 17] {
            for first in (0..n_tokens).step_by(window) {
                let tokens = first..n_tokens.min(first + window);
                let part = case.run(tokens.clone());
                let expected = &whole[tokens.start * case.row_len()..tokens.end * case.row_len()];
                assert_same_bits(expected, &part, &format!("window of {window}"));
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut random = Random::new(5);
    let case = Case::new(&mut random, TINY, &[(0, 200), (150, 1)]);
    let run = |n_threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        pool.install(|| case.run(0..case.pages.positions.len()))
    };
    assert_same_bits(&run(1), &run(3), "one and three threads");
}

#[test]
#[should_panic(expected = "a visible position has a block")]
fn a_visible_position_without_a_block_is_refused() {
    let mut random = Random::new(6);
    let mut case = Case::new(&mut random, TINY, &[(5, 1)]);
    case.pages.block_tables[0] = -1;
    case.run(0..1);
}

/// Selected positions, `[n_tokens, topk]`.
struct Selection {
    indices: Vec<i32>,
    counts: Vec<i32>,
    topk: usize,
}

impl Selection {
    /// Some of the visible positions of each token, with leftovers behind them.
    fn random(random: &mut Random, case: &Case, topk: usize) -> Self {
        let mut selection = Self { indices: vec![], counts: vec![], topk };
        for &position in &case.pages.positions {
            let mut visible: Vec<i32> = (0..=position).collect();
            let count = random.below(topk.min(visible.len()) + 1);
            while visible.len() > count {
                visible.remove(random.below(visible.len()));
            }
            visible.resize(topk, 777);
            selection.indices.extend(visible);
            selection.counts.push(count as i32);
        }
        selection
    }

    /// Everything that is visible.
    fn all(case: &Case) -> Self {
        let topk = *case.pages.positions.iter().max().unwrap() as usize + 2;
        let row =
            |&position: &i32| (0..topk as i32).map(move |p| if p > position { -1 } else { p });
        Self {
            indices: case.pages.positions.iter().flat_map(row).collect(),
            counts: case.pages.positions.iter().map(|position| position + 1).collect(),
            topk,
        }
    }

    fn keys(&self, tokens: std::ops::Range<usize>) -> SelectedKeys<'_> {
        SelectedKeys {
            indices: &self.indices[tokens.start * self.topk..tokens.end * self.topk],
            counts: &self.counts[tokens],
            topk: self.topk,
        }
    }
}

impl Case {
    fn run_sparse(&self, selection: &Selection, tokens: std::ops::Range<usize>) -> Vec<f32> {
        let batch = self.tokens(tokens.clone());
        let batch = MlaBatch { keys: Some(selection.keys(tokens)), ..batch };
        on_every_isa(batch.rows.n_tokens() * self.row_len(), |isa, out| {
            mla_attention_on(isa, &self.shape, CacheRows::F32(&self.cache), &batch, out);
        })
    }
}

/// [INV-11] as well: a token has the same bits alone.
#[test]
fn attends_to_the_selected_keys_and_nothing_else() {
    let mut random = Random::new(7);
    for shape in SHAPES {
        let case = Case::new(&mut random, shape, &SEQS);
        let selection = Selection::random(&mut random, &case, 70);
        let sparse = case.run_sparse(&selection, 0..case.pages.positions.len());
        for (token, out) in sparse.chunks_exact(case.row_len()).enumerate() {
            let keys = selection.keys(token..token + 1);
            let selected = keys.row(0);
            if selected.is_empty() {
                assert!(out.iter().all(|&x| x == 0.0), "no keys give zeros");
                continue;
            }
            // The selected keys as a sequence of their own, every other key gone.
            let seq = case.pages.token_to_seq[token] as usize;
            let width = shape.kv_lora_rank + shape.rope_dim;
            let mut own = vec![f32::NAN; case.cache.len()];
            for (position, &from) in selected.iter().enumerate() {
                let from = case.slot(seq, from as usize) * width;
                let to = case.slot(seq, position) * width;
                own[to..to + width].copy_from_slice(&case.cache[from..from + width]);
            }
            let mut batch = case.tokens(token..token + 1);
            let last = [selected.len() as i32 - 1];
            batch.rows.positions = &last;
            let mut dense = vec![f32::NAN; out.len()];
            mla_attention(&shape, CacheRows::F32(&own), &batch, &mut dense);
            assert_same_bits(&dense, out, "dense attention to the selected keys");
            assert_same_bits(&case.run_sparse(&selection, token..token + 1), out, "alone");
        }
    }
}

#[test]
fn a_selection_of_all_keys_is_dense_bit_for_bit() {
    let mut random = Random::new(8);
    for shape in SHAPES {
        let case = Case::new(&mut random, shape, &SEQS);
        let n_tokens = case.pages.positions.len();
        let sparse = case.run_sparse(&Selection::all(&case), 0..n_tokens);
        assert_same_bits(&case.run(0..n_tokens), &sparse, "all keys selected");
    }
}

fn attend_to_position(position: i32) {
    let mut random = Random::new(9);
    let case = Case::new(&mut random, TINY, &[(5, 2)]);
    let selection = Selection { indices: vec![0, 5, 3, position], counts: vec![2, 2], topk: 2 };
    case.run_sparse(&selection, 0..2);
}

#[test]
fn a_selected_position_may_be_the_last_visible_one() {
    attend_to_position(6);
}

#[test]
#[should_panic(expected = "token 1 sees 7 keys and was given position 7")]
fn a_selected_position_that_is_not_visible_is_refused() {
    attend_to_position(7);
}

#[test]
#[should_panic(expected = "token 1 sees 7 keys and was given position -1")]
fn a_selected_position_below_zero_is_refused() {
    attend_to_position(-1);
}
