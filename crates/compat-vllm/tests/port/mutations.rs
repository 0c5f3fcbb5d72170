//! Random and mutated messages: each is answered, nothing panics, and nothing stays behind.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::any;
use proptest::sample::Index;
use proptest::strategy::{Strategy, ValueTree as _};
use proptest::test_runner::TestRunner;
use prost::Message as _;
use test_engine::{PATIENCE, Script, Setup};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;
use vllm_proto::candidate_tokens::Select;
use vllm_proto::decoding_parameters::{StringChoices, StructuredOutput};
use vllm_proto::generate_request::Prompt;
use vllm_proto::inference_client::InferenceClient;
use vllm_proto::{
    CandidateTokens, DecodingParameters, GenerateRequest, KvCacheParameters, MediaItem,
    RandomSampling, ResponseOptions, StoppingCriteria, TokenIds,
};

use crate::harness::{Server, TEXTS, named, request, scripted};

const N_MESSAGES: usize = 2000;
const AT_ONCE: usize = 16;

/// Messages that each set a field. Behind each other, their bytes are a message with all of them.
fn fragments() -> Vec<Vec<u8>> {
    let mut requests = prompts();
    requests.extend(samplings().map(|sampling| GenerateRequest {
        sampling: Some(sampling),
        ..GenerateRequest::default()
    }));
    requests.extend(decodings().map(|decoding| GenerateRequest {
        decoding: Some(decoding),
        ..GenerateRequest::default()
    }));
    requests.extend(stoppings().map(|stopping| GenerateRequest {
        stopping: Some(stopping),
        ..GenerateRequest::default()
    }));
    requests.extend(responses().map(|response| GenerateRequest {
        response: Some(response),
        ..GenerateRequest::default()
    }));
    requests.iter().map(GenerateRequest::encode_to_vec).collect()
}

fn prompts() -> Vec<GenerateRequest> {
    let of = GenerateRequest::default;
    let prompt = |prompt| GenerateRequest { prompt: Some(prompt), ..of() };
    let ids = |ids: &[u32]| prompt(Prompt::TokenIds(TokenIds { ids: ids.to_vec() }));
    let kv = |kv| GenerateRequest { kv: Some(kv), ..of() };
    vec![
        ids(&[7]),
        ids(&[7, 8, 9, 10, 11, 12, 13]),
        ids(&[8; 40]),
        ids(&[u32::MAX]),
        ids(&[]),
        prompt(Prompt::Text("ab yes".to_owned())),
        prompt(Prompt::Text(String::new())),
        prompt(Prompt::Text("\u{10ffff}\0".to_owned())),
        named("a", of()),
        GenerateRequest { model: "counting".to_owned(), ..of() },
        GenerateRequest { model: "other".to_owned(), ..of() },
        GenerateRequest { temperature: Some(0.7), ..of() },
        GenerateRequest { temperature: Some(f32::NAN), ..of() },
        GenerateRequest { truncate_prompt_tokens: 2, ..of() },
        GenerateRequest { priority: i32::MIN, ..of() },
        GenerateRequest { lora_name: "a".to_owned(), ..of() },
        GenerateRequest { media: vec![MediaItem::default()], ..of() },
        kv(KvCacheParameters { bypass_prefix_cache: true, ..KvCacheParameters::default() }),
        kv(KvCacheParameters { cache_salt: "a".to_owned(), ..KvCacheParameters::default() }),
    ]
}

fn samplings() -> impl Iterator<Item = RandomSampling> {
    let of = RandomSampling::default;
    [
        RandomSampling { num_sequences: 3, ..of() },
        RandomSampling { num_sequences: u32::MAX, ..of() },
        RandomSampling { top_k: Some(2), top_p: Some(0.5), min_p: Some(0.1), ..of() },
        RandomSampling { top_p: Some(f32::NEG_INFINITY), ..of() },
        RandomSampling { seed: Some(i64::MIN), ..of() },
    ]
    .into_iter()
}

