//! Tests of the packed linear layer.

use half::bf16;

use super::{PANEL, PackedLinear, Panels};
use crate::test_util::{Random, assert_close, assert_same_bits, on_every_isa};

mod quantized;

/// Widths on both sides of the vector, panel and task sizes.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (7, 3), (16, 32), (33, 31), (80, 129), (255, 100), (64, 160), (17, 300)];

fn reference(weight: &[f32], n_in: usize, x: &[f32]) -> Vec<f64> {
    let mut y = Vec::new();
    for x in x.chunks_exact(n_in) {
        for w in weight.chunks_exact(n_in) {
            y.push(x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum());
        }
    }
    y
}

/// Both storage types of a random layer, each with the weights that it holds.
fn layers(random: &mut Random, n_in: usize, n_out: usize) -> [(PackedLinear, Vec<f32>); 2] {
    let weight = random.values(n_in * n_out);
    let narrow: Vec<bf16> = weight.iter().map(|&w| bf16::from_f32(w)).collect();
    let widened = narrow.iter().map(|w| w.to_f32()).collect();
    [
        (PackedLinear::from_f32(&weight, n_in), weight),
        (PackedLinear::from_bf16(&narrow, n_in), widened),
    ]
}

#[test]
fn agrees_with_the_reference_on_every_instruction_set() {
    let mut random = Random::new(1);
    for (n_in, n_out) in SHAPES {
        for (linear, weight) in layers(&mut random, n_in, n_out) {
            for n_rows in (1..=17).chain([70]) {
                let x = random.values(n_rows * n_in);
                let y = on_every_isa(n_rows * n_out, |isa, y| linear.forward_on(isa, &x, y));
                assert_close(&y, &reference(&weight, n_in, &x), 2e-5);
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    let mut random = Random::new(2);
    for (n_in, n_out) in [(80, 129), (33, 31)] {
        for (linear, _) in layers(&mut random, n_in, n_out) {
            let row = random.values(n_in);
            let mut alone = vec![f32::NAN; n_out];
            linear.forward(&row, &mut alone);
            for n_rows in 1..=17 {
                for at in 0..n_rows {
                    let mut x = random.values(n_rows * n_in);
                    x[at * n_in..][..n_in].copy_from_slice(&row);
                    on_every_isa(n_rows * n_out, |isa, y| {
                        linear.forward_on(isa, &x, y);
                        assert_same_bits(&alone, &y[at * n_out..][..n_out], "row in a batch");
                    });
                }
            }
        }
    }
}

fn in_pool(n_threads: usize, linear: &PackedLinear, x: &[f32]) -> Vec<f32> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
    let mut y = vec![f32::NAN; x.len() / linear.n_in() * linear.n_out()];
    pool.install(|| linear.forward(x, &mut y));
    y
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut random = Random::new(3);
    let (n_in, n_out, n_rows) = (300, 517, 130);
    for (linear, _) in layers(&mut random, n_in, n_out) {
        let x = random.values(n_rows * n_in);
        let [one, three] = [1, 3].map(|n_threads| in_pool(n_threads, &linear, &x));
        assert_same_bits(&one, &three, "one and three threads");
    }
}

#[test]
fn no_rows_and_no_outputs_are_fine() {
    PackedLinear::from_f32(&[1.0, 2.0], 2).forward(&[], &mut []);
    PackedLinear::from_f32(&[], 2).forward(&[1.0, 2.0], &mut []);
}

#[test]
#[should_panic(expected = "y is [n_rows, n_out]")]
fn a_short_output_is_refused() {
    PackedLinear::from_f32(&[1.0, 2.0], 2).forward(&[1.0, 2.0], &mut []);
}
