//! The gRPC service over an engine handle.
//!
//! **Owns** the way from proto messages to requests and back: validation with the field's name,
//! tokenization, seeds where none is given, one message for each step of an output, deadlines,
//! status codes, health, draining. **Must not know** scheduling or tensors; it sees the engine
//! through [`EngineHandle`] alone.
//!
//! Invariants:
//! * A call that ends, however it ends, ends its request: [`EngineHandle::abort`] runs when the
//!   call's state is dropped, also while the request is queued.
//! * Each stream's buffer is bounded; a reader that falls behind loses its request, never delays
//!   another's \[INV-9].
//! * This crate alone maps errors to status codes.
//!
//! # Example
//!
//! Serving until a future resolves (with any [`StepExecutor`](engine_types::StepExecutor)):
//!
//! ```no_run
//! # async fn example(engine: engine::EngineHandle) -> Result<(), Box<dyn std::error::Error>> {
//! use grpc_server::{ModelInfo, ServeConfig, Service};
//!
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! let model = ModelInfo { served_model_name: "tiny".into(), ..ModelInfo::default() };
//! let service = Service { engine, tokenizer: None, model };
//! let stop = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
//! grpc_server::serve(listener, ServeConfig::default(), service, stop).await?;
//! # Ok(())
//! # }
//! ```
//!
//! [`EngineHandle`]: engine::EngineHandle
//! [`EngineHandle::abort`]: engine::EngineHandle::abort

mod call;
mod constraint;
mod control;
mod convert;
mod inference;
mod kv_events;
mod output;
mod prompt;
mod serve;
mod status;
mod timeout;
mod validate;

pub use serve::{ModelInfo, ServeConfig, ServeError, Service, serve};
