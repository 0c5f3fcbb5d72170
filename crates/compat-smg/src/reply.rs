//! The messages of a call as those of the contract.

use grpc_api::inference::v1 as own;
use grpc_api::inference::v1::FinishReason;
use grpc_api::inference::v1::generate_stream_response::Event;

use crate::engine::generate_complete::MatchedStop;
use crate::engine::generate_response::Response;
use crate::engine::{
    GenerateComplete, GenerateResponse, GenerateStreamChunk, InputLogProbs, InputTokenLogProb,
    OutputLogProbs, TopLogProbs,
};
use crate::request::Asked;

/// Translates the messages of one call.
pub(crate) struct Reply {
    asked: Asked,
    outputs: Vec<Output>,
    /// Those of the prompt, which are the same for all outputs.
    prompt: Option<InputLogProbs>,
}

/// What is known of an output.
#[derive(Default)]
struct Output {
    n_tokens: u32,
    is_over: bool,
    /// Filled where the answer comes at once.
    token_ids: Vec<u32>,
    logprobs: Option<OutputLogProbs>,
}

impl Reply {
    /// For a request that was taken, so that its numbers are sound.
    pub(crate) fn new(asked: Asked) -> Self {
        let outputs = (0..asked.n_outputs).map(|_| Output::default()).collect();
        // Nothing comes before the first token.
        let prompt = asked.first_token.map(|id| InputLogProbs {
            token_logprobs: vec![InputTokenLogProb::default()],
            token_ids: vec![id],
            top_logprobs: vec![TopLogProbs::default()],
        });
        Self { asked, outputs, prompt }
    }

    /// What a message comes to, if it is to be told now.
    pub(crate) fn take(
        &mut self,
        message: own::GenerateStreamResponse,
    ) -> Option<GenerateResponse> {
        let index = message.index;
        let response = match message.event? {
            Event::Delta(delta) => Response::Chunk(self.delta(index, delta)?),
            Event::PromptLogprobs(logprobs) => {
                self.add_prompt(logprobs.logprobs);
                return None;
            }
            Event::Finished(finished) => Response::Complete(self.finished(index, &finished)),
        };
        Some(GenerateResponse { response: Some(response) })
    }

    /// Whether all outputs have had their last messages.
    pub(crate) fn is_over(&self) -> bool {
        self.outputs.iter().all(|output| output.is_over)
    }

    /// The last messages of the outputs that have none, of a call that was aborted.
    pub(crate) fn abort(&mut self) -> Vec<GenerateResponse> {
        let unfinished: Vec<u32> = (0..)
            .zip(&self.outputs)
            .filter(|(_, of)| !of.is_over)
            .map(|(index, _)| index)
            .collect();
        let complete = |index| {
            let complete = self.complete(index, "abort");
            GenerateResponse { response: Some(Response::Complete(complete)) }
        };
        unfinished.into_iter().map(complete).collect()
    }

    /// A step's tokens, unless they are kept for the end.
    fn delta(&mut self, index: u32, delta: own::TokenDelta) -> Option<GenerateStreamChunk> {
        let output = &mut self.outputs[index as usize];
        let is_first = output.n_tokens == 0;
        let n_new = u32::try_from(delta.token_ids.len()).unwrap_or(u32::MAX);
        output.n_tokens += n_new;
        if !self.asked.stream {
            output.token_ids.extend(delta.token_ids);
            add_output(&mut output.logprobs, delta.logprobs);
            return None;
        }
        let mut output_logprobs = None;
        add_output(&mut output_logprobs, delta.logprobs);
        Some(GenerateStreamChunk {
            token_ids: delta.token_ids,
            prompt_tokens: self.asked.n_prompt,
            completion_tokens: n_new,
            output_logprobs,
            input_logprobs: self.prompt.clone().filter(|_| is_first),
            index,
            ..GenerateStreamChunk::default()
        })
    }

    fn finished(&mut self, index: u32, finished: &own::GenerationFinished) -> GenerateComplete {
        let complete = self.complete(index, finish_reason(finished.finish_reason()));
        let usage = finished.usage.unwrap_or_default();
        let (accepted, drafted) = finished
            .speculation
            .as_ref()
            .map_or((0, 0), |stats| (stats.accepted_tokens, stats.draft_tokens));
        GenerateComplete {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.cached_prompt_tokens,
            matched_stop: self.matched_stop(finished),
            spec_accepted_tokens: u32::try_from(accepted).unwrap_or(u32::MAX),
            spec_draft_tokens: u32::try_from(drafted).unwrap_or(u32::MAX),
            ..complete
        }
    }

    /// An output's end with what is known of it here.
    fn complete(&mut self, index: u32, finish_reason: &str) -> GenerateComplete {
        let output = &mut self.outputs[index as usize];
        output.is_over = true;
        GenerateComplete {
            output_ids: std::mem::take(&mut output.token_ids),
            finish_reason: finish_reason.to_owned(),
            prompt_tokens: self.asked.n_prompt,
            completion_tokens: output.n_tokens,
            output_logprobs: output.logprobs.take(),
            input_logprobs: self.prompt.clone().filter(|_| !self.asked.stream),
            index,
            ..GenerateComplete::default()
        }
    }

    /// What of the request's own conditions ended an output; the model's ends are none.
    fn matched_stop(&self, finished: &own::GenerationFinished) -> Option<MatchedStop> {
        match finished.finish_reason() {
            FinishReason::StopToken => finished.matched_token_id.map(MatchedStop::MatchedTokenId),
            FinishReason::StopText => {
                let text = self.asked.stop.get(finished.matched_stop_text? as usize)?;
                Some(MatchedStop::MatchedStopStr(text.clone()))
            }
            _ => None,
        }
    }

    fn add_prompt(&mut self, logprobs: Vec<own::TokenLogprobs>) {
        let Some(prompt) = &mut self.prompt else { return };
        for of_token in logprobs {
            prompt.token_logprobs.push(InputTokenLogProb { value: Some(of_token.logprob) });
            prompt.token_ids.push(of_token.token_id);
            prompt.top_logprobs.push(top(&of_token.top));
        }
    }
}

/// Adds log probabilities of an output, if there are any.
fn add_output(all: &mut Option<OutputLogProbs>, logprobs: Vec<own::TokenLogprobs>) {
    for of_token in logprobs {
        let all = all.get_or_insert_default();
        all.token_logprobs.push(of_token.logprob);
        all.token_ids.push(of_token.token_id);
        all.top_logprobs.push(top(&of_token.top));
    }
}

fn top(top: &[own::TopLogprob]) -> TopLogProbs {
    TopLogProbs {
        values: top.iter().map(|of_token| of_token.logprob).collect(),
        token_ids: top.iter().map(|of_token| of_token.token_id).collect(),
    }
}

fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::MaxTokens | FinishReason::ModelLength | FinishReason::OutOfBlocks => "length",
        FinishReason::Aborted => "abort",
        _ => "stop",
    }
}
