//! JSON schemas, regular expressions and Lark grammars as guides of an output.
//!
//! **Owns** the compilation of a [`Constraint`] over a tokenizer's vocabulary, within limits that
//! hold for one request, and the [`Guide`](engine_types::Guide)s that come of it: which tokens may
//! follow, where an output can end and where it must. The parser is that of `llguidance`. **Must
//! not know** requests, logits, protocols or time.
//!
//! Invariants:
//! * A mask allows exactly the tokens that [`accept`](engine_types::Guide::accept) takes.
//! * An end-of-sequence id is allowed exactly where the text can end, and no token behind it.
//! * A guide that has gone on and back is where it was.
//! * Guides share nothing: no mask depends on what other requests did \[INV-11].
//! * A text is a run of bytes: a character may be split over tokens in any way, and any tokens
//!   that spell an allowed text are allowed.
//! * What a constraint may cost is bounded, when it is compiled and at every token. A guide that
//!   reaches a bound allows nothing any more, so that its request fails, and says why in the log.
//!
//! A JSON schema's known keywords hold or are refused; between two JSON tokens there are at most
//! 32 blanks. A Lark grammar may name special tokens (`<think>`) and ids (`<[5]>`), so that a
//! constraint can begin behind a marker: `start: /(.|\n)*/ </think> answer`.
//!
//! # Example
//!
//! ```
//! use grammar::{Constraint, Grammars};
//!
//! let folder = bundled_checkpoints::resolve("tiny-glm52", None)?;
//! let tokenizer = tokenization::Tokenizer::load(&folder)?;
//! let end_id = 1;
//! let grammars = Grammars::new(&tokenizer, &[end_id])?;
//!
//! let mut guide = grammars.compile(&Constraint::Regex("yes|no".to_owned()))?.0;
//! let allows = |mask: &[u32], id: u32| mask[id as usize / 32] >> (id % 32) & 1 == 1;
//! let mut mask = vec![0; tokenizer.n_ids().div_ceil(32) as usize];
//! guide.fill_mask(&mut mask);
//! assert!(!allows(&mask, end_id));
//!
//! for id in tokenizer.encode("no")?.into_iter().skip(1) {
//!     guide.fill_mask(&mut mask);
//!     assert!(allows(&mask, id) && guide.accept(id));
//! }
//! assert!(guide.is_complete());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod grammars;
mod guide;
mod vocabulary;

pub use error::{ConstraintKind, GrammarError};
pub use grammars::{Constraint, Grammars, MAX_CONSTRAINT_BYTES, MAX_NESTING};
