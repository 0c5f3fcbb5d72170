//! Which selection each draft step is given.

use super::*;

fn sharing(k: usize, num_layers: usize) -> EagleProposer {
    let mut proposer = EagleProposer::new(k, num_layers, BLOCK_SIZE).unwrap();
    proposer.share_index(true);
    proposer
}

/// Each recursive step is given what the prefix step of its own layer chose for the last valid row
/// of each sequence that still drafts; prefix steps choose for themselves.
#[test]
fn recursive_steps_reuse_the_row_of_their_layer_and_sequence() {
    let texts = texts(3);
    for (num_layers, k) in [(1, 3), (1, 8), (2, 5), (3, 8), (3, 2)] {
        for wanted in [[k, k, k], [1, k, 2.min(k)], [0, 2.min(k), k]] {
            let (mut proposer, model) = (sharing(k, num_layers), HashDrafter::new(num_layers));
            let mut steps = rounds(k, &[5, 9, 6], &[&[3, 1, 4]]).pop().unwrap();
            let prompts = rounds(k, &[5, 9, 6], &[]).pop().unwrap();
            let batch: Vec<_> = texts.iter().zip(prompts).collect();
            propose(&mut proposer, &model, &batch);
            model.calls.borrow_mut().clear();
            steps.iter_mut().zip(wanted).for_each(|(step, n)| step.n_propose = n);
            let batch: Vec<_> = texts.iter().zip(steps.iter().copied()).collect();
            let drafts = propose(&mut proposer, &model, &batch);

            let calls = model.calls.borrow();
            for (step, call) in calls.iter().enumerate() {
                let place = format!("step {step} of {k}, {num_layers} layers, {wanted:?}");
                if step < num_layers {
                    assert_eq!(call.selection, None, "{place}");
                    continue;
                }
                let layer = step % num_layers;
                let rows = (0..3).filter(|&seq| wanted[seq] > step).map(|seq| {
                    let last = steps[seq].start + steps[seq].n_rows - 1;
                    // The token that the prefix step of this layer embeds at that row.
                    let token = match layer {
                        0 => texts[seq].tokens[last + 1],
                        _ => drafts[seq][layer - 1],
                    };
                    [layer, last, token as usize].map(|n| i32::try_from(n).unwrap()).to_vec()
                });
                assert_eq!(call.selection, Some(rows.collect()), "{place}");
            }
        }
    }
}

#[test]
fn launches_are_one_for_each_layer_with_sharing_and_one_for_each_step_without() {
    for (num_layers, k) in [(1, 1), (1, 2), (1, 3), (1, 5), (1, 8), (2, 5), (3, 2)] {
        for share in [true, false] {
            let mut proposer = EagleProposer::new(k, num_layers, BLOCK_SIZE).unwrap();
            proposer.share_index(share);
            let (text, model) = (Text::new(1), HashDrafter::new(num_layers));
            let step = rounds(k, &[6], &[]).remove(0)[0];
            let hidden: Vec<u32> = (0..6).map(|p| text.hidden(p)).collect();
            let seq = DraftSeq {
                first_position: 0,
                rows: 0..6,
                tokens: &text.tokens[..6],
                following: &text.tokens[6..7],
                blocks: &text.blocks,
                n_propose: step.n_propose,
                sampling: None,
            };
            let proposal = proposer.propose(&model, &[seq], &column(&hidden)).unwrap();
            let launches = proposal.indexer.map(|counts| counts.n_launches);
            let n_running = if share { num_layers.min(k) } else { k };
            let expected = [0, 1, 2, 3, 4, 5, 6, 7].map(|step| u64::from(step < n_running));
            assert_eq!(launches, expected, "{num_layers} layers, k {k}, sharing {share}");
        }
    }
}

/// A drafter that promises selections and returns none.
struct Forgetful(HashDrafter);

impl DraftModel for Forgetful {
    fn num_layers(&self) -> usize {
        self.0.num_layers()
    }

    fn can_share_selection(&self) -> bool {
        true
    }

    fn step(&self, input: DraftInput<'_>) -> Result<DraftOutput, DraftError> {
        Ok(self.0.step(input)?.hidden.into())
    }

    fn logits(&self, layer: usize, hidden: &Tensor) -> Result<Tensor, DraftError> {
        self.0.logits(layer, hidden)
    }
}

#[test]
fn a_missing_selection_is_an_error_and_not_a_dense_step() {
    let (text, model) = (Text::new(1), Forgetful(HashDrafter::new(1)));
    let seq = DraftSeq {
        first_position: 0,
        rows: 0..1,
        tokens: &text.tokens[..1],
        following: &text.tokens[1..2],
        blocks: &text.blocks,
        n_propose: 3,
        sampling: None,
    };
    let hidden = column(&[text.hidden(0)]);
    let error = sharing(3, 1).propose(&model, &[seq], &hidden).unwrap_err().to_string();
    assert!(error.contains("step 0 returned no selection"), "{error}");
}
