//! Requests whose tokens are not plainly greedy, in whole steps on the bundled checkpoints.

use engine_types::{SamplingParams, TokenId};

use super::driver::{Feed, Job, run};
use super::{options, oracle, runner_of};
use crate::limits::{DraftSampling, RunnerOptions};
use crate::runner::Runner;

pub(super) const MODELS: [&str; 2] = ["tiny-dsv3", "tiny-glm52"];

pub(super) const WHOLE: Feed = Feed { chunk: 4096, poison: false, deferred: false };

const N_TOKENS: usize = 24;

/// Everything that a request can ask for, the plainly greedy ones `None`.
fn wishes() -> Vec<Option<SamplingParams>> {
    let base = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let wishes = [
        base.clone(),
        SamplingParams { top_k: 20, ..base.clone() },
        SamplingParams { temperature: 1.0, top_p: 0.9, ..base.clone() },
        SamplingParams { min_p: 0.05, frequency_penalty: 0.5, ..base.clone() },
        SamplingParams { repetition_penalty: 1.3, presence_penalty: 0.4, ..base.clone() },
        SamplingParams { logit_bias: vec![(856, 3.0)], min_tokens: 6, ..base.clone() },
        SamplingParams { temperature: 0.0, frequency_penalty: 0.5, ..base.clone() },
        SamplingParams { temperature: 0.0, bad_words: vec![vec![330]], ..base },
    ];
    let seeded = (5..)
        .zip(wishes)
        .map(|(seed, wish)| Some(SamplingParams { seed: Some(seed), logprobs: Some(2), ..wish }));
    seeded.flat_map(|wish| [wish, None]).collect()
}

/// One job for each wish, behind the prompts of the reference.
fn jobs(model: &'static str, n_drafts: usize) -> Vec<Job> {
    let cases = oracle::cases(model);
    let of_case = |(wish, (prompt, _)): (Option<SamplingParams>, &(Vec<TokenId>, _))| {
        let job = Job::new(prompt, N_TOKENS, n_drafts);
        wish.into_iter().fold(job, |job, params| job.sampled(params, &[2, 596]))
    };
    wishes().into_iter().zip(cases.iter().cycle()).map(of_case).collect()
}

fn runner(model: &'static str, n_drafts: usize, draft_sampling: DraftSampling) -> Runner {
    let options = options(u32::try_from(n_drafts).unwrap());
    runner_of(model, &RunnerOptions { draft_sampling, ..options })
}

fn check_equal(found: &[Job], expected: &[Job], what: &str) {
    for (idx, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.generated(), expected.generated(), "tokens of job {idx}: {what}");
        assert_eq!(found.proposed, expected.proposed, "drafts of job {idx}: {what}");
        assert_eq!(found.logprobs, expected.logprobs, "log probabilities of job {idx}: {what}");
    }
}

/// The same seed gives the same tokens, drafts and bits of log probabilities: on another run, alone
/// or in any batch, in chunks and in deferred mode \[INV-11].
#[test]
fn seeded_requests_do_not_depend_on_how_they_run() {
    for model in MODELS {
        let settings =
            [(0, DraftSampling::Greedy), (3, DraftSampling::Greedy), (3, DraftSampling::Sampled)];
        for (n_drafts, sampling) in settings {
            let what = format!("{model} with {n_drafts} drafts, {sampling:?}");
            let mut runner = runner(model, n_drafts, sampling);
            let together = run(&mut runner, jobs(model, n_drafts), WHOLE);
            assert!(together.iter().all(|job| job.generated().len() == N_TOKENS), "{what}");
            for (how, feed) in [
                ("again", WHOLE),
                ("chunks", Feed { chunk: 7, ..WHOLE }),
                ("deferred", Feed { deferred: true, chunk: 64, ..WHOLE }),
            ] {
                let other = run(&mut runner, jobs(model, n_drafts), feed);
                check_equal(&other, &together, &format!("{what}, {how}"));
            }
            for (idx, job) in jobs(model, n_drafts).into_iter().enumerate().step_by(2) {
                let alone = run(&mut runner, vec![job], WHOLE);
                check_equal(&alone, &together[idx..=idx], &format!("{what}, {idx} alone"));
            }
        }
    }
}

/// Whether they have sampled requests beside them or not, greedy ones have the reference's tokens.
#[test]
fn greedy_requests_beside_sampled_ones_keep_their_tokens_and_drafts() {
    for model in MODELS {
        for sampling in [DraftSampling::Greedy, DraftSampling::Sampled] {
            let mut runner = runner(model, 3, sampling);
            let mixed = run(&mut runner, jobs(model, 3), WHOLE);
            let (plain, mixed): (Vec<Job>, Vec<Job>) =
                jobs(model, 3).into_iter().zip(mixed).filter(|(job, _)| job.is_plain()).unzip();
            assert_eq!(plain.len(), 8);
            check_equal(&mixed, &run(&mut runner, plain, WHOLE), model);
            let cases = oracle::cases(model);
            let greedy = cases.iter().cycle().skip(1).step_by(2);
            for (job, (_, greedy)) in mixed.iter().zip(greedy) {
                let n_known = greedy.len().min(N_TOKENS);
                assert_eq!(job.generated()[..n_known], greedy[..n_known], "{model}");
            }
        }
    }
}

