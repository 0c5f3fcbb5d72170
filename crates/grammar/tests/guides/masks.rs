//! Masks against `accept` of every id, and ways there and back.

use engine_types::{Guide, TokenId};

use crate::{EOS, allowed, allows, byte_ids, guide, ids, json, lark, mask, regex, tokenizer};

const PERSON: &str = r#"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130}
    },
    "required": ["name", "age"],
    "additionalProperties": false
}"#;

const SUM: &str = "start: sum\nsum: NUMBER (\" + \" NUMBER)*\nNUMBER: /[1-9][0-9]{0,3}/\n";

/// Asks of every id whether it is accepted, and compares with the mask, which stays the same.
fn check_mask(guide: &mut dyn Guide) {
    let before = mask(guide);
    let is_accepted = |id: &TokenId| {
        let is_accepted = guide.accept(*id);
        guide.go_back(usize::from(is_accepted));
        is_accepted
    };
    let accepted: Vec<TokenId> = (0..tokenizer().n_ids() + 32).filter(is_accepted).collect();
    assert_eq!(allowed(&before), accepted);
    assert!(!accepted.is_empty());
    assert_eq!(mask(guide), before);
}

/// Checks the masks before each of `tokens` and behind the last.
fn check_along(guide: &mut dyn Guide, tokens: &[TokenId]) {
    for token in tokens {
        check_mask(guide);
        assert!(guide.accept(*token), "{token} of {tokens:?}");
    }
    check_mask(guide);
}

#[test]
fn a_mask_allows_what_is_accepted() {
    let cases = [
        (json(PERSON), r#"{"name": "Åsa", "age": 41}"#),
        (json(r#"{"enum": ["red", "green", null, 7]}"#), r#""green""#),
        (regex("(ab|cd)*e?"), "abcde"),
        (regex(r"\d{3}-\d{4}"), "555-0199"),
        (lark(SUM), "17 + 4"),
    ];
    for (constraint, text) in cases {
        check_along(&mut *guide(&constraint), &ids(text));
    }
}

#[test]
fn a_mask_allows_what_is_accepted_behind_the_end() {
    let mut ended = guide(&regex("no+"));
    check_along(&mut *ended, &ids("no"));
    assert!(!ended.is_complete());
    assert!(ended.accept(EOS));
    assert!(ended.is_complete());
    // Nothing follows the end; a row behind a draft of it has a choice all the same.
    assert!(!ended.accept(EOS) && !ended.accept(ids("o")[0]));
    assert_eq!(allowed(&mask(&mut *ended)), [EOS]);
    ended.go_back(1);
    assert!(!ended.is_complete());
    check_mask(&mut *ended);
}

#[test]
fn characters_may_be_split_over_tokens() {
    let mut guide = guide(&regex("[€ä😀]{1,3}"));
    let (text, mut n_whole) = (byte_ids("€😀ä"), 0);
    for (idx, token) in text.iter().enumerate() {
        let is_between = [3, 7].contains(&idx);
        n_whole += usize::from(is_between);
        check_mask(&mut *guide);
        assert_eq!(allows(&mask(&mut *guide), EOS), is_between, "at byte {idx}");
        assert!(!guide.is_complete());
        assert!(guide.accept(*token));
    }
    assert_eq!(n_whole, 2);
    assert!(guide.is_complete());
    assert_eq!(allowed(&mask(&mut *guide)), [EOS]);
    // A part of another character is refused.
    guide.go_back(1);
    assert!(!guide.accept(byte_ids("é")[1]));
    assert!(guide.accept(byte_ids("ä")[1]));
}

#[test]
fn all_ways_to_spell_a_text_are_allowed() {
    for spelling in [ids("1234 + 5678"), byte_ids("1234 + 5678")] {
        let mut guide = guide(&lark(SUM));
        assert!(spelling.iter().all(|token| guide.accept(*token)));
        assert!(!guide.is_complete(), "another number may follow");
        assert!(allows(&mask(&mut *guide), EOS));
    }
}

#[test]
fn going_back_restores_every_place_before() {
    for (constraint, text) in [
        (json(PERSON), r#"{"name": "Bo 😀", "age": 7}"#),
        (lark(SUM), "1 + 22 + 333"),
        (regex("[a-z ]{1,40}"), "one two three"),
    ] {
        let mut guide = guide(&constraint);
        let tokens = ids(text);
        let mut masks = vec![mask(&mut *guide)];
        for token in &tokens {
            assert!(guide.accept(*token));
            masks.push(mask(&mut *guide));
        }
        let n_end = usize::from(!guide.is_complete());
        assert!(n_end == 0 || guide.accept(EOS));
        for n_back in 0..=tokens.len() {
            let mut copy = guide.clone_guide();
            copy.go_back(n_back + n_end);
            let start = tokens.len() - n_back;
            assert_eq!(mask(&mut *copy), masks[start]);
            for (token, expected) in tokens[start..].iter().zip(&masks[start + 1..]) {
                assert!(copy.accept(*token));
                assert_eq!(&mask(&mut *copy), expected);
            }
        }
        // The copies have left it where it was.
        assert!(guide.is_complete());
    }
}

#[test]
fn a_refused_token_changes_nothing() {
    let mut guide = guide(&json(PERSON));
    let tokens = ids(r#"{"name": "#);
    assert!(tokens.iter().all(|token| guide.accept(*token)));
    let before = mask(&mut *guide);
    for refused in [EOS, ids("}")[0], 0, 3, tokenizer().n_ids(), u32::MAX] {
        assert!(!guide.accept(refused), "{refused}");
        assert_eq!(mask(&mut *guide), before);
    }
    guide.go_back(tokens.len());
    assert!(guide.accept(tokens[0]));
}

#[test]
fn only_texts_that_cannot_go_on_are_complete() {
    for (constraint, text, is_complete) in [
        (json(PERSON), r#"{"name":"","age":0}"#, true),
        (json(r#"{"type": "integer"}"#), "12", false),
        (json(r#"{"type": "boolean"}"#), "true", true),
        (regex("a{2,4}"), "aaa", false),
        (regex("a{2,4}"), "aaaa", true),
        (regex(""), "", false),
        (lark("start: \"x\" <think>"), "x", false),
    ] {
        let mut guide = guide(&constraint);
        let tokens = if text.is_empty() { vec![] } else { byte_ids(text) };
        assert!(tokens.iter().all(|token| guide.accept(*token)), "{constraint:?}");
        assert_eq!(guide.is_complete(), is_complete, "{constraint:?} at {text:?}");
    }
}

#[test]
fn special_tokens_are_allowed_only_where_a_grammar_names_them() {
    let think = 5;
    assert!(tokenizer().is_special(think));
    let mut free = guide(&regex("(.|\\n){0,50}"));
    assert!(!allows(&mask(&mut *free), think));
    let mut named = guide(&lark("start: <think> /[a-z]+/ </think>"));
    check_along(&mut *named, &[&[think], &ids("so")[..], &[6]].concat());
    assert!(named.is_complete());
}

#[test]
fn a_schema_may_begin_behind_a_marker() {
    let grammar = "start: /(.|\\n)*/ </think> answer\nanswer: %json {\"type\": \"boolean\"}\n";
    let mut guide = guide(&lark(grammar));
    check_along(&mut *guide, &[&ids("so\nit is")[..], &[6], &ids("true")].concat());
    assert!(guide.is_complete());
    guide.go_back(ids("true").len());
    assert!(!guide.accept(ids("so")[0]));
}
