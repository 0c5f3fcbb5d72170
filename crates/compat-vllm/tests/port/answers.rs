//! What requests get, text or ids, in one message or many.

use std::sync::Arc;

use test_engine::{Script, Setup};
use vllm_proto::finish_info::{FinishReason, StopReason};
use vllm_proto::generate_request::Prompt;
use vllm_proto::{
    DecodingParameters, KvCacheParameters, RandomSampling, ResponseOptions, StoppingCriteria,
    TokenIds,
};

use crate::harness::{Server, TEXTS, end_of, request};

#[tokio::test]
async fn an_output_has_what_was_asked_for() {
    let server = Server::saying(&[8, 9, 10, 11, 12]).await;
    let (prompt, output) = server.both(request(&[7], 4)).await;
    assert_eq!((prompt.num_prompt_tokens, prompt.token_ids), (1, vec![]));
    assert_eq!((output.token_ids.as_slice(), output.text.as_str()), (&[8, 9, 10, 11][..], "abcd"));
    assert_eq!(end_of(&output).finish_reason(), FinishReason::Length);
    assert_eq!(end_of(&output).stop_reason, None);

    // Nothing asked for is text alone.
    let mut plain = request(&[7], 4);
    plain.response = None;
    let (_, output) = server.both(plain.clone()).await;
    assert_eq!((output.token_ids, output.text.as_str(), output.num_tokens), (vec![], "abcd", 4));
    plain.response = Some(ResponseOptions {
        output_text: Some(false),
        prompt_token_ids: true,
        ..ResponseOptions::default()
    });
    let (prompt, output) = server.both(plain).await;
    assert_eq!((prompt.token_ids, output.text.as_str(), output.num_tokens), (vec![7], "", 4));
}

#[tokio::test]
async fn prompts_are_text_or_ids_and_their_end_is_kept() {
    // Counts on from the last token of the prompt.
    let next = |last: u32| (last + 1) % 24;
    let logits = move |(_, last)| {
        let mut logits = vec![0.0; TEXTS.len()];
        logits[next(last) as usize] = 5.0;
        logits
    };
    let server = Server::scripted(Script::new(logits, move |(_, last)| next(last))).await;
    let mut asked = request(&[8, 9, 10], 2);
    asked.response.as_mut().unwrap().prompt_token_ids = true;
    let of_ids = server.both(asked.clone()).await;
    asked.prompt = Some(Prompt::Text("abc".to_owned()));
    let of_text = server.both(asked.clone()).await;
    assert_eq!(of_text.0.token_ids, [8, 9, 10]);
    assert_eq!((&of_text.0, &of_text.1.token_ids), (&of_ids.0, &vec![11, 12]));
    for (n, kept) in [(1, &[10][..]), (2, &[9, 10]), (3, &[8, 9, 10]), (4, &[8, 9, 10])] {
        asked.truncate_prompt_tokens = n;
        let (prompt, output) = server.both(asked.clone()).await;
        assert_eq!((prompt.token_ids.as_slice(), output.text.as_str()), (kept, "de"));
    }
}

#[tokio::test]
async fn an_end_is_told_with_what_caused_it() {
    let server = Server::saying(&[8, 9, 10, 11, 0]).await;
    let ends = |stopping: StoppingCriteria| {
        let mut request = request(&[7], 8);
        request.stopping = Some(stopping);
        server.both(request)
    };
    let stopping = StoppingCriteria::default;
    let (_, output) = ends(stopping()).await;
    assert_eq!(end_of(&output).stop_reason, Some(StopReason::EosTokenId(0)));
    let (_, output) = ends(StoppingCriteria { stop_token_ids: vec![10], ..stopping() }).await;
    assert_eq!(end_of(&output).stop_reason, Some(StopReason::StopTokenId(10)));
    assert_eq!(output.token_ids, [8, 9, 10]);
    let stop_strings = vec!["x".to_owned(), "bc".to_owned()];
    let texts = StoppingCriteria { stop_strings, ..stopping() };
    let (_, output) = ends(texts.clone()).await;
    assert_eq!(end_of(&output).finish_reason(), FinishReason::Stop);
    assert_eq!(end_of(&output).stop_reason, Some(StopReason::StopString("bc".to_owned())));
    assert_eq!((output.token_ids, output.text.as_str()), (vec![8, 9, 10], "a"));
    let (_, output) = ends(StoppingCriteria { include_stop_strings: true, ..texts }).await;
    assert_eq!(output.text, "abc");
    // The model's length is the end where nothing else is.
    let endless = StoppingCriteria { ignore_eos: true, ..stopping() };
    let (_, output) = ends(endless).await;
    assert_eq!(end_of(&output).finish_reason(), FinishReason::Length);
    assert_eq!(output.num_tokens, 4095);
}

