//! Any server of OpenAI's completions API as a target: what peers are measured through.

use eventsource_stream::Eventsource as _;
use reqwest::{Client, StatusCode};
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
}

/// Part of a stream.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: String,
    /// vLLM's, where `return_token_ids` asks for them.
    token_ids: Option<Vec<u32>>,
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
    /// If the server does not answer, or lists no model.
    pub async fn connect(
        base_url: &str,
        model: Option<&str>,
        token: Option<&str>,
    ) -> Result<Self, Failure> {
        let base_url = base_url.trim_end_matches('/');
        // Each request has a connection of its own or a used one, however many there are.
        let client =
            Client::builder().tcp_nodelay(true).build().map_err(|error| connection(&error))?;
        let token = token.map(str::to_owned);
        let model = match model {
            Some(model) => model.to_owned(),
            None => first_model(&client, base_url, token.as_deref()).await?,
        };
        Ok(Self { client, url: format!("{base_url}/completions"), model, token })
    }

    /// The name of the model.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    fn body(&self, planned: &Planned) -> Value {
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
            "return_token_ids": true,
        });
        if planned.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        if let Some(seed) = planned.seed {
            body["seed"] = json!(seed);
        }
        body
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
    let models: Value = answer.json().await.map_err(|error| connection(&error))?;
    let name = models["data"][0]["id"].as_str();
    name.map(str::to_owned)
        .ok_or_else(|| Failure::new("model", "the server lists no model: name one"))
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
        let mut request = self.client.post(&self.url).json(&self.body(planned));
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        let answer = request.send().await.map_err(|error| connection(&error))?;
        if answer.status() != StatusCode::OK {
            let class = format!("HTTP {}", answer.status().as_u16());
            return Err(Failure::new(class, answer.text().await.unwrap_or_default()));
        }
        let mut usage = Totals::default();
        let events = answer.bytes_stream().eventsource();
        let pieces = events.filter_map(move |event| match event {
            Err(error) => Some(Err(Failure::new("connection", error.to_string()))),
            Ok(event) if event.data == "[DONE]" => Some(Ok(Piece::Finished(usage))),
            Ok(event) => piece(&event.data, &mut usage).transpose(),
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

/// What an event of the stream adds, if anything.
fn piece(data: &str, usage: &mut Totals) -> Result<Option<Piece>, Failure> {
    let chunk: Chunk = serde_json::from_str(data)
        .map_err(|error| Failure::new("malformed", format!("{error}: {data}")))?;
    if let Some(error) = chunk.error {
        return Err(Failure::new("stream error", error.to_string()));
    }
    if let Some(of_all) = chunk.usage {
        *usage = Totals { n_prompt: of_all.prompt_tokens, n_output: of_all.completion_tokens };
    }
    let Some(choice) = chunk.choices.into_iter().next() else { return Ok(None) };
    Ok(match choice.token_ids {
        Some(ids) if ids.is_empty() => None,
        Some(ids) => Some(Piece::Tokens(u32::try_from(ids.len()).unwrap_or(u32::MAX))),
        None if choice.text.is_empty() => None,
        None => Some(Piece::Text),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_counted_by_ids_where_there_are_any() {
        let mut usage = Totals::default();
        let mut read = |data: &str| piece(data, &mut usage);
        let ids = r#"{"choices": [{"text": "ab", "token_ids": [5, 6]}]}"#;
        assert_eq!(read(ids), Ok(Some(Piece::Tokens(2))));
        assert_eq!(read(r#"{"choices": [{"text": "ab"}]}"#), Ok(Some(Piece::Text)));
        assert_eq!(read(r#"{"choices": [{"text": "", "finish_reason": "length"}]}"#), Ok(None));
        let last = r#"{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}"#;
        assert_eq!(read(last), Ok(None));
        assert_eq!(read(r#"{"error": {"message": "no"}}"#).unwrap_err().class, "stream error");
        assert_eq!(read("no json").unwrap_err().class, "malformed");
        assert_eq!(usage, Totals { n_prompt: Some(3), n_output: Some(9) });
    }
}
