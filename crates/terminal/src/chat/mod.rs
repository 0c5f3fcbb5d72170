//! A conversation with a model.

mod answer;
mod command;

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;

use chat_template::{ChatTemplate, Message, RenderOptions};
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::{GenerateStreamRequest, SamplingParams, StoppingParams, TokenIds};
use serving::{CallContext, InferenceEngine, Messages};
use tokenization::Tokenizer;
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio_stream::StreamExt as _;
use tonic::Status;

use crate::chat::answer::Answer;
use crate::chat::command::{Command, HELP};
use crate::client::Client;
use crate::error::ChatError;
use crate::lines::{Input, Lines, read_message};
use crate::paint::Paint;

/// Who answers.
pub enum Engine {
    /// An engine of this process.
    Here(Arc<dyn InferenceEngine>),
    /// A server.
    There(Box<Client>),
}

impl Engine {
    async fn generate(&self, request: GenerateStreamRequest) -> Result<Messages, Status> {
        match self {
            Self::Here(engine) => engine.generate(CallContext::default(), request).await,
            Self::There(client) => client.generate(request).await,
        }
    }
}

/// A model that can chat.
pub struct ChatModel {
    engine: Engine,
    template: ChatTemplate,
    tokenizer: Arc<Tokenizer>,
    name: String,
    max_model_len: usize,
}

impl ChatModel {
    /// The model of an engine, with the template and the tokenizer of its checkpoint.
    ///
    /// # Errors
    ///
    /// If the engine does not answer, or the tokenizer cannot be that of its model.
    pub async fn new(
        engine: Engine,
        template: ChatTemplate,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Self, ChatError> {
        let info = match &engine {
            Engine::Here(engine) => engine.model_info()?,
            Engine::There(client) => client.model_info().await?,
        };
        let (name, n_ids) = (info.served_model_name, tokenizer.n_ids());
        if n_ids > info.vocab_size {
            return Err(ChatError::Command(format!(
                "the tokenizer has {n_ids} ids and {name} only {}: give --model the checkpoint \
                 that the server runs",
                info.vocab_size
            )));
        }
        Ok(Self { engine, template, tokenizer, name, max_model_len: info.max_model_len as usize })
    }
}

/// How a chat is held.
#[derive(Clone, Debug)]
pub struct ChatOptions {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Largest number of tokens of an answer; a quarter of the model's length if absent.
    pub max_tokens: Option<u32>,
    /// How accepted drafts are shown.
    pub paint: Paint,
    /// Whether somebody sits there: the chat greets, and goes on after an error.
    pub is_interactive: bool,
}

/// Whether the chat goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// With the next message.
    Continue,
    /// It is over.
    Leave,
}

/// A conversation with a model, written to `W`.
pub struct Chat<W> {
    model: ChatModel,
    options: ChatOptions,
    out: W,
    stop: Arc<Notify>,
    system: Option<String>,
    turns: Vec<Message>,
    /// The last message, and the number of turns before it.
    last_said: Option<(usize, String)>,
    last_answer: Option<Answer>,
}

/// Holds a chat until the user leaves it or its lines end.
///
/// # Errors
///
/// If the terminal fails; and, where nobody sits there, the first error of a message.
pub fn chat<W: Write>(
    runtime: &Runtime,
    chat: &mut Chat<W>,
    lines: &mut dyn Lines,
) -> Result<(), ChatError> {
    chat.greet()?;
    loop {
        let input = read_message(lines)?;
        match runtime.block_on(chat.handle(input)) {
            Ok(Flow::Continue) => {}
            Ok(Flow::Leave) => return Ok(()),
            Err(error) if matches!(error, ChatError::Terminal(_)) => return Err(error),
            Err(error) if chat.options.is_interactive => chat.note(&error.to_string())?,
            Err(error) => return Err(error),
        }
    }
}

impl<W: Write> Chat<W> {
    /// A chat. A notification of all that wait for `stop` ends the answer at hand.
    pub fn new(model: ChatModel, options: ChatOptions, out: W, stop: Arc<Notify>) -> Self {
        Self {
            model,
            options,
            out,
            stop,
            system: None,
            turns: vec![],
            last_said: None,
            last_answer: None,
        }
    }

    fn greet(&mut self) -> io::Result<()> {
        if !self.options.is_interactive {
            return Ok(());
        }
        let drafts = match self.options.paint {
            Paint::Colour => "; accepted drafts are \x1b[32mgreen\x1b[39m",
            Paint::Marks => "; accepted drafts stand in ⟦ ⟧",
            Paint::Plain => "",
        };
        self.note(&format!("{}{drafts}; /help lists commands, Ctrl-D leaves", self.model.name))
    }

    /// Says something that is not the model's.
    fn note(&mut self, text: &str) -> io::Result<()> {
        self.out.write_all(self.options.paint.note(text).as_bytes())?;
        self.out.flush()
    }

