//! Grouped-query attention through the whole engine: a made GLM-4.5 whose draft layer is often
//! right and often wrong.
//!
//! The KV of all engines starts as NaN, so that a read of a slot that nobody wrote shows.

use std::path::Path;

use engine::{Engine, EngineConfig, EngineHandle, EngineThread};
use engine_types::{OutputMode, TokenId};
use integration_tests::harness::{self, Generation};
use model_config::{ModelConfig, TensorRole, TensorSpec};
use model_runner::{KvInit, Runner, RunnerOptions};
use models::LoadOptions;
use scheduler::{DraftPolicy, SchedulerConfig};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

const CONFIG: &str = r#"{
    "model_type": "glm4_moe", "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3,
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "partial_rotary_factor": 0.5, "attention_bias": true, "use_qk_norm": true,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5
}"#;
const HIDDEN: i64 = 32;
const MAX_TOKENS: u32 = 30;
/// One token, less than a block, whole blocks, and several chunks.
const PROMPT_LENS: [u32; 6] = [1, 3, 8, 20, 33, 64];

/// Layers change the residual stream but little, and the draft layer passes the embedding on, so
/// that target and draft layer mostly choose by the last token.
fn value(spec: &TensorSpec) -> Tensor {
    let shape: Vec<i64> = spec.shape.iter().map(|&n| n as i64).collect();
    let random = Tensor::randn(&shape, (Kind::Float, Device::Cpu));
    let last = spec.name.rsplit('.').nth(1).unwrap();
    match (spec.role(), last) {
        (TensorRole::Norm, _) => random * 0.1 + 1.0,
        (TensorRole::Bias, _) => random * 0.1,
        (TensorRole::Matrix, "embed_tokens") => random,
        (TensorRole::Matrix, "o_proj" | "down_proj") => random * 0.05,
        (TensorRole::Matrix, "eh_proj") => {
            let pass = Tensor::eye(HIDDEN, (Kind::Float, Device::Cpu));
            random * 0.03 + Tensor::cat(&[&pass, &pass.zeros_like()], 1)
        }
        (TensorRole::Matrix, _) => random * 0.12,
    }
}

fn checkpoint() -> TempDir {
    tch::manual_seed(3);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    let config = ModelConfig::load(dir.path()).unwrap();
    let specs = config.target_tensors().into_iter().chain(config.all_mtp_tensors());
    let tensors: Vec<(String, Tensor)> = specs
        .filter(|spec| !spec.is_optional)
        .map(|spec| (spec.name.clone(), value(&spec)))
        .collect();
    Tensor::write_safetensors(&tensors, dir.path().join("model.safetensors")).unwrap();
    dir
}

fn prompts() -> Vec<Vec<TokenId>> {
    let prompt = |&n: &u32| (0..n).map(|i| (i * i * 7 + i * 3 + n) % 40).collect();
    PROMPT_LENS.iter().map(prompt).collect()
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    k: u32,
    output_mode: OutputMode,
    caching: bool,
    num_blocks: u32,
}

impl Setting {
    /// Without drafts, and with room for everybody.
    const PLAIN: Self =
        Self { k: 0, output_mode: OutputMode::Immediate, caching: false, num_blocks: 256 };

    /// A step has room for all drafts, so that nobody loses any, and less than all prompts need.
    fn start(self, dir: &Path) -> (EngineHandle, EngineThread) {
        let options = RunnerOptions {
            block_size: 4,
            num_blocks: Some(self.num_blocks),
            max_num_batched_tokens: 64,
            num_speculative_tokens: self.k,
            kv_init: KvInit::Nan,
            ..RunnerOptions::default()
        };
        let scheduler = SchedulerConfig {
            max_num_seqs: options.max_num_seqs,
            max_num_batched_tokens: options.max_num_batched_tokens,
            num_speculative_tokens: self.k,
            drafting: DraftPolicy::Fixed,
            output_mode: self.output_mode,
            enable_prefix_caching: self.caching,
            ..SchedulerConfig::default()
        };
        let dir = dir.to_path_buf();
        let make_runner = move || -> anyhow::Result<Runner> {
            let load = LoadOptions { drafting: self.k > 0, ..LoadOptions::default() };
            Ok(Runner::new(models::load(&dir, load)?, &options)?)
        };
        Engine::spawn(EngineConfig { scheduler, ..EngineConfig::default() }, make_runner).unwrap()
    }
}

