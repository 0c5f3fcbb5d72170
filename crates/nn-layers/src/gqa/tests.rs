//! Both forms against the definition in double precision.

use model_config::RopeConfig;
use tch::Device;

use super::*;
use crate::rotary::RotaryTable;

const HIDDEN: i64 = 20;
const POSITIONS: [i64; 3] = [0, 3, 31];
const EPS: f64 = 1e-6;
const THETA: f64 = 100.0;

fn random(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu)) * 0.3
}

/// The weights of queries, keys and values, and what may come on top.
struct Weights {
    projections: [Tensor; 3],
    o: Tensor,
    bias: Option<[Tensor; 3]>,
    norms: Option<[Tensor; 2]>,
}

impl Weights {
    fn random(config: &GqaConfig) -> Self {
        let [q, kv] = [config.num_heads, config.num_kv_heads]
            .map(|n_heads| (n_heads * config.head_dim) as i64);
        Self {
            projections: [q, kv, kv].map(|width| random(&[width, HIDDEN])),
            o: random(&[HIDDEN, q]),
            bias: config.has_bias.then(|| [q, kv, kv].map(|width| random(&[width]))),
            norms: config.has_qk_norm.then(|| [0, 1].map(|_| random(&[config.head_dim as i64]))),
        }
    }

    fn layer(&self, config: &GqaConfig, ops: Ops) -> GqaProjections {
        let linear = |weight: &Tensor| Linear::new(weight, ops).unwrap();
        let [q, k, v] = self.projections.each_ref().map(linear);
        let norms = self.norms.as_ref();
        let qk_norm = norms
            .map(|norms| norms.each_ref().map(|weight| RmsNorm::new(weight, EPS, ops).unwrap()));
        let bias = self.bias.as_ref();
        let bias = bias.map(|bias| bias.each_ref().map(Tensor::shallow_clone));
        let parts = GqaParts { q, k, v, o: linear(&self.o), bias, qk_norm };
        GqaProjections::new(parts, config, ops).unwrap()
    }

    /// Heads of part `idx` of `x`, f64: values as they are, queries and keys normalised and
    /// rotated.
    fn expected(&self, config: &GqaConfig, x: &Tensor, idx: usize) -> Vec<f64> {
        let floats = |tensor: &Tensor| Vec::<f64>::try_from(tensor.flatten(0, -1)).unwrap();
        let double = |tensor: &Tensor| tensor.to_kind(Kind::Double);
        let mut rows = double(x).matmul(&double(&self.projections[idx]).tr());
        if let Some(bias) = &self.bias {
            rows += double(&bias[idx]);
        }
        let mut rows = floats(&rows);
        if idx == 2 {
            return rows;
        }
        let n_heads = [config.num_heads, config.num_kv_heads][idx];
        for (row, head) in rows.chunks_exact_mut(config.head_dim).enumerate() {
            if let Some(norms) = &self.norms {
                let mean = head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64;
                let weight = floats(&double(&norms[idx]));
                head.iter_mut().zip(weight).for_each(|(x, w)| *x *= w / (mean + EPS).sqrt());
            }
            let (half, position) = (config.rope_dim / 2, POSITIONS[row / n_heads] as f64);
            for i in 0..half {
                let angle = position * THETA.powf(-(i as f64) / half as f64);
                let (a, b) = (head[i], head[half + i]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[half + i] = b * angle.cos() + a * angle.sin();
            }
        }
        rows
    }
}

#[track_caller]
fn check(found: &Tensor, expected: &[f64]) {
    let found = Vec::<f64>::try_from(found.flatten(0, -1)).unwrap();
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5, "{found} is not {expected}");
    }
}

#[test]
fn queries_keys_and_values_are_those_of_the_definition() {
    let rope = RopeConfig { theta: THETA, interleaved: false, yarn: None };
    for (has_bias, has_qk_norm, rope_dim) in
        [(true, true, 4), (true, false, 4), (false, true, 8), (false, false, 8)]
    {
        let (num_heads, num_kv_heads, head_dim) = (6, 2, 8);
        let config =
            GqaConfig { num_heads, num_kv_heads, head_dim, rope_dim, has_bias, has_qk_norm };
        let weights = Weights::random(&config);
        let table = RotaryTable::new(&rope, rope_dim, 32, Device::Cpu).unwrap();
        let rows = table.rows(&Tensor::from_slice(&POSITIONS)).unwrap();
        let x = random(&[3, HIDDEN]);
        for ops in [Ops::Torch, Ops::Fused] {
            let layer = weights.layer(&config, ops);
            let GqaRows { q, k, v } = layer.qkv(&x, &rows).unwrap();
            assert_eq!((q.size(), k.size()), (vec![3, 6, 8], vec![3, 2, 8]));
            for (idx, found) in [&q, &k, &v].into_iter().enumerate() {
                check(found, &weights.expected(&config, &x, idx));
            }
            let output = q.flatten(1, 2).matmul(&weights.o.tr());
            check(&layer.output(&q).unwrap(), &Vec::<f64>::try_from(output.flatten(0, 1)).unwrap());
            // No row is a batch, too.
            let none = table.rows(&Tensor::from_slice::<i64>(&[])).unwrap();
            let none = layer.qkv(&x.narrow(0, 0, 0), &none).unwrap();
            assert_eq!(none.v.size(), [0, 2, 8]);
        }
    }
}