/// Another seed gives other tokens; otherwise the tests of seeds would show nothing.
#[test]
fn seeds_and_temperatures_matter() {
    let mut runner = runner("tiny-glm52", 3, DraftSampling::Greedy);
    let prompt = &oracle::cases("tiny-glm52")[0].0;
    let job = |seed, temperature| {
        let seed = Some(seed);
        let params = SamplingParams { temperature, seed, ..SamplingParams::default() };
        Job::new(prompt, N_TOKENS, 3).sampled(params, &[])
    };
    let done = run(&mut runner, vec![job(1, 0.8), job(2, 0.8), job(1, 2.0)], WHOLE);
    assert_ne!(done[0].generated(), done[1].generated());
    assert_ne!(done[0].generated(), done[2].generated());
}

/// A request that comes back after a preemption goes on as if nothing had happened: its tokens
/// are set up again, and so counted as generated.
#[test]
fn requests_that_were_preempted_go_on() {
    for model in MODELS {
        let mut runner = runner(model, 0, DraftSampling::Greedy);
        let whole = run(&mut runner, jobs(model, 0), WHOLE);
        let mut halves = jobs(model, 0);
        halves.iter_mut().for_each(|job| *job = job.resumed(7));
        let halves = run(&mut runner, halves, WHOLE);
        // Each comes back to another table than it had, which somebody else has used.
        let back: Vec<Job> = halves.iter().rev().map(|job| job.resumed(N_TOKENS)).collect();
        let back = run(&mut runner, back, Feed { chunk: 50, ..WHOLE });
        for (found, expected) in back.iter().rev().zip(&whole) {
            assert_eq!(found.generated(), expected.generated(), "{model}");
            assert!(expected.logprobs.ends_with(&found.logprobs), "{model}");
            assert_eq!(found.logprobs.is_empty(), expected.is_plain());
        }
    }
}

/// With drafts as well, for choices that have no noise; the first step after the preemption has
/// none to verify.
#[test]
fn preempted_requests_with_penalties_go_on_with_drafts() {
    for model in MODELS {
        let mut runner = runner(model, 3, DraftSampling::Sampled);
        let whole = run(&mut runner, penalised(model, 3), WHOLE);
        let halves = penalised(model, 3).iter().map(|job| job.resumed(7)).collect();
        let halves = run(&mut runner, halves, WHOLE);
        let back = halves.iter().map(|job| job.resumed(N_TOKENS)).collect();
        for (found, expected) in run(&mut runner, back, WHOLE).iter().zip(&whole) {
            assert_eq!(found.generated(), expected.generated(), "{model}");
        }
    }
}

/// Greedy jobs with everything that looks at the tokens before.
fn penalised(model: &'static str, n_drafts: usize) -> Vec<Job> {
    let base = SamplingParams { seed: Some(0), logprobs: Some(3), ..SamplingParams::default() };
    let wishes = [
        base.clone(),
        SamplingParams { frequency_penalty: 0.7, ..base.clone() },
        SamplingParams { presence_penalty: 1.5, ..base.clone() },
        SamplingParams { repetition_penalty: 1.4, ..base.clone() },
        SamplingParams { min_tokens: 20, ..base.clone() },
        SamplingParams { bad_words: vec![vec![330, 596], vec![11]], ..base },
    ];
    let cases = oracle::cases(model);
    let job = |(idx, (prompt, greedy)): (usize, &(Vec<TokenId>, Vec<TokenId>))| {
        // What the model would say at once, and cannot before it has said enough.
        let end_ids = [greedy[0], greedy[1]];
        Job::new(prompt, N_TOKENS, n_drafts).sampled(wishes[idx % 6].clone(), &end_ids)
    };
    cases.iter().enumerate().map(job).collect()
}

