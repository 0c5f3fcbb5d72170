//! The bundled tokenizer against recorded values, and fault case L20 on tiny tokenizers.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::{TokenizationError, Tokenizer};

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Loads a tokenizer made of `vocab` (id = index) and `decoder`.
pub(super) fn tiny(name: &str, vocab: &[&str], decoder: &Value, special: &[&str]) -> Tokenizer {
    load_tiny(name, vocab, decoder, special).unwrap()
}

fn load_tiny(
    name: &str,
    vocab: &[&str],
    decoder: &Value,
    special: &[&str],
) -> Result<Tokenizer, TokenizationError> {
    let ids: serde_json::Map<String, Value> =
        vocab.iter().enumerate().map(|(id, token)| ((*token).into(), id.into())).collect();
    let added: Vec<Value> = special
        .iter()
        .map(|token| {
            json!({"id": ids[*token], "content": token, "special": true, "single_word": false,
                   "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
                  "continuing_subword_prefix": null, "end_of_word_suffix": null,
                  "fuse_unk": false, "byte_fallback": false, "vocab": ids, "merges": []},
    });
    let folder = std::env::temp_dir().join(format!("tokenization-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let loaded = Tokenizer::load(&folder);
    fs::remove_dir_all(&folder).unwrap();
    loaded
}

/// "a", F0 9F, 99 82, "b" in the characters of a byte-level vocabulary.
fn byte_level(name: &str) -> Tokenizer {
    let decoder = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                         "use_regex": true});
    tiny(name, &["a", "ðŁ", "ĻĤ", "b", "<s>", "Ġc"], &decoder, &["<s>"])
}

/// Decodes one id at a time.
fn deltas(tokenizer: &Tokenizer, ids: &[u32]) -> (Vec<String>, String) {
    let mut decoder = tokenizer.incremental_decoder(true);
    let pieces = ids
        .iter()
        .map(|id| {
            let mut piece = String::new();
            decoder.push(*id, &mut piece);
            piece
        })
        .collect();
    let mut tail = String::new();
    decoder.finish(&mut tail);
    (pieces, tail)
}

#[test]
fn the_bundled_tokenizer_agrees_with_recorded_cases() {
    let folder = repository("crates/bundled-checkpoints/checkpoints/tiny-dsv3");
    let tokenizer = Tokenizer::load(&folder).unwrap();
    assert_eq!((tokenizer.n_ids(), tokenizer.bos_token_id()), (4096, Some(0)));
    let cases = fs::read(repository("tests/data/oracle-tiny-dsv3/cases.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_slice(&cases).unwrap();
    assert_eq!(cases.len(), 14);
    let ids = |case: &Value, key: &str| -> Vec<u32> {
        serde_json::from_value(case[key].clone()).unwrap()
    };
    for case in &cases {
        let name = &case["name"];
        let prompt = case["prompt"].as_str().unwrap();
        assert_eq!(tokenizer.encode(prompt).unwrap(), ids(case, "prompt_ids"), "{name}");
        assert_eq!(tokenizer.decode(&ids(case, "prompt_ids"), true), prompt, "{name}");
        let greedy = ids(case, "greedy_ids");
        let text = case["greedy_text"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&greedy, true), text, "{name}");
        let (pieces, tail) = deltas(&tokenizer, &greedy);
        assert_eq!(pieces.concat() + &tail, text, "{name}");
        // The library's own decoder agrees, special tokens or not.
        let library = tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
        for skip in [true, false] {
            assert_eq!(tokenizer.decode(&greedy, skip), library.decode(&greedy, skip).unwrap());
        }
    }
}

#[test]
fn arbitrary_ids_decode_as_the_library_does() {
    let folder = repository("crates/bundled-checkpoints/checkpoints/tiny-dsv3");
    let tokenizer = Tokenizer::load(&folder).unwrap();
    let library = tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    let mut state = 7_u32;
    for _ in 0..200 {
        let ids: Vec<u32> = (0..40)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Mostly single bytes, so that broken and whole characters are common.
                if state >> 28 == 0 { (state >> 8) % 4096 } else { 10 + (state >> 8) % 256 }
            })
            .collect();
        let (pieces, tail) = deltas(&tokenizer, &ids);
        assert_eq!(pieces.concat() + &tail, library.decode(&ids, true).unwrap(), "{ids:?}");
    }
}

#[test]
fn bos_is_added_once() {
    let folder = repository("crates/bundled-checkpoints/checkpoints/tiny-dsv3");
    let tokenizer = Tokenizer::load(&folder).unwrap();
    assert_eq!(tokenizer.encode("x").unwrap(), [0, 97]);
    assert_eq!(tokenizer.encode("<｜begin▁of▁sentence｜>x").unwrap(), [0, 97]);
}

#[test]
fn characters_wait_for_their_last_token() {
    let tokenizer = byte_level("split");
    let (pieces, tail) = deltas(&tokenizer, &[0, 1, 2, 3]);
    assert_eq!(pieces, ["a", "", "🙂", "b"]);
    assert_eq!(tail, "");
    assert_eq!(tokenizer.decode(&[0, 1, 2, 3], true), "a🙂b");
    // A run of one step is pushed id by id into one text.
    let mut decoder = tokenizer.incremental_decoder(true);
    let mut text = String::new();
    [0, 1, 2, 3].iter().for_each(|id| decoder.push(*id, &mut text));
    assert_eq!(text, "a🙂b");
}

#[test]
fn a_cut_character_ends_as_one_replacement_character() {
    let tokenizer = byte_level("cut");
    assert_eq!(deltas(&tokenizer, &[0, 1]), (vec!["a".into(), String::new()], "\u{FFFD}".into()));
    assert_eq!(tokenizer.decode(&[0, 1], true), "a\u{FFFD}");
    // Bytes that can never become a character do not wait.
    assert_eq!(deltas(&tokenizer, &[1, 3]).0, ["", "\u{FFFD}b"]);
    assert_eq!(tokenizer.decode(&[2, 2], true), "\u{FFFD}".repeat(4));
}

