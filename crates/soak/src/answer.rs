//! What a call has answered so far, and whether it is what its request asked for.

use std::collections::HashMap;

use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::output_constraint::Kind as Constraint;
use grpc_api::inference::v1::{
    FinishReason, GenerateResponse, GenerateStreamRequest, GenerateStreamResponse, GeneratedOutput,
    OutputConstraint, StoppingParams,
};

use crate::requests::{Limits, Wish};

/// The outputs of a call as far as they have come.
#[derive(Debug)]
pub(crate) struct Answer {
    outputs: Vec<GeneratedOutput>,
    n_prompt_logprobs: usize,
    /// The first thing that no server may send.
    fault: Option<String>,
}

impl Answer {
    pub(crate) fn new(request: &GenerateStreamRequest) -> Self {
        let n_outputs = request.sampling.as_ref().and_then(|sampling| sampling.n).unwrap_or(1);
        let empty = GeneratedOutput { text: Some(String::new()), ..GeneratedOutput::default() };
        Self { outputs: vec![empty; n_outputs as usize], n_prompt_logprobs: 0, fault: None }
    }

    /// The answer of a unary call.
    pub(crate) fn of(reply: GenerateResponse) -> Self {
        Self { outputs: reply.outputs, n_prompt_logprobs: reply.prompt_logprobs.len(), fault: None }
    }

    /// The server's name for an output that has not ended, if there is one.
    pub(crate) fn unfinished(&self) -> Option<u64> {
        let open = |output: &&GeneratedOutput| output.usage.is_none() && output.request_id != 0;
        self.outputs.iter().find(open).map(|output| output.request_id)
    }

    /// Takes the names of all outputs, as the head of the answer tells them.
    pub(crate) fn name(&mut self, ids: Option<&str>) {
        let ids: Vec<u64> = ids.unwrap_or("").split(',').filter_map(|id| id.parse().ok()).collect();
        if ids.len() != self.outputs.len() {
            self.fault = Some(format!("{} outputs are named {ids:?}", self.outputs.len()));
        }
        for (output, id) in self.outputs.iter_mut().zip(ids) {
            output.request_id = id;
        }
    }

    /// Tokens that have come.
    pub(crate) fn n_tokens(&self) -> u64 {
        self.outputs.iter().map(|output| output.token_ids.len() as u64).sum()
    }

    pub(crate) fn add(&mut self, message: GenerateStreamResponse) {
        let Some(output) = self.outputs.get_mut(message.index as usize) else {
            self.fault.get_or_insert_with(|| format!("a message of output {}", message.index));
            return;
        };
        if output.usage.is_some() {
            self.fault.get_or_insert_with(|| "a message after the last one".to_owned());
        }
        if output.request_id != message.request_id {
            self.fault.get_or_insert_with(|| format!("a message of {}", message.request_id));
        }
        let text = output.text.get_or_insert_default();
        match message.event {
            Some(Event::Delta(delta)) => {
                let n = delta.token_ids.len();
                let accepted = delta.token_ids.get(..delta.n_accepted as usize);
                let is_sound = n == delta.n_accepted as usize + 1
                    && n == delta.text_pieces.len()
                    && accepted == delta.draft_token_ids.get(..delta.n_accepted as usize);
                if !is_sound {
                    self.fault.get_or_insert_with(|| format!("an unsound delta: {delta:?}"));
                }
                output.token_ids.extend(delta.token_ids);
                output.logprobs.extend(delta.logprobs);
                text.extend(delta.text_pieces);
            }
            Some(Event::PromptLogprobs(prompt)) => self.n_prompt_logprobs += prompt.logprobs.len(),
            Some(Event::Finished(finished)) => {
                text.push_str(&finished.tail_text);
                output.finish_reason = finished.finish_reason;
                output.matched_token_id = finished.matched_token_id;
                output.matched_stop_text = finished.matched_stop_text;
                output.usage = Some(finished.usage.unwrap_or_default());
            }
            None => _ = self.fault.get_or_insert_with(|| "an empty message".to_owned()),
        }
    }

    /// Whether an output was ended by AbortRequest or by the server.
    pub(crate) fn is_aborted(&self) -> bool {
        self.outputs.iter().any(|output| output.finish_reason() == FinishReason::Aborted)
    }

