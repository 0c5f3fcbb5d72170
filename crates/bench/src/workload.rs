//! What is asked: prompts and lengths, the same ones for the same seed.

use std::fmt;

use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// One request of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Planned {
    /// What is continued.
    pub prompt: Prompt,
    /// Largest number of generated tokens.
    pub max_tokens: u32,
    /// Whether the model's end-of-sequence ids end nothing, so that lengths are as planned.
    pub ignore_eos: bool,
    /// 0 is greedy.
    pub temperature: f64,
    /// Makes choices reproducible at a temperature.
    pub seed: Option<u64>,
    /// Drafts a step, where the server lets a request say so; its own number where this does not.
    pub num_speculative_tokens: Option<u32>,
}

/// What is continued.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prompt {
    /// Text, which the server tokenizes.
    Text(String),
    /// Token ids.
    TokenIds(Vec<u32>),
}

/// Random prompts of given lengths.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RandomPrompts {
    /// Largest number of prompt tokens, the shared prefix not counted.
    pub input_len: u32,
    /// Largest number of generated tokens.
    pub output_len: u32,
    /// Least share of the two lengths, in (0, 1]: each length is drawn evenly from
    /// `[len · ratio, len]`. 1 makes them fixed.
    pub range_ratio: f64,
    /// Tokens that all prompts begin with.
    pub prefix_len: u32,
}

/// The ids that random prompts are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// Number of ids.
    pub size: u32,
    /// Ids that end outputs, which no prompt has.
    pub eos_token_ids: Vec<u32>,
}

/// A file of prompts has a fault.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PromptFileError {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub reason: String,
}

impl fmt::Display for PromptFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for PromptFileError {}

impl RandomPrompts {
    /// `n` requests.
    ///
    /// # Panics
    ///
    /// If the vocabulary has no id but those that end outputs.
    #[must_use]
    pub fn plan(&self, n: usize, vocabulary: &Vocabulary, rng: &mut ChaCha8Rng) -> Vec<Planned> {
        let ends = &vocabulary.eos_token_ids;
        let ids: Vec<u32> = (0..vocabulary.size).filter(|id| !ends.contains(id)).collect();
        assert!(!ids.is_empty(), "a vocabulary has ids that end nothing");
        let draw = |n: u32, rng: &mut ChaCha8Rng| -> Vec<u32> {
            (0..n).map(|_| ids[rng.random_range(0..ids.len())]).collect()
        };
        let prefix = draw(self.prefix_len, rng);
        (0..n)
            .map(|_| {
                let n_input = self.length(self.input_len, rng);
                let max_tokens = self.length(self.output_len, rng);
                let prompt = [prefix.clone(), draw(n_input, rng)].concat();
                Planned {
                    ignore_eos: true,
                    ..Planned::greedy(Prompt::TokenIds(prompt), max_tokens)
                }
            })
            .collect()
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a u32")]
    fn length(&self, len: u32, rng: &mut ChaCha8Rng) -> u32 {
        let least = (f64::from(len) * self.range_ratio).round() as u32;
        rng.random_range(least.clamp(1, len.max(1))..=len.max(1))
    }
}

impl Planned {
    /// A greedy request that the model may end.
    #[must_use]
    pub fn greedy(prompt: Prompt, max_tokens: u32) -> Self {
        Self {
            prompt,
            max_tokens,
            ignore_eos: false,
            temperature: 0.0,
            seed: None,
            num_speculative_tokens: None,
        }
    }
}

/// A line of a file of prompts.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    prompt: Option<String>,
    prompt_ids: Option<Vec<u32>>,
    max_tokens: Option<u32>,
    ignore_eos: Option<bool>,
}

