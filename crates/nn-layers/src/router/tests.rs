//! Published router faults, ties, and both forms against a double-precision oracle.

use tch::Device;

use super::*;

const BOTH: [Ops; 2] = [Ops::Torch, Ops::Fused];

fn config(n_routed_experts: usize, num_experts_per_tok: usize) -> MoeConfig {
    MoeConfig {
        n_routed_experts,
        num_experts_per_tok,
        n_shared_experts: 0,
        moe_intermediate_size: 1,
        n_group: 1,
        topk_group: 1,
        routed_scaling_factor: 2.5,
        norm_topk_prob: true,
        scoring: RouterScoring::Sigmoid,
        choice: ExpertChoice::NoauxTc,
        first_k_dense_replace: 0,
        moe_layer_freq: 1,
    }
}

/// Routes one row whose logits are `logits`; ids and weights.
fn route(logits: &[f32], bias: &[f32], config: &MoeConfig, ops: Ops) -> (Vec<i64>, Vec<f64>) {
    let gate = Tensor::from_slice(logits).unsqueeze(1);
    let bias = config.has_correction_bias().then(|| Tensor::from_slice(bias));
    let router = Router::new(&gate, bias.as_ref(), config, ops).unwrap();
    let routing = router.forward(&Tensor::ones([1, 1], (Kind::Float, Device::Cpu))).unwrap();
    let ids = Vec::<i64>::try_from(routing.expert_ids.get(0).to_kind(Kind::Int64)).unwrap();
    (ids, Vec::<f64>::try_from(routing.weights.get(0)).unwrap())
}

/// Fault case L26: the correction bias chooses and does not weigh.
#[test]
fn the_bias_does_not_leak_into_weights() {
    for ops in BOTH {
        for (norm_topk_prob, expected) in [(true, [0.5848, 1.9152]), (false, [0.6724, 2.2020])] {
            let config = MoeConfig { norm_topk_prob, ..config(4, 2) };
            let (ids, weights) = route(&[2.0, 1.0, 0.0, -1.0], &[0.0, 0.0, 0.0, 1.5], &config, ops);
            assert_eq!(ids, [3, 0], "{ops:?}");
            for (found, expected) in weights.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-4, "{ops:?}: {weights:?}");
            }
        }
    }
}

/// Fault case L26: 4.001 and 4.002 are one number in bfloat16.
#[test]
fn scores_and_bias_stay_float32() {
    for ops in BOTH {
        let (ids, _) = route(&[0.5, 0.5], &[4.001, 4.002], &config(2, 1), ops);
        assert_eq!(ids, [1], "{ops:?}");
        let gate = Tensor::zeros([2, 1], (Kind::Float, Device::Cpu));
        let rounded = Tensor::from_slice(&[4.001f32, 4.002]).to_kind(Kind::BFloat16);
        let error = Router::new(&gate, Some(&rounded), &config(2, 1), ops).unwrap_err();
        assert!(matches!(error, TensorError::WrongKind { found: Kind::BFloat16, .. }), "{error}");
    }
}

#[test]
fn ties_go_to_the_lowest_id() {
    for ops in BOTH {
        let grouped = MoeConfig { n_group: 4, topk_group: 2, ..config(8, 3) };
        assert_eq!(route(&[0.0; 8], &[0.0; 8], &grouped, ops).0, [0, 1, 2], "{ops:?}");
        let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.1];
        assert_eq!(route(&[0.0; 8], &bias, &grouped, ops).0, [6, 7, 0], "{ops:?}");
    }
}

/// The routers of DeepSeek-V2, whose scores are a softmax and choose alone.
#[test]
fn ties_of_softmax_scores_go_to_the_lowest_id() {
    let softmax = |choice, n_group, topk_group| MoeConfig {
        scoring: RouterScoring::Softmax,
        norm_topk_prob: false,
        choice,
        n_group,
        topk_group,
        ..config(8, 3)
    };
    let tied = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0];
    for ops in BOTH {
        let greedy = softmax(ExpertChoice::Greedy, 1, 1);
        assert_eq!(route(&[0.0; 8], &[], &greedy, ops).0, [0, 1, 2], "{ops:?}");
        assert_eq!(route(&tied, &[], &greedy, ops).0, [0, 3, 5], "{ops:?}");
        // All groups are worth the same, so the first two are kept.
        let grouped = softmax(ExpertChoice::GroupLimitedGreedy, 4, 2);
        let (ids, weights) = route(&tied, &[], &grouped, ops);
        assert_eq!(ids, [0, 3, 1], "{ops:?}");
        // Weights are shares of all experts, the dropped ones included.
        let total = 4.0 * 1f64.exp() + 4.0;
        for (found, logit) in weights.iter().zip([1.0f64, 1.0, 0.0]) {
            let expected = 2.5 * logit.exp() / total;
            assert!((found - expected).abs() < 1e-6, "{ops:?}: {found} is not {expected}");
        }
    }
}

