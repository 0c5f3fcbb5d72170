//! Calls that end early: their requests are freed, in whatever state they are.

use std::sync::atomic::Ordering;

use compat_smg::engine::generate_response::Response;
use compat_smg::engine::{AbortRequest, GenerateRequest, GenerateResponse};
use engine_types::ExecutorLimits;
use tonic::{Code, Streaming};

use crate::harness::{Answer, HOLD, OK, PATIENCE, Server, Setup, read, request, with};

/// A server of one place that does no step until it is told to.
async fn held() -> Server {
    let setup = Setup::default();
    let limits = ExecutorLimits { max_num_seqs: 1, ..setup.limits };
    let server = Server::start(Setup { limits, ..setup }).await;
    server.fault.store(HOLD, Ordering::SeqCst);
    server
}

impl Server {
    async fn open(&self, request: GenerateRequest) -> Streaming<GenerateResponse> {
        self.client().generate(request).await.unwrap().into_inner()
    }

    async fn abort(&self, names: &[&str]) {
        let request_ids = names.iter().map(|&name| name.to_owned()).collect();
        self.client().abort(AbortRequest { request_ids }).await.unwrap();
    }
}

/// The rest of a call that has to end.
async fn rest(stream: Streaming<GenerateResponse>) -> Answer {
    tokio::time::timeout(PATIENCE, read(stream)).await.unwrap().unwrap()
}

fn check_aborted(answer: &Answer, n_outputs: usize) {
    assert_eq!(answer.completes.len(), n_outputs);
    assert!(answer.completes.iter().all(|complete| complete.finish_reason == "abort"));
}

#[tokio::test]
async fn an_abort_ends_a_call_that_runs_and_one_that_waits() {
    let server = held().await;
    let running = server.open(request("running", &[1], 4000)).await;
    let waiting = server.open(with(request("waiting", &[2], 4000), |params| params.n = 2)).await;
    server.abort(&["waiting", "running", "a stranger"]).await;
    check_aborted(&rest(waiting).await, 2);
    check_aborted(&rest(running).await, 1);
    server.fault.store(OK, Ordering::SeqCst);
    server.wait_until_empty().await;
}

#[tokio::test]
async fn an_abort_during_the_prefill_leaves_nothing() {
    let server = held().await;
    // 3,000 tokens in chunks of 64.
    let stream = server.open(request("long", &[7; 3000], 900)).await;
    while server.engine.stats().scheduler.blocks.n_used == 0 {
        tokio::task::yield_now().await;
    }
    server.abort(&["long"]).await;
    let answer = rest(stream).await;
    check_aborted(&answer, 1);
    assert_eq!(answer.completes[0].prompt_tokens, 3000);
    server.fault.store(OK, Ordering::SeqCst);
    server.wait_until_empty().await;
    assert_eq!(server.engine.stats().scheduler.n_generated_tokens, 0);
}

#[tokio::test]
async fn an_abort_between_tokens_tells_how_many_there_were() {
    let server = Server::start(Setup::default()).await;
    let mut stream = server.open(request("a", &[1], 4000)).await;
    let first = match stream.message().await.unwrap().unwrap().response.unwrap() {
        Response::Chunk(chunk) => chunk.completion_tokens,
        other @ Response::Complete(_) => panic!("{other:?}"),
    };
    server.abort(&["a"]).await;
    let answer = rest(stream).await;
    check_aborted(&answer, 1);
    let n_tokens = first + u32::try_from(answer.streamed(0).len()).unwrap();
    assert_eq!(answer.completes[0].completion_tokens, n_tokens);
    server.wait_until_empty().await;
    // The name is free again.
    assert_eq!(server.generate(request("a", &[1], 2)).await.unwrap().streamed(0), [2, 3]);
}

#[tokio::test]
async fn a_call_that_its_client_drops_is_gone_in_any_state() {
    let server = held().await;
    for stream in [true, false] {
        let call = |name: &str, prompt| {
            let request = GenerateRequest { stream, ..request(name, &[prompt], 4000) };
            let mut client = server.client();
            tokio::spawn(
                async move { read(client.generate(request).await.unwrap().into_inner()).await },
            )
        };
        server.fault.store(HOLD, Ordering::SeqCst);
        let calls = [call("running", 1), call("waiting", 2)];
        while server.engine.stats().n_unfinished < 2 {
            tokio::task::yield_now().await;
        }
        calls.iter().for_each(tokio::task::JoinHandle::abort);
        server.fault.store(OK, Ordering::SeqCst);
        server.wait_until_empty().await;
    }
}

#[tokio::test]
async fn a_name_in_use_is_refused_and_its_call_goes_on() {
    let server = held().await;
    let stream = server.open(request("twice", &[1], 3)).await;
    let refused = server.generate(request("twice", &[1], 3)).await.unwrap_err();
    assert_eq!(refused.code(), Code::AlreadyExists);
    assert!(refused.message().contains("`twice`"), "{}", refused.message());
    server.fault.store(OK, Ordering::SeqCst);
    assert_eq!(rest(stream).await.streamed(0), [2, 3, 4]);
    server.wait_until_empty().await;
    // It is free as soon as its last message is read, whatever the transport has still to say.
    let mut earlier = vec![];
    for _ in 0..20 {
        let mut stream = server.open(request("twice", &[1], 1)).await;
        while !matches!(
            stream.message().await.unwrap().unwrap().response,
            Some(Response::Complete(_))
        ) {}
        earlier.push(stream);
    }
}
