//! The proposer with a drafter whose output is a hash of everything it reads through the layout.

mod draws;
mod sharing;

use std::cell::RefCell;

use tch::Kind;

use super::*;
use crate::draft_model::{DraftError, DraftOutput};

const VOCAB: u32 = 97;
const BLOCK_SIZE: u32 = 4;
const N_SLOTS: usize = 256;

fn mix(a: u32, b: u32) -> u32 {
    let x = (a ^ b.rotate_left(13)).wrapping_mul(0x9E37_79B1);
    (x ^ (x >> 15)) & 0x000F_FFFF
}

/// KV entry of a row: what the row embeds and continues.
fn entry_of(layer: usize, token: u32, hidden: u32) -> u32 {
    mix(mix(token + 1, hidden), u32::try_from(layer).unwrap() + 7)
}

/// One call of [`DraftModel::step`].
#[derive(Debug, PartialEq)]
struct Call {
    layer: usize,
    slots: Vec<i32>,
    positions: Vec<i32>,
    token_to_seq: Vec<i32>,
    tokens: Vec<i64>,
    output_rows: Option<Vec<i64>>,
    selection: Option<Vec<Vec<i32>>>,
}

/// A drafter with paged entries. A row's hidden state is the hash of the entries of its positions
/// `0 ..= position`; its draft is that hash modulo the vocabulary. It selects for a row, in place
/// of keys, three numbers that tell the row: its layer, its position and the token that it embeds.
struct HashDrafter {
    caches: RefCell<Vec<Vec<Option<u32>>>>,
    calls: RefCell<Vec<Call>>,
}

impl HashDrafter {
    fn new(num_layers: usize) -> Self {
        Self {
            caches: RefCell::new(vec![vec![None; N_SLOTS]; num_layers]),
            calls: RefCell::new(Vec::new()),
        }
    }
}

fn ints(tensor: &Tensor) -> Vec<i32> {
    Vec::<i32>::try_from(tensor.flatten(0, -1)).unwrap()
}

fn hashes(tensor: &Tensor) -> Vec<u32> {
    let values = Vec::<i64>::try_from(tensor.flatten(0, -1).to_kind(Kind::Int64)).unwrap();
    values.into_iter().map(|value| u32::try_from(value).unwrap()).collect()
}

fn column(values: &[u32]) -> Tensor {
    let values: Vec<i64> = values.iter().map(|&value| i64::from(value)).collect();
    Tensor::from_slice(&values).to_kind(Kind::Float).unsqueeze(1)
}

impl DraftModel for HashDrafter {
    fn num_layers(&self) -> usize {
        self.caches.borrow().len()
    }

    fn can_share_selection(&self) -> bool {
        true
    }

    fn step(&self, input: DraftInput<'_>) -> Result<DraftOutput, DraftError> {
        let layout = input.layout;
        let (slots, positions) = (ints(&layout.slot_mapping), ints(&layout.positions));
        let (seqs, tables) = (ints(&layout.token_to_seq), ints(&layout.block_tables));
        let (kv_lens, width) = (ints(&layout.kv_lens), layout.block_tables.size()[1]);
        let tokens = Vec::<i64>::try_from(input.token_ids).unwrap();
        let hidden = hashes(input.hidden);
        assert!(hidden.len() == tokens.len() && tokens.len() == slots.len());

        let cache = &mut self.caches.borrow_mut()[input.layer];
        for ((&slot, &token), &hidden) in slots.iter().zip(&tokens).zip(&hidden) {
            let entry = entry_of(input.layer, u32::try_from(token).unwrap(), hidden);
            cache[usize::try_from(slot).unwrap()] = Some(entry);
        }
        let output: Vec<u32> = std::iter::zip(&positions, &seqs)
            .map(|(&position, &seq)| {
                assert!(position < kv_lens[usize::try_from(seq).unwrap()]);
                (0..u32::try_from(position).unwrap() + 1).fold(0, |hash, p| {
                    let at = i64::from(seq) * width + i64::from(p / BLOCK_SIZE);
                    let block = u32::try_from(tables[usize::try_from(at).unwrap()]).unwrap();
                    let slot = (block * BLOCK_SIZE + p % BLOCK_SIZE) as usize;
                    mix(hash, cache[slot].expect("only written slots are read"))
                })
            })
            .collect();
        let output = column(&output);
        let output_rows = input.output_rows.map(|rows| Vec::<i64>::try_from(rows).unwrap());
        let of_row = |(&position, &token): (&i32, &i64)| {
            [i32::try_from(input.layer).unwrap(), position, i32::try_from(token).unwrap()]
        };
        let indices: Vec<i32> = positions.iter().zip(&tokens).flat_map(of_row).collect();
        let indices = Tensor::from_slice(&indices).view([-1, 3]);
        let counts = Tensor::full([indices.size()[0]], 3, (Kind::Int, Device::Cpu));
        let chosen = Selection::new(indices, counts).unwrap();
        self.calls.borrow_mut().push(Call {
            layer: input.layer,
            slots,
            positions,
            token_to_seq: seqs,
            tokens,
            output_rows,
            selection: input.selection.map(|selection| selection.to_rows().unwrap()),
        });
        let (hidden, chosen) = match input.output_rows {
            Some(rows) => (output.index_select(0, rows), chosen.select_rows(rows).unwrap()),
            None => (output, chosen),
        };
        let n_launches = u64::from(input.selection.is_none());
        let indexer = IndexerCounts { n_launches, ..IndexerCounts::default() };
        let selection = input.selection.is_none().then_some(chosen);
        Ok(DraftOutput { hidden, selection, indexer })
    }