/// Fault cases L03 and L05: what looks at the tokens before counts the drafts of a window, and each
/// token has its own row's log probabilities.
#[test]
fn penalties_and_logprobs_with_drafts_equal_those_without() {
    for model in MODELS {
        let [undrafted, drafted] = [0, 3].map(|n_drafts| {
            let mut runner = runner(model, n_drafts, DraftSampling::Greedy);
            run(&mut runner, penalised(model, n_drafts), WHOLE)
        });
        let n_accepted: u32 = drafted.iter().flat_map(|job| &job.accepted).sum();
        assert!(n_accepted > 50, "{model}: {n_accepted} accepted drafts show something");
        let cases = oracle::cases(model);
        let mut n_changed = 0;
        for (idx, (expected, found)) in undrafted.iter().zip(&drafted).enumerate() {
            assert_eq!(found.generated(), expected.generated(), "job {idx} of {model}");
            n_changed += usize::from(!cases[idx].1.starts_with(found.generated()));
            let pairs = [found, expected].map(|job| &job.logprobs);
            assert!(pairs.iter().all(|entries| entries.len() == N_TOKENS), "job {idx} of {model}");
            for (found, expected) in pairs[0].iter().zip(pairs[1]) {
                assert!((found.logprob - expected.logprob).abs() < 1e-4);
                let ids = [found, expected].map(|e| e.top.iter().map(|t| t.0).collect::<Vec<_>>());
                assert_eq!((ids[0].len(), &ids[0]), (3, &ids[1]));
            }
            if idx % 6 == 0 {
                let is_likeliest = |(entry, id): (&engine_types::TokenLogprobs, &TokenId)| {
                    entry.top[0] == (*id, entry.logprob)
                };
                assert!(found.logprobs.iter().zip(found.generated()).all(is_likeliest));
            }
        }
        assert!(n_changed >= 5, "{model}: the wishes change the tokens of {n_changed} jobs");
    }
}

/// Fault case L05: the prompt's log probabilities are those of a plain pass, bit for bit, whatever
/// the chunks, the drafts and the mode, beside requests that want none.
#[test]
fn prompt_logprobs_equal_those_of_a_plain_pass() {
    for model in MODELS {
        let prompts: Vec<Vec<TokenId>> =
            oracle::cases(model).into_iter().map(|(prompt, _)| prompt).take(8).collect();
        let mut scorer = runner(model, 0, DraftSampling::Greedy);
        let expected: Vec<Vec<f32>> =
            prompts.iter().map(|prompt| scorer.prompt_logprobs(prompt, 4096).unwrap()).collect();
        for (n_drafts, chunk, deferred) in
            [(0, 4096, false), (3, 4, false), (3, 13, true), (3, 4096, true)]
        {
            let wish = |idx: usize| {
                let prompt_logprobs = Some(idx as u32 % 3).filter(|_| idx % 4 != 1);
                let temperature = (idx % 2) as f32;
                let seed = Some(1);
                SamplingParams { prompt_logprobs, temperature, seed, ..Default::default() }
            };
            let jobs = prompts.iter().enumerate().map(|(idx, prompt)| {
                Job::new(&prompt[..], 1 + 5 * (idx % 2), n_drafts).sampled(wish(idx), &[])
            });
            let mut runner = runner(model, n_drafts, DraftSampling::Greedy);
            let feed = Feed { chunk, deferred, ..WHOLE };
            let done = run(&mut runner, jobs.collect(), feed);
            for (idx, (job, expected)) in done.iter().zip(&expected).enumerate() {
                let found: Vec<f32> = job.prompt_logprobs.iter().map(|e| e.logprob).collect();
                let what = format!("prompt {idx} of {model}, {n_drafts} drafts, chunks of {chunk}");
                if idx % 4 == 1 {
                    assert!(found.is_empty(), "{what}");
                    continue;
                }
                assert_eq!(&found, expected, "{what}");
                let n_top = job.prompt_logprobs.iter().map(|entry| entry.top.len());
                assert!(n_top.into_iter().all(|n| n == idx % 3), "{what}");
            }
        }
    }
}

/// A grammar's masks hold for every choice of a window, greedy or sampled, with and without a
/// sampler beside.
#[test]
fn masked_choices_stay_within_their_masks() {
    for model in MODELS {
        let [undrafted, drafted] = [0, 3].map(|n_drafts| {
            let params = SamplingParams { temperature: 1.0, seed: Some(3), ..Default::default() };
            let prompt = &oracle::cases(model)[0].0;
            let plain = Job::new(prompt, N_TOKENS, n_drafts);
            let mut jobs = vec![plain.clone().sampled(params, &[]), plain.clone(), plain];
            // Ids with an odd bit count in their low five bits.
            let word =
                (0..32u32).filter(|bit| bit.count_ones() % 2 == 1).fold(0, |w, b| w | 1 << b);
            jobs[..2].iter_mut().for_each(|job| job.mask = vec![word; 4096 / 32]);
            run(&mut runner(model, n_drafts, DraftSampling::Greedy), jobs, WHOLE)
        });
        for job in undrafted[..2].iter().chain(&drafted[..2]) {
            let is_allowed = |id: &TokenId| (id % 32).count_ones() % 2 == 1;
            assert!(job.generated().iter().all(is_allowed), "{model}: {:?}", job.generated());
        }
        assert_eq!(drafted[1].generated(), undrafted[1].generated(), "{model}");
        assert_eq!(drafted[2].generated(), undrafted[2].generated(), "{model}");
        assert_ne!(drafted[1].generated(), drafted[2].generated(), "the masks matter");
    }
}
