//! The engine under test.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use engine::{Engine, EngineConfig, EngineHandle, EngineThread};
use engine_types::{
    ExecutorError, ExecutorLimits, IndexerCounts, OutputMode, StepExecutor, StepOutcome, StepPlan,
    StepQueue,
};
use scheduler::{DraftPolicy, SchedulerConfig};
use serde_json::json;
use serving::{Frontend, FrontendConfig, ModelInfo};
use tokenization::Tokenizer;

use crate::scripted::{Script, Scripted};

/// Number of ids of the counting model.
pub const VOCAB: u32 = 100_000;

/// Nothing goes wrong.
pub const OK: u8 = 0;
/// The next step fails, and no other.
pub const FAIL_STEP: u8 = 1;
/// The next step ends the engine.
pub const FAIL_FOR_GOOD: u8 = 2;
/// The next step panics.
pub const PANIC: u8 = 3;
/// No step ends until the fault is another.
pub const HOLD: u8 = 4;

/// How long a machine under load may take for what usually takes milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What the executor says that its indexers did in every step, apart from prefill.
pub const VERIFY: IndexerCounts = IndexerCounts { n_launches: 2, n_rows: 8, n_scored_keys: 500 };
/// The same of the second draft step.
pub const DRAFT: IndexerCounts = IndexerCounts { n_launches: 1, n_rows: 4, n_scored_keys: 30 };

/// Predicts the successor; drafts are right except for multiples of 5. With a script, what it says.
pub struct Counting {
    limits: ExecutorLimits,
    step_time: Duration,
    fault: Arc<AtomicU8>,
    queue: StepQueue,
    scripted: Option<Scripted>,
}

impl StepExecutor for Counting {
    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn launch(&mut self, plan: &StepPlan) {
        self.queue.launch(plan);
    }

    fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        let mut queue = std::mem::take(&mut self.queue);
        let result = queue.collect(outcome, |plan, outcome| self.run(plan, outcome));
        self.queue = queue;
        result
    }
}

impl Counting {
    fn run(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        std::thread::sleep(self.step_time);
        while self.fault.load(Ordering::SeqCst) == HOLD {
            std::thread::sleep(Duration::from_millis(1));
        }
        match self.fault.load(Ordering::SeqCst) {
            FAIL_STEP => {
                self.fault.store(OK, Ordering::SeqCst);
                return Err(ExecutorError::Step("no luck".into()));
            }
            FAIL_FOR_GOOD => return Err(ExecutorError::Fatal("burnt out".into())),
            PANIC => panic!("as the test asked"),
            _ => {}
        }
        outcome.indexer.target_verify = VERIFY;
        outcome.indexer.draft_steps[1] = DRAFT;
        if let Some(scripted) = &mut self.scripted {
            scripted.run(plan, outcome);
            return Ok(());
        }
        for row in plan.rows() {
            let drafts = plan.drafts(row);
            let mut last = plan.tokens(row)[(row.n_query - row.n_draft) as usize - 1];
            let (mut run, mut proposals) = (vec![], vec![]);
            if row.samples {
                for draft in drafts {
                    if *draft != (last + 1) % VOCAB {
                        break;
                    }
                    last = *draft;
                    run.push(last);
                }
                last = (last + 1) % VOCAB;
                run.push(last);
                proposals = (last + 1..=last + row.n_propose)
                    .map(|id| if id % 5 == 0 { 0 } else { id % VOCAB })
                    .collect();
            }
            let n_accepted = u32::try_from(run.len().saturating_sub(1)).unwrap();
            outcome.push_row(row.request_id, &run, n_accepted, &proposals);
        }
        Ok(())
    }
}

