//! Tests of the rounding.

use half::bf16;

use super::round_bf16_in_place;
use crate::test_util::Random;

#[test]
fn rounds_as_the_bf16_type_does() {
    let mut random = Random::new(1);
    let mut values: Vec<f32> = (0..10_000).map(|_| f32::from_bits(random.bits() as u32)).collect();
    values.extend([0.0, -0.0, f32::MAX, f32::INFINITY, f32::from_bits(0x3f80_8000)]);
    values.push(f32::from_bits(0x7f80_0001));
    let expected: Vec<f32> = values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    round_bf16_in_place(&mut values);
    for (value, expected) in values.iter().zip(&expected) {
        let same = value.to_bits() == expected.to_bits();
        assert!(same || value.is_nan() && expected.is_nan(), "{value} instead of {expected}");
    }
}
