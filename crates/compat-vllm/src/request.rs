//! Requests of vLLM's API in the own one's words.

use grpc_api::inference::v1 as own;
use grpc_api::inference::v1::output_constraint::Kind;
use serving::{status, translate};
use tonic::{Code, Status};
use tonic_types::FieldViolation;
use vllm_proto::candidate_tokens::Select;
use vllm_proto::decoding_parameters::StructuredOutput;
use vllm_proto::generate_request::Prompt;
use vllm_proto::{
    CandidateTokens, DecodingParameters, GenerateRequest, KvCacheParameters, RandomSampling,
    ResponseOptions, StoppingCriteria,
};

use crate::answer::Wanted;

/// Fields of the own API and what they are called here.
const FIELDS: &[(&str, &str)] = &[
    ("sampling.n", "sampling.num_sequences"),
    ("sampling.temperature", "temperature"),
    ("sampling.presence_penalty", "decoding.presence_penalty"),
    ("sampling.frequency_penalty", "decoding.frequency_penalty"),
    ("sampling.repetition_penalty", "decoding.repetition_penalty"),
    ("sampling.logit_bias", "decoding.logit_bias"),
    ("sampling.allowed_token_ids", "decoding.allowed_token_ids"),
    ("sampling.bad_words", "decoding.bad_words_token_ids"),
    ("sampling.logprobs", "response.output_candidates.top_n"),
    ("sampling.prompt_logprobs", "response.prompt_candidates.top_n"),
    ("stopping.max_tokens", "stopping.max_new_tokens"),
    ("stopping.min_tokens", "stopping.min_new_tokens"),
    ("stopping.stop_texts", "stopping.stop_strings"),
    ("cache_salt", "kv.cache_salt"),
];

/// How the answer comes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// In one message.
    Whole,
    /// In one message a step.
    Stream,
}

/// The fields of a request that one field of the own API stands for.
#[derive(Clone, Copy)]
pub(crate) struct Sources {
    prompt: &'static str,
    constraint: &'static str,
}

impl Sources {
    pub(crate) fn of(request: &GenerateRequest) -> Self {
        let decoding = request.decoding.as_ref();
        Self {
            prompt: match request.prompt {
                Some(Prompt::Text(_)) => "text",
                _ => "token_ids",
            },
            constraint: match decoding.and_then(|decoding| decoding.structured_output.as_ref()) {
                Some(StructuredOutput::Regex(_)) => "decoding.regex",
                Some(StructuredOutput::Choice(_)) => "decoding.choice",
                Some(StructuredOutput::Grammar(_)) => "decoding.grammar",
                Some(StructuredOutput::JsonObject(_)) => "decoding.json_object",
                _ => "decoding.json",
            },
        }
    }

    /// A fault of the request with the fields that it blames by their names here.
    pub(crate) fn rename(self, status: Status) -> Status {
        let own = [
            ("token_ids", self.prompt),
            ("constraint.json_schema", self.constraint),
            ("constraint.regex", self.constraint),
            ("constraint.lark_grammar", self.constraint),
        ];
        translate::rename_fields(status, &[&own, FIELDS].concat())
    }
}

/// Refuses what has no counterpart in the own API.
pub(crate) fn check(
    request: &GenerateRequest,
    form: Form,
    has_tokenizer: bool,
) -> Result<(), Status> {
    let n_outputs = request.sampling.as_ref().map_or(0, |sampling| sampling.num_sequences);
    let mut faults = vec![
        (form == Form::Whole && n_outputs > 1).then_some((
            "sampling.num_sequences",
            "an answer of Generate has room for one output: use GenerateStream",
        )),
        (!request.media.is_empty()).then_some(("media", "the model reads text alone")),
        (!request.lora_name.is_empty()).then_some(("lora_name", "there are no LoRA adapters")),
        request.kv_hints.as_ref().map(|_| ("kv_hints", "are not supported: leave them out")),
    ];
    if let Some(kv) = &request.kv {
        const NO_TRANSFER: &str = "nothing is transferred between engines: leave it out";
        faults.extend([
            kv.kv_transfer_params.as_ref().map(|_| ("kv.kv_transfer_params", NO_TRANSFER)),
            kv.ec_transfer_params.as_ref().map(|_| ("kv.ec_transfer_params", NO_TRANSFER)),
        ]);
    }
    if let Some(decoding) = &request.decoding {
        faults.push(check_constraint(decoding));
    }
    if let Some(stopping) = &request.stopping {
        faults.extend(check_stopping(stopping, has_tokenizer));
    }
    if let Some(response) = &request.response {
        faults.extend(check_response(response, has_tokenizer));
    }
    let faults: Vec<_> = faults
        .into_iter()
        .flatten()
        .map(|(field, description)| FieldViolation::new(field, description))
        .collect();
    if faults.is_empty() { Ok(()) } else { Err(status::invalid_argument(faults)) }
}

