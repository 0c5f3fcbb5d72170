//! Tests of the normalisation.

use super::{add_rms_norm, layer_norm, layer_norm_on, rms_norm, rms_norm_on};
use crate::test_util::{Random, assert_close, assert_same_bits, on_every_isa};

#[test]
fn agrees_with_the_reference_alone_and_in_a_batch() {
    let mut random = Random::new(1);
    for n in [1, 3, 16, 31, 64, 257] {
        let weight = random.values(n);
        for n_rows in [1, 2, 17] {
            let x = random.values(n_rows * n);
            let out = on_every_isa(x.len(), |isa, out| rms_norm_on(isa, &x, &weight, 1e-6, out));
            let mut expected = Vec::new();
            for x in x.chunks_exact(n) {
                let square = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
                let scale = 1.0 / (square / n as f64 + 1e-6).sqrt();
                expected.extend(
                    x.iter().zip(&weight).map(|(&x, &w)| f64::from(x) * scale * f64::from(w)),
                );
            }
            assert_close(&out, &expected, 1e-5);
            for (x, out) in x.chunks_exact(n).zip(out.chunks_exact(n)) {
                let mut alone = vec![f32::NAN; n];
                rms_norm(x, &weight, 1e-6, &mut alone);
                assert_same_bits(&alone, out, "row in a batch");
            }
        }
    }
}

#[test]
fn the_residual_is_added_before() {
    let (mut residual, mut out) = ([1.0, 2.0], [f32::NAN; 2]);
    add_rms_norm(&[2.0, 2.0], &mut residual, &[1.0, 0.5], 0.0, &mut out);
    assert_eq!(residual, [3.0, 4.0]);
    let scale = f64::from(12.5_f32.sqrt());
    assert_close(&out, &[3.0 / scale, 2.0 / scale], 1e-6);
}

#[test]
fn layer_norm_agrees_with_the_reference_alone_and_in_a_batch() {
    let mut random = Random::new(2);
    for n in [1, 3, 16, 31, 64, 128, 257] {
        let (weight, bias) = (random.values(n), random.values(n));
        for n_rows in [1, 2, 17] {
            // A mean that is far from zero, which a one-pass variance would suffer from.
            let x: Vec<f32> = random.values(n_rows * n).iter().map(|x| x + 100.0).collect();
            let out = on_every_isa(x.len(), |isa, out| {
                layer_norm_on(isa, &x, (&weight, &bias), 1e-6, out);
            });
            let mut expected = Vec::new();
            for x in x.chunks_exact(n) {
                let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n as f64;
                let square = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
                let scale = 1.0 / (square / n as f64 + 1e-6).sqrt();
                let affine = weight.iter().zip(&bias);
                expected.extend(x.iter().zip(affine).map(|(&x, (&weight, &bias))| {
                    (f64::from(x) - mean) * scale * f64::from(weight) + f64::from(bias)
                }));
            }
            assert_close(&out, &expected, 1e-4);
            for (x, out) in x.chunks_exact(n).zip(out.chunks_exact(n)) {
                let mut alone = vec![f32::NAN; n];
                layer_norm(x, &weight, &bias, 1e-6, &mut alone);
                assert_same_bits(&alone, out, "row in a batch");
            }
        }
    }
}

#[test]
fn layer_norm_divides_by_the_biased_deviation() {
    let mut out = [f32::NAN; 2];
    layer_norm(&[1.0, 5.0], &[1.0, 3.0], &[0.5, 0.0], 0.0, &mut out);
    assert_eq!(out, [-0.5, 3.0]);
}