#[tokio::test]
async fn a_stream_has_several_outputs_and_tells_the_prompt_once() {
    let server = Server::scripted(Script::new(|_| vec![0.0; TEXTS.len()], |_| 8)).await;
    let mut asked = request(&[7, 8, 9], 6);
    asked.temperature = Some(1.0);
    asked.sampling =
        Some(RandomSampling { num_sequences: 3, seed: Some(-4), ..RandomSampling::default() });
    asked.response.as_mut().unwrap().prompt_logprobs = true;
    let messages = server.stream(asked.clone()).await.unwrap();
    let n_prompts = messages.iter().filter(|message| message.prompt_info.is_some()).count();
    let prompt = messages[0].prompt_info.as_ref().unwrap();
    assert_eq!((n_prompts, prompt.logprobs.len()), (1, 3));
    let mut outputs = vec![vec![]; 3];
    let mut n_ends = 0;
    for output in messages.into_iter().filter_map(|message| message.outputs) {
        outputs[output.index as usize].extend(output.token_ids);
        n_ends += u32::from(output.finish_info.is_some());
    }
    assert_eq!(n_ends, 3);
    assert!(outputs.iter().all(|ids| !ids.is_empty()) && outputs[0] != outputs[1], "{outputs:?}");
    // A seed makes all of them again.
    let again = server.stream(asked).await.unwrap();
    let ids = |index| {
        let outputs = again.iter().filter_map(|message| message.outputs.as_ref());
        let of_index = outputs.filter(move |output| output.index == index);
        of_index.flat_map(|output| output.token_ids.clone()).collect::<Vec<u32>>()
    };
    assert_eq!([ids(0), ids(1), ids(2)].as_slice(), outputs);
}

#[tokio::test]
async fn a_prefix_is_cached_for_those_who_share_its_salt() {
    let server = Server::start(Setup::default()).await;
    let prompt: Vec<u32> = (0..40).collect();
    let n_cached = async |kv: KvCacheParameters| {
        let mut request = request(&prompt, 1);
        request.kv = Some(kv);
        let answer = server.inference().generate(request).await.unwrap().into_inner();
        end_of(&answer.outputs.unwrap()).num_cached_tokens.unwrap()
    };
    let salt = |salt: &str| KvCacheParameters { cache_salt: salt.into(), ..Default::default() };
    let bypass = || KvCacheParameters { bypass_prefix_cache: true, ..salt("a") };
    assert_eq!(n_cached(salt("")).await, 0);
    assert_eq!(n_cached(salt("")).await, 32);
    assert_eq!(n_cached(salt("a")).await, 0);
    assert_eq!(n_cached(bypass()).await, 0);
    assert_eq!(n_cached(bypass()).await, 0);
    assert_eq!(n_cached(salt("a")).await, 32);
}

#[tokio::test]
async fn parameters_reach_the_sampler() {
    let script = Script::fixed(TEXTS.len(), 1, &[8, 9]);
    let seen = Arc::clone(&script.seen);
    let server = Server::scripted(script).await;
    let mut asked = request(&[7], 2);
    asked.temperature = Some(0.5);
    asked.priority = -3;
    asked.sampling = Some(RandomSampling {
        num_sequences: 0,
        top_k: Some(5),
        top_p: Some(0.75),
        min_p: Some(0.25),
        seed: Some(-1),
    });
    asked.decoding = Some(DecodingParameters {
        presence_penalty: 0.5,
        frequency_penalty: -0.5,
        repetition_penalty: 1.5,
        logit_bias: [(9, 2.5)].into(),
        allowed_token_ids: vec![8, 9],
        bad_words_token_ids: vec![TokenIds { ids: vec![9, 9] }],
        ..DecodingParameters::default()
    });
    asked.stopping.as_mut().unwrap().min_new_tokens = 1;
    server.stream(asked).await.unwrap();
    let mut neutral = request(&[7], 2);
    neutral.temperature = Some(1.0);
    neutral.sampling = Some(RandomSampling::default());
    neutral.decoding = Some(DecodingParameters::default());
    server.stream(neutral).await.unwrap();
    let seen = seen.lock().unwrap();
    let params = &seen[0].params;
    assert_eq!((params.temperature, params.top_k, params.seed), (0.5, 5, Some(u64::MAX)));
    assert_eq!((params.top_p, params.min_p), (0.75, 0.25));
    assert_eq!((params.presence_penalty, params.frequency_penalty), (0.5, -0.5));
    assert_eq!((params.repetition_penalty, params.min_tokens), (1.5, 1));
    assert_eq!((params.logit_bias.as_slice(), params.bad_words.len()), (&[(9, 2.5)][..], 1));
    assert_eq!(params.allowed_token_ids.as_deref(), Some(&[8, 9][..]));
    let params = &seen[1].params;
    assert_eq!((params.top_p, params.top_k, params.min_p), (1.0, 0, 0.0));
    assert_eq!((params.presence_penalty, params.repetition_penalty), (0.0, 1.0));
    assert_eq!((params.allowed_token_ids.as_ref(), params.bad_words.len()), (None, 0));
}
