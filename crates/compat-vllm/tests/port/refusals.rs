//! What is refused, and the names of the fields.

use test_engine::{Script, Setup};
use tonic::{Code, Request};
use tonic_types::StatusExt as _;
use vllm_proto::candidate_tokens::Select;
use vllm_proto::decoding_parameters::{StringChoices, StructuredOutput};
use vllm_proto::generate_request::Prompt;
use vllm_proto::{CandidateTokens, GenerateRequest, KvHintsEnvelope, MediaItem, TokenIds};

use crate::harness::{Server, TEXTS, named, request};

/// Sends a request both ways and returns the fields that are blamed.
async fn blamed(server: &Server, request: GenerateRequest) -> Vec<String> {
    let unary = server.inference().generate(request.clone()).await.unwrap_err();
    let streamed = server.stream(request).await.unwrap_err();
    assert_eq!((unary.code(), unary.message()), (streamed.code(), streamed.message()));
    assert_eq!(unary.code(), Code::InvalidArgument, "{unary:?}");
    let blame = unary.get_details_bad_request().unwrap();
    blame.field_violations.into_iter().map(|violation| violation.field).collect()
}

/// A change that makes a good request a bad one.
type Change = fn(&mut GenerateRequest);

fn structured(request: &mut GenerateRequest, structured: StructuredOutput) {
    request.decoding.get_or_insert_default().structured_output = Some(structured);
}

fn output_candidates(request: &mut GenerateRequest, select: Select) {
    let response = request.response.as_mut().unwrap();
    response.output_logprobs = true;
    response.output_candidates = Some(CandidateTokens { select: Some(select) });
}

/// What this API has and the engine has not.
const ABSENT: &[(&str, Change)] = &[
    ("media", |request| request.media.push(MediaItem::default())),
    ("lora_name", |request| request.lora_name = "a".to_owned()),
    ("kv_hints", |request| request.kv_hints = Some(KvHintsEnvelope::default())),
    ("kv.kv_transfer_params", |request| {
        request.kv.get_or_insert_default().kv_transfer_params = Some(Default::default());
    }),
    ("kv.ec_transfer_params", |request| {
        request.kv.get_or_insert_default().ec_transfer_params = Some(Default::default());
    }),
    ("decoding.structural_tag", |request| {
        structured(request, StructuredOutput::StructuralTag("{}".to_owned()));
    }),
    ("stopping.thinking_token_budget", |request| {
        request.stopping.as_mut().unwrap().thinking_token_budget = Some(0);
    }),
    ("response.skip_special_tokens", |request| {
        request.response.as_mut().unwrap().skip_special_tokens = Some(false);
    }),
    ("response.output_candidates", |request| {
        output_candidates(request, Select::TokenIds(TokenIds { ids: vec![1] }));
    }),
    ("response.output_candidates", |request| output_candidates(request, Select::All(true))),
    ("response.output_candidates", |request| {
        output_candidates(request, Select::TopN(1));
        request.response.as_mut().unwrap().output_logprobs = false;
    }),
    ("response.prompt_candidates", |request| {
        let response = request.response.as_mut().unwrap();
        response.prompt_logprobs = true;
        response.prompt_candidates = Some(CandidateTokens { select: Some(Select::All(true)) });
    }),
];

