//! What requests are answered.

use compat_smg::engine::GenerateRequest;
use compat_smg::engine::generate_complete::MatchedStop;
use compat_smg::engine::generate_request::Input;
use compat_smg::engine::sampling_params::Constraint;
use compat_smg::engine::{ChoiceConstraint, SamplingParams};
use serving::{CallContext, InferenceEngine as _, whole_reply};

use crate::harness::{Script, Server, Setup, read, request, streaming, with};

/// A server whose ids have `texts`, and whose model says `tokens` behind a prompt of one token.
async fn scripted(texts: &'static [&'static str], tokens: &'static [u32]) -> Server {
    let script = Some(Script::fixed(texts.len(), 1, tokens));
    let eos_token_ids = &[2];
    let mut setup = Setup { tokenizer: true, texts, script, eos_token_ids, ..Setup::default() };
    setup.limits.vocab_size = u32::try_from(texts.len()).unwrap();
    Server::start(setup).await
}

const TEXTS: &[&str] = &["a", "b", "<s>", "y", "c", "d", "e", "f", "x", "m"];

#[tokio::test]
async fn both_ways_say_the_same_as_the_own_api() {
    let server = Server::start(Setup::default()).await;
    let messages = server.frontend.generate(CallContext::default(), streaming(&[5, 6], 40));
    let own = whole_reply(messages.await.unwrap(), 1, false).await.unwrap().outputs.remove(0);
    let stats = own.speculation.unwrap();
    assert!(stats.accepted_tokens > 0 && stats.accepted_tokens < stats.draft_tokens);

    let streamed = server.generate(request("s", &[5, 6], 40)).await.unwrap();
    assert_eq!(streamed.streamed(0), own.token_ids);
    assert!(streamed.chunks.iter().all(|chunk| chunk.prompt_tokens == 2));
    let n_told: u32 = streamed.chunks.iter().map(|chunk| chunk.completion_tokens).sum();
    assert_eq!(n_told, 40);
    // One message a step, so that accepted drafts come together.
    assert!(streamed.chunks.len() < 40);

    let whole = GenerateRequest { stream: false, ..request("w", &[5, 6], 40) };
    let whole = server.generate(whole).await.unwrap();
    assert_eq!((whole.chunks.len(), whole.completes.len()), (0, 1));
    assert_eq!(whole.completes[0].output_ids, own.token_ids);

    for complete in [&streamed.completes[0], &whole.completes[0]] {
        assert_eq!(complete.finish_reason, "length");
        assert_eq!((complete.prompt_tokens, complete.completion_tokens), (2, 40));
        assert_eq!(u64::from(complete.spec_accepted_tokens), stats.accepted_tokens);
        assert_eq!(u64::from(complete.spec_draft_tokens), stats.draft_tokens);
    }
    assert_eq!(streamed.completes[0].output_ids, [0; 0], "they have all been streamed");
    server.wait_until_empty().await;
}

#[tokio::test]
async fn each_output_has_its_own_end_and_cached_tokens_are_told() {
    let server = Server::start(Setup::default()).await;
    let prompt: Vec<u32> = (100..140).collect();
    for (name, n_cached) in [("first", 0), ("second", 32)] {
        let request = with(request(name, &prompt, 5), |params| params.n = 3);
        let answer = server.generate(request).await.unwrap();
        let mut indices: Vec<u32> =
            answer.completes.iter().map(|complete| complete.index).collect();
        indices.sort_unstable();
        assert_eq!(indices, [0, 1, 2]);
        assert!((0..3).all(|index| answer.streamed(index) == [140, 141, 142, 143, 144]));
        let first = answer.completes.iter().find(|complete| complete.index == 0).unwrap();
        assert_eq!(first.cached_tokens, n_cached);
    }
}

