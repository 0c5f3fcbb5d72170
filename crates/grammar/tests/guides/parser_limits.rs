//! Places where the parser reaches one of its limits.

use engine_types::Guide;
use grammar::Constraint;

use crate::{allows, byte_ids, guide, json, mask};

/// An array whose items are digits, or objects of so many properties that one of them is too much
/// for the parser.
fn digits_or_too_much() -> Constraint {
    let properties: Vec<String> = (0..600).map(|idx| format!("\"p{idx}\": {{}}")).collect();
    let object = format!("{{\"type\": \"object\", \"properties\": {{{}}}}}", properties.join(","));
    let digit = r#"{"type": "integer", "minimum": 0, "maximum": 9}"#;
    json(&format!(
        r#"{{"type": "array", "items": {{"anyOf": [{digit}, {object}]}},
            "minItems": 6, "maxItems": 8}}"#
    ))
}

/// Accepts the bytes of a text, as far as they are; returns how many were.
fn accept(guide: &mut dyn Guide, text: &str) -> usize {
    byte_ids(text).into_iter().take_while(|id| guide.accept(*id)).count()
}

#[test]
fn a_draft_that_reaches_a_limit_does_no_harm() {
    let constraint = digits_or_too_much();
    let (mut plain, mut drafted) = (guide(&constraint), guide(&constraint));
    for (at, byte) in "[1,2,3,4,5,6,7,8]".char_indices() {
        let follows = mask(&mut *plain);
        if byte.is_ascii_digit() {
            assert_eq!(accept(&mut *drafted, "{"), 0, "the limit is reached");
            assert_eq!(mask(&mut *drafted), follows, "a refused token changes nothing");
            let n_accepted = accept(&mut *drafted, "9,{");
            assert_eq!(n_accepted, if at < 15 { 2 } else { 1 });
            drafted.go_back(n_accepted);
        }
        assert_eq!(mask(&mut *drafted), follows);
        let token = byte_ids(&byte.to_string())[0];
        assert!(plain.accept(token) && drafted.accept(token));
    }
    assert!(drafted.is_complete());
    assert_eq!(drafted.failure(), None);
}

#[test]
fn a_limit_that_is_reached_is_told() {
    let mut guide = guide(&digits_or_too_much());
    let forbidden = byte_ids("x")[0];
    assert!(!guide.accept(forbidden));
    assert_eq!(guide.failure(), None, "that is for the grammar");
    assert_eq!(accept(&mut *guide, "[{"), 1);
    let told = guide.failure().expect("a limit is reached");
    assert!(told.contains("too complex") && told.contains("items"), "{told}");
    assert!(!told.contains("state>") && !told.contains('\n'), "{told}");
    let mut copy = guide.clone_guide();
    assert_eq!(copy.failure(), Some(told));
    let words = mask(&mut *copy);
    assert!(allows(&words, byte_ids("1")[0]));
    assert_eq!(accept(&mut *copy, "1"), 1);
    assert_eq!(copy.failure(), None, "the place is passed");
}
