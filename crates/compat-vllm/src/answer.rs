//! Messages of the own API as answers of vLLM's.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use grpc_api::inference::v1 as own;
use grpc_api::inference::v1::generate_stream_response::Event;
use serving::{Messages, NamedCall};
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;
use vllm_proto::candidate_token_info::TokenInfo;
use vllm_proto::finish_info::{FinishReason, StopReason};
use vllm_proto::{CandidateTokenInfo, FinishInfo, GenerateResponse, PromptInfo, SequenceOutput};

/// What an answer is to say.
pub(crate) struct Wanted {
    pub(crate) n_outputs: u32,
    pub(crate) n_prompt: u32,
    /// Empty where they are not wanted.
    pub(crate) prompt_token_ids: Vec<u32>,
    /// Candidates at each position, if log probabilities are wanted; the same of the outputs.
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) output_text: bool,
    pub(crate) output_token_ids: bool,
    pub(crate) output_logprobs: Option<u32>,
    /// Those that end an output, in the order in which they were given.
    pub(crate) stop_strings: Vec<String>,
}

/// The answers of a call; dropping it ends the request.
pub(crate) struct Answers {
    /// `None` once the call is over.
    running: Option<Running>,
    translator: Translator,
}

struct Running {
    messages: Messages,
    /// Resolves when an `Abort` names the request, whose name it holds.
    aborted: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Answers {
    pub(crate) fn new(messages: Messages, name: Option<NamedCall>, wanted: Wanted) -> Self {
        let aborted = Box::pin(async move {
            match name {
                Some(name) => name.aborted().await,
                None => std::future::pending().await,
            }
        });
        let running = Some(Running { messages, aborted });
        Self { running, translator: Translator::new(wanted) }
    }

    /// All answers of a call with one output as one.
    pub(crate) async fn whole(mut self) -> Result<GenerateResponse, Status> {
        let mut whole = GenerateResponse::default();
        while let Some(answer) = self.next().await {
            let GenerateResponse { prompt_info, outputs } = answer?;
            whole.prompt_info = whole.prompt_info.or(prompt_info);
            let (all, more) = (whole.outputs.get_or_insert_default(), outputs.unwrap_or_default());
            all.text.push_str(&more.text);
            all.num_tokens += more.num_tokens;
            all.token_ids.extend(more.token_ids);
            all.logprobs.extend(more.logprobs);
            all.ranks.extend(more.ranks);
            all.candidate_tokens.extend(more.candidate_tokens);
            all.finish_info = more.finish_info;
        }
        Ok(whole)
    }
}

impl Stream for Answers {
    type Item = Result<GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(answer) = self.translator.next() {
                return Poll::Ready(Some(Ok(answer)));
            }
            let Some(Running { messages, aborted }) = &mut self.running else {
                return Poll::Ready(None);
            };
            if aborted.as_mut().poll(cx).is_ready() {
                self.running = None;
                self.translator.abort();
                continue;
            }
            let message = ready!(Pin::new(messages).poll_next(cx));
            // What is over is dropped before its last answer is out: its caller may use its name
            // at once.
            match message {
                Some(Ok(message)) => {
                    self.translator.add(message);
                    if self.translator.is_over() {
                        self.running = None;
                    }
                }
                Some(Err(status)) => {
                    self.running = None;
                    return Poll::Ready(Some(Err(status)));
                }
                None => self.running = None,
            }
        }
    }
}

/// Makes answers of messages.
struct Translator {
    wanted: Wanted,
    /// Tokens of each output so far; `None` once it has ended.
    n_tokens: Vec<Option<u32>>,
    /// What the first answer says of the prompt, until it is out.
    prompt: Option<PromptInfo>,
    /// Whether `prompt` is all that there will be.
    is_prompt_known: bool,
    /// Answers that are not out.
    answers: VecDeque<SequenceOutput>,
}

impl Translator {
    fn new(mut wanted: Wanted) -> Self {
        let mut prompt = PromptInfo {
            num_prompt_tokens: wanted.n_prompt,
            token_ids: std::mem::take(&mut wanted.prompt_token_ids),
            ..PromptInfo::default()
        };
        if wanted.prompt_logprobs.is_some() {
            // Nothing comes before the first token, which has an entry nevertheless.
            prompt.logprobs.push(0.0);
            prompt.ranks.push(0);
            prompt.candidate_tokens.push(CandidateTokenInfo::default());
        }
        let mut translator = Self {
            n_tokens: vec![Some(0); wanted.n_outputs as usize],
            prompt: Some(prompt),
            is_prompt_known: wanted.prompt_logprobs.is_none(),
            answers: VecDeque::new(),
            wanted,
        };
        translator.add_prompt(&[]);
        translator
    }

    /// The next answer. None is out before all of the prompt is known, since the first tells it.
    fn next(&mut self) -> Option<GenerateResponse> {
        if !self.is_prompt_known {
            return None;
        }
        let outputs = Some(self.answers.pop_front()?);
        Some(GenerateResponse { prompt_info: self.prompt.take(), outputs })
    }

