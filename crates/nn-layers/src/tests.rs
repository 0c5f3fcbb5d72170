//! The plain form of each layer is the oracle of the fused one.

use model_config::{ExpertChoice, MlaConfig, MoeConfig, RopeConfig, RouterScoring};
use tch::{Device, Kind, Tensor};

use crate::*;

mod quantized;

const BOTH: [Ops; 2] = [Ops::Torch, Ops::Fused];

fn random(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu)) * 0.3
}

#[track_caller]
fn check(fused: &Tensor, plain: &Tensor) {
    assert_eq!(fused.size(), plain.size());
    let difference = (fused - plain).abs().max().double_value(&[]);
    assert!(difference < 1e-5, "{difference}");
}

#[test]
fn a_linear_layer_agrees_and_can_be_shared() {
    let (weight, x) = (random(&[37, 19]), random(&[5, 19]));
    let [plain, fused] = BOTH.map(|ops| Linear::new(&weight, ops).unwrap());
    let expected = x.matmul(&weight.tr());
    check(&plain.forward(&x).unwrap(), &expected);
    check(&fused.share().forward(&x).unwrap(), &expected);
    assert!(fused.forward(&random(&[5, 18])).is_err());
}

#[test]
fn a_norm_agrees_and_adds_to_the_residual() {
    let (weight, x, delta) = (random(&[21]), random(&[4, 21]), random(&[4, 21]));
    let sum = &x + &delta;
    let mean_square = sum.square().mean_dim(-1, true, Kind::Float);
    let expected = &sum / (mean_square + 1e-3).sqrt() * &weight;
    for ops in BOTH {
        let norm = RmsNorm::new(&weight, 1e-3, ops).unwrap();
        let mut residual = x.copy();
        check(&norm.add_forward(&mut residual, &delta).unwrap(), &expected);
        check(&residual, &sum);
        check(&norm.forward(&residual).unwrap(), &expected);
    }
}

#[test]
fn a_gated_mlp_agrees() {
    let weights = [random(&[33, 20]), random(&[33, 20]), random(&[20, 33])];
    let x = random(&[6, 20]);
    let gate = x.matmul(&weights[0].tr()).silu();
    let expected = (gate * x.matmul(&weights[1].tr())).matmul(&weights[2].tr());
    for ops in BOTH {
        let mlp = GatedMlp::new(weights.each_ref(), ops).unwrap();
        check(&mlp.forward(&x).unwrap(), &expected);
        let [gate, up, down] = &weights;
        assert!(GatedMlp::new([gate, down, down], ops).is_err());
        assert!(GatedMlp::new([gate, up, up], ops).is_err());
    }
}

#[test]
fn a_mixture_of_experts_agrees_and_rows_keep_to_themselves() {
    let config = MoeConfig {
        n_routed_experts: 8,
        num_experts_per_tok: 3,
        n_shared_experts: 1,
        moe_intermediate_size: 12,
        n_group: 4,
        topk_group: 2,
        routed_scaling_factor: 2.5,
        norm_topk_prob: true,
        scoring: RouterScoring::Sigmoid,
        choice: ExpertChoice::NoauxTc,
        first_k_dense_replace: 0,
        moe_layer_freq: 1,
    };
    let mlp = |_| [random(&[12, 20]), random(&[12, 20]), random(&[20, 12])];
    let (gate, bias) = (random(&[8, 20]), random(&[8]));
    let (experts, shared): (Vec<_>, _) = ((0..8).map(mlp).collect(), mlp(8));
    let x = random(&[17, 20]);
    let [plain, fused] = BOTH.map(|ops| {
        let build = |weights: &[Tensor; 3]| GatedMlp::new(weights.each_ref(), ops).unwrap();
        let parts = MoeParts {
            gate: gate.shallow_clone(),
            bias: Some(bias.shallow_clone()),
            experts: experts.iter().map(build).collect(),
            shared: Some(build(&shared)),
        };
        MoeMlp::new(parts, &config, ops).unwrap()
    });
    let found = fused.forward(&x).unwrap();
    check(&found, &plain.forward(&x).unwrap());
    assert_eq!(fused.forward(&x.narrow(0, 4, 1)).unwrap(), found.narrow(0, 4, 1));

    // A row by its definition.
    let routing = Router::new(&gate, Some(&bias), &config, Ops::Torch).unwrap();
    let row = x.narrow(0, 4, 1);
    let routing = routing.forward(&row).unwrap();
    let run = |weights: &[Tensor; 3]| {
        GatedMlp::new(weights.each_ref(), Ops::Torch).unwrap().forward(&row).unwrap()
    };
    let mut expected = run(&shared);
    for slot in 0..3 {
        let expert = usize::try_from(routing.expert_ids.int64_value(&[0, slot])).unwrap();
        expected += run(&experts[expert]) * routing.weights.double_value(&[0, slot]);
    }
    check(&found.narrow(0, 4, 1), &expected);
}