    /// Checks the whole answer of a call that ended without an error.
    pub(crate) fn check(&self, wish: &Wish, limits: Limits) -> Result<(), String> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let sampling = wish.request.sampling.clone().unwrap_or_default();
        if self.outputs.len() != sampling.n.unwrap_or(1) as usize {
            return Err(format!("{} outputs", self.outputs.len()));
        }
        let mut n_prompt = 1;
        for output in &self.outputs {
            let Some(usage) = output.usage else {
                return Err("an output without its last message".to_owned());
            };
            n_prompt = usage.prompt_tokens as usize;
            let n_tokens = output.token_ids.len();
            if usage.completion_tokens as usize != n_tokens {
                return Err(format!("{n_tokens} tokens came, usage says {usage:?}"));
            }
            let n_logprobs = if sampling.logprobs.is_some() { n_tokens } else { 0 };
            if output.logprobs.len() != n_logprobs {
                return Err(format!("{} logprobs of {n_tokens} tokens", output.logprobs.len()));
            }
            check_end(output, n_prompt + n_tokens, &wish.request, limits)?;
        }
        let asked = sampling.prompt_logprobs.is_some() && !self.is_aborted();
        if asked && self.n_prompt_logprobs != n_prompt - 1 {
            return Err(format!("{} logprobs of {n_prompt} prompt tokens", self.n_prompt_logprobs));
        }
        Ok(())
    }
}

/// Checks that the reason of an output's end holds; its sequence has `n_total` tokens.
fn check_end(
    output: &GeneratedOutput,
    n_total: usize,
    request: &GenerateStreamRequest,
    limits: Limits,
) -> Result<(), String> {
    let stopping = request.stopping.clone().unwrap_or_default();
    let StoppingParams { stop_texts, max_tokens, ignore_eos, min_tokens, .. } = stopping;
    let (text, n_tokens) = (output.text.as_deref().unwrap_or_default(), output.token_ids.len());
    let reason = output.finish_reason();
    let stop_text = output.matched_stop_text.and_then(|idx| stop_texts.get(idx as usize));
    let holds = match reason {
        FinishReason::Eos => {
            ignore_eos != Some(true) && output.matched_token_id.as_ref() == output.token_ids.last()
        }
        FinishReason::MaxTokens => Some(n_tokens as u32) == max_tokens,
        FinishReason::ModelLength => n_total == limits.max_model_len as usize,
        FinishReason::StopText => stop_text.is_some_and(|stop| {
            let may_have_passed = min_tokens.is_some_and(|min| min > 0);
            may_have_passed || !text.contains(stop.as_str())
        }),
        FinishReason::ConstraintComplete => {
            request.constraint.as_ref().is_some_and(|constraint| keeps_to(text, constraint))
        }
        FinishReason::Aborted => true,
        _ => false,
    };
    if !holds || n_tokens as u32 > max_tokens.unwrap_or(u32::MAX) {
        let asked = &request.stopping;
        return Err(format!("{reason:?} after {n_tokens} tokens of {asked:?}: {text:?}"));
    }
    Ok(())
}

/// Whether a text is complete under a constraint, as far as it is easily seen.
fn keeps_to(text: &str, constraint: &OutputConstraint) -> bool {
    match constraint.kind {
        Some(Constraint::JsonSchema(_)) => {
            serde_json::from_str::<serde_json::Value>(text).is_ok_and(|value| value.is_object())
        }
        _ => !text.is_empty(),
    }
}

/// What repeated requests have generated.
#[derive(Debug, Default)]
pub(crate) struct Repeated(HashMap<u32, (Vec<u32>, Option<String>)>);

impl Repeated {
    /// Checks that a request generates what it did before, as far as it has come; the first whole
    /// answer is what later ones are compared with.
    pub(crate) fn check(&mut self, which: u32, answer: &Answer) -> Result<(), String> {
        let Some(output) = answer.outputs.first() else { return Ok(()) };
        let is_whole = output.usage.is_some() && !answer.is_aborted();
        let Some((ids, text)) = self.0.get(&which) else {
            if is_whole {
                self.0.insert(which, (output.token_ids.clone(), output.text.clone()));
            }
            return Ok(());
        };
        let is_same = if is_whole {
            *ids == output.token_ids && *text == output.text
        } else {
            ids.starts_with(&output.token_ids)
        };
        if is_same {
            return Ok(());
        }
        let now = &output.token_ids;
        Err(format!("repeated request {which} generated {ids:?} before and {now:?} now"))
    }
}

#[cfg(test)]
mod tests;
