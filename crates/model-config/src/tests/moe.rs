//! Tests of the routers and of which layers have experts.

use serde_json::{Value, json};

use super::{config_with, valid};
use crate::*;

#[test]
fn routers_are_data() {
    use ExpertChoice::{Greedy, GroupLimitedGreedy, NoauxTc};
    use RouterScoring::{Sigmoid, Softmax};
    let ungrouped = json!(null);
    let cases = [
        (json!(null), json!(null), json!(4), (Sigmoid, NoauxTc)),
        (json!("sigmoid"), json!("noaux_tc"), json!(4), (Sigmoid, NoauxTc)),
        (json!("softmax"), json!("noaux_tc"), json!(4), (Softmax, NoauxTc)),
        (json!("sigmoid"), json!("greedy"), json!(4), (Sigmoid, Greedy)),
        (json!("softmax"), json!("greedy"), ungrouped.clone(), (Softmax, Greedy)),
        (json!("softmax"), json!("group_limited_greedy"), json!(4), (Softmax, GroupLimitedGreedy)),
        (json!("softmax"), json!(null), json!(4), (Softmax, GroupLimitedGreedy)),
        (json!("softmax"), json!(null), json!(1), (Softmax, Greedy)),
        (json!("softmax"), json!(null), ungrouped, (Softmax, Greedy)),
    ];
    for (scoring, method, n_group, expected) in cases {
        let topk_group = if n_group == json!(4) { json!(2) } else { json!(1) };
        let config = valid(json!({
            "scoring_func": scoring, "topk_method": method, "n_group": n_group,
            "topk_group": topk_group
        }));
        let moe = config.moe.as_ref().unwrap();
        assert_eq!((moe.scoring, moe.choice), expected, "{scoring} {method} {n_group}");
        let n_group = if expected.1 == Greedy { 1 } else { n_group.as_u64().unwrap_or(1) };
        assert_eq!(moe.n_group as u64, n_group, "{scoring} {method}");
        assert_eq!(moe.has_correction_bias(), expected.1 == NoauxTc);
        let specs = config.target_tensors();
        let n_biases = specs.iter().filter(|spec| spec.name.contains("correction_bias")).count();
        assert_eq!(n_biases, if expected.1 == NoauxTc { 4 } else { 0 }, "{scoring} {method}");
    }
}

#[test]
fn groups_are_checked_where_they_have_a_say() {
    // Four groups of four experts, two kept: eight choices, for all but the greedy router.
    for method in ["noaux_tc", "group_limited_greedy"] {
        let changes = json!({"topk_method": method, "num_experts_per_tok": 9});
        assert_eq!(config_with(&changes).unwrap_err().field(), Some("num_experts_per_tok"));
    }
    valid(json!({"topk_method": "greedy", "num_experts_per_tok": 16}));
    // Groups of one expert have no second best.
    let single =
        |method: &str| config_with(&json!({"topk_method": method, "n_group": 16, "topk_group": 8}));
    assert_eq!(single("noaux_tc").unwrap_err().field(), Some("n_group"));
    single("group_limited_greedy").unwrap();
}

#[test]
fn unknown_routers_are_refused() {
    for (field, words) in [
        ("scoring_func", "use sigmoid or softmax"),
        ("topk_method", "use noaux_tc, greedy or group_limited_greedy"),
    ] {
        let mut changes = json!({});
        changes[field] = json!("best");
        let error = config_with(&changes).unwrap_err();
        assert_eq!(error.field(), Some(field));
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn moe_layers_follow_the_first_dense_ones_and_the_frequency() {
    let layers = |changes: Value| {
        let config = valid(changes);
        (0..6).filter(|&layer_idx| config.is_moe_layer(layer_idx)).collect::<Vec<_>>()
    };
    assert_eq!(layers(json!({})), [1, 2, 3, 4, 5]);
    assert_eq!(layers(json!({"first_k_dense_replace": 0})), [0, 1, 2, 3, 4, 5]);
    assert_eq!(layers(json!({"moe_layer_freq": 2})), [2, 4]);
    assert_eq!(layers(json!({"first_k_dense_replace": 5})), [5]);
    assert!(layers(json!({"n_routed_experts": null})).is_empty());
}

#[test]
fn listed_layers_agree_with_the_numbers_or_replace_them() {
    let five = ["dense", "dense", "sparse", "sparse", "sparse"];
    let config = valid(json!({"first_k_dense_replace": null, "mlp_layer_types": five}));
    assert_eq!(config.moe.unwrap().first_k_dense_replace, 2);
    valid(json!({"first_k_dense_replace": 2, "mlp_layer_types": five}));
    let dense = ["dense"; 5];
    let all_dense = json!({"first_k_dense_replace": null, "mlp_layer_types": dense});
    assert_eq!(valid(all_dense).moe.unwrap().first_k_dense_replace, 5);
    valid(json!({"n_routed_experts": null, "mlp_layer_types": dense}));
    let every_second = ["dense", "dense", "sparse", "dense", "sparse"];
    valid(json!({"moe_layer_freq": 2, "mlp_layer_types": every_second}));
    let with_mtp = ["dense", "sparse", "sparse", "sparse", "sparse", "sparse"];
    valid(json!({"mlp_layer_types": with_mtp}));

    let cases = [
        (json!({"mlp_layer_types": five}), "mlp_layer_types[1]", "the layer is sparse"),
        (json!({"mlp_layer_types": every_second}), "mlp_layer_types[1]", "make them agree"),
        (
            json!({"first_k_dense_replace": null, "mlp_layer_types": every_second}),
            "mlp_layer_types[3]",
            "make them agree",
        ),
        (
            json!({"n_routed_experts": null, "mlp_layer_types": five}),
            "mlp_layer_types[2]",
            "the layer is dense",
        ),
        (
            json!({"mlp_layer_types": ["dense", "moe", "moe", "moe", "moe"]}),
            "mlp_layer_types[1]",
            "use dense or sparse",
        ),
        (
            json!({"mlp_layer_types": dense[..4]}),
            "mlp_layer_types",
            "has length 4; it must have an entry for each of 5 layers",
        ),
        (
            json!({"mlp_layer_types": vec!["dense"; 7]}),
            "mlp_layer_types",
            "has length 7; it must have an entry for each of 5 layers",
        ),
    ];
    for (changes, field, words) in cases {
        let error = config_with(&changes).unwrap_err();
        assert_eq!(error.field(), Some(field), "{changes}: {error}");
        assert!(error.to_string().contains(words), "{changes}: {error}");
    }
}
