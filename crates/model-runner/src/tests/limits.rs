//! Memory planning and refusals at construction.

use engine_types::StepExecutor;
use models::IndexCacheDtype;

use super::{load, options, runner_of};
use crate::limits::RunnerOptions;
use crate::runner::Runner;

/// Cache bytes a token in float32: a latent for every layer, 80 values, and an index key, 32, for
/// the layers that select. `tiny-glm52` has five layers, three of which select, and an MTP layer.
fn bytes_per_token(model: &str, drafting: bool, index_key: u64) -> u64 {
    let n_mtp = u64::from(drafting);
    let index = if model == "tiny-glm52" { (3 + n_mtp) * index_key } else { 0 };
    (5 + n_mtp) * 80 * 4 + index
}

#[test]
fn the_pool_is_what_the_budget_or_the_batch_needs() {
    let subjects = [
        ("tiny-dsv3", IndexCacheDtype::Auto, 0),
        ("tiny-glm52", IndexCacheDtype::Auto, 32 * 4),
        ("tiny-glm52", IndexCacheDtype::Fp8, 32 + 4),
    ];
    for (model, index_cache_dtype, index_key) in subjects {
        for (drafts, drafting) in [(0, false), (3, true)] {
            let block_bytes = 16 * bytes_per_token(model, drafting, index_key);
            let kv_cache_bytes = 100 * block_bytes + block_bytes / 2;
            let base = RunnerOptions { index_cache_dtype, ..options(drafts) };
            let by_budget = RunnerOptions { num_blocks: None, kv_cache_bytes, ..base };
            let runner = runner_of(model, &by_budget);
            assert_eq!(runner.limits().num_blocks, 100);
            let n_bytes = runner.kv_cache().n_bytes() as u64;
            assert_eq!(n_bytes, 100 * block_bytes, "{model}, {drafts} drafts");

            let max_model_len = Some(33);
            let by_batch = RunnerOptions { max_num_seqs: 2, max_model_len, ..by_budget };
            let limits = runner_of(model, &by_batch).limits();
            assert_eq!((limits.num_blocks, limits.max_model_len), (6, 33));
            assert_eq!(limits.n_lookahead_max, u32::from(drafting));
            assert_eq!(limits.max_num_speculative_tokens, drafts);
        }
    }
}

#[test]
fn options_outside_their_bounds_are_refused_by_name() {
    let refusal = |options: RunnerOptions| {
        Runner::new(load("tiny-dsv3", false), &options)
            .err()
            .expect("the option is refused")
            .to_string()
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
            RunnerOptions { index_cache_dtype: IndexCacheDtype::Fp8, ..base() },
            "index_cache_dtype is fp8, but the config has no index_topk",
        ),
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
