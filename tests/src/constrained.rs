//! Requests whose outputs keep to a grammar, and what their texts must be.

use anyhow::{Context, Result, bail, ensure};
use engine::{EngineHandle, Events};
use engine_types::{FinishReason, Request, SamplingParams};
use grammar::{Constraint, Grammars};
use jsonschema::Validator;
use model_config::ModelConfig;
use regex::Regex;
use tokenization::Tokenizer;

use crate::harness::Generation;
use crate::oracle::Checkpoint;

/// Longest output; every constraint ends well before.
const MAX_TOKENS: u32 = 512;

const OBJECT: &str = r#"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["module", "class", "function"]}
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": false
}"#;
const LIST: &str =
    r#"{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 6}"#;
const FUNCTION: &str = r"def [a-z_]{1,12}\((self)?\):\n    return [0-9]{1,4}\n";
const EXPRESSION: &str = "start: term (op term){1,4}\nterm: /[a-z]{1,6}/\nop: \"+\" | \"-\"";

/// The constraints of a checkpoint, and who checks what comes of them.
pub struct Constrained {
    grammars: Grammars,
    tokenizer: Tokenizer,
    validators: [Validator; 2],
    expressions: [Regex; 2],
}

impl Constrained {
    /// How many constraints there are.
    pub const N: usize = 4;

    /// Prepares the constraints for a bundled checkpoint.
    ///
    /// # Errors
    ///
    /// If the checkpoint cannot be read.
    pub fn new(checkpoint: Checkpoint) -> Result<Self> {
        let tokenizer = Tokenizer::load(&checkpoint.dir()?)?;
        let eos_token_ids = ModelConfig::load(&checkpoint.dir()?)?.eos_token_ids;
        let validator = |schema: &str| -> Result<Validator> {
            Ok(jsonschema::validator_for(&serde_json::from_str(schema)?)?)
        };
        Ok(Self {
            grammars: Grammars::new(&tokenizer, &eos_token_ids)?,
            tokenizer,
            validators: [validator(OBJECT)?, validator(LIST)?],
            expressions: [
                Regex::new(&format!("^(?:{FUNCTION})$"))?,
                Regex::new("^[a-z]{1,6}([+-][a-z]{1,6}){1,4}$")?,
            ],
        })
    }

    /// Submits the `idx`-th request, whose constraint is the `idx % N`-th: greedy where `seed` is
    /// `None`, else at temperature 0.8.
    ///
    /// # Errors
    ///
    /// If the engine refuses it.
    pub fn submit(
        &self,
        engine: &EngineHandle,
        prompt: &[u32],
        idx: usize,
        seed: Option<u64>,
    ) -> Result<Events> {
        let constraint = match idx % Self::N {
            0 => Constraint::JsonSchema(OBJECT.to_owned()),
            1 => Constraint::JsonSchema(LIST.to_owned()),
            2 => Constraint::Regex(FUNCTION.to_owned()),
            _ => Constraint::Lark(EXPRESSION.to_owned()),
        };
        let temperature = if seed.is_some() { 0.8 } else { 0.0 };
        let params =
            SamplingParams { max_tokens: MAX_TOKENS, temperature, seed, ..Default::default() };
        let mut request = Request::new(engine.next_request_id(), prompt.to_vec(), params);
        request.guide = Some(self.grammars.compile(&constraint)?);
        let (sink, events) = engine::channel(MAX_TOKENS as usize);
        engine.submit(request, Box::new(sink))?;
        Ok(events)
    }

    /// Checks what became of the `idx`-th request, and returns its text.
    ///
    /// # Errors
    ///
    /// If it did not end where its grammar ends, or its text is not in the grammar.
    pub fn check(&self, idx: usize, done: &Generation) -> Result<String> {
        let mut ids = &done.token_ids[..];
        match done.finish_reason {
            FinishReason::GrammarComplete => {}
            FinishReason::Eos(_) => ids = &ids[..ids.len() - 1],
            ref other => bail!("request {idx} ended with {other:?}: {ids:?}"),
        }
        let text = self.tokenizer.decode(ids, true);
        let is_valid = match idx % Self::N {
            kind @ (0 | 1) => {
                let value = serde_json::from_str(&text).with_context(|| text.clone())?;
                self.validators[kind].is_valid(&value)
            }
            kind => self.expressions[kind - 2].is_match(&text),
        };
        ensure!(is_valid, "request {idx}: {text:?}");
        Ok(text)
    }
}
