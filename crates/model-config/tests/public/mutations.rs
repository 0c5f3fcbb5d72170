//! Faults in published configs: whatever is missing, of another type or absurd, there is an error
//! that names it, or a model, and never a panic.

use model_config::{ConfigSummary, ModelConfig};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{Fields, MODELS, in_bfloat16, published, raw, read};

/// Replaces a field of the config or of an object in it; `None` removes it.
fn replace(fields: &mut Fields, path: &[String], value: Option<Value>) {
    let (last, outer) = path.split_last().expect("a path has a name");
    let object = match outer {
        [] => fields,
        [name] => match fields.get_mut(name).and_then(Value::as_object_mut) {
            Some(object) => object,
            // Another fault has replaced the object.
            None => return,
        },
        _ => unreachable!("configs have one level of objects"),
    };
    match value {
        Some(value) => object.insert(last.clone(), value),
        None => object.remove(last),
    };
}

/// The fields of a config and of the objects in it.
fn paths(fields: &Fields) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    for (name, value) in fields {
        paths.push(vec![name.clone()]);
        let inner = value.as_object().into_iter().flat_map(|object| object.keys());
        paths.extend(inner.map(|key| vec![name.clone(), key.clone()]));
    }
    paths
}

fn faults() -> Vec<Option<Value>> {
    let values = [
        json!(null),
        json!(0),
        json!(-1),
        json!(3),
        json!(1u64 << 20),
        json!(1u64 << 40),
        json!(u64::MAX),
        json!(0.5),
        json!(1e300),
        json!(-1e300),
        json!("text"),
        json!(true),
        json!([]),
        json!([3, "full"]),
        json!({}),
        json!({"type": "yarn"}),
    ];
    values.into_iter().map(Some).chain([None]).collect()
}

/// Reads and describes a faulty config; the message, if it is refused.
fn refusal(fields: &Fields) -> Option<String> {
    let read = raw(fields).and_then(|raw| {
        let config = ModelConfig::from_raw(&raw);
        let refusal = config.as_ref().err().map(ToString::to_string);
        assert_eq!(ConfigSummary::new(&raw).refusal, refusal);
        config
    });
    let error = read.err()?;
    let message = error.to_string();
    assert!(error.field().is_some() && message.len() < 600, "{message}");
    Some(message)
}

fn assert_named(message: &str, faulty: &[Vec<String>]) {
    let is_named = |path: &Vec<String>| path.last().is_some_and(|name| message.contains(name));
    assert!(faulty.iter().any(is_named), "{faulty:?}: {message}");
}

#[test]
fn one_fault_is_named() {
    let (mut n_refused, mut n_read) = (0, 0);
    // One of each shape; the random faults below are in all of them.
    for name in ["deepseek-v2", "moonlight-16b-a3b", "kimi-k2-instruct", "glm-4.5-air", "glm-5.2"] {
        let whole = published(name);
        assert_eq!(refusal(&whole), None, "{name}");
        for path in paths(&whole) {
            for fault in faults() {
                let mut fields = whole.clone();
                replace(&mut fields, &path, fault);
                if let Some(message) = refusal(&fields) {
                    assert_named(&message, std::slice::from_ref(&path));
                    n_refused += 1;
                } else {
                    n_read += 1;
                }
            }
        }
    }
    assert!(n_refused > 1000 && n_read > 1000, "{n_refused} refused, {n_read} read");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn several_faults_are_an_error_or_a_model(
        model in proptest::sample::select(MODELS),
        is_published in any::<bool>(),
        seeds in proptest::collection::vec(
            (any::<proptest::sample::Index>(), proptest::sample::select(faults())), 1..5),
    ) {
        let mut fields = if is_published { published(model) } else { in_bfloat16(model) };
        let is_whole = read(&fields).is_ok();
        let paths = paths(&fields);
        let mut faulty = Vec::new();
        for (index, fault) in seeds {
            let path = index.get(&paths).clone();
            replace(&mut fields, &path, fault);
            faulty.push(path);
        }
        // What the whole config is refused for may come before the fault.
        if let Some(message) = refusal(&fields) && is_whole {
            assert_named(&message, &faulty);
        }
    }
}

/// The largest config that is accepted; one more of anything is too many.
fn largest() -> Fields {
    let fields = json!({
        "model_type": "glm_moe_dsa", "vocab_size": 1 << 24, "max_position_embeddings": 1 << 24,
        "hidden_size": 1 << 18, "intermediate_size": 1 << 18, "num_hidden_layers": 1 << 10,
        "num_nextn_predict_layers": 1 << 10, "num_attention_heads": 1 << 12,
        "q_lora_rank": 1 << 18, "kv_lora_rank": 1 << 18, "qk_nope_head_dim": 1 << 13,
        "qk_rope_head_dim": 1 << 13, "v_head_dim": 1 << 13, "n_routed_experts": 1 << 7,
        "num_experts_per_tok": 1 << 7, "n_shared_experts": 1 << 6,
        "moe_intermediate_size": 1 << 18, "first_k_dense_replace": 0, "index_topk": 1 << 24,
        "index_n_heads": 1 << 12, "index_head_dim": 1 << 13
    });
    fields.as_object().expect("an object").clone()
}

#[test]
fn the_largest_config_does_not_overflow() {
    let config = read(&largest()).unwrap();
    let mut n_values: u128 = 0;
    for spec in config.target_tensors().into_iter().chain(config.all_mtp_tensors()) {
        let exact: u128 = spec.shape.iter().map(|&dim| dim as u128).product();
        assert_eq!(spec.n_values() as u128, exact, "{}", spec.name);
        n_values += exact;
    }
    assert!(n_values * 4 < i64::MAX as u128, "{n_values} values");
    assert!(config.kv_bytes_per_token(4) > 0 && config.index_bytes_per_token(1 << 15) > 0);
    for (field, value) in largest() {
        let Some(number) = value.as_u64().filter(|_| field != "first_k_dense_replace") else {
            continue;
        };
        let mut fields = largest();
        fields[&field] = json!(number + 1);
        let error = read(&fields).unwrap_err();
        assert_eq!(error.field(), Some(field.as_str()), "{error}");
        assert!(error.to_string().contains("at most"), "{error}");
    }
}