/// What the engine finds wrong.
const WRONG: &[(&str, Change)] = &[
    ("prompt", |request| request.prompt = None),
    ("token_ids", |request| request.prompt = Some(Prompt::TokenIds(TokenIds::default()))),
    ("token_ids", |request| {
        request.prompt = Some(Prompt::TokenIds(TokenIds { ids: vec![100] }));
    }),
    ("text", |request| request.prompt = Some(Prompt::Text(String::new()))),
    ("text", |request| request.prompt = Some(Prompt::Text("a".repeat(5000)))),
    ("temperature", |request| request.temperature = Some(-1.0)),
    ("sampling.top_p", |request| request.sampling.get_or_insert_default().top_p = Some(0.0)),
    ("sampling.min_p", |request| request.sampling.get_or_insert_default().min_p = Some(2.0)),
    ("decoding.presence_penalty", |request| {
        request.decoding.get_or_insert_default().presence_penalty = 3.0;
    }),
    ("decoding.frequency_penalty", |request| {
        request.decoding.get_or_insert_default().frequency_penalty = f32::NAN;
    }),
    ("decoding.repetition_penalty", |request| {
        request.decoding.get_or_insert_default().repetition_penalty = -1.0;
    }),
    ("decoding.logit_bias", |request| {
        request.decoding.get_or_insert_default().logit_bias.insert(100, 1.0);
    }),
    ("decoding.allowed_token_ids", |request| {
        request.decoding.get_or_insert_default().allowed_token_ids = vec![100];
    }),
    ("decoding.bad_words_token_ids", |request| {
        request.decoding.get_or_insert_default().bad_words_token_ids = vec![TokenIds::default()];
    }),
    ("decoding.json", |request| structured(request, StructuredOutput::Json("{".to_owned()))),
    ("decoding.regex", |request| structured(request, StructuredOutput::Regex("(".to_owned()))),
    ("decoding.grammar", |request| {
        structured(request, StructuredOutput::Grammar("root ::= \"a\"".to_owned()));
    }),
    ("decoding.choice", |request| {
        structured(request, StructuredOutput::Choice(StringChoices::default()));
    }),
    ("decoding.choice", |request| {
        let choices = vec!["a".repeat(70_000)];
        structured(request, StructuredOutput::Choice(StringChoices { choices }));
    }),
    ("stopping.min_new_tokens", |request| {
        request.stopping.as_mut().unwrap().min_new_tokens = 9;
    }),
    ("stopping.min_new_tokens", |request| {
        // More than the model takes, without a limit of the request's own.
        let stopping = request.stopping.as_mut().unwrap();
        (stopping.max_new_tokens, stopping.min_new_tokens) = (0, 100_000);
    }),
    ("stopping.stop_token_ids", |request| {
        request.stopping.as_mut().unwrap().stop_token_ids = vec![100];
    }),
    ("stopping.stop_strings", |request| {
        request.stopping.as_mut().unwrap().stop_strings = vec![String::new()];
    }),
    ("response.output_candidates.top_n", |request| {
        output_candidates(request, Select::TopN(21));
    }),
    ("kv.cache_salt", |request| {
        request.kv.get_or_insert_default().cache_salt = "a".repeat(257);
    }),
];

#[tokio::test]
async fn faults_name_fields_as_this_api_does() {
    let server = Server::saying(&[8]).await;
    for (field, change) in ABSENT.iter().chain(WRONG) {
        let mut request = named("again", request(&[7], 8));
        change(&mut request);
        assert_eq!(blamed(&server, request).await, [*field]);
    }
    // All faults of one kind at once.
    let mut request = request(&[7], 8);
    ABSENT.iter().take(3).for_each(|(_, change)| change(&mut request));
    assert_eq!(blamed(&server, request).await, ["media", "lora_name", "kv_hints"]);
    server.of.wait_until_empty().await;
}

#[tokio::test]
async fn several_outputs_need_a_stream() {
    let server = Server::saying(&[8]).await;
    let mut asked = request(&[7], 2);
    asked.sampling.get_or_insert_default().num_sequences = 2;
    let refused = server.inference().generate(asked.clone()).await.unwrap_err();
    assert!(refused.message().starts_with("sampling.num_sequences: "), "{refused:?}");
    assert!(refused.message().contains("use GenerateStream"));
    assert!(server.stream(asked.clone()).await.is_ok());
    asked.sampling.as_mut().unwrap().num_sequences = u32::MAX;
    let refused = server.stream(asked).await.unwrap_err();
    assert!(refused.message().starts_with("sampling.num_sequences: "), "{refused:?}");
}

#[tokio::test]
async fn a_model_without_a_tokenizer_takes_and_gives_ids() {
    let script = Script::fixed(TEXTS.len(), 1, &[8, 9]);
    let server = Server::start(Setup { script: Some(script), ..Setup::default() }).await;
    let mut asked = request(&[7], 2);
    let (_, output) = server.both(asked.clone()).await;
    assert_eq!((output.token_ids.as_slice(), output.text.as_str()), (&[8, 9][..], ""));
    asked.response.as_mut().unwrap().output_text = Some(true);
    asked.stopping.as_mut().unwrap().stop_strings = vec!["a".to_owned()];
    let fields = blamed(&server, asked).await;
    assert_eq!(fields, ["stopping.stop_strings", "response.output_text"]);
    let prompt = Some(Prompt::Text("a".to_owned()));
    assert_eq!(blamed(&server, GenerateRequest { prompt, ..request(&[], 2) }).await, ["text"]);
}

#[tokio::test]
async fn other_models_and_ranks_are_refused() {
    let server = Server::saying(&[8]).await;
    let of_model = |model: &str| GenerateRequest { model: model.to_owned(), ..request(&[7], 1) };
    assert!(server.stream(of_model("counting")).await.is_ok());
    let refused = server.stream(of_model("other")).await.unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
    for (rank, code) in
        [("0", Code::Ok), ("1", Code::InvalidArgument), ("a", Code::InvalidArgument)]
    {
        let mut request = Request::new(request(&[7], 1));
        request.metadata_mut().insert("x-data-parallel-rank", rank.parse().unwrap());
        let answer = server.inference().generate(request).await;
        assert_eq!(answer.map_or_else(|status| status.code(), |_| Code::Ok), code, "{rank}");
    }
}
