//! Why a constraint cannot guide an output.

use std::fmt;

use engine_types::TokenId;

/// What a constraint is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConstraintKind {
    /// A JSON schema.
    JsonSchema,
    /// A regular expression.
    Regex,
    /// A Lark grammar.
    Lark,
}

/// Why a constraint cannot guide an output, or a vocabulary cannot be guided.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GrammarError {
    /// There is no id to end an output with.
    NoEndId,
    /// An end-of-sequence id is outside the tokenizer's vocabulary.
    EndIdOutsideVocab {
        /// The id.
        id: TokenId,
        /// Ids of the tokenizer.
        n_ids: u32,
    },
    /// The tokenizer's vocabulary cannot be searched.
    Vocabulary(String),
    /// There is no thread to compile on; the text says why.
    NoThread(String),
    /// The constraint's text is too long.
    TooLong {
        /// What it is written in.
        kind: ConstraintKind,
        /// Its length, in bytes.
        n_bytes: usize,
        /// The most that is taken.
        max: usize,
    },
    /// Brackets of the constraint's text are nested too deeply.
    TooDeep {
        /// What it is written in.
        kind: ConstraintKind,
        /// Where, in bytes from its beginning.
        offset: usize,
        /// The most levels that are taken.
        max: usize,
    },
    /// A JSON schema is not JSON.
    NotJson {
        /// Line of the fault, from 1.
        line: usize,
        /// Column of the fault, from 1.
        column: usize,
        /// What is wrong there.
        message: String,
    },
    /// The constraint has a fault, or uses what is not available.
    Invalid {
        /// What it is written in.
        kind: ConstraintKind,
        /// What is wrong, and where.
        message: String,
    },
    /// It takes more work or memory than one request may have.
    TooComplex {
        /// What it is written in.
        kind: ConstraintKind,
        /// What grew too large.
        message: String,
    },
    /// A Lark grammar asks for what an output that is drafted ahead cannot keep to.
    Unsupported {
        /// The attribute that asks for it.
        attribute: &'static str,
        /// What to write instead.
        instead: &'static str,
    },
    /// No text of this vocabulary meets the constraint.
    Unsatisfiable {
        /// What it is written in.
        kind: ConstraintKind,
    },
}

impl fmt::Display for ConstraintKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::JsonSchema => "JSON schema",
            Self::Regex => "regular expression",
            Self::Lark => "Lark grammar",
        })
    }
}

impl fmt::Display for GrammarError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoEndId => write!(
                f,
                "the model names no end-of-sequence id, so that no constrained output could end; \
                 name one in its generation_config.json"
            ),
            Self::EndIdOutsideVocab { id, n_ids } => {
                write!(f, "end-of-sequence id {id} is outside the tokenizer's {n_ids} ids")
            }
            Self::Vocabulary(message) => {
                write!(f, "the tokenizer's vocabulary cannot be searched: {message}")
            }
            Self::NoThread(why) => {
                write!(f, "no thread to compile a constraint on: {why}; try again later")
            }
            Self::TooLong { kind, n_bytes, max } => {
                write!(f, "the {kind} has {n_bytes} bytes, at most {max} are taken; shorten it")
            }
            Self::TooDeep { kind, offset, max } => write!(
                f,
                "the {kind} nests brackets more than {max} deep at byte {offset}; name its parts \
                 and refer to them, or escape brackets in texts"
            ),
            Self::NotJson { line, column, message } => {
                write!(f, "the JSON schema is not JSON: {message} (line {line}, column {column})")
            }
            Self::Invalid { kind, message } => write!(f, "the {kind} cannot be used: {message}"),
            Self::TooComplex { kind, message } => write!(
                f,
                "the {kind} is too complex: {message}; bound its repetitions more tightly or \
                 split it"
            ),
            Self::Unsupported { attribute, instead } => {
                write!(f, "the Lark grammar uses `{attribute}`, which is not available; {instead}")
            }
            Self::Unsatisfiable { kind } => {
                write!(f, "no text meets the {kind}; look for parts that exclude each other")
            }
        }
    }
}

impl std::error::Error for GrammarError {}
