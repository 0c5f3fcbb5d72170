//! Requests that are refused, by the contract's names of their fields.

use std::sync::atomic::Ordering;

use compat_smg::engine::generate_request::Input;
use compat_smg::engine::sampling_params::Constraint;
use compat_smg::engine::{ChoiceConstraint, GenerateRequest, SamplingParams, Unsupported};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::harness::{HOLD, OK, Server, Setup, VOCAB, request, with};

type Plain = fn(&mut SamplingParams);
type Change = Box<dyn Fn(&mut SamplingParams)>;

/// The fields that a refusal blames.
fn blamed(status: &Status) -> Vec<String> {
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    let blame = status.get_details_bad_request().unwrap();
    for violation in &blame.field_violations {
        assert!(status.message().contains(&violation.field), "{status:?}");
    }
    blame.field_violations.into_iter().map(|violation| violation.field).collect()
}

#[tokio::test]
async fn parameters_are_blamed_by_their_names() {
    let setup = Setup { tokenizer: true, eos_token_ids: &[1], ..Setup::default() };
    let server = Server::start(setup).await;
    let cases: [(&str, Plain); 16] = [
        ("temperature", |params| params.temperature = Some(-1.0)),
        ("top_p", |params| params.top_p = 1.5),
        ("top_p", |params| params.top_p = f32::NAN),
        ("min_p", |params| params.min_p = 2.0),
        ("frequency_penalty", |params| params.frequency_penalty = 3.0),
        ("presence_penalty", |params| params.presence_penalty = -3.0),
        ("repetition_penalty", |params| params.repetition_penalty = -1.0),
        ("max_tokens", |params| params.max_tokens = Some(0)),
        ("min_tokens", |params| params.min_tokens = 100),
        ("stop", |params| params.stop = vec![String::new()]),
        ("stop_token_ids", |params| params.stop_token_ids = vec![VOCAB]),
        ("n", |params| params.n = u32::MAX),
        ("logprobs", |params| params.logprobs = Some(-1)),
        ("prompt_logprobs", |params| params.prompt_logprobs = Some(21)),
        ("logit_bias", |params| params.logit_bias = [(-1, 1.0)].into()),
        ("truncate_prompt_tokens", |params| params.truncate_prompt_tokens = Some(-1)),
    ];
    let constraints = [
        ("json_schema", Constraint::JsonSchema("{".into())),
        ("regex", Constraint::Regex("(".into())),
        ("grammar", Constraint::Grammar("root ::= \"a\"".into())),
        ("structural_tag", Constraint::StructuralTag("{}".into())),
        ("choice", Constraint::Choice(ChoiceConstraint::default())),
        ("choice", Constraint::Choice(ChoiceConstraint { choices: vec!["a".repeat(70_000)] })),
    ];
    let cases = cases.map(|(name, change)| (name, Box::new(change) as Change));
    let constraints = constraints.map(|(name, constraint)| {
        let set = move |params: &mut SamplingParams| params.constraint = Some(constraint.clone());
        (name, Box::new(set) as Change)
    });
    for (name, change) in cases.into_iter().chain(constraints) {
        let refused = server.generate(with(request("r", &[1], 8), change)).await.unwrap_err();
        assert_eq!(blamed(&refused), [format!("sampling_params.{name}")]);
    }
    server.wait_until_empty().await;
}

#[tokio::test]
async fn what_is_not_served_is_refused_and_all_faults_are_told_at_once() {
    let server = Server::start(Setup::default()).await;
    let refused = GenerateRequest {
        request_id: String::new(),
        input: None,
        kv_transfer_params: Some(Unsupported {}),
        kv_transfer_params_json: Some("{}".into()),
        mm_inputs: Some(Unsupported {}),
        extra_mm_inputs: vec![Unsupported {}],
        media_refs: Some(Unsupported {}),
        data_parallel_rank: Some(1),
        ..request("", &[1], 8)
    };
    let mut fields = blamed(&server.generate(refused).await.unwrap_err());
    fields.sort();
    let expected = [
        "data_parallel_rank",
        "extra_mm_inputs",
        "input",
        "kv_transfer_params",
        "kv_transfer_params_json",
        "media_refs",
        "mm_inputs",
        "request_id",
    ];
    assert_eq!(fields, expected);
    let rank_0 = GenerateRequest { data_parallel_rank: Some(0), ..request("r", &[1], 2) };
    assert_eq!(server.generate(rank_0).await.unwrap().streamed(0), [2, 3]);
}

#[tokio::test]
async fn prompts_are_blamed_by_the_way_they_came() {
    let server = Server::start(Setup::default()).await;
    for prompt in [vec![], vec![VOCAB], vec![1; 5000]] {
        let refused = server.generate(request("r", &prompt, 8)).await.unwrap_err();
        assert_eq!(blamed(&refused), ["tokenized.input_ids"]);
    }
    let text = |text: &str| Some(Input::Text(text.to_owned()));
    let refused = GenerateRequest { input: text("a"), ..request("r", &[], 8) };
    assert_eq!(blamed(&server.generate(refused.clone()).await.unwrap_err()), ["text"]);
    let refused = with(refused, |params| params.prompt_logprobs = Some(1));
    let fields = blamed(&server.generate(refused).await.unwrap_err());
    assert_eq!(fields, ["sampling_params.prompt_logprobs"]);
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_again() {
    let server = Server::start(Setup { max_queued_requests: 1, ..Setup::default() }).await;
    server.fault.store(HOLD, Ordering::SeqCst);
    let many = |name| with(request(name, &[1], 8), |params| params.n = 8);
    let running = server.client().generate(many("running")).await.unwrap();
    let refused = server.generate(many("refused")).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.get_details_retry_info().is_some());
    drop(running);
    server.fault.store(OK, Ordering::SeqCst);
    server.wait_until_empty().await;
}
