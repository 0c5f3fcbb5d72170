//! What outputs are to keep to, as guides.

use std::sync::Arc;

use engine_types::{BoxedGuide, TokenId};
use grammar::{Constraint, Grammars};
use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::output_constraint::Kind;
use tokenization::Tokenizer;
use tokio::sync::Semaphore;
use tonic::Status;
use tonic_types::FieldViolation;

use crate::status;

/// Constraints compiled at a time: a large one keeps a core busy for a while.
const COMPILED_MAX: usize = 2;

/// Compiles constraints, few at a time.
pub(crate) struct Constraints {
    /// The error says why this model's outputs cannot be constrained.
    grammars: Result<Arc<Grammars>, String>,
    turns: Arc<Semaphore>,
}

impl Constraints {
    /// A compiler for outputs that end with one of `eos_token_ids`.
    pub(crate) fn new(tokenizer: Option<&Tokenizer>, eos_token_ids: &[TokenId]) -> Self {
        let no_tokenizer = || "the model has no tokenizer".to_owned();
        let grammars = tokenizer.ok_or_else(no_tokenizer).and_then(|tokenizer| {
            let grammars = Grammars::new(tokenizer, eos_token_ids);
            grammars.map(Arc::new).map_err(|error| error.to_string())
        });
        Self { grammars, turns: Arc::new(Semaphore::new(COMPILED_MAX)) }
    }

    /// The guide of an output, if it has a constraint.
    pub(crate) async fn guide(
        &self,
        constraint: Option<pb::OutputConstraint>,
    ) -> Result<Option<BoxedGuide>, Status> {
        let fault = |field: &str, description: &str| {
            Err(status::invalid_argument(vec![FieldViolation::new(field, description)]))
        };
        let Some(constraint) = constraint else { return Ok(None) };
        let (field, constraint) = match constraint.kind {
            Some(Kind::JsonSchema(text)) => {
                ("constraint.json_schema", Constraint::JsonSchema(text))
            }
            Some(Kind::Regex(text)) => ("constraint.regex", Constraint::Regex(text)),
            Some(Kind::LarkGrammar(text)) => ("constraint.lark_grammar", Constraint::Lark(text)),
            None => {
                return fault("constraint", "is empty: give json_schema, regex or lark_grammar");
            }
        };
        let grammars = match &self.grammars {
            Ok(grammars) => Arc::clone(grammars),
            Err(reason) => {
                return fault(field, &format!("outputs cannot be constrained: {reason}"));
            }
        };
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        let turn = turn.map_err(|_| status::internal("the compiler of constraints is closed"))?;
        let compile = move || {
            // Held by the work itself, which goes on where the caller has gone.
            let _turn = turn;
            grammars.compile(&constraint)
        };
        match tokio::task::spawn_blocking(compile).await {
            Ok(Ok(guide)) => Ok(Some(guide)),
            Ok(Err(error)) => fault(field, &error.to_string()),
            Err(_) => Err(status::internal("the compiler of constraints panicked")),
        }
    }
}