#[tokio::test]
async fn what_ended_an_output_is_named_if_the_request_asked_for_it() {
    let server = scripted(TEXTS, &[8, 9, 3, 4, 2]).await;
    let text = |text: &str| Some(MatchedStop::MatchedStopStr(text.to_owned()));
    let id = |id| Some(MatchedStop::MatchedTokenId(id));
    type Change = fn(&mut SamplingParams);
    let cases: [(Change, &[u32], &str, _); 5] = [
        (|params| params.stop = vec!["q".into(), "my".into()], &[8, 9, 3], "stop", text("my")),
        (|params| params.stop_token_ids = vec![9], &[8, 9], "stop", id(9)),
        (|params| params.max_tokens = Some(2), &[8, 9], "length", None),
        // The model's own end is none of the request's conditions.
        (|params| params.ignore_eos = false, &[8, 9, 3, 4, 2], "stop", None),
        (
            |params| (params.stop_token_ids, params.min_tokens) = (vec![3, 4], 3),
            &[8, 9, 0, 4],
            "stop",
            id(4),
        ),
    ];
    for (change, tokens, reason, matched) in cases {
        let answer = server.generate(with(request("a", &[0], 20), change)).await.unwrap();
        let complete = &answer.completes[0];
        assert_eq!(answer.streamed(0), tokens);
        assert_eq!((complete.finish_reason.as_str(), &complete.matched_stop), (reason, &matched));
    }
}

#[tokio::test]
async fn outputs_keep_to_constraints() {
    // Left alone it says `xmcd`.
    let server = scripted(TEXTS, &[8, 9, 4, 5]).await;
    let choices = |choices: &[&str]| {
        let choices = choices.iter().map(|&choice| choice.to_owned()).collect();
        Constraint::Choice(ChoiceConstraint { choices })
    };
    let cases: [(_, &[u32]); 4] = [
        (Constraint::Regex("x*my".into()), &[8, 9, 3]),
        (Constraint::Grammar("start: \"x\" \"m\" \"y\"".into()), &[8, 9, 3]),
        // Were they not taken literally, `x.` would let `xm` through.
        (choices(&["x.", "xay"]), &[8, 0, 3]),
        (Constraint::JsonObject(false), &[8, 9, 4, 5, 5, 5, 5, 5]),
    ];
    for (constraint, tokens) in cases {
        let request = with(request("c", &[0], 8), |params| {
            (params.ignore_eos, params.constraint) = (false, Some(constraint.clone()));
        });
        let answer = server.generate(request).await.unwrap();
        assert_eq!(answer.streamed(0), tokens, "{constraint:?}");
    }
}

#[tokio::test]
async fn json_objects_and_text_prompts_need_the_tokenizer_alone() {
    let script = Script::new(|_| vec![0.0; 4096], |_| 7);
    let mut setup =
        Setup { tokenizer: true, script: Some(script), eos_token_ids: &[1], ..Setup::default() };
    setup.limits.vocab_size = 4096;
    let server = Server::start(setup).await;
    let schema = r#"{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],
                     "additionalProperties":false}"#;
    for constraint in [Constraint::JsonObject(true), Constraint::JsonSchema(schema.into())] {
        let mut request = with(request("j", &[], 300), |params| {
            (params.temperature, params.seed) = (Some(1.0), Some(-3));
            (params.ignore_eos, params.constraint) = (false, Some(constraint.clone()));
        });
        request.input = Some(Input::Text("{".into()));
        request.stream = false;
        let answer = server.generate(request.clone()).await.unwrap();
        let complete = &answer.completes[0];
        assert!(complete.prompt_tokens > 0);
        let text = {
            let folder = server.frontend.checkpoint_dir().unwrap();
            let tokenizer = tokenization::Tokenizer::load(&folder).unwrap();
            let mut text = String::new();
            let mut output = tokenizer.output_text(&tokenization::StopRules::default());
            complete.output_ids.iter().for_each(|id| output.push(*id, &mut text));
            text
        };
        assert!(text.trim_start().starts_with('{'), "{text}");
        if complete.finish_reason == "stop" {
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert!(value.is_object());
        }
        // A seed makes it the same again.
        assert_eq!(server.generate(request).await.unwrap(), answer);
    }
}

