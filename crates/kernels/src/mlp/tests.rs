//! Tests of the gated layers and the experts.

use half::bf16;

use super::{MoeExperts, PackedLinear, SwiGluMlp};
use crate::test_util::{Random, assert_close, assert_same_bits, on_every_isa};

/// The three weights of a layer in f64: gate, up, down.
type Weights = [Vec<f64>; 3];

fn reference(weights: &Weights, hidden: usize, x: &[f32]) -> Vec<f64> {
    let product = |weight: &[f64], x: &[f64]| -> Vec<f64> {
        weight.chunks_exact(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    };
    let mut out = Vec::new();
    for x in x.chunks_exact(hidden) {
        let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let (gate, up) = (product(&weights[0], &x), product(&weights[1], &x));
        let act: Vec<f64> =
            gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
        out.extend(product(&weights[2], &act));
    }
    out
}

fn layer(random: &mut Random, hidden: usize, width: usize, narrow: bool) -> (SwiGluMlp, Weights) {
    let weights: [Vec<f32>; 3] = std::array::from_fn(|_| random.values(hidden * width));
    let [gate, up, down] = &weights;
    if !narrow {
        let widened = weights.each_ref().map(|w| w.iter().map(|&w| f64::from(w)).collect());
        let linear = PackedLinear::from_f32;
        let mlp = SwiGluMlp::new(linear(gate, hidden), linear(up, hidden), linear(down, width));
        return (mlp, widened);
    }
    let weights = weights.map(|w| w.into_iter().map(bf16::from_f32).collect::<Vec<bf16>>());
    let [gate, up, down] = &weights;
    let widened = weights.each_ref().map(|w| w.iter().map(|w| w.to_f64()).collect());
    let linear = PackedLinear::from_bf16;
    (SwiGluMlp::new(linear(gate, hidden), linear(up, hidden), linear(down, width)), widened)
}

#[test]
fn a_gated_layer_agrees_with_the_reference() {
    let mut random = Random::new(1);
    for (hidden, width) in [(1, 1), (33, 7), (64, 48)] {
        for narrow in [false, true] {
            let (mlp, weights) = layer(&mut random, hidden, width, narrow);
            for n_rows in [0, 1, 5, 17] {
                let x = random.values(n_rows * hidden);
                let out = on_every_isa(x.len(), |isa, out| mlp.forward_on(isa, &x, out));
                assert_close(&out, &reference(&weights, hidden, &x), 1e-4);
            }
        }
    }
}

struct Case {
    moe: MoeExperts,
    weights: Vec<Weights>,
    hidden: usize,
    top_k: usize,
}

impl Case {
    fn new(random: &mut Random, hidden: usize, n_experts: usize, narrow: bool) -> Self {
        let layers: Vec<_> = (0..n_experts).map(|_| layer(random, hidden, 20, narrow)).collect();
        let (experts, weights) = layers.into_iter().unzip();
        Self { moe: MoeExperts::new(experts), weights, hidden, top_k: 3 }
    }

    /// Inputs, ids (some experts never chosen) and weights of some tokens.
    fn tokens(&self, random: &mut Random, n_tokens: usize) -> (Vec<f32>, Vec<i32>, Vec<f32>) {
        let mut ids = Vec::new();
        for _ in 0..n_tokens {
            let first = random.below(self.weights.len() - self.top_k);
            let mut chosen: Vec<i32> = (first..first + self.top_k).map(|id| id as i32).collect();
            chosen.rotate_left(random.below(self.top_k));
            ids.extend(chosen);
        }
        (random.values(n_tokens * self.hidden), ids, random.values(n_tokens * self.top_k))
    }

    fn run(&self, x: &[f32], ids: &[i32], weights: &[f32]) -> Vec<f32> {
        on_every_isa(x.len(), |isa, out| self.moe.forward_on(isa, x, (ids, weights), out))
    }
}

#[test]
fn experts_agree_with_the_reference() {
    let mut random = Random::new(2);
    for narrow in [false, true] {
        let case = Case::new(&mut random, 24, 6, narrow);
        for n_tokens in [0, 1, 4, 300] {
            let (x, ids, weights) = case.tokens(&mut random, n_tokens);
            let out = case.run(&x, &ids, &weights);
            let mut expected = vec![0.0; out.len()];
            for (pair, (&id, &weight)) in ids.iter().zip(&weights).enumerate() {
                let token = pair / case.top_k * case.hidden..(pair / case.top_k + 1) * case.hidden;
                let output = reference(&case.weights[id as usize], case.hidden, &x[token.clone()]);
                for (sum, value) in expected[token].iter_mut().zip(output) {
                    *sum += f64::from(weight) * value;
                }
            }
            assert_close(&out, &expected, 1e-4);
        }
    }
}

#[test]
fn a_token_does_not_depend_on_its_batch() {
    let mut random = Random::new(3);
    let case = Case::new(&mut random, 24, 6, false);
    let (row, row_ids, row_weights) = case.tokens(&mut random, 1);
    let alone = case.run(&row, &row_ids, &row_weights);
    for n_tokens in (1..=17_usize).chain([300]) {
        for at in (0..n_tokens).step_by(n_tokens.div_ceil(17)) {
            let (mut x, mut ids, mut weights) = case.tokens(&mut random, n_tokens);
            x[at * case.hidden..][..case.hidden].copy_from_slice(&row);
            ids[at * case.top_k..][..case.top_k].copy_from_slice(&row_ids);
            weights[at * case.top_k..][..case.top_k].copy_from_slice(&row_weights);
            let out = case.run(&x, &ids, &weights);
            assert_same_bits(&alone, &out[at * case.hidden..][..case.hidden], "token in a batch");
        }
    }
}

#[test]
#[should_panic(expected = "an id has an expert")]
fn an_unknown_expert_is_refused() {
    let mut random = Random::new(4);
    let case = Case::new(&mut random, 4, 4, false);
    case.moe.forward(&[0.0; 4], &[0, 4, 1], &[1.0; 3], &mut [0.0; 4]);
}