fn decodings() -> impl Iterator<Item = DecodingParameters> {
    let of = DecodingParameters::default;
    let structured =
        |structured| DecodingParameters { structured_output: Some(structured), ..of() };
    let text = str::to_owned;
    let choices = vec![text("yes"), text("(no"), String::new()];
    [
        structured(StructuredOutput::Json(text(r#"{"type":"array","items":{"enum":[1,"a"]}}"#))),
        structured(StructuredOutput::Regex(text("[a-e]+(yes|no)?"))),
        structured(StructuredOutput::Choice(StringChoices { choices })),
        structured(StructuredOutput::Grammar(text("start: \"a\" start | \"b\""))),
        structured(StructuredOutput::JsonObject(true)),
        structured(StructuredOutput::StructuralTag(text("{}"))),
        DecodingParameters { presence_penalty: 1.0, frequency_penalty: -1.0, ..of() },
        DecodingParameters { repetition_penalty: 1.1, ..of() },
        DecodingParameters { repetition_penalty: f32::MIN_POSITIVE, ..of() },
        DecodingParameters { logit_bias: [(8, f32::MAX), (9, -1.0)].into(), ..of() },
        DecodingParameters { allowed_token_ids: vec![8, 9, 13], ..of() },
        DecodingParameters { bad_words_token_ids: vec![TokenIds { ids: vec![8, 9] }], ..of() },
    ]
    .into_iter()
}

fn stoppings() -> impl Iterator<Item = StoppingCriteria> {
    let of = StoppingCriteria::default;
    [
        StoppingCriteria { max_new_tokens: 5, ..of() },
        StoppingCriteria { max_new_tokens: u32::MAX, ignore_eos: true, ..of() },
        StoppingCriteria { min_new_tokens: 3, ..of() },
        StoppingCriteria { stop_token_ids: vec![9, 13], ..of() },
        StoppingCriteria { stop_strings: vec!["ab".to_owned(), "s".to_owned()], ..of() },
        StoppingCriteria { include_stop_strings: true, ..of() },
        StoppingCriteria { thinking_token_budget: Some(-1), ..of() },
    ]
    .into_iter()
}

fn responses() -> impl Iterator<Item = ResponseOptions> {
    let of = ResponseOptions::default;
    let candidates = |select| Some(CandidateTokens { select: Some(select) });
    let top = candidates(Select::TopN(3));
    let all = candidates(Select::All(true));
    [
        ResponseOptions { prompt_token_ids: true, output_token_ids: true, ..of() },
        ResponseOptions { prompt_logprobs: true, prompt_candidates: top.clone(), ..of() },
        ResponseOptions { output_logprobs: true, output_candidates: top, ..of() },
        ResponseOptions { output_logprobs: true, output_candidates: all, ..of() },
        ResponseOptions { output_text: Some(false), skip_special_tokens: Some(false), ..of() },
    ]
    .into_iter()
}

/// Good requests with random fragments behind them, half of them with a few bytes changed.
fn messages() -> impl Iterator<Item = GenerateRequest> {
    let fragments = fragments();
    let start = request(&[7, 8], 20).encode_to_vec();
    let chosen = vec(any::<Index>(), 0..6);
    let changed = vec((any::<Index>(), any::<u8>()), 1..4);
    let strategy = (chosen, changed, any::<bool>());
    let mut runner = TestRunner::deterministic();
    std::iter::repeat_with(move || strategy.new_tree(&mut runner).unwrap().current()).filter_map(
        move |(chosen, changed, is_changed)| {
            let chosen = chosen.iter().map(|index| index.get(&fragments));
            let mut bytes =
                chosen.fold(start.clone(), |all, fragment| [all, fragment.clone()].concat());
            for (index, byte) in changed.iter().filter(|_| is_changed) {
                let at = index.index(bytes.len());
                bytes[at] = *byte;
            }
            GenerateRequest::decode(bytes.as_slice()).ok()
        },
    )
}

/// Whether an answer is one that a working server gives.
fn is_proper(answer: &Result<(), Status>) -> bool {
    let Err(status) = answer else { return true };
    match status.code() {
        // Demands that contradict each other leave no token to choose.
        Code::Internal => {
            status.get_details_error_info().is_some_and(|info| info.reason == "STEP_FAILED")
        }
        Code::InvalidArgument => status.get_details_bad_request().is_some(),
        Code::NotFound | Code::AlreadyExists | Code::ResourceExhausted => true,
        _ => false,
    }
}

/// Sends a message, which must be answered, and returns whether it was served.
async fn is_served(
    mut client: InferenceClient<Channel>,
    message: GenerateRequest,
    is_streamed: bool,
) -> bool {
    let call = async {
        if !is_streamed {
            return client.generate(message.clone()).await.map(|_| ());
        }
        let mut stream = client.generate_stream(message.clone()).await?.into_inner();
        while stream.message().await?.is_some() {}
        Ok(())
    };
    let answer = tokio::time::timeout(PATIENCE, call).await.expect("an answer");
    assert!(is_proper(&answer), "{answer:?} to {message:?}");
    answer.is_ok()
}

#[tokio::test]
async fn every_message_is_answered_and_leaves_nothing() {
    let hash = |at: usize, last: u32, id: u32| (at as u32 * 31 + last * 17 + id * id * 7) % 11;
    let logits =
        move |(at, last)| (0..TEXTS.len() as u32).map(|id| hash(at, last, id) as f32).collect();
    let mut setup = Setup {
        step_time: Duration::ZERO,
        max_queued_requests: 256,
        ..scripted(Script::new(logits, |(at, _)| at as u32 % 24))
    };
    setup.limits.max_model_len = 48;
    let server = Server::start(setup).await;
    let (mut calls, mut n_served) = (JoinSet::new(), 0);
    for (idx, message) in messages().take(N_MESSAGES).enumerate() {
        if calls.len() == AT_ONCE {
            n_served += usize::from(calls.join_next().await.unwrap().unwrap());
        }
        calls.spawn(is_served(server.inference(), message, idx % 2 == 0));
    }
    n_served += calls.join_all().await.into_iter().filter(|is_served| *is_served).count();
    // Not all were refused at once.
    assert!(n_served > N_MESSAGES / 5, "{n_served}");
    server.of.wait_until_empty().await;
    let (_, output) = server.both(request(&[7], 5)).await;
    assert!(output.num_tokens > 0);
}
