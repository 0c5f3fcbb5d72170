//! Random micro checkpoints of configuration variants: every row of two sequences.

use super::*;

const FIXTURES: [&str; 8] = [
    "v2-softmax",
    "v3-yarn",
    "v3-half-split-rope",
    "v3-groups",
    "v3-no-qlora",
    "v32-dsa",
    "glm-shared",
    "glm4-moe-mha",
];

struct Expected {
    ids: [Vec<i64>; 2],
    hidden: Tensor,
    logits: Tensor,
}

/// In sparse fixtures index scores are exactly zero for several keys at the edge of some
/// selections. transformers leaves to `topk` which of them are chosen; this file has its values
/// with the lower positions chosen.
const LOWER_POSITION: &str = "expected-lower-position.safetensors";

fn expected(name: &str) -> Expected {
    let is_tied = data("fixtures").join(name).join(LOWER_POSITION).exists();
    let file = if is_tied { LOWER_POSITION } else { "expected.safetensors" };
    let mut tensors = read_tensors(&format!("fixtures/{name}/{file}"));
    let ids = tensors.remove("input_ids").unwrap().to_kind(Kind::Int64);
    Expected {
        ids: [0, 1].map(|seq| Vec::<i64>::try_from(ids.get(seq)).unwrap()),
        hidden: tensors.remove("last_hidden_state").unwrap(),
        logits: tensors.remove("logits").unwrap(),
    }
}

fn check(rig: &Rig, found: &Tensor, expected: &Expected) {
    let hidden = relative_difference(found, &expected.hidden.flatten(0, 1));
    let last = last_rows(found, &expected.logits);
    let logits = relative_difference(&rig.logits(&last), &expected.logits.flatten(0, 1));
    assert!(hidden < 1e-4 && logits < 1e-4, "hidden {hidden}, logits {logits}");
}

/// Of the hidden states of two sequences the rows that there are `logits` `[2, rows, vocab]` of:
/// the last ones of each.
fn last_rows(hidden: &Tensor, logits: &Tensor) -> Tensor {
    let n_rows = logits.size()[1];
    let of_both = hidden.view([2, -1, hidden.size()[1]]);
    of_both.narrow(1, of_both.size()[1] - n_rows, n_rows).flatten(0, 1)
}

#[test]
fn one_pass_over_two_sequences_agrees() {
    for name in FIXTURES {
        let expected = expected(name);
        let n = expected.ids[0].len();
        for ops in [Ops::Torch, Ops::Fused] {
            let mut rig = Rig::fixture(name, ops);
            rig.reset(16, 1024);
            let found = rig.forward(&[(0, 0, n), (1, 0, n)], &expected.ids.concat());
            check(&rig, &found, &expected);
        }
    }
}

#[test]
fn ties_of_index_scores_move_few_rows_and_no_other() {
    // Both sequences of 48 rows: those at a tie, and later ones that see them in a later layer.
    let moved_by_ties = [("v32-dsa", 26, 13), ("glm-shared", 23, 34)];
    for (name, first, n_rows) in moved_by_ties {
        let hidden = |file| {
            let mut tensors = read_tensors(&format!("fixtures/{name}/{file}"));
            tensors.remove("last_hidden_state").unwrap().flatten(0, 1).to_kind(Kind::Double)
        };
        let chosen_by_topk = hidden("expected.safetensors");
        let difference = (&chosen_by_topk - hidden(LOWER_POSITION)).abs().amax([-1i64], false);
        let moved = difference.gt_tensor(&(chosen_by_topk.abs().max() * 1e-4)).nonzero();
        assert_eq!(moved.size(), [n_rows, 1], "{name}");
        assert_eq!(moved.int64_value(&[0, 0]), first, "{name}");
    }
}

#[test]
fn chunks_of_seven_over_blocks_of_four_agree() {
    for name in FIXTURES {
        let expected = expected(name);
        let n = expected.ids[0].len();
        for ops in [Ops::Torch, Ops::Fused] {
            let rig = Rig::fixture(name, ops);
            let mut chunks = [Vec::new(), Vec::new()];
            for start in (0..n).step_by(7) {
                let end = n.min(start + 7);
                let tokens = [&expected.ids[1][start..end], &expected.ids[0][start..end]].concat();
                let len = end - start;
                let found = rig.forward(&[(1, start, len), (0, start, len)], &tokens);
                let mut halves = found.split(len as i64, 0).into_iter();
                chunks[1].push(halves.next().unwrap());
                chunks[0].push(halves.next().unwrap());
            }
            let found = Tensor::cat(&chunks.map(|chunk| Tensor::cat(&chunk, 0)), 0);
            check(&rig, &found, &expected);
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_company() {
    for name in ["v3-groups", "glm4-moe-mha"] {
        check_company(name);
    }
}

fn check_company(name: &str) {
    let Expected { ids, .. } = expected(name);
    let rig = Rig::fixture(name, Ops::Fused);
    let together = rig.forward(&[(0, 0, 20), (1, 0, 9)], &[&ids[0][..20], &ids[1][..9]].concat());
    let alone = rig.forward(&[(2, 0, 9)], &ids[1][..9]);
    assert_eq!(together.narrow(0, 20, 9), alone, "{name}");
    // A verify window of four rows beside another prefill, and the same rows one at a time.
    let tokens = [&ids[0][20..33], &ids[1][9..13]].concat();
    let window = rig.forward(&[(0, 20, 13), (1, 9, 4)], &tokens).narrow(0, 13, 4);
    for row in 0..4 {
        let token = &ids[1][9 + row..10 + row];
        let single = rig.forward(&[(2, 9 + row, 1)], token);
        assert_eq!(window.narrow(0, row as i64, 1), single, "{name}, row {row}");
    }
}

#[test]
fn a_checkpoint_without_mtp_layers_does_not_draft() {
    let options = LoadOptions { drafting: true, ..LoadOptions::default() };
    for name in ["v3-groups", "glm4-moe-mha"] {
        let error = load(&data("fixtures").join(name), options).err().unwrap().to_string();
        assert!(error.contains("model.layers.3 is missing"), "{name}: {error}");
    }
}

#[test]
fn a_shorter_longest_sequence_changes_no_row_within_it() {
    let ids = &expected("v3-yarn").ids[0];
    let mut rig = Rig::fixture("v3-yarn", Ops::Fused);
    let whole = rig.forward(&[(0, 0, ids.len())], ids);
    let max_model_len = Some(ids.len() as u32);
    let options = LoadOptions { max_model_len, ..LoadOptions::default() };
    rig.model = load(&data("fixtures/v3-yarn"), options).unwrap();
    assert_eq!(rig.model.config.max_position_embeddings, ids.len());
    rig.reset(4, 1024);
    assert!(rig.forward(&[(0, 0, ids.len())], ids).equal(&whole));
    // There is no row of the table for the next position.
    let (layout, backend) = (rig.layout(&[(0, ids.len(), 1)]), rig.backend);
    let cx = ForwardContext { layout: &layout, caches: &rig.caches, backend };
    assert!(rig.model.target.forward(&super::ids(&ids[..1]), &cx).is_err());
    // What the model does not take stays to be refused.
    for other in [Some(0), Some(u32::MAX), None] {
        let mut config = model_config::ModelConfig::load(&data("fixtures/v3-yarn")).unwrap();
        let len = config.max_position_embeddings;
        config.limit_len(other);
        assert_eq!(config.max_position_embeddings, len);
    }
}