#[test]
fn latent_attention_projections_agree() {
    for q_lora_rank in [Some(14), None] {
        let config = MlaConfig {
            num_heads: 3,
            q_lora_rank,
            kv_lora_rank: 10,
            qk_nope_head_dim: 7,
            qk_rope_head_dim: 4,
            v_head_dim: 5,
        };
        let q_width = 3 * 11;
        let weights = MlaWeights {
            q_a: random(&[q_lora_rank.map_or(q_width, |rank| rank as i64), 20]).into(),
            q_b: q_lora_rank.map(|_| (random(&[14]), random(&[q_width, 14]).into())),
            kv_a: random(&[14, 20]).into(),
            kv_a_norm: random(&[10]),
            kv_b: random(&[3 * 12, 10]),
            o: random(&[20, 15]).into(),
        };
        let rope = RopeConfig { theta: 100.0, interleaved: true, yarn: None };
        let table = RotaryTable::new(&rope, 4, 32, Device::Cpu).unwrap();
        let rows = table.rows(&Tensor::from_slice(&[0i64, 3, 31])).unwrap();
        let x = random(&[3, 20]);
        let [plain, fused] = BOTH.map(|ops| {
            let layer = MlaProjections::new(&weights, &config, 1e-6, ops).unwrap();
            let latents = layer.latents(&x, &rows).unwrap();
            let (q_latent, q_pe) = layer.queries(&latents.q_a, &rows).unwrap();
            let output = layer.output(&q_latent).unwrap();
            [latents.latent, latents.k_pe, latents.q_a, q_latent, q_pe, output]
        });
        fused.iter().zip(&plain).for_each(|(fused, plain)| check(fused, plain));
    }
}

/// What absorbing does to the definition: scores and values through the expanded keys.
#[test]
fn absorbed_scores_are_those_of_expanded_keys() {
    let config = MlaConfig {
        num_heads: 2,
        q_lora_rank: None,
        kv_lora_rank: 6,
        qk_nope_head_dim: 4,
        qk_rope_head_dim: 2,
        v_head_dim: 3,
    };
    let weights = MlaWeights {
        q_a: random(&[12, 8]).into(),
        q_b: None,
        kv_a: random(&[8, 8]).into(),
        kv_a_norm: random(&[6]),
        kv_b: random(&[14, 6]),
        o: random(&[8, 6]).into(),
    };
    let rope = RopeConfig { theta: 100.0, interleaved: true, yarn: None };
    let rows = RotaryTable::new(&rope, 2, 4, Device::Cpu).unwrap();
    let rows = rows.rows(&Tensor::from_slice(&[0i64])).unwrap();
    let (x, key) = (random(&[1, 8]), random(&[6]));
    let kv_b = weights.kv_b.view([2, 7, 6]);
    let expanded = kv_b.matmul(&key);
    let q_nope = x.matmul(&weights.q_a.to_tensor().unwrap().tr()).view([2, 6]).narrow(1, 0, 4);
    let scores = (q_nope * expanded.narrow(1, 0, 4)).sum_dim_intlist(-1, false, Kind::Float);
    let values =
        expanded.narrow(1, 4, 3).reshape([1, 6]).matmul(&weights.o.to_tensor().unwrap().tr());
    for ops in BOTH {
        let layer = MlaProjections::new(&weights, &config, 1e-6, ops).unwrap();
        let q_a = layer.latents(&x, &rows).unwrap().q_a;
        let (q_latent, _) = layer.queries(&q_a, &rows).unwrap();
        check(&q_latent.get(0).matmul(&key), &scores);
        let attended = key.expand([1, 2, 6], false).contiguous();
        check(&layer.output(&attended).unwrap(), &values);
    }
}
