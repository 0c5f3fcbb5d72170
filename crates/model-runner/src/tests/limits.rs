//! Memory planning and refusals at construction.

use engine_types::StepExecutor;

use super::{load, options, runner};
use crate::limits::RunnerOptions;
use crate::runner::Runner;

/// KV bytes a token of `tiny-dsv3` in float32: target layers, then the MTP layer.
fn bytes_per_token(drafting: bool) -> u64 {
    let config = load(drafting).config;
    let n_layers = config.num_hidden_layers + usize::from(drafting);
    (n_layers * config.attention.cache_width() * 4) as u64
}

#[test]
fn the_pool_is_what_the_budget_or_the_batch_needs() {
    for (drafts, drafting) in [(0, false), (3, true)] {
        let block_bytes = 16 * bytes_per_token(drafting);
        let kv_cache_bytes = 100 * block_bytes + block_bytes / 2;
        let by_budget = RunnerOptions { num_blocks: None, kv_cache_bytes, ..options(drafts) };
        let runner = runner(&by_budget);
        assert_eq!(runner.limits().num_blocks, 100);
        assert_eq!(runner.kv_cache.n_bytes() as u64, 100 * block_bytes, "{drafts} drafts");

        let max_model_len = Some(33);
        let by_batch = RunnerOptions { max_num_seqs: 2, max_model_len, ..by_budget };
        let limits = super::runner(&by_batch).limits();
        assert_eq!((limits.num_blocks, limits.max_model_len), (6, 33));
        assert_eq!(limits.n_lookahead_max, u32::from(drafting));
        assert_eq!(limits.max_num_speculative_tokens, drafts);
    }
}

#[test]
fn options_outside_their_bounds_are_refused_by_name() {
    let refusal = |options: RunnerOptions| {
        Runner::new(load(false), &options).err().expect("the option is refused").to_string()
    };
    let base = || options(0);
    let table = [
        (RunnerOptions { block_size: 0, ..base() }, "block_size is 0; allowed: at least 1"),
        (RunnerOptions { max_num_seqs: 0, ..base() }, "max_num_seqs is 0; allowed: at least 1"),
        (
            RunnerOptions { max_num_batched_tokens: 0, ..base() },
            "max_num_batched_tokens is 0; allowed: at least 1",
        ),
        (
            RunnerOptions { max_model_len: Some(1 << 30), ..base() },
            "max_model_len is 1073741824; allowed: at most ",
        ),
        (
            RunnerOptions { num_blocks: Some(1 << 30), ..base() },
            "num_blocks is 1073741824; allowed: at most 134217727 with this block size",
        ),
        (options(9), "num_speculative_tokens is 9; allowed: at most 8"),
        (RunnerOptions { num_blocks: None, kv_cache_bytes: 10, ..base() }, "one KV block needs "),
        (
            options(2),
            "num_speculative_tokens is 2, but the model has no MTP layer to draft with; use 0",
        ),
    ];
    for (options, expected) in table {
        let text = refusal(options);
        assert!(text.starts_with(expected), "{text}");
    }
    let none = refusal(RunnerOptions { num_blocks: Some(0), ..base() });
    assert_eq!(none, "num_blocks is 0; allowed: at least 1");
}
