//! Proto requests to engine requests, with every fault by field.

use engine::EngineHandle;
use engine_types::{ExecutorLimits, MAX_CACHE_SALT_BYTES, MAX_LOGPROBS, SamplingParams, TokenId};
use grpc_api::inference::v1 as pb;
use tokenization::StopRules;
use tonic::Status;
use tonic_types::FieldViolation;

use crate::status::invalid_argument;

/// Most outputs of one request.
const MAX_OUTPUTS: u32 = 128;
/// Most stop texts of a request, and most bytes of one.
const MAX_STOP_TEXTS: usize = 64;
const MAX_STOP_TEXT_BYTES: usize = 1024;

/// What a valid request asks for, beside its prompt.
#[derive(Debug)]
pub(crate) struct Valid {
    pub(crate) params: SamplingParams,
    pub(crate) n_outputs: u32,
    pub(crate) stops: StopRules,
}

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

    fn check_sequences(&mut self, field: &str, sequences: &[pb::TokenIds], vocab_size: u32) {
        for sequence in sequences {
            if sequence.ids.is_empty() {
                self.add(field, "a sequence is empty");
            }
            self.check_ids(field, &sequence.ids, vocab_size);
        }
    }

    /// A number in single precision, which must be in `range`; `default` where it is absent.
    fn number(&mut self, field: &str, value: Option<f64>, default: f32, range: &Range) -> f32 {
        let Some(value) = value else { return default };
        // Looked at as it is used: what is finite in double precision need not be in single.
        let single = value as f32;
        if !(range.contains)(single) {
            self.add(field, format!("must be {}, is {value:?}", range.name));
        }
        single
    }
}

/// What a number may be.
struct Range {
    name: &'static str,
    contains: fn(f32) -> bool,
}

const TEMPERATURE: Range = Range {
    name: "a finite number of at least 0",
    contains: |value| (0.0..f32::INFINITY).contains(&value),
};
const TOP_P: Range =
    Range { name: "above 0 and at most 1", contains: |value| value > 0.0 && value <= 1.0 };
const MIN_P: Range = Range { name: "from 0 to 1", contains: |value| (0.0..=1.0).contains(&value) };
const PENALTY: Range =
    Range { name: "from -2 to 2", contains: |value| (-2.0..=2.0).contains(&value) };
const REPETITION: Range =
    Range { name: "a finite number above 0", contains: |value| value > 0.0 && value.is_finite() };

