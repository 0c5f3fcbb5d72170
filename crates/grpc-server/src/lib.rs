//! The own API over gRPC, and the ports of a server.
//!
//! **Owns** the services of `tandem.inference.v1` and `tandem.control.v1`, ports with any gRPC
//! services on them, health and draining. **Must not know** how an engine works; it sees one through
//! [`InferenceEngine`](serving::InferenceEngine) alone.
//!
//! Invariants:
//! * Health says SERVING only while the engine serves: not while it loads, drains or is dead.
//! * A call that its client leaves is dropped, which ends its request.
//!
//! # Example
//!
//! Serving until a future resolves:
//!
//! ```no_run
//! # async fn example(
//! #     engine: std::sync::Arc<dyn serving::InferenceEngine>,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! use grpc_server::{Port, ServeConfig, Services};
//!
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! let port = Port { listener, services: Services::own(&engine, 16 << 20) };
//! let stop = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
//! grpc_server::serve(vec![port], ServeConfig::default(), engine, stop).await?;
//! # Ok(())
//! # }
//! ```

mod control;
mod inference;
mod port;
mod serve;

pub use port::{Port, Services};
pub use serve::{ServeConfig, ServeError, serve};
