//! Outputs that keep to a constraint.

use test_engine::Script;
use vllm_proto::DecodingParameters;
use vllm_proto::decoding_parameters::{StringChoices, StructuredOutput};
use vllm_proto::finish_info::FinishReason;

use crate::harness::{Server, TEXTS, end_of, request};

/// The texts of outputs that chance makes, but that what can end them is likely.
async fn texts_of(structured: StructuredOutput) -> Vec<String> {
    let logits = |_| {
        let ends = ["<s>", "}", "\"", "3"];
        TEXTS.iter().map(|text| if ends.contains(text) { 3.0 } else { 0.0 }).collect()
    };
    let server = Server::scripted(Script::new(logits, |_| 8)).await;
    let mut texts = vec![];
    for seed in 0..10 {
        let mut request = request(&[7], 40);
        request.temperature = Some(1.0);
        request.sampling.get_or_insert_default().seed = Some(seed);
        request.decoding = Some(DecodingParameters {
            structured_output: Some(structured.clone()),
            ..DecodingParameters::default()
        });
        let (_, output) = server.both(request).await;
        if end_of(&output).finish_reason() == FinishReason::Stop {
            texts.push(output.text);
        }
    }
    assert!(texts.len() > 2, "{texts:?}");
    texts
}

#[tokio::test]
async fn each_kind_holds() {
    for (structured, allowed) in [
        (StructuredOutput::Regex("a.*3".to_owned()), r"a.*3"),
        (StructuredOutput::Grammar("start: \"yes\" (\"1\"|\"2\")".to_owned()), "yes(1|2)"),
        (
            StructuredOutput::Choice(StringChoices {
                choices: ["no", "1.2", "a"].map(str::to_owned).to_vec(),
            }),
            r"no|1\.2|a",
        ),
        (StructuredOutput::Json(r#"{"enum": ["ab", true]}"#.to_owned()), r#""ab"|true"#),
        (StructuredOutput::JsonObject(true), r"(?s)\{.*\}"),
    ] {
        let whole = regex::Regex::new(&format!("^(?:{allowed})$")).unwrap();
        for text in texts_of(structured.clone()).await {
            assert!(whole.is_match(&text), "{text:?} for {structured:?}");
        }
    }
    // False asks for nothing.
    let free = texts_of(StructuredOutput::JsonObject(false)).await;
    assert!(free.iter().any(|text| !text.starts_with('{')), "{free:?}");
}