    fn logits(&self, _layer: usize, hidden: &Tensor) -> Result<Tensor, DraftError> {
        let ids: Vec<i64> = hashes(hidden).iter().map(|&h| i64::from(h % VOCAB)).collect();
        Ok(Tensor::from_slice(&ids).one_hot(i64::from(VOCAB)).to_kind(Kind::Float))
    }
}

/// The definition for one sequence: lists in place of pages, no batch.
struct Serial {
    entries: Vec<Vec<u32>>,
}

impl Serial {
    fn new(num_layers: usize) -> Self {
        Self { entries: vec![Vec::new(); num_layers] }
    }

    fn propose(&mut self, k: usize, text: &Text, step: &Step) -> Vec<TokenId> {
        let num_layers = self.entries.len();
        let end = step.start + step.n_rows;
        let mut known = text.tokens[step.start..end + step.n_following].to_vec();
        let n_known = known.len();
        let mut hidden: Vec<u32> = (step.start..end).map(|p| text.hidden(p)).collect();
        for j in 0..k {
            let layer = j % num_layers;
            let entries = &mut self.entries[layer];
            if j < num_layers {
                entries.truncate(step.start);
                for (row, hidden) in hidden.iter_mut().enumerate() {
                    let token = known[(row + 1 + j).min(known.len() - 1)];
                    entries.push(entry_of(layer, token, *hidden));
                    *hidden = entries.iter().fold(0, |hash, &entry| mix(hash, entry));
                }
            } else if step.n_propose > j {
                entries.truncate(end + j / num_layers - 1);
                entries.push(entry_of(layer, *known.last().unwrap(), *hidden.last().unwrap()));
                hidden = vec![entries.iter().fold(0, |hash, &entry| mix(hash, entry))];
            }
            if step.n_propose > j {
                known.push(hidden.last().unwrap() % VOCAB);
            }
        }
        known[n_known..].to_vec()
    }
}

/// A sequence's tokens; the target's hidden state at a position is a hash of its prefix.
struct Text {
    tokens: Vec<TokenId>,
    blocks: Vec<u32>,
}

impl Text {
    fn new(seed: u32) -> Self {
        let tokens = (0..80).map(|i| mix(seed + 1, i) % VOCAB).collect();
        Self { tokens, blocks: (0..20).map(|i| i * 3 + seed % 3).collect() }
    }

    fn hidden(&self, position: usize) -> u32 {
        self.tokens[..=position].iter().fold(5, |hash, &token| mix(hash, token))
    }
}

/// One sequence's part of a step.
#[derive(Clone, Copy, Debug)]
struct Step {
    start: usize,
    n_rows: usize,
    n_rejected: usize,
    n_following: usize,
    n_propose: usize,
}