    fn is_over(&self) -> bool {
        self.n_tokens.iter().all(Option::is_none)
    }

    fn add(&mut self, message: own::GenerateStreamResponse) {
        match message.event {
            Some(Event::Delta(delta)) => self.add_delta(message.index, delta),
            // Those of output 0 hold for all.
            Some(Event::PromptLogprobs(prompt)) if message.index == 0 => {
                self.add_prompt(&prompt.logprobs);
            }
            Some(Event::Finished(finished)) => self.add_end(message.index, finished),
            _ => {}
        }
    }

    /// Ends what has not ended.
    fn abort(&mut self) {
        let aborted = own::GenerationFinished {
            finish_reason: own::FinishReason::Aborted.into(),
            ..own::GenerationFinished::default()
        };
        for index in 0..self.wanted.n_outputs {
            if self.n_tokens[index as usize].is_some() {
                self.add_end(index, aborted.clone());
            }
        }
    }

    fn add_prompt(&mut self, entries: &[own::TokenLogprobs]) {
        let (Some(prompt), Some(n)) = (&mut self.prompt, self.wanted.prompt_logprobs) else {
            return;
        };
        for entry in entries {
            let (rank, candidates) = ranked(entry, n);
            prompt.logprobs.push(entry.logprob);
            prompt.ranks.push(rank);
            prompt.candidate_tokens.push(candidates);
        }
        self.is_prompt_known |= prompt.logprobs.len() >= self.wanted.n_prompt as usize;
    }

    fn add_delta(&mut self, index: u32, delta: own::TokenDelta) {
        let wanted = &self.wanted;
        let num_tokens = u32::try_from(delta.token_ids.len()).expect("few tokens a step");
        let n_tokens = &mut self.n_tokens[index as usize];
        *n_tokens = n_tokens.map(|n| n + num_tokens);
        let mut output = SequenceOutput { index, num_tokens, ..SequenceOutput::default() };
        if wanted.output_text {
            output.text = delta.text_pieces.concat();
        }
        if let Some(n) = wanted.output_logprobs {
            let ranked = delta.logprobs.iter().map(|entry| ranked(entry, n));
            (output.ranks, output.candidate_tokens) = ranked.unzip();
            output.logprobs = delta.logprobs.iter().map(|entry| entry.logprob).collect();
        }
        if wanted.output_token_ids {
            output.token_ids = delta.token_ids;
        }
        self.answers.push_back(output);
    }

    fn add_end(&mut self, index: u32, finished: own::GenerationFinished) {
        use own::FinishReason as Own;
        let n_tokens = self.n_tokens[index as usize].take();
        let finish_reason = match finished.finish_reason() {
            Own::MaxTokens | Own::ModelLength | Own::OutOfBlocks => FinishReason::Length,
            Own::Aborted => FinishReason::Aborted,
            _ => FinishReason::Stop,
        };
        let stop_reason = match finished.finish_reason() {
            Own::Eos => finished.matched_token_id.map(StopReason::EosTokenId),
            Own::StopToken => finished.matched_token_id.map(StopReason::StopTokenId),
            Own::StopText => finished
                .matched_stop_text
                .and_then(|text| self.wanted.stop_strings.get(text as usize).cloned())
                .map(StopReason::StopString),
            _ => None,
        };
        let finish_info = FinishInfo {
            num_output_tokens: n_tokens.unwrap_or_default(),
            finish_reason: finish_reason.into(),
            stop_reason,
            num_cached_tokens: finished.usage.map(|usage| usage.cached_prompt_tokens),
            ..FinishInfo::default()
        };
        let text = if self.wanted.output_text { finished.tail_text } else { String::new() };
        let finish_info = Some(finish_info);
        self.answers.push_back(SequenceOutput { index, text, finish_info, ..Default::default() });
        if index == 0 && !self.is_prompt_known {
            // It ended early, and no more comes of the prompt.
            self.is_prompt_known = true;
            if let Some(prompt) = &mut self.prompt {
                prompt.logprobs.clear();
                prompt.ranks.clear();
                prompt.candidate_tokens.clear();
            }
        }
    }
}

/// The rank of a token, 0 if it is unknown, and the other ones of the `n` likeliest.
fn ranked(entry: &own::TokenLogprobs, n: u32) -> (u32, CandidateTokenInfo) {
    let ranked = || (1..).zip(&entry.top);
    let own = ranked().find(|(_, top)| top.token_id == entry.token_id);
    let others = ranked().take(n as usize).filter(|(_, top)| top.token_id != entry.token_id);
    let info = |(rank, top): (u32, &own::TopLogprob)| TokenInfo {
        id: top.token_id,
        logprob: top.logprob,
        rank,
    };
    let candidates = CandidateTokenInfo { tokens: others.map(info).collect() };
    (own.map_or(0, |(rank, _)| rank), candidates)
}
