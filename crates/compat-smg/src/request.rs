//! Requests of the contract as requests of the own API.

use grpc_api::inference::v1 as own;
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::output_constraint::Kind;
use serving::status::invalid_argument;
use serving::translate::{choice_constraint, json_object_constraint, rename_fields};
use tonic::Status;
use tonic_types::FieldViolation;

use crate::engine::generate_request::Input;
use crate::engine::sampling_params::Constraint;
use crate::engine::{GenerateRequest, SamplingParams};

/// A request as the own API takes it, and what its answer has to know.
#[derive(Debug)]
pub(crate) struct Translated {
    pub(crate) request: own::GenerateStreamRequest,
    pub(crate) asked: Asked,
    /// The contract's name for the constraint.
    constraint: &'static str,
}

/// What a request asks of the shape of its answer.
#[derive(Debug)]
pub(crate) struct Asked {
    /// Whether tokens come step by step.
    pub(crate) stream: bool,
    /// Number of outputs; not checked here.
    pub(crate) n_outputs: u32,
    /// Tokens of the prompt; 0 if it is text.
    pub(crate) n_prompt: u32,
    /// The prompt's first token, if its log probabilities are asked for.
    pub(crate) first_token: Option<u32>,
    /// Texts that end an output.
    pub(crate) stop: Vec<String>,
}

/// Faults found so far.
#[derive(Default)]
struct Faults(Vec<FieldViolation>);

impl Faults {
    fn add(&mut self, field: &str, description: impl Into<String>) {
        self.0.push(FieldViolation::new(field, description));
    }

    /// Refuses a field that is set.
    fn refuse(&mut self, field: &str, is_set: bool) {
        if is_set {
            self.add(field, "is not supported: leave it out");
        }
    }

    /// A number of log probabilities, which the contract lets be negative.
    fn n_logprobs(&mut self, field: &str, n: Option<i32>) -> Option<u32> {
        let n = n?;
        let converted = u32::try_from(n).ok();
        if converted.is_none() {
            self.add(field, format!("must be at least 0, is {n}"));
        }
        converted
    }
}

/// Translates a request; what the own API checks of it is left to it.
///
/// # Errors
///
/// INVALID_ARGUMENT with every field that cannot be translated.
pub(crate) fn translate(request: GenerateRequest) -> Result<Translated, Status> {
    let mut faults = Faults::default();
    check_absent(&request, &mut faults);
    let mut params = request.sampling_params.unwrap_or_default();
    let (prompt, first_token) = match request.input {
        None => {
            faults.add("input", "is missing: give tokenized or text");
            (None, None)
        }
        Some(Input::Text(text)) => {
            if params.prompt_logprobs.is_some() {
                faults.add("sampling_params.prompt_logprobs", "needs tokenized, not text");
            }
            (Some(Prompt::Text(text)), None)
        }
        Some(Input::Tokenized(tokenized)) => {
            let first_token = tokenized.input_ids.first().copied();
            (Some(Prompt::TokenIds(own::TokenIds { ids: tokenized.input_ids })), first_token)
        }
    };
    let n_prompt = match &prompt {
        Some(Prompt::TokenIds(ids)) => u32::try_from(ids.ids.len()).unwrap_or(u32::MAX),
        _ => 0,
    };
    let (constraint, own_constraint) = constraint(params.constraint.take(), &mut faults);
    let sampling = sampling(&params, &mut faults);
    if !faults.0.is_empty() {
        return Err(invalid_argument(faults.0));
    }
    let asked = Asked {
        stream: request.stream,
        n_outputs: params.n.max(1),
        n_prompt,
        first_token: first_token.filter(|_| params.prompt_logprobs.is_some()),
        stop: params.stop.clone(),
    };
    let request = own::GenerateStreamRequest {
        prompt,
        sampling: Some(sampling),
        stopping: Some(stopping(params)),
        constraint: own_constraint,
        ..own::GenerateStreamRequest::default()
    };
    Ok(Translated { request, asked, constraint })
}

