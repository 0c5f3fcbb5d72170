//! What the kernel tests share.

use std::ops::Range;

use crate::paged::PagedRows;
use crate::simd::Isa;

/// A small deterministic generator.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Uniform in `0..n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }

    /// Roughly uniform in -1..1.
    pub(crate) fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }
}

/// Runs a kernel into poisoned output on every instruction set and returns the portable result,
/// after checking that the others have the same bits.
#[track_caller]
pub(crate) fn on_every_isa(n_out: usize, kernel: impl Fn(Isa, &mut [f32])) -> Vec<f32> {
    let mut portable: Option<Vec<f32>> = None;
    for isa in Isa::available() {
        let mut out = vec![f32::NAN; n_out];
        kernel(isa, &mut out);
        match &portable {
            None => portable = Some(out),
            Some(portable) => assert_same_bits(portable, &out, &format!("{isa:?}")),
        }
    }
    portable.expect("the portable instruction set is always there")
}

#[track_caller]
pub(crate) fn assert_same_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}: lengths");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: element {i}: {a} and {b}");
    }
}

#[track_caller]
pub(crate) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "lengths");
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(a) - e).abs();
        assert!(error <= tolerance * e.abs().max(1.0), "element {i}: {a} instead of {e}");
    }
}

/// Tokens of some sequences over shuffled blocks.
pub(crate) struct Pages {
    pub(crate) block_size: usize,
    pub(crate) max_blocks: usize,
    pub(crate) block_tables: Vec<i32>,
    pub(crate) token_to_seq: Vec<i32>,
    pub(crate) positions: Vec<i32>,
    n_blocks: usize,
}

impl Pages {
    /// One sequence per `(n_computed, n_query)`; its queried tokens are in the batch.
    pub(crate) fn new(random: &mut Random, block_size: usize, seqs: &[(usize, usize)]) -> Self {
        let longest = seqs.iter().map(|(computed, query)| computed + query).max().unwrap();
        let max_blocks = longest.div_ceil(block_size) + 1;
        let n_blocks = seqs.len() * max_blocks + 3;
        let mut free: Vec<i32> = (0..n_blocks as i32).collect();
        let mut pages = Self {
            block_size,
            max_blocks,
            block_tables: vec![-1; seqs.len() * max_blocks],
            token_to_seq: vec![],
            positions: vec![],
            n_blocks,
        };
        for (seq, &(n_computed, n_query)) in seqs.iter().enumerate() {
            let len = n_computed + n_query;
            for block in 0..len.div_ceil(block_size) {
                let taken = free.swap_remove(random.below(free.len()));
                pages.block_tables[seq * max_blocks + block] = taken;
            }
            pages.token_to_seq.extend(vec![seq as i32; n_query]);
            pages.positions.extend(n_computed as i32..len as i32);
        }
        pages
    }

    pub(crate) fn n_tokens(&self) -> usize {
        self.positions.len()
    }

    pub(crate) fn n_slots(&self) -> usize {
        self.n_blocks * self.block_size
    }

    pub(crate) fn slot(&self, seq: usize, position: usize) -> usize {
        let block = self.block_tables[seq * self.max_blocks + position / self.block_size];
        block as usize * self.block_size + position % self.block_size
    }

    /// A cache with a random row of `width` for every position, and NaN in every other slot.
    pub(crate) fn cache(
        &self,
        random: &mut Random,
        width: usize,
        seqs: &[(usize, usize)],
    ) -> Vec<f32> {
        let mut cache = vec![f32::NAN; self.n_slots() * width];
        for (seq, &(n_computed, n_query)) in seqs.iter().enumerate() {
            for position in 0..n_computed + n_query {
                let start = self.slot(seq, position) * width;
                cache[start..start + width].copy_from_slice(&random.values(width));
            }
        }
        cache
    }

    /// Some of the tokens.
    pub(crate) fn rows(&self, tokens: Range<usize>) -> PagedRows<'_> {
        PagedRows {
            token_to_seq: &self.token_to_seq[tokens.clone()],
            positions: &self.positions[tokens],
            block_tables: &self.block_tables,
            max_blocks: self.max_blocks,
            block_size: self.block_size,
        }
    }
}
