//! The HTTP listener of operators: metrics, health, and a page to look at.
//!
//! **Owns** the metrics of calls and engines under our names and under vLLM's, `/healthz` and
//! `/readyz`, figures as JSON, and a page that shows them and streams a completion. **Must not
//! know** how an engine works, or gRPC as a transport; it sees an engine through
//! [`InferenceEngine`](serving::InferenceEngine) alone.
//!
//! Invariants:
//! * `/healthz` is well unless the engine is dead; `/readyz` is well only while it serves.
//! * Nothing but `/api/generate` changes anything, and a foreign page cannot call it: names that
//!   resolve to this machine are no hosts of it, and requests of other origins are refused.
//! * A client that leaves frees its request.
//! * No prompt and no output is logged or kept.
//!
//! # Example
//!
//! Metrics of an engine that still reads its model:
//!
//! ```
//! use std::sync::Arc;
//!
//! use admin_http::{Format, Metrics, Names};
//! use serving::{Frontend, FrontendConfig};
//!
//! let metrics = Arc::new(Metrics::new(Names::Own));
//! let config = FrontendConfig { observer: metrics.clone(), ..FrontendConfig::default() };
//! let text = metrics.render(&Frontend::loading(config), Format::Prometheus);
//! assert!(text.contains("tandem_engine_state{state=\"loading\"} 1\n"));
//! ```

mod generate;
mod guard;
mod metrics;
mod page;
mod routes;
mod serve;
mod stats;

pub use metrics::{Format, Metrics, Names};
pub use serve::{HttpConfig, serve};

/// The name of a status code in the specification of gRPC, such as `INVALID_ARGUMENT`.
fn code_name(code: tonic::Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}
