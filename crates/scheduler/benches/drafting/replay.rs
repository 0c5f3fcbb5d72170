//! What a policy makes of texts of which is known how many drafts would be right at each token.

use scheduler::{Acceptance, DraftPolicy, DraftingCosts};

/// Largest number of drafts.
pub(crate) const K_MAX: u32 = 8;

/// Texts; each has, for each token, how many of the eight drafts behind it are right.
pub(crate) struct Workload {
    /// What it is.
    pub(crate) name: &'static str,
    texts: Vec<Vec<u32>>,
}

/// The workloads. The first two are measured: outputs of tiny-glm52 in bfloat16, greedy, 160
/// tokens each, behind 16 prompts of 32 and of 512 tokens of Python code.
pub(crate) fn workloads() -> Vec<Workload> {
    let lines = include_str!("runs.txt").lines();
    let text = |line: &str| line.chars().map(|c| c.to_digit(9).expect("0 to 8")).collect();
    let mut short: Vec<Vec<u32>> = lines.map(text).collect();
    let long = short.split_off(16);
    let random = |name, percent: fn(usize) -> u32| Workload { name, texts: random(percent) };
    vec![
        Workload { name: "measured, short prompts", texts: short },
        Workload { name: "measured, long prompts", texts: long },
        random("95 %", |_| 95),
        random("80 %", |_| 80),
        random("50 %", |_| 50),
        random("10 %", |_| 10),
        random("0 %", |_| 0),
        random("95 % and 20 %, by turns of 100 tokens", |idx| [95, 20][idx / 100 % 2]),
        random("20 %, from token 500 on 95 %", |idx| [20, 95][idx / 500]),
    ]
}

/// Texts whose drafts at token `idx` are right with `percent(idx)` each, if those before it are.
fn random(percent: fn(usize) -> u32) -> Vec<Vec<u32>> {
    let mut state: u64 = 1;
    let mut is_right = |percent: u32| {
        // Knuth's linear congruential generator, whose high bits are good.
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % 100 < u64::from(percent)
    };
    let mut run = |idx| (0..K_MAX).take_while(|_| is_right(percent(idx))).count() as u32;
    (0..16).map(|_| (0..1000).map(&mut run).collect()).collect()
}

/// What a replay came to.
pub(crate) struct Replay {
    /// Tokens by cost.
    pub(crate) rate: f64,
    /// Drafts a step.
    pub(crate) mean_length: f64,
}

/// Generates every text of the workload, each in a batch of `n_requests` like it.
pub(crate) fn replay(
    workload: &Workload,
    policy: &DraftPolicy,
    k_max: u32,
    costs: &DraftingCosts,
    n_requests: u32,
) -> Replay {
    let cost_of = |once: u32, each: u32| f64::from(once) + f64::from(n_requests * each);
    let (mut n_tokens, mut n_steps, mut n_drafts) = (0, 0, 0);
    for text in &workload.texts {
        let (mut idx, mut acceptance) = (0, Acceptance::default());
        while let Some(&run) = text.get(idx) {
            let length = policy.draft_length(k_max, &acceptance, n_requests);
            let n_accepted = run.min(length);
            acceptance.record(length, n_accepted);
            idx += 1 + n_accepted as usize;
            n_tokens += 1 + n_accepted;
            n_steps += 1;
            n_drafts += length;
        }
    }
    let cost = f64::from(n_steps) * cost_of(costs.step, costs.request)
        + f64::from(n_drafts) * cost_of(costs.draft_step, costs.draft);
    Replay {
        rate: f64::from(n_tokens) * f64::from(n_requests) / cost,
        mean_length: f64::from(n_drafts) / f64::from(n_steps),
    }
}

/// The fixed length with the best rate in hindsight, and that rate.
pub(crate) fn best_fixed(
    workload: &Workload,
    costs: &DraftingCosts,
    n_requests: u32,
) -> (u32, f64) {
    let rate = |k| replay(workload, &DraftPolicy::Fixed, k, costs, n_requests).rate;
    let lengths = (0..=K_MAX).map(|k| (k, rate(k)));
    lengths.max_by(|a, b| a.1.total_cmp(&b.1)).expect("there are lengths")
}
