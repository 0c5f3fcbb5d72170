//! Outputs keep to their grammar, with drafts and without.

use engine_types::OutputMode;
use integration_tests::constrained::Constrained;
use integration_tests::harness;
use integration_tests::oracle::Checkpoint;
use model_runner::RunnerOptions;
use models::ComputeDtype;
use scheduler::SchedulerConfig;

on_both!(outputs_keep_to_their_grammar);

/// Greedy outputs are the same for every number of drafts and in both output modes; sampled ones
/// are valid.
fn outputs_keep_to_their_grammar(checkpoint: Checkpoint) {
    const N_REQUESTS: usize = 24;
    let constrained = Constrained::new(checkpoint).unwrap();
    let cases = checkpoint.cases().unwrap();
    let mut greedy: Vec<Vec<String>> = vec![];
    for (k, output_mode) in
        [(0, OutputMode::Immediate), (3, OutputMode::Immediate), (3, OutputMode::Deferred)]
    {
        let options = RunnerOptions { num_speculative_tokens: k, ..RunnerOptions::default() };
        let config = harness::scheduler_config(checkpoint, &options).unwrap();
        let config = SchedulerConfig { output_mode, ..config };
        let (engine, _thread, _records) =
            harness::start_scheduled(checkpoint, &options, config, ComputeDtype::Float32).unwrap();
        let submit = |idx: usize| {
            let seed = (idx / Constrained::N % 2 == 1).then_some(idx as u64);
            constrained.submit(&engine, &cases[idx % 8].prompt_ids, idx, seed).unwrap()
        };
        let running: Vec<_> = (0..N_REQUESTS).map(submit).collect();
        let texts = running.into_iter().enumerate().map(|(idx, events)| {
            let done = harness::collect(events).unwrap();
            constrained.check(idx, &done).unwrap()
        });
        let texts: Vec<String> = texts.collect();
        let is_greedy = |idx: &usize| (idx / Constrained::N).is_multiple_of(2);
        greedy.push((0..N_REQUESTS).filter(is_greedy).map(|idx| texts[idx].clone()).collect());
    }
    assert_eq!(greedy[0], greedy[1], "drafts change no text");
    assert_eq!(greedy[0], greedy[2], "deferred");
}
