//! Tests of the router; the cases of fault L26 among them.

use super::{Router, RouterConfig};
use crate::test_util::{Random, assert_close};

const ONE_GROUP: RouterConfig = RouterConfig {
    n_group: 1,
    topk_group: 1,
    top_k: 2,
    norm_topk_prob: true,
    routed_scaling_factor: 2.5,
};

/// Routes one token whose logits are given: the gate is a column of them.
fn route(logits: &[f32], bias: &[f32], config: RouterConfig) -> (Vec<i32>, Vec<f32>) {
    let (mut ids, mut weights) = (vec![-1; config.top_k], vec![f32::NAN; config.top_k]);
    Router::new(logits, bias, config).route(&[1.0], &mut ids, &mut weights);
    (ids, weights)
}

#[test]
fn the_bias_chooses_and_does_not_weigh() {
    let (logits, bias) = ([2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 1.5]);
    let (ids, weights) = route(&logits, &bias, ONE_GROUP);
    assert_eq!(ids, [3, 0]);
    assert_close(&weights, &[0.5848, 1.9152], 5e-5);

    let plain = RouterConfig { norm_topk_prob: false, ..ONE_GROUP };
    let (ids, weights) = route(&logits, &bias, plain);
    assert_eq!(ids, [3, 0]);
    assert_close(&weights, &[0.6724, 2.2020], 5e-5);
}

#[test]
fn biases_that_bf16_cannot_tell_apart_decide() {
    let config = RouterConfig { top_k: 1, ..ONE_GROUP };
    assert_eq!(route(&[0.3, 0.3], &[4.001, 4.002], config).0, [1]);
}

#[test]
fn ties_go_to_the_lowest_expert() {
    assert_eq!(route(&[0.5; 6], &[0.0; 6], ONE_GROUP).0, [0, 1]);
    assert_eq!(route(&[0.5, 0.7, 0.7, 0.5], &[0.0; 4], ONE_GROUP).0, [1, 2]);
    let config = RouterConfig { n_group: 3, topk_group: 2, ..ONE_GROUP };
    assert_eq!(route(&[0.5; 6], &[0.0; 6], config).0, [0, 1]);
}

#[test]
fn experts_of_dropped_groups_never_win() {
    // Group 0 has the best expert and group 1 the best pair; all kept scores are negative.
    let config = RouterConfig { n_group: 2, topk_group: 1, ..ONE_GROUP };
    let (ids, _) = route(&[0.0; 4], &[-1.0, -9.0, -2.0, -3.0], config);
    assert_eq!(ids, [2, 3]);
}

#[test]
fn broken_scores_still_give_distinct_experts() {
    let (ids, weights) = route(&[f32::NAN; 4], &[0.0; 4], ONE_GROUP);
    assert_eq!(ids, [0, 1]);
    assert!(weights.iter().all(|weight| weight.is_nan()), "the fault stays visible");
    assert_eq!(route(&[f32::NAN, 1.0, 0.5, f32::NAN], &[0.0; 4], ONE_GROUP).0, [1, 2]);
}

/// The rule in f64, by sorting.
fn oracle(x: &[f32], gate: &[f32], bias: &[f32], config: &RouterConfig) -> (Vec<i32>, Vec<f64>) {
    let scores: Vec<f64> = gate
        .chunks_exact(x.len())
        .map(|w| w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>())
        .map(|logit| 1.0 / (1.0 + (-logit).exp()))
        .collect();
    let biased: Vec<f64> = scores.iter().zip(bias).map(|(s, &b)| s + f64::from(b)).collect();
    let best_first = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order
    };
    let size = bias.len() / config.n_group;
    let groups: Vec<f64> = biased
        .chunks_exact(size)
        .map(|group| best_first(group).iter().take(2).map(|&i| group[i]).sum())
        .collect();
    let kept = &best_first(&groups)[..config.topk_group];
    let mut order = best_first(&biased);
    order.retain(|expert| kept.contains(&(expert / size)));
    order.truncate(config.top_k);
    let total: f64 = order.iter().map(|&expert| scores[expert]).sum();
    let divisor = if config.norm_topk_prob { total } else { 1.0 };
    let scale = f64::from(config.routed_scaling_factor) / divisor;
    (order.iter().map(|&e| e as i32).collect(), order.iter().map(|&e| scores[e] * scale).collect())
}

#[test]
fn agrees_with_an_f64_oracle_and_does_not_depend_on_the_batch() {
    let mut random = Random::new(1);
    for (n_experts, n_group, topk_group, top_k) in
        [(16, 1, 1, 4), (16, 4, 2, 4), (256, 8, 4, 8), (12, 12, 5, 3)]
    {
        for norm_topk_prob in [false, true] {
            let config = RouterConfig {
                n_group,
                topk_group,
                top_k,
                norm_topk_prob,
                routed_scaling_factor: 1.8,
            };
            let (n_tokens, hidden) = (17, 40);
            let gate = random.values(n_experts * hidden);
            let bias = random.values(n_experts);
            let x = random.values(n_tokens * hidden);
            let router = Router::new(&gate, &bias, config);
            let mut ids = vec![-1; n_tokens * top_k];
            let mut weights = vec![f32::NAN; n_tokens * top_k];
            router.route(&x, &mut ids, &mut weights);
            for token in 0..n_tokens {
                let x = &x[token * hidden..][..hidden];
                let picked = token * top_k..(token + 1) * top_k;
                let (oracle_ids, oracle_weights) = oracle(x, &gate, &bias, &config);
                assert_eq!(ids[picked.clone()], oracle_ids);
                assert_close(&weights[picked.clone()], &oracle_weights, 1e-5);
                let (mut id, mut weight) = (vec![-1; top_k], vec![f32::NAN; top_k]);
                router.route(x, &mut id, &mut weight);
                assert_eq!((&ids[picked.clone()], &weights[picked]), (&id[..], &weight[..]));
            }
        }
    }
}
