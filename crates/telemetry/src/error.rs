//! Why there is no telemetry.

use std::error::Error;
use std::fmt;

/// Why there is no telemetry.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TelemetryError {
    /// Spans cannot be sent there.
    Endpoint {
        /// As it was given.
        endpoint: String,
        /// Why.
        reason: String,
    },
    /// The program has another subscriber.
    AlreadyInstalled,
}

impl fmt::Display for TelemetryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Endpoint { endpoint, reason } => write!(
                f,
                "cannot export spans to `{endpoint}`: {reason}; give an address such as \
                 http://localhost:4317"
            ),
            Self::AlreadyInstalled => write!(f, "the program logs already"),
        }
    }
}

impl Error for TelemetryError {}
