//! The tokens of a seeded request follow from its seed, prompt and parameters alone: no number of
//! drafts and no way of scheduling changes them.

use engine_types::{OutputMode, SamplingParams, TokenId};
use integration_tests::harness;
use integration_tests::oracle::Checkpoint;
use model_runner::{KvInit, RunnerOptions};
use models::ComputeDtype;
use scheduler::{DraftPolicy, SchedulerConfig};

/// Short requests with all kinds of parameters, each with a seed.
fn asks(checkpoint: Checkpoint) -> Vec<(Vec<TokenId>, SamplingParams)> {
    let cases = checkpoint.cases().unwrap();
    let kinds = [
        SamplingParams { temperature: 1.0, ..SamplingParams::default() },
        SamplingParams { temperature: 0.8, top_p: 0.9, ..SamplingParams::default() },
        SamplingParams { temperature: 1.2, top_k: 20, min_p: 0.05, ..SamplingParams::default() },
        SamplingParams { temperature: 0.7, frequency_penalty: 0.5, ..SamplingParams::default() },
    ];
    let ask = |idx: usize| {
        let seed = Some(100 + idx as u64);
        let params = SamplingParams { max_tokens: 40, seed, ..kinds[idx % kinds.len()].clone() };
        (cases[idx % 12].prompt_ids.clone(), params)
    };
    (0..24).map(ask).collect()
}

on_both!(no_draft_and_no_schedule_changes_a_seeded_text);

fn no_draft_and_no_schedule_changes_a_seeded_text(checkpoint: Checkpoint) {
    let asks = asks(checkpoint);
    let longest = asks.iter().map(|(prompt, _)| prompt.len() + 40).max().unwrap();
    let tight = u32::try_from(longest.div_ceil(4) + 8).unwrap();
    let run = |k, num_blocks, adapt: fn(&mut SchedulerConfig)| {
        let options = RunnerOptions {
            num_speculative_tokens: k,
            kv_init: KvInit::Nan,
            block_size: 4,
            num_blocks: Some(num_blocks),
            ..RunnerOptions::default()
        };
        let mut config = harness::scheduler_config(checkpoint, &options).unwrap();
        adapt(&mut config);
        let dtype = ComputeDtype::Float32;
        let (engine, thread, _records) =
            harness::start_scheduled(checkpoint, &options, config, dtype).unwrap();
        let requests = asks.iter().map(|(prompt, params)| (&prompt[..], params.clone()));
        let done = harness::generate(&engine, requests).unwrap();
        thread.drain();
        let texts: Vec<_> = done.into_iter().map(|done| done.token_ids).collect();
        (texts, engine.stats().scheduler)
    };
    let (alone, _) = run(0, 4096, |config| config.max_num_seqs = 1);
    for k in [0, 1, 3, 8] {
        let (together, stats) = run(k, 4096, |_| ());
        assert_eq!(together, alone, "k = {k}");
        assert_eq!(stats.spec_decode.n_accepted_tokens > 0, k > 0, "{stats:?}");
        let (adaptive, _) = run(k, 4096, |config| {
            config.drafting = DraftPolicy::default();
            config.output_mode = OutputMode::Deferred;
            config.enable_prefix_caching = true;
        });
        assert_eq!(adaptive, alone, "k = {k}, adaptive and deferred");
        let (preempted, stats) = run(k, tight, |config| config.max_num_batched_tokens = 64);
        assert_eq!(preempted, alone, "k = {k}, {tight} blocks");
        assert!(stats.n_preemptions > 0, "{stats:?}");
    }
}
