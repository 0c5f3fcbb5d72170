//! Tests of the selection, against sorting.

use super::{Best, all};
use crate::simd::{Isa, dispatch};
use crate::test_util::Random;

#[test]
fn agrees_with_sorting_on_ties_signs_and_broken_scores() {
    const SCORES: [f32; 10] = [
        f32::NAN,
        -f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        0.0,
        -0.0,
        1e-40,
        -1e-40,
        1.5,
        -2.0,
    ];
    let mut random = Random::new(1);
    for n in [2, 3, 16, 17, 100, 1000] {
        for round in 0..20 {
            let scores: Vec<f32> = (0..n)
                .map(|_| if round % 2 == 0 { SCORES[random.below(10)] } else { random.value() })
                .collect();
            // Highest first, NaN last; equal ones keep the order of their positions.
            let mut order: Vec<i32> = (0..n as i32).collect();
            order.sort_by(|&a, &b| {
                let (a, b) = (scores[a as usize], scores[b as usize]);
                a.is_nan()
                    .cmp(&b.is_nan())
                    .then(b.partial_cmp(&a).unwrap_or(std::cmp::Ordering::Equal))
            });
            for topk in [1, 1 + random.below(n - 1), n - 1] {
                let mut expected = order[..topk].to_vec();
                expected.sort_unstable();
                for isa in Isa::available() {
                    let mut indices = vec![777; topk];
                    dispatch(isa, Best { scores: &scores, indices: &mut indices });
                    assert_eq!(indices, expected, "{isa:?}: {scores:?}");
                }
            }
        }
    }
}

#[test]
fn a_short_row_selects_everything() {
    let mut indices = [777; 4];
    all(3, &mut indices);
    assert_eq!(indices, [0, 1, 2, -1]);
    all(4, &mut indices);
    assert_eq!(indices, [0, 1, 2, 3]);
}