/// A field and what is wrong with it.
type Fault = Option<(&'static str, &'static str)>;

fn check_constraint(decoding: &DecodingParameters) -> Fault {
    match &decoding.structured_output {
        Some(StructuredOutput::StructuralTag(_)) => {
            Some(("decoding.structural_tag", "is not supported: give json, regex or grammar"))
        }
        Some(StructuredOutput::Choice(choice)) if choice.choices.is_empty() => {
            Some(("decoding.choice", "is empty: name a choice"))
        }
        _ => None,
    }
}

fn check_stopping(stopping: &StoppingCriteria, has_tokenizer: bool) -> [Fault; 3] {
    let StoppingCriteria { max_new_tokens, min_new_tokens, .. } = *stopping;
    [
        (max_new_tokens > 0 && min_new_tokens > max_new_tokens)
            .then_some(("stopping.min_new_tokens", "is more than max_new_tokens")),
        (!stopping.stop_strings.is_empty() && !has_tokenizer).then_some((
            "stopping.stop_strings",
            "the model has no tokenizer: give stop_token_ids",
        )),
        (stopping.thinking_token_budget.unwrap_or(-1) != -1).then_some((
            "stopping.thinking_token_budget",
            "is not supported: leave it out, or give -1",
        )),
    ]
}

fn check_response(response: &ResponseOptions, has_tokenizer: bool) -> [Fault; 4] {
    let shows_special =
        response.skip_special_tokens == Some(false) && response.output_text != Some(false);
    [
        (response.output_text == Some(true) && !has_tokenizer)
            .then_some(("response.output_text", "the model has no tokenizer: give false")),
        shows_special.then_some((
            "response.skip_special_tokens",
            "special tokens have no text here: leave it out and ask for output_token_ids",
        )),
        check_candidates(response.prompt_logprobs, response.prompt_candidates.as_ref())
            .map(|description| ("response.prompt_candidates", description)),
        check_candidates(response.output_logprobs, response.output_candidates.as_ref())
            .map(|description| ("response.output_candidates", description)),
    ]
}

fn check_candidates(
    has_logprobs: bool,
    candidates: Option<&CandidateTokens>,
) -> Option<&'static str> {
    match &candidates?.select {
        Some(Select::TokenIds(_)) => Some("token_ids is not supported: give top_n"),
        Some(Select::All(true)) => Some("all is not supported: give top_n"),
        Some(Select::TopN(_)) if !has_logprobs => Some("come with log probabilities alone"),
        _ => None,
    }
}

/// The request in the own API's words, and what its answer is to say.
pub(crate) fn translate(
    request: GenerateRequest,
    prompt: Vec<u32>,
) -> Result<(own::GenerateStreamRequest, Wanted), Status> {
    let stopping = request.stopping.unwrap_or_default();
    let response = request.response.unwrap_or_default();
    let mut decoding = request.decoding.unwrap_or_default();
    let sampling = request.sampling.unwrap_or_default();
    let n_candidates = |asked: bool, candidates: Option<&CandidateTokens>| {
        asked.then(|| match candidates.and_then(|candidates| candidates.select.as_ref()) {
            Some(Select::TopN(n)) => *n,
            _ => 0,
        })
    };
    let wanted = Wanted {
        n_outputs: sampling.num_sequences.max(1),
        n_prompt: u32::try_from(prompt.len()).unwrap_or(u32::MAX),
        prompt_token_ids: if response.prompt_token_ids { prompt.clone() } else { vec![] },
        prompt_logprobs: n_candidates(
            response.prompt_logprobs,
            response.prompt_candidates.as_ref(),
        ),
        output_text: response.output_text.unwrap_or(true),
        output_token_ids: response.output_token_ids,
        output_logprobs: n_candidates(
            response.output_logprobs,
            response.output_candidates.as_ref(),
        ),
        stop_strings: stopping.stop_strings.clone(),
    };
    let constraint = decoding.structured_output.take().and_then(constraint);
    let own = own::GenerateStreamRequest {
        prompt: Some(own::generate_stream_request::Prompt::TokenIds(own::TokenIds { ids: prompt })),
        sampling: Some(own::SamplingParams {
            temperature: request.temperature.map(f64::from),
            // One at least, so that the likeliest token is known to be that.
            logprobs: wanted.output_logprobs.map(|n| n.max(1)),
            prompt_logprobs: wanted.prompt_logprobs.map(|n| n.max(1)),
            ..sampling_params(&sampling, decoding)
        }),
        stopping: Some(stopping_params(stopping)),
        cache_salt: cache_salt(request.kv.unwrap_or_default())?,
        priority: Some(request.priority),
        constraint,
        ..own::GenerateStreamRequest::default()
    };
    Ok((own, wanted))
}

