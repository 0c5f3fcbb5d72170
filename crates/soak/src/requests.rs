//! Requests of all kinds, valid and not.

use grpc_api::inference::v1::generate_request::Prompt as UnaryPrompt;
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::output_constraint::Kind as Constraint;
use grpc_api::inference::v1::{
    GenerateRequest, GenerateStreamRequest, OutputConstraint, SamplingParams, SpeculationParams,
    StoppingParams, TokenIds,
};

use crate::rng::Rng;

/// Texts that repeated requests continue.
const TEXTS: [&str; 6] = [
    "def read_lines(path):\n",
    "import os\n",
    "class Stack:\n    \"\"\"A stack.\"\"\"\n",
    "for line in open(path):\n",
    "# Copyright\n",
    "def test_parse():\n    assert ",
];

/// A schema that many texts keep to.
const SCHEMA: &str = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":12},
"n":{"type":"integer","minimum":0,"maximum":999}},"required":["name","n"],
"additionalProperties":false}"#;

/// Repeated requests: a seed or none, for each of the texts and lengths.
const N_REPEATED: u32 = 24;

/// What requests may ask of this server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) vocab_size: u32,
    pub(crate) max_model_len: u32,
    pub(crate) max_drafts: u32,
    pub(crate) max_request_bytes: u64,
}

/// A request, and which of the repeated ones it is, whose outputs are always the same.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) request: GenerateStreamRequest,
    pub(crate) repeated: Option<u32>,
}

impl Limits {
    /// Any valid request.
    pub(crate) fn valid(self, rng: &mut Rng) -> Wish {
        let mut wish = if rng.chance(30) { repeated(rng) } else { self.mixed(rng) };
        // None of these changes a text.
        if rng.chance(20) {
            let num_speculative_tokens = Some(rng.between(0, self.max_drafts));
            wish.request.speculation = Some(SpeculationParams { num_speculative_tokens });
        }
        if rng.chance(20) {
            wish.request.cache_salt = Some(format!("salt {}", rng.between(0, 7)));
        }
        if rng.chance(20) {
            wish.request.priority = Some(rng.between(0, 6) as i32 - 3);
        }
        wish
    }

    fn mixed(self, rng: &mut Rng) -> Wish {
        let prompt = if rng.chance(30) {
            Prompt::Text((*rng.pick(&TEXTS)).repeat(rng.between(1, 12) as usize))
        } else {
            Prompt::TokenIds(self.ids(rng))
        };
        let max_tokens = match rng.between(0, 9) {
            0..5 => rng.between(1, 24),
            5..9 => rng.between(24, 128),
            _ => rng.between(128, 400),
        };
        let mut stopping =
            StoppingParams { max_tokens: Some(max_tokens), ..StoppingParams::default() };
        stopping.ignore_eos = rng.chance(50).then_some(true);
        stopping.min_tokens = rng.chance(10).then(|| rng.between(0, max_tokens));
        if rng.chance(20) {
            let texts = ["\n\n", "return", " = ", "é"];
            stopping.stop_texts = vec![(*rng.pick(&texts)).to_owned(), "self".to_owned()];
        }
        let constraint = rng.chance(8).then(|| {
            let kinds = [
                Constraint::JsonSchema(SCHEMA.to_owned()),
                Constraint::Regex("[a-z]{3,9} [0-9]{1,4}".to_owned()),
            ];
            OutputConstraint { kind: Some(rng.pick(&kinds).clone()) }
        });
        let request = GenerateStreamRequest {
            prompt: Some(prompt),
            sampling: rng.chance(60).then(|| self.sampling(rng)),
            stopping: Some(stopping),
            constraint,
            ..GenerateStreamRequest::default()
        };
        Wish { request, repeated: None }
    }

    /// Mostly short prompts, some longer, few long.
    fn ids(self, rng: &mut Rng) -> TokenIds {
        let n = match rng.between(0, 19) {
            0..12 => rng.between(1, 32),
            12..19 => rng.between(32, 300),
            _ => rng.between(300, self.max_model_len * 3 / 4),
        };
        TokenIds { ids: (0..n).map(|_| rng.between(0, self.vocab_size - 1)).collect() }
    }

    fn sampling(self, rng: &mut Rng) -> SamplingParams {
        SamplingParams {
            temperature: Some(f64::from(rng.between(0, 12)) / 10.0),
            top_p: rng.chance(40).then_some(0.9),
            top_k: rng.chance(30).then_some(40),
            min_p: rng.chance(20).then_some(0.05),
            seed: rng.chance(50).then(|| rng.next()),
            n: rng.chance(15).then(|| rng.between(2, 6)),
            repetition_penalty: rng.chance(20).then_some(1.1),
            frequency_penalty: rng.chance(10).then_some(0.2),
            logit_bias: [(rng.between(0, self.vocab_size - 1), -2.5)].into(),
            logprobs: rng.chance(20).then(|| rng.between(0, 20)),
            prompt_logprobs: rng.chance(8).then(|| rng.between(0, 5)),
            ..SamplingParams::default()
        }
    }

