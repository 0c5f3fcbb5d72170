//! GLM-4.5's layers and its draft layer against their formulas in double precision.

use std::collections::HashMap;

use model_config::{ModelConfig, TensorRole, TensorSpec};
use spec_decode::{DraftInput, DraftModel};
use tempfile::TempDir;

use super::*;

const CONFIG: &str = r#"{
    "model_type": "glm4_moe", "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2,
    "intermediate_size": 20, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "partial_rotary_factor": 0.5, "rope_theta": 100.0, "attention_bias": true,
    "use_qk_norm": true, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 12, "routed_scaling_factor": 1.5, "norm_topk_prob": true,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5
}"#;
const EPS: f64 = 1e-5;
const PROMPT: [i64; 9] = [3, 17, 0, 23, 8, 8, 1, 19, 4];

/// Random tensors of a checkpoint, embedding and head of the draft layer included, in double
/// precision.
struct Reference(HashMap<String, Tensor>);

fn random(spec: &TensorSpec) -> Tensor {
    let shape: Vec<i64> = spec.shape.iter().map(|&n| i64::try_from(n).unwrap()).collect();
    let values = Tensor::randn(&shape, (Kind::Float, Device::Cpu));
    match spec.role() {
        TensorRole::Norm => values * 0.2 + 1.0,
        TensorRole::Bias => values * 0.2,
        TensorRole::Matrix => values * 0.4,
    }
}

fn checkpoint() -> (TempDir, Reference) {
    tch::manual_seed(5);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    let config = ModelConfig::load(dir.path()).unwrap();
    let specs = config.target_tensors().into_iter().chain(config.all_mtp_tensors());
    let tensors: Vec<(String, Tensor)> =
        specs.map(|spec| (spec.name.clone(), random(&spec))).collect();
    Tensor::write_safetensors(&tensors, dir.path().join("model.safetensors")).unwrap();
    let double = |(name, tensor): (String, Tensor)| (name, tensor.to_kind(Kind::Double));
    (dir, Reference(tensors.into_iter().map(double).collect()))
}

impl Reference {
    fn linear(&self, x: &Tensor, name: &str) -> Tensor {
        x.matmul(&self.0[&format!("{name}.weight")].tr())
    }

    fn norm(&self, x: &Tensor, name: &str) -> Tensor {
        let mean_square = x.square().mean_dim(-1, true, Kind::Double);
        x / (mean_square + EPS).sqrt() * &self.0[&format!("{name}.weight")]
    }

    fn embed(&self, name: &str, tokens: &[i64]) -> Tensor {
        self.0[name].index_select(0, &ids(tokens))
    }

    /// Adds a bias, splits into heads, and where there is a norm normalises and rotates.
    fn heads(&self, x: &Tensor, projection: &str, norm: Option<&str>) -> Tensor {
        let projected = self.linear(x, projection) + &self.0[&format!("{projection}.bias")];
        let heads = projected.view([x.size()[0], -1, 8]);
        let Some(norm) = norm else { return heads };
        let parts = self.norm(&heads, norm).split_with_sizes([2, 2, 4], 2);
        let positions = Tensor::arange(x.size()[0], (Kind::Double, Device::Cpu));
        let angles = positions.outer(&Tensor::from_slice(&[1.0, 100f64.powf(-0.5)]));
        let (cos, sin) = (angles.cos().unsqueeze(1), angles.sin().unsqueeze(1));
        let first = &parts[0] * &cos - &parts[1] * &sin;
        let second = &parts[1] * &cos + &parts[0] * &sin;
        Tensor::cat(&[&first, &second, &parts[2]], 2)
    }

    fn attention(&self, x: &Tensor, prefix: &str) -> Tensor {
        let part = |name: &str| format!("{prefix}.{name}");
        let q = self.heads(x, &part("q_proj"), Some(&part("q_norm")));
        let k = self.heads(x, &part("k_proj"), Some(&part("k_norm")));
        let v = self.heads(x, &part("v_proj"), None);
        // Three query heads share one of keys and values.
        let [k, v] = [k, v].map(|heads| heads.repeat_interleave_self_int(3, 1, 6).transpose(0, 1));
        let scores = q.transpose(0, 1).matmul(&k.transpose(1, 2)) / 8f64.sqrt();
        let n = x.size()[0];
        let behind = Tensor::ones([n, n], (Kind::Bool, Device::Cpu)).triu(1);
        let weights = scores.masked_fill(&behind, f64::NEG_INFINITY).softmax(-1, Kind::Double);
        self.linear(&weights.matmul(&v).transpose(0, 1).reshape([n, 48]), &part("o_proj"))
    }

    fn mlp(&self, x: &Tensor, prefix: &str) -> Tensor {
        let part = |name: &str| self.linear(x, &format!("{prefix}.{name}"));
        let inner = part("gate_proj").silu() * part("up_proj");
        self.linear(&inner, &format!("{prefix}.down_proj"))
    }