/// Drafts for `steps[i]` of `texts[i]` in one batch, as the runner would ask for them.
fn propose(
    proposer: &mut EagleProposer,
    model: &HashDrafter,
    batch: &[(&Text, Step)],
) -> Vec<Vec<TokenId>> {
    let mut hidden = vec![999];
    let mut seqs = Vec::new();
    for (text, step) in batch {
        let end = step.start + step.n_rows;
        let first_row = hidden.len();
        hidden.extend((step.start..end).map(|p| text.hidden(p)));
        seqs.push(DraftSeq {
            first_position: as_u32(step.start),
            rows: first_row..hidden.len(),
            tokens: &text.tokens[step.start..end],
            following: &text.tokens[end..end + step.n_following],
            blocks: &text.blocks,
            n_propose: step.n_propose,
            sampling: None,
        });
        hidden.extend(std::iter::repeat_n(1000, step.n_rejected));
    }
    proposer.propose(model, &seqs, &column(&hidden)).unwrap().drafts.to_vec()
}

/// Runs `rounds` of a batch together, each sequence alone and each by definition: all agree.
fn check(num_layers: usize, k: usize, texts: &[Text], rounds: &[Vec<Step>]) {
    let new = || EagleProposer::new(k, num_layers, BLOCK_SIZE).unwrap();
    let together = (&mut new(), HashDrafter::new(num_layers));
    let mut alone: Vec<_> = texts
        .iter()
        .map(|_| (new(), HashDrafter::new(num_layers), Serial::new(num_layers)))
        .collect();
    for (round, steps) in rounds.iter().enumerate() {
        let batch: Vec<_> = texts.iter().zip(steps.iter().copied()).collect();
        let drafts = propose(together.0, &together.1, &batch);
        for (seq, (proposer, model, serial)) in alone.iter_mut().enumerate() {
            let expected = serial.propose(k, batch[seq].0, &steps[seq]);
            let place = format!("{num_layers} layers, k {k}, round {round}, sequence {seq}");
            assert_eq!(drafts[seq], expected, "in the batch: {place}");
            assert_eq!(propose(proposer, model, &batch[seq..=seq])[0], expected, "alone: {place}");
            assert_eq!(expected.len(), steps[seq].n_propose);
        }
    }
}

/// Verify windows behind the prefills `prompts`, of which `valid[round][seq]` rows are valid.
fn rounds(k: usize, prompts: &[usize], valid: &[&[usize]]) -> Vec<Vec<Step>> {
    let mut starts = vec![0; prompts.len()];
    let step = |(start, n_rows): (&mut usize, &usize)| {
        let step = Step {
            start: *start,
            n_rows: *n_rows,
            n_rejected: (k + 1).saturating_sub(*n_rows),
            n_following: 1,
            n_propose: k,
        };
        *start += n_rows;
        step
    };
    let mut all = vec![starts.iter_mut().zip(prompts).map(step).collect::<Vec<_>>()];
    for n_rows in valid {
        all.push(starts.iter_mut().zip(*n_rows).map(step).collect());
    }
    all
}

fn texts(n: u32) -> Vec<Text> {
    (0..n).map(Text::new).collect()
}

/// Fault case L07: equal and ragged verify windows; in later draft steps each has one row.
#[test]
fn drafts_in_a_batch_equal_those_alone() {
    for (num_layers, k) in [(1, 3), (2, 3), (2, 5), (3, 8), (3, 2)] {
        let rounds = rounds(k, &[5, 9, 6], &[&[4, 4, 4], &[3, 1, 4], &[1, 2, 1]]);
        check(num_layers, k, &texts(3), &rounds);
    }
}

#[test]
fn maps_are_rebuilt_for_every_draft_step() {
    let texts = texts(3);
    let model = HashDrafter::new(1);
    let mut proposer = EagleProposer::new(3, 1, BLOCK_SIZE).unwrap();
    for steps in rounds(3, &[5, 9, 6], &[&[3, 1, 4]]) {
        let batch: Vec<_> = texts.iter().zip(steps).collect();
        model.calls.borrow_mut().clear();
        propose(&mut proposer, &model, &batch);
    }
    let calls = model.calls.borrow();
    assert_eq!(calls[0].token_to_seq, [0, 0, 0, 1, 2, 2, 2, 2]);
    assert_eq!(calls[0].output_rows.as_deref(), Some(&[2, 3, 7][..]));
    let slot = |seq: i32, p: i32| (p / 4 * 3 + seq) * 4 + p % 4;
    for (behind, call) in (0..).zip(&calls[1..]) {
        assert_eq!(call.token_to_seq, [0, 1, 2]);
        let positions = [8 + behind, 10 + behind, 10 + behind];
        assert_eq!(call.positions, positions);
        let slots: Vec<i32> = (0..).zip(positions).map(|(seq, p)| slot(seq, p)).collect();
        assert_eq!(call.slots, slots);
    }
    assert_eq!(calls.len(), 3);
}

