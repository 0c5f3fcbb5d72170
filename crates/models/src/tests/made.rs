//! Made checkpoints whose MTP block adds nothing, so that a step's output is known by hand.

use model_config::{ModelConfig, TensorSpec};
use spec_decode::{DraftInput, DraftModel};
use tempfile::TempDir;

use super::*;

const VOCAB: i64 = 6;
const HIDDEN: i64 = 4;

fn config_text(num_mtp_layers: usize) -> String {
    format!(
        r#"{{
            "model_type": "deepseek_v3", "vocab_size": {VOCAB}, "hidden_size": {HIDDEN},
            "num_hidden_layers": 1, "intermediate_size": 4, "num_attention_heads": 1,
            "q_lora_rank": null, "kv_lora_rank": 2, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2,
            "v_head_dim": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-12,
            "num_nextn_predict_layers": {num_mtp_layers}, "eos_token_id": 1
        }}"#
    )
}

/// Norms of ones and everything else zeros, but for what `special` gives.
fn value(spec: &TensorSpec, special: &dyn Fn(&str) -> Option<Tensor>) -> Option<Tensor> {
    if let Some(tensor) = special(&spec.name) {
        return Some(tensor);
    }
    if spec.is_optional {
        return None;
    }
    let shape: Vec<i64> = spec.shape.iter().map(|&n| i64::try_from(n).unwrap()).collect();
    let options = (Kind::Float, Device::Cpu);
    let is_norm = shape.len() == 1;
    Some(if is_norm { Tensor::ones(shape, options) } else { Tensor::zeros(shape, options) })
}

fn checkpoint(num_mtp_layers: usize, special: &dyn Fn(&str) -> Option<Tensor>) -> TempDir {
    checkpoint_of(&config_text(num_mtp_layers), special)
}

/// A checkpoint of any configuration, with values as [`value`] gives them.
pub(super) fn checkpoint_of(config: &str, special: &dyn Fn(&str) -> Option<Tensor>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let config = ModelConfig::load(dir.path()).unwrap();
    let specs = config.target_tensors().into_iter().chain(config.all_mtp_tensors());
    let tensors: Vec<(String, Tensor)> =
        specs.filter_map(|spec| Some((spec.name.clone(), value(&spec, special)?))).collect();
    Tensor::write_safetensors(&tensors, dir.path().join("model.safetensors")).unwrap();
    dir
}

fn row(values: [f32; 4]) -> Tensor {
    Tensor::from_slice(&values).unsqueeze(0)
}

/// `eh_proj` that passes one of its two inputs: the embedding (0) or the hidden state (1).
fn pass(half: i64) -> Tensor {
    let eye = Tensor::eye(HIDDEN, (Kind::Float, Device::Cpu));
    let zero = eye.zeros_like();
    if half == 0 { Tensor::cat(&[eye, zero], 1) } else { Tensor::cat(&[zero, eye], 1) }
}

fn step(rig: &Rig, layer: usize, token: i64, hidden: &Tensor, position: usize) -> Tensor {
    let mtp = rig.model.mtp.as_ref().unwrap().bind(&rig.caches, rig.backend);
    let layout = rig.layout(&[(0, position, 1)]);
    let (token_ids, output_rows) = (&ids(&[token]), None);
    let layout = &layout;
    let input = DraftInput { layer, token_ids, hidden, layout, output_rows, selection: None };
    mtp.step(input).unwrap().hidden
}

#[track_caller]
fn check(found: &Tensor, expected: [f64; 4]) {
    for (i, expected) in expected.into_iter().enumerate() {
        let found = found.double_value(&[0, i as i64]);
        assert!((found - expected).abs() < 1e-4, "{found} is not {expected}");
    }
}

/// Fault case L08: the next step is fed the state after `shared_head.norm`, which all-ones norm
/// weights cannot tell from the one before it.
#[test]
fn the_state_handed_over_is_the_one_after_the_shared_norm() {
    let dir = checkpoint(1, &|name| match name {
        "model.layers.1.eh_proj.weight" => Some(pass(1)),
        "model.layers.1.shared_head.norm.weight" => Some(row([2.0, 0.5, 1.0, 1.5]).squeeze()),
        _ => None,
    });
    for ops in [Ops::Torch, Ops::Fused] {
        let rig = Rig::open(dir.path(), true, ops, ComputeDtype::Float32);
        let hidden = row([1.0, 2.0, 3.0, 4.0]);
        let first = step(&rig, 0, 2, &hidden, 0);
        check(&first, [0.7303, 0.3651, 1.0954, 2.1909]);
        // hnorm maps it to [0.5657, 0.2828, 0.8485, 1.6971], which the shared norm weighs again.
        let second = step(&rig, 0, 2, &first, 1);
        let hnorm = [0.5657, 0.2828, 0.8485, 1.6971];
        check(&second, [hnorm[0] * 2.0, hnorm[1] * 0.5, hnorm[2], hnorm[3] * 1.5]);
    }
}