    fn moe(&self, x: &Tensor, prefix: &str) -> Tensor {
        let scores = self.linear(x, &format!("{prefix}.gate")).sigmoid();
        let biased = &scores + &self.0[&format!("{prefix}.gate.e_score_correction_bias")];
        let chosen = biased.topk(2, -1, true, true).1;
        let weights = scores.gather(1, &chosen, false);
        let weights = &weights / weights.sum_dim_intlist(-1, true, Kind::Double) * 1.5;
        let shares = scores.zeros_like().scatter(1, &chosen, &weights);
        let mut out = self.mlp(x, &format!("{prefix}.shared_experts"));
        for expert in 0..5 {
            let share = shares.narrow(1, expert, 1);
            out += self.mlp(x, &format!("{prefix}.experts.{expert}")) * share;
        }
        out
    }

    /// The residual stream behind a layer.
    fn layer(&self, x: &Tensor, layer_idx: usize) -> Tensor {
        let part = |name: &str| format!("model.layers.{layer_idx}.{name}");
        let attended = self.attention(&self.norm(x, &part("input_layernorm")), &part("self_attn"));
        let x = x + attended;
        let normed = self.norm(&x, &part("post_attention_layernorm"));
        let mlp = part("mlp");
        x + if layer_idx == 0 { self.mlp(&normed, &mlp) } else { self.moe(&normed, &mlp) }
    }

    fn target(&self, tokens: &[i64]) -> Tensor {
        let x = self.embed("model.embed_tokens.weight", tokens);
        self.norm(&self.layer(&self.layer(&x, 0), 1), "model.norm")
    }

    /// The draft layer over all rows from the first one on: hidden states and the tokens behind.
    fn draft(&self, hidden: &Tensor, tokens: &[i64]) -> Tensor {
        let part = |name: &str| format!("model.layers.2.{name}");
        let embedded = self.embed(&part("embed_tokens.weight"), tokens);
        let (e, g) = (self.norm(&embedded, &part("enorm")), self.norm(hidden, &part("hnorm")));
        let z = self.linear(&Tensor::cat(&[e, g], 1), &part("eh_proj"));
        self.norm(&self.layer(&z, 2), &part("shared_head.norm"))
    }
}

#[track_caller]
fn check(what: &str, ops: Ops, found: &Tensor, expected: &Tensor) {
    let difference = relative_difference(found, expected);
    assert!(difference < 1e-5, "{what}, {ops:?}: {difference}");
}

#[test]
fn target_and_draft_layer_follow_their_formulas() {
    let (dir, reference) = checkpoint();
    let n = PROMPT.len();
    let expected = reference.target(&PROMPT);
    for ops in [Ops::Torch, Ops::Fused] {
        let rig = Rig::open(dir.path(), true, ops, ComputeDtype::Float32);
        let hidden = rig.forward(&[(0, 0, n)], &PROMPT);
        check("target", ops, &hidden, &expected);
        check("logits", ops, &rig.logits(&hidden), &reference.linear(&expected, "lm_head"));

        // The first step covers all rows; each token is the one behind the row's.
        let shifted = [&PROMPT[1..], &[11]].concat();
        let mtp = rig.model.mtp.as_ref().unwrap().bind(&rig.caches, rig.backend);
        let step = |tokens: &[i64], hidden: &Tensor, first: usize, output_rows: Option<&Tensor>| {
            let layout = rig.layout(&[(0, first, tokens.len())]);
            let (token_ids, layout) = (&ids(tokens), &layout);
            let input =
                DraftInput { layer: 0, token_ids, hidden, layout, output_rows, selection: None };
            mtp.step(input).unwrap().hidden
        };
        let all = reference.draft(&expected, &shifted);
        check("all rows", ops, &step(&shifted, &hidden, 0, None), &all);
        let last = step(&shifted, &hidden, 0, Some(&ids(&[n as i64 - 1])));
        check("the last row", ops, &last, &all.narrow(0, n as i64 - 1, 1));
        let logits = mtp.logits(0, &last).unwrap();
        let head = "model.layers.2.shared_head.head";
        let expected_logits = reference.linear(&all.narrow(0, n as i64 - 1, 1), head);
        check("draft logits", ops, &logits, &expected_logits);

        // The second step is fed what the first one left, one position on.
        let second = step(&[6], &last, n, None);
        let fed = Tensor::cat(&[&expected, &all.narrow(0, n as i64 - 1, 1)], 0);
        let tokens = [&shifted[..], &[6]].concat();
        let expected = reference.draft(&fed, &tokens).narrow(0, n as i64, 1);
        check("second step", ops, &second, &expected);
    }
}

#[test]
fn the_cache_of_a_layer_has_keys_and_values_of_its_heads() {
    let (dir, _) = checkpoint();
    let rig = Rig::open(dir.path(), true, Ops::Fused, ComputeDtype::Bfloat16);
    assert_eq!(rig.caches.len(), 3);
    for cache in &rig.caches {
        assert_eq!((cache.kv.size(), cache.kv.kind()), (vec![1024, 2, 2, 8], Kind::BFloat16));
        assert!(cache.index.is_none());
    }
    assert!(!rig.model.mtp.as_ref().unwrap().can_share_selection());
}
