//! Fault cases L02 and L21: stop texts end outputs wherever steps and tokens divide them.

use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::{
    FinishReason, GenerateRequest, GenerateStreamRequest, GeneratedOutput, SamplingParams,
    SpeculationParams, StoppingParams,
};

use crate::harness::{Server, Setup, streaming, unary};
use test_engine::Script;

/// A server that generates `tokens` behind a prompt of one token, 7 drafts a step and all of them
/// right; the first token comes alone.
async fn server(texts: &'static [&'static str], tokens: &'static [u32]) -> Server {
    let mut setup = Setup { tokenizer: true, texts, ..Setup::default() };
    setup.limits.vocab_size = u32::try_from(texts.len()).unwrap();
    setup.limits.max_num_speculative_tokens = 7;
    let script = Script::fixed(texts.len(), 1, tokens);
    Server::start(Setup { script: Some(script), ..setup }).await
}

fn stopping(stops: &[&str], max_tokens: u32) -> StoppingParams {
    StoppingParams {
        stop_texts: stops.iter().map(|stop| (*stop).to_owned()).collect(),
        max_tokens: Some(max_tokens),
        ignore_eos: Some(true),
        ..StoppingParams::default()
    }
}

/// Sends a request both ways and with fewer drafts, checks that all answers say the same, and
/// returns the unary one with the streamed pieces of text, the last one being the tail.
async fn generate(server: &Server, stopping: StoppingParams) -> (GeneratedOutput, Vec<String>) {
    let sampling = Some(SamplingParams { logprobs: Some(1), ..SamplingParams::default() });
    let stopping = Some(stopping);
    let request = GenerateRequest { sampling: sampling.clone(), stopping, ..unary(&[0], 1) };
    let output = server.generate(request.clone()).await;
    assert_eq!(output.logprobs.len(), output.token_ids.len());
    assert_eq!(output.usage.unwrap().completion_tokens as usize, output.token_ids.len());
    for k in 0..7 {
        let speculation = Some(SpeculationParams { num_speculative_tokens: Some(k) });
        let request = GenerateRequest { speculation, ..request.clone() };
        let other = server.generate(request).await;
        assert_eq!((&other.token_ids, &other.text), (&output.token_ids, &output.text), "k = {k}");
        assert_eq!(other.matched_stop_text, output.matched_stop_text, "k = {k}");
    }
    let request =
        GenerateStreamRequest { sampling, stopping: request.stopping, ..streaming(&[0], 1) };
    let mut stream = server.client().generate_stream(request).await.unwrap().into_inner();
    let (mut pieces, mut ids) = (vec![], vec![]);
    while let Some(message) = stream.message().await.unwrap() {
        match message.event.unwrap() {
            Event::Delta(delta) => {
                assert_eq!(delta.logprobs.len(), delta.token_ids.len());
                ids.extend(delta.token_ids);
                pieces.extend(delta.text_pieces);
            }
            Event::Finished(finished) => {
                assert_eq!(finished.finish_reason(), output.finish_reason());
                assert_eq!(finished.matched_stop_text, output.matched_stop_text);
                pieces.push(finished.tail_text);
            }
            other @ Event::PromptLogprobs(_) => panic!("{other:?}"),
        }
    }
    assert_eq!(ids, output.token_ids);
    assert_eq!(pieces.concat(), output.text.as_deref().unwrap());
    (output, pieces)
}

fn check(output: &GeneratedOutput, ids: &[u32], text: &str, stop: Option<u32>) {
    assert_eq!((output.token_ids.as_slice(), output.text.as_deref()), (ids, Some(text)));
    let reason = stop.map_or(FinishReason::MaxTokens, |_| FinishReason::StopText);
    assert_eq!((output.finish_reason(), output.matched_stop_text), (reason, stop));
}

const RUN: &[&str] = &["E", "ND", " a", " b", " c", " d", " e", " f", "<s>"];