fn generate(engine: &EngineHandle, prompts: &[Vec<TokenId>]) -> Vec<Generation> {
    let requests = prompts.iter().map(|prompt| (&prompt[..], harness::params(MAX_TOKENS)));
    harness::generate(engine, requests).unwrap()
}

/// What each prompt gets without drafts and without company.
fn alone(dir: &Path) -> Vec<Vec<TokenId>> {
    let (engine, _thread) = Setting::PLAIN.start(dir);
    let each = prompts().into_iter();
    each.map(|prompt| generate(&engine, &[prompt]).remove(0).token_ids).collect()
}

#[test]
fn drafts_company_cache_and_deferred_output_change_no_token() {
    let dir = checkpoint();
    let expected = alone(dir.path());
    for k in [0, 1, 3, 8] {
        let mut drafted = None;
        for (output_mode, caching) in [
            (OutputMode::Immediate, false),
            (OutputMode::Immediate, true),
            (OutputMode::Deferred, false),
            (OutputMode::Deferred, true),
        ] {
            let setting = Setting { k, output_mode, caching, ..Setting::PLAIN };
            let (engine, thread) = setting.start(dir.path());
            // The second round finds its prompts in the cache, if there is one.
            for round in 0..2 {
                let found = generate(&engine, &prompts());
                for (found, expected) in found.iter().zip(&expected) {
                    assert_eq!(&found.token_ids, expected, "{setting:?}, round {round}");
                }
                let n_cached: u32 = found.iter().map(|found| found.usage.cached_tokens).sum();
                assert_eq!(n_cached > 0, caching && round == 1, "{setting:?}, round {round}");
                let drafts =
                    found.into_iter().map(|found| (found.drafts_per_step, found.accepted_per_step));
                let drafts: Vec<_> = drafts.collect();
                assert_eq!(drafted.get_or_insert_with(|| drafts.clone()), &drafts, "{setting:?}");
            }
            thread.drain();
            assert_eq!(engine.stats().n_failed_steps, 0, "{setting:?}");
        }
        let steps = drafted.iter().flatten();
        let counts = |(drafts, accepted): &(Vec<Vec<TokenId>>, Vec<u32>)| {
            (drafts.iter().map(Vec::len).sum::<usize>(), accepted.iter().sum::<u32>() as usize)
        };
        let (n_drafts, n_accepted) = steps.map(counts).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        let is_mixed = n_accepted * 20 > n_drafts && n_accepted * 20 < n_drafts * 19;
        assert!(k == 0 || is_mixed, "{k} drafts: {n_accepted} of {n_drafts} accepted");
    }
}

/// Six continuations of a prompt share its blocks and soon need more than a small pool has.
#[test]
fn siblings_get_what_a_request_alone_gets_also_if_they_lose_their_blocks() {
    const N: usize = 6;
    const SMALL: u32 = 28;
    let dir = checkpoint();
    let expected = alone(dir.path());
    for (k, num_blocks) in [(0, 256), (3, 256), (0, SMALL), (3, SMALL)] {
        let setting = Setting { k, num_blocks, ..Setting::PLAIN };
        let (engine, thread) = setting.start(dir.path());
        for (prompt, expected) in prompts().iter().zip(&expected).skip(3).take(2) {
            let params = harness::params(MAX_TOKENS);
            for events in harness::submit_n(&engine, prompt, params, N).unwrap() {
                assert_eq!(&harness::collect(events).unwrap().token_ids, expected, "{setting:?}");
            }
        }
        thread.drain();
        let stats = engine.stats();
        let is_small = num_blocks == SMALL;
        assert_eq!(stats.scheduler.n_preemptions > 0, is_small, "{setting:?}");
        assert_eq!((stats.n_failed_steps, stats.scheduler.blocks.n_used), (0, 0), "{setting:?}");
    }
}
