//! The front ends in a terminal: a chat, and a live view of a server.
//!
//! **Owns** [`Chat`] with its commands, colours, conversation and lines; the view of a server's
//! figures ([`top`]); and [`Client`], the calls of the own API that the two make. **Must not know**
//! how an engine works, nor flags and environment: it gets an
//! [`InferenceEngine`](serving::InferenceEngine) or an address, and plain options.
//!
//! Invariants:
//! * Nothing of a conversation is left out silently: one that does not fit is refused, and the next
//!   step told.
//! * An interrupt ends the answer at hand, never the chat; the request ends with it.
//! * What the model writes cannot control the terminal.
//! * The terminal is as it was when the live view ends, also by a panic.
//!
//! # Example
//!
//! Accepted drafts as they stand where there is no colour:
//!
//! ```
//! use grpc_api::inference::v1::TokenDelta;
//! use terminal::Paint;
//!
//! let text_pieces = ["os", ".path", ".join"].map(str::to_owned).to_vec();
//! let delta = TokenDelta { n_accepted: 2, text_pieces, ..TokenDelta::default() };
//! assert_eq!(Paint::Marks.delta(&delta), "⟦os.path⟧.join");
//! assert_eq!(Paint::Plain.delta(&delta), "os.path.join");
//! ```

mod chat;
mod client;
mod error;
mod lines;
mod paint;
pub mod top;

#[cfg(test)]
mod port_tests;

pub use chat::{Chat, ChatModel, ChatOptions, Engine, Flow, chat};
pub use client::{Client, ServerAddress, said};
pub use error::ChatError;
pub use lines::{Editor, Input, Lines, Piped, read_message};
pub use paint::Paint;
