//! Tests of the lightning indexer, alone and with the attention that uses its selection.

use std::ops::Range;

use half::bf16;
use quantization::E4M3;

use super::{IndexBatch, IndexCache, IndexShape, lightning_index_on};
use crate::fp8::{self, store_fp8_key};
use crate::paged::PagedRows;
use crate::simd::Isa;
use crate::test_util::{Pages, Random, assert_same_bits};
use crate::{CacheRows, MlaBatch, MlaShape, SelectedKeys, mla_attention};

const TINY: IndexShape = IndexShape { n_heads: 4, head_dim: 32, topk: 16, scale: 0.18 };
const SHAPES: [IndexShape; 4] = [
    TINY,
    IndexShape { n_heads: 1, head_dim: 5, topk: 1, scale: 0.5 },
    IndexShape { n_heads: 3, head_dim: 40, topk: 33, scale: 0.2 },
    IndexShape { n_heads: 70, head_dim: 16, topk: 20, scale: 0.3 },
];
/// Rows below, at and above `topk`; decodes, verify windows, and chunks that cross panels.
const SEQS: [(usize, usize); 7] = [(0, 5), (6, 1), (14, 4), (60, 9), (150, 1), (0, 40), (0, 1)];
const POISON: i32 = 777;

/// Sequences with shuffled blocks; every slot that holds no token is NaN.
struct Case {
    shape: IndexShape,
    pages: Pages,
    keys: Vec<f32>,
    q: Vec<f32>,
    weights: Vec<f32>,
}

#[derive(Debug, PartialEq)]
struct Selected {
    indices: Vec<i32>,
    counts: Vec<i32>,
    n_scored: u64,
}

impl Case {
    /// One sequence per `(n_computed, n_query)`.
    fn new(
        random: &mut Random,
        shape: IndexShape,
        block_size: usize,
        seqs: &[(usize, usize)],
    ) -> Self {
        let pages = Pages::new(random, block_size, seqs);
        let n_rows = pages.n_tokens() * shape.n_heads;
        Self {
            shape,
            keys: pages.cache(random, shape.head_dim, seqs),
            q: random.values(n_rows * shape.head_dim),
            weights: random.values(n_rows),
            pages,
        }
    }

    fn slot(&self, seq: usize, position: usize) -> usize {
        self.pages.slot(seq, position)
    }

    fn set_key(&mut self, seq: usize, position: usize, key: &[f32]) {
        let start = self.slot(seq, position) * self.shape.head_dim;
        self.keys[start..start + key.len()].copy_from_slice(key);
    }

    fn n_tokens(&self) -> usize {
        self.pages.n_tokens()
    }