/// Checks prompt ids, of which the request's field is named as well, and parameters.
pub(crate) fn validate(
    (prompt, prompt_field): (&[TokenId], &str),
    request: &pb::GenerateStreamRequest,
    engine: &EngineHandle,
    has_tokenizer: bool,
) -> Result<Valid, Status> {
    let mut faults = Faults::default();
    let rules = engine.request_rules();
    let executor = rules.limits;
    check_prompt(prompt, prompt_field, executor, &mut faults);
    let sampling = request.sampling.clone().unwrap_or_default();
    let n_outputs = check_outputs(&sampling, &mut faults);
    let stopping = request.stopping.clone().unwrap_or_default();
    check_stopping(&stopping, executor, &mut faults);
    check_stop_texts(&stopping.stop_texts, has_tokenizer, &mut faults);
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
    let params = SamplingParams {
        max_tokens: max_tokens(&stopping, executor),
        min_tokens: stopping.min_tokens.unwrap_or(0),
        ignore_eos: stopping.ignore_eos.unwrap_or(false),
        stop_token_ids: stopping.stop_token_ids,
        stop_sequences: ids(stopping.stop_sequences),
        num_speculative_tokens,
        ..sampling_params(sampling, executor.vocab_size, &mut faults)
    };
    if !faults.0.is_empty() {
        return Err(invalid_argument(faults.0));
    }
    let stops = StopRules {
        texts: stopping.stop_texts,
        include_stop_text: stopping.include_stop_text.unwrap_or(false),
        min_tokens: params.min_tokens,
    };
    Ok(Valid { params, n_outputs, stops })
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

fn check_outputs(sampling: &pb::SamplingParams, faults: &mut Faults) -> u32 {
    let n_outputs = sampling.n.unwrap_or(1);
    if !(1..=MAX_OUTPUTS).contains(&n_outputs) {
        faults.add("sampling.n", format!("must be 1 to {MAX_OUTPUTS}, is {n_outputs}"));
    }
    n_outputs
}

/// Checks how tokens are chosen.
fn sampling_params(
    sampling: pb::SamplingParams,
    vocab_size: u32,
    faults: &mut Faults,
) -> SamplingParams {
    for (field, n) in [
        ("sampling.logprobs", sampling.logprobs),
        ("sampling.prompt_logprobs", sampling.prompt_logprobs),
    ] {
        if let Some(n) = n.filter(|n| *n > MAX_LOGPROBS) {
            faults.add(field, format!("must be at most {MAX_LOGPROBS}, is {n}"));
        }
    }
    faults.check_sequences("sampling.bad_words", &sampling.bad_words, vocab_size);
    let allowed_token_ids = sampling.allowed_token_ids.map(|allowed| allowed.ids);
    if let Some(allowed) = &allowed_token_ids {
        if allowed.is_empty() {
            faults.add("sampling.allowed_token_ids", "is empty: leave it out, or name an id");
        }
        faults.check_ids("sampling.allowed_token_ids", allowed, vocab_size);
    }
    let mut number = |name, value, default, range| {
        faults.number(&format!("sampling.{name}"), value, default, range)
    };
    SamplingParams {
        temperature: number("temperature", sampling.temperature, 0.0, &TEMPERATURE),
        top_p: number("top_p", sampling.top_p, 1.0, &TOP_P),
        min_p: number("min_p", sampling.min_p, 0.0, &MIN_P),
        presence_penalty: number("presence_penalty", sampling.presence_penalty, 0.0, &PENALTY),
        frequency_penalty: number("frequency_penalty", sampling.frequency_penalty, 0.0, &PENALTY),
        repetition_penalty: number(
            "repetition_penalty",
            sampling.repetition_penalty,
            1.0,
            &REPETITION,
        ),
        top_k: sampling.top_k.unwrap_or(0),
        seed: sampling.seed,
        logit_bias: logit_bias(sampling.logit_bias.into_iter().collect(), vocab_size, faults),
        bad_words: ids(sampling.bad_words),
        allowed_token_ids,
        logprobs: sampling.logprobs,
        prompt_logprobs: sampling.prompt_logprobs,
        ..SamplingParams::default()
    }
}

/// Checks the biases, and orders them by id.
fn logit_bias(
    mut biases: Vec<(TokenId, f64)>,
    vocab_size: u32,
    faults: &mut Faults,
) -> Vec<(TokenId, f32)> {
    const FIELD: &str = "sampling.logit_bias";
    biases.sort_unstable_by_key(|(id, _)| *id);
    let singles: Vec<(TokenId, f32)> =
        biases.iter().map(|(id, value)| (*id, *value as f32)).collect();
    if let Some((id, _)) = singles.last().filter(|(id, _)| *id >= vocab_size) {
        faults.check_ids(FIELD, &[*id], vocab_size);
    }
    if let Some((id, value)) = biases.iter().find(|(_, value)| !(*value as f32).is_finite()) {
        faults.add(FIELD, format!("the value of id {id} must be finite, is {value:?}"));
    }
    singles
}

fn max_tokens(stopping: &pb::StoppingParams, limits: ExecutorLimits) -> u32 {
    // The prompt takes part of the model's length, so that the length is what ends the output.
    stopping.max_tokens.unwrap_or(limits.max_model_len)
}

fn check_stopping(stopping: &pb::StoppingParams, limits: ExecutorLimits, faults: &mut Faults) {
    let max_tokens = max_tokens(stopping, limits);
    if max_tokens == 0 {
        faults.add("stopping.max_tokens", "must be at least 1, is 0");
    }
    if let Some(min_tokens) = stopping.min_tokens.filter(|min| *min > max_tokens) {
        let message = format!("{min_tokens} is more than max_tokens, {max_tokens}");
        faults.add("stopping.min_tokens", message);
    }
    let vocab_size = limits.vocab_size;
    faults.check_ids("stopping.stop_token_ids", &stopping.stop_token_ids, vocab_size);
    faults.check_sequences("stopping.stop_sequences", &stopping.stop_sequences, vocab_size);
}

fn check_stop_texts(texts: &[String], has_tokenizer: bool, faults: &mut Faults) {
    const FIELD: &str = "stopping.stop_texts";
    if !texts.is_empty() && !has_tokenizer {
        faults.add(FIELD, "the model has no tokenizer: give stop_sequences");
    }
    if texts.len() > MAX_STOP_TEXTS {
        let message = format!("{} are more than the {MAX_STOP_TEXTS} possible", texts.len());
        faults.add(FIELD, message);
    }
    if let Some(index) = texts.iter().position(String::is_empty) {
        faults.add(FIELD, format!("number {index} is empty"));
    }
    if let Some(index) = texts.iter().position(|text| text.len() > MAX_STOP_TEXT_BYTES) {
        let n_bytes = texts[index].len();
        let message =
            format!("number {index} has {n_bytes} bytes: use at most {MAX_STOP_TEXT_BYTES}");
        faults.add(FIELD, message);
    }
}

fn ids(sequences: Vec<pb::TokenIds>) -> Vec<Vec<TokenId>> {
    sequences.into_iter().map(|sequence| sequence.ids).collect()
}
