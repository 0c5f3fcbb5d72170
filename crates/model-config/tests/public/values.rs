//! Every value that matters, as read from the published configs.

use model_config::ExpertChoice::{Greedy, GroupLimitedGreedy, NoauxTc};
use model_config::RouterScoring::{Sigmoid, Softmax};
use model_config::{
    Architecture, AttentionConfig, ConfigSummary, ExpertChoice, ModelConfig, RouterScoring,
};
use model_config::{DsaConfig, StoredDtype, WeightFormat};

use crate::{MODELS, in_bfloat16, published, raw, read};

struct Expected {
    name: &'static str,
    architecture: Architecture,
    /// Vocabulary, hidden, MLP, layers, MTP layers, context.
    sizes: [usize; 6],
    /// Heads, query rank (0: none), key-value rank, and the heads without rope, with it, of values.
    /// If grouped: heads, those of keys, their width, its rotated part, and whether there is a bias
    /// and a norm.
    attention: [usize; 6],
    eps: f64,
    theta: f64,
    /// Factor, fast, slow, both scales.
    yarn: Option<[f64; 4]>,
    /// Experts, those of a token, shared ones, width, groups, kept groups, dense layers.
    experts: [usize; 7],
    /// What weights are multiplied by, and whether they are divided by their sum before.
    weights: (f64, bool),
    router: (RouterScoring, ExpertChoice),
    /// Top k, heads, width of a head, layers that select.
    index: Option<[usize; 4]>,
    bos: Option<u32>,
    eos: &'static [u32],
    /// In bfloat16.
    kv_bytes: usize,
}

const V2: Expected = Expected {
    name: "deepseek-v2",
    architecture: Architecture::DeepseekV2,
    sizes: [102_400, 5120, 12_288, 60, 0, 163_840],
    attention: [128, 1536, 512, 128, 64, 128],
    eps: 1e-6,
    theta: 10_000.0,
    yarn: Some([40.0, 32.0, 1.0, 0.707]),
    experts: [160, 6, 2, 1536, 8, 3, 1],
    weights: (16.0, false),
    router: (Softmax, GroupLimitedGreedy),
    index: None,
    bos: Some(100_000),
    eos: &[100_001],
    kv_bytes: 69_120,
};

const V3: Expected = Expected {
    name: "deepseek-v3",
    architecture: Architecture::DeepseekV3,
    sizes: [129_280, 7168, 18_432, 61, 1, 163_840],
    attention: [128, 1536, 512, 128, 64, 128],
    eps: 1e-6,
    theta: 10_000.0,
    yarn: Some([40.0, 32.0, 1.0, 1.0]),
    experts: [256, 8, 1, 2048, 8, 4, 3],
    weights: (2.5, true),
    router: (Sigmoid, NoauxTc),
    index: None,
    bos: Some(0),
    eos: &[1],
    kv_bytes: 71_424,
};

const GLM5: Expected = Expected {
    name: "glm-5",
    architecture: Architecture::GlmMoeDsa,
    sizes: [154_880, 6144, 12_288, 78, 1, 202_752],
    attention: [64, 2048, 512, 192, 64, 256],
    eps: 1e-5,
    theta: 1e6,
    yarn: None,
    experts: [256, 8, 1, 2048, 1, 1, 3],
    weights: (2.5, true),
    router: (Sigmoid, NoauxTc),
    index: Some([2048, 32, 128, 78]),
    bos: None,
    eos: &[154_820, 154_827, 154_829],
    kv_bytes: 91_008,
};

