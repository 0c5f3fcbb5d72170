//! A server on a loopback port around an executor that counts up, or follows a script.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use engine::{Engine, EngineConfig, EngineHandle, EngineThread};
use engine_types::{
    ExecutorError, ExecutorLimits, IndexerCounts, StepExecutor, StepOutcome, StepPlan, StepQueue,
};
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use grpc_api::inference::v1::{
    GenerateRequest, GenerateStreamRequest, GeneratedOutput, StoppingParams, TokenIds,
};
use grpc_server::{ModelInfo, ServeConfig, Service, serve};
use scheduler::{DraftPolicy, SchedulerConfig};
use serde_json::json;
use tokenization::Tokenizer;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use crate::scripted::{Script, Scripted};

pub(crate) const VOCAB: u32 = 100_000;

pub(crate) const OK: u8 = 0;
pub(crate) const FAIL_STEP: u8 = 1;
pub(crate) const FAIL_FOR_GOOD: u8 = 2;
pub(crate) const PANIC: u8 = 3;
/// No step ends until the fault is another.
pub(crate) const HOLD: u8 = 4;

/// How long a machine under load may take for what usually takes milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What the executor says that its indexers did in every step, apart from prefill.
pub(crate) const VERIFY: IndexerCounts =
    IndexerCounts { n_launches: 2, n_rows: 8, n_scored_keys: 500 };
pub(crate) const DRAFT: IndexerCounts =
    IndexerCounts { n_launches: 1, n_rows: 4, n_scored_keys: 30 };

/// Predicts the successor; drafts are right except for multiples of 5. With a script, what it says.
pub(crate) struct Counting {
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
pub(crate) struct Setup {
    pub(crate) limits: ExecutorLimits,
    pub(crate) step_time: Duration,
    pub(crate) max_queued_requests: u32,
    pub(crate) serve: ServeConfig,
    pub(crate) tokenizer: bool,
    /// The texts of the tokenizer's ids; those of the bundled one if empty.
    pub(crate) texts: &'static [&'static str],
    pub(crate) eos_token_ids: &'static [u32],
    pub(crate) script: Option<Script>,
    pub(crate) max_queue_wait: Option<Duration>,
    /// 0 is a model with dense attention.
    pub(crate) index_topk: u32,
    pub(crate) prefix_caching: bool,
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
            serve: ServeConfig::default(),
            tokenizer: false,
            texts: &[],
            eos_token_ids: &[],
            script: None,
            max_queue_wait: None,
            index_topk: 0,
            prefix_caching: true,
        }
    }
}

pub(crate) struct Server {
    pub(crate) engine: EngineHandle,
    pub(crate) address: SocketAddr,
    pub(crate) channel: Channel,
    pub(crate) fault: Arc<AtomicU8>,
    pub(crate) stop: Option<oneshot::Sender<()>>,
    pub(crate) serving: JoinHandle<()>,
    _thread: EngineThread,
}

impl Server {
    pub(crate) async fn start(setup: Setup) -> Self {
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
                ..SchedulerConfig::default()
            },
            max_queue_wait: setup.max_queue_wait,
        };
        let (engine, thread) =
            Engine::spawn(config, move || Ok::<_, ExecutorError>(executor)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let service = Service {
            engine: engine.clone(),
            tokenizer: setup.tokenizer.then(|| Arc::new(tokenizer(setup.texts))),
            model: ModelInfo {
                served_model_name: "counting".into(),
                eos_token_ids: setup.eos_token_ids.to_vec(),
                index_topk: setup.index_topk,
                index_share: setup.index_topk > 0,
                ..ModelInfo::default()
            },
        };
        let serving = tokio::spawn(async move {
            let stopped = async { stopped.await.unwrap_or_default() };
            serve(listener, setup.serve, service, stopped).await.unwrap();
        });
        let channel = Channel::from_shared(format!("http://{address}")).unwrap();
        let channel = channel.connect().await.unwrap();
        Self { engine, address, channel, fault, stop: Some(stop), serving, _thread: thread }
    }

    pub(crate) fn client(&self) -> InferenceServiceClient<Channel> {
        InferenceServiceClient::new(self.channel.clone())
    }

    /// The only output of a request that must succeed.
    pub(crate) async fn generate(&self, request: GenerateRequest) -> GeneratedOutput {
        let mut reply = self.client().generate(request).await.unwrap().into_inner();
        assert_eq!(reply.outputs.len(), 1);
        reply.outputs.remove(0)
    }

    /// A small request that must succeed.
    pub(crate) async fn check_serves(&self) {
        let output = self.generate(unary(&[10, 11], 3)).await;
        assert_eq!(output.token_ids, [12, 13, 14]);
    }

    /// Waits until nothing runs, waits or holds blocks.
    pub(crate) async fn wait_until_empty(&self) -> Duration {
        self.wait_until_unfinished(0).await
    }

    /// Waits until `n` requests are unfinished (and, if none, no block is used).
    pub(crate) async fn wait_until_unfinished(&self, n: usize) -> Duration {
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
        let folder =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../bundled-checkpoints/checkpoints/tiny-dsv3");
        return Tokenizer::load(folder.as_ref()).unwrap();
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

pub(crate) fn streaming(prompt: &[u32], max_tokens: u32) -> GenerateStreamRequest {
    GenerateStreamRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: prompt.to_vec() })),
        stopping: Some(StoppingParams {
            max_tokens: Some(max_tokens),
            ignore_eos: Some(true),
            ..StoppingParams::default()
        }),
        ..GenerateStreamRequest::default()
    }
}

pub(crate) fn unary(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    use grpc_api::inference::v1::generate_request::Prompt;
    let streaming = streaming(prompt, max_tokens);
    GenerateRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: prompt.to_vec() })),
        stopping: streaming.stopping,
        ..GenerateRequest::default()
    }
}
