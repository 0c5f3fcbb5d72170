//! Random micro checkpoints of configuration variants: every row of two sequences.

use super::*;

const FIXTURES: [&str; 6] =
    ["v3-yarn", "v3-half-split-rope", "v3-groups", "v3-no-qlora", "v32-dsa", "glm-shared"];

struct Expected {
    ids: [Vec<i64>; 2],
    hidden: Tensor,
    logits: Tensor,
}

fn expected(name: &str) -> Expected {
    let mut tensors = read_tensors(&format!("fixtures/{name}/expected.safetensors"));
    let ids = tensors.remove("input_ids").unwrap().to_kind(Kind::Int64);
    Expected {
        ids: [0, 1].map(|seq| Vec::<i64>::try_from(ids.get(seq)).unwrap()),
        hidden: tensors.remove("last_hidden_state").unwrap(),
        logits: tensors.remove("logits").unwrap(),
    }
}

fn check(rig: &Rig, found: &Tensor, expected: &Expected) {
    let hidden = relative_difference(found, &expected.hidden.flatten(0, 1));
    let logits = relative_difference(&rig.logits(found), &expected.logits.flatten(0, 1));
    assert!(hidden < 1e-4 && logits < 1e-4, "hidden {hidden}, logits {logits}");
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
    let Expected { ids, .. } = expected("v3-groups");
    let rig = Rig::fixture("v3-groups", Ops::Fused);
    let together = rig.forward(&[(0, 0, 20), (1, 0, 9)], &[&ids[0][..20], &ids[1][..9]].concat());
    let alone = rig.forward(&[(2, 0, 9)], &ids[1][..9]);
    assert_eq!(together.narrow(0, 20, 9), alone);
    // A verify window of four rows beside another prefill, and the same rows one at a time.
    let tokens = [&ids[0][20..33], &ids[1][9..13]].concat();
    let window = rig.forward(&[(0, 20, 13), (1, 9, 4)], &tokens).narrow(0, 13, 4);
    for row in 0..4 {
        let token = &ids[1][9 + row..10 + row];
        let single = rig.forward(&[(2, 9 + row, 1)], token);
        assert_eq!(window.narrow(0, row as i64, 1), single, "row {row}");
    }
}

#[test]
fn a_checkpoint_without_mtp_layers_does_not_draft() {
    let options = LoadOptions { drafting: true, ..LoadOptions::default() };
    let error = load(&data("fixtures/v3-groups"), options).err().unwrap().to_string();
    assert!(error.contains("model.layers.3.eh_proj.weight"), "{error}");
}