/// How a test's server differs from the usual one.
pub struct Setup {
    /// What the executor can do.
    pub limits: ExecutorLimits,
    /// How long a step takes at least.
    pub step_time: Duration,
    /// Requests that may wait behind the running ones.
    pub max_queued_requests: u32,
    /// How requests are treated.
    pub frontend: FrontendConfig,
    /// Whether the model has a tokenizer.
    pub tokenizer: bool,
    /// The texts of the tokenizer's ids; those of the bundled one if empty.
    pub texts: &'static [&'static str],
    /// Ids that end an output.
    pub eos_token_ids: &'static [u32],
    /// What the model says, in place of counting.
    pub script: Option<Script>,
    /// How long a request may wait for its first step.
    pub max_queue_wait: Option<Duration>,
    /// 0 is a model with dense attention.
    pub index_topk: u32,
    /// Whether requests share prefixes.
    pub prefix_caching: bool,
    /// Whether a step is planned before the one before it has ended.
    pub output_mode: OutputMode,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            limits: ExecutorLimits {
                block_size: 16,
                num_blocks: 1024,
                max_model_len: 4096,
                max_num_seqs: 8,
                max_num_batched_tokens: 64,
                max_num_speculative_tokens: 3,
                n_lookahead_max: 1,
                vocab_size: VOCAB,
            },
            step_time: Duration::from_millis(1),
            max_queued_requests: 16,
            frontend: FrontendConfig::default(),
            tokenizer: false,
            texts: &[],
            eos_token_ids: &[],
            script: None,
            max_queue_wait: None,
            index_topk: 0,
            prefix_caching: true,
            output_mode: OutputMode::Immediate,
        }
    }
}

/// An engine under test; it ends with this.
pub struct TestEngine {
    /// The engine itself.
    pub engine: EngineHandle,
    /// The same as services see it.
    pub frontend: Arc<Frontend>,
    /// What goes wrong in the next step.
    pub fault: Arc<AtomicU8>,
    _thread: EngineThread,
}

impl TestEngine {
    /// Starts it.
    #[must_use]
    pub fn start(setup: Setup) -> Self {
        let fault = Arc::new(AtomicU8::new(OK));
        let executor = Counting {
            scripted: setup.script.map(Scripted::new),
            queue: StepQueue::default(),
            limits: setup.limits,
            step_time: setup.step_time,
            fault: Arc::clone(&fault),
        };
        let config = EngineConfig {
            scheduler: SchedulerConfig {
                max_queued_requests: setup.max_queued_requests,
                num_speculative_tokens: setup.limits.max_num_speculative_tokens,
                drafting: DraftPolicy::Fixed,
                eos_token_ids: setup.eos_token_ids.to_vec(),
                enable_prefix_caching: setup.prefix_caching,
                output_mode: setup.output_mode,
                ..SchedulerConfig::default()
            },
            max_queue_wait: setup.max_queue_wait,
        };
        let (engine, thread) =
            Engine::spawn(config, move || Ok::<_, ExecutorError>(executor)).unwrap();
        let model = ModelInfo {
            served_model_name: "counting".into(),
            eos_token_ids: setup.eos_token_ids.to_vec(),
            index_topk: setup.index_topk,
            index_share: setup.index_topk > 0,
            checkpoint_dir: Some(bundled().into()),
            ..ModelInfo::default()
        };
        let tokenizer = setup.tokenizer.then(|| Arc::new(tokenizer(setup.texts)));
        let frontend = Frontend::new(setup.frontend, engine.clone(), tokenizer, model);
        Self { engine, frontend: Arc::new(frontend), fault, _thread: thread }
    }

    /// Waits until nothing runs, waits or holds blocks.
    pub async fn wait_until_empty(&self) -> Duration {
        self.wait_until_unfinished(0).await
    }

    /// Waits until `n` requests are unfinished (and, if none, no block is used).
    pub async fn wait_until_unfinished(&self, n: usize) -> Duration {
        let started = Instant::now();
        loop {
            let stats = self.engine.stats();
            let n_known = stats.scheduler.n_running + stats.scheduler.n_waiting;
            let free = n > 0 || stats.scheduler.blocks.n_used == 0;
            if stats.n_unfinished == n && n_known == n && free {
                return started.elapsed();
            }
            assert!(started.elapsed() < PATIENCE, "{stats:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// The bundled tokenizer, or one whose id `i` has the text `texts[i]`; `<s>` is special.
fn tokenizer(texts: &[&str]) -> Tokenizer {
    if texts.is_empty() {
        return Tokenizer::load(bundled().as_ref()).unwrap();
    }
    let vocab: serde_json::Map<_, _> =
        (0..).zip(texts).map(|(id, text): (u32, _)| ((*text).into(), id.into())).collect();
    let special = vocab.get("<s>").map(|id| {
        json!({"id": id, "content": "<s>", "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    });
    let content = json!({
        "added_tokens": special.into_iter().collect::<Vec<_>>(), "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), content.to_string()).unwrap();
    Tokenizer::load(folder.path()).unwrap()
}

/// The folder of the bundled checkpoint whose tokenizer is used.
fn bundled() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../bundled-checkpoints/checkpoints/tiny-dsv3")
}
