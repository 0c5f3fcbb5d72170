//! Fault case L21, and stop texts against a plain search of the whole text.

use engine_types::StopTexts;
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::json;

use super::decoding::tiny;
use crate::{OutputText, StopRules, Tokenizer};

/// A tokenizer whose id `i` has the text `texts[i]`.
fn with_texts(name: &str, texts: &[&str]) -> Tokenizer {
    let decoder = json!({"type": "Fuse"});
    tiny(name, texts, &decoder, &[])
}

fn rules(texts: &[&str]) -> StopRules {
    StopRules { texts: texts.iter().map(|text| (*text).into()).collect(), ..StopRules::default() }
}

/// The piece of each id, and what the end adds.
fn pieces(mut output: OutputText, ids: &[u32]) -> (Vec<String>, String) {
    let piece = |id: &u32| {
        let mut piece = String::new();
        output.push(*id, &mut piece);
        piece
    };
    let pieces = ids.iter().map(piece).collect();
    let mut tail = String::new();
    output.finish(&mut tail);
    (pieces, tail)
}

/// Checks the text of all `tokens`, and that the last of them is the one that ends it, if any does.
fn check(stops: &[&str], tokens: &[&str], expected: &str, stop: Option<usize>) {
    let tokenizer = with_texts(&format!("stops-{expected}"), tokens);
    let ids: Vec<u32> = (0..u32::try_from(tokens.len()).unwrap()).collect();
    let (pieces, tail) = pieces(tokenizer.output_text(&rules(stops)), &ids);
    assert_eq!(pieces.concat() + &tail, expected, "{stops:?} in {tokens:?}");
    let mut detector = tokenizer.stop_text_detector(&rules(stops).texts);
    let found: Vec<Option<usize>> = ids.iter().map(|id| detector.push(*id)).collect();
    let (last, before) = found.split_last().unwrap();
    assert!(before.iter().all(Option::is_none), "{found:?}");
    assert_eq!(*last, stop, "{stops:?} in {tokens:?}");
}

#[test]
fn stop_texts_end_the_text_wherever_tokens_are_cut() {
    check(&["</end>"], &["ok ", "</", "en", "d>"], "ok ", Some(0));
    check(&["Lond"], &[" London"], " ", Some(0));
    check(&["ab", "abc"], &["xabc"], "x", Some(0));
    check(&["abc", "ab"], &["xabc"], "x", Some(0));
    check(&["bc", "abc"], &["xabcd"], "x", Some(1));
    check(&["END"], &["E", "ND"], "", Some(0));
    check(&["aab"], &["aa", "a", "b"], "a", Some(0));
    check(&["ü"], &["gr", "ün"], "gr", Some(0));
}

#[test]
fn what_is_no_stop_text_after_all_is_handed_out() {
    check(&["</end>"], &["ok ", "</", "en", "ter"], "ok </enter", None);
    check(&["</end>"], &["ok ", "</e"], "ok </e", None);
    let tokenizer = with_texts("held", &["a", "</", "e", "x"]);
    let (pieces, tail) =
        pieces(tokenizer.output_text(&rules(&["</end>", "</endx"])), &[0, 1, 2, 3]);
    assert_eq!(
        (pieces.as_slice(), tail.as_str()),
        (&["a", "", "", "</ex"].map(Into::into)[..], "")
    );
}

#[test]
fn the_stop_text_belongs_to_the_output_if_asked_for() {
    let tokenizer = with_texts("include", &["a", "EN", "Dx"]);
    let rules = StopRules { include_stop_text: true, ..rules(&["END"]) };
    let (pieces, tail) = pieces(tokenizer.output_text(&rules), &[0, 1, 2]);
    assert_eq!((pieces.as_slice(), tail.as_str()), (&["a", "", "END"].map(Into::into)[..], ""));
}

