//! Drives a running server with many clients of all kinds for a while, some of them rude, and
//! counts what each of their calls got.
//!
//! **Owns** the program `soak`: clients from a seed, what each call may come to, the samples of the
//! server's memory and engine, the counts. `docs/load.md` says how it is run.
//! **Must not know** how a server works: it sees the gRPC port and, through `/proc`, a process.
//!
//! **Invariants**: every call comes to exactly one outcome that its kind allows, or counts as
//! unexpected; a call without an end is unexpected after the patience; repeated requests generate
//! what they did the first time; the engine is empty once all clients are gone. A run in which one
//! of these does not hold fails.
//!
//! ```
//! use clap::Parser as _;
//!
//! let args = soak::Args::try_parse_from(["soak", "--address", "127.0.0.1:50051"])?;
//! assert_eq!(args.clients, 64);
//! assert!(soak::Args::try_parse_from(["soak", "--terminate"]).is_err(), "needs --pid");
//! # Ok::<(), clap::Error>(())
//! ```

mod answer;
mod client;
mod connection;
mod phases;
mod requests;
mod rng;
mod sample;
mod tally;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use clap::Parser;
use grpc_api::control::v1::{GetModelInfoRequest, GetServerInfoRequest};
use serde_json::json;

use crate::client::Shared;
use crate::connection::Connection;
use crate::requests::Limits;
use crate::sample::spread;
use crate::tally::Tally;

/// What the longest requests need.
const MODEL_LEN_MIN: u32 = 1024;

/// Drives a running server with clients of all kinds, and counts what each call got
#[derive(Clone, Debug, Parser)]
pub struct Args {
    /// Address of the server, host:port
    #[arg(long, default_value = "127.0.0.1:50051")]
    pub address: String,
    /// Clients at a time, one connection each
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub clients: u32,
    /// Minutes of load
    #[arg(long, default_value_t = 10.0)]
    pub minutes: f64,
    /// Seed of everything that clients choose
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Process of the server, for its memory, open files and threads
    #[arg(long)]
    pub pid: Option<u32>,
    /// At the end send the process SIGTERM under load and check that it keeps its promises
    #[arg(long, requires = "pid")]
    pub terminate: bool,
    /// The server's --drain-timeout, in seconds
    #[arg(long, default_value_t = 30)]
    pub drain_timeout: u64,
    /// Seconds within which a call must end
    #[arg(long, default_value_t = 120)]
    pub patience: u64,
    /// File for the results as JSON
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// Runs it all and returns the results as Markdown, and whether everything was as expected.
///
/// # Errors
///
/// With a message, if the run cannot go on: no server, an engine that is never empty, a file that
/// cannot be written.
pub async fn run(args: &Args) -> Result<(String, bool), String> {
    let control = Connection::open(&args.address, None)
        .await
        .map_err(|error| format!("no server at {}: {error:?}", args.address))?;
    let limits = limits(&control).await?;
    let shared = Arc::new(Shared {
        address: args.address.clone(),
        control,
        limits,
        patience: Duration::from_secs(args.patience),
        drain_timeout: Duration::from_secs(args.drain_timeout),
        tally: Mutex::default(),
        stop: false.into(),
        signalled: OnceLock::new(),
    });
    let (clients, time) = ((args.clients, args.seed), Duration::from_secs_f64(args.minutes * 60.0));
    let loaded = phases::load(&shared, clients, (time, args.pid)).await;
    let tally = std::mem::take(&mut *shared.tally());
    let mut report = summary("Load", &tally);
    let samples = loaded.map_err(|fault| format!("{fault}\n{report}"))?;
    report += &format!("\n{}", samples.table());
    // All that it has seen stays what repeated requests are compared with.
    let mut results = json!({ "load": tally.json(), "samples": samples.json() });
    let mut n_unexpected = tally.n_unexpected();
    shared.tally().repeated = tally.repeated;

    let times = phases::departures(&shared, args.clients).await?;
    let points: Vec<_> = times.iter().map(|time| (0.0, *time)).collect();
    if let Some([min, median, max]) = spread(&points) {
        let n = args.clients;
        report += &format!(
            "\n{n} clients left at once, {} times; until the engine was empty: \
             {min:.0} ms at least, {median:.0} ms in the middle, {max:.0} ms at most.\n",
            times.len(),
        );
    }
    results["departures_ms"] = json!(times);
    if let (true, Some(pid)) = (args.terminate, args.pid) {
        let ended = phases::terminate(&shared, clients, pid).await;
        let tally = std::mem::take(&mut *shared.tally());
        report += &format!("\n{}", summary("SIGTERM under load", &tally));
        let seconds = ended.map_err(|fault| format!("{fault}\n{report}"))?;
        report += &format!("\nThe server ended {seconds:.1} s after the signal.\n");
        results["terminate"] = tally.json();
        n_unexpected += tally.n_unexpected();
    }
    if let Some(path) = &args.json {
        let written = std::fs::write(path, format!("{results:#}\n"));
        written.map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    Ok((report, n_unexpected == 0))
}

fn summary(title: &str, tally: &Tally) -> String {
    format!(
        "{title}: {} outcomes, {} tokens; {} answers to repeated requests compared; {} \
         unexpected.\n\n{}",
        tally.n_outcomes(),
        tally.n_tokens,
        tally.n_compared,
        tally.n_unexpected(),
        tally.table(),
    )
}

async fn limits(connection: &Connection) -> Result<Limits, String> {
    let fault = |status: tonic::Status| format!("the server does not tell what it is: {status:?}");
    let mut control = connection.control();
    let model = control.get_model_info(GetModelInfoRequest {}).await.map_err(fault)?.into_inner();
    let server = control.get_server_info(GetServerInfoRequest {}).await.map_err(fault)?;
    if !model.has_tokenizer || model.max_model_len < MODEL_LEN_MIN {
        let message = "needs a model with a tokenizer and a length of at least";
        return Err(format!("{message} {MODEL_LEN_MIN} tokens"));
    }
    Ok(Limits {
        vocab_size: model.vocab_size,
        max_model_len: model.max_model_len,
        max_drafts: model.num_speculative_tokens,
        max_request_bytes: server.into_inner().max_request_bytes,
    })
}
