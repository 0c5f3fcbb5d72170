//! Tests of the router; the cases of fault L26 among them.

use super::{ExpertChoice, Router, RouterConfig, RouterScoring};
use crate::simd::Isa;
use crate::test_util::{Random, assert_close};

const ONE_GROUP: RouterConfig = RouterConfig {
    scoring: RouterScoring::Sigmoid,
    choice: ExpertChoice::NoauxTc,
    n_group: 1,
    topk_group: 1,
    top_k: 2,
    norm_topk_prob: true,
    routed_scaling_factor: 2.5,
};

/// Routes one token whose logits are given: the gate is a column of them. An empty bias is none.
fn route(logits: &[f32], bias: &[f32], config: RouterConfig) -> (Vec<i32>, Vec<f32>) {
    let (mut ids, mut weights) = (vec![-1; config.top_k], vec![f32::NAN; config.top_k]);
    let bias = (!bias.is_empty()).then_some(bias);
    Router::new(logits, 1, bias, config).route(&[1.0], &mut ids, &mut weights);
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

#[test]
fn softmax_weighs_by_probability() {
    // e^2 : e : 1 : 1/e.
    let softmax = RouterConfig {
        scoring: RouterScoring::Softmax,
        choice: ExpertChoice::Greedy,
        norm_topk_prob: false,
        ..ONE_GROUP
    };
    let (ids, weights) = route(&[1.0, 2.0, -1.0, 0.0], &[], softmax);
    assert_eq!(ids, [1, 0]);
    let total = [2f64, 1.0, 0.0, -1.0].map(f64::exp).iter().sum::<f64>();
    assert_close(&weights, &[2f64, 1.0].map(|x| x.exp() / total * 2.5), 1e-6);
    let (_, normed) =
        route(&[1.0, 2.0, -1.0, 0.0], &[], RouterConfig { norm_topk_prob: true, ..softmax });
    let e = 1f64.exp();
    assert_close(&normed, &[e / (e + 1.0) * 2.5, 2.5 / (e + 1.0)], 1e-6);
    // Logits that overflow an exponential without the greatest one taken off.
    assert_eq!(route(&[500.0, -500.0, 400.0, 499.0], &[], softmax).0, [0, 3]);
    assert!(route(&[1.0, f32::NAN, 2.0, 3.0], &[], softmax).1.iter().all(|x| x.is_nan()));
}

#[test]
fn the_choice_decides_what_a_group_is_worth() {
    // The best expert is in group 0, the best pair in group 1.
    let logits = [2.2, -5.0, 2.0, 2.0];
    for (choice, expected) in [
        (ExpertChoice::NoauxTc, [2, 3]),
        (ExpertChoice::Greedy, [0, 2]),
        (ExpertChoice::GroupLimitedGreedy, [0, 1]),
    ] {
        for scoring in [RouterScoring::Sigmoid, RouterScoring::Softmax] {
            let config = RouterConfig { n_group: 2, topk_group: 1, scoring, choice, ..ONE_GROUP };
            assert_eq!(route(&logits, &[], config).0, expected, "{choice:?} {scoring:?}");
        }
    }
}

/// The rule in f64, by sorting.
fn oracle(logits: &[f64], bias: &[f32], config: &RouterConfig) -> (Vec<i32>, Vec<f64>) {
    let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
    let score = |logit: &f64| match config.scoring {
        RouterScoring::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
        RouterScoring::Softmax => logit.exp() / total,
    };
    let scores: Vec<f64> = logits.iter().map(score).collect();
    let bias = bias.iter().copied().chain(std::iter::repeat(0.0));
    let biased: Vec<f64> = scores.iter().zip(bias).map(|(s, b)| s + f64::from(b)).collect();
    let best_first = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order
    };
    let size = logits.len() / config.n_group;
    let n_best = if config.choice == ExpertChoice::NoauxTc { 2 } else { 1 };
    let groups: Vec<f64> = biased
        .chunks_exact(size)
        .map(|group| best_first(group).iter().take(n_best).map(|&i| group[i]).sum())
        .collect();
    let kept = &best_first(&groups)[..config.topk_group];
    let mut order = best_first(&biased);
    order.retain(|expert| config.choice == ExpertChoice::Greedy || kept.contains(&(expert / size)));
    order.truncate(config.top_k);
    let total: f64 = order.iter().map(|&expert| scores[expert]).sum();
    let divisor = if config.norm_topk_prob { total } else { 1.0 };
    let scale = f64::from(config.routed_scaling_factor) / divisor;
    (order.iter().map(|&e| e as i32).collect(), order.iter().map(|&e| scores[e] * scale).collect())
}

/// Checks random tokens against the oracle, and that they have the same bits alone and on every
/// instruction set.
fn check(random: &mut Random, n_experts: usize, has_bias: bool, config: RouterConfig) {
    let (n_tokens, hidden, top_k) = (17, 40, config.top_k);
    let gate = random.values(n_experts * hidden);
    let bias = if has_bias { random.values(n_experts) } else { vec![] };
    let x = random.values(n_tokens * hidden);
    let router = Router::new(&gate, hidden, has_bias.then_some(&bias), config);
    let run = |isa, x: &[f32]| {
        let n_chosen = x.len() / hidden * top_k;
        let (mut ids, mut weights) = (vec![-1; n_chosen], vec![f32::NAN; n_chosen]);
        router.route_on(isa, x, &mut ids, &mut weights);
        (ids, weights)
    };
    let (ids, weights) = run(Isa::detect(), &x);
    for isa in Isa::available() {
        assert_eq!(run(isa, &x), (ids.clone(), weights.clone()), "{isa:?}");
    }
    for (token, x) in x.chunks_exact(hidden).enumerate() {
        let picked = token * top_k..(token + 1) * top_k;
        let logits: Vec<f64> = gate
            .chunks_exact(hidden)
            .map(|w| w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum())
            .collect();
        let (oracle_ids, oracle_weights) = oracle(&logits, &bias, &config);
        assert_eq!(ids[picked.clone()], oracle_ids, "{config:?}");
        assert_close(&weights[picked.clone()], &oracle_weights, 1e-5);
        let alone = run(Isa::detect(), x);
        assert_eq!((&ids[picked.clone()], &weights[picked]), (&alone.0[..], &alone.1[..]));
    }
}

#[test]
fn agrees_with_an_f64_oracle_and_does_not_depend_on_the_batch() {
    let mut random = Random::new(1);
    for (n_experts, n_group, topk_group, top_k) in
        [(16, 1, 1, 4), (16, 4, 2, 4), (256, 8, 4, 8), (12, 12, 5, 3)]
    {
        for (scoring, choice) in [
            (RouterScoring::Sigmoid, ExpertChoice::NoauxTc),
            (RouterScoring::Sigmoid, ExpertChoice::Greedy),
            (RouterScoring::Softmax, ExpertChoice::NoauxTc),
            (RouterScoring::Softmax, ExpertChoice::Greedy),
            (RouterScoring::Softmax, ExpertChoice::GroupLimitedGreedy),
        ] {
            for norm_topk_prob in [false, true] {
                let config = RouterConfig {
                    scoring,
                    choice,
                    n_group,
                    topk_group,
                    top_k,
                    norm_topk_prob,
                    routed_scaling_factor: 1.8,
                };
                check(&mut random, n_experts, choice == ExpertChoice::NoauxTc, config);
            }
        }
    }
}
