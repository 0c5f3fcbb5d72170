//! Tests of the reductions over logits.

use super::{argmax_on, argmax_rows, log_softmax_gather, log_softmax_gather_on};
use crate::simd::Isa;
use crate::test_util::{Random, assert_close, assert_same_bits, on_every_isa};

#[track_caller]
fn check_argmax(row: &[f32], expected: usize) {
    for isa in Isa::available() {
        assert_eq!(argmax_on(isa, row), expected, "{isa:?}");
    }
}

#[test]
fn the_first_of_equal_maxima_wins() {
    let mut random = Random::new(1);
    for vocab in [1, 5, 16, 64, 65, 1000] {
        for _ in 0..50 {
            // Few distinct values, so that ties are common.
            let row: Vec<f32> = (0..vocab).map(|_| random.below(9) as f32 - 4.0).collect();
            let mut expected = 0;
            for (i, &x) in row.iter().enumerate() {
                if x > row[expected] {
                    expected = i;
                }
            }
            check_argmax(&row, expected);
        }
    }
    check_argmax(&[-1.0, -0.0, 0.0], 1);
}

#[test]
fn nan_is_smaller_than_everything() {
    check_argmax(&[f32::NAN, f32::NEG_INFINITY, f32::NAN], 1);
    check_argmax(&[f32::NAN; 70], 0);
    for at in [0, 15, 16, 63, 64, 69] {
        let mut row = [f32::NAN; 70];
        row[at] = -3.0;
        check_argmax(&row, at);
    }
}

#[test]
fn each_row_has_its_own_maximum() {
    let mut out = [-1; 2];
    argmax_rows(&[1.0, 2.0, 0.0, 5.0, 2.0, 0.0], 3, &mut out);
    assert_eq!(out, [1, 0]);
}

#[test]
fn log_probabilities_agree_with_the_reference() {
    let mut random = Random::new(2);
    for vocab in [1, 17, 1024, 40_000] {
        let n_rows = 7;
        let logits: Vec<f32> = random.values(n_rows * vocab).iter().map(|x| 30.0 * x).collect();
        let tokens: Vec<i32> = (0..n_rows).map(|_| random.below(vocab) as i32).collect();
        let out = on_every_isa(n_rows, |isa, out| {
            log_softmax_gather_on(isa, &logits, vocab, &tokens, out);
        });
        let mut expected = Vec::new();
        for (row, &token) in logits.chunks_exact(vocab).zip(&tokens) {
            let total: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            expected.push(f64::from(row[token as usize]) - total.ln());
        }
        assert_close(&out, &expected, 1e-6);
        let mut alone = [f32::NAN];
        log_softmax_gather(&logits[vocab..2 * vocab], vocab, &tokens[1..2], &mut alone);
        assert_same_bits(&alone, &out[1..2], "row in a batch");
    }
}

#[test]
fn an_impossible_token_has_no_probability() {
    let mut out = [f32::NAN];
    log_softmax_gather(&[1.0, f32::NEG_INFINITY], 2, &[1], &mut out);
    assert_eq!(out, [f32::NEG_INFINITY]);
}