const EXPECTED: &[Expected] = &[
    Expected {
        name: "deepseek-v2-lite",
        sizes: [102_400, 2048, 10_944, 27, 0, 163_840],
        attention: [16, 0, 512, 128, 64, 128],
        experts: [64, 6, 2, 1408, 1, 1, 1],
        weights: (1.0, false),
        router: (Softmax, Greedy),
        kv_bytes: 31_104,
        ..V2
    },
    V2,
    V3,
    Expected { name: "deepseek-r1", ..V3 },
    Expected { name: "deepseek-v3.1", ..V3 },
    Expected {
        name: "deepseek-v3.2-exp",
        architecture: Architecture::DeepseekV32,
        index: Some([2048, 64, 128, 61]),
        ..V3
    },
    Expected {
        name: "moonlight-16b-a3b",
        sizes: [163_840, 2048, 11_264, 27, 0, 8192],
        attention: [16, 0, 512, 128, 64, 128],
        eps: 1e-5,
        theta: 50_000.0,
        yarn: None,
        experts: [64, 6, 2, 1408, 1, 1, 1],
        weights: (2.446, true),
        bos: Some(163_584),
        eos: &[163_586],
        kv_bytes: 31_104,
        ..V3
    },
    Expected {
        name: "kimi-k2-instruct",
        sizes: [163_840, 7168, 18_432, 61, 0, 131_072],
        attention: [64, 1536, 512, 128, 64, 128],
        theta: 50_000.0,
        yarn: Some([32.0, 1.0, 1.0, 1.0]),
        experts: [384, 8, 1, 2048, 1, 1, 1],
        weights: (2.827, true),
        bos: Some(163_584),
        eos: &[163_585],
        kv_bytes: 70_272,
        ..V3
    },
    Expected {
        name: "glm-4.5-air",
        architecture: Architecture::Glm4Moe,
        sizes: [151_552, 4096, 10_944, 46, 1, 131_072],
        attention: [96, 8, 128, 64, 1, 0],
        experts: [128, 8, 1, 1408, 1, 1, 1],
        weights: (1.0, true),
        index: None,
        eos: &[151_329, 151_336, 151_338],
        kv_bytes: 192_512,
        ..GLM5
    },
    Expected {
        name: "glm-4.7-flash",
        architecture: Architecture::DeepseekV3,
        sizes: [154_880, 2048, 10_240, 47, 1, 202_752],
        attention: [20, 768, 512, 192, 64, 256],
        experts: [64, 4, 1, 1536, 1, 1, 1],
        weights: (1.8, true),
        index: None,
        kv_bytes: 55_296,
        ..GLM5
    },
    GLM5,
    Expected {
        name: "glm-5.2",
        sizes: [154_880, 6144, 12_288, 78, 1, 1_048_576],
        theta: 8e6,
        index: Some([2048, 32, 128, 21]),
        ..GLM5
    },
];

#[test]
fn every_value_is_the_published_one() {
    for expected in EXPECTED {
        let config = read(&in_bfloat16(expected.name)).unwrap();
        check(&config, expected);
        check_index(&config, expected);
    }
}

fn check(config: &ModelConfig, expected: &Expected) {
    let name = expected.name;
    assert_eq!(config.architecture, expected.architecture, "{name}");
    let sizes = [
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_mtp_layers,
        config.max_position_embeddings,
    ];
    assert_eq!(sizes, expected.sizes, "{name}");
    assert_eq!(attention(config), expected.attention, "{name}");
    assert_eq!((config.rms_norm_eps, config.rope.theta), (expected.eps, expected.theta), "{name}");
    assert_eq!(config.rope.interleaved, config.attention.mla().is_some(), "{name}");
    assert!(!config.tie_word_embeddings, "{name}");
    let yarn = config.rope.yarn.as_ref().map(|yarn| {
        assert_eq!(yarn.mscale, yarn.mscale_all_dim, "{name}");
        assert_eq!(yarn.original_max_position_embeddings, 4096, "{name}");
        [yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.mscale]
    });
    assert_eq!(yarn, expected.yarn, "{name}");
    let moe = config.moe.as_ref().expect("experts");
    let experts = [
        moe.n_routed_experts,
        moe.num_experts_per_tok,
        moe.n_shared_experts,
        moe.moe_intermediate_size,
        moe.n_group,
        moe.topk_group,
        moe.first_k_dense_replace,
    ];
    assert_eq!((experts, moe.moe_layer_freq), (expected.experts, 1), "{name}");
    assert_eq!((moe.routed_scaling_factor, moe.norm_topk_prob), expected.weights, "{name}");
    assert_eq!((moe.scoring, moe.choice), expected.router, "{name}");
    assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (expected.bos, expected.eos));
    assert_eq!(config.dtype, Some(StoredDtype::Bfloat16), "{name}");
    assert_eq!(config.kv_bytes_per_token(2), expected.kv_bytes, "{name}");
}

fn attention(config: &ModelConfig) -> [usize; 6] {
    match &config.attention {
        AttentionConfig::Mla(mla) => [
            mla.num_heads,
            mla.q_lora_rank.unwrap_or(0),
            mla.kv_lora_rank,
            mla.qk_nope_head_dim,
            mla.qk_rope_head_dim,
            mla.v_head_dim,
        ],
        AttentionConfig::Gqa(gqa) => [
            gqa.num_heads,
            gqa.num_kv_heads,
            gqa.head_dim,
            gqa.rope_dim,
            usize::from(gqa.has_bias),
            usize::from(gqa.has_qk_norm),
        ],
    }
}

