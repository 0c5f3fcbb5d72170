//! Tests of the bundled configurations for benches, and of the roles of tensors.

use super::{bundled, public, workspace};
use crate::*;

fn specs(config: &ModelConfig) -> impl Iterator<Item = TensorSpec> {
    config.target_tensors().into_iter().chain(config.all_mtp_tensors())
}

/// The parameters that are not optional.
fn n_parameters(config: &ModelConfig) -> usize {
    specs(config).filter(|spec| !spec.is_optional).map(|spec| spec.n_values()).sum()
}

#[test]
fn glm52_lite_is_glm52_at_a_smaller_size() {
    let config = ModelConfig::load(&bundled("glm52-lite")).unwrap();
    assert_eq!(config.architecture, Architecture::GlmMoeDsa);
    let mla = MlaConfig {
        num_heads: 16,
        q_lora_rank: Some(1024),
        kv_lora_rank: 512,
        qk_nope_head_dim: 192,
        qk_rope_head_dim: 64,
        v_head_dim: 256,
    };
    assert_eq!(config.attention.mla(), Some(&mla));
    assert_eq!((config.hidden_size, config.intermediate_size), (2048, 6144));
    assert_eq!((config.vocab_size, config.num_mtp_layers), (32_768, 1));
    let dsa = config.dsa.as_ref().unwrap();
    assert_eq!((dsa.index_topk, dsa.index_n_heads, dsa.index_head_dim), (2048, 32, 128));
    assert!(dsa.rope_interleaved && dsa.index_share_for_mtp_iteration);
    let full: Vec<usize> = (0..16).filter(|&layer_idx| config.has_indexer(layer_idx)).collect();
    assert_eq!(full, [0, 1, 2, 6, 10, 14]);
    let moe = config.moe.as_ref().unwrap();
    assert_eq!((moe.n_routed_experts, moe.num_experts_per_tok), (64, 8));
    assert_eq!((moe.n_shared_experts, moe.moe_intermediate_size), (1, 768));
    assert_eq!((config.is_moe_layer(2), config.is_moe_layer(3)), (false, true));
    assert!(config.rope.yarn.is_none() && config.max_position_embeddings >= 16_384);
    assert_eq!(n_parameters(&config), 4_915_372_160);
    assert_eq!((config.kv_bytes_per_token(2), config.num_index_layers()), (19_584, 7));
}

#[test]
fn dsv3_lite_has_dense_attention_without_a_query_latent() {
    let config = ModelConfig::load(&bundled("dsv3-lite")).unwrap();
    assert_eq!(config.architecture, Architecture::DeepseekV3);
    let mla = MlaConfig {
        num_heads: 16,
        q_lora_rank: None,
        kv_lora_rank: 512,
        qk_nope_head_dim: 128,
        qk_rope_head_dim: 64,
        v_head_dim: 128,
    };
    assert_eq!((config.attention.mla(), &config.dsa), (Some(&mla), &None));
    assert_eq!((config.hidden_size, config.intermediate_size), (2048, 10_944));
    assert_eq!((config.num_hidden_layers, config.num_mtp_layers), (27, 1));
    assert_eq!(config.vocab_size, 32_768);
    let moe = config.moe.as_ref().unwrap();
    assert_eq!((moe.n_routed_experts, moe.num_experts_per_tok), (64, 6));
    assert_eq!((moe.n_shared_experts, moe.moe_intermediate_size), (2, 1408));
    assert_eq!((config.is_moe_layer(0), config.is_moe_layer(1)), (false, true));
    assert!(config.rope.yarn.is_none() && config.max_position_embeddings >= 16_384);
    assert_eq!(n_parameters(&config), 16_014_515_904);
    assert_eq!(config.kv_bytes_per_token(2), 32_256);
}

/// The roles, which names tell, against the shapes, over models of every architecture.
#[test]
fn a_tensor_of_two_dimensions_is_a_matrix_and_any_other_a_norm_or_a_bias() {
    let bundled_names = ["tiny-dsv3", "tiny-glm52", "dsv3-lite", "glm52-lite"];
    let fixtures = ["v3-no-qlora", "v32-dsa", "glm-shared"];
    let folders = bundled_names
        .map(bundled)
        .into_iter()
        .chain(fixtures.map(|name| workspace("tests/data/fixtures").join(name)));
    let mut configs: Vec<ModelConfig> =
        folders.map(|folder| ModelConfig::load(&folder).unwrap()).collect();
    for name in ["glm-5.2", "deepseek-v3.2-exp"] {
        let raw = RawConfig::parse(&public(name).to_string(), "config.json").unwrap();
        configs.push(ModelConfig::from_raw(&raw).unwrap());
    }
    for spec in configs.iter().flat_map(specs) {
        let last = spec.name.rsplit('.').next().unwrap();
        let expected = match (spec.shape.len(), last) {
            (2, "weight") => TensorRole::Matrix,
            (1, "weight") => TensorRole::Norm,
            (1, "bias" | "e_score_correction_bias") => TensorRole::Bias,
            _ => panic!("{spec:?}"),
        };
        assert_eq!(spec.role(), expected, "{}", spec.name);
    }
}
