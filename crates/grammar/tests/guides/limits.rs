//! Faulty and hostile constraints, and limits.

use std::time::{Duration, Instant};

use grammar::{Constraint, ConstraintKind, GrammarError, Grammars, MAX_NESTING};

use crate::{EOS, grammars, json, lark, mask, regex, tokenizer};

fn refused(constraint: &Constraint) -> GrammarError {
    grammars().compile(constraint).expect_err("a constraint that is refused")
}

#[test]
fn faults_are_named_with_their_place() {
    let not_json = refused(&json("{\"type\":\n oops}"));
    assert!(matches!(not_json, GrammarError::NotJson { line: 2, .. }), "{not_json}");
    for (constraint, kind, part) in [
        (json(r#"{"type": "strong"}"#), ConstraintKind::JsonSchema, "strong"),
        (json(r#"{"type": "array", "uniqueItems": true}"#), ConstraintKind::JsonSchema, "unique"),
        (json("7"), ConstraintKind::JsonSchema, ""),
        (regex("a(b"), ConstraintKind::Regex, "unclosed group"),
        (lark("start: missing"), ConstraintKind::Lark, "missing"),
        (lark("begin: \"x\""), ConstraintKind::Lark, "start"),
        (lark("start: <nothing>"), ConstraintKind::Lark, "nothing"),
        (lark("start: \"x"), ConstraintKind::Lark, "1"),
    ] {
        let error = refused(&constraint);
        let text = error.to_string();
        assert!(matches!(error, GrammarError::Invalid { kind: of, .. } if of == kind), "{text}");
        assert!(text.contains(part), "{text}");
        assert!(!text.contains("backtrace") && !text.contains("non-verbose"), "{text}");
    }
}

#[test]
fn attributes_that_drafts_cannot_keep_to_are_refused() {
    for (grammar, attribute) in [
        ("start: a\na[max_tokens=3]: /.*/", "max_tokens"),
        ("start: a \"x\"\na[stop=\"!\"]: /.*/", "stop"),
        ("start: a\na[temperature=0.5]: /.*/", "temperature"),
    ] {
        let error = refused(&lark(grammar));
        let is_it = matches!(error, GrammarError::Unsupported { attribute: of, .. }
            if of == attribute);
        assert!(is_it, "{error}");
    }
}

#[test]
fn what_no_text_meets_is_refused() {
    let kind = ConstraintKind::Regex;
    assert_eq!(refused(&regex(r"[^\s\S]")), GrammarError::Unsatisfiable { kind });
}

#[test]
fn long_and_deep_texts_are_refused_at_once() {
    let long = refused(&regex(&"a".repeat(100_000)));
    assert!(matches!(long, GrammarError::TooLong { n_bytes: 100_000, .. }), "{long}");
    let deep = refused(&regex(&format!("{}a{}", "(".repeat(20_000), ")".repeat(20_000))));
    assert!(matches!(deep, GrammarError::TooDeep { offset: MAX_NESTING, .. }), "{deep}");
}

#[test]
fn hostile_constraints_come_to_an_end() {
    let name = |idx: usize, first: u8| {
        [26 * 26, 26, 1].map(|unit| char::from(first + (idx / unit % 26) as u8)).iter().collect()
    };
    // Each rule is the next one: as many as the greatest length has room for.
    let chain = |first: u8| {
        let names: Vec<String> = (0..7_000).map(|idx| name(idx, first)).collect();
        let rules = names.windows(2).map(|pair| format!("{}: {}\n", pair[0], pair[1]));
        let (start, end) = (&names[0], &names[names.len() - 1]);
        format!("start: {start}\n{}{end}: \"x\"\n", rules.collect::<String>())
    };
    let defs = |n: usize| {
        let defs = (0..n).map(|idx| format!(r##""d{idx}":{{"$ref":"#/$defs/d{}"}},"##, idx + 1));
        let defs: String = defs.collect();
        format!(r##"{{"$ref": "#/$defs/d0", "$defs": {{{defs}"d{n}": {{"type": "null"}}}}}}"##)
    };
    let twos = |n: usize| {
        let alternatives = r#"{"anyOf": [{"minLength": 1}, {"maxLength": 9}]}"#;
        format!(r#"{{"type": "string", "allOf": [{}]}}"#, vec![alternatives; n].join(","))
    };
    for constraint in [
        regex("(((a{1,99}){1,99}){1,99}){1,99}"),
        regex("(.*a.{20}){5}"),
        regex(&format!("({})*", vec![r"\w{1,200}x"; 50].join("|"))),
        json(r#"{"type": "string", "minLength": 100000, "maxLength": 9000000}"#),
        json(r#"{"type": "array", "minItems": 90000, "items": {"type": "null"}}"#),
        json(&twos(20)),
        json(&defs(2_000)),
        lark(&chain(b'a')),
        lark(&chain(b'A')),
        lark("start: start start | \"a\" | "),
    ] {
        let start = Instant::now();
        let compiled = grammars().compile(&constraint);
        let text = format!("{constraint:?}");
        let text = &text[..text.len().min(60)];
        if let Ok(mut guide) = compiled {
            for _ in 0..5 {
                let words = mask(&mut *guide.0);
                let Some(token) = crate::allowed(&words).last().copied() else { break };
                if !guide.0.accept(token) {
                    break;
                }
            }
        }
        let elapsed = start.elapsed();
        assert!(elapsed < Duration::from_secs(20), "{elapsed:?} for {text}");
    }
}

#[test]
fn a_vocabulary_needs_an_end() {
    assert_eq!(Grammars::new(tokenizer(), &[]).unwrap_err(), GrammarError::NoEndId);
    let id = tokenizer().n_ids();
    let error = Grammars::new(tokenizer(), &[EOS, id]).unwrap_err();
    assert_eq!(error, GrammarError::EndIdOutsideVocab { id, n_ids: id });
}

#[test]
fn every_end_id_is_allowed_where_the_text_can_end() {
    let two = Grammars::new(tokenizer(), &[EOS, 4]).unwrap();
    let mut guide = two.compile(&regex("x?")).unwrap().0;
    let words = mask(&mut *guide);
    assert!(crate::allows(&words, EOS) && crate::allows(&words, 4));
    assert!(guide.accept(4) && guide.is_complete());
}

#[test]
fn a_constraint_that_comes_again_starts_anew() {
    let own = Grammars::new(tokenizer(), &[EOS]).unwrap();
    // More than are kept, and all of them twice.
    for _ in 0..2 {
        for n in 0..70 {
            let mut guide = own.compile(&regex(&format!("a{{{n}}}b"))).unwrap().0;
            assert_eq!(guide.accept(crate::byte_ids("a")[0]), n > 0);
            assert!(!crate::allows(&mask(&mut *guide), EOS));
        }
    }
}
