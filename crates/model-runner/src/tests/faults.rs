//! Rows that alone have no token, and samplers that cannot be honoured.

use std::sync::Arc;

use engine_types::{
    BlockId, ExecutorError, RequestId, RowSpec, Sampler, SamplerSetup, SamplingParams,
    StepExecutor, StepOutcome, StepPlan, TokenId,
};

use tch::Tensor;

use super::driver::{Feed, Job, run};
use super::sampling::{MODELS, WHOLE};
use super::{PROMPT, WHOLE_PROMPT, options, oracle, runner, runner_of};
use crate::runner::Runner;

fn sampler(params: SamplingParams) -> Arc<Sampler> {
    let n_prompt = PROMPT.len() as u32;
    Arc::new(Sampler { params, seed: 4, n_prompt, end_token_ids: vec![] })
}

fn sampled() -> SamplingParams {
    SamplingParams { temperature: 0.9, logprobs: Some(1), ..SamplingParams::default() }
}

/// Three requests in the second step behind [`PROMPT`]: what each was told, and what became of it.
/// What the last layer of the target keeps of the first prompt token of request `poisoned` turns to
/// NaN in between. (In an earlier layer the NaN would reach index keys, which refuse the step.)
fn second_step(
    model: &str,
    samplers: [Option<Arc<Sampler>>; 3],
    poisoned: Option<u32>,
) -> StepOutcome {
    let mut runner = runner_of(model, &options(3));
    let (mut plan, mut outcome) = (StepPlan::default(), StepOutcome::default());
    for (slot, sampler) in (0..).zip(&samplers) {
        let spec = RowSpec { has_sampler: sampler.is_some(), ..WHOLE_PROMPT };
        if let Some(sampler) = sampler.clone() {
            plan.push_sampler(SamplerSetup { slot, sampler, tokens: PROMPT.to_vec() });
        }
        let table = plan.update_table(slot, 0, &[BlockId(slot)]);
        plan.push_row(RequestId(u64::from(slot)), spec, &PROMPT, &[], table);
    }
    runner.execute(&plan, &mut outcome).unwrap();
    if let Some(slot) = poisoned {
        let last = &runner.kv_cache().layers()[4];
        let slot = Tensor::from_slice(&[i64::from(slot) * 16]);
        let latent = last.tensors().next().unwrap();
        let _ = latent.shallow_clone().index_fill_(0, &slot, f64::NAN);
    }
    plan.clear();
    for (slot, sampler) in (0..).zip(&samplers) {
        let row = outcome.row(RequestId(u64::from(slot))).unwrap();
        let window = [outcome.tokens(row), outcome.drafts(row)].concat();
        let spec = RowSpec {
            n_computed: PROMPT.len() as u32,
            n_draft: 3,
            prefill: false,
            has_sampler: sampler.is_some(),
            ..WHOLE_PROMPT
        };
        let table = plan.update_table(slot, 1, &[BlockId(slot + 10)]);
        plan.push_row(RequestId(u64::from(slot)), spec, &window, &[], table);
    }
    runner.execute(&plan, &mut outcome).unwrap();
    outcome
}

/// NaN in one request's KV is its own fault, whoever runs beside it: nobody else's tokens, drafts
/// or log probabilities change, and nothing is drafted for it.
#[test]
fn a_request_with_nan_logits_fails_alone() {
    for model in MODELS {
        let plain = || [None, None, None];
        let mixed = || [None, Some(sampler(sampled())), Some(sampler(sampled()))];
        for samplers in [plain, mixed] as [fn() -> _; 2] {
            let good = second_step(model, samplers(), None);
            for poisoned in 0..3 {
                let found = second_step(model, samplers(), Some(poisoned));
                for (idx, (row, expected)) in found.rows().iter().zip(good.rows()).enumerate() {
                    if idx == poisoned as usize {
                        assert_eq!(found.failure(row), Some("the model's logits hold a NaN"));
                        assert!(found.tokens(row).is_empty() && found.drafts(row).is_empty());
                        continue;
                    }
                    assert_eq!(found.failure(row), None);
                    assert_eq!(found.tokens(row), good.tokens(expected), "{model}");
                    assert_eq!(found.drafts(row), good.drafts(expected), "{model}");
                    assert_eq!(found.logprobs(row), good.logprobs(expected), "{model}");
                }
            }
        }
    }
}

