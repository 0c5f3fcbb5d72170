//! Benchmarks of serving that can be trusted.
//!
//! **Owns** what a server does under load, measured from outside: workloads, closed and open loops,
//! latencies that are right where a message holds several tokens, what the machine did meanwhile,
//! provenance, comparison and reports. **Must not know** how a server works; it sees one through
//! [`Target`], be it behind a port or an engine in this process.
//!
//! Invariants:
//! * Latencies count from when a request was due. An open loop waits for nobody, so that a server
//!   that stalls hides nothing (no coordinated omission).
//! * Failed requests are counted and never averaged in. Tokens are counted by ids;
//!   a result tells of a server that sends none.
//! * A result without its provenance cannot be written.
//! * Figures of a machine that was not quiet say so.
//!
//! # Example
//!
//! ```
//! use std::time::Duration;
//!
//! use bench::{Arrival, Counted, Metrics, Outcome, Record, Slo};
//!
//! let at = Duration::from_millis;
//! let arrival = |millis, n_tokens| Arrival { at: at(millis), n_tokens };
//! let record = Record {
//!     index: 0, due: at(0), sent: at(0), ended: at(160), outcome: Outcome::Completed, n_prompt: 3,
//!     messages: vec![arrival(100, 1), arrival(130, 4), arrival(160, 4)],
//!     n_planned: None, counted: Counted::Ids,
//! };
//! let metrics = Metrics::of(&[record], &Slo::default());
//! assert_eq!(metrics.tpot_ms.unwrap().mean, 7.5, "60 ms for 8 tokens, in two messages");
//! ```

mod arrivals;
mod batches;
mod compare;
mod engine;
mod grpc;
mod machine;
mod metrics;
mod openai;
mod provenance;
mod record;
mod report;
mod result;
mod run;
#[cfg(test)]
mod sample;
mod series;
mod session;
mod summary;
mod target;
mod ticker;
mod workload;

pub use arrivals::{Load, schedule};
pub use batches::{Batches, measure_batches};
pub use compare::{
    ACCEPTANCE_LOSS_MAX, ASSUMED_SPREAD, AbResult, AbRow, CONFIDENCE, Comparison, EFFECT_MIN,
    Finding, Incomparable, Row, Setting, Spread, compare,
};
pub use engine::EngineTarget;
pub use grpc::GrpcTarget;
pub use machine::{
    GENERATOR_SHARE, GeneratorLoad, HELD_CPUS, HELD_S, HELD_SHARE, LoadWindow, MachineLoad,
    Monitor, QUIET_SHARE, SEND_LAG_MS, ServerProcess,
};
pub use metrics::{Metrics, Slo};
pub use openai::OpenAiTarget;
pub use provenance::{
    Build, Checkpoint, Covers, Fact, Host, Process, Provenance, Server, Source, masked,
};
pub use record::{Arrival, Counted, Outcome, Record};
pub use report::{ReportError, Warning, comparison_markdown, html, markdown, warnings};
pub use result::{ResultFile, ResultFileError, RunResult, SCHEMA, Workload};
pub use run::{run_closed, run_open};
pub use series::{Quantiles, Series, StepCount, StepRates, Timeline};
pub use session::{Measured, Plan, Progress, Watcher, measure};
pub use summary::Summary;
pub use target::{Counters, Failure, Piece, Pieces, Target, Totals};
pub use workload::{Planned, Prompt, PromptFileError, RandomPrompts, Vocabulary, from_jsonl};