/// Requests of a text with one JSON object a line: `prompt` or `prompt_ids` and, where they differ
/// from `max_tokens` and false, `max_tokens` and `ignore_eos`. Empty lines are skipped.
///
/// # Errors
///
/// If a line is no such object, or there is none.
pub fn from_jsonl(text: &str, max_tokens: u32) -> Result<Vec<Planned>, PromptFileError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let planned = lines.map(|(index, line)| {
        let fault = |reason: String| PromptFileError { line: index + 1, reason };
        let line: Line = serde_json::from_str(line).map_err(|error| fault(error.to_string()))?;
        let prompt = match (line.prompt, line.prompt_ids) {
            (Some(text), None) => Prompt::Text(text),
            (None, Some(ids)) => Prompt::TokenIds(ids),
            _ => return Err(fault("give prompt or prompt_ids, and not both".to_owned())),
        };
        let of_line = Planned::greedy(prompt, line.max_tokens.unwrap_or(max_tokens));
        Ok(Planned { ignore_eos: line.ignore_eos.unwrap_or(false), ..of_line })
    });
    let planned = planned.collect::<Result<Vec<_>, _>>()?;
    if planned.is_empty() {
        return Err(PromptFileError { line: 1, reason: "the file has no prompt".to_owned() });
    }
    Ok(planned)
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    const RANDOM: RandomPrompts =
        RandomPrompts { input_len: 40, output_len: 9, range_ratio: 0.5, prefix_len: 5 };

    fn plan(random: RandomPrompts, n: usize, seed: u64) -> Vec<Planned> {
        let vocabulary = Vocabulary { size: 50, eos_token_ids: vec![0, 7] };
        random.plan(n, &vocabulary, &mut ChaCha8Rng::seed_from_u64(seed))
    }

    fn ids(planned: &Planned) -> &[u32] {
        let Prompt::TokenIds(ids) = &planned.prompt else { panic!("{planned:?}") };
        ids
    }

    #[test]
    fn lengths_fill_their_range_and_prompts_share_their_prefix_only() {
        let planned = plan(RANDOM, 400, 1);
        let n_inputs: Vec<usize> = planned.iter().map(|planned| ids(planned).len() - 5).collect();
        assert_eq!((n_inputs.iter().min(), n_inputs.iter().max()), (Some(&20), Some(&40)));
        let n_outputs = || planned.iter().map(|planned| planned.max_tokens);
        assert_eq!((n_outputs().min(), n_outputs().max()), (Some(5), Some(9)));
        assert!(planned.iter().all(|other| ids(other)[..5] == ids(&planned[0])[..5]));
        assert!(planned.iter().flat_map(ids).all(|id| *id < 50 && ![0, 7].contains(id)));
        assert_eq!(planned, plan(RANDOM, 400, 1));
        assert_ne!(planned, plan(RANDOM, 400, 2));
    }

    #[test]
    fn a_ratio_of_1_fixes_the_lengths() {
        let planned = plan(RandomPrompts { range_ratio: 1.0, ..RANDOM }, 50, 3);
        assert!(planned.iter().all(|planned| ids(planned).len() == 45 && planned.max_tokens == 9));
    }

    #[test]
    fn files_of_prompts_are_read_and_their_faults_named() {
        let text = "{\"prompt\": \"a\"}\n\n{\"prompt_ids\": [1, 2], \"max_tokens\": 3}\n";
        let planned = from_jsonl(text, 8).unwrap();
        assert_eq!(planned[0], Planned::greedy(Prompt::Text("a".into()), 8));
        assert_eq!(planned[1], Planned::greedy(Prompt::TokenIds(vec![1, 2]), 3));
        for (text, line, part) in [
            ("{\"prompt\": \"a\"}\n{}", 2, "prompt or prompt_ids"),
            ("{\"promt\": \"a\"}", 1, "promt"),
            ("nonsense", 1, "expected"),
            ("\n", 1, "no prompt"),
        ] {
            let error = from_jsonl(text, 8).unwrap_err();
            assert!(error.line == line && error.reason.contains(part), "{error}");
        }
    }
}
