//! Fault cases L23 and L24: what cannot be served is refused at once, and the server goes on.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use grpc_api::inference::v1::generate_request::Prompt;
use grpc_api::inference::v1::{
    GenerateRequest, SamplingParams, SpeculationParams, StoppingParams, TokenIds,
};
use tokio::task::JoinSet;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::harness::{HOLD, OK, Server, Setup, VOCAB, unary};

async fn refusal(server: &Server, request: GenerateRequest) -> Status {
    let status = server.client().generate(request).await.unwrap_err();
    server.check_serves().await;
    status
}

/// Expects INVALID_ARGUMENT for `field`, with `text` in its description.
async fn check_invalid(server: &Server, request: GenerateRequest, field: &str, text: &str) {
    let status = refusal(server, request).await;
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    let violations = status.get_details_bad_request().unwrap().field_violations;
    let violation = violations.iter().find(|violation| violation.field == field);
    let violation = violation.unwrap_or_else(|| panic!("{field} in {violations:?}"));
    assert!(violation.description.contains(text), "{violation:?}");
    assert!(status.message().contains(field), "{}", status.message());
}

fn sampling(sampling: SamplingParams) -> GenerateRequest {
    GenerateRequest { sampling: Some(sampling), ..unary(&[1], 4) }
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
    let reply = server.client().generate(unary(&[1; 12], 20)).await.unwrap().into_inner();
    assert_eq!(reply.finish_reason(), grpc_api::inference::v1::FinishReason::OutOfBlocks);
    server.check_serves().await;
}

#[tokio::test]
async fn bad_parameters_name_the_field() {
    let server = Server::start(Setup::default()).await;
    let mut request = unary(&[1], 4);
    request.stopping = Some(StoppingParams { max_tokens: Some(0), ..Default::default() });
    check_invalid(&server, request, "stopping.max_tokens", "at least 1").await;
    let mut request = unary(&[1], 4);
    request.stopping.as_mut().unwrap().stop_sequences = vec![TokenIds::default()];
    check_invalid(&server, request, "stopping.stop_sequences", "empty").await;
    let mut request = unary(&[1], 4);
    request.stopping.as_mut().unwrap().stop_token_ids = vec![VOCAB];
    check_invalid(&server, request, "stopping.stop_token_ids", "100000").await;
    let mut request = unary(&[1], 4);
    request.speculation = Some(SpeculationParams { num_speculative_tokens: Some(4) });
    check_invalid(&server, request, "speculation.num_speculative_tokens", "3").await;
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
async fn sampling_is_refused_and_says_why() {
    let server = Server::start(Setup::default()).await;
    let with_temperature =
        |t| sampling(SamplingParams { temperature: Some(t), ..Default::default() });
    let field = "sampling.temperature";
    check_invalid(&server, with_temperature(f64::NAN), field, "finite").await;
    check_invalid(&server, with_temperature(-1.0), field, "at least 0").await;
    check_invalid(&server, with_temperature(0.7), field, "only greedy").await;
    for top_p in [0.0, 1.5, f64::NAN] {
        let request = sampling(SamplingParams { top_p: Some(top_p), ..Default::default() });
        check_invalid(&server, request, "sampling.top_p", "above 0").await;
    }
    let with_n = |n| sampling(SamplingParams { n: Some(n), ..Default::default() });
    check_invalid(&server, with_n(0), "sampling.n", "at least 1").await;
    check_invalid(&server, with_n(2), "sampling.n", "only greedy").await;
    let with_bias = |id, bias| {
        let logit_bias = HashMap::from([(id, bias)]);
        sampling(SamplingParams { logit_bias, ..Default::default() })
    };
    let field = "sampling.logit_bias";
    check_invalid(&server, with_bias(VOCAB, 1.0), field, "100000").await;
    check_invalid(&server, with_bias(1, f64::NAN), field, "NaN").await;
    check_invalid(&server, with_bias(1, 1.0), field, "only greedy").await;
    let both =
        SamplingParams { n: Some(2), seed: Some(7), temperature: Some(1.0), ..Default::default() };
    let status = refusal(&server, sampling(both)).await;
    assert_eq!(status.get_details_bad_request().unwrap().field_violations.len(), 2);
    let greedy = SamplingParams {
        temperature: Some(0.0),
        n: Some(1),
        top_p: Some(1.0),
        ..Default::default()
    };
    server.client().generate(sampling(greedy)).await.unwrap();
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
                assert_eq!(reply.into_inner().token_ids.len(), 120);
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
