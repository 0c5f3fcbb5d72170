//! Outputs that keep to a JSON schema, a regular expression or a grammar; fault case L03 (iii).

use grpc_api::inference::v1::output_constraint::Kind;
use grpc_api::inference::v1::{
    FinishReason, GenerateRequest, OutputConstraint, SamplingParams, SpeculationParams,
};

use crate::harness::{Server, Setup, unary};
use crate::refusals::check_invalid;
use test_engine::Script;

/// Ids 3, 8 and 9 are the tokens of the fault case; id 2 ends an output.
const TEXTS: &[&str] = &["a", "b", "<s>", "y", "c", "d", "e", "f", "x", "m"];

async fn server(script: Script, texts: &'static [&'static str], n_vocab: u32) -> Server {
    let mut setup = Setup { tokenizer: true, texts, eos_token_ids: &[2], ..Setup::default() };
    setup.limits.vocab_size = n_vocab;
    Server::start(Setup { script: Some(script), ..setup }).await
}

fn constrained(kind: Option<Kind>, max_tokens: u32) -> GenerateRequest {
    let constraint = Some(OutputConstraint { kind });
    let mut request = GenerateRequest { constraint, ..unary(&[0], max_tokens) };
    request.stopping.as_mut().unwrap().ignore_eos = None;
    request
}

#[tokio::test]
async fn a_constraint_holds_for_each_row_of_a_step() {
    // The model and its drafts want 8, 9, 5, 6 and so on; behind a 9 only a 3 may come.
    let server = server(Script::fixed(10, 1, &[8, 9, 5, 6]), TEXTS, 10).await;
    let kinds = [Kind::Regex("x*my".into()), Kind::LarkGrammar("start: \"x\"* \"my\"".into())];
    for kind in kinds {
        for k in 0..=3 {
            let speculation = Some(SpeculationParams { num_speculative_tokens: Some(k) });
            let request = constrained(Some(kind.clone()), 20);
            let output = server.generate(GenerateRequest { speculation, ..request }).await;
            assert_eq!(output.token_ids, [8, 9, 3], "{kind:?}, k = {k}");
            assert_eq!(output.text.as_deref(), Some("xmy"));
            assert_eq!(output.finish_reason(), FinishReason::ConstraintComplete);
        }
        let cut = server.generate(constrained(Some(kind), 2)).await;
        assert_eq!(
            (cut.token_ids, cut.finish_reason),
            (vec![8, 9], FinishReason::MaxTokens.into())
        );
    }
    // Where the text can end but need not, the model may end it.
    let server = self::server(Script::fixed(10, 1, &[8, 8, 2]), TEXTS, 10).await;
    let output = server.generate(constrained(Some(Kind::Regex("x+".into())), 20)).await;
    assert_eq!((output.token_ids, output.finish_reason), (vec![8, 8, 2], FinishReason::Eos.into()));
}

#[tokio::test]
async fn sampled_outputs_are_json_of_the_schema() {
    // Every token is as likely as any other.
    let script = Script::new(|_| vec![0.0; 4096], |(at, _)| u32::try_from(at).unwrap() % 4096);
    let server = server(script, &[], 4096).await;
    let schema = r#"{"type": "object", "properties": {"a": {"type": "boolean"}},
                     "required": ["a"], "additionalProperties": false}"#;
    let mut request = constrained(Some(Kind::JsonSchema(schema.into())), 1000);
    let sampling =
        SamplingParams { n: Some(8), temperature: Some(1.0), seed: Some(1), ..Default::default() };
    request.sampling = Some(sampling);
    let reply = server.client().generate(request).await.unwrap().into_inner();
    assert_eq!(reply.outputs.len(), 8);
    for output in reply.outputs {
        let text = output.text.unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let object = value.as_object().unwrap();
        assert!(object.len() == 1 && object["a"].is_boolean(), "{text}");
    }
}

#[tokio::test]
async fn constraints_with_a_fault_name_the_field() {
    let server =
        Server::start(Setup { tokenizer: true, eos_token_ids: &[2], ..Setup::default() }).await;
    let json = |text: &str| constrained(Some(Kind::JsonSchema(text.into())), 4);
    let regex = |text: &str| constrained(Some(Kind::Regex(text.into())), 4);
    let lark = |text: &str| constrained(Some(Kind::LarkGrammar(text.into())), 4);
    check_invalid(&server, constrained(None, 4), "constraint", "is empty").await;
    check_invalid(&server, json("{"), "constraint.json_schema", "JSON").await;
    check_invalid(&server, json(r#"{"type": "nothing"}"#), "constraint.json_schema", "nothing")
        .await;
    check_invalid(&server, regex("(a"), "constraint.regex", "regular expression").await;
    check_invalid(&server, regex(&"a".repeat(70_000)), "constraint.regex", "70000").await;
    check_invalid(&server, lark("start: missing"), "constraint.lark_grammar", "missing").await;
}

#[tokio::test]
async fn what_constraints_need_is_named() {
    let request = || constrained(Some(Kind::Regex("a".into())), 4);
    let server = Server::start(Setup { eos_token_ids: &[2], ..Setup::default() }).await;
    check_invalid(&server, request(), "constraint.regex", "no tokenizer").await;
    let server = Server::start(Setup { tokenizer: true, ..Setup::default() }).await;
    check_invalid(&server, request(), "constraint.regex", "cannot be constrained").await;
}
