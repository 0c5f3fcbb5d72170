//! What the benches have in common: threads, number formats, and a client that looks at the clock.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use engine_types::TokenId;
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use grpc_api::inference::v1::{
    GenerateStreamRequest, GenerationFinished, StoppingParams, TokenIds,
};
use models::ComputeDtype;
use tonic::transport::Channel;

/// What the model computes in, as an option of the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[expect(missing_docs, reason = "the names say it, and help texts would repeat them")]
pub enum Dtype {
    Bfloat16,
    Float32,
}

impl From<Dtype> for ComputeDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bfloat16 => Self::Bfloat16,
            Dtype::Float32 => Self::Float32,
        }
    }
}

/// Options that every bench has.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Runs of each setting.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeats: u32,
    /// Drafts a step.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(..=8))]
    pub k: u32,
    /// What the model computes in.
    #[arg(long, value_enum, default_value_t = Dtype::Bfloat16)]
    pub dtype: Dtype,
    /// CPU threads of the kernels [default: one a core]
    #[arg(long)]
    pub threads: Option<usize>,
    /// `cargo bench` passes it.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    /// The options in words, for the head of a report.
    #[must_use]
    pub fn describe(&self) -> String {
        let dtype = self.dtype.to_possible_value();
        let dtype = dtype.as_ref().map_or("", |value| value.get_name());
        let threads = self.threads.map_or_else(|| "one a core".to_owned(), |n| n.to_string());
        format!("{dtype}, k = {}, threads: {threads}, repeats: {}", self.k, self.repeats)
    }
}

/// As the server does: the kernels have the cores, libtorch one thread.
///
/// # Errors
///
/// If `threads` is 0 or the threads do not start.
pub fn limit_threads(threads: Option<usize>) -> Result<()> {
    tch::set_num_threads(1);
    let Some(threads) = threads else { return Ok(()) };
    ensure!(threads > 0, "--threads: at least 1");
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build_global().context("start the CPU threads")
}

/// What one client saw.
pub struct Stream {
    /// When it asked.
    pub sent: Instant,
    /// When the first message with tokens came.
    pub first: Instant,
    /// When the last one came.
    pub last: Instant,
    /// All tokens.
    pub token_ids: Vec<TokenId>,
    /// Tokens of the first message, which are not waited for singly.
    pub n_first: usize,
    /// The last message.
    pub finished: GenerationFinished,
}

/// A greedy request for exactly `max_tokens` tokens.
#[must_use]
pub fn request(prompt: &[TokenId], max_tokens: u32) -> GenerateStreamRequest {
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

/// Sends a request and reads its stream to the end.
///
/// # Errors
///
/// If the server refuses or the stream is not whole.
pub async fn stream(channel: Channel, request: GenerateStreamRequest) -> Result<Stream> {
    let mut client = InferenceServiceClient::new(channel);
    let sent = Instant::now();
    let mut messages = client.generate_stream(request).await?.into_inner();
    let (mut times, mut token_ids, mut n_first) = (None::<(Instant, Instant)>, vec![], 0);
    while let Some(message) = messages.message().await? {
        match message.event.context("a message without an event")? {
            Event::Delta(delta) => {
                let now = Instant::now();
                match &mut times {
                    Some((_, last)) => *last = now,
                    None => (times, n_first) = (Some((now, now)), delta.token_ids.len()),
                }
                token_ids.extend(delta.token_ids);
            }
            Event::Finished(finished) => {
                let (first, last) = times.context("a stream without tokens")?;
                return Ok(Stream { sent, first, last, token_ids, n_first, finished });
            }
            Event::PromptLogprobs(_) => {}
        }
    }
    bail!("a stream without its last message")
}