    fn rows(&self, tokens: Range<usize>) -> PagedRows<'_> {
        self.pages.rows(tokens)
    }

    fn batch(&self, tokens: Range<usize>) -> IndexBatch<'_> {
        let heads = tokens.start * self.shape.n_heads..tokens.end * self.shape.n_heads;
        let dim = self.shape.head_dim;
        IndexBatch {
            q: &self.q[heads.start * dim..heads.end * dim],
            weights: &self.weights[heads],
            rows: self.rows(tokens),
        }
    }

    /// Runs some tokens into poisoned buffers.
    fn run_on(&self, isa: Isa, cache: IndexCache<'_>, tokens: Range<usize>) -> Selected {
        let mut indices = vec![POISON; tokens.len() * self.shape.topk];
        let mut counts = vec![POISON; tokens.len()];
        let call = (&self.shape, cache, &self.batch(tokens));
        let n_scored = lightning_index_on(isa, call, &mut indices, &mut counts);
        Selected { indices, counts, n_scored }
    }

    fn run(&self, tokens: Range<usize>) -> Selected {
        self.run_on(Isa::detect(), IndexCache::F32(&self.keys), tokens)
    }

    /// The scores of a token in f64; the dot products are with `keys`, one per slot.
    fn scores(&self, token: usize, keys: &[f32]) -> Vec<f64> {
        let IndexShape { n_heads, head_dim, scale, .. } = self.shape;
        let seq = self.pages.token_to_seq[token] as usize;
        let score = |position| {
            let key = &keys[self.slot(seq, position) * head_dim..][..head_dim];
            let heads = token * n_heads..(token + 1) * n_heads;
            let terms = heads.map(|row| {
                let q = &self.q[row * head_dim..][..head_dim];
                let dot: f64 = q.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                f64::from(self.weights[row]) * (f64::from(scale) * dot).max(0.0)
            });
            terms.sum()
        };
        (0..=self.pages.positions[token] as usize).map(score).collect()
    }

    /// Checks a selection of all tokens against f64 scores of `keys`.
    #[track_caller]
    fn check(&self, selected: &Selected, keys: &[f32]) {
        let topk = self.shape.topk;
        let mut n_scored = 0;
        for (token, &position) in self.pages.positions.iter().enumerate() {
            let n_visible = position as usize + 1;
            let count = n_visible.min(topk);
            let row = &selected.indices[token * topk..][..topk];
            assert_eq!(selected.counts[token], count as i32, "token {token}");
            assert!(row[count..].iter().all(|&index| index == -1), "{row:?}");
            let row = &row[..count];
            assert!(row.is_sorted_by(|a, b| a < b) && row[0] >= 0, "{row:?}");
            assert!(row[count - 1] <= position, "{row:?}");
            if n_visible > topk {
                n_scored += n_visible as u64;
                let scores = self.scores(token, keys);
                let is_selected = |index: usize| row.binary_search(&(index as i32)).is_ok();
                let lowest = row.iter().map(|&i| scores[i as usize]).fold(f64::MAX, f64::min);
                for (index, &score) in scores.iter().enumerate() {
                    // Scores closer than the rounding of f32 may be ordered either way.
                    assert!(is_selected(index) || score < lowest + 1e-4, "token {token}: {index}");
                }
            }
        }
        assert_eq!(selected.n_scored, n_scored);
    }
}

#[test]
fn agrees_with_the_reference_and_never_reads_an_unused_slot() {
    let mut random = Random::new(1);
    for shape in SHAPES {
        for block_size in [1, 4, 16, 64] {
            let case = Case::new(&mut random, shape, block_size, &SEQS);
            let narrow: Vec<bf16> = case.keys.iter().map(|&x| bf16::from_f32(x)).collect();
            let widened: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
            let (fp8, decoded) = to_fp8(&case.keys, shape.head_dim);
            for (cache, keys) in [
                (IndexCache::F32(&case.keys), &case.keys),
                (IndexCache::Bf16(&narrow), &widened),
                (IndexCache::Fp8(&fp8), &decoded),
            ] {
                let all = 0..case.n_tokens();
                let selected = case.run_on(Isa::available()[0], cache, all.clone());
                case.check(&selected, keys);
                for isa in Isa::available() {
                    assert_eq!(case.run_on(isa, cache, all.clone()), selected, "{isa:?}");
                }
            }
        }
    }
}

/// Keys as fp8, and their values.
fn to_fp8(keys: &[f32], head_dim: usize) -> (Vec<u8>, Vec<f32>) {
    let (mut stored, mut values) = (vec![], vec![]);
    for key in keys.chunks_exact(head_dim) {
        let mut bytes = vec![0; head_dim + fp8::FP8_SCALE_BYTES];
        store_fp8_key(key, &mut bytes);
        let (codes, scale) = fp8::split_key(&bytes);
        values.extend(codes.iter().map(|&code| E4M3[usize::from(code)] * scale));
        stored.extend(bytes);
    }
    (stored, values)
}

/// The scores themselves, by lists of every length: a list differs from the next one by a key.
#[test]
fn every_length_of_the_list_cuts_the_same_order() {
    let mut random = Random::new(2);
    let mut case = Case::new(&mut random, TINY, 4, &[(69, 1)]);
    let scores = case.scores(0, &case.keys);
    let mut order: Vec<usize> = (0..70).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    for topk in 1..70 {
        case.shape.topk = topk;
        let mut expected: Vec<i32> = order[..topk].iter().map(|&index| index as i32).collect();
        expected.sort_unstable();
        assert_eq!(case.run(0..1).indices, expected, "topk {topk}");
    }
}

