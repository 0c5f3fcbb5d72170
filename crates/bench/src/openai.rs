//! Any server of OpenAI's completions API as a target: what peers are measured through.

use std::sync::atomic::{AtomicBool, Ordering};

use eventsource_stream::Eventsource as _;
use reqwest::{Client, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_stream::StreamExt as _;

use crate::target::{Counters, Failure, Piece, Pieces, Target, Totals};
use crate::workload::{Planned, Prompt};

/// A server behind `/v1/completions`, streaming.
pub struct OpenAiTarget {
    client: Client,
    url: String,
    model: String,
    token: Option<String>,
    /// Whether the server is asked for the ids of its tokens: some refuse fields they do not know.
    asks_for_ids: AtomicBool,
}

/// Part of a stream.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
    /// `error` in those of SGLang and others that are no part of an answer.
    object: Option<String>,
    message: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: String,
    /// vLLM's, where `return_token_ids` asks for them.
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
}

impl OpenAiTarget {
    /// A server whose API is below `base_url`, such as `http://127.0.0.1:8000/v1`. Without a name,
    /// the model is the first one that the server lists.
    ///
    /// # Errors
    ///
    /// If the address asks for TLS, which this program does not have, if the server does not
    /// answer, or if it lists no model.
    pub async fn connect(
        base_url: &str,
        model: Option<&str>,
        token: Option<&str>,
    ) -> Result<Self, Failure> {
        let base_url = base_url.trim_end_matches('/');
        if base_url.starts_with("https:") {
            let message = format!("{base_url}: this program has no TLS: give an http:// address");
            return Err(Failure::new("address", message));
        }
        // What is measured is the server, and no proxy that the environment names.
        // Each request has a connection of its own: a server may close a used one, or keep a thread
        // waiting on it, and either would look like the server's own fault.
        let client = Client::builder().no_proxy().tcp_nodelay(true).pool_max_idle_per_host(0);
        let client = client.build().map_err(|error| connection(&error))?;
        let token = token.map(str::to_owned);
        let model = match model {
            Some(model) => model.to_owned(),
            None => first_model(&client, base_url, token.as_deref()).await?,
        };
        let url = format!("{base_url}/completions");
        Ok(Self { client, url, model, token, asks_for_ids: AtomicBool::new(true) })
    }

    /// The name of the model.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    fn body(&self, planned: &Planned, asks_for_ids: bool) -> Value {
        let prompt = match &planned.prompt {
            Prompt::Text(text) => json!(text),
            Prompt::TokenIds(ids) => json!(ids),
        };
        let mut body = json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": planned.max_tokens,
            "temperature": planned.temperature,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if asks_for_ids {
            body["return_token_ids"] = json!(true);
        }
        if planned.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        if let Some(seed) = planned.seed {
            body["seed"] = json!(seed);
        }
        body
    }

    async fn post(&self, planned: &Planned, asks_for_ids: bool) -> Result<Response, Failure> {
        let mut request = self.client.post(&self.url).json(&self.body(planned, asks_for_ids));
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        request.send().await.map_err(|error| connection(&error))
    }
}

async fn first_model(
    client: &Client,
    base_url: &str,
    token: Option<&str>,
) -> Result<String, Failure> {
    let mut request = client.get(format!("{base_url}/models"));
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    let answer = request.send().await.map_err(|error| connection(&error))?;
    let models: Value = accepted(answer).await?.json().await.map_err(|error| connection(&error))?;
    let name = models["data"][0]["id"].as_str();
    name.map(str::to_owned)
        .ok_or_else(|| Failure::new("model", "the server lists no model: name one"))
}

async fn accepted(answer: Response) -> Result<Response, Failure> {
    if answer.status() == StatusCode::OK {
        return Ok(answer);
    }
    let class = format!("HTTP {}", answer.status().as_u16());
    Err(Failure::new(class, answer.text().await.unwrap_or_default()))
}

fn connection(error: &reqwest::Error) -> Failure {
    let mut message = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        message.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    Failure::new("connection", message)
}

#[async_trait::async_trait]
impl Target for OpenAiTarget {
    async fn send(&self, planned: &Planned) -> Result<Pieces, Failure> {
        let asks_for_ids = self.asks_for_ids.load(Ordering::Relaxed);
        let mut answer = self.post(planned, asks_for_ids).await?;
        let is_refused =
            matches!(answer.status(), StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY);
        if asks_for_ids && is_refused {
            answer = self.post(planned, false).await?;
            if answer.status() == StatusCode::OK {
                self.asks_for_ids.store(false, Ordering::Relaxed);
            }
        }
        let mut reader = Reader::default();
        let events = accepted(answer).await?.bytes_stream().eventsource().map(Some);
        let pieces = events.chain(tokio_stream::once(None)).filter_map(move |event| match event {
            Some(Ok(event)) => reader.event(&event.data).transpose(),
            Some(Err(error)) => Some(Err(Failure::new("connection", error.to_string()))),
            None => reader.end().map(Ok),
        });
        Ok(Box::pin(pieces))
    }

    async fn forget_prompts(&self) -> Result<bool, Failure> {
        Ok(false)
    }

    async fn counters(&self) -> Result<Option<Counters>, Failure> {
        Ok(None)
    }
}

/// What has been read of an answer.
#[derive(Default)]
struct Reader {
    usage: Totals,
    is_finished: bool,
    has_tokens: bool,
}

impl Reader {
    /// What an event adds, if anything.
    fn event(&mut self, data: &str) -> Result<Option<Piece>, Failure> {
        if data == "[DONE]" {
            if !self.has_tokens && !self.is_finished {
                let message = "the answer has no token and no reason why it ended";
                return Err(Failure::new("empty", message));
            }
            return Ok(Some(Piece::Finished(self.usage)));
        }
        let chunk: Chunk = serde_json::from_str(data)
            .map_err(|error| Failure::new("malformed", format!("{error}: {data}")))?;
        let is_error = chunk.object.as_deref() == Some("error");
        let told = is_error.then(|| chunk.message.unwrap_or_else(|| json!(data)));
        if let Some(error) = chunk.error.or(told) {
            let text = error.as_str().or(error["message"].as_str()).map(str::to_owned);
            return Err(Failure::new("stream error", text.unwrap_or_else(|| error.to_string())));
        }
        if let Some(of_all) = chunk.usage {
            self.usage =
                Totals { n_prompt: of_all.prompt_tokens, n_output: of_all.completion_tokens };
        }
        let Some(choice) = chunk.choices.into_iter().next() else { return Ok(None) };
        match choice.finish_reason.as_deref() {
            None => {}
            Some("stop" | "length") => self.is_finished = true,
            // What a server gave up, such as vLLM's `abort`, is not whole.
            Some(reason) => return Err(Failure::new(format!("finish reason {reason}"), data)),
        }
        let piece = match choice.token_ids {
            Some(ids) if ids.is_empty() => None,
            Some(ids) => Some(Piece::Tokens(u32::try_from(ids.len()).unwrap_or(u32::MAX))),
            None if choice.text.is_empty() => None,
            None => Some(Piece::Text),
        };
        self.has_tokens |= piece.is_some();
        Ok(piece)
    }

    /// What the end of the stream adds: some servers send no `[DONE]`.
    fn end(&self) -> Option<Piece> {
        self.is_finished.then_some(Piece::Finished(self.usage))
    }
}

#[cfg(test)]
mod tests;
