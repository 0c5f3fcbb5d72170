//! Random and mutated requests through a real port: no panic, an answer to each call, and an engine
//! that is empty and serves afterwards.
//!
//! By hand, with more of them and other ones:
//!
//! ```text
//! TANDEM_FUZZ_CASES=1000000 TANDEM_FUZZ_SEED=7 cargo test -p grpc-server --test fuzz
//! ```

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

#[path = "../loopback/harness.rs"]
#[expect(dead_code, reason = "the other tests need more of it")]
mod harness;
mod requests;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use prost::bytes::Bytes;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tonic::{Code, Status};

use crate::harness::{PATIENCE, Raw, Script, Server, Setup, status, unary};

/// Calls at a time.
const N_CALLS: usize = 8;

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

fn runner(seed: u64) -> TestRunner {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    TestRunner::new_with_rng(Config::default(), rng)
}

/// Whether an answer is one that the API speaks of.
fn is_fine(status: &Status) -> bool {
    match status.code() {
        Code::Ok | Code::InvalidArgument | Code::ResourceExhausted => true,
        // The scripted model takes an id all the same where allowed ids and a grammar leave none.
        Code::Internal => ["failed to decode Protobuf message", "grammar forbids"]
            .iter()
            .any(|text| status.message().contains(text)),
        _ => false,
    }
}

async fn call(raw: &Raw, method: &str, message: &[u8]) -> Status {
    let mut framed = vec![0];
    framed.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    framed.extend(message);
    let (response, mut body) = raw.open(method, &[]).await.unwrap();
    body.send_data(Bytes::from(framed), true).unwrap();
    status(response).await
}

/// A model that finds all that a grammar allows as likely as anything else.
fn setup() -> Setup {
    let script = Script::new(|_| vec![0.0; 4096], |(at, _)| u32::try_from(at).unwrap());
    let mut setup = Setup { tokenizer: true, eos_token_ids: &[2], ..Setup::default() };
    setup.script = Some(script);
    setup.step_time = Duration::ZERO;
    setup.limits.max_model_len = 64;
    setup.limits.vocab_size = 4096;
    setup
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_message_does_harm() {
    let n_panics = Arc::new(AtomicUsize::new(0));
    let default_hook = std::panic::take_hook();
    let counter = Arc::clone(&n_panics);
    std::panic::set_hook(Box::new(move |info| {
        counter.fetch_add(1, Ordering::SeqCst);
        default_hook(info);
    }));

    let server = Server::start(setup()).await;
    let raw = Arc::new(Raw::connect(server.address).await);
    let mut runner = runner(variable("TANDEM_FUZZ_SEED", 1));
    let messages = requests::messages();
    let turns = Arc::new(Semaphore::new(N_CALLS));
    let mut calls = JoinSet::new();
    for case in 0..variable("TANDEM_FUZZ_CASES", 2000) {
        let message = messages.new_tree(&mut runner).unwrap().current();
        let turn = Arc::clone(&turns).acquire_owned().await.unwrap();
        let raw = Arc::clone(&raw);
        calls.spawn(async move {
            let method = ["GenerateStream", "Generate"][case as usize % 2];
            let answer = tokio::time::timeout(PATIENCE * 2, call(&raw, method, &message)).await;
            let answer = answer.unwrap_or_else(|_| panic!("case {case}: no answer: {message:?}"));
            assert!(is_fine(&answer), "case {case}: {answer:?} to {message:?}");
            drop(turn);
            answer.code()
        });
    }
    let codes = calls.join_all().await;
    for code in [Code::Ok, Code::InvalidArgument, Code::Internal] {
        let n_calls = codes.iter().filter(|of_call| **of_call == code).count();
        assert!(n_calls > codes.len() / 20, "{n_calls} with {code:?} of {}", codes.len());
    }
    server.wait_until_empty().await;
    assert_eq!(server.generate(unary(&[1], 3)).await.token_ids.len(), 3);
    assert_eq!(n_panics.load(Ordering::SeqCst), 0);
}
