//! Tokenizers.

use std::path::Path;

use serde_json::{Value, json};
use tokenization::Tokenizer;

/// Texts with what tokenizers treat in special ways.
const TEXTS: &[&str] = &["", " a  b\n\tab", "<s>▁a🙂é\u{301}b</s>\u{FFFD}\u{0} 12345 it's"];

/// The input as `tokenizer.json`: what it makes of texts, and what it makes of its ids.
pub(crate) fn run(input: &[u8]) {
    let Ok(tokenizer) = Tokenizer::from_json(input, Path::new("tokenizer.json")) else { return };
    for text in TEXTS {
        if let Ok(ids) = tokenizer.encode(text) {
            check(&tokenizer, &ids);
        }
    }
    let ids: Vec<u32> = (0..tokenizer.n_ids().min(300)).chain([u32::MAX]).collect();
    check(&tokenizer, &ids);
}

/// Checks that ids decode to one text, however they come.
fn check(tokenizer: &Tokenizer, ids: &[u32]) {
    for skip_special_tokens in [false, true] {
        let mut decoder = tokenizer.incremental_decoder(skip_special_tokens);
        let mut joined = String::new();
        for id in ids {
            let mut delta = String::new();
            decoder.push(*id, &mut delta);
            joined.push_str(&delta);
        }
        decoder.finish(&mut joined);
        assert_eq!(joined, tokenizer.decode(ids, skip_special_tokens));
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                       "use_regex": true});
    let split = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}| ?\\p{L}+|\\s+(?!\\S)|."},
         "behavior": "Isolated", "invert": false}, bytes]});
    let byte_model = json!({"type": "BPE", "dropout": null, "unk_token": null,
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
        "byte_fallback": false, "ignore_merges": true,
        "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "ðŁ": 4, "ĻĤ": 5, "Ġa": 6},
        "merges": [["a", "b"], ["Ġ", "a"]]});
    let space = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
                       "split": true});
    let pieces = json!({"type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": [
        ["<unk>", 0.0], ["▁", -1.5], ["a", -2.0], ["▁a", -2.5], ["<0xF0>", -9.0]]});
    let words = json!({"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "▁b": 7}});
    let steps = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    let normalizer = json!({"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    let begin = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [8], "tokens": ["<s>"]}}});
    let null = Value::Null;
    [
        (&null, &split, &null, &bytes, byte_model),
        (&null, &space, &begin, &space, pieces),
        (&normalizer, &null, &null, &steps, words),
    ]
    .into_iter()
    .map(|(normalizer, pre_tokenizer, post_processor, decoder, model)| {
        let added = json!({"id": 8, "content": "<s>", "special": true, "single_word": false,
                           "lstrip": false, "rstrip": false, "normalized": false});
        let file = json!({"version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [added], "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "post_processor": post_processor, "decoder": decoder, "model": model});
        file.to_string().into_bytes()
    })
    .collect()
}
