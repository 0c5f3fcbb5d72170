//! Incomplete checkpoints are refused before anything is generated (fault case L19).

use std::fs::{self, OpenOptions};

use serde_json::Value;

use crate::harness::{Checkpoint, INDEX, LAST_SHARD, MTP_PREFIX, fail, fail_with, succeed};
use crate::inspect::refused;

const FIRST_SHARD: &str = "model-00001-of-00002.safetensors";

fn generate(checkpoint: &Checkpoint) -> [&str; 7] {
    ["generate", "--model", checkpoint.as_str(), "--prompt-ids", "0,5,6", "--max-tokens", "4"]
}

fn without_drafting(checkpoint: &Checkpoint) -> Vec<&str> {
    [&generate(checkpoint)[..], &["--num-speculative-tokens", "0"]].concat()
}

/// Takes tensors out of the index; the model then has no way to them.
fn remove_tensors(checkpoint: &Checkpoint, is_removed: impl Fn(&str) -> bool) {
    checkpoint.edit_weight_map(|map| map.retain(|name, _| !is_removed(name)));
}

#[test]
fn missing_mtp_tensors_are_named_and_matter_only_to_drafting() {
    let expected = succeed(&without_drafting(&Checkpoint::copy()));
    let checkpoint = Checkpoint::copy();
    let eh_proj = format!("{MTP_PREFIX}eh_proj.weight");
    remove_tensors(&checkpoint, |name| name == eh_proj);
    fail_with(&generate(&checkpoint), &[checkpoint.as_str(), &eh_proj]);
    assert_eq!(succeed(&without_drafting(&checkpoint)), expected);

    remove_tensors(&checkpoint, |name| name.starts_with(MTP_PREFIX));
    let message = fail(&generate(&checkpoint));
    assert_eq!(message.lines().count(), 1, "{message}");
    for words in ["model.layers.5 is missing", "--num-speculative-tokens 0"] {
        assert!(message.contains(words), "{message}");
    }
    assert_eq!(succeed(&without_drafting(&checkpoint)), expected);
}

#[test]
fn a_missing_target_tensor_is_named_with_and_without_drafting() {
    let checkpoint = Checkpoint::copy();
    let gone = "model.layers.2.self_attn.kv_b_proj.weight";
    remove_tensors(&checkpoint, |name| name == gone);
    fail_with(&generate(&checkpoint), &[checkpoint.as_str(), gone]);
    fail_with(&without_drafting(&checkpoint), &[gone]);
    fail_with(&["score", "--model", checkpoint.as_str(), "--prompt-ids", "0,5"], &[gone]);
    let text = refused(&["inspect", checkpoint.as_str()]);
    assert!(text.contains("cannot load") && text.contains(gone), "{text}");
}

#[test]
fn a_missing_indexer_is_named() {
    let checkpoint = Checkpoint::copy_of("tiny-glm52");
    let expected = succeed(&without_drafting(&checkpoint));
    let own = format!("{MTP_PREFIX}self_attn.indexer.wk.weight");
    remove_tensors(&checkpoint, |name| name == own);
    fail_with(&generate(&checkpoint), &[checkpoint.as_str(), &own]);
    assert_eq!(succeed(&without_drafting(&checkpoint)), expected);

    // Layer 2 shares the selection of layer 1, so layer 1 cannot do without its indexer.
    let of_layer = |layer_idx: usize| format!("model.layers.{layer_idx}.self_attn.indexer.");
    let checkpoint = Checkpoint::copy_of("tiny-glm52");
    checkpoint.edit_weight_map(|map| {
        assert!(!map.keys().any(|name| name.starts_with(&of_layer(2))));
    });
    remove_tensors(&checkpoint, |name| name.starts_with(&of_layer(1)));
    let tensors = ["wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight"];
    let names = tensors.map(|tensor| format!("{}{tensor}", of_layer(1)));
    fail_with(&generate(&checkpoint), &names.each_ref().map(String::as_str));
    fail_with(&without_drafting(&checkpoint), &[&names[0]]);
    fail_with(&["score", "--model", checkpoint.as_str(), "--prompt-ids", "0,5"], &[&names[0]]);
}

#[test]
fn a_sparse_config_without_its_indexers_settings_is_refused_by_the_field() {
    let checkpoint = Checkpoint::copy_of("tiny-glm52");
    let config = checkpoint.file("config.json");
    let whole = fs::read_to_string(&config).unwrap();
    for field in ["index_topk", "index_n_heads", "index_head_dim", "q_lora_rank"] {
        let mut object: Value = serde_json::from_str(&whole).unwrap();
        object[field] = Value::Null;
        fs::write(&config, object.to_string()).unwrap();
        fail_with(&generate(&checkpoint), &["config.json", field]);
    }
}

#[test]
fn a_deleted_shard_is_named() {
    let checkpoint = Checkpoint::copy();
    fs::remove_file(checkpoint.file(LAST_SHARD)).unwrap();
    fail_with(&generate(&checkpoint), &[LAST_SHARD, INDEX]);
    assert!(refused(&["inspect", checkpoint.as_str()]).contains(LAST_SHARD));
    fail_with(&["serve", "--port", "0", "--model", checkpoint.as_str()], &[LAST_SHARD]);
}

#[test]
fn shards_without_their_index_are_told() {
    let checkpoint = Checkpoint::copy();
    fs::remove_file(checkpoint.file(INDEX)).unwrap();
    let expected = ["2 .safetensors files", INDEX];
    fail_with(&generate(&checkpoint), &expected);
    let text = refused(&["inspect", checkpoint.as_str()]);
    assert!(expected.iter().all(|expected| text.contains(expected)), "{text}");
}

#[test]
fn a_truncated_shard_is_named_with_both_sizes() {
    let checkpoint = Checkpoint::copy();
    let path = checkpoint.file(LAST_SHARD);
    let n_bytes = fs::metadata(&path).unwrap().len();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(n_bytes - 64).unwrap();
    let sizes = [n_bytes, n_bytes - 64].map(|size| size.to_string());
    fail_with(&generate(&checkpoint), &[LAST_SHARD, &sizes[0], &sizes[1]]);
}

#[test]
fn a_tensor_that_is_not_in_its_shard_is_named() {
    let checkpoint = Checkpoint::copy();
    let name = "model.embed_tokens.weight";
    checkpoint.edit_weight_map(|map| {
        assert_eq!(map[name], FIRST_SHARD);
        map.insert(name.to_owned(), LAST_SHARD.into());
    });
    fail_with(&generate(&checkpoint), &[name, LAST_SHARD]);
}