#[tokio::test]
async fn log_probabilities_are_those_of_the_own_api() {
    let server = scripted(TEXTS, &[8, 9, 3]).await;
    let change = |params: &mut SamplingParams| {
        (params.logprobs, params.prompt_logprobs) = (Some(2), Some(1));
    };
    let mut own = streaming(&[0, 1, 4], 3);
    let sampling = own.sampling.get_or_insert_default();
    (sampling.logprobs, sampling.prompt_logprobs) = (Some(2), Some(1));
    let messages = server.frontend.generate(CallContext::default(), own).await.unwrap();
    let own = whole_reply(messages, 1, true).await.unwrap();

    let request = with(request("l", &[0, 1, 4], 3), change);
    let streamed = server.generate(request.clone()).await.unwrap();
    let whole = server.generate(GenerateRequest { stream: false, ..request }).await.unwrap();
    let of_chunks = streamed.chunks.iter().map(|chunk| chunk.output_logprobs.clone().unwrap());
    let of_chunks: Vec<f32> = of_chunks.flat_map(|of| of.token_logprobs).collect();
    let of_whole = whole.completes[0].output_logprobs.clone().unwrap();
    let expected: Vec<f32> = own.outputs[0].logprobs.iter().map(|of| of.logprob).collect();
    assert_eq!((&of_chunks, &of_whole.token_logprobs), (&expected, &expected));
    assert_eq!(of_whole.token_ids, own.outputs[0].token_ids);
    for (told, own) in of_whole.top_logprobs.iter().zip(&own.outputs[0].logprobs) {
        assert_eq!(told.token_ids.len(), 2);
        let ids: Vec<u32> = own.top.iter().map(|top| top.token_id).collect();
        assert_eq!(told.token_ids, ids);
    }

    let of_prompt = whole.completes[0].input_logprobs.clone().unwrap();
    assert_eq!(of_prompt.token_ids, [0, 1, 4]);
    let values: Vec<Option<f32>> = of_prompt.token_logprobs.iter().map(|of| of.value).collect();
    let expected = own.prompt_logprobs.iter().map(|of| Some(of.logprob));
    assert_eq!(values, std::iter::once(None).chain(expected).collect::<Vec<_>>());
    assert_eq!(of_prompt.top_logprobs.len(), 3);
    assert_eq!(streamed.chunks[0].input_logprobs, Some(of_prompt));
    assert!(streamed.chunks[1..].iter().all(|chunk| chunk.input_logprobs.is_none()));
}

#[tokio::test]
async fn parameters_reach_the_sampler_and_zeros_say_nothing() {
    let script = Script::fixed(10, 1, &[3]);
    let seen = script.seen.clone();
    let mut setup = Setup { script: Some(script), ..Setup::default() };
    setup.limits.vocab_size = 10;
    let server = Server::start(setup).await;
    let plain = SamplingParams { max_tokens: Some(1), ..SamplingParams::default() };
    let full = SamplingParams {
        temperature: Some(0.5),
        top_p: 0.75,
        top_k: 7,
        min_p: 0.25,
        frequency_penalty: -1.5,
        presence_penalty: 1.25,
        repetition_penalty: 2.0,
        seed: Some(42),
        logit_bias: [(3, 2.5)].into(),
        ..plain.clone()
    };
    for params in [plain, full] {
        let request = GenerateRequest { sampling_params: Some(params), ..request("p", &[0], 1) };
        read(server.client().generate(request).await.unwrap().into_inner()).await.unwrap();
    }
    let seen = seen.lock().unwrap();
    let [plain, full] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!(full.seed, 42);
    let (plain, full) = (&plain.params, &full.params);
    assert_eq!((plain.temperature, plain.top_p, plain.top_k, plain.min_p), (1.0, 1.0, 0, 0.0));
    assert_eq!(plain.repetition_penalty, 1.0);
    assert_eq!((full.temperature, full.top_p, full.top_k, full.min_p), (0.5, 0.75, 7, 0.25));
    assert_eq!((full.frequency_penalty, full.presence_penalty), (-1.5, 1.25));
    assert_eq!(full.repetition_penalty, 2.0);
    assert_eq!(full.logit_bias, [(3, 2.5)]);
}
