//! Why a chat template cannot be read or rendered.

use std::error::Error as _;
use std::fmt;
use std::path::PathBuf;

/// Why a chat template cannot be read, or not be rendered.
#[derive(Debug)]
#[non_exhaustive]
pub enum ChatTemplateError {
    /// A file cannot be read.
    Read {
        /// Which file.
        file: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// `tokenizer_config.json` or `special_tokens_map.json` is no JSON object.
    Json {
        /// Which file.
        file: PathBuf,
        /// What the JSON reader said.
        source: serde_json::Error,
    },
    /// A field of `tokenizer_config.json` is not what it should be.
    Field {
        /// Which file.
        file: PathBuf,
        /// Which field, and what it should be.
        reason: &'static str,
    },
    /// The template has a fault, or takes more steps than it may.
    Template {
        /// Which file.
        file: String,
        /// Which line of the template, from 1; 0 where that is not known.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The template does not take such a conversation.
    Refused {
        /// What it says about that.
        reason: String,
    },
    /// The text gets too long.
    TooLong {
        /// The file of the template.
        file: String,
        /// Most bytes that a text may have.
        bytes: usize,
    },
    /// The system has no room for the stack that templates are given.
    Stack(std::io::Error),
}

/// The source of an error that a template raised itself.
#[derive(Debug)]
pub(crate) struct Raised(pub(crate) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

impl ChatTemplateError {
    /// What the template engine says about the template of `file`.
    pub(crate) fn of(error: minijinja::Error, file: &str) -> Self {
        // The innermost error knows the place and the reason best.
        let mut innermost = &error;
        while let Some(source) = innermost.source() {
            if let Some(raised) = source.downcast_ref::<Raised>() {
                return Self::Refused { reason: raised.0.clone() };
            }
            let Some(source) = source.downcast_ref::<minijinja::Error>() else { break };
            innermost = source;
        }
        let kind = innermost.kind().to_string();
        let reason = innermost.detail().map_or(kind.clone(), |detail| format!("{kind}: {detail}"));
        let line = innermost.line().unwrap_or_default();
        Self::Template { file: innermost.name().unwrap_or(file).to_owned(), line, reason }
    }
}

impl fmt::Display for ChatTemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read { file, source } => write!(f, "read {}: {source}", file.display()),
            Self::Json { file, source } => write!(f, "{}: {source}", file.display()),
            Self::Field { file, reason } => write!(f, "{}: {reason}", file.display()),
            Self::Template { file, line, reason } => write!(f, "{file}:{line}: {reason}"),
            Self::Refused { reason } => write!(f, "the chat template refuses this: {reason}"),
            Self::Stack(source) => write!(f, "no room for the stack of chat templates: {source}"),
            Self::TooLong { file, bytes } => {
                write!(f, "{file}: the conversation makes more than {bytes} bytes of text")
            }
        }
    }
}

impl std::error::Error for ChatTemplateError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Read { source, .. } => Some(source),
            Self::Json { source, .. } => Some(source),
            Self::Stack(source) => Some(source),
            _ => None,
        }
    }
}
