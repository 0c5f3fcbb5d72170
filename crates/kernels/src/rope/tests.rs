//! Tests of the rotary embedding.

use super::{RopeHeads, RopeStyle, rope_in_place};
use crate::test_util::assert_close;

#[test]
fn rotates_the_last_elements_of_each_head() {
    let tables: (&[f32], &[f32]) = (&[0.6, 0.0], &[0.8, 1.0]);
    let head = [9.0, 1.0, 2.0, 3.0, 4.0];
    for (style, expected) in [
        // Pairs (1, 2) and (3, 4).
        (RopeStyle::Interleaved, [9.0, -1.0, 2.0, -4.0, 3.0]),
        // Pairs (1, 3) and (2, 4).
        (RopeStyle::HalfSplit, [9.0, -1.8, -4.0, 2.6, 2.0]),
    ] {
        let mut x = [head, head].concat();
        rope_in_place(&mut x, RopeHeads { n_heads: 2, head_stride: 5, start: 1 }, tables, style);
        assert_close(&x, &[expected, expected].concat(), 1e-6);
    }
}

/// Fault case L14: in index heads the rotated part comes first, in a style of its own.
#[test]
fn rotates_the_first_elements_of_each_head() {
    // The first pair turns by 90 degrees, the second one does not turn.
    let tables: (&[f32], &[f32]) = (&[0.0, 1.0], &[1.0, 0.0]);
    let head = [1.0, 2.0, 3.0, 4.0, 7.0, 8.0];
    for (style, expected) in [
        (RopeStyle::Interleaved, [-2.0, 1.0, 3.0, 4.0, 7.0, 8.0]),
        (RopeStyle::HalfSplit, [-3.0, 2.0, 1.0, 4.0, 7.0, 8.0]),
    ] {
        let mut x = [head, head].concat();
        rope_in_place(&mut x, RopeHeads { n_heads: 2, head_stride: 6, start: 0 }, tables, style);
        assert_eq!(x, [expected, expected].concat());
    }
}

#[test]
fn each_row_has_its_own_angle() {
    let mut x = [1.0, 2.0, 1.0, 2.0];
    let heads = RopeHeads { n_heads: 1, head_stride: 2, start: 0 };
    rope_in_place(&mut x, heads, (&[1.0, 0.0], &[0.0, 1.0]), RopeStyle::Interleaved);
    assert_eq!(x, [1.0, 2.0, -2.0, 1.0]);
}

#[test]
#[should_panic(expected = "rope_dim fits a head")]
fn a_rotated_part_that_leaves_its_head_is_refused() {
    let heads = RopeHeads { n_heads: 1, head_stride: 2, start: 1 };
    rope_in_place(&mut [1.0, 2.0], heads, (&[1.0], &[0.0]), RopeStyle::HalfSplit);
}
