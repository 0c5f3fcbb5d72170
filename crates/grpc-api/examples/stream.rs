//! Streams one prompt from a running server and tells accepted drafts from target tokens.
//!
//! On a terminal accepted drafts are green; elsewhere they stand in ⟦ ⟧, which code does not use.
//! A summary follows, and with `--compare` the same request without drafting and the ratio.

use std::io::{IsTerminal, Write, stdout};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use grpc_api::inference::v1::{
    GenerateStreamRequest, GenerationFinished, SpeculationParams, SpeculationStats, StoppingParams,
    TokenDelta,
};
use tonic::transport::{Channel, Endpoint};

/// Streams one prompt from a running server.
#[derive(Debug, Parser)]
struct Args {
    /// Address of the server, host:port
    #[arg(long, default_value = "127.0.0.1:50051")]
    addr: String,
    /// The text to continue
    #[arg(
        default_value = "def read_lines(path):\n    \"\"\"Return the lines of a text file.\"\"\"\n"
    )]
    prompt: String,
    /// Largest number of generated tokens
    #[arg(long, default_value_t = 96)]
    max_tokens: u32,
    /// Run the same request without drafting as well, compare the texts and the speeds
    #[arg(long)]
    compare: bool,
    /// Timed runs of each kind for the comparison, alternating
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Seconds to wait for the server
    #[arg(long, default_value_t = 30)]
    connect_timeout: u64,
}

/// One finished run.
struct Run {
    token_ids: Vec<u32>,
    text: String,
    finished: GenerationFinished,
    /// From the first message to the last: prefill and queueing are not in it.
    decode_time: Duration,
    /// Tokens of the first message, which `decode_time` does not cover.
    n_first: usize,
}

