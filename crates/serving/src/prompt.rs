//! Prompts to ids.

use std::sync::Arc;

use grpc_api::inference::v1 as pb;
use tokenization::{TokenizationError, Tokenizer};
use tokio::sync::Semaphore;
use tonic::Status;
use tonic_types::FieldViolation;

use crate::status;

/// Texts from this size on, in bytes, wait for their turn to be encoded.
const LONG_TEXT_BYTES: usize = 64 << 10;
/// Long texts encoded at a time: encoding takes a hundred times a text's memory.
const LONG_TEXTS_MAX: usize = 2;

/// Encodes prompts, of which few long ones at a time.
pub(crate) struct PromptEncoder {
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    long_texts: Arc<Semaphore>,
    max_model_len: usize,
}

impl PromptEncoder {
    pub(crate) fn new(tokenizer: Option<Arc<Tokenizer>>, max_model_len: u32) -> Self {
        let long_texts = Arc::new(Semaphore::new(LONG_TEXTS_MAX));
        Self { tokenizer, long_texts, max_model_len: max_model_len as usize }
    }

    /// The prompt as ids, and the name of the field that it came in.
    pub(crate) async fn ids(
        &self,
        prompt: Option<pb::generate_stream_request::Prompt>,
    ) -> Result<(Vec<u32>, &'static str), Status> {
        use pb::generate_stream_request::Prompt;
        let fault = |field: &str, description: &str| {
            Err(status::invalid_argument(vec![FieldViolation::new(field, description)]))
        };
        match prompt {
            None => fault("prompt", "is missing: give text or token_ids"),
            Some(Prompt::TokenIds(ids)) => Ok((ids.ids, "token_ids")),
            Some(Prompt::Text(text)) if text.is_empty() => fault("text", "is empty"),
            Some(Prompt::Text(text)) => {
                let Some(tokenizer) = self.tokenizer.clone() else {
                    return fault("text", "the model has no tokenizer: give token_ids");
                };
                // No token stands for more bytes than this, so that the text cannot fit.
                let max_model_len = self.max_model_len;
                let n_bytes_max = max_model_len.saturating_mul(tokenizer.max_token_bytes());
                if text.len() > n_bytes_max {
                    let n_bytes = text.len();
                    let description = format!(
                        "has {n_bytes} bytes, more than max_model_len ({max_model_len}) tokens \
                         can stand for: shorten it"
                    );
                    return fault("text", &description);
                }
                match self.encode(tokenizer, text).await? {
                    Ok(ids) => Ok((ids, "text")),
                    Err(error) => fault("text", &error.to_string()),
                }
            }
        }
    }

    /// Encodes apart from the calls' threads: a long text takes a while.
    async fn encode(
        &self,
        tokenizer: Arc<Tokenizer>,
        text: String,
    ) -> Result<Result<Vec<u32>, TokenizationError>, Status> {
        let permit = if text.len() < LONG_TEXT_BYTES {
            None
        } else {
            let turn = Arc::clone(&self.long_texts).acquire_owned().await;
            Some(turn.map_err(|_| status::internal("the tokenizer is closed"))?)
        };
        let encode = move || {
            // Held by the work itself, which goes on where the caller has gone.
            let _permit = permit;
            tokenizer.encode(&text)
        };
        let ids = tokio::task::spawn_blocking(encode).await;
        ids.map_err(|_| status::internal("the tokenizer panicked"))
    }
}
