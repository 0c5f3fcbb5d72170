//! Both forms against a computation written out, and the rotation with numbers by hand.

use model_config::RopeConfig;
use tch::Device;

use super::*;
use crate::rotary::RotaryTable;

const HIDDEN: i64 = 12;
const Q_RANK: i64 = 10;

fn config(rope_interleaved: bool) -> DsaConfig {
    DsaConfig {
        index_topk: 4,
        index_n_heads: 3,
        index_head_dim: 6,
        rope_interleaved,
        indexer_kinds: Vec::new(),
        index_share_for_mtp_iteration: false,
    }
}

fn random(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu))
}

/// A table for heads of which 4 values are rotated, in the style that the attention has.
fn table(interleaved: bool, n_positions: usize) -> RotaryTable {
    let rope = RopeConfig { theta: 10.0, interleaved, yarn: None };
    RotaryTable::new(&rope, 4, n_positions, Device::Cpu).unwrap()
}

fn check(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size());
    let difference = (found - expected).abs().max().double_value(&[]);
    assert!(difference < 1e-5, "{difference}");
}

#[test]
fn keys_queries_and_head_weights_are_what_the_formula_says() {
    let weights = IndexerWeights {
        q: random(&[18, Q_RANK]).into(),
        k: random(&[6, HIDDEN]).into(),
        k_norm: (random(&[6]), random(&[6])),
        head_weights: random(&[3, HIDDEN]),
    };
    let (x, q_a) = (random(&[5, HIDDEN]), random(&[5, Q_RANK]));
    let positions = Tensor::from_slice(&[0i64, 7, 3, 2, 31]);
    for interleaved in [true, false] {
        // The rotation is the indexer's own, whatever that of the attention is.
        let rotary = table(!interleaved, 32).rows(&positions).unwrap();
        let own = table(interleaved, 32).rows(&positions).unwrap();
        let rotate = |heads: &Tensor| {
            let start = own.rotate(&heads.narrow(2, 0, 4).contiguous()).unwrap();
            Tensor::cat(&[start, heads.narrow(2, 4, 2)], 2)
        };
        let k = x.matmul(&weights.k.to_tensor().unwrap().tr());
        let mean = k.mean_dim(-1, true, Kind::Float);
        let variance = (&k - &mean).square().mean_dim(-1, true, Kind::Float);
        let normed = (&k - &mean) / (variance + 1e-6).sqrt() * &weights.k_norm.0;
        let keys = rotate(&(normed + &weights.k_norm.1).unsqueeze(1)).squeeze_dim(1);
        let q = rotate(&q_a.matmul(&weights.q.to_tensor().unwrap().tr()).view([5, 3, 6]));
        let head_weights = x.matmul(&weights.head_weights.tr()) * 3f64.powf(-0.5);
        for ops in [Ops::Torch, Ops::Fused] {
            let indexer = Indexer::new(&weights, &config(interleaved), ops).unwrap();
            assert_eq!(indexer.topk(), 4);
            check(&indexer.keys(&x, &rotary).unwrap(), &keys);
            let found = indexer.queries(&q_a, &x, &rotary).unwrap();
            check(&found.0, &q);
            check(&found.1, &head_weights);
        }
    }
}

/// Fault case L14: the first pair turns by 90 degrees and the second by none; the slice that is
/// rotated comes first in the head.
#[test]
fn the_first_values_of_a_head_are_rotated_in_the_style_of_the_config() {
    let table = |values: [f32; 2]| Tensor::from_slice(&values).unsqueeze(0);
    let rotary = RotaryRows::from_tables(table([0.0, 1.0]), table([1.0, 0.0]), true);
    // The query latent is the only head: rotated part [1, 2, 3, 4], then 5 and 6.
    let q_a = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unsqueeze(0);
    let eye = Tensor::eye(6, (Kind::Float, Device::Cpu));
    let weights = IndexerWeights {
        q: (&eye).into(),
        k: (&eye).into(),
        k_norm: (random(&[6]), random(&[6])),
        head_weights: eye.narrow(0, 0, 1),
    };
    let styles = [(true, [-2.0, 1.0, 3.0, 4.0]), (false, [-3.0, 2.0, 1.0, 4.0])];
    for (interleaved, rotated) in styles {
        let expected = Tensor::from_slice(&[&rotated[..], &[5f32, 6.0]].concat());
        for ops in [Ops::Torch, Ops::Fused] {
            let config = DsaConfig { index_n_heads: 1, ..config(interleaved) };
            let indexer = Indexer::new(&weights, &config, ops).unwrap();
            let (q, _) = indexer.queries(&q_a, &q_a, &rotary).unwrap();
            check(&q, &expected.view([1, 1, 6]));
        }
    }
}