fn sampling_params(sampling: &RandomSampling, decoding: DecodingParameters) -> own::SamplingParams {
    // Of a penalty, 0 is what is sent if nothing is set; none of them is then.
    let penalty = |value: f32| (value != 0.0).then_some(f64::from(value));
    let ids = |list: vllm_proto::TokenIds| own::TokenIds { ids: list.ids };
    let allowed = decoding.allowed_token_ids;
    own::SamplingParams {
        n: Some(sampling.num_sequences.max(1)),
        top_k: sampling.top_k,
        top_p: sampling.top_p.map(f64::from),
        min_p: sampling.min_p.map(f64::from),
        seed: sampling.seed.map(i64::cast_unsigned),
        presence_penalty: penalty(decoding.presence_penalty),
        frequency_penalty: penalty(decoding.frequency_penalty),
        repetition_penalty: penalty(decoding.repetition_penalty),
        logit_bias: decoding.logit_bias.into_iter().map(|(id, bias)| (id, bias.into())).collect(),
        allowed_token_ids: (!allowed.is_empty()).then_some(own::TokenIds { ids: allowed }),
        bad_words: decoding.bad_words_token_ids.into_iter().map(ids).collect(),
        ..own::SamplingParams::default()
    }
}

fn stopping_params(stopping: StoppingCriteria) -> own::StoppingParams {
    // 0 tokens at most stands for no limit but the model's length, as in vLLM's own front end.
    let max_tokens = Some(stopping.max_new_tokens).filter(|max| *max > 0);
    own::StoppingParams {
        max_tokens,
        min_tokens: Some(stopping.min_new_tokens),
        ignore_eos: Some(stopping.ignore_eos),
        stop_token_ids: stopping.stop_token_ids,
        stop_texts: stopping.stop_strings,
        include_stop_text: Some(stopping.include_stop_strings),
        ..own::StoppingParams::default()
    }
}

fn constraint(structured: StructuredOutput) -> Option<own::OutputConstraint> {
    let of = |kind| Some(own::OutputConstraint { kind: Some(kind) });
    match structured {
        StructuredOutput::Json(schema) => of(Kind::JsonSchema(schema)),
        StructuredOutput::Regex(regex) => of(Kind::Regex(regex)),
        StructuredOutput::Grammar(grammar) => of(Kind::LarkGrammar(grammar)),
        StructuredOutput::Choice(choice) => translate::choice_constraint(&choice.choices),
        StructuredOutput::JsonObject(is_asked) => is_asked.then(translate::json_object_constraint),
        // Refused before.
        StructuredOutput::StructuralTag(_) => None,
    }
}

/// Who shares cached prefixes. The prefix cache is bypassed by a salt that nobody else has: then
/// nothing that is cached fits.
fn cache_salt(kv: KvCacheParameters) -> Result<Option<String>, Status> {
    if !kv.bypass_prefix_cache {
        return Ok(Some(kv.cache_salt).filter(|salt| !salt.is_empty()));
    }
    let random = || {
        getrandom::u64().map_err(|error| {
            status::with_reason(Code::Internal, "INTERNAL", &format!("no random number: {error}"))
        })
    };
    Ok(Some(format!("{:016x}{:016x}", random()?, random()?)))
}