#[test]
fn long_runs_cost_no_more_a_token() {
    let tokenizer = byte_level("long");
    let whole: Vec<u32> = [0, 1, 2, 3].repeat(2500);
    let (pieces, tail) = deltas(&tokenizer, &whole);
    assert_eq!(pieces.concat() + &tail, "a🙂b".repeat(2500));
    assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')));
    // Beginnings that never end: what waits stays below four bytes.
    let broken = vec![1; 10_000];
    let (pieces, tail) = deltas(&tokenizer, &broken);
    assert!(pieces[1..].iter().all(|piece| piece == "\u{FFFD}"));
    assert_eq!(pieces.concat() + &tail, tokenizer.decode(&broken, true));
}

#[test]
fn ids_without_token_and_special_tokens_have_no_text() {
    let tokenizer = byte_level("gap");
    assert_eq!(tokenizer.decode(&[0, 6, 4, 4000, u32::MAX, 5], true), "a c");
    assert_eq!(tokenizer.decode(&[0, 4, 3], false), "a<s>b");
    // Neither breaks a character in two.
    assert_eq!(tokenizer.decode(&[1, 4, 77, 2], true), "🙂");
}

fn metaspace(name: &str, prepend_scheme: &str) -> Tokenizer {
    let decoder = json!({"type": "Metaspace", "replacement": "▁", "split": true,
                         "prepend_scheme": prepend_scheme});
    tiny(name, &["▁hello", "▁world", "!"], &decoder, &[])
}

#[test]
fn metaspace_spaces_survive() {
    for prepend_scheme in ["always", "first"] {
        let tokenizer = metaspace("metaspace", prepend_scheme);
        let (pieces, _) = deltas(&tokenizer, &[0, 1, 2]);
        assert_eq!(pieces, ["hello", " world", "!"]);
        assert_eq!(tokenizer.decode(&[0, 1, 2], true), "hello world!");
        // An id without a token is not the first one.
        assert_eq!(tokenizer.decode(&[3, 0, 4000, 0], true), "hello hello");
    }
    assert_eq!(metaspace("metaspace-never", "never").decode(&[0, 1, 2], true), " hello world!");
    let whole = [0, 1].repeat(5000);
    let (pieces, _) = deltas(&metaspace("metaspace-long", "always"), &whole);
    assert_eq!(pieces.concat(), " hello world".repeat(5000)[1..]);
}

/// The decoder of SentencePiece models with bytes.
pub(super) fn sentencepiece() -> Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})
}

#[test]
fn sentencepiece_with_byte_fallback_works_as_a_sequence() {
    let decoder = sentencepiece();
    let vocab = ["▁hello", "▁world", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"];
    let tokenizer = tiny("sequence", &vocab, &decoder, &[]);
    let (pieces, _) = deltas(&tokenizer, &[0, 1, 2, 3, 4, 5, 1]);
    assert_eq!(pieces, ["hello", " world", "", "", "", "🙂", " world"]);
    // Cut inside the character, and bytes that do not go on.
    assert_eq!(deltas(&tokenizer, &[0, 2, 3, 4]).1, "\u{FFFD}");
    assert_eq!(tokenizer.decode(&[0, 2, 3, 1], true), "hello\u{FFFD} world");
    let whole = [1, 2, 3, 4, 5].repeat(2000);
    let (pieces, tail) = deltas(&tokenizer, &whole);
    assert_eq!(pieces.concat() + &tail, " world🙂".repeat(2000)[1..]);
}

#[test]
fn errors_name_the_file() {
    let missing = Tokenizer::load(Path::new("no-such-folder")).unwrap_err();
    assert!(missing.to_string().contains("no-such-folder/tokenizer.json"), "{missing}");
    assert!(Tokenizer::load_if_present(Path::new("no-such-folder")).unwrap().is_none());
    let decoder = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let error = load_tiny("unsupported", &["a"], &decoder, &[]).unwrap_err();
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    assert!(error.to_string().contains("WordPiece"), "{error}");
}

#[test]
fn configuration_faults_are_named() {
    let folder = std::env::temp_dir().join(format!("tokenization-{}-config", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let source = repository("crates/bundled-checkpoints/checkpoints/tiny-dsv3/tokenizer.json");
    fs::copy(source, folder.join("tokenizer.json")).unwrap();
    let load_with = |config: &str| {
        fs::write(folder.join("tokenizer_config.json"), config).unwrap();
        Tokenizer::load(&folder)
    };
    let unknown = load_with(r#"{"add_bos_token": true, "bos_token": "<none>"}"#).unwrap_err();
    assert!(matches!(unknown, TokenizationError::UnknownBosToken { .. }), "{unknown}");
    let missing = load_with(r#"{"add_bos_token": true}"#).unwrap_err().to_string();
    assert!(missing.contains("tokenizer_config.json") && missing.contains("bos_token"));
    let object = r#"{"add_bos_token": true, "bos_token": {"content": "<think>"}}"#;
    let with_bos = load_with(object).unwrap();
    assert_eq!(with_bos.bos_token_id(), Some(5));
    let ids = with_bos.encode("a b").unwrap();
    assert_eq!(ids[0], 5);
    assert_eq!(with_bos.encode_as_is("a b").unwrap(), ids[1..]);
    assert_eq!(with_bos.encode_as_is("<think>a b").unwrap(), ids);
    assert_eq!(load_with("{}").unwrap().bos_token_id(), None);
    fs::remove_dir_all(&folder).unwrap();
}
