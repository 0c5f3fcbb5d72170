//! The flags that say how drafts are chosen and accepted.

use serde_json::Value;

use crate::harness::{fail_with, succeed_json, tandem};

const GENERATE: [&str; 8] =
    ["generate", "--dtype", "float32", "--max-tokens", "96", "--prompt", "import os", "--json"];

fn generate(args: &[&str]) -> Value {
    succeed_json(&[&GENERATE[..], args].concat())
}

/// A step accepts one or two of three drafts, 2.5 tokens with the target's own; and who reads the
/// result sees that it is no measurement.
#[test]
fn synthetic_acceptance_follows_its_schedule_and_marks_the_result() {
    let by_length = ["--spec-decode-acceptance-length", "2.5", "--ignore-eos"];
    for args in [by_length, ["--spec-decode-acceptance-rate", "0.5", "--ignore-eos"]] {
        let output = tandem().args(GENERATE).args(args).output().unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && log.contains("The text is meaningless"), "{log}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(found["synthetic_acceptance"], Value::Bool(true));
        let accepted = found["spec_decode"]["accepted_per_step"].as_array().unwrap();
        let (last, whole) = accepted.split_last().unwrap();
        assert!(whole.iter().all(|n| *n == 1 || *n == 2), "{accepted:?}");
        assert!(whole.contains(&1.into()) && whole.contains(&2.into()), "{accepted:?}, {last}");
    }
    assert!(generate(&[]).get("synthetic_acceptance").is_none());
}

#[test]
fn drawn_drafts_are_verified_and_greedy_requests_do_not_draw() {
    let greedy = generate(&["--draft-sampling", "sampled"]);
    assert_eq!(greedy, generate(&[]), "at temperature 0");
    let sampled = ["--temperature", "0.8", "--seed", "7", "--draft-sampling", "sampled"];
    let found = generate(&sampled);
    assert!(found["spec_decode"]["num_accepted_tokens"].as_u64().unwrap() > 0, "{found}");
    assert_eq!(found, generate(&sampled), "a seed is a seed");
}

#[test]
fn what_cannot_be_is_refused_by_flag() {
    let refused = |args: &[&str], words: &[&str]| {
        fail_with(&[&GENERATE[..], args].concat(), words);
    };
    refused(
        &["--draft-sampling", "sampled", "--num-speculative-tokens", "0"],
        &["--draft-sampling sampled", "--draft-sampling greedy"],
    );
    refused(
        &["--spec-decode-acceptance-length", "4.5"],
        &["--spec-decode-acceptance-length", "4.5"],
    );
    refused(&["--spec-decode-acceptance-rate", "1.5"], &["--spec-decode-acceptance-rate", "1.5"]);
    refused(
        &["--spec-decode-acceptance-rate", "0", "--num-speculative-tokens", "0"],
        &["there are no drafts to accept", "--num-speculative-tokens"],
    );
    refused(
        &["--spec-decode-acceptance-rate", "0.5", "--spec-decode-acceptance-length", "2"],
        &["--spec-decode-acceptance-length", "cannot be used with"],
    );
}