    /// A request that runs as long as the model allows, with `n` outputs.
    pub(crate) fn endless(self, n: u32) -> GenerateStreamRequest {
        GenerateStreamRequest {
            prompt: Some(Prompt::Text(TEXTS[0].to_owned())),
            sampling: Some(SamplingParams { n: Some(n), ..SamplingParams::default() }),
            stopping: Some(StoppingParams { ignore_eos: Some(true), ..StoppingParams::default() }),
            ..GenerateStreamRequest::default()
        }
    }

    /// A request with one fault, and the field that its refusal must name; `None` where the message
    /// as a whole is too large.
    pub(crate) fn invalid(self, rng: &mut Rng) -> (GenerateStreamRequest, Option<&'static str>) {
        let mut request = repeated(rng).request;
        if rng.chance(2) {
            request.prompt = Some(Prompt::Text("x".repeat(self.max_request_bytes as usize)));
            return (request, None);
        }
        let (field, spoil) = rng.pick(FAULTS);
        spoil(&mut request, self);
        (request, Some(field))
    }
}

/// Puts a fault into a valid request.
type Spoil = fn(&mut GenerateStreamRequest, Limits);

/// Faults by the field that is to blame.
const FAULTS: &[(&str, Spoil)] = &[
    ("prompt", |request, _| request.prompt = None),
    ("text", |request, _| request.prompt = Some(Prompt::Text(String::new()))),
    ("token_ids", |request, _| request.prompt = ids(vec![])),
    ("token_ids", |request, limits| request.prompt = ids(vec![1, limits.vocab_size])),
    ("token_ids", |request, limits| request.prompt = ids(vec![1; limits.max_model_len as usize])),
    ("sampling.temperature", |request, _| sampling(request).temperature = Some(f64::NAN)),
    ("sampling.top_p", |request, _| sampling(request).top_p = Some(0.0)),
    ("sampling.n", |request, _| sampling(request).n = Some(129)),
    ("sampling.n", |request, _| sampling(request).n = Some(u32::MAX)),
    ("sampling.logprobs", |request, _| sampling(request).logprobs = Some(21)),
    ("sampling.logit_bias", |request, _| {
        sampling(request).logit_bias = [(0, f64::INFINITY)].into();
    }),
    ("stopping.max_tokens", |request, _| stopping(request).max_tokens = Some(0)),
    ("stopping.min_tokens", |request, _| stopping(request).min_tokens = Some(1 << 20)),
    ("stopping.stop_texts", |request, _| stopping(request).stop_texts = vec![String::new()]),
    ("cache_salt", |request, _| request.cache_salt = Some(String::new())),
    ("speculation.num_speculative_tokens", |request, limits| {
        let num_speculative_tokens = Some(limits.max_drafts + 1);
        request.speculation = Some(SpeculationParams { num_speculative_tokens });
    }),
    ("constraint.json_schema", |request, _| {
        let kind = Some(Constraint::JsonSchema("{\"type\": 7}".to_owned()));
        request.constraint = Some(OutputConstraint { kind });
    }),
];

fn ids(ids: Vec<u32>) -> Option<Prompt> {
    Some(Prompt::TokenIds(TokenIds { ids }))
}

fn sampling(request: &mut GenerateStreamRequest) -> &mut SamplingParams {
    request.sampling.get_or_insert_default()
}

fn stopping(request: &mut GenerateStreamRequest) -> &mut StoppingParams {
    request.stopping.get_or_insert_default()
}

/// One of the repeated requests.
fn repeated(rng: &mut Rng) -> Wish {
    let which = rng.between(0, N_REPEATED - 1);
    let (text, rest) = (TEXTS[which as usize % TEXTS.len()], which / TEXTS.len() as u32);
    let sampling = SamplingParams {
        temperature: Some(0.8),
        seed: Some(u64::from(which)),
        ..SamplingParams::default()
    };
    let request = GenerateStreamRequest {
        prompt: Some(Prompt::Text(text.to_owned())),
        // The others are greedy.
        sampling: (rest % 2 == 1).then_some(sampling),
        stopping: Some(StoppingParams {
            max_tokens: Some(if rest < 2 { 20 } else { 90 }),
            ..StoppingParams::default()
        }),
        ..GenerateStreamRequest::default()
    };
    Wish { request, repeated: Some(which) }
}

/// The streaming request as the unary one, whose fields are the same.
pub(crate) fn unary(request: GenerateStreamRequest) -> GenerateRequest {
    GenerateRequest {
        prompt: request.prompt.map(|prompt| match prompt {
            Prompt::Text(text) => UnaryPrompt::Text(text),
            Prompt::TokenIds(ids) => UnaryPrompt::TokenIds(ids),
        }),
        sampling: request.sampling,
        stopping: request.stopping,
        speculation: request.speculation,
        cache_salt: request.cache_salt,
        priority: request.priority,
        constraint: request.constraint,
    }
}