/// The embedding of a step is that of the following token, normed by `enorm`.
#[test]
fn the_embedding_comes_first_and_has_a_norm_of_its_own() {
    let dir = checkpoint(1, &|name| match name {
        "model.embed_tokens.weight" => {
            Some(Tensor::arange(VOCAB * HIDDEN, (Kind::Float, Device::Cpu)).view([VOCAB, HIDDEN]))
        }
        "model.layers.1.eh_proj.weight" => Some(pass(0)),
        "model.layers.1.enorm.weight" => Some(row([1.0, 2.0, 3.0, 4.0]).squeeze()),
        _ => None,
    });
    let rig = Rig::open(dir.path(), true, Ops::Fused, ComputeDtype::Float32);
    let found = step(&rig, 0, 1, &row([9.0; 4]), 0);
    // Token 1 is [4, 5, 6, 7]; both norms divide by a root mean square, the last one wins.
    let weighed = [4.0, 10.0, 18.0, 28.0f64];
    let mean_square = weighed.iter().map(|x| x * x).sum::<f64>() / 4.0;
    check(&found, weighed.map(|x| x / mean_square.sqrt()));
}

#[test]
fn each_layer_has_its_own_weights_cache_and_where_stored_head_and_embedding() {
    let head = |sign: f64| Tensor::eye(VOCAB, (Kind::Float, Device::Cpu)).narrow(1, 0, 4) * sign;
    let own_table = || Tensor::full([VOCAB, HIDDEN], 3.0, (Kind::Float, Device::Cpu));
    let dir = checkpoint(2, &|name| match name {
        "lm_head.weight" => Some(head(1.0)),
        "model.embed_tokens.weight" => Some(row([1.0, 0.0, 0.0, 0.0]).repeat([VOCAB, 1])),
        "model.layers.1.eh_proj.weight" => Some(pass(0)),
        "model.layers.2.eh_proj.weight" => Some(pass(0)),
        "model.layers.2.embed_tokens.weight" => Some(own_table()),
        "model.layers.2.shared_head.head.weight" => Some(head(-1.0)),
        _ => None,
    });
    let rig = Rig::open(dir.path(), true, Ops::Fused, ComputeDtype::Float32);
    assert_eq!(rig.model.num_cache_layers(), 3);
    let mtp = rig.model.mtp.as_ref().unwrap().bind(&rig.caches, rig.backend);
    assert_eq!(mtp.num_layers(), 2);
    let hidden = row([9.0; 4]);
    let is_written =
        |layer: usize| rig.caches[layer].kv.isnan().logical_not().any().int64_value(&[]) == 1;

    let first = step(&rig, 0, 2, &hidden, 0);
    check(&first, [2.0, 0.0, 0.0, 0.0]); // the target's embedding, normed
    check(&mtp.logits(0, &first).unwrap(), [2.0, 0.0, 0.0, 0.0]); // the target's head
    assert_eq!([0, 1, 2].map(is_written), [false, true, false]);

    let second = step(&rig, 1, 2, &hidden, 0);
    check(&second, [1.0; 4]); // an embedding of its own, normed
    check(&mtp.logits(1, &second).unwrap(), [-1.0; 4]); // a head of its own
    assert_eq!([0, 1, 2].map(is_written), [false, true, true]);
}

#[test]
fn a_tied_head_is_the_embedding() {
    let dir = checkpoint(0, &|name| {
        (name == "model.embed_tokens.weight").then(|| {
            Tensor::arange(VOCAB * HIDDEN, (Kind::Float, Device::Cpu)).view([VOCAB, HIDDEN])
        })
    });
    let text = config_text(0).replacen('{', r#"{"tie_word_embeddings": true,"#, 1);
    std::fs::write(dir.path().join("config.json"), text).unwrap();
    let rig = Rig::open(dir.path(), false, Ops::Fused, ComputeDtype::Float32);
    let logits = rig.logits(&row([1.0, 0.0, 0.0, 0.0]));
    let expected = Tensor::from_slice(&[0f32, 4.0, 8.0, 12.0, 16.0, 20.0]).unsqueeze(0);
    assert_eq!(logits, expected);
}
