//! Fault cases L23 and L24: what cannot be served is refused at once, and the server goes on.

use std::sync::atomic::Ordering;

use grpc_api::inference::v1::GenerateRequest;
use grpc_api::inference::v1::generate_request::Prompt;
use tokio::task::JoinSet;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::harness::{HOLD, OK, Server, Setup, VOCAB, unary};

pub(crate) async fn refusal(server: &Server, request: GenerateRequest) -> Status {
    let status = server.client().generate(request).await.unwrap_err();
    server.check_serves().await;
    status
}

/// Expects INVALID_ARGUMENT for `field`, with `text` in its description.
pub(crate) async fn check_invalid(
    server: &Server,
    request: GenerateRequest,
    field: &str,
    text: &str,
) {
    let status = refusal(server, request).await;
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    let violations = status.get_details_bad_request().unwrap().field_violations;
    let violation = violations.iter().find(|violation| violation.field == field);
    let violation = violation.unwrap_or_else(|| panic!("{field} in {violations:?}"));
    assert!(violation.description.contains(text), "{violation:?}");
    assert!(status.message().contains(field), "{}", status.message());
}

#[tokio::test]
async fn bad_prompts_name_the_field() {
    let server = Server::start(Setup { tokenizer: true, ..Setup::default() }).await;
    check_invalid(&server, unary(&[], 4), "token_ids", "is empty").await;
    let text = |text: &str| GenerateRequest {
        prompt: Some(Prompt::Text(text.into())),
        ..GenerateRequest::default()
    };
    check_invalid(&server, text(""), "text", "is empty").await;
    check_invalid(&server, GenerateRequest::default(), "prompt", "is missing").await;
    // What a client makes of -1 in an unsigned field.
    check_invalid(&server, unary(&[u32::MAX], 4), "token_ids", "4294967295").await;
    check_invalid(&server, unary(&[VOCAB], 4), "token_ids", "100000").await;
    check_invalid(&server, unary(&[1; 4096], 4), "token_ids", "4095").await;
    check_invalid(&server, text(&"word ".repeat(5000)), "text", "4095").await;
    // Refused before it is encoded, which would take a hundred times its memory.
    check_invalid(&server, text(&"a b ".repeat(1 << 20)), "text", "has 4194304 bytes").await;
}

#[tokio::test]
async fn text_needs_a_tokenizer() {
    let server = Server::start(Setup::default()).await;
    let request = GenerateRequest { prompt: Some(Prompt::Text("a".into())), ..unary(&[1], 4) };
    check_invalid(&server, request, "text", "no tokenizer").await;
}

#[tokio::test]
async fn a_prompt_that_never_fits_the_pool_is_refused() {
    let mut setup = Setup::default();
    setup.limits = engine_types::ExecutorLimits {
        block_size: 4,
        num_blocks: 4,
        max_model_len: 64,
        ..setup.limits
    };
    let server = Server::start(setup).await;
    check_invalid(&server, unary(&[1; 20], 4), "token_ids", "KV pool").await;
    check_invalid(&server, unary(&[1; 16], 4), "token_ids", "KV pool").await;
    // Alone but too long for the pool: a clear end, with what fitted.
    let reply = server.generate(unary(&[1; 12], 20)).await;
    assert_eq!(reply.finish_reason(), grpc_api::inference::v1::FinishReason::OutOfBlocks);
    server.check_serves().await;
}

#[tokio::test]
async fn a_bad_salt_names_the_field_and_is_not_repeated() {
    let server = Server::start(Setup::default()).await;
    let salted =
        |salt: &str| GenerateRequest { cache_salt: Some(salt.to_owned()), ..unary(&[1], 4) };
    check_invalid(&server, salted(""), "cache_salt", "is empty").await;
    // Bytes count, not characters.
    let long = "ß".repeat(128) + "x";
    check_invalid(&server, salted(&long), "cache_salt", "has 257 bytes: use at most 256").await;
    let status = refusal(&server, salted(&long)).await;
    assert!(!format!("{status:?}").contains('ß'), "{status:?}");
    server.client().generate(salted(&long[..256])).await.unwrap();
}

#[tokio::test]
async fn large_messages_are_answered_and_too_large_ones_say_so() {
    let server = Server::start(Setup::default()).await;
    // Three bytes an id: 4.5 MB, above the usual limit of 4 MiB and below this server's.
    let request = unary(&vec![70_000; 1_500_000], 4);
    check_invalid(&server, request, "token_ids", "more than the 4095").await;
    let status = refusal(&server, unary(&vec![70_000; 6_000_000], 4)).await;
    assert_eq!(status.code(), Code::OutOfRange);
    assert!(status.message().contains("16777216"), "{}", status.message());
    assert!(status.message().contains("18000016"), "{}", status.message());
}

#[tokio::test]
async fn a_full_queue_refuses_at_once_and_answers_everyone() {
    let mut setup = Setup { max_queued_requests: 4, ..Setup::default() };
    setup.limits.max_num_seqs = 1;
    let server = Server::start(setup).await;
    server.fault.store(HOLD, Ordering::SeqCst);
    let mut calls = JoinSet::new();
    for i in 0..10 {
        let mut client = server.client();
        calls.spawn(async move { client.generate(unary(&[i], 120)).await });
    }
    let (mut n_served, mut n_refused) = (0, 0);
    while let Some(answer) = calls.join_next().await {
        match answer.unwrap() {
            Ok(reply) => {
                n_served += 1;
                assert_eq!(reply.into_inner().outputs[0].token_ids.len(), 120);
            }
            Err(status) => {
                n_refused += 1;
                assert_eq!(status.code(), Code::ResourceExhausted);
                assert!(status.message().contains("queue is full"), "{}", status.message());
                assert!(status.get_details_retry_info().is_some());
                assert!(status.get_details_quota_failure().is_some());
                if n_refused == 5 {
                    server.fault.store(OK, Ordering::SeqCst);
                }
            }
        }
    }
    assert_eq!((n_served, n_refused), (5, 5));
    server.check_serves().await;
}
