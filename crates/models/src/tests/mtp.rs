//! The steps of MTP layers: output rows, hand-over, layers of their own.

use spec_decode::{DraftInput, DraftModel};

use super::*;

const PROMPT: [i64; 9] = [0, 856, 1168, 596, 332, 2097, 3770, 2744, 330];

fn step(
    rig: &Rig,
    seqs: &[(u32, usize, usize)],
    (tokens, hidden): (&[i64], &Tensor),
    output_rows: Option<&[i64]>,
) -> Tensor {
    let mtp = rig.model.mtp.as_ref().unwrap().bind(&rig.caches, rig.backend);
    let output_rows = output_rows.map(ids);
    mtp.step(DraftInput {
        layer: 0,
        token_ids: &ids(tokens),
        hidden,
        layout: &rig.layout(seqs),
        output_rows: output_rows.as_ref(),
        selection: None,
    })
    .unwrap()
    .hidden
}

#[test]
fn output_rows_have_the_bits_of_a_full_pass_and_all_kv_is_written() {
    for ops in [Ops::Torch, Ops::Fused] {
        let mut rig = Rig::tiny("tiny-dsv3", ops, ComputeDtype::Float32);
        let seqs = [(0, 0, 5), (1, 0, 4)];
        let hidden = rig.forward(&seqs, &PROMPT);
        let full = step(&rig, &seqs, (&PROMPT, &hidden), None);
        let all_kv = rig.caches[5].kv.copy();
        rig.reset(4, 1024);
        let rows = step(&rig, &seqs, (&PROMPT, &hidden), Some(&[2, 4, 8]));
        let expected = full.index_select(0, &ids(&[2, 4, 8]));
        assert!(relative_difference(&rows, &expected) < 1e-6, "{ops:?}");
        if ops == Ops::Fused {
            assert_eq!(rows, expected);
        }
        assert!(rig.caches[5].kv.allclose(&all_kv, 0.0, 0.0, true));
    }
}

#[test]
fn no_output_row_still_writes_kv() {
    for ops in [Ops::Torch, Ops::Fused] {
        let rig = Rig::tiny("tiny-dsv3", ops, ComputeDtype::Float32);
        let seqs = [(0, 0, 9)];
        let hidden = rig.forward(&seqs, &PROMPT);
        let none = step(&rig, &seqs, (&PROMPT, &hidden), Some(&[]));
        assert_eq!(none.size(), [0, 256]);
        let n_written = rig.caches[5].kv.select(1, 0).isnan().logical_not().sum(Kind::Int64);
        assert_eq!(n_written.int64_value(&[]), 9);
    }
}
