//! Completions through the prompt box.

use grpc_api::inference::v1 as pb;
use serde_json::{Value, json};
use serving::whole_reply;

use crate::harness::*;

fn texted() -> Setup {
    Setup { tokenizer: true, ..Setup::default() }
}

#[tokio::test]
async fn events_add_up_to_what_the_own_api_answers() {
    let server = Server::start(texted()).await;
    let prompt = "def read_lines";
    let answer = server.generate(&json!({ "prompt": prompt, "max_tokens": 40 })).await;
    assert_eq!(answer.status, 200);
    let events = answer.events();
    let (steps, [(last, end)]) = events.split_at(events.len() - 1) else { panic!("no end") };
    assert_eq!(*last, "finished");

    let request = pb::GenerateStreamRequest {
        prompt: Some(pb::generate_stream_request::Prompt::Text(prompt.into())),
        ..streaming(&[], 40)
    };
    let expected = whole_reply(server.call(request).await, 1, true).await.unwrap();
    let expected = &expected.outputs[0];
    let all = |field: &str| -> Vec<Value> {
        steps.iter().flat_map(|(_, step)| step[field].as_array().unwrap().clone()).collect()
    };
    assert_eq!(all("token_ids"), expected.token_ids.iter().map(|id| json!(id)).collect::<Vec<_>>());
    let pieces = all("text_pieces");
    let text: String = pieces.iter().map(|piece| piece.as_str().unwrap()).collect();
    assert_eq!(text + end["tail_text"].as_str().unwrap(), expected.text.clone().unwrap());

    let mut n_rejected = 0;
    for (name, step) in steps {
        let n = |field: &str| step[field].as_array().unwrap().len();
        let n_accepted = usize::try_from(step["n_accepted"].as_u64().unwrap()).unwrap();
        assert_eq!((*name, n("token_ids")), ("step", n_accepted + 1));
        assert_eq!(n("draft_texts"), n("draft_token_ids"));
        n_rejected += n("draft_token_ids") - n_accepted;
        assert!(step["draft_texts"].as_array().unwrap().iter().all(Value::is_string), "{step}");
    }
    // Drafts of multiples of 5 are wrong; accepted ones have the text of their tokens.
    assert!(n_rejected > 0);
    let speculation = expected.speculation.as_ref().unwrap();
    assert_eq!(end["speculation"]["accepted_tokens"], speculation.accepted_tokens);
    assert_eq!(end["speculation"]["draft_tokens"], speculation.draft_tokens);
    assert_eq!(end["usage"]["completion_tokens"], 40);
    assert_eq!(end["finish_reason"], "FINISH_REASON_MAX_TOKENS");
}

#[tokio::test]
async fn parameters_reach_the_request() {
    let script = Script::fixed(4096, 1, &[7, 8, 9]);
    let seen = script.seen.clone();
    let server = Server::start(Setup { script: Some(script), ..texted() }).await;
    let answer = server
        .generate(&json!({
            "prompt": "a", "max_tokens": 6, "temperature": 0.5, "top_p": 0.75, "top_k": 9,
            "seed": 77, "num_speculative_tokens": 0, "ignore_eos": true,
        }))
        .await;
    let events = answer.events();
    assert_eq!(events.last().unwrap().0, "finished");
    assert!(
        events.iter().all(|(_, step)| step["draft_token_ids"].as_array().is_none_or(Vec::is_empty))
    );
    let seen = seen.lock().unwrap();
    let params = &seen[0].params;
    assert_eq!((params.temperature, params.top_p, params.top_k), (0.5, 0.75, 9));
    assert_eq!(seen[0].seed, 77);
}

#[tokio::test]
async fn a_refusal_has_the_message_of_the_own_api() {
    let server = Server::start(texted()).await;
    let answer = server.generate(&json!({ "prompt": "a", "temperature": -1 })).await;
    assert_eq!(answer.status, 400);
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "INVALID_ARGUMENT");
    assert!(error["message"].as_str().unwrap().starts_with("sampling.temperature: "), "{error}");
    for (body, named) in [
        (json!({ "prompt": "a", "temprature": 1 }), "temprature"),
        (json!({ "max_tokens": 1 }), "prompt"),
        (json!({ "prompt": 1 }), "string"),
    ] {
        let answer = server.generate(&body).await;
        assert_eq!(answer.status, 400);
        assert!(answer.body.contains(named), "{}", answer.body);
    }
    server.of.engine.drain();
    let answer = server.generate(&json!({ "prompt": "a" })).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("UNAVAILABLE")));
}

#[tokio::test]
async fn a_failed_step_is_the_last_event() {
    let server = Server::start(texted()).await;
    server.of.fault.store(FAIL_STEP, std::sync::atomic::Ordering::SeqCst);
    let answer = server.generate(&json!({ "prompt": "a", "max_tokens": 9 })).await;
    assert_eq!(answer.status, 200);
    let events = answer.events();
    let [(name, error)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((*name, &error["code"]), ("error", &json!("INTERNAL")));
    assert!(error["message"].as_str().unwrap().contains("no luck"), "{error}");
}
