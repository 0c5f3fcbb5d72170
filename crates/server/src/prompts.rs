//! The prompts of `generate` and `score`: text, ids, or a file with one JSON object a line.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use engine_types::TokenId;
use serde::Deserialize;
use tokenization::Tokenizer;

use crate::cli::{GenerateArgs, PromptArgs};

/// One prompt to continue, with what its line says beside it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PromptLine {
    prompt: Option<String>,
    prompt_ids: Option<Vec<i64>>,
    pub(crate) max_tokens: Option<u32>,
    pub(crate) num_speculative_tokens: Option<u32>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) stop_token_ids: Option<Vec<TokenId>>,
    pub(crate) cache_salt: Option<String>,
    /// Lower is served first, with `--scheduling-policy priority`.
    pub(crate) priority: Option<i32>,
}

impl PromptLine {
    /// The prompt's ids; text needs `tokenizer`.
    pub(crate) fn ids(
        &self,
        tokenizer: Option<&Tokenizer>,
        vocab_size: usize,
    ) -> Result<Vec<TokenId>> {
        match (&self.prompt, &self.prompt_ids) {
            (Some(text), None) => encode(text, tokenizer),
            (None, Some(ids)) => check_ids(ids, vocab_size),
            _ => bail!("give exactly one of `prompt` and `prompt_ids`"),
        }
    }
}

/// The prompts of `generate`, in order, each with the place that an error about it names.
pub(crate) fn of_generate(args: &GenerateArgs) -> Result<Vec<(String, PromptLine)>> {
    match &args.prompts {
        Some(file) => read_lines(file),
        None => Ok(vec![("the prompt".to_owned(), from_flags(&args.prompt)?)]),
    }
}

/// The prompt of `--prompt` or `--prompt-ids`.
pub(crate) fn from_flags(args: &PromptArgs) -> Result<PromptLine> {
    let prompt_ids = args.prompt_ids.as_deref().map(parse_ids).transpose()?;
    ensure!(
        args.prompt.is_some() || prompt_ids.is_some(),
        "there is no prompt: give --prompt TEXT or --prompt-ids 0,1,2"
    );
    Ok(PromptLine {
        prompt: args.prompt.clone(),
        prompt_ids,
        max_tokens: None,
        num_speculative_tokens: None,
        ignore_eos: None,
        stop_token_ids: None,
        cache_salt: None,
        priority: None,
    })
}

fn read_lines(file: &Path) -> Result<Vec<(String, PromptLine)>> {
    let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    // Some editors mark UTF-8 files.
    let text = text.trim_start_matches('\u{feff}');
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let prompts = lines.map(|(idx, line)| {
        let place = format!("{}, line {}", file.display(), idx + 1);
        let prompt = serde_json::from_str(line).with_context(|| place.clone())?;
        Ok((place, prompt))
    });
    let prompts = prompts.collect::<Result<Vec<_>>>()?;
    ensure!(!prompts.is_empty(), "{} holds no prompt", file.display());
    Ok(prompts)
}

fn parse_ids(text: &str) -> Result<Vec<i64>> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    text.split(',')
        .map(|id| {
            let id = id.trim();
            id.parse().map_err(|_| anyhow!("--prompt-ids: `{id}` is not a token id"))
        })
        .collect()
}

fn encode(text: &str, tokenizer: Option<&Tokenizer>) -> Result<Vec<TokenId>> {
    ensure!(!text.is_empty(), "`prompt` is empty: give at least one character");
    let tokenizer = tokenizer.ok_or_else(|| {
        anyhow!("the checkpoint has no tokenizer.json, so `prompt` cannot be text: give token ids")
    })?;
    Ok(tokenizer.encode(text)?)
}

fn check_ids(ids: &[i64], vocab_size: usize) -> Result<Vec<TokenId>> {
    ensure!(!ids.is_empty(), "`prompt_ids` is empty: give at least one token id");
    ids.iter()
        .map(|&id| {
            TokenId::try_from(id).ok().filter(|&id| (id as usize) < vocab_size).ok_or_else(|| {
                let last = vocab_size - 1;
                anyhow!("`prompt_ids`: {id} is not a token id of this model (0 to {last})")
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_checked_against_the_vocabulary() {
        let message = |ids: &[i64]| check_ids(ids, 10).unwrap_err().to_string();
        assert!(message(&[]).contains("`prompt_ids` is empty"));
        assert!(message(&[3, -1]).contains("-1 is not a token id of this model (0 to 9)"));
        assert!(message(&[10]).contains("10 is not a token id"));
        assert_eq!(check_ids(&[0, 9], 10).unwrap(), [0, 9]);
    }

    #[test]
    fn flags_accept_negative_and_spaced_ids_and_name_the_rest() {
        assert_eq!(parse_ids("0, 1,-2").unwrap(), [0, 1, -2]);
        assert_eq!(parse_ids(" ").unwrap(), [0; 0]);
        assert!(parse_ids("1,x").unwrap_err().to_string().contains("`x`"));
    }

    #[test]
    fn a_line_with_an_unknown_field_is_refused_by_name() {
        let error = serde_json::from_str::<PromptLine>(r#"{"prompt":"a","max_token":3}"#);
        assert!(error.unwrap_err().to_string().contains("max_token"));
    }
}
