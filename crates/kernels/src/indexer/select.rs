//! The best keys of one row.

use crate::simd::{F32x16, Kernel};

/// All visible positions, which fit.
pub(super) fn all(n_visible: usize, indices: &mut [i32]) {
    for (position, index) in indices.iter_mut().enumerate() {
        *index = if position < n_visible { position as i32 } else { -1 };
    }
}

/// The positions of the highest scores, ascending.
pub(super) struct Best<'a> {
    /// More scores than `indices`.
    pub(super) scores: &'a [f32],
    pub(super) indices: &'a mut [i32],
}

impl Kernel for Best<'_> {
    type Output = ();

    // The compiler vectorises these loops for the instruction set of the caller. All are without
    // branches on scores, which are as good as random.
    #[inline(always)]
    fn run<V: F32x16>(self) {
        let topk = self.indices.len();
        let ranks: Vec<u32> = self.scores.iter().map(|&score| rank(score)).collect();
        // The rank of the last selected score, bit by bit: the greatest one that fewer than topk
        // scores are better than.
        let mut last = 0;
        for bit in (0..u32::BITS).rev() {
            let raised = last | 1 << bit;
            last = if n_below(&ranks, raised) < topk { raised } else { last };
        }
        // Of the scores of this rank the lowest positions are selected.
        let mut n_ties = topk - n_below(&ranks, last);
        let mut n_selected = 0;
        for (position, &rank) in ranks.iter().enumerate() {
            let is_tie = rank == last && n_ties > 0;
            n_ties -= usize::from(is_tie);
            self.indices[n_selected] = position as i32;
            n_selected += usize::from(rank < last || is_tie);
            if n_selected == topk {
                break;
            }
        }
    }
}

#[inline(always)]
fn n_below(ranks: &[u32], bound: u32) -> usize {
    ranks.iter().map(|&rank| u32::from(rank < bound)).sum::<u32>() as usize
}

/// Orders scores from the highest (0) down to NaN; the two zeros are equal.
#[inline(always)]
fn rank(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    // The bits of negative numbers are already in descending order, behind the positive ones.
    let rank = if bits >> 31 == 1 { bits } else { 0x7fff_ffff - bits };
    if score.is_nan() { u32::MAX } else { rank }
}

#[cfg(test)]
mod tests;
