//! Proto requests to engine requests, with every fault by field.

use engine::EngineHandle;
use engine_types::{ExecutorLimits, MAX_CACHE_SALT_BYTES, SamplingParams, TokenId};
use grpc_api::inference::v1 as pb;
use tonic::Status;
use tonic_types::FieldViolation;

use crate::status::invalid_argument;

const ONLY_GREEDY: &str =
    "only greedy decoding is available so far; leave temperature, n and logit_bias unset";

/// Faults found so far.
#[derive(Default)]
struct Faults(Vec<FieldViolation>);

impl Faults {
    fn add(&mut self, field: &str, description: impl Into<String>) {
        self.0.push(FieldViolation::new(field, description));
    }

    fn check_ids(&mut self, field: &str, ids: &[TokenId], vocab_size: u32) {
        if let Some(id) = ids.iter().find(|id| **id >= vocab_size) {
            self.add(field, format!("id {id} is not below the vocabulary's size {vocab_size}"));
        }
    }
}

/// Checks prompt ids and parameters and joins them.
pub(crate) fn validate(
    prompt: &[TokenId],
    prompt_field: &str,
    request: &pb::GenerateStreamRequest,
    engine: &EngineHandle,
) -> Result<SamplingParams, Status> {
    let mut faults = Faults::default();
    let rules = engine.request_rules();
    let executor = rules.limits;
    check_prompt(prompt, prompt_field, executor, &mut faults);
    if let Some(sampling) = &request.sampling {
        check_sampling(sampling, executor.vocab_size, &mut faults);
    }
    let stopping = request.stopping.clone().unwrap_or_default();
    check_stopping(&stopping, executor.vocab_size, &mut faults);
    let num_speculative_tokens =
        request.speculation.as_ref().and_then(|speculation| speculation.num_speculative_tokens);
    if let Some(k) = num_speculative_tokens.filter(|k| *k > rules.num_speculative_tokens) {
        let most = rules.num_speculative_tokens;
        faults.add(
            "speculation.num_speculative_tokens",
            format!("{k} is more than the server's {most}"),
        );
    }
    check_cache_salt(request.cache_salt.as_deref(), &mut faults);
    if !faults.0.is_empty() {
        return Err(invalid_argument(faults.0));
    }
    Ok(SamplingParams {
        // The prompt takes part of the model's length, so that the length is what ends the output.
        max_tokens: stopping.max_tokens.unwrap_or(executor.max_model_len),
        ignore_eos: stopping.ignore_eos.unwrap_or(false),
        stop_token_ids: stopping.stop_token_ids,
        stop_sequences: stopping.stop_sequences.into_iter().map(|ids| ids.ids).collect(),
        num_speculative_tokens,
        ..SamplingParams::default()
    })
}

fn check_prompt(prompt: &[TokenId], field: &str, limits: ExecutorLimits, faults: &mut Faults) {
    if prompt.is_empty() {
        faults.add(field, "is empty");
    }
    faults.check_ids(field, prompt, limits.vocab_size);
    let n_pool = u64::from(limits.num_blocks) * u64::from(limits.block_size);
    let n_prompt = prompt.len() as u64;
    if n_prompt >= u64::from(limits.max_model_len) {
        let most = limits.max_model_len - 1;
        faults.add(field, format!("{n_prompt} tokens are more than the {most} that fit"));
    } else if n_prompt + 1 > n_pool {
        let message = format!("{n_prompt} tokens and an output never fit the KV pool's {n_pool}");
        faults.add(field, message);
    }
}

/// Salts are not repeated in messages: they may be secret.
fn check_cache_salt(salt: Option<&str>, faults: &mut Faults) {
    match salt.map(str::len) {
        Some(0) => faults.add("cache_salt", "is empty: leave it out"),
        Some(n_bytes) if n_bytes > MAX_CACHE_SALT_BYTES => {
            let message = format!("has {n_bytes} bytes: use at most {MAX_CACHE_SALT_BYTES}");
            faults.add("cache_salt", message);
        }
        _ => {}
    }
}

fn check_sampling(sampling: &pb::SamplingParams, vocab_size: u32, faults: &mut Faults) {
    if let Some(temperature) = sampling.temperature {
        if !temperature.is_finite() || temperature < 0.0 {
            let message = format!("must be a finite number of at least 0, is {temperature:?}");
            faults.add("sampling.temperature", message);
        } else if temperature > 0.0 {
            faults.add("sampling.temperature", format!("{temperature:?}: {ONLY_GREEDY}"));
        }
    }
    if let Some(top_p) = sampling.top_p
        && !(top_p > 0.0 && top_p <= 1.0)
    {
        faults.add("sampling.top_p", format!("must be above 0 and at most 1, is {top_p:?}"));
    }
    match sampling.n {
        Some(0) => faults.add("sampling.n", "must be at least 1, is 0"),
        Some(n) if n > 1 => faults.add("sampling.n", format!("{n}: {ONLY_GREEDY}")),
        _ => {}
    }
    if sampling.logit_bias.is_empty() {
        return;
    }
    if let Some(id) = sampling.logit_bias.keys().filter(|id| **id >= vocab_size).min() {
        let message = format!("id {id} is not below the vocabulary's size {vocab_size}");
        faults.add("sampling.logit_bias", message);
    } else if sampling.logit_bias.values().any(|bias| bias.is_nan()) {
        faults.add("sampling.logit_bias", "a value is NaN");
    } else {
        faults.add("sampling.logit_bias", ONLY_GREEDY);
    }
}

fn check_stopping(stopping: &pb::StoppingParams, vocab_size: u32, faults: &mut Faults) {
    if stopping.max_tokens == Some(0) {
        faults.add("stopping.max_tokens", "must be at least 1, is 0");
    }
    faults.check_ids("stopping.stop_token_ids", &stopping.stop_token_ids, vocab_size);
    for sequence in &stopping.stop_sequences {
        if sequence.ids.is_empty() {
            faults.add("stopping.stop_sequences", "a sequence is empty");
        }
        faults.check_ids("stopping.stop_sequences", &sequence.ids, vocab_size);
    }
}
