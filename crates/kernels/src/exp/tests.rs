//! Tests of the exponential and the activations.

use super::{exp, sigmoid, silu_and_mul, silu_and_mul_on};
use crate::simd::{F32x16, Isa, Kernel, LANES, dispatch};
use crate::test_util::{Random, assert_close, assert_same_bits, on_every_isa};

struct Map<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
    sigmoid: bool,
}

impl Kernel for Map<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: F32x16>(self) {
        let outs = self.out.as_chunks_mut::<LANES>().0;
        for (x, out) in self.x.as_chunks::<LANES>().0.iter().zip(outs) {
            let x = V::load(x);
            if self.sigmoid { sigmoid(x).store(out) } else { exp(x).store(out) }
        }
    }
}

fn map(isa: Isa, x: &[f32], out: &mut [f32], sigmoid: bool) {
    dispatch(isa, Map { x, out, sigmoid });
}

#[test]
fn exp_is_right_to_two_units_in_the_last_place() {
    let x: Vec<f32> = (0..1 << 16).map(|i| i as f32 / (1 << 16) as f32 * 174.5 - 87.0).collect();
    let y = on_every_isa(x.len(), |isa, out| map(isa, &x, out, false));
    for (&x, &y) in x.iter().zip(&y) {
        let expected = f64::from(x).exp();
        let ulp = f64::from(f32::EPSILON) * expected;
        assert!((f64::from(y) - expected).abs() <= 2.0 * ulp, "exp({x}) = {y}");
    }
}

#[test]
fn exp_of_the_extremes() {
    let mut x = [0.0; LANES];
    x[..6].copy_from_slice(&[0.0, -0.0, f32::NEG_INFINITY, -1e30, f32::NAN, f32::INFINITY]);
    let y = on_every_isa(LANES, |isa, out| map(isa, &x, out, false));
    assert_eq!(y[..4], [1.0, 1.0, 0.0, 0.0]);
    assert!(y[4].is_nan());
    assert!(y[5].is_finite() && y[5] > 1e38);
    let y = on_every_isa(LANES, |isa, out| map(isa, &x, out, true));
    assert_eq!(y[..2], [0.5, 0.5]);
    assert!(y[2] < 1e-37 && y[3] < 1e-37 && y[4].is_nan() && y[5] == 1.0);
}

#[test]
fn silu_agrees_with_the_reference() {
    let mut random = Random::new(1);
    for width in [1, 15, 16, 33] {
        let gate_up: Vec<f32> = random.values(6 * width).iter().map(|x| 20.0 * x).collect();
        let out = on_every_isa(3 * width, |isa, out| silu_and_mul_on(isa, &gate_up, width, out));
        let mut expected = Vec::new();
        for row in gate_up.chunks_exact(2 * width) {
            for (&gate, &up) in row[..width].iter().zip(&row[width..]) {
                let (gate, up) = (f64::from(gate), f64::from(up));
                expected.push(gate / (1.0 + (-gate).exp()) * up);
            }
        }
        assert_close(&out, &expected, 1e-6);
        let mut alone = vec![f32::NAN; width];
        silu_and_mul(&gate_up[2 * width..4 * width], width, &mut alone);
        assert_same_bits(&alone, &out[width..2 * width], "row in a batch");
    }
}
