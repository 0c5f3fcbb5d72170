//! The bundled trained checkpoint: logits, log probabilities, drafts and draft hidden states.

use spec_decode::{DraftInput, DraftModel};

use super::*;

struct Case {
    name: String,
    prompt: Vec<i64>,
    greedy: Vec<i64>,
    logprobs: Vec<f64>,
    drafts: Vec<i64>,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(data("oracle-tiny-dsv3/cases.json")).unwrap();
    let cases: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ints = |value: &serde_json::Value| -> Vec<i64> {
        value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
    };
    let case = |case: &serde_json::Value| Case {
        name: case["name"].as_str().unwrap().to_owned(),
        prompt: ints(&case["prompt_ids"]),
        greedy: ints(&case["greedy_ids"]),
        logprobs: case["prompt_logprobs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|value| value.as_f64().unwrap())
            .collect(),
        drafts: ints(&case["first_drafts"]),
    };
    cases.as_array().unwrap().iter().map(case).collect()
}

fn last_row(tensor: &Tensor) -> Tensor {
    tensor.narrow(0, tensor.size()[0] - 1, 1)
}

fn argmax(logits: &Tensor) -> i64 {
    logits.argmax(-1, false).int64_value(&[0])
}

/// Runs three draft steps behind a prompt; returns the drafts and the hidden state of each.
fn draft(rig: &Rig, prompt: &[i64], hidden: &Tensor, next: i64) -> (Vec<i64>, Tensor) {
    let mtp = rig.model.mtp.as_ref().unwrap().bind(&rig.caches, rig.backend);
    let n = prompt.len();
    let mut drafts = Vec::new();
    let mut states: Vec<Tensor> = Vec::new();
    for step in 0..3 {
        let state = if step == 0 {
            let shifted = [&prompt[1..], &[next]].concat();
            let input = DraftInput {
                layer: 0,
                token_ids: &ids(&shifted),
                hidden,
                layout: &rig.layout(&[(0, 0, n)]),
                output_rows: Some(&ids(&[n as i64 - 1])),
            };
            mtp.step(input).unwrap()
        } else {
            let input = DraftInput {
                layer: 0,
                token_ids: &ids(&drafts[step - 1..]),
                hidden: &states[step - 1],
                layout: &rig.layout(&[(0, n + step - 1, 1)]),
                output_rows: None,
            };
            mtp.step(input).unwrap()
        };
        drafts.push(argmax(&mtp.logits(0, &state).unwrap()));
        states.push(state);
    }
    (drafts, Tensor::cat(&states, 0))
}

fn check_case(rig: &mut Rig, case: &Case, expected: &HashMap<String, Tensor>) {
    rig.reset(16, 4096);
    let hidden = rig.forward(&[(0, 0, case.prompt.len())], &case.prompt);
    let logits = rig.logits(&hidden);
    let name = &case.name;
    let check = |what: &str, found: &Tensor| {
        let difference = relative_difference(found, &expected[&format!("{name}.{what}")]);
        assert!(difference < 1e-4, "{name}: {what} differs by {difference}");
    };
    check("hidden_last", &last_row(&hidden).squeeze());
    check("logits_last", &last_row(&logits).squeeze());
    assert_eq!(argmax(&last_row(&logits)), case.greedy[0], "{name}");

    let targets = ids(&case.prompt[1..]).unsqueeze(1);
    let logprobs = logits.narrow(0, 0, case.prompt.len() as i64 - 1).log_softmax(-1, Kind::Float);
    let found = Vec::<f64>::try_from(logprobs.gather(1, &targets, false).squeeze_dim(1)).unwrap();
    assert_eq!(found.len(), case.logprobs.len());
    for (position, (found, expected)) in found.iter().zip(&case.logprobs).enumerate() {
        assert!((found - expected).abs() < 1e-3, "{name} at {position}: {found} not {expected}");
    }

    let (drafts, states) = draft(rig, &case.prompt, &hidden, case.greedy[0]);
    assert_eq!(drafts, case.drafts, "{name}");
    check("mtp_hidden", &states);
}

fn check_all(ops: Ops) {
    let expected = read_tensors("oracle-tiny-dsv3/tensors.safetensors");
    let mut rig = Rig::tiny(ops, ComputeDtype::Float32);
    let cases = cases();
    assert_eq!(cases.len(), 14);
    cases.iter().for_each(|case| check_case(&mut rig, case, &expected));
}

#[test]
fn plain_layers_agree_with_the_oracle() {
    check_all(Ops::Torch);
}

#[test]
fn fused_layers_agree_with_the_oracle() {
    check_all(Ops::Fused);
}

/// Fraction of the oracle's greedy tokens that bfloat16 chooses behind the same prefix.
fn bfloat16_agreement(ops: Ops) -> f64 {
    let mut rig = Rig::tiny(ops, ComputeDtype::Bfloat16);
    let (mut n_equal, mut n_tokens) = (0, 0);
    for case in cases().iter().filter(|case| case.prompt.len() < 100) {
        rig.reset(16, 4096);
        let n_prompt = case.prompt.len();
        let tokens = [&case.prompt[..], &case.greedy].concat();
        let hidden = rig.forward(&[(0, 0, tokens.len())], &tokens);
        let rows = hidden.narrow(0, n_prompt as i64 - 1, case.greedy.len() as i64);
        let chosen = Vec::<i64>::try_from(rig.logits(&rows).argmax(-1, false)).unwrap();
        n_equal += chosen.iter().zip(&case.greedy).filter(|(a, b)| a == b).count();
        n_tokens += case.greedy.len();
    }
    n_equal as f64 / n_tokens as f64
}

#[test]
fn bfloat16_mostly_chooses_the_same_tokens() {
    for ops in [Ops::Torch, Ops::Fused] {
        let agreement = bfloat16_agreement(ops);
        assert!(agreement > 0.95, "{ops:?}: {agreement}");
    }
}
