//! The sampler against plain loops over the same numbers.

use tch::{Device, Kind, Tensor};

use super::*;

fn chosen(logits: &Tensor) -> Vec<u32> {
    let mut ids = vec![99];
    greedy(logits, &mut ids).unwrap();
    ids
}

/// The first index whose value no other exceeds.
fn plain_argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &value) in row.iter().enumerate() {
        if value > row[best] {
            best = id;
        }
    }
    u32::try_from(best).unwrap()
}

fn plain_logprob(row: &[f32], id: usize) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
    f64::from(row[id] - max) - sum.ln()
}

fn rows_of(logits: &Tensor) -> Vec<Vec<f32>> {
    Vec::<Vec<f32>>::try_from(logits.to_kind(Kind::Float)).unwrap()
}

/// Few distinct values, so that nearly every row has ties; wide enough for vectorised code.
#[test]
fn greedy_takes_the_lowest_of_equal_logits() {
    tch::manual_seed(1);
    for vocab in [1, 2, 7, 64, 1000, 4099] {
        for kind in [Kind::Float, Kind::BFloat16] {
            let logits = Tensor::randint(4, [33, vocab], (kind, Device::Cpu));
            let expected: Vec<u32> = rows_of(&logits).iter().map(|row| plain_argmax(row)).collect();
            assert_eq!(chosen(&logits), expected, "vocabulary {vocab}, {kind:?}");
        }
    }
}

#[test]
fn greedy_does_not_depend_on_batch_mates() {
    tch::manual_seed(2);
    let logits = Tensor::randn([17, 301], (Kind::Float, Device::Cpu));
    let together = chosen(&logits);
    for (row_idx, &id) in together.iter().enumerate() {
        let alone = logits.narrow(0, i64::try_from(row_idx).unwrap(), 1);
        assert_eq!(chosen(&alone), [id]);
    }
}

#[test]
fn no_rows_give_no_ids() {
    assert!(chosen(&Tensor::zeros([0, 5], (Kind::Float, Device::Cpu))).is_empty());
}

#[test]
fn a_nan_is_an_error_that_names_its_row() {
    let logits = Tensor::from_slice2(&[[0.0f32, 1.0], [f32::NAN, 2.0], [f32::INFINITY, 0.0]]);
    let error = greedy(&logits, &mut Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "row 1 of the logits holds a NaN");
    assert_eq!(chosen(&logits.narrow(0, 2, 1)), [0]);
}

#[test]
fn logprobs_equal_a_plain_log_softmax() {
    tch::manual_seed(3);
    for kind in [Kind::Float, Kind::BFloat16] {
        let logits = (Tensor::randn([9, 517], (Kind::Float, Device::Cpu)) * 8.0).to_kind(kind);
        let ids: Vec<i64> = (0..9).map(|row| row * 57 % 517).collect();
        let got = token_logprobs(&logits, &Tensor::from_slice(&ids)).unwrap();
        assert_eq!(got.kind(), Kind::Float);
        let got = Vec::<f32>::try_from(got).unwrap();
        for ((row, &id), &got) in rows_of(&logits).iter().zip(&ids).zip(&got) {
            let expected = plain_logprob(row, usize::try_from(id).unwrap());
            assert!((f64::from(got) - expected).abs() < 1e-4, "{got} and {expected}");
        }
    }
}

#[test]
fn an_id_outside_the_vocabulary_is_an_error() {
    let logits = Tensor::zeros([1, 4], (Kind::Float, Device::Cpu));
    assert!(token_logprobs(&logits, &Tensor::from_slice(&[4i64])).is_err());
}