/// [INV-11]: chunks, windows and single tokens select the same keys.
#[test]
fn a_token_does_not_depend_on_its_window() {
    let mut random = Random::new(3);
    for shape in SHAPES {
        let case = Case::new(&mut random, shape, 16, &[(0, 140), (5, 4), (63, 3)]);
        let whole = case.run(0..case.n_tokens());
        for window in [1, 2, 3, 4, 5, 8, 16, 17] {
            for first in (0..case.n_tokens()).step_by(window) {
                let tokens = first..case.n_tokens().min(first + window);
                let part = case.run(tokens.clone());
                let list = tokens.start * shape.topk..tokens.end * shape.topk;
                assert_eq!(part.indices, whole.indices[list], "window of {window}");
                assert_eq!(part.counts, whole.counts[tokens]);
            }
        }
    }
}

#[test]
fn tokens_in_any_order_select_as_in_order() {
    let mut random = Random::new(4);
    let mut case = Case::new(&mut random, TINY, 4, &[(80, 3), (0, 30)]);
    let n_tokens = case.n_tokens();
    let in_order = case.run(0..n_tokens);
    // Positions of a sequence fall and long rows are between short ones.
    case.pages.positions.reverse();
    case.pages.token_to_seq.reverse();
    case.q = case.q.chunks(TINY.n_heads * TINY.head_dim).rev().flatten().copied().collect();
    case.weights = case.weights.chunks(TINY.n_heads).rev().flatten().copied().collect();
    let reversed = case.run(0..n_tokens);
    let rows = reversed.indices.chunks(TINY.topk).rev();
    assert!(rows.eq(in_order.indices.chunks(TINY.topk)));
    assert_eq!(reversed.n_scored, in_order.n_scored);
}

/// [REQ-9]: the counts of rows at which a launch once left rows unwritten.
#[test]
fn every_element_is_written_at_any_number_of_rows() {
    let mut random = Random::new(5);
    for n_rows in [1, 127, 128, 129, 512] {
        // Half of the rows need no scores.
        let seqs: Vec<_> = (0..n_rows).map(|row| (row % (2 * TINY.topk), 1)).collect();
        let case = Case::new(&mut random, TINY, 4, &seqs);
        let selected = case.run(0..n_rows);
        assert!(!selected.indices.contains(&POISON) && !selected.counts.contains(&POISON));
        case.check(&selected, &case.keys);
    }
}

#[test]
fn threads_and_bounded_memory_do_not_change_a_selection() {
    let mut random = Random::new(6);
    // More scores than are held at once, and enough work for several threads.
    let shape = IndexShape { n_heads: 1, head_dim: 4, topk: 8, scale: 0.5 };
    let case = Case::new(&mut random, shape, 16, &[(4000, 900), (2500, 300)]);
    let run = |n_threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        pool.install(|| case.run(0..case.n_tokens()))
    };
    let selected = run(1);
    assert!(selected.n_scored > super::MAX_SCORES as u64);
    assert_eq!(run(3), selected);
    for token in [0, 857, 858, 859, 899, 900, 1199] {
        let list = token * shape.topk..(token + 1) * shape.topk;
        assert_eq!(case.run(token..token + 1).indices, selected.indices[list]);
    }
}

/// One head and one dimension: a score is the key where it is positive, else zero.
fn select_of(keys: &[f32], weight: f32, topk: usize) -> Vec<i32> {
    let shape = IndexShape { n_heads: 1, head_dim: 1, topk, scale: 1.0 };
    let mut case = Case::new(&mut Random::new(7), shape, 4, &[(keys.len() - 1, 1)]);
    (case.q, case.weights) = (vec![1.0], vec![weight]);
    for (position, &key) in keys.iter().enumerate() {
        case.set_key(0, position, &[key]);
    }
    case.run(0..1).indices
}

#[test]
fn ties_go_to_the_lower_position() {
    assert_eq!(select_of(&[1.0, 2.0, 1.0, 2.0, 1.0], 1.0, 3), [0, 1, 3]);
    assert_eq!(select_of(&[1.0; 50], 1.0, 4), [0, 1, 2, 3]);
    // All scores below zero are zero, also where a negative weight makes it a negative zero.
    assert_eq!(select_of(&[-3.0, -1.0, -2.0, 5.0], 1.0, 2), [0, 3]);
    assert_eq!(select_of(&[-3.0, 1.0, 0.0, -0.0, 5.0], -1.0, 3), [0, 2, 3]);
    assert_eq!(select_of(&[3.0, 1.0, 2.0], -1.0, 2), [1, 2]);
}