impl Run {
    /// Tokens per second after the first message; `None` where that is all there is.
    fn tokens_per_second(&self) -> Option<f64> {
        let n_timed = u32::try_from(self.token_ids.len() - self.n_first).ok()?;
        (n_timed > 0).then(|| f64::from(n_timed) / self.decode_time.as_secs_f64())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing can be done about a closed stderr.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<()> {
    let mut client = connect(&args).await?;
    let colour = stdout().is_terminal();
    // The first request of a server pays for cold caches.
    generate(&mut client, &args, None, |_| Ok(())).await?;
    let (open, close) = if colour { ("\x1b[32m", "\x1b[0m") } else { ("⟦", "⟧") };
    let mut out = stdout();
    writeln!(out, "{open}accepted draft tokens{close} and target tokens:\n")?;
    write!(out, "{}", args.prompt)?;
    let shown = generate(&mut client, &args, None, |delta| {
        let mut out = stdout();
        out.write_all(marked(delta, open, close).as_bytes())?;
        Ok(out.flush()?)
    })
    .await?;
    writeln!(out, "{}\n", shown.finished.tail_text)?;
    summarise(&shown)?;
    if args.compare { compare(&mut client, &args).await } else { Ok(()) }
}

/// Connects, trying again until the server is up.
async fn connect(args: &Args) -> Result<InferenceServiceClient<Channel>> {
    let endpoint = Endpoint::from_shared(format!("http://{}", args.addr))?.tcp_nodelay(true);
    let give_up = Instant::now() + Duration::from_secs(args.connect_timeout);
    loop {
        match endpoint.connect().await {
            Ok(channel) => return Ok(InferenceServiceClient::new(channel)),
            Err(error) if Instant::now() >= give_up => {
                return Err(error).with_context(|| format!("no server at {}", args.addr));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Runs one request and shows each delta as it comes.
async fn generate(
    client: &mut InferenceServiceClient<Channel>,
    args: &Args,
    num_speculative_tokens: Option<u32>,
    mut show: impl FnMut(&TokenDelta) -> Result<()>,
) -> Result<Run> {
    let request = GenerateStreamRequest {
        prompt: Some(Prompt::Text(args.prompt.clone())),
        stopping: Some(StoppingParams {
            max_tokens: Some(args.max_tokens),
            ..StoppingParams::default()
        }),
        speculation: Some(SpeculationParams { num_speculative_tokens }),
        ..GenerateStreamRequest::default()
    };
    let mut stream = client.generate_stream(request).await?.into_inner();
    let (mut token_ids, mut text) = (vec![], String::new());
    let mut first: Option<(Instant, usize)> = None;
    while let Some(message) = stream.message().await? {
        match message.event {
            Some(Event::Delta(delta)) => {
                first.get_or_insert_with(|| (Instant::now(), delta.token_ids.len()));
                show(&delta)?;
                text.extend(delta.text_pieces);
                token_ids.extend(delta.token_ids);
            }
            Some(Event::Finished(finished)) => {
                let (started, n_first) = first.context("the server generated nothing")?;
                text.push_str(&finished.tail_text);
                let decode_time = started.elapsed();
                return Ok(Run { token_ids, text, finished, decode_time, n_first });
            }
            _ => {}
        }
    }
    bail!("the stream ended without its last message")
}

/// The text of a delta with its accepted drafts marked.
fn marked(delta: &TokenDelta, open: &str, close: &str) -> String {
    let n_accepted = (delta.n_accepted as usize).min(delta.text_pieces.len());
    let (accepted, target) = delta.text_pieces.split_at(n_accepted);
    let (accepted, target) = (accepted.concat(), target.concat());
    if accepted.is_empty() { target } else { format!("{open}{accepted}{close}{target}") }
}

fn summarise(run: &Run) -> Result<()> {
    let mut out = stdout();
    let usage = run.finished.usage.unwrap_or_default();
    let (n_prompt, n_cached) = (usage.prompt_tokens, usage.cached_prompt_tokens);
    writeln!(out, "prompt tokens            {n_prompt}, {n_cached} of them from the prefix cache")?;
    writeln!(out, "generated tokens         {}", usage.completion_tokens)?;
    let stats = run.finished.speculation.clone().unwrap_or_default();
    writeln!(out, "verify steps             {}", stats.verify_steps)?;
    if let Some(length) = stats.acceptance_length {
        writeln!(out, "mean acceptance length   {length:.2} tokens a verify step")?;
        writeln!(out, "acceptance by position   {}", rates(&stats))?;
    }
    if let Some(speed) = run.tokens_per_second() {
        writeln!(out, "tokens per second        {speed:.1}")?;
    }
    Ok(())
}

/// The accepted share at each draft position.
fn rates(stats: &SpeculationStats) -> String {
    let pairs = stats.accepted_per_position.iter().zip(&stats.drafted_per_position);
    let rate = |(accepted, drafted): (&u64, &u64)| format!("{}/{}", accepted, drafted);
    pairs.map(rate).collect::<Vec<_>>().join("  ")
}

/// Times the request with and without drafting, in turns, and compares the texts.
async fn compare(client: &mut InferenceServiceClient<Channel>, args: &Args) -> Result<()> {
    let (mut with, mut without) = (vec![], vec![]);
    let quiet = |_: &TokenDelta| Ok(());
    generate(client, args, Some(0), quiet).await?;
    for _ in 0..args.repeats.max(1) {
        let drafted = generate(client, args, None, quiet).await?;
        let plain = generate(client, args, Some(0), quiet).await?;
        if drafted.token_ids != plain.token_ids || drafted.text != plain.text {
            bail!("drafting changed the text:\n{:?}\n{:?}", drafted.text, plain.text);
        }
        with.extend(drafted.tokens_per_second());
        without.extend(plain.tokens_per_second());
    }
    let mut out = stdout();
    let (Some(with), Some(without)) = (median(with), median(without)) else {
        return Ok(writeln!(out, "the text is too short to compare speeds")?);
    };
    writeln!(out, "\nthe same text without drafting, medians of {} runs each:", args.repeats)?;
    writeln!(out, "with drafting            {with:.1} tokens/s")?;
    writeln!(out, "without drafting         {without:.1} tokens/s")?;
    writeln!(out, "ratio                    {:.2}", with / without)?;
    Ok(())
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