#[test]
fn the_best_expert_of_a_dropped_group_is_not_chosen() {
    for ops in BOTH {
        let config = MoeConfig { n_group: 2, topk_group: 1, ..config(4, 2) };
        // Expert 0 is the best, its group is not: 0.9 + 0.1 against 0.6 + 0.6.
        let bias = [0.4, -0.4, 0.1, 0.1];
        assert_eq!(route(&[0.0; 4], &bias, &config, ops).0, [2, 3], "{ops:?}");
        // Also where all biased scores are negative.
        let bias = [-1.0, -3.0, -1.5, -1.5];
        assert_eq!(route(&[0.0; 4], &bias, &config, ops).0, [2, 3], "{ops:?}");
    }
}

#[test]
fn the_choice_decides_what_a_group_is_worth() {
    // The best expert is in group 0, the best pair in group 1.
    let logits = [2.2, -5.0, 2.0, 2.0];
    for ops in BOTH {
        for (choice, expected) in
            [(ExpertChoice::NoauxTc, [2, 3]), (ExpertChoice::GroupLimitedGreedy, [0, 1])]
        {
            let config = MoeConfig { n_group: 2, topk_group: 1, choice, ..config(4, 2) };
            assert_eq!(route(&logits, &[0.0; 4], &config, ops).0, expected, "{ops:?} {choice:?}");
        }
        let config = MoeConfig { choice: ExpertChoice::Greedy, ..config(4, 2) };
        assert_eq!(route(&logits, &[], &config, ops).0, [0, 2], "{ops:?}");
    }
}

/// Ids and weights of one row by their definition, in double precision.
fn oracle(logits: &[f64], bias: &[f64], config: &MoeConfig) -> (Vec<i64>, Vec<f64>) {
    let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
    let score = |logit: &f64| match config.scoring {
        RouterScoring::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
        RouterScoring::Softmax => logit.exp() / total,
    };
    let scores: Vec<f64> = logits.iter().map(score).collect();
    let biased: Vec<f64> = scores.iter().zip(bias).map(|(score, bias)| score + bias).collect();
    let order = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order
    };
    let group_size = biased.len() / config.n_group;
    let n_best = if config.choice == ExpertChoice::NoauxTc { 2 } else { 1 };
    let group_scores: Vec<f64> = biased
        .chunks(group_size)
        .map(|group| order(group).iter().take(n_best).map(|&i| group[i]).sum())
        .collect();
    let kept = &order(&group_scores)[..config.topk_group];
    let eligible =
        order(&biased).into_iter().filter(|expert| kept.contains(&(expert / group_size)));
    let chosen: Vec<usize> = eligible.take(config.num_experts_per_tok).collect();
    let total: f64 = chosen.iter().map(|&expert| scores[expert]).sum();
    let divisor = if config.norm_topk_prob { total } else { 1.0 };
    let weights = chosen.iter().map(|&e| scores[e] / divisor * config.routed_scaling_factor);
    (chosen.iter().map(|&expert| expert as i64).collect(), weights.collect())
}

/// Checks 200 random rows of both forms.
fn check_random_rows(config: &MoeConfig) {
    let options = (Kind::Float, Device::Cpu);
    // Logits of about one: scores that are all but 1 are equal in single precision.
    let gate = Tensor::randn([16, 24], options) * 0.2;
    let bias = Tensor::randn([16], options) * 0.1;
    let bias = if config.has_correction_bias() { bias } else { bias.zeros_like() };
    let x = Tensor::randn([200, 24], options);
    let logits = x.to_kind(Kind::Double).matmul(&gate.to_kind(Kind::Double).tr());
    let bias64 = Vec::<f64>::try_from(bias.to_kind(Kind::Double)).unwrap();
    let bias = config.has_correction_bias().then_some(&bias);
    for ops in BOTH {
        let routing = Router::new(&gate, bias, config, ops).unwrap().forward(&x).unwrap();
        for row in 0..200 {
            let logits = Vec::<f64>::try_from(logits.get(row)).unwrap();
            let (ids, weights) = oracle(&logits, &bias64, config);
            let found = routing.expert_ids.get(row).to_kind(Kind::Int64);
            assert_eq!(Vec::<i64>::try_from(found).unwrap(), ids, "{ops:?} row {row}");
            let found = Vec::<f64>::try_from(routing.weights.get(row)).unwrap();
            for (found, expected) in found.iter().zip(weights) {
                assert!((found - expected).abs() < 1e-5, "{ops:?} row {row}");
            }
        }
    }
}

#[test]
fn random_rows_agree_with_double_precision() {
    tch::manual_seed(3);
    let grouped = MoeConfig { n_group: 4, topk_group: 2, ..config(16, 4) };
    let plain =
        MoeConfig { scoring: RouterScoring::Softmax, norm_topk_prob: false, ..config(16, 4) };
    check_random_rows(&grouped);
    check_random_rows(&MoeConfig { scoring: RouterScoring::Softmax, ..grouped.clone() });
    check_random_rows(&MoeConfig { choice: ExpertChoice::Greedy, ..plain.clone() });
    for scoring in [RouterScoring::Sigmoid, RouterScoring::Softmax] {
        let choice = ExpertChoice::GroupLimitedGreedy;
        check_random_rows(&MoeConfig {
            n_group: 4,
            topk_group: 2,
            scoring,
            choice,
            ..plain.clone()
        });
    }
}
