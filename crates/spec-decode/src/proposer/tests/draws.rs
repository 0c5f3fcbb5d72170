//! Drafts that are drawn instead of chosen.

use sampler::noise::uniform;
use sampler::{Purpose, SamplingParams, choose};

use super::*;

/// Two sequences of four tokens each.
fn seqs<'a>(texts: &'a [Text; 2], sampling: [Option<&'a SamplingParams>; 2]) -> Vec<DraftSeq<'a>> {
    let seq = |(idx, text): (usize, &'a Text)| DraftSeq {
        first_position: 0,
        rows: 4 * idx..4 * idx + 4,
        tokens: &text.tokens[..4],
        following: &text.tokens[4..5],
        blocks: &text.blocks,
        n_propose: 4 - idx,
        sampling: sampling[idx],
    };
    texts.iter().enumerate().map(seq).collect()
}

/// Drafts and distributions, by sequence and step, of all sequences together.
fn propose(
    seqs: &[DraftSeq<'_>],
    texts: &[Text; 2],
    num_layers: usize,
) -> Vec<Vec<(u32, Vec<f64>)>> {
    let mut proposer = EagleProposer::new(4, num_layers, BLOCK_SIZE).unwrap();
    let model = HashDrafter::new(num_layers);
    let hidden: Vec<u32> = texts.iter().flat_map(|t| (0..4).map(|p| t.hidden(p))).collect();
    let Proposal { drafts, draws, .. } = proposer.propose(&model, seqs, &column(&hidden)).unwrap();
    let of_seq = |(seq, drafts): (usize, &Vec<u32>)| {
        let with_probs = |(step, &draft): (usize, &u32)| {
            let of_step = draws.iter().find(|draws| draws.step == step);
            let row = of_step.and_then(|d| d.seqs.iter().position(|&s| s == seq).map(|r| (d, r)));
            let probs = row.map(|(d, row)| Vec::try_from(d.probs.get(row as i64)).unwrap());
            (draft, probs.unwrap_or_default())
        };
        drafts.iter().enumerate().map(with_probs).collect()
    };
    drafts.iter().enumerate().map(of_seq).collect()
}

/// The drafter's logits are 1 for one token and 0 for the others, so that at temperature 0.5 it has
/// `e^2` times the others' probability; each draft is the draw with the noise of its position.
#[test]
fn drafts_are_drawn_at_their_positions() {
    let (texts, seed) = ([Text::new(1), Text::new(2)], 77);
    let params = SamplingParams { temperature: 0.5, seed, ..SamplingParams::default() };
    for num_layers in [1, 2] {
        let chosen = propose(&seqs(&texts, [None; 2]), &texts, num_layers);
        assert!(chosen.iter().flatten().all(|(_, probs)| probs.is_empty()));
        for both in [false, true] {
            let sampling = [Some(&params), Some(&params).filter(|_| both)];
            let drawn = propose(&seqs(&texts, sampling), &texts, num_layers);
            assert_eq!((drawn[0].len(), drawn[1].len()), (4, 3));
            let n_drawn = if both { 2 } else { 1 };
            for (step, (draft, probs)) in
                drawn[..n_drawn].iter().flat_map(|seq| seq.iter().enumerate())
            {
                let unlikely = 1.0 / (96.0 + 2f64.exp());
                let is_likely = |p: f64| (p - unlikely * 2f64.exp()).abs() < 1e-12;
                assert_eq!(probs.iter().filter(|&&p| is_likely(p)).count(), 1);
                assert_eq!(probs.iter().filter(|&&p| (p - unlikely).abs() < 1e-12).count(), 96);
                // Four tokens, the one behind them, and the drafts before.
                let noise = uniform(seed, 5 + step as u64, Purpose::Draft);
                let probs = Tensor::from_slice(probs).unsqueeze(0);
                let expected = choose(&probs, &Tensor::from_slice(&[noise])).unwrap();
                assert_eq!(i64::from(*draft), expected.int64_value(&[0]));
            }
            if !both {
                assert_eq!(drawn[1], chosen[1], "the other one is not concerned");
            }
            assert_ne!(drawn[0], chosen[0]);
        }
        let together = propose(&seqs(&texts, [Some(&params); 2]), &texts, num_layers);
        for (idx, expected) in together.iter().enumerate() {
            let alone = vec![seqs(&texts, [Some(&params); 2]).remove(idx)];
            let alone = propose(&alone, &texts, num_layers);
            assert_eq!(&alone[0], expected, "as in a batch [INV-11]");
        }
    }
}

/// Greedy parameters are no draw.
#[test]
fn greedy_parameters_draw_nothing() {
    let (texts, greedy) = ([Text::new(1), Text::new(2)], SamplingParams::default());
    let found = propose(&seqs(&texts, [Some(&greedy), None]), &texts, 1);
    assert_eq!(found, propose(&seqs(&texts, [None; 2]), &texts, 1));
}
