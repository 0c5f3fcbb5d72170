//! `vllm.Inference`.

use std::sync::Arc;

use serving::{CallContext, InferenceEngine, NamedCall, RequestNames, status};
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Response, Status};
use tonic_types::FieldViolation;
use vllm_proto::generate_request::Prompt;
use vllm_proto::inference_server::Inference;
use vllm_proto::{GenerateRequest, GenerateResponse};

use crate::answer::Answers;
use crate::request::{self, Form, Sources};

/// Which of several engines behind one port is meant.
const RANK: &str = "x-data-parallel-rank";

/// The service over an engine.
pub(crate) struct Service {
    pub(crate) engine: Arc<dyn InferenceEngine>,
    pub(crate) names: RequestNames,
}

#[tonic::async_trait]
impl Inference for Service {
    type GenerateStreamStream = Answers;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<GenerateResponse>, Status> {
        self.start(request, Form::Whole).await?.whole().await.map(Response::new)
    }

    async fn generate_stream(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Answers>, Status> {
        self.start(request, Form::Stream).await.map(Response::new)
    }
}

impl Service {
    async fn start(
        &self,
        request: Request<GenerateRequest>,
        form: Form,
    ) -> Result<Answers, Status> {
        let context = CallContext::of(&request);
        check_rank(request.metadata())?;
        let mut request = request.into_inner();
        let model = self.engine.model_info()?;
        check_model(&request.model, &model.served_model_name)?;
        request::check(&request, form, model.has_tokenizer)?;
        let name = self.take_name(&request.request_id)?;
        let sources = Sources::of(&request);
        let mut prompt = match request.prompt.take() {
            None => return Err(fault("prompt", "is missing: give text or token_ids")),
            Some(Prompt::TokenIds(ids)) => ids.ids,
            Some(Prompt::Text(text)) => self.engine.tokenize(text).await?,
        };
        let n_kept = request.truncate_prompt_tokens as usize;
        if n_kept > 0 {
            prompt.drain(..prompt.len().saturating_sub(n_kept));
        }
        let (own, wanted) = request::translate(request, prompt)?;
        let messages = self.engine.generate(context, own).await;
        let messages = messages.map_err(|status| sources.rename(status))?;
        Ok(Answers::new(messages, name, wanted))
    }

    /// The name of a request for as long as it runs, if its caller gave one.
    fn take_name(&self, name: &str) -> Result<Option<NamedCall>, Status> {
        if name.is_empty() {
            return Ok(None);
        }
        let duplicate = || {
            let message = format!("an unfinished request has the request_id {name:?}");
            status::with_reason(Code::AlreadyExists, "DUPLICATE_REQUEST", &message)
        };
        self.names.take(name).map(Some).ok_or_else(duplicate)
    }
}

fn check_model(asked: &str, served: &str) -> Result<(), Status> {
    if asked.is_empty() || asked == served {
        return Ok(());
    }
    let message = format!("the model {asked:?} is not served: leave it out, or name {served:?}");
    Err(status::with_reason(Code::NotFound, "UNKNOWN_MODEL", &message))
}

fn check_rank(metadata: &MetadataMap) -> Result<(), Status> {
    match metadata.get(RANK).map(|rank| rank.to_str().unwrap_or_default().trim().parse::<u32>()) {
        None | Some(Ok(0)) => Ok(()),
        _ => Err(fault(RANK, "must be 0, the only rank, or be left out")),
    }
}

fn fault(field: &str, description: &str) -> Status {
    status::invalid_argument(vec![FieldViolation::new(field, description)])
}
