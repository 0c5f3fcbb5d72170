//! Tests of the rotary embedding.

use super::{RopeStyle, rope_in_place};
use crate::test_util::assert_close;

#[test]
fn rotates_the_last_elements_of_each_head() {
    let (cos, sin) = ([0.6, 0.0], [0.8, 1.0]);
    let head = [9.0, 1.0, 2.0, 3.0, 4.0];
    for (style, expected) in [
        // Pairs (1, 2) and (3, 4).
        (RopeStyle::Interleaved, [9.0, -1.0, 2.0, -4.0, 3.0]),
        // Pairs (1, 3) and (2, 4).
        (RopeStyle::HalfSplit, [9.0, -1.8, -4.0, 2.6, 2.0]),
    ] {
        let mut x = [head, head].concat();
        rope_in_place(&mut x, 2, 5, (&cos, &sin), 1, style);
        assert_close(&x, &[expected, expected].concat(), 1e-6);
    }
}

#[test]
fn each_row_has_its_own_angle() {
    let mut x = [1.0, 2.0, 1.0, 2.0];
    rope_in_place(&mut x, 1, 2, (&[1.0, 0.0], &[0.0, 1.0]), 2, RopeStyle::Interleaved);
    assert_eq!(x, [1.0, 2.0, -2.0, 1.0]);
}
