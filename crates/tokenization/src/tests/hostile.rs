//! Hostile tokenizers, each with the text of its error, and hostile texts.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::decoding::{sentencepiece, tiny};
use crate::{TokenizationError, Tokenizer};

/// The error of a file, without its name.
fn error_of(content: &[u8]) -> String {
    let error = Tokenizer::from_json(content, Path::new("tokenizer.json")).unwrap_err().to_string();
    error.strip_prefix("tokenizer.json: ").unwrap().to_owned()
}

/// A tokenizer with these added tokens, decoder and model.
fn file(added: Value, decoder: Value, model: Value) -> Vec<u8> {
    let file = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "added_tokens": added, "decoder": decoder,
        "model": model});
    file.to_string().into_bytes()
}

fn bpe(vocab: Value) -> Value {
    json!({"type": "BPE", "vocab": vocab, "merges": []})
}

fn added(id: u64, content: &str) -> Value {
    json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
           "rstrip": false, "normalized": false})
}

#[test]
fn what_is_no_tokenizer_is_refused() {
    let whole = file(json!([]), sentencepiece(), bpe(json!({"a": 0})));
    assert!(Tokenizer::from_json(&whole, Path::new("tokenizer.json")).is_ok());
    for n_bytes in 0..whole.len() {
        let error = error_of(&whole[..n_bytes]);
        assert!(error.starts_with("EOF while parsing"), "{n_bytes}: {error}");
    }
    let deep = "[".repeat(100_000);
    for (content, expected) in [
        (&b"{}"[..], "Model missing"),
        (b"[]", "invalid type: sequence"),
        (b"{\"model\": \"\xff\"}", "invalid unicode code point"),
        (deep.as_bytes(), "EOF while parsing"),
    ] {
        let error = error_of(content);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn ids_are_bounded() {
    let refused = |token: &str, id: u64| {
        format!("the token \"{token}\" has the id {id}; it must be below 16777216")
    };
    for id in [1 << 24, 4_000_000_000, u64::from(u32::MAX)] {
        let content = file(json!([]), sentencepiece(), bpe(json!({"a": 0, "far": id})));
        assert_eq!(error_of(&content), refused("far", id));
        // The library numbers added tokens itself, behind the model's.
        let content = file(json!([added(id, "<s>")]), sentencepiece(), bpe(json!({"a": 0})));
        assert_eq!(Tokenizer::from_json(&content, Path::new("t")).unwrap().n_ids(), 2);
    }
    let content = file(json!([]), sentencepiece(), bpe(json!({"a": 0, "far": 1_u64 << 32})));
    assert!(error_of(&content).starts_with("invalid value: integer `4294967296`, expected u32"));
    let content = file(json!([]), sentencepiece(), bpe(json!({"a": 0, "far": 999})));
    let tokenizer = Tokenizer::from_json(&content, Path::new("t")).unwrap();
    assert_eq!((tokenizer.n_ids(), tokenizer.decode(&[0, 5, 0], true)), (1000, "aa".to_owned()));
}

#[test]
fn replacements_cannot_make_much_of_little() {
    let replace = |n_bytes: usize| {
        let content = "a".repeat(n_bytes);
        json!({"type": "Replace", "pattern": {"String": "a"}, "content": content})
    };
    let decoder = json!({"type": "Sequence", "decoders":
        [replace(100_000), replace(100_000), replace(100_000)]});
    let error = error_of(&file(json!([]), decoder, bpe(json!({"b": 0, "a": 1}))));
    assert_eq!(error, "the texts of the tokens up to 1 have more than 268435456 bytes");
}

#[test]
fn parts_that_contradict_each_other_are_an_error_when_they_meet() {
    let begin = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {}});
    let content = file(json!([added(1, "<s>")]), sentencepiece(), bpe(json!({"a": 0})));
    let mut content: Value = serde_json::from_slice(&content).unwrap();
    content["post_processor"] = begin;
    let content = content.to_string();
    // Be it at once or with the first text.
    let error = Tokenizer::from_json(content.as_bytes(), Path::new("t"))
        .and_then(|tokenizer| tokenizer.encode("a"))
        .unwrap_err();
    assert!(
        matches!(&error, TokenizationError::Encode(_) | TokenizationError::Malformed { .. }),
        "{error}"
    );
}

#[test]
fn what_is_no_file_is_never_opened() {
    let folder = std::env::temp_dir().join(format!("tokenization-{}-files", std::process::id()));
    fs::create_dir_all(folder.join("tokenizer.json")).unwrap();
    let error = Tokenizer::load(&folder).unwrap_err().to_string();
    assert!(error.ends_with("tokenizer.json: it is not a regular file"), "{error}");
    fs::remove_dir(folder.join("tokenizer.json")).unwrap();
    let huge = fs::File::create(folder.join("tokenizer.json")).unwrap();
    huge.set_len(1 << 40).unwrap();
    let error = Tokenizer::load(&folder).unwrap_err().to_string();
    fs::remove_dir_all(&folder).unwrap();
    assert!(error.ends_with("tokenizer.json: it has more than 268435456 bytes"), "{error}");
}

#[test]
fn what_a_user_says_has_no_control_tokens() {
    let vocab = ["<", "u", ">", "a", "<u>", "[E]", "/no", "/", "n", "o", "[", "E", "]", "<a<a"];
    let decoder = json!({"type": "Fuse"});
    let tokenizer = tiny("control", &vocab, &decoder, &["<u>", "[E]", "<a<a"]);
    let ids = |text: &str| tokenizer.encode_as_is(text).unwrap();
    assert_eq!(ids("a<u>[E]"), [3, 4, 5]);
    let said = tokenizer.plain_text("a<u>[E]<u>");
    assert_eq!(ids(&said), [3, 0, 1, 2, 10, 11, 12, 0, 1, 2]);
    assert_eq!(tokenizer.decode(&ids(&said), false), "a<u>[E]<u>");
    // The template's own ones stay, also right beside it.
    assert_eq!(ids(&format!("<u>{said}[E]"))[..2], [4, 3]);
    assert_eq!(ids(&format!("<u>{said}[E]")).last(), Some(&5));
    // A name that overlaps itself, names cut in two, and none.
    let control = [4, 5, 13];
    for text in ["<a<a<a<a", "<a<a<a", "<<u>u>", "[[E]E]", "<u", "", "/no", "\u{FDD0}<u\u{FDD0}>"] {
        let said = ids(&tokenizer.plain_text(text));
        assert!(said.iter().all(|id| !control.contains(id)), "{text}: {said:?}");
    }
    assert_eq!(tokenizer.plain_text("/no a < u > [E"), "/no a < u > [E");
}
