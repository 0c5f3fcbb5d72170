//! The router, against that of the CPU kernels.

use anyhow::Result;
use gpu_kernels::{RouterScratch, RouterWeights, RoutingMut};
use model_config::{ExpertChoice, MoeConfig, RouterScoring};

use crate::layers::{Device, Sizes, noise};
use crate::report::{Case, Checked, Output, Report, row_noise};

pub(crate) fn check<E: Checked>(
    report: &mut Report,
    device: &Device<E>,
    sizes: &Sizes,
) -> Result<()> {
    let (own, n_group) = (sizes.moe(), 8);
    let softmax = MoeConfig { scoring: RouterScoring::Softmax, ..own.clone() };
    let greedy =
        MoeConfig { choice: ExpertChoice::Greedy, norm_topk_prob: false, ..softmax.clone() };
    let choice = ExpertChoice::GroupLimitedGreedy;
    let limited = MoeConfig { choice, n_group, topk_group: 4, ..softmax };
    let two_best = MoeConfig { n_group, topk_group: 5, ..own.clone() };
    for (config, name) in [
        (own, "route"),
        (greedy, "route (greedy)"),
        (limited, "route (best groups)"),
        (two_best, "route (two best)"),
    ] {
        check_config(report, device, (sizes.hidden, false), (&config, name))?;
    }
    // Neither rows nor experts nor inputs fill the last tile, and weights need all their bits.
    let wide = MoeConfig { n_routed_experts: 200, n_group: 1, topk_group: 1, ..sizes.moe() };
    check_config(report, device, (2056, true), (&wide, "route (200 experts)"))?;
    let narrow = MoeConfig { n_routed_experts: 9, n_group: 1, topk_group: 1, ..sizes.moe() };
    check_config(report, device, (24, true), (&narrow, "route (9 experts)"))
}

/// Every second row is of -1, 0 and 1 and the gate of multiples of 1/64: its logits are exact in
/// any order, and many are equal.
fn row_of<E: Checked>(row: usize, hidden: usize) -> Vec<E> {
    let values = row_noise::<E>(20, row, hidden);
    let coarse = |x: &E| E::of((x.value() * 0.75).round());
    if row.is_multiple_of(2) { values.iter().map(coarse).collect() } else { values }
}

fn check_config<E: Checked>(
    report: &mut Report,
    device: &Device<E>,
    (hidden, is_dense): (usize, bool),
    (config, name): (&MoeConfig, &'static str),
) -> Result<()> {
    let (n_experts, top_k) = (config.n_routed_experts, config.num_experts_per_tok);
    // Sparse, so that the logits are small and softmax is not of one expert.
    let sparse = |x: f32| if x.abs() > 0.9 { x.signum() / 64.0 } else { 0.0 };
    let weight = |x: f32| if is_dense { x * 0.05 } else { sparse(x) };
    let gate: Vec<f32> =
        noise::<f32>(21, n_experts * hidden, 1.0).into_iter().map(weight).collect();
    let bias: Vec<f32> =
        noise::<f32>(22, n_experts, 4.0).iter().map(|x| x.round() / 64.0).collect();
    let has_bias = config.choice == ExpertChoice::NoauxTc;
    let cpu =
        kernels::Router::new(&gate, hidden, has_bias.then_some(&bias[..]), cpu_config(config));
    let (on_device, bias_on_device) = (device.upload(&gate)?, device.upload(&bias)?);
    let weights = RouterWeights {
        gate: on_device.view(),
        bias: has_bias.then(|| bias_on_device.view()),
        config,
    };
    report.check(
        device,
        &Case {
            name,
            run: &|batch| {
                let n_rows = batch.rows.len();
                let poison = E::of(f32::from_bits(u32::MAX));
                let x = batch.input(hidden, poison, |row| row_of::<E>(row, hidden))?;
                let mut scratch = RouterScratch::new(&device.gpu, n_rows, n_experts)?;
                let mut ids = batch.poisoned::<i32>(n_rows * top_k)?;
                let mut out = batch.poisoned::<f32>(n_rows * top_k)?;
                let routing = RoutingMut { ids: ids.view_mut(), weights: out.view_mut() };
                let (pass, x) = (batch.pass(), x.view());
                device.kernels.route(pass, x, weights, &mut scratch, routing)?;
                Ok(vec![Output::new(batch, &ids, n_rows)?, Output::new(batch, &out, n_rows)?])
            },
            reference: &|row| {
                let x: Vec<f32> = row_of::<E>(row, hidden).iter().map(|x| x.value()).collect();
                let (mut ids, mut weights) = (vec![0; top_k], vec![0.0; top_k]);
                cpu.route(&x, &mut ids, &mut weights);
                let ids = ids.iter().map(|&id| f64::from(id)).collect();
                vec![ids, weights.iter().map(|&weight| f64::from(weight)).collect()]
            },
            tolerance: 1e-5,
        },
    )
}

fn cpu_config(config: &MoeConfig) -> kernels::RouterConfig {
    kernels::RouterConfig {
        scoring: match config.scoring {
            RouterScoring::Sigmoid => kernels::RouterScoring::Sigmoid,
            RouterScoring::Softmax => kernels::RouterScoring::Softmax,
        },
        choice: match config.choice {
            ExpertChoice::NoauxTc => kernels::ExpertChoice::NoauxTc,
            ExpertChoice::Greedy => kernels::ExpertChoice::Greedy,
            ExpertChoice::GroupLimitedGreedy => kernels::ExpertChoice::GroupLimitedGreedy,
        },
        n_group: config.n_group,
        topk_group: config.topk_group,
        top_k: config.num_experts_per_tok,
        norm_topk_prob: config.norm_topk_prob,
        routed_scaling_factor: config.routed_scaling_factor as f32,
    }
}
