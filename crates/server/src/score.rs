//! `tandem score`: log probabilities of a prompt.

use std::fmt::Write as _;

use anyhow::{Result, bail, ensure};
use model_runner::RunnerOptions;
use serde_json::json;

use crate::cli::ScoreArgs;
use crate::{loading, output, prompts};

pub(crate) fn run(args: &ScoreArgs) -> Result<()> {
    ensure!(args.max_num_batched_tokens > 0, "--max-num-batched-tokens is at least 1");
    loading::limit_threads(args.threads)?;
    let model = loading::open_model(&args.model, args.dtype)?;
    let prompt = prompts::from_flags(&args.prompt)?;
    let ids = prompt.ids(model.tokenizer.as_deref(), model.config.vocab_size)?;
    ensure!(args.block_size > 0, "--block-size is at least 1");
    // No longer than the prompt, unless the model is too short for it and says so.
    let fits = |n_tokens: &u32| *n_tokens as usize <= model.config.max_position_embeddings;
    let n_blocks = ids.len().div_ceil(args.block_size as usize);
    let options = RunnerOptions {
        block_size: args.block_size,
        num_blocks: Some(u32::try_from(n_blocks)?),
        max_num_seqs: 1,
        max_model_len: Some(u32::try_from(ids.len())?).filter(fits),
        max_num_batched_tokens: args.max_num_batched_tokens,
        ..RunnerOptions::default()
    };
    let mut runner = loading::load_runner(&model.dir, model.dtype, args.load_format, &options)?;
    let logprobs = runner.prompt_logprobs(&ids, args.max_num_batched_tokens as usize)?;
    // A NaN among the logits is one in every probability that is made of them.
    if let Some(position) = logprobs.iter().position(|logprob| !logprob.is_finite()) {
        bail!(
            "the logits at position {position} (token {}) are NaN or infinite; the weights may be \
             damaged: get the checkpoint again, or try --dtype float32",
            ids[position]
        );
    }
    if args.json {
        return output::json_line(&json!({ "prompt_logprobs": logprobs }));
    }
    let mut text = String::new();
    for (id, logprob) in ids[1..].iter().zip(&logprobs) {
        writeln!(text, "{id}\t{logprob}")?;
    }
    output::text(&text)
}