/// Random rounds: chunks, windows, drafts wanted and not, for all depths and layer counts.
#[test]
fn random_rounds_follow_the_definition() {
    let mut state = 3;
    let mut below = move |n: usize| {
        state = mix(state, 77);
        state as usize % n
    };
    for trial in 0..120 {
        let (num_layers, k) = (1 + below(3), 1 + below(8));
        let texts: Vec<Text> = (0..3).map(|seq| Text::new(trial * 3 + seq)).collect();
        let mut starts = [0; 3];
        let rounds: Vec<Vec<Step>> = (0..5)
            .map(|_| {
                let step = |start: &mut usize| {
                    let is_middle_chunk = below(4) == 0;
                    let step = Step {
                        start: *start,
                        n_rows: 1 + below(9),
                        n_rejected: below(4),
                        n_following: if is_middle_chunk { 1 + below(num_layers) } else { 1 },
                        n_propose: if is_middle_chunk { 0 } else { below(k + 1) },
                    };
                    *start += step.n_rows;
                    step
                };
                starts.iter_mut().map(step).collect()
            })
            .collect();
        check(num_layers, k, &texts, &rounds);
    }
}

/// A prompt in chunks, each with the tokens that follow it, drafts like the whole prompt.
#[test]
fn chunks_with_lookahead_draft_like_the_whole_prompt() {
    let text = Text::new(4);
    for num_layers in [1, 2, 3] {
        let drafts = |bounds: &[usize]| {
            let model = HashDrafter::new(num_layers);
            let mut proposer = EagleProposer::new(5, num_layers, BLOCK_SIZE).unwrap();
            let mut last = Vec::new();
            for window in bounds.windows(2) {
                let is_final = window[1] == 20;
                let step = Step {
                    start: window[0],
                    n_rows: window[1] - window[0],
                    n_rejected: 0,
                    n_following: if is_final { 1 } else { num_layers },
                    n_propose: if is_final { 5 } else { 0 },
                };
                last = propose(&mut proposer, &model, &[(&text, step)]).remove(0);
            }
            last
        };
        assert_eq!(drafts(&[0, 20]), drafts(&[0, 7, 8, 16, 20]));
    }
}

/// Fault case L10: which layer runs at each step.
#[test]
fn layers_take_turns() {
    let table: [(usize, usize, &[usize]); 5] =
        [(2, 3, &[0, 1, 0]), (1, 3, &[0, 0, 0]), (1, 1, &[0]), (1, 0, &[]), (0, 0, &[])];
    for (num_layers, k, expected) in table {
        let model = HashDrafter::new(num_layers);
        let mut proposer = EagleProposer::new(k, num_layers, BLOCK_SIZE).unwrap();
        let steps = rounds(k, &[6], &[]).remove(0);
        let drafts = propose(&mut proposer, &model, &[(&Text::new(0), steps[0])]);
        let layers: Vec<usize> = model.calls.borrow().iter().map(|call| call.layer).collect();
        assert_eq!(layers, expected, "{num_layers} layers, k {k}");
        assert_eq!(drafts[0].len(), k);
        assert_eq!(proposer.num_speculative_tokens(), k);
    }
}

#[test]
fn impossible_depths_are_refused() {
    let refusal = |k, layers| EagleProposer::new(k, layers, 4).unwrap_err().to_string();
    assert_eq!(
        refusal(2, 0),
        "num_speculative_tokens is 2, but the checkpoint has no MTP layer to draft with; use 0"
    );
    assert_eq!(refusal(9, 1), "num_speculative_tokens is 9, the largest value is 8");
}

/// A middle chunk fills the draft layer's KV, and nothing is chosen for it.
#[test]
fn a_middle_chunk_only_writes() {
    let text = Text::new(0);
    let model = HashDrafter::new(1);
    let mut proposer = EagleProposer::new(3, 1, BLOCK_SIZE).unwrap();
    let step = Step { start: 0, n_rows: 4, n_rejected: 0, n_following: 1, n_propose: 0 };
    assert!(propose(&mut proposer, &model, &[(&text, step)])[0].is_empty());
    let calls = model.calls.borrow();
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0].output_rows.as_deref(), Some(&[][..]));
    let shifted: Vec<i64> = text.tokens[1..5].iter().map(|&token| i64::from(token)).collect();
    assert_eq!(calls[0].tokens, shifted);
}
