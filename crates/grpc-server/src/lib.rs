//! The own API over gRPC, and the ports of a server.
//!
//! **Owns** the services of `tandem.inference.v1` and `tandem.control.v1`, ports with any gRPC
//! services on them, their TLS and keys, reflection, health and draining. **Must not know** how an
//! engine works; it sees one through [`InferenceEngine`](serving::InferenceEngine) alone.
//!
//! Invariants:
//! * Health says SERVING only while the engine serves: not while it loads, drains or is dead.
//! * A call that its client leaves is dropped, which ends its request.
//! * A call whose `grpc-timeout` passes ends with DEADLINE_EXCEEDED, whatever it waits for.
//! * Tokens are kept as digests, and no message or log line tells one.
//!
//! # Example
//!
//! Serving until a future resolves:
//!
//! ```no_run
//! # async fn example(
//! #     engine: std::sync::Arc<dyn serving::InferenceEngine>,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! use grpc_server::{Port, Security, ServeConfig, Services};
//!
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! let services = Services::own(&engine, 16 << 20).with_reflection();
//! let port = Port { listener, services, security: Security::default() };
//! let stop = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
//! grpc_server::serve(vec![port], ServeConfig::default(), engine, stop).await?;
//! # Ok(())
//! # }
//! ```

mod access;
mod control;
mod guard;
mod health;
mod incoming;
mod inference;
mod keys;
mod port;
mod serve;
mod tls;

pub use access::Access;
pub use keys::{KeySet, KeysError};
pub use port::{Port, Security, Services};
pub use serve::{ServeConfig, ServeError, serve};
pub use tls::{Tls, TlsError};