/// In both modes; the row behind the failed one that is in flight already is left out.
#[test]
fn a_request_without_a_token_fails_alone() {
    let cases = oracle::cases("tiny-glm52");
    let nothing = |temperature| SamplingParams {
        temperature,
        seed: Some(1),
        prompt_logprobs: Some(0),
        allowed_token_ids: Some(vec![7, 8]),
        bad_words: vec![vec![7], vec![8]],
        ..SamplingParams::default()
    };
    let other = SamplingParams { seed: Some(2), ..sampled() };
    for (n_drafts, deferred) in [(0, false), (3, false), (3, true)] {
        let job = |idx: usize| Job::new(&cases[idx].0, 12, n_drafts);
        let mut runner = runner_of("tiny-glm52", &options(n_drafts as u32));
        let feed = Feed { deferred, ..WHOLE };
        let expected = run(&mut runner, vec![job(1).sampled(other.clone(), &[]), job(3)], feed);
        let jobs = vec![
            job(0).sampled(nothing(0.0), &[]),
            job(1).sampled(other.clone(), &[]),
            job(2).sampled(nothing(1.0), &[]),
            job(3),
        ];
        let done = run(&mut runner, jobs, feed);
        for failed in [&done[0], &done[2]] {
            let text = failed.failure.as_deref().unwrap();
            let names = "no token is left that may be chosen, after bad_words, allowed_token_ids";
            assert!(text.starts_with(names) && failed.generated().is_empty(), "{text}");
        }
        for (found, expected) in [&done[1], &done[3]].into_iter().zip(&expected) {
            assert_eq!(found.generated(), expected.generated());
            assert_eq!((&found.failure, &found.logprobs), (&None, &expected.logprobs));
        }
    }
}

/// Executes a step of a prompt whose setup is `setup`, if any.
fn refusal(runner: &mut Runner, setup: Option<(SamplingParams, &[TokenId])>) -> String {
    let mut plan = StepPlan::default();
    if let Some((params, tokens)) = setup {
        let (sampler, tokens) = (sampler(params), tokens.to_vec());
        plan.push_sampler(SamplerSetup { slot: 2, sampler, tokens });
    }
    let spec = RowSpec { has_sampler: true, ..WHOLE_PROMPT };
    let table = plan.update_table(2, 0, &[BlockId(0)]);
    plan.push_row(RequestId(3), spec, &PROMPT, &[], table);
    match runner.execute(&plan, &mut StepOutcome::default()) {
        Err(ExecutorError::Step(text)) => text,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn samplers_that_break_the_contract_are_refused() {
    let mut runner = runner(&options(3));
    let text = refusal(&mut runner, None);
    assert!(text.contains("request 3: block table 2 has no sampler"), "{text}");
    let text = refusal(&mut runner, Some((sampled(), &PROMPT[..8])));
    assert!(text.contains("block table 2: 8 tokens, 9 of the prompt"), "{text}");
    let longer = [&PROMPT[..], &[5]].concat();
    let text = refusal(&mut runner, Some((sampled(), &longer)));
    assert!(text.contains("request 3: the row ends at position 9, its sampler at 10"), "{text}");
    let params = SamplingParams { top_p: 0.0, ..sampled() };
    let text = refusal(&mut runner, Some((params, &PROMPT)));
    assert!(text.contains("block table 2: top_p is 0, outside (0, 1]"), "{text}");
    let params = SamplingParams { prompt_logprobs: Some(21), ..sampled() };
    let text = refusal(&mut runner, Some((params, &PROMPT)));
    assert!(text.contains("prompt_logprobs is 21, the limit is 20"), "{text}");
    // The one before it in the table is gone as well.
    let text = refusal(&mut runner, None);
    assert!(text.contains("request 3: block table 2 has no sampler"), "{text}");
}

#[test]
fn masks_of_another_length_are_refused() {
    let mut runner = runner(&options(3));
    let mut plan = StepPlan::default();
    let table = plan.update_table(0, 0, &[BlockId(0)]);
    plan.push_row(RequestId(3), WHOLE_PROMPT, &PROMPT, &[], table);
    plan.mask_last_row(&[u32::MAX; 127]);
    let error = runner.execute(&plan, &mut StepOutcome::default()).unwrap_err().to_string();
    assert!(error.contains("request 3: 127 words of masks, the row needs 128"), "{error}");
}
