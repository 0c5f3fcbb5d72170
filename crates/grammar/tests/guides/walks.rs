//! Random outputs under a guide: each that ends is a text of its grammar.

use engine_types::TokenId;
use grammar::Constraint;
use serde_json::Value;

use crate::{EOS, Random, allowed, guide, json, lark, mask, regex, tokenizer};

const N_WALKS: u64 = 12;
const N_TOKENS_MAX: usize = 400;

/// The texts of walks that take allowed tokens at random, as far as they come to an end. Where the
/// end-of-sequence id is allowed it is taken half of the time.
fn walks(constraint: &Constraint) -> Vec<String> {
    (0..N_WALKS).filter_map(|seed| walk(constraint, seed)).collect()
}

fn walk(constraint: &Constraint, seed: u64) -> Option<String> {
    let (mut guide, mut random) = (guide(constraint), Random(seed));
    let mut tokens: Vec<TokenId> = vec![];
    while tokens.len() < N_TOKENS_MAX {
        let choices = allowed(&mask(&mut *guide));
        let takes_end = choices.contains(&EOS) && random.below(2) == 0;
        let token = if takes_end { EOS } else { choices[random.below(choices.len())] };
        assert!(guide.accept(token), "{token} is allowed");
        tokens.push(token);
        if guide.is_complete() {
            return Some(tokenizer().decode(&tokens, true));
        }
        assert_ne!(token, EOS);
    }
    None
}

#[test]
fn outputs_meet_their_schema() {
    let schemas = [
        r#"{"type": "object", "properties": {
            "id": {"type": "integer", "minimum": -5, "maximum": 70000},
            "tag": {"type": "string", "minLength": 2, "maxLength": 9},
            "ok": {"type": "boolean"}},
            "required": ["id", "tag"], "additionalProperties": false}"#,
        r#"{"type": "array", "minItems": 1, "maxItems": 4,
            "items": {"anyOf": [{"type": "null"}, {"enum": ["a", "é", 3]},
                                {"type": "string", "pattern": "^[0-9]{2,4}$"}]}}"#,
        r##"{"$defs": {"tree": {"type": "object", "properties": {
                "v": {"type": "number", "minimum": 0, "maximum": 1},
                "kids": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}}},
                "required": ["v"], "additionalProperties": false}},
            "$ref": "#/$defs/tree"}"##,
    ];
    for schema in schemas {
        let document: Value = serde_json::from_str(schema).unwrap();
        let validator = jsonschema::validator_for(&document).unwrap();
        let texts = walks(&json(schema));
        assert!(texts.len() as u64 >= N_WALKS / 2, "only {} walks end: {schema}", texts.len());
        for text in texts {
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| {
                panic!("{error}: {text}");
            });
            assert!(validator.is_valid(&value), "{text}");
        }
    }
}

#[test]
fn outputs_match_their_regex() {
    for pattern in [
        r"(foo|ba[rz]){1,5}",
        r"\d{4}-(0[1-9]|1[0-2])-\d{2}",
        r"[äöü😀€]{2,6}\.",
        r"([a-z]{1,8} ){1,4}end",
        // Signs of the notation that the parser's own grammars are written in.
        "a\n{1,3}/\"x: y",
    ] {
        let whole = regex::Regex::new(&format!("^(?:{pattern})$")).unwrap();
        let texts = walks(&regex(pattern));
        assert_eq!(texts.len() as u64, N_WALKS, "{pattern}");
        for text in texts {
            assert!(whole.is_match(&text), "{text:?} against {pattern}");
        }
    }
}

#[test]
fn outputs_are_texts_of_their_lark_grammar() {
    let grammar = "start: term (\"+\" term)*\nterm: NUMBER | \"(\" start \")\"\n\
                   NUMBER: /[0-9]{1,2}/\n";
    let texts = walks(&lark(grammar));
    assert!(!texts.is_empty());
    for text in texts {
        let depth = text.chars().fold(0_i32, |depth, c| {
            assert!(depth >= 0, "{text}");
            depth + i32::from(c == '(') - i32::from(c == ')')
        });
        assert_eq!(depth, 0, "{text}");
        let is_known = |c: char| c.is_ascii_digit() || "+()".contains(c);
        assert!(text.chars().all(is_known) && !text.ends_with('+'), "{text}");
    }
}
