//! Fault case L24: parameters that cannot be honoured are refused by name, and what can is not.

use std::collections::HashMap;

use grpc_api::inference::v1::{
    GenerateRequest, SamplingParams, SpeculationParams, StoppingParams, TokenIds,
};
use tonic_types::StatusExt;

use crate::harness::{Server, Setup, VOCAB, unary};
use crate::refusals::{check_invalid, refusal};

fn sampling(sampling: SamplingParams) -> GenerateRequest {
    GenerateRequest { sampling: Some(sampling), ..unary(&[1], 4) }
}

fn stopping(stopping: StoppingParams) -> GenerateRequest {
    GenerateRequest { stopping: Some(stopping), ..unary(&[1], 4) }
}

fn ids(ids: &[u32]) -> TokenIds {
    TokenIds { ids: ids.to_vec() }
}

#[tokio::test]
async fn numbers_outside_their_range_name_the_field() {
    type Field = fn(&mut SamplingParams) -> &mut Option<f64>;
    let server = Server::start(Setup::default()).await;
    let not_finite = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300];
    let cases: [(&str, &str, Field, &[f64]); 6] = [
        ("temperature", "finite number of at least 0", |s| &mut s.temperature, &[-1.0, -1e-9]),
        ("top_p", "above 0 and at most 1", |s| &mut s.top_p, &[0.0, -0.1, 1.5, 1e-60]),
        ("min_p", "from 0 to 1", |s| &mut s.min_p, &[-0.1, 1.1]),
        ("presence_penalty", "from -2 to 2", |s| &mut s.presence_penalty, &[-2.1, 2.1]),
        ("frequency_penalty", "from -2 to 2", |s| &mut s.frequency_penalty, &[-2.1, 2.1]),
        (
            "repetition_penalty",
            "finite number above 0",
            |s| &mut s.repetition_penalty,
            &[0.0, -1.0],
        ),
    ];
    for (field, text, of_field, values) in cases {
        for value in values.iter().chain(&not_finite) {
            let mut params = SamplingParams::default();
            *of_field(&mut params) = Some(*value);
            check_invalid(&server, sampling(params), &format!("sampling.{field}"), text).await;
        }
    }
    let ends = [
        SamplingParams {
            temperature: Some(0.0),
            top_p: Some(1.0),
            min_p: Some(0.0),
            ..Default::default()
        },
        SamplingParams {
            temperature: Some(9.0),
            top_p: Some(1e-3),
            min_p: Some(1.0),
            ..Default::default()
        },
        SamplingParams {
            presence_penalty: Some(-2.0),
            frequency_penalty: Some(2.0),
            repetition_penalty: Some(1e-3),
            ..Default::default()
        },
    ];
    for params in ends {
        server.generate(sampling(params)).await;
    }
}

#[tokio::test]
async fn counts_outside_their_range_name_the_field() {
    let server = Server::start(Setup::default()).await;
    for n in [0, 129, u32::MAX] {
        let request = sampling(SamplingParams { n: Some(n), ..Default::default() });
        check_invalid(&server, request, "sampling.n", "must be 1 to 128").await;
    }
    for n in [21, u32::MAX] {
        let request = sampling(SamplingParams { logprobs: Some(n), ..Default::default() });
        check_invalid(&server, request, "sampling.logprobs", "at most 20").await;
        let request = sampling(SamplingParams { prompt_logprobs: Some(n), ..Default::default() });
        check_invalid(&server, request, "sampling.prompt_logprobs", "at most 20").await;
    }
    let request = stopping(StoppingParams { max_tokens: Some(0), ..Default::default() });
    check_invalid(&server, request, "stopping.max_tokens", "at least 1").await;
    let request =
        stopping(StoppingParams { max_tokens: Some(4), min_tokens: Some(5), ..Default::default() });
    check_invalid(&server, request, "stopping.min_tokens", "5 is more than max_tokens, 4").await;
    let request = stopping(StoppingParams { min_tokens: Some(4097), ..Default::default() });
    check_invalid(&server, request, "stopping.min_tokens", "4096").await;
    let mut request = unary(&[1], 4);
    request.speculation = Some(SpeculationParams { num_speculative_tokens: Some(4) });
    check_invalid(&server, request, "speculation.num_speculative_tokens", "3").await;
}

