//! Clients that leave, fault case L22: their requests are gone, whatever they were doing.

use std::time::{Duration, Instant};

use engine::EngineStats;
use engine_types::OutputMode;
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::output_constraint::Kind;
use grpc_api::inference::v1::{
    AbortRequestRequest, GenerateStreamRequest, OutputConstraint, SamplingParams,
};
use tonic::Code;

use crate::access::{self, start_when_free, with};
use crate::harness::{PATIENCE, Raw, Server, Setup, end, framed, streaming, unary};

/// How a client goes.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// It resets the call.
    Reset,
    /// It closes its connection.
    Close,
    /// It asks for the end.
    Abort,
}

const WAYS: [Way; 3] = [Way::Reset, Way::Close, Way::Abort];

/// A server with steps of 10 ms, and room for `max_num_seqs` outputs.
fn slow(max_num_seqs: u32) -> Setup {
    let mut setup = Setup { step_time: Duration::from_millis(10), ..Setup::default() };
    setup.limits.max_num_seqs = max_num_seqs;
    setup
}

async fn wait_for(server: &Server, is_so: impl Fn(&EngineStats) -> bool) {
    let started = Instant::now();
    while !is_so(&server.engine.stats()) {
        assert!(started.elapsed() < PATIENCE, "{:?}", server.engine.stats());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Starts a call, waits until the engine is as it should be, and leaves.
async fn leave(
    server: &Server,
    request: &GenerateStreamRequest,
    way: Way,
    is_so: impl Fn(&EngineStats) -> bool,
) {
    let raw = Raw::connect(server.address).await;
    let (response, mut body) = raw.open("GenerateStream", &[]).await.unwrap();
    body.send_data(framed(request), true).unwrap();
    wait_for(server, is_so).await;
    match way {
        Way::Reset => body.send_reset(h2::Reason::CANCEL),
        Way::Close => raw.close(),
        Way::Abort => {
            let response = response.await.unwrap();
            let ids = response.headers()["tandem-request-ids"].to_str().unwrap().to_owned();
            for id in ids.split(',') {
                let abort = AbortRequestRequest { request_id: id.parse().unwrap() };
                server.client().abort_request(abort).await.unwrap();
            }
            assert_eq!(end(response).await.code(), Code::Ok);
        }
    }
}

#[tokio::test]
async fn from_the_queue() {
    for way in WAYS {
        let server = Server::start(slow(1)).await;
        let mut running =
            server.client().generate_stream(streaming(&[1], 4000)).await.unwrap().into_inner();
        leave(&server, &streaming(&[2], 4000), way, |stats| stats.scheduler.n_waiting == 1).await;
        server.wait_until_unfinished(1).await;
        assert!(running.message().await.unwrap().is_some());
    }
}

#[tokio::test]
async fn in_the_middle_of_a_prompt() {
    let request = streaming(&vec![7; 3000], 900);
    for way in WAYS {
        let server = Server::start(slow(8)).await;
        leave(&server, &request, way, |stats| stats.scheduler.blocks.n_used >= 8).await;
        server.wait_until_empty().await;
    }
}

#[tokio::test]
async fn while_tokens_are_generated_and_a_step_is_in_flight() {
    for output_mode in [OutputMode::Immediate, OutputMode::Deferred] {
        for way in WAYS {
            let server = Server::start(Setup { output_mode, ..slow(8) }).await;
            let request = streaming(&[1], 4000);
            leave(&server, &request, way, |stats| stats.scheduler.n_generated_tokens > 20).await;
            server.wait_until_empty().await;
            server.check_serves().await;
        }
    }
}

#[tokio::test]
async fn with_siblings_that_wait() {
    let mut request = streaming(&[1], 4000);
    request.sampling = Some(SamplingParams { n: Some(3), ..SamplingParams::default() });
    for way in WAYS {
        let server = Server::start(slow(1)).await;
        leave(&server, &request, way, |stats| stats.n_unfinished == 3).await;
        server.wait_until_empty().await;
    }
}

#[tokio::test]
async fn behind_what_was_never_read() {
    for way in WAYS {
        // The client's window takes a few messages, the buffer the rest.
        let mut setup = Setup { step_time: Duration::ZERO, ..Setup::default() };
        setup.frontend.max_buffered_steps = 1 << 20;
        setup.limits.max_model_len = 400_000;
        setup.limits.num_blocks = 40_000;
        let server = Server::start(setup).await;
        let n_unread = |stats: &EngineStats| stats.scheduler.n_generated_tokens > 30_000;
        leave(&server, &streaming(&[1], 390_000), way, n_unread).await;
        server.wait_until_empty().await;
        server.check_serves().await;
    }
}

/// Runs a test on a runtime whose only thread for long work is taken.
fn with_busy_workers(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let (free, taken) = std::sync::mpsc::channel::<()>();
    runtime.spawn_blocking(move || taken.recv());
    runtime.block_on(test);
    drop(free);
}

/// A request that waits for its text to be encoded, one that waits for its turn to, and one that
/// waits for its constraint to be compiled.
fn waiting() -> [GenerateStreamRequest; 3] {
    let text = |text: String| GenerateStreamRequest {
        prompt: Some(Prompt::Text(text)),
        ..GenerateStreamRequest::default()
    };
    let constraint = Some(OutputConstraint { kind: Some(Kind::Regex("a+".into())) });
    let constrained = GenerateStreamRequest { constraint, ..streaming(&[1], 20) };
    [text("a".into()), text("a ".repeat(40_000)), constrained]
}

/// What [`waiting`] needs.
fn texts() -> Setup {
    let mut setup = Setup { tokenizer: true, eos_token_ids: &[2], ..slow(8) };
    setup.limits.max_model_len = 100_000;
    setup.limits.num_blocks = 10_000;
    setup
}

#[test]
fn before_the_engine_has_the_request() {
    with_busy_workers(async {
        for request in waiting() {
            let server = access::server(texts(), Some("ann:hush-1\n"), None, Some(3)).await;
            let mut calls = vec![];
            for _ in 0..3 {
                let (mut client, request) = (server.client(), request.clone());
                calls.push(tokio::spawn(async move {
                    // One that looks whether there is a place may have taken it.
                    while let Err(status) =
                        client.generate_stream(with("Bearer hush-1", request.clone())).await
                    {
                        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
                    }
                }));
            }
            // All three are there once there is no place for a fourth.
            let started = Instant::now();
            while server.client().generate(with("Bearer hush-1", unary(&[1], 1))).await.is_ok() {
                assert!(started.elapsed() < PATIENCE);
            }
            calls.iter().for_each(tokio::task::JoinHandle::abort);
            let mut all = vec![];
            for _ in 0..3 {
                all.push(start_when_free(&server).await);
            }
            server.wait_until_unfinished(3).await;
        }
    });
}

#[test]
fn a_deadline_ends_what_the_engine_does_not_have_yet() {
    with_busy_workers(async {
        let server = Server::start(texts()).await;
        let raw = Raw::connect(server.address).await;
        for request in waiting() {
            for method in ["GenerateStream", "Generate"] {
                // Both have the same fields.
                let status = raw.call(method, &[("grpc-timeout", "50m")], &request).await;
                assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
            }
        }
        server.check_serves().await;
        server.wait_until_empty().await;
    });
}

/// Prints how long requests outlive their clients.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn how_long_requests_outlive_their_clients() {
    let server = Server::start(slow(4)).await;
    let start = || async {
        server.client().generate_stream(streaming(&[1], 4000)).await.unwrap().into_inner()
    };
    let (mut times, mut random) = (vec![], 7_u64);
    for _ in 0..200 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // With four others the request waits in the queue.
        let n_others = 3 + (random >> 33) as usize % 2;
        let mut others = vec![];
        for _ in 0..n_others {
            others.push(start().await);
        }
        server.wait_until_unfinished(n_others).await;
        let request = streaming(&vec![7; [1, 1000, 3000][(random >> 40) as usize % 3]], 900);
        let left_at = Duration::from_millis((random >> 50) % 100);
        let there = std::sync::OnceLock::new();
        let is_time = |stats: &EngineStats| {
            stats.n_unfinished > n_others && there.get_or_init(Instant::now).elapsed() > left_at
        };
        leave(&server, &request, WAYS[(random >> 60) as usize % 3], is_time).await;
        times.push(server.wait_until_unfinished(n_others).await);
        drop(others);
        server.wait_until_empty().await;
    }
    times.sort_unstable();
    let report = format!("median {:?}, largest {:?}\n", times[100], times[199]);
    std::io::Write::write_all(&mut std::io::stdout(), report.as_bytes()).unwrap();
}
