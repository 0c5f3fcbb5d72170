//! The processed distribution of 240 random combinations of parameters against that of
//! transformers' own chain of processors, see `data/transformers_chain.py`.
#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

use sampler::{Distribution, SamplingParams, SamplingRow, TokenHistory, oracle};
use serde_json::Value;
use tch::{Kind, Tensor};

struct Case {
    logits: Vec<f32>,
    params: SamplingParams,
    history: TokenHistory,
    grammar: Option<Vec<u32>>,
    expected: Vec<f64>,
}

impl Case {
    fn read(case: &Value) -> Self {
        let number = |name: &str, default: f64| case[name].as_f64().unwrap_or(default) as f32;
        let logits: Vec<f32> = numbers(&case["logits"]).iter().map(|&x| x as f32).collect();
        let mut expected = vec![0.0; logits.len()];
        for pair in case["probs"].as_array().unwrap() {
            expected[pair[0].as_u64().unwrap() as usize] = pair[1].as_f64().unwrap();
        }
        let bias = case["logit_bias"].as_array().into_iter().flatten();
        let params = SamplingParams {
            temperature: number("temperature", 1.0),
            top_k: number("top_k", 0.0) as u32,
            top_p: number("top_p", 1.0),
            min_p: number("min_p", 0.0),
            presence_penalty: number("presence_penalty", 0.0),
            frequency_penalty: number("frequency_penalty", 0.0),
            repetition_penalty: number("repetition_penalty", 1.0),
            logit_bias: bias
                .map(|pair| (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap() as f32))
                .collect(),
            bad_words: case["bad_words"].as_array().into_iter().flatten().map(ids).collect(),
            allowed_token_ids: case.get("allowed_token_ids").map(ids),
            min_tokens: number("min_tokens", 0.0) as u32,
            end_ids: ids(&case["end_ids"]),
            seed: 0,
        };
        params.check(logits.len() as u32).unwrap();
        let mut history = TokenHistory::new(&ids(&case["prompt"]));
        history.extend(&ids(&case["generated"]));
        let grammar = case.get("grammar").map(|list| {
            let mut mask = vec![0; logits.len().div_ceil(32)];
            ids(list).iter().for_each(|id| mask[*id as usize / 32] |= 1 << (id % 32));
            mask
        });
        Self { logits, params, history, grammar, expected }
    }

    /// The last `n_drafts` generated tokens as drafts of a window.
    fn check(&self, n_drafts: usize) {
        let tokens = self.history.tokens();
        let n_generated = self.history.n_generated();
        let (before, drafts) = tokens.split_at(tokens.len() - n_drafts.min(n_generated));
        let (prompt, generated) = before.split_at(tokens.len() - n_generated);
        let mut history = TokenHistory::new(prompt);
        history.extend(generated);
        let row = SamplingRow {
            params: &self.params,
            history: &history,
            drafts,
            position: tokens.len() as u64,
            grammar_mask: self.grammar.as_deref(),
        };
        let logits = Tensor::from_slice(&self.logits).unsqueeze(0);
        let probs = Distribution::new(&logits, &[row]).unwrap().probs().squeeze_dim(0);
        assert_eq!(probs.kind(), Kind::Double);
        self.compare(&Vec::<f64>::try_from(probs).unwrap());
        self.compare(&oracle::distribution(&self.logits, &row));
    }

    fn compare(&self, probs: &[f64]) {
        assert_eq!(probs.len(), self.expected.len());
        for (id, (got, expected)) in probs.iter().zip(&self.expected).enumerate() {
            let is_equal = (got - expected).abs() < 1e-5 && (*got > 0.0) == (*expected > 0.0);
            assert!(is_equal, "token {id}: {got}, not {expected}, of {:?}", self.params);
        }
    }
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

fn ids(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|value| value.as_u64().unwrap() as u32).collect()
}

#[test]
fn distributions_equal_those_of_transformers() {
    let cases: Value = serde_json::from_str(include_str!("data/transformers_chain.json")).unwrap();
    let cases = cases.as_array().unwrap();
    assert_eq!(cases.len(), 240);
    for case in cases {
        let case = Case::read(case);
        for n_drafts in [0, 1, 3] {
            case.check(n_drafts);
        }
    }
}
