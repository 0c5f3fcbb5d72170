//! Answers that are right, and each way in which one is not.

use grpc_api::inference::v1::{GenerationFinished, TokenDelta, Usage};

use super::*;
use crate::rng::Rng;

const LIMITS: Limits =
    Limits { vocab_size: 100, max_model_len: 1024, max_drafts: 3, max_request_bytes: 1 << 20 };

/// A request for at most two tokens.
fn wish() -> Wish {
    let stopping = StoppingParams { max_tokens: Some(2), ..StoppingParams::default() };
    let request =
        GenerateStreamRequest { stopping: Some(stopping), ..GenerateStreamRequest::default() };
    Wish { request, repeated: Some(7) }
}

fn message(event: Event) -> GenerateStreamResponse {
    GenerateStreamResponse { request_id: 5, index: 0, event: Some(event) }
}

/// A step of one accepted draft and one token of the target.
fn delta(ids: [u32; 2]) -> TokenDelta {
    TokenDelta {
        token_ids: ids.to_vec(),
        n_accepted: 1,
        draft_token_ids: vec![ids[0], 9],
        text_pieces: vec!["{}".to_owned(), String::new()],
        ..TokenDelta::default()
    }
}

fn finished(reason: FinishReason, completion_tokens: u32) -> GenerationFinished {
    GenerationFinished {
        finish_reason: reason.into(),
        usage: Some(Usage { prompt_tokens: 3, completion_tokens, ..Usage::default() }),
        ..GenerationFinished::default()
    }
}

fn answer(events: Vec<Event>) -> Answer {
    let mut answer = Answer::new(&wish().request);
    answer.name(Some("5"));
    events.into_iter().for_each(|event| answer.add(message(event)));
    answer
}

fn whole(ids: [u32; 2]) -> Answer {
    let last = finished(FinishReason::MaxTokens, 2);
    answer(vec![Event::Delta(delta(ids)), Event::Finished(last)])
}

fn fault_of(events: Vec<Event>) -> String {
    answer(events).check(&wish(), LIMITS).unwrap_err()
}

#[test]
fn a_right_answer_passes() {
    assert_eq!(whole([1, 2]).check(&wish(), LIMITS), Ok(()));
    assert_eq!(whole([1, 2]).unfinished(), None);
    assert_eq!(answer(vec![Event::Delta(delta([1, 2]))]).unfinished(), Some(5));
}

#[test]
fn wrong_answers_are_told() {
    let last = |reason, n| Event::Finished(finished(reason, n));
    let step = || Event::Delta(delta([1, 2]));
    let unsound = TokenDelta { n_accepted: 0, ..delta([1, 2]) };
    let max = FinishReason::MaxTokens;
    assert!(fault_of(vec![step()]).contains("without its last message"));
    assert!(fault_of(vec![step(), last(max, 3)]).contains("usage says"));
    assert!(fault_of(vec![step(), last(max, 2), step()]).contains("after the last one"));
    assert!(fault_of(vec![Event::Delta(unsound), last(max, 2)]).contains("unsound delta"));
    assert!(fault_of(vec![last(max, 0)]).contains("MaxTokens after 0 tokens"));
    assert!(fault_of(vec![step(), last(FinishReason::OutOfBlocks, 2)]).contains("OutOfBlocks"));
    assert!(fault_of(vec![step(), last(FinishReason::Eos, 2)]).contains("Eos"));
}

#[test]
fn outputs_are_named_as_the_head_of_the_answer_says() {
    let mut answer = Answer::new(&wish().request);
    answer.name(Some("4"));
    assert_eq!(answer.unfinished(), Some(4));
    answer.add(message(Event::Delta(delta([1, 2]))));
    assert!(answer.check(&wish(), LIMITS).unwrap_err().contains("a message of 5"));
    for ids in [None, Some("4,5")] {
        let mut answer = Answer::new(&wish().request);
        answer.name(ids);
        assert!(answer.check(&wish(), LIMITS).unwrap_err().contains("1 outputs are named"));
    }
}

#[test]
fn a_complete_constraint_is_json() {
    let mut wish = wish();
    let complete = finished(FinishReason::ConstraintComplete, 2);
    let mut answer = answer(vec![Event::Delta(delta([1, 2])), Event::Finished(complete)]);
    assert!(answer.check(&wish, LIMITS).is_err(), "none was asked for");
    let kind = Some(Constraint::JsonSchema("{}".to_owned()));
    wish.request.constraint = Some(OutputConstraint { kind });
    assert_eq!(answer.check(&wish, LIMITS), Ok(()));
    answer.outputs[0].text = Some("{\"a\":".to_owned());
    assert!(answer.check(&wish, LIMITS).is_err());
}

#[test]
fn repeated_requests_must_repeat_themselves() {
    let mut repeated = Repeated::default();
    assert_eq!(repeated.check(7, &answer(vec![Event::Delta(delta([4, 4]))])), Ok(()));
    assert_eq!(repeated.check(7, &whole([1, 2])), Ok(()), "the first whole one");
    assert_eq!(repeated.check(7, &whole([1, 2])), Ok(()));
    assert_eq!(repeated.check(8, &whole([3, 2])), Ok(()), "another request");
    assert!(repeated.check(7, &whole([1, 3])).is_err());
    assert!(repeated.check(7, &answer(vec![Event::Delta(delta([4, 4]))])).is_err());
}

#[test]
fn requests_of_a_seed_are_the_same() {
    let requests = |seed| {
        let mut rng = Rng::new(seed, 3);
        (0..300).map(|_| LIMITS.valid(&mut rng).request).collect::<Vec<_>>()
    };
    assert_eq!(requests(1), requests(1));
    assert_ne!(requests(1), requests(2));
}
