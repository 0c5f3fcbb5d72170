//! Tests of fp8 keys, over every code.

use quantization::E4M3;

use super::{NAN_CODE, SIGN, encode, split_key, store_fp8_key};
use crate::test_util::Random;

/// A code by the definition of the format.
fn value(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = if exponent == 0 {
        mantissa / 8.0 * 2f64.powi(-6)
    } else {
        (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
    };
    if code & SIGN == 0 { magnitude } else { -magnitude }
}

fn is_nan(code: u8) -> bool {
    code & !SIGN == NAN_CODE
}

/// The nearest code by search, of two equally near ones the even one.
fn nearest(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { SIGN } else { 0 };
    let distance = |code: &u8| (value(*code) - f64::from(x.abs())).abs();
    let best = (0..NAN_CODE)
        .min_by(|a, b| distance(a).total_cmp(&distance(b)).then_with(|| (a & 1).cmp(&(b & 1))));
    sign | best.unwrap()
}

#[test]
fn every_code_has_its_value_and_comes_back() {
    for code in 0..=u8::MAX {
        let decoded = E4M3[usize::from(code)];
        if is_nan(code) {
            assert!(decoded.is_nan(), "{code:#x}");
        } else {
            assert_eq!(f64::from(decoded), value(code), "{code:#x}");
            assert_eq!(decoded.is_sign_negative(), code & SIGN != 0, "{code:#x}");
        }
        assert_eq!(encode(decoded), code, "{code:#x}");
    }
    assert_eq!([E4M3[0x7e], E4M3[0x08], E4M3[0x01]], [448.0, 1.0 / 64.0, 1.0 / 512.0]);
}

#[test]
fn halfway_values_round_to_even_and_their_neighbours_do_not() {
    for code in 0..0x7e {
        let (low, high) = (E4M3[code], E4M3[code + 1]);
        let middle = f32::midpoint(low, high);
        let even = code + code % 2;
        for (sign, offset) in [(1.0, 0), (-1.0, 0x80)] {
            assert_eq!(usize::from(encode(sign * middle)), offset + even, "{middle}");
            assert_eq!(usize::from(encode(sign * middle.next_down())), offset + code, "{middle}");
            assert_eq!(usize::from(encode(sign * middle.next_up())), offset + code + 1, "{middle}");
        }
    }
}

#[test]
fn rounding_agrees_with_a_search_for_the_nearest_code() {
    let mut random = Random::new(1);
    for _ in 0..20_000 {
        // Exponents from below half of the least code to above the greatest one.
        let x = random.value() * 2f32.powi(random.below(22) as i32 - 11);
        assert_eq!(encode(x), nearest(x), "{x}");
    }
    for (x, code) in [(448.1, 0x7e), (464.0, 0x7e), (1e30, 0x7e), (-1e30, 0xfe), (1e-30, 0)] {
        assert_eq!(encode(x), code, "{x}");
    }
}

#[test]
fn the_scale_is_the_least_power_of_two_that_fits() {
    let mut random = Random::new(2);
    for head_dim in [1, 5, 32, 128] {
        for exponent in -40..20 {
            let key: Vec<f32> =
                (0..head_dim).map(|_| random.value() * 2f32.powi(exponent)).collect();
            let mut out = vec![0x55; head_dim + 4];
            store_fp8_key(&key, &mut out);
            let (codes, scale) = split_key(&out);
            let amax = key.iter().fold(1e-4, |max: f32, x| max.max(x.abs()));
            assert_eq!(scale.to_bits() << 9, 0, "{scale} is a power of two");
            assert!(amax <= 448.0 * scale && amax > 224.0 * scale, "{amax}, {scale}");
            for (&x, &code) in key.iter().zip(codes) {
                assert_eq!(code, nearest(x / scale), "{x}");
            }
        }
    }
}

#[test]
fn scales_at_the_bounds() {
    for (amax, scale) in [
        (448.0, 1.0),
        (448f32.next_up(), 2.0),
        (224.0, 0.5),
        (0.0, 2f32.powi(-22)),
        (1e-4, 2f32.powi(-22)),
    ] {
        let mut out = [0; 5];
        store_fp8_key(&[-amax], &mut out);
        assert_eq!(split_key(&out).1, scale, "{amax}");
    }
}

#[test]
fn a_broken_value_stays_visible() {
    let mut out = [0; 6];
    store_fp8_key(&[f32::NAN, 448.0], &mut out);
    assert_eq!(split_key(&out), (&[NAN_CODE, 0x7e][..], 1.0));
    store_fp8_key(&[f32::INFINITY, 1.0], &mut out);
    let (codes, scale) = split_key(&out);
    assert!(is_nan(codes[0]) && scale == f32::INFINITY);
}
