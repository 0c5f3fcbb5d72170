//! Why a chat does not go on.

use std::path::PathBuf;
use std::{fmt, io};

use chat_template::ChatTemplateError;
use tokenization::TokenizationError;
use tonic::Status;

use crate::client;

/// Why there is no answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum ChatError {
    /// The terminal, or the pipe, cannot be read or written.
    Terminal(io::Error),
    /// A file cannot be written.
    File {
        /// Which one.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The template does not render the conversation.
    Template(ChatTemplateError),
    /// The tokenizer does not take its text.
    Tokenizer(TokenizationError),
    /// The conversation does not fit.
    Full {
        /// Its tokens.
        n_tokens: usize,
        /// Tokens that fit, the answer's included.
        max_model_len: usize,
    },
    /// What a command line asks for cannot be done; the text says how it can.
    Command(String),
    /// The engine, or the way to it, failed.
    Engine(Status),
}

impl fmt::Display for ChatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Terminal(error) => write!(f, "the terminal failed: {error}"),
            Self::File { file, source } => write!(f, "{}: {source}", file.display()),
            Self::Template(error) => error.fmt(f),
            Self::Tokenizer(error) => error.fmt(f),
            Self::Full { n_tokens, max_model_len } => write!(
                f,
                "the conversation has {n_tokens} tokens and leaves no room for an answer: the \
                 model takes {max_model_len}; /clear begins a new one"
            ),
            Self::Command(text) => f.write_str(text),
            Self::Engine(status) => f.write_str(&client::said(status)),
        }
    }
}

impl std::error::Error for ChatError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Terminal(source) | Self::File { source, .. } => Some(source),
            Self::Template(source) => Some(source),
            Self::Tokenizer(source) => Some(source),
            // What is said of a status tells its causes.
            Self::Engine(_) | Self::Full { .. } | Self::Command(_) => None,
        }
    }
}

impl From<io::Error> for ChatError {
    fn from(error: io::Error) -> Self {
        Self::Terminal(error)
    }
}

impl From<ChatTemplateError> for ChatError {
    fn from(error: ChatTemplateError) -> Self {
        Self::Template(error)
    }
}

impl From<TokenizationError> for ChatError {
    fn from(error: TokenizationError) -> Self {
        Self::Tokenizer(error)
    }
}

impl From<Status> for ChatError {
    fn from(status: Status) -> Self {
        Self::Engine(status)
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn a_status_is_told_once_and_in_words() {
        let error = ChatError::from(Status::unavailable("busy"));
        assert_eq!(error.to_string(), "busy (Unavailable)");
        assert!(error.source().is_none());
        let silent = ChatError::from(Status::unimplemented("")).to_string();
        assert!(silent.starts_with("Operation is not implemented"), "{silent}");
    }
}