#[test]
fn before_min_tokens_stop_texts_are_text_like_any_other() {
    let tokenizer = with_texts("min-tokens", &["aa", "a"]);
    let rules = StopRules { min_tokens: 2, ..rules(&["aa"]) };
    // The first match is too early; the one that overlaps it is not.
    let (pieces, tail) = pieces(tokenizer.output_text(&rules), &[0, 1]);
    assert_eq!((pieces.as_slice(), tail.as_str()), (&["a", ""].map(Into::into)[..], ""));
}

/// The characters that stand for bytes in a byte-level vocabulary: parts of ü (C3 BC) and of
/// 🙂 (F0 9F 99 82) among them.
const PIECES: [&str; 12] = ["a", "b", "ab", "ba", "aab", "Ã", "¼", "Ã¼", "ðŁ", "ĻĤ", "aðŁ", "ĻĤb"];

/// A plain search: after each token, the whole text up to there. Returns the number of tokens, the
/// index of the stop text that ends them and the text.
fn reference(texts: &[String], rules: &StopRules) -> (usize, Option<usize>, String) {
    let mut n_before = 0;
    for (idx, text) in texts.iter().enumerate() {
        let n_tokens = idx + 1;
        let is_new = |(start, stop): &(usize, usize)| start + rules.texts[*stop].len() > n_before;
        let places = (0..text.len()).filter(|at| text.is_char_boundary(*at));
        let found = places
            .flat_map(|at| (0..rules.texts.len()).map(move |stop| (at, stop)))
            .filter(|(at, stop)| text[*at..].find(rules.texts[*stop].as_str()) == Some(0))
            .find(is_new);
        if let Some((start, stop)) = found.filter(|_| n_tokens >= rules.min_tokens as usize) {
            let end = start + rules.texts[stop].len();
            let n_kept = if rules.include_stop_text { end } else { start };
            return (n_tokens, Some(stop), text[..n_kept].to_owned());
        }
        n_before = text.len();
    }
    (texts.len(), None, texts.last().cloned().unwrap_or_default())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_plain_search_finds_the_same(
        ids in vec(0..u32::try_from(PIECES.len()).unwrap(), 0..24),
        stops in vec("[abü🙂]{1,4}", 0..4),
        include_stop_text in any::<bool>(),
        min_tokens in prop_oneof![Just(0), 0..12_u32],
    ) {
        thread_local! {
            static TOKENIZER: Tokenizer = {
                let decoder = json!({"type": "ByteLevel", "add_prefix_space": false,
                                     "trim_offsets": true, "use_regex": true});
                tiny("stops", &PIECES, &decoder, &[])
            };
        }
        let rules = StopRules { texts: stops, include_stop_text, min_tokens };
        TOKENIZER.with(|tokenizer| check_against_reference(tokenizer, &ids, &rules));
    }
}

fn check_against_reference(tokenizer: &Tokenizer, ids: &[u32], rules: &StopRules) {
    let mut decoder = tokenizer.incremental_decoder(true);
    let mut text = String::new();
    let texts: Vec<String> = ids
        .iter()
        .map(|id| {
            decoder.push(*id, &mut text);
            text.clone()
        })
        .collect();
    let (n_tokens, stop, mut expected) = reference(&texts, rules);

    let mut detector = tokenizer.stop_text_detector(&rules.texts);
    for (idx, id) in ids[..n_tokens].iter().enumerate() {
        let found = detector.push(*id);
        let is_free = idx + 1 >= rules.min_tokens as usize;
        assert_eq!(found.filter(|_| is_free), stop.filter(|_| idx + 1 == n_tokens), "{ids:?}");
    }
    let mut output = tokenizer.output_text(rules);
    let mut shown = String::new();
    for id in &ids[..n_tokens] {
        output.push(*id, &mut shown);
        // Whatever follows, none of this has to be taken back, and no more is held than must be.
        assert!(texts[n_tokens - 1].starts_with(&shown) && expected.starts_with(&shown));
    }
    if stop.is_none() {
        let held = &expected[shown.len()..];
        assert!(held.is_empty() || rules.texts.iter().any(|stop| stop.starts_with(held)));
        decoder.finish(&mut expected);
    }
    output.finish(&mut shown);
    assert_eq!(shown, expected, "{ids:?} {rules:?}");
}
