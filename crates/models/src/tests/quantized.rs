//! Made checkpoints with quantised weights against the same with their values in float32.

use std::fs;

use model_config::{ModelConfig, TensorSpec};
use quantization::{Codes, QuantizedMatrix, Scales};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use spec_decode::{DraftInput, DraftModel};
use tempfile::TempDir;
use weights::{LoadFormat, TensorMap};

use super::*;
use crate::layer_weights::LayerBuilder;

/// Two layers of GLM's kind and a draft layer, of which the first is dense.
fn config() -> Value {
    json!({
        "model_type": "glm_moe_dsa", "vocab_size": 97, "hidden_size": 72, "num_hidden_layers": 2,
        "intermediate_size": 90, "moe_intermediate_size": 40, "n_routed_experts": 6,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": true,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_attention_heads": 3,
        "num_key_value_heads": 3, "q_lora_rank": 36, "kv_lora_rank": 32, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 14, "index_topk": 4, "index_n_heads": 2,
        "index_head_dim": 16, "rope_theta": 10000.0, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1, "eos_token_id": 1
    })
}

struct Stored {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn floats(name: &str, shape: &[usize], values: &[f32]) -> Stored {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Stored { name: name.to_owned(), dtype: Dtype::F32, shape: shape.to_vec(), bytes }
}

fn write(config: &Value, tensors: &[Stored]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|Stored { name, dtype, shape, bytes }| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

/// How a checkpoint stores the weights of its linear layers.
#[derive(Clone, Copy)]
enum Format {
    /// E4M3 with a scale for each block of these sizes.
    Block([usize; 2]),
    /// E2M1 in the routed and shared experts.
    Mxfp4,
}

impl Format {
    fn config(self) -> Value {
        match self {
            Self::Block(block) => {
                json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block})
            }
            Self::Mxfp4 => json!({
                "quant_method": "quark",
                "global_quant_config":
                    {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
                "exclude": ["re:model.layers.0.*", "*self_attn*", "*eh_proj", "*head", "*mlp.gate"]
            }),
        }
    }

    /// Whether the weights of a tensor are quantised.
    fn has(self, name: &str) -> bool {
        match self {
            Self::Block(_) => {
                ["_proj.", ".wq_b.", ".wk.", "lm_head."].iter().any(|part| name.contains(part))
            }
            Self::Mxfp4 => name.contains("experts"),
        }
    }

    /// Quantises values as simply as can be, and gives what is stored and what it stands for.
    fn quantize(self, spec: &TensorSpec, values: &[f32]) -> (Vec<Stored>, Stored) {
        let [n_out, n_in] = spec.shape[..].try_into().unwrap();
        let (codes, scales, scale): (_, _, Stored) = match self {
            Self::Block(block) => {
                let shape = [n_out.div_ceil(block[0]), n_in.div_ceil(block[1])];
                let n_scales = shape[0] * shape[1];
                let scales: Vec<f32> = (0..n_scales).map(|i| 3e-3 / (i % 7 + 3) as f32).collect();
                let scale = floats(&format!("{}_scale_inv", spec.name), &shape, &scales);
                // The sign of a value, and a magnitude from its mantissa: up to 60.
                let code = |value: &f32| {
                    (value.to_bits() >> 24 & 0x80) as u8 | (value.to_bits() % 0x68) as u8
                };
                let codes = values.iter().map(code).collect();
                (Codes::E4m3(codes), Scales::Blocks { block, values: scales }, scale)
            }
            Self::Mxfp4 => {
                let shape = vec![n_out, n_in.div_ceil(32)];
                let exponents: Vec<u8> =
                    (0..shape[0] * shape[1]).map(|i| 118 + (i % 4) as u8).collect();
                let scale = Stored {
                    name: format!("{}_scale", spec.name),
                    dtype: Dtype::U8,
                    shape,
                    bytes: exponents.clone(),
                };
                let code = |pair: &[f32]| (pair[0].to_bits() >> 3) as u8;
                let codes = values.chunks_exact(2).map(code).collect();
                (Codes::E2m1(codes), Scales::Groups { group: 32, exponents }, scale)
            }
        };
        let matrix = QuantizedMatrix::new([n_out, n_in], codes, scales).unwrap();
        let mut dense = vec![0.0; n_out * n_in];
        for (row, values) in dense.chunks_exact_mut(n_in).enumerate() {
            matrix.dequantize_row(row, values);
        }
        let (dtype, shape, bytes) = match matrix.into_parts().0 {
            Codes::E4m3(codes) => (Dtype::F8_E4M3, vec![n_out, n_in], codes),
            Codes::E2m1(codes) => (Dtype::U8, vec![n_out, n_in / 2], codes),
        };
        let codes = Stored { name: spec.name.clone(), dtype, shape, bytes };
        (vec![codes, scale], floats(&spec.name, &spec.shape, &dense))
    }
}

/// A quantised checkpoint, and one of the values that it stands for.
fn checkpoints(format: Format) -> [TempDir; 2] {
    let mut config = config();
    let dir = write(&config, &[]);
    let model = ModelConfig::load(dir.path()).unwrap();
    let mut specs = model.target_tensors();
    specs.extend(model.all_mtp_tensors());
    let mut made = TensorMap::dummy(&specs, 7, Device::Cpu, Kind::Float);
    let (mut stored, mut dense) = (Vec::new(), Vec::new());
    for spec in specs.iter().filter(|spec| !spec.is_optional) {
        let tensor = made.take(&spec.name).unwrap().flatten(0, -1);
        let values = Vec::<f32>::try_from(tensor).unwrap();
        if format.has(&spec.name) {
            let (quantized, values) = format.quantize(spec, &values);
            stored.extend(quantized);
            dense.push(values);
        } else {
            stored.push(floats(&spec.name, &spec.shape, &values));
            dense.push(floats(&spec.name, &spec.shape, &values));
        }
    }
    let dense = write(&config, &dense);
    config["quantization_config"] = format.config();
    [write(&config, &stored), dense]
}

/// The logits of a prefill and a decode row, and the hidden state and logits of a draft step.
fn outputs(dir: &Path, ops: Ops) -> [Tensor; 4] {
    let rig = Rig::open(dir, true, ops, ComputeDtype::Float32);
    let tokens: Vec<i64> = (0..23).map(|i| i * 31 % 97).collect();
    let hidden = rig.forward(&[(0, 0, 11), (1, 0, 12)], &tokens);
    let decoded = rig.forward(&[(1, 12, 1)], &[5]);
    let mtp = rig.model.mtp.as_ref().unwrap().bind(&rig.caches, rig.backend);
    let layout = &rig.layout(&[(0, 0, 11), (1, 0, 12)]);
    let (token_ids, hidden_in) = (&ids(&tokens), &hidden);
    let input = DraftInput {
        layer: 0,
        token_ids,
        hidden: hidden_in,
        layout,
        output_rows: None,
        selection: None,
    };
    let drafted = mtp.step(input).unwrap().hidden;
    let draft_logits = mtp.logits(0, &drafted).unwrap();
    [rig.logits(&hidden), rig.logits(&decoded), drafted, draft_logits]
}

fn check(format: Format) {
    let [quantized, dense] = checkpoints(format);
    let [packed, plain] = [Ops::Fused, Ops::Torch].map(|ops| outputs(quantized.path(), ops));
    let expected = outputs(dense.path(), Ops::Fused);
    for ((packed, plain), expected) in packed.iter().zip(&plain).zip(&expected) {
        assert!(expected.std(true).double_value(&[]) > 1e-3);
        assert_eq!(packed, expected);
        let difference = relative_difference(plain, expected);
        assert!(difference < 1e-4, "{difference}");
    }
}

#[test]
fn fp8_blocks_give_the_bits_of_their_values() {
    check(Format::Block([32, 48]));
    check(Format::Block([128, 128]));
    check(Format::Block([7, 5]));
}

#[test]
fn mxfp4_experts_give_the_bits_of_their_values() {
    check(Format::Mxfp4);
}

#[test]
fn what_is_quantised_stays_so() {
    for (format, layer, kind) in [
        (Format::Block([32, 48]), "model.layers.2.eh_proj", "E4m3"),
        (Format::Block([32, 48]), "lm_head", "E4m3"),
        (Format::Mxfp4, "model.layers.1.mlp.shared_experts.up_proj", "E2m1"),
        (Format::Mxfp4, "model.layers.1.self_attn.o_proj", "F32"),
    ] {
        let [dir, _] = checkpoints(format);
        let config = ModelConfig::load(dir.path()).unwrap();
        for ops in [Ops::Fused, Ops::Torch] {
            let target = (Device::Cpu, Kind::Float);
            let tensors = weights::load(dir.path(), &config, LoadFormat::Auto, true, target);
            let tensors = tensors.unwrap().keep_packed(ops == Ops::Fused);
            let mut builder = LayerBuilder { config: &config, tensors, ops };
            let linear = format!("{:?}", builder.linear(layer).unwrap());
            assert_eq!(linear.contains(kind), ops == Ops::Fused, "{layer}: {linear:.60}");
        }
    }
}
