//! An engine as services see it.
//!
//! **Owns** the way from a request of the own API to the engine and back, whatever service it came
//! through: validation with the field's name, tokenization, grammars, seeds where none is given,
//! one message for each step of an output, deadlines, statuses, the span of a call and what is
//! measured of it. **Must not know** transports, other APIs, scheduling or tensors; it sees the
//! engine through [`EngineHandle`](engine::EngineHandle) alone.
//!
//! Services are written against [`InferenceEngine`], which [`Frontend`] implements over an engine
//! thread; another engine behind the same trait gets the same services.
//!
//! Invariants:
//! * A call that ends, however it ends, ends its request: dropping its messages aborts what is
//!   unfinished, also while the request is queued.
//! * Each stream's buffer is bounded; a reader that falls behind loses its request, never delays
//!   another's \[INV-9].
//! * This crate alone maps the engine's errors to statuses.
//! * No prompt and no output is ever logged or put into a span.
//!
//! # Example
//!
//! An engine that is still reading its model:
//!
//! ```
//! use serving::{EngineState, Frontend, FrontendConfig, InferenceEngine};
//!
//! let frontend = Frontend::loading(FrontendConfig::default());
//! assert_eq!(frontend.state(), EngineState::Loading);
//! let refused = frontend.model_info().unwrap_err();
//! assert_eq!(refused.code(), tonic::Code::Unavailable);
//! ```

mod call;
mod constraint;
mod convert;
mod frontend;
mod inference_engine;
mod kv_events;
mod names;
mod observer;
mod output;
mod prompt;
mod reply;
mod span;
pub mod status;
mod timeout;
pub mod translate;
mod validate;
mod watch;

pub use convert::reason_name;
pub use frontend::{Frontend, FrontendConfig, ModelInfo, ProgramInfo};
pub use inference_engine::{
    CallContext, EngineState, Hold, InferenceEngine, KvEventMessages, Messages, TraceContext,
};
pub use names::{NamedCall, RequestNames};
pub use observer::{
    CallObserver, ObservedOutput, ObservedStep, OutputTimes, RequestFacts, Unobserved,
};
pub use reply::whole_reply;
pub use span::LinkSpan;
pub use timeout::timeout_of;
