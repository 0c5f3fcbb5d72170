//! Why an engine does not start, and why it does not take a request or a subscriber.

use std::error::Error;
use std::fmt;

/// Why an engine did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum SpawnError {
    /// The executor could not be made.
    Executor(Box<dyn Error + Send + Sync>),
    /// The scheduler refused its configuration.
    Scheduler(scheduler::ConfigError),
    /// `max_queue_wait` is zero, so that no request could ever run.
    NoQueueWait,
    /// The thread could not be started.
    Thread(std::io::Error),
    /// The executor's factory panicked.
    Panicked,
}

impl fmt::Display for SpawnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Executor(error) => write!(f, "{error}"),
            Self::Scheduler(error) => write!(f, "{error}"),
            Self::NoQueueWait => {
                write!(f, "max_queue_wait is 0; give requests time to start, or set no limit")
            }
            Self::Thread(error) => write!(f, "the engine thread cannot start: {error}"),
            Self::Panicked => write!(f, "the executor panicked while it was made"),
        }
    }
}

impl Error for SpawnError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Executor(error) => error.source(),
            Self::Scheduler(error) => error.source(),
            Self::Thread(error) => Some(error),
            Self::NoQueueWait | Self::Panicked => None,
        }
    }
}

/// Why a request was not taken. Its sink gets no event.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum SubmitError {
    /// As many requests as may be unfinished at once already are.
    QueueFull {
        /// That number.
        limit: usize,
    },
    /// An unfinished request has this id.
    DuplicateId,
    /// The request cannot be served as it is.
    Invalid(scheduler::SubmitError),
    /// The engine has been asked to stop.
    ShuttingDown,
    /// The engine is dead; the text says why.
    Dead(String),
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueueFull { limit } => {
                write!(f, "the queue is full: {limit} requests are running or waiting")
            }
            Self::DuplicateId => write!(f, "an unfinished request has this id"),
            Self::Invalid(error) => write!(f, "{error}"),
            Self::ShuttingDown => write!(f, "the engine is shutting down"),
            Self::Dead(reason) => write!(f, "the engine is dead: {reason}"),
        }
    }
}

impl Error for SubmitError {}

/// Why nobody can subscribe to the events of the prefix cache. The sink gets no event.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubscribeError {
    /// The engine runs without a prefix cache.
    NoPrefixCache,
    /// As many as may subscribe at a time already do.
    TooMany {
        /// That number.
        limit: usize,
    },
    /// The engine has stopped.
    Stopped,
}

impl fmt::Display for SubscribeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPrefixCache => write!(f, "the engine runs without a prefix cache"),
            Self::TooMany { limit } => write!(f, "{limit} subscribers are as many as there may be"),
            Self::Stopped => write!(f, "the engine has stopped"),
        }
    }
}

impl Error for SubscribeError {}