#[tokio::test]
async fn ids_outside_the_vocabulary_name_the_field() {
    let server = Server::start(Setup::default()).await;
    let field = "sampling.logit_bias";
    let bias = |id, value| {
        let logit_bias = HashMap::from([(1, 1.0), (id, value)]);
        sampling(SamplingParams { logit_bias, ..Default::default() })
    };
    check_invalid(&server, bias(VOCAB, 1.0), field, "100000").await;
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300] {
        check_invalid(&server, bias(7, value), field, "id 7 must be finite").await;
    }
    let words = |bad_words| sampling(SamplingParams { bad_words, ..Default::default() });
    let field = "sampling.bad_words";
    check_invalid(&server, words(vec![ids(&[1]), ids(&[])]), field, "empty").await;
    check_invalid(&server, words(vec![ids(&[1, VOCAB])]), field, "100000").await;
    let allowed = |allowed| {
        let allowed_token_ids = Some(ids(allowed));
        sampling(SamplingParams { allowed_token_ids, ..Default::default() })
    };
    let field = "sampling.allowed_token_ids";
    check_invalid(&server, allowed(&[]), field, "is empty").await;
    check_invalid(&server, allowed(&[1, VOCAB]), field, "100000").await;
    let stop_ids = |id| stopping(StoppingParams { stop_token_ids: vec![id], ..Default::default() });
    check_invalid(&server, stop_ids(VOCAB), "stopping.stop_token_ids", "100000").await;
    let sequences =
        |stop_sequences| stopping(StoppingParams { stop_sequences, ..Default::default() });
    let field = "stopping.stop_sequences";
    check_invalid(&server, sequences(vec![ids(&[])]), field, "empty").await;
    check_invalid(&server, sequences(vec![ids(&[1, VOCAB])]), field, "100000").await;
}

#[tokio::test]
async fn stop_texts_that_cannot_be_looked_for_name_the_field() {
    let field = "stopping.stop_texts";
    let texts = |texts: &[&str]| {
        let stop_texts = texts.iter().map(|text| (*text).to_owned()).collect();
        stopping(StoppingParams { stop_texts, max_tokens: Some(4), ..Default::default() })
    };
    let server = Server::start(Setup::default()).await;
    check_invalid(&server, texts(&["END"]), field, "no tokenizer").await;
    let server = Server::start(Setup { tokenizer: true, ..Setup::default() }).await;
    check_invalid(&server, texts(&["END", ""]), field, "number 1 is empty").await;
    check_invalid(&server, texts(&["x"; 65]), field, "65 are more than the 64").await;
    let long = "ü".repeat(513);
    check_invalid(&server, texts(&[&long]), field, "number 0 has 1026 bytes").await;
    server.generate(texts(&[&long[2..]; 64])).await;
}

#[tokio::test]
async fn every_fault_is_named_at_once() {
    let server = Server::start(Setup::default()).await;
    let request = GenerateRequest {
        sampling: Some(SamplingParams {
            n: Some(0),
            temperature: Some(f64::NAN),
            top_p: Some(0.0),
            ..Default::default()
        }),
        stopping: Some(StoppingParams { max_tokens: Some(0), ..Default::default() }),
        ..unary(&[VOCAB], 4)
    };
    let status = refusal(&server, request).await;
    let violations = status.get_details_bad_request().unwrap().field_violations;
    let mut fields: Vec<&str> = violations.iter().map(|found| found.field.as_str()).collect();
    fields.sort_unstable();
    let all = ["sampling.n", "sampling.temperature", "sampling.top_p", "stopping.max_tokens"];
    assert_eq!(fields, [&all[..], &["token_ids"]].concat());
}