    /// Does what the user asks.
    ///
    /// # Errors
    ///
    /// Why it was not done. The conversation is as it was.
    pub async fn handle(&mut self, input: Input) -> Result<Flow, ChatError> {
        let message = match input {
            Input::Text(message) => message,
            Input::Interrupted => {
                self.note("Ctrl-D or /quit leaves")?;
                return Ok(Flow::Continue);
            }
            Input::End => return Ok(Flow::Leave),
        };
        match Command::of(&message) {
            Command::Say(text) if text.trim().is_empty() => {}
            Command::Say(text) => self.say(self.turns.len(), text.to_owned()).await?,
            Command::Retry => {
                let nothing = || ChatError::Command("/retry: nothing was said yet".to_owned());
                let (n_before, text) = self.last_said.clone().ok_or_else(nothing)?;
                self.say(n_before, text).await?;
            }
            Command::Help => self.note(HELP)?,
            Command::Clear => {
                self.turns.clear();
                (self.last_said, self.last_answer) = (None, None);
                self.note("a new conversation")?;
            }
            Command::System(text) => {
                self.system = Some(text.to_owned()).filter(|text| !text.is_empty());
            }
            Command::Stats => {
                let figures = self.last_answer.as_ref().map(Answer::figures);
                self.note(&figures.unwrap_or_else(|| "there is no answer yet".to_owned()))?;
            }
            Command::Save(file) => self.save(Path::new(file))?,
            Command::Quit => return Ok(Flow::Leave),
            Command::Unknown(text) => return Err(ChatError::Command(text)),
        }
        Ok(Flow::Continue)
    }

    /// Says `text` behind the first `n_before` turns, and shows the answer as it comes.
    async fn say(&mut self, n_before: usize, text: String) -> Result<(), ChatError> {
        self.last_said = Some((n_before, text.clone()));
        let said = Message::new("user", text);
        let request = self.request(n_before, &said)?;
        let mut answer = Answer::new();
        let streamed = self.stream(request, &mut answer).await;
        if !answer.text.is_empty() && !answer.text.ends_with('\n') {
            self.out.write_all(b"\n")?;
        }
        streamed?;
        if let Some(end) = answer.end() {
            self.remark(end)?;
        }
        if !answer.is_empty() {
            self.turns.truncate(n_before);
            self.turns.push(said);
            self.turns.push(Message::new("assistant", answer.text.clone()));
        }
        self.last_answer = Some(answer);
        Ok(())
    }

    /// A request for the answer to `said` behind the first `n_before` turns.
    fn request(&self, n_before: usize, said: &Message) -> Result<GenerateStreamRequest, ChatError> {
        let ChatModel { template, tokenizer, max_model_len, .. } = &self.model;
        let mut messages = self.conversation(n_before);
        messages.push(said.clone());
        // Nobody ends a turn, or begins one of the system, by what he types.
        for message in messages.iter_mut().filter(|message| message.role == "user") {
            message.content = tokenizer.plain_text(&message.content);
        }
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let ids = tokenizer.encode_as_is(&template.render(&messages, &options)?)?;
        let (n_tokens, max_model_len) = (ids.len(), *max_model_len);
        if n_tokens >= max_model_len {
            return Err(ChatError::Full { n_tokens, max_model_len });
        }
        let quarter = u32::try_from(max_model_len / 4).unwrap_or(u32::MAX).max(1);
        Ok(GenerateStreamRequest {
            prompt: Some(Prompt::TokenIds(TokenIds { ids })),
            sampling: Some(self.options.sampling.clone()),
            stopping: Some(StoppingParams {
                max_tokens: Some(self.options.max_tokens.unwrap_or(quarter)),
                ..StoppingParams::default()
            }),
            ..GenerateStreamRequest::default()
        })
    }

    /// The system message and the first `n_turns` turns.
    fn conversation(&self, n_turns: usize) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message::new("system", text.as_str()));
        system.chain(self.turns[..n_turns].iter().cloned()).collect()
    }

    fn save(&mut self, file: &Path) -> Result<(), ChatError> {
        let messages = self.conversation(self.turns.len());
        let mut text = serde_json::to_string_pretty(&messages).expect("texts are JSON");
        text.push('\n');
        fs::write(file, text).map_err(|source| ChatError::File { file: file.into(), source })?;
        self.note(&format!("{} messages in {}", messages.len(), file.display()))?;
        Ok(())
    }

    /// Says something about an answer; beside it, where the answers go to a program.
    fn remark(&mut self, text: &str) -> io::Result<()> {
        if self.options.is_interactive {
            return self.note(text);
        }
        writeln!(io::stderr(), "{text}")
    }

    /// Shows an answer as it comes, until it ends or is stopped.
    async fn stream(
        &mut self,
        request: GenerateStreamRequest,
        answer: &mut Answer,
    ) -> Result<(), ChatError> {
        let paint = self.options.paint;
        let mut stopped = pin!(self.stop.notified());
        let mut messages = tokio::select! {
            biased;
            () = &mut stopped => return Ok(()),
            messages = self.model.engine.generate(request) => messages?,
        };
        loop {
            let message = tokio::select! {
                biased;
                () = &mut stopped => return Ok(()),
                message = messages.next() => message,
            };
            let Some(message) = message else { return Ok(()) };
            match message?.event {
                Some(Event::Delta(delta)) => {
                    answer.push(&delta);
                    self.out.write_all(paint.delta(&delta).as_bytes())?;
                }
                Some(Event::Finished(finished)) => {
                    self.out.write_all(paint.text(&finished.tail_text).as_bytes())?;
                    answer.text.push_str(&finished.tail_text);
                    answer.finished = Some(finished);
                }
                _ => {}
            }
            self.out.flush()?;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
