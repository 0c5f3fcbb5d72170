//! Models with dummy weights.

use model_config::ModelConfig;
use nn_layers::Router;
use weights::dummy::DUMMY_SEED;
use weights::{LoadFormat, TensorMap};

use super::*;

/// The configuration for benches with fewer layers and narrower ones, and all its experts.
fn small_config() -> tempfile::TempDir {
    let source = bundled_checkpoints::find("glm52-lite", None).unwrap().join("config.json");
    let text = std::fs::read_to_string(source).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (field, value) in [
        ("vocab_size", 512),
        ("hidden_size", 256),
        ("intermediate_size", 128),
        ("moe_intermediate_size", 32),
        ("num_hidden_layers", 5),
        ("q_lora_rank", 64),
        ("kv_lora_rank", 64),
        ("index_topk", 8),
        ("index_n_heads", 4),
    ] {
        assert!(config[field].is_u64(), "{field}");
        config[field] = value.into();
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

/// How often each expert of a layer is chosen, over its even share.
fn shares(router: &Router, rows: &Tensor, n_experts: i64) -> Vec<f64> {
    let chosen = router.forward(rows).unwrap().expert_ids.to_kind(Kind::Int64).view(-1);
    let even = chosen.numel() as f64 / n_experts as f64;
    Vec::<f64>::try_from(chosen.bincount::<&Tensor>(None, n_experts) / even).unwrap()
}

#[test]
fn routing_spreads_over_the_experts() {
    let dir = small_config();
    let config = ModelConfig::load(dir.path()).unwrap();
    let moe = config.moe.as_ref().unwrap();
    let mut gates = config.target_tensors();
    gates.extend(config.all_mtp_tensors());
    gates.retain(|spec| spec.name.contains(".mlp.gate."));
    let mut tensors = TensorMap::dummy(&gates, DUMMY_SEED, Device::Cpu, Kind::Float);
    // As behind a norm whose weights are 1.
    tch::manual_seed(1);
    let rows = Tensor::randn([4096, config.hidden_size as i64], (Kind::Float, Device::Cpu));
    let moe_layers: Vec<usize> = (0..=5).filter(|&idx| config.is_moe_layer(idx)).collect();
    assert_eq!(moe_layers, [3, 4, 5]);
    for layer_idx in moe_layers {
        let prefix = format!("model.layers.{layer_idx}.mlp.gate");
        let gate = tensors.take(&format!("{prefix}.weight")).unwrap();
        let bias = tensors.take(&format!("{prefix}.e_score_correction_bias")).unwrap();
        let router = Router::new(&gate, Some(&bias), moe, Ops::Fused).unwrap();
        for (expert_idx, share) in shares(&router, &rows, 64).into_iter().enumerate() {
            assert!((0.5..=2.0).contains(&share), "layer {layer_idx}, {expert_idx}: {share}");
        }
    }
}

/// Every form of the model builds from a config alone, uses every tensor, and computes numbers.
#[test]
fn a_config_alone_runs_and_drafts() {
    let dir = small_config();
    let mut found = Vec::new();
    for ops in [Ops::Torch, Ops::Fused] {
        let format = LoadFormat::Dummy;
        let options = LoadOptions { format, drafting: true, ops: Some(ops), ..Default::default() };
        let model = load(dir.path(), options).unwrap();
        assert_eq!(model.num_mtp_layers(), 1);
        let backend: &dyn AttentionBackend = match ops {
            Ops::Torch => &ReferenceBackend,
            Ops::Fused => &CpuBackend,
        };
        let mut rig = Rig { model, caches: Vec::new(), backend, block_size: 4 };
        rig.reset(4, 1024);
        let tokens: Vec<i64> = (0..24).collect();
        found.push(rig.logits(&rig.forward(&[(0, 0, 24)], &tokens)));
    }
    let difference = relative_difference(&found[1], &found[0]);
    assert!(difference < 1e-4, "{difference}");
    let spread = found[0].std(true).double_value(&[]);
    assert!(spread > 0.01, "{spread}");
}

#[test]
fn what_a_config_does_not_promise_cannot_be_made() {
    let dir = data("fixtures/glm-shared");
    let dummy = LoadOptions { format: LoadFormat::Dummy, ..LoadOptions::default() };
    assert!(load(&dir, dummy).is_ok());
    let error = load(&dir, LoadOptions { drafting: true, ..dummy }).err().unwrap().to_string();
    assert!(error.contains("num_nextn_predict_layers 0"), "{error}");
}
