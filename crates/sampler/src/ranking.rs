//! A total order of the tokens of a row, the same on every device.

use tch::{Kind, TchError, Tensor};

/// An i64 key for each of the f32 `logits`, `[R, vocab]`, unlike any other of its row: larger
/// logits have larger keys, and of equal ones the lower id has the larger key.
///
/// libtorch does not say which of equal elements its `topk` returns, and sorts stably at a price.
/// Neither matters where no two elements are equal.
pub(crate) fn keys(logits: &Tensor) -> Result<Tensor, TchError> {
    let (_, vocab) = logits.size2()?;
    // Adding 0 makes a negative zero positive.
    let bits = logits.f_add_scalar(0.0)?.f_view_dtype(Kind::Int)?;
    // The bits of negative numbers ascend with their magnitude: flip all but the sign.
    let mut ordered = bits.f_bitwise_right_shift_tensor_scalar(31)?;
    let _ = ordered.f_bitwise_and_(0x7FFF_FFFF)?.f_bitwise_xor_tensor_(&bits)?;
    let ids = Tensor::f_arange(vocab, (Kind::Int64, logits.device()))?;
    let reversed = ids.f_neg()?.f_add_scalar(i64::from(u32::MAX))?;
    ordered.f_to_kind(Kind::Int64)?.f_mul_scalar_(1i64 << 32)?.f_add_(&reversed)
}

/// The `n` most likely tokens of each row of f32 `logits`, best first: their ids, i64 `[R, n]`.
pub(crate) fn top(logits: &Tensor, n: i64) -> Result<Tensor, TchError> {
    Ok(keys(logits)?.f_topk(n, -1, true, true)?.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranked(row: &[f32]) -> Vec<i64> {
        let logits = Tensor::from_slice(row).unsqueeze(0);
        Vec::try_from(top(&logits, row.len() as i64).unwrap().squeeze()).unwrap()
    }

    #[test]
    fn equal_logits_rank_by_id() {
        let (inf, tiny) = (f32::INFINITY, f32::from_bits(1));
        assert_eq!(ranked(&[0.0, 1.0, -0.0, 1.0, -2.0, -1.0]), [1, 3, 0, 2, 5, 4]);
        assert_eq!(
            ranked(&[-inf, inf, -tiny, 0.0, tiny, f32::MIN, f32::MAX, -inf]),
            [1, 6, 4, 3, 2, 5, 0, 7]
        );
    }

    /// Few distinct values, and sizes on both sides of the thresholds of `topk`.
    #[test]
    fn any_number_of_the_best_is_the_head_of_a_stable_sort() {
        tch::manual_seed(4);
        for (vocab, n) in [(1, 1), (9, 4), (500, 499), (5000, 7), (5000, 1024), (5000, 5000)] {
            let logits = Tensor::randint(40, [3, vocab], (Kind::Float, tch::Device::Cpu)) - 20.0;
            let sorted = logits.argsort_stable(true, -1, true).narrow(1, 0, n);
            assert_eq!(top(&logits, n).unwrap(), sorted, "{n} of {vocab}");
        }
    }
}