fn check_index(config: &ModelConfig, expected: &Expected) {
    let name = expected.name;
    let is_glm = config.architecture == Architecture::GlmMoeDsa;
    let n_full = (0..config.num_hidden_layers).filter(|&idx| config.has_indexer(idx)).count();
    let index = config.dsa.as_ref().map(|dsa| {
        let DsaConfig { index_topk, index_n_heads, index_head_dim, .. } = *dsa;
        assert_eq!(dsa.rope_interleaved, is_glm, "{name}");
        assert_eq!(dsa.index_share_for_mtp_iteration, name == "glm-5.2", "{name}");
        [index_topk, index_n_heads, index_head_dim, n_full]
    });
    assert_eq!(index, expected.index, "{name}");
    let full = [0, 1, 2, 6, 10, 14];
    if name == "glm-5.2" {
        assert!((0..15).filter(|&idx| config.has_indexer(idx)).eq(full));
    }
}

#[test]
fn fp8_changes_only_how_weights_are_stored() {
    let mut n_fp8 = 0;
    for expected in EXPECTED {
        let fields = published(expected.name);
        let config = read(&fields).unwrap();
        let formats = config.quantization.as_ref().map(|quantization| {
            quantization.declared("model.layers.3.mlp.experts.0.up_proj.weight").formats
        });
        let block = WeightFormat::Fp8Block([128, 128]);
        let is_fp8 = fields.contains_key("quantization_config");
        assert_eq!(formats, is_fp8.then(|| vec![block]), "{}", expected.name);
        let unquantised = ModelConfig { quantization: None, ..config };
        assert_eq!(unquantised, read(&in_bfloat16(expected.name)).unwrap());
        n_fp8 += usize::from(is_fp8);
    }
    assert_eq!(n_fp8, 5);
}

#[test]
fn summaries_say_the_same() {
    assert_eq!(EXPECTED.len(), MODELS.len());
    for expected in EXPECTED {
        let name = expected.name;
        let summary = ConfigSummary::new(&raw(&published(name)).unwrap());
        let [vocab, hidden, _, n_layers, n_mtp, context] = expected.sizes;
        assert_eq!(
            (summary.vocab_size, summary.hidden_size),
            (Some(vocab), Some(hidden)),
            "{name}"
        );
        assert_eq!((summary.num_hidden_layers, summary.num_mtp_layers), (Some(n_layers), n_mtp));
        assert_eq!(summary.max_position_embeddings, Some(context), "{name}");
        assert_eq!(summary.num_attention_heads, Some(expected.attention[0]), "{name}");
        assert_eq!(summary.n_routed_experts, Some(expected.experts[0]), "{name}");
        assert_eq!(summary.num_experts_per_tok, Some(expected.experts[1]), "{name}");
        assert_eq!(summary.kv_bytes_per_token, Some(expected.kv_bytes), "{name}");
    }
}

/// `docs/models.md` has a row for each model, with what its config says.
#[test]
fn the_documented_table_is_true() {
    let docs = include_str!("../../../../docs/models.md");
    for name in MODELS {
        let is_row = |line: &&str| line.to_lowercase().starts_with(&format!("| {name} |"));
        let row = docs.lines().find(is_row).unwrap_or_else(|| panic!("no row for {name}"));
        let raw = raw(&published(name)).unwrap();
        let summary = ConfigSummary::new(&raw);
        let index_bytes = summary.sparse.as_ref().and_then(|sparse| sparse.index_bytes_per_token);
        let expected = [
            format!("`{}`", raw.model_type().unwrap()),
            "runs".into(),
            summary.max_position_embeddings.unwrap().to_string(),
            summary.kv_bytes_per_token.unwrap().to_string(),
            index_bytes.map_or(String::new(), |bytes| bytes.to_string()),
            summary.num_mtp_layers.to_string(),
        ];
        let cells: Vec<String> =
            row.trim_matches('|').split('|').map(|cell| cell.trim().replace(',', "")).collect();
        assert_eq!(cells[1..], expected, "{name}");
    }
}

/// A tool that writes a config again spells it anew: this is Kimi-K2's as transformers 5 does.
#[test]
fn a_config_in_the_new_spelling_is_the_same_model() {
    let old = in_bfloat16("kimi-k2-instruct");
    let mut new = old.clone();
    new["model_type"] = "deepseek_v3".into();
    new.insert("dtype".into(), new["torch_dtype"].clone());
    let mut rope = new["rope_scaling"].as_object().unwrap().clone();
    rope.insert("rope_type".into(), "yarn".into());
    rope.insert("rope_theta".into(), 50_000.0.into());
    new.insert("rope_parameters".into(), rope.into());
    let n_mtp = new["num_nextn_predict_layers"].clone();
    new.insert("num_mtp_layers".into(), n_mtp);
    for field in ["torch_dtype", "rope_scaling", "num_nextn_predict_layers"] {
        new.remove(field);
        assert_eq!(read(&new).unwrap(), read(&old).unwrap(), "without {field}");
    }
}
