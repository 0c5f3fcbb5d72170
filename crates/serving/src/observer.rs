//! What is measured of calls, for those who count it.

use std::time::Duration;

use engine_types::{FinishReason, SpecDecodeStats, Usage};
use tonic::Code;

/// Hears of outputs as they go, on the threads of their calls. Times are those at which the engine
/// handed the events over, whenever the client reads them.
pub trait CallObserver: Send + Sync + 'static {
    /// A step added tokens to an output.
    fn step(&self, step: &ObservedStep);

    /// An output ended, however it ended.
    fn finished(&self, output: &ObservedOutput<'_>);

    /// A request was not taken.
    fn refused(&self, code: Code);
}

/// Tokens that came at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedStep {
    /// Number of tokens, at least 1.
    pub n_tokens: usize,
    /// Time since the output's step before, or since the request's arrival for its first one.
    pub since_last: Duration,
    /// Whether it is the output's first one.
    pub is_first: bool,
}

/// An output that has ended.
#[derive(Clone, Debug)]
pub struct ObservedOutput<'a> {
    /// Why; `None` where its client left first.
    pub reason: Option<&'a FinishReason>,
    /// Token counts; those seen so far where the client left first.
    pub usage: Usage,
    /// What drafting did.
    pub spec_decode: SpecDecodeStats,
    /// Parameters of the request.
    pub request: RequestFacts,
    /// When things happened.
    pub times: OutputTimes,
}

/// What a request asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestFacts {
    /// Prompt tokens.
    pub n_prompt: u32,
    /// Largest number of generated tokens, the model's length where the request does not say.
    pub max_tokens: u32,
    /// Number of outputs.
    pub n: u32,
}

/// When things happened to an output, since the request's arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputTimes {
    /// Until its first step was planned.
    pub started: Option<Duration>,
    /// Until its first token.
    pub first_token: Option<Duration>,
    /// Until its last token.
    pub last_token: Option<Duration>,
    /// Until its end.
    pub finished: Duration,
}

/// Counts nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl CallObserver for Unobserved {
    fn step(&self, _step: &ObservedStep) {}

    fn finished(&self, _output: &ObservedOutput<'_>) {}

    fn refused(&self, _code: Code) {}
}
