//! The prefix cache changes no token and no draft, and has exactly the blocks that it should.
//!
//! The KV of all engines starts as NaN, so that a read of a slot that nobody wrote shows.

use std::collections::HashMap;

use engine::{EngineHandle, EngineThread};
use engine_types::{SamplingParams, TokenId, Usage};
use integration_tests::harness::{self, Generation};
use integration_tests::oracle::{Case, Checkpoint};
use model_runner::{IndexCacheDtype, KvInit, RunnerOptions};
use models::ComputeDtype;

use crate::oracle_tokens::{check_drafts, check_text, requests};

/// Pools of some thousand tokens, which are quickly filled with NaN.
fn options(num_speculative_tokens: u32) -> RunnerOptions {
    RunnerOptions {
        num_speculative_tokens,
        kv_init: KvInit::Nan,
        kv_cache_bytes: 16 << 20,
        ..RunnerOptions::default()
    }
}

/// Every number of drafts with every way to select keys for them.
fn settings(checkpoint: Checkpoint) -> Vec<RunnerOptions> {
    let drafting = checkpoint
        .index_shares()
        .iter()
        .flat_map(|&index_share| [1, 3].map(|k| RunnerOptions { index_share, ..options(k) }));
    std::iter::once(options(0)).chain(drafting).collect()
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Ask {
    prompt: Vec<TokenId>,
    max_tokens: u32,
    k: u32,
    salt: Option<&'static [u8]>,
}

impl Ask {
    fn new(prompt: &[TokenId], max_tokens: u32, k: u32) -> Self {
        Self { prompt: prompt.to_vec(), max_tokens, k, salt: None }
    }
}

/// An engine with a prefix cache and one without, both with room for all that they are asked.
struct Pair {
    cached: EngineHandle,
    plain: EngineHandle,
    block_size: usize,
    /// What became of each request without a cache; all of them are in the cache.
    served: HashMap<Ask, Generation>,
    _threads: [EngineThread; 2],
}

impl Pair {
    fn start(checkpoint: Checkpoint, options: &RunnerOptions) -> Self {
        let dtype = ComputeDtype::Float32;
        let (cached, cached_thread) = harness::start_cached(checkpoint, dtype, options).unwrap();
        let (plain, plain_thread) = harness::start(checkpoint, dtype, options).unwrap();
        let (block_size, served) = (options.block_size as usize, HashMap::new());
        Self { cached, plain, block_size, served, _threads: [cached_thread, plain_thread] }
    }

    /// Runs `asks` at once and compares everything that became of them with what becomes of them
    /// without a cache; returns how many tokens of each came from the cache.
    ///
    /// What `asks` have in common must not be more than what each has in common with earlier ones.
    fn check(&mut self, asks: &[Ask]) -> Vec<u32> {
        let is_new = |ask: &&Ask| !self.served.contains_key(*ask);
        let new: Vec<Ask> = asks.iter().filter(is_new).cloned().collect();
        let n_cached: Vec<u32> = asks.iter().map(|ask| self.n_cached(ask)).collect();
        self.served.extend(new.iter().cloned().zip(run(&self.plain, &new)));
        let found = run(&self.cached, asks);
        for (ask, (found, &cached_tokens)) in asks.iter().zip(found.iter().zip(&n_cached)) {
            let plain = self.served[ask].clone();
            assert_eq!(plain.usage.cached_tokens, 0, "without a cache");
            let usage = Usage { cached_tokens, ..plain.usage };
            assert_eq!(found, &Generation { usage, ..plain }, "{ask:?}");
        }
        let stats = self.cached.stats().scheduler;
        assert_eq!((stats.n_preemptions, stats.blocks.n_evictions), (0, 0), "there is room");
        n_cached
    }

    /// How many tokens the cache must have: whole blocks of the longest prefix that an earlier
    /// request of the same kind computed, followed by the same token where a draft layer's KV is
    /// made of it. The last token of a text has no KV, that of a prompt has to be queried.
    fn n_cached(&self, ask: &Ask) -> u32 {
        let is_alike = |other: &Ask| (other.k > 0, other.salt) == (ask.k > 0, ask.salt);
        let n_lookahead = usize::from(ask.k > 0);
        let in_common = |(other, done): (&Ask, &Generation)| {
            let tokens = [&other.prompt[..], &done.token_ids].concat();
            let n_equal = tokens.iter().zip(&ask.prompt).take_while(|(a, b)| a == b).count();
            n_equal.saturating_sub(n_lookahead).min(tokens.len() - 1)
        };
        let alike = self.served.iter().filter(|(other, _)| is_alike(other));
        let n_common = alike.map(in_common).max().unwrap_or(0);
        let n_tokens = n_common.min(ask.prompt.len() - 1);
        u32::try_from(n_tokens / self.block_size * self.block_size).unwrap()
    }
}

fn run(engine: &EngineHandle, asks: &[Ask]) -> Vec<Generation> {
    let submit = |ask: &Ask| {
        let params = harness::params(ask.max_tokens);
        let params = SamplingParams { num_speculative_tokens: Some(ask.k), ..params };
        harness::submit_salted(engine, &ask.prompt, params, ask.salt).unwrap()
    };
    let running: Vec<_> = asks.iter().map(submit).collect();
    running.into_iter().map(|events| harness::collect(events).unwrap()).collect()
}

fn of_cases(cases: &[Case], k: u32) -> Vec<Ask> {
    cases.iter().map(|case| Ask::new(&case.prompt_ids, case.max_tokens(), k)).collect()
}

/// Runs all cases twice; the second time the cache has all of each prompt that it can have.
fn check_cases_twice(checkpoint: Checkpoint, options: &RunnerOptions) {
    let cases = checkpoint.cases().unwrap();
    let (k, block_size) = (options.num_speculative_tokens, options.block_size);
    let asks = of_cases(&cases, k);
    let mut pair = Pair::start(checkpoint, options);
    let first = pair.check(&asks);
    assert_eq!(first, [0; 14], "no two prompts have a whole block in common");
    let second = pair.check(&asks);
    let whole_blocks = |ask: &Ask| (ask.prompt.len() as u32 - 1) / block_size * block_size;
    assert_eq!(second, asks.iter().map(whole_blocks).collect::<Vec<_>>());

    let stats = pair.cached.stats().scheduler;
    assert_eq!(stats.n_prefix_hit_tokens, u64::from(second.iter().sum::<u32>()));
    assert_eq!(stats.n_prefix_queried_tokens, stats.n_prompt_tokens);
    assert_eq!(pair.plain.stats().scheduler.n_prefix_queried_tokens, 0);
    if options.index_cache_dtype == IndexCacheDtype::Fp8 {
        return;
    }
    for (case, ask) in cases.iter().zip(&asks) {
        check_text(case, &pair.served[ask], &format!("{options:?}"));
        check_drafts(case, &pair.served[ask], (k, options.index_share));
    }
}

on_both!(cases_served_from_the_cache_are_as_computed);

fn cases_served_from_the_cache_are_as_computed(checkpoint: Checkpoint) {
    for options in settings(checkpoint) {
        check_cases_twice(checkpoint, &options);
    }
    let chunked = RunnerOptions { max_num_batched_tokens: 64, ..options(3) };
    check_cases_twice(checkpoint, &chunked);
    if checkpoint == Checkpoint::TinyGlm52 {
        let index_cache_dtype = IndexCacheDtype::Fp8;
        check_cases_twice(checkpoint, &RunnerOptions { index_cache_dtype, ..options(3) });
    }
}

on_both!(another_next_token_gets_its_own_drafts);

/// Prefixes of whole blocks, on both sides of `index_topk`, that different tokens follow. The KV of
/// the draft layer at the end of the last block is made of that token.
fn another_next_token_gets_its_own_drafts(checkpoint: Checkpoint) {
    const N_NEXT: usize = 8;
    let cases = checkpoint.cases().unwrap();
    let text = &cases[13].prompt_ids;
    for (options, block_size) in settings(checkpoint).iter().flat_map(|o| [(o, 4), (o, 16)]) {
        let k = options.num_speculative_tokens;
        let mut pair = Pair::start(checkpoint, &RunnerOptions { block_size, ..options.clone() });
        for n_prefix in [32, 128] {
            let prefix = &text[..n_prefix];
            // Two that were alike would have a block in common that no earlier request computed.
            let mut next: Vec<TokenId> = Vec::new();
            for token in text.iter().copied().skip(n_prefix).step_by(37) {
                if next.len() < N_NEXT && !next.contains(&token) {
                    next.push(token);
                }
            }
            let ask = |token: &TokenId| Ask::new(&[prefix, &[*token]].concat(), 8, k);
            let asks: Vec<Ask> = next.iter().map(ask).collect();
            pair.check(&asks[..1]);
            let n_prefix = n_prefix as u32;
            let n_shared = if k == 0 { n_prefix } else { n_prefix - block_size };
            assert_eq!(pair.check(&asks[1..]), [n_shared; N_NEXT - 1], "another next token");
            assert_eq!(pair.check(&asks), [n_prefix; N_NEXT], "the same next token");
        }
    }
}

on_both!(a_conversation_finds_what_it_generated);

fn a_conversation_finds_what_it_generated(checkpoint: Checkpoint) {
    const MAX_TOKENS: u32 = 24;
    let cases = checkpoint.cases().unwrap();
    let fine = RunnerOptions { block_size: 1, ..options(3) };
    for options in settings(checkpoint).into_iter().chain([fine]) {
        let k = options.num_speculative_tokens;
        let mut pair = Pair::start(checkpoint, &options);
        let mut prompt = cases[0].prompt_ids.clone();
        let mut n_before = 0;
        for turn in [1, 12, 2, 3] {
            let ask = Ask::new(&prompt, MAX_TOKENS, k);
            let n_cached = pair.check(std::slice::from_ref(&ask))[0];
            assert!(n_cached >= n_before, "{n_cached}: more than the prompt of {n_before} before");
            n_before = ask.prompt.len() as u32 + 1;
            let text = &pair.served[&ask].token_ids;
            assert!(text.len() > 17, "whole blocks of generated tokens: {text:?}");
            prompt.extend(text);
            prompt.extend(&cases[turn].prompt_ids);
        }
    }
}

on_both!(salts_do_not_share);

fn salts_do_not_share(checkpoint: Checkpoint) {
    let prompt = checkpoint.cases().unwrap()[12].prompt_ids.clone();
    let mut pair = Pair::start(checkpoint, &options(3));
    let salts: [Option<&[u8]>; 3] = [None, Some(b"a"), Some(b"b")];
    let asks = salts.map(|salt| Ask { salt, ..Ask::new(&prompt, 16, 3) });
    for ask in &asks {
        assert_eq!(pair.check(std::slice::from_ref(ask)), [0], "{:?}", ask.salt);
    }
    assert_eq!(pair.check(&asks), [320; 3], "20 blocks of 331 tokens");
}

on_both!(requests_with_and_without_drafts_do_not_disturb_each_other);

fn requests_with_and_without_drafts_do_not_disturb_each_other(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    for &index_share in checkpoint.index_shares() {
        let mut pair = Pair::start(checkpoint, &RunnerOptions { index_share, ..options(3) });
        for (case, order) in [(&cases[12], [0, 3, 1]), (&cases[13], [1, 0, 3])] {
            let asks = order.map(|k| Ask::new(&case.prompt_ids, 16, k));
            let n_whole = (case.prompt_ids.len() as u32 - 1) / 16 * 16;
            let one_by_one: Vec<u32> =
                asks.iter().flat_map(|ask| pair.check(std::slice::from_ref(ask))).collect();
            assert_eq!(one_by_one, [0, 0, n_whole], "{order:?}");
            assert_eq!(pair.check(&asks), [n_whole; 3], "at once");
        }
    }
}

on_both!(a_request_that_runs_serves_another);

fn a_request_that_runs_serves_another(checkpoint: Checkpoint) {
    let case = &checkpoint.cases().unwrap()[13];
    for options in settings(checkpoint) {
        let (engine, _thread) =
            harness::start_cached(checkpoint, ComputeDtype::Float32, &options).unwrap();
        let submit = || harness::submit(&engine, &case.prompt_ids, harness::params(32)).unwrap();
        let first = submit();
        while engine.stats().scheduler.n_generated_tokens == 0 {
            assert!(engine.is_alive());
            std::thread::yield_now();
        }
        let second = harness::collect(submit()).unwrap();
        let first = harness::collect(first).unwrap();
        check_text(case, &first, "first");
        check_drafts(case, &first, (options.num_speculative_tokens, options.index_share));
        let usage = Usage { cached_tokens: 784, ..first.usage };
        assert_eq!(second, Generation { usage, ..first }, "49 blocks of 795 tokens");
    }
}

on_both!(eviction_and_preemption_change_no_text);

/// Each pool holds the longest case and little more. The second round begins with the cases that
/// ended last in the first one, so that something of them is left.
fn eviction_and_preemption_change_no_text(checkpoint: Checkpoint) {
    let cases = checkpoint.cases().unwrap();
    for (cases, num_blocks) in [(&cases[..12], 28), (&cases[..], 212)] {
        for k in [0, 3] {
            let num_blocks = Some(num_blocks);
            let options = RunnerOptions { num_blocks, block_size: 4, ..options(k) };
            let (engine, thread) =
                harness::start_cached(checkpoint, ComputeDtype::Float32, &options).unwrap();
            let reversed: Vec<Case> = cases.iter().rev().cloned().collect();
            for cases in [cases, &reversed] {
                let done = harness::generate(&engine, requests(cases)).unwrap();
                for (case, found) in cases.iter().zip(&done) {
                    check_text(case, found, &format!("{options:?}"));
                }
            }
            thread.drain();
            let stats = engine.stats().scheduler;
            assert!(stats.n_preemptions > 0, "{options:?}: {stats:?}");
            assert!(stats.blocks.n_evictions > 0, "{options:?}: {stats:?}");
            assert!(stats.n_prefix_hit_tokens > 0, "{options:?}: {stats:?}");
            assert_eq!(stats.blocks.n_used, 0, "{options:?}: {stats:?}");
        }
    }
}