/// Refuses what would change the answer and is not served.
fn check_absent(request: &GenerateRequest, faults: &mut Faults) {
    faults.refuse("kv_transfer_params", request.kv_transfer_params.is_some());
    faults.refuse("kv_transfer_params_json", request.kv_transfer_params_json.is_some());
    faults.refuse("mm_inputs", request.mm_inputs.is_some());
    faults.refuse("extra_mm_inputs", !request.extra_mm_inputs.is_empty());
    faults.refuse("media_refs", request.media_refs.is_some());
    if let Some(rank) = request.data_parallel_rank.filter(|rank| *rank != 0) {
        faults.add("data_parallel_rank", format!("{rank} does not exist: there is rank 0 only"));
    }
    if request.request_id.is_empty() {
        faults.add("request_id", "is empty");
    }
    let params = request.sampling_params.as_ref();
    let truncates = params.is_some_and(|params| params.truncate_prompt_tokens.is_some());
    faults.refuse("sampling_params.truncate_prompt_tokens", truncates);
}

fn sampling(params: &SamplingParams, faults: &mut Faults) -> own::SamplingParams {
    let mut logit_bias = std::collections::HashMap::new();
    for (id, value) in &params.logit_bias {
        match u32::try_from(*id) {
            Ok(id) => {
                logit_bias.insert(id, f64::from(*value));
            }
            Err(_) => faults.add("sampling_params.logit_bias", format!("{id} is no token id")),
        }
    }
    // In these two a 0 says nothing; anywhere else it is the number that changes nothing.
    let unless_0 = |value: f32| (value != 0.0).then_some(f64::from(value));
    own::SamplingParams {
        temperature: Some(params.temperature.map_or(1.0, f64::from)),
        top_p: unless_0(params.top_p),
        top_k: Some(params.top_k),
        min_p: Some(f64::from(params.min_p)),
        presence_penalty: Some(f64::from(params.presence_penalty)),
        frequency_penalty: Some(f64::from(params.frequency_penalty)),
        repetition_penalty: unless_0(params.repetition_penalty),
        seed: params.seed.map(|seed| u64::from(seed.cast_unsigned())),
        n: Some(params.n.max(1)),
        logit_bias,
        logprobs: faults.n_logprobs("sampling_params.logprobs", params.logprobs),
        prompt_logprobs: faults
            .n_logprobs("sampling_params.prompt_logprobs", params.prompt_logprobs),
        ..own::SamplingParams::default()
    }
}

fn stopping(params: SamplingParams) -> own::StoppingParams {
    own::StoppingParams {
        max_tokens: params.max_tokens,
        min_tokens: Some(params.min_tokens),
        ignore_eos: Some(params.ignore_eos),
        stop_token_ids: params.stop_token_ids,
        stop_texts: params.stop,
        include_stop_text: Some(params.include_stop_str_in_output),
        ..own::StoppingParams::default()
    }
}

/// The constraint, after the name of its field.
fn constraint(
    constraint: Option<Constraint>,
    faults: &mut Faults,
) -> (&'static str, Option<own::OutputConstraint>) {
    let plain = |kind| Some(own::OutputConstraint { kind: Some(kind) });
    match constraint {
        None => ("", None),
        Some(Constraint::JsonSchema(schema)) => {
            ("sampling_params.json_schema", plain(Kind::JsonSchema(schema)))
        }
        Some(Constraint::Regex(regex)) => ("sampling_params.regex", plain(Kind::Regex(regex))),
        Some(Constraint::Grammar(grammar)) => {
            ("sampling_params.grammar", plain(Kind::LarkGrammar(grammar)))
        }
        Some(Constraint::JsonObject(is_object)) => {
            ("sampling_params.json_object", is_object.then(json_object_constraint))
        }
        Some(Constraint::Choice(choice)) => {
            const FIELD: &str = "sampling_params.choice";
            let constraint = choice_constraint(&choice.choices);
            if constraint.is_none() {
                faults.add(FIELD, "has no choices");
            }
            (FIELD, constraint)
        }
        Some(Constraint::StructuralTag(_)) => {
            const FIELD: &str = "sampling_params.structural_tag";
            faults.refuse(FIELD, true);
            (FIELD, None)
        }
    }
}

impl Translated {
    /// A function from the own API's refusal of the request to the contract's.
    pub(crate) fn refusal(&self) -> impl Fn(Status) -> Status + use<> {
        let constraint = self.constraint;
        move |status| {
            let pairs = [
                ("token_ids", "tokenized.input_ids"),
                ("prompt", "input"),
                ("stopping.stop_texts", "sampling_params.stop"),
                ("stopping", "sampling_params"),
                ("sampling", "sampling_params"),
                ("constraint.json_schema", constraint),
                ("constraint.regex", constraint),
                ("constraint.lark_grammar", constraint),
            ];
            rename_fields(status, &pairs)
        }
    }
}