#[test]
fn a_broken_score_loses_against_every_other_one() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    assert_eq!(select_of(&[nan, 1.0, nan, 0.5], 1.0, 2), [1, 3]);
    assert_eq!(select_of(&[nan, 1.0, inf, 0.5], -1.0, 3), [1, 2, 3]);
    assert_eq!(select_of(&[nan, -1.0, nan, nan], 1.0, 2), [0, 1]);
    assert_eq!(select_of(&[0.5, inf, -nan, 1.0], 1.0, 2), [1, 3]);
}

/// Fault case L16: a row's selection is made of the keys that it sees.
#[test]
fn the_last_draft_changes_only_the_last_row() {
    let mut random = Random::new(8);
    let shape = IndexShape { topk: 4, ..TINY };
    let mut case = Case::new(&mut random, shape, 4, &[(5, 4), (9, 4)]);
    let before = case.run(0..8);
    case.check(&before, &case.keys);
    case.set_key(0, 8, &[f32::NAN; 32]);
    let mut after = case.run(0..8);
    assert!(!after.indices[12..16].contains(&8), "the last row sees its own key");
    after.indices[12..16].copy_from_slice(&before.indices[12..16]);
    assert_eq!(before, after);
}

/// Fault case L15: rows with fewer keys than `topk`, through selection and attention.
#[test]
fn unused_entries_are_ignored_and_short_rows_are_dense() {
    let mut random = Random::new(9);
    let shape = IndexShape { topk: 8, ..TINY };
    let mut case = Case::new(&mut random, shape, 4, &[(2, 1), (6, 1), (7, 1), (8, 1), (0, 1)]);
    let selected = case.run(0..5);
    assert_eq!(selected.counts, [3, 7, 8, 8, 1]);
    case.check(&selected, &case.keys);
    for (row, len) in [(0, 3), (1, 7), (2, 8)] {
        let expected: Vec<i32> = (0..8).map(|i| if i < len { i } else { -1 }).collect();
        assert_eq!(selected.indices[row * 8..][..8], expected);
    }
    assert_eq!(selected.n_scored, 9, "only the row of length 9 has a choice");

    let mla = MlaShape { n_heads: 2, kv_lora_rank: 24, rope_dim: 8, scale: 0.2 };
    let (q_lat, q_pe) = (random.values(5 * 2 * 24), random.values(5 * 2 * 8));
    // Index keys are as wide as these latent rows: one buffer is both.
    let attend = |case: &Case, keys: Option<SelectedKeys<'_>>| {
        let batch = MlaBatch { q_lat: &q_lat, q_pe: &q_pe, rows: case.rows(0..5), keys };
        let mut out = vec![f32::NAN; q_lat.len()];
        mla_attention(&mla, CacheRows::F32(&case.keys), &batch, &mut out);
        out
    };
    // The last row is padding, and behind the counts are leftovers that nobody may look up.
    let (mut indices, mut counts) = (selected.indices, selected.counts);
    for (row, count) in indices.chunks_mut(8).zip(&mut counts) {
        row[*count as usize..].fill(POISON);
    }
    indices[4 * 8..].fill(POISON);
    counts[4] = 0;
    let keys = SelectedKeys { indices: &indices, counts: &counts, topk: 8 };
    let (dense, sparse) = (attend(&case, None), attend(&case, Some(keys)));
    let row_len = 2 * 24;
    assert_same_bits(&dense[..3 * row_len], &sparse[..3 * row_len], "rows of at most topk keys");
    assert_eq!(sparse[4 * row_len..], [0.0; 48]);

    // Length 9 drops exactly one key: without it in the cache the row has the same bits.
    let kept = &indices[3 * 8..4 * 8];
    let dropped: Vec<i32> = (0..9).filter(|index| !kept.contains(index)).collect();
    assert_eq!(dropped.len(), 1);
    case.set_key(3, dropped[0] as usize, &[f32::NAN; 32]);
    assert_same_bits(&sparse, &attend(&case, Some(keys)), "without the dropped key");
}
