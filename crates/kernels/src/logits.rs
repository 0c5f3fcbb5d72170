//! Reductions over rows of logits.

use crate::exp::exp;
use crate::parallel::{Disjoint, for_each_task, n_threads};
use crate::simd::{F32x16, Isa, Kernel, LANES, dispatch};

/// Multiply-adds that take as long as an exponential.
const EXP_COST: usize = 32;
/// Logits whose exponentials are summed in f32 before the f64 sum.
const SUM_BLOCK: usize = 64 * LANES;

/// The index of the greatest logit of each row of `[n_rows, vocab]`.
///
/// Ties go to the lowest index; NaN is smaller than everything, and a row of NaN gives 0.
///
/// # Panics
///
/// If the lengths do not match.
pub fn argmax_rows(logits: &[f32], vocab: usize, out: &mut [i32]) {
    let isa = Isa::detect();
    assert_eq!(logits.len(), out.len() * vocab, "logits are [n_rows, vocab]");
    assert!(vocab > 0, "a vocabulary is not empty");
    for (row, out) in logits.chunks_exact(vocab).zip(out) {
        *out = argmax_on(isa, row) as i32;
    }
}

/// `log softmax(logits[r])[tokens[r]]` of each row of `[n_rows, vocab]`.
///
/// # Panics
///
/// If the lengths do not match or a token is not in the vocabulary.
pub fn log_softmax_gather(logits: &[f32], vocab: usize, tokens: &[i32], out: &mut [f32]) {
    log_softmax_gather_on(Isa::detect(), logits, vocab, tokens, out);
}

fn log_softmax_gather_on(isa: Isa, logits: &[f32], vocab: usize, tokens: &[i32], out: &mut [f32]) {
    assert_eq!(tokens.len(), out.len(), "one token per row");
    assert_eq!(logits.len(), out.len() * vocab, "logits are [n_rows, vocab]");
    let n_rows = out.len();
    let out = Disjoint::new(out);
    for_each_task(n_rows, n_threads(logits.len() * EXP_COST), |row| {
        let logits = &logits[row * vocab..][..vocab];
        let token = usize::try_from(tokens[row]).expect("a token is not negative");
        assert!(token < vocab, "a token is in the vocabulary");
        let log_prob = f64::from(logits[token]) - dispatch(isa, LogSumExp(logits));
        // SAFETY: a row is one task.
        unsafe { out.slice(row, 1) }.fill(log_prob as f32);
    });
}

fn argmax_on(isa: Isa, row: &[f32]) -> usize {
    let max = dispatch(isa, Max(row));
    // A whole chunk is compared before looking for the place, so that the search vectorises.
    let mut start = 0;
    for chunk in row.chunks(64) {
        if chunk.iter().fold(false, |found, &x| found | (x == max)) {
            return start + chunk.iter().position(|&x| x == max).expect("found in this chunk");
        }
        start += chunk.len();
    }
    0
}

/// The greatest value, without regard to NaN.
struct Max<'a>(&'a [f32]);

impl Kernel for Max<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<V: F32x16>(self) -> f32 {
        let (chunks, tail) = self.0.as_chunks::<LANES>();
        // Four chains hide the latency of the comparison.
        let mut maxima = [V::splat(f32::NEG_INFINITY); 4];
        for group in chunks.chunks(4) {
            for (max, chunk) in maxima.iter_mut().zip(group) {
                *max = V::load(chunk).max(*max);
            }
        }
        let mut lanes = [0.0; LANES];
        maxima[0].max(maxima[1]).max(maxima[2].max(maxima[3])).store(&mut lanes);
        lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max })
    }
}

/// `log(sum(exp(x)))`.
struct LogSumExp<'a>(&'a [f32]);

impl Kernel for LogSumExp<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<V: F32x16>(self) -> f64 {
        let max = Max(self.0).run::<V>();
        let mut total = 0.0;
        for block in self.0.chunks(SUM_BLOCK) {
            let (chunks, tail) = block.as_chunks::<LANES>();
            let mut padded = [f32::NEG_INFINITY; LANES];
            padded[..tail.len()].copy_from_slice(tail);
            let mut sum = exp(V::load(&padded).sub(V::splat(max)));
            for chunk in chunks {
                sum = sum.add(exp(V::load(chunk).sub(V::splat(max))));
            }
            total += f64::from(sum.sum());
        }
        f64::from(max) + total.ln()
    }
}

#[cfg(test)]
mod tests;