#[tokio::test]
async fn a_stop_text_early_in_a_run_ends_it_there() {
    // `<s>` has no text and takes the step that has no drafts, so that the rest is one run.
    let server = server(RUN, &[8, 0, 1, 2, 3, 4, 5, 6, 7]).await;
    let (output, _) = generate(&server, stopping(&["END"], 20)).await;
    check(&output, &[8, 0, 1], "", Some(0));
    assert_eq!(output.speculation.unwrap().verify_steps, 1);
    let included = StoppingParams { include_stop_text: Some(true), ..stopping(&["END"], 20) };
    let (output, _) = generate(&server, included).await;
    check(&output, &[8, 0, 1], "END", Some(0));
    let (output, _) = generate(&server, stopping(&["x", "b c"], 20)).await;
    check(&output, &[8, 0, 1, 2, 3, 4], "END a ", Some(1));
}

#[tokio::test]
async fn a_stop_text_across_steps_is_found_and_never_shown() {
    let server = server(RUN, &[0, 1, 2, 3, 4, 5, 6, 7]).await;
    let (output, pieces) = generate(&server, stopping(&["END"], 20)).await;
    check(&output, &[0, 1], "", Some(0));
    assert_eq!(pieces, ["", "", ""]);
    let included = StoppingParams { include_stop_text: Some(true), ..stopping(&["END"], 20) };
    let (output, pieces) = generate(&server, included).await;
    check(&output, &[0, 1], "END", Some(0));
    assert_eq!(pieces, ["", "END", ""]);
    // The last token that there is room for still completes it.
    let (output, _) = generate(&server, stopping(&["END"], 2)).await;
    check(&output, &[0, 1], "", Some(0));
}

#[tokio::test]
async fn before_min_tokens_a_stop_text_is_text() {
    let server = server(RUN, &[0, 1, 0, 1, 2]).await;
    let late = StoppingParams { min_tokens: Some(3), ..stopping(&["END"], 20) };
    let (output, pieces) = generate(&server, late).await;
    check(&output, &[0, 1, 0, 1], "END", Some(0));
    assert_eq!(pieces, ["", "END", "", "", ""]);
}

#[tokio::test]
async fn only_what_may_become_a_stop_text_is_held_back() {
    const TEXTS: &[&str] = &["ok ", "</", "en", "d>", "ter", "/e", " London", "xabc"];
    let hit = server(TEXTS, &[0, 1, 2, 3, 0]).await;
    let (output, pieces) = generate(&hit, stopping(&["</end>"], 20)).await;
    check(&output, &[0, 1, 2, 3], "ok ", Some(0));
    assert_eq!(pieces, ["ok ", "", "", "", ""]);

    let near_miss = server(TEXTS, &[0, 1, 2, 4]).await;
    let (output, pieces) = generate(&near_miss, stopping(&["</end>"], 4)).await;
    check(&output, &[0, 1, 2, 4], "ok </enter", None);
    assert_eq!(pieces, ["ok ", "", "", "</enter", ""]);

    let (output, pieces) = generate(&near_miss, stopping(&["</end>"], 3)).await;
    check(&output, &[0, 1, 2], "ok </en", None);
    assert_eq!(pieces, ["ok ", "", "", "</en"], "an end by length hands out what was held");

    let within = server(TEXTS, &[6, 0]).await;
    let (output, _) = generate(&within, stopping(&["Lond"], 20)).await;
    check(&output, &[6], " ", Some(0));
    let both = server(TEXTS, &[7, 0]).await;
    let (output, _) = generate(&both, stopping(&["ab", "abc"], 20)).await;
    check(&output, &[7], "x", Some(0));
}

#[tokio::test]
async fn an_end_by_an_id_cuts_the_text_at_a_stop_text_as_well() {
    let server = server(RUN, &[2, 0, 1]).await;
    let by_id = StoppingParams { stop_token_ids: vec![1], ..stopping(&["END"], 20) };
    let (output, _) = generate(&server, by_id).await;
    assert_eq!((output.token_ids.as_slice(), output.text.as_deref()), (&[2, 0, 1][..], Some(" a")));
    assert_eq!(output.finish_reason(), FinishReason::StopToken);
    assert_eq!((output.matched_token_id, output.matched_stop_text), (Some(1), None));
}
