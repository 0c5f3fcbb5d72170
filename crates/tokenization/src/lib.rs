//! Text to token ids and back, incrementally.
//!
//! **Owns** the reading of `tokenizer.json` and `tokenizer_config.json`, the encoding of prompts,
//! the decoding of generated ids as they come, and the search for stop texts in them. **Must not
//! know** requests, models or protocols.
//!
//! Invariants:
//! * The deltas of an [`IncrementalDecoder`], joined, equal [`Tokenizer::decode`] of all ids.
//! * No delta holds a part of a character: its bytes are kept back until they are complete, or
//!   until what follows shows that they never will be. Only then do they become U+FFFD, as
//!   [`String::from_utf8_lossy`] would have it; [`IncrementalDecoder::finish`] turns an incomplete
//!   tail into one U+FFFD.
//! * An id that no token has (the gap between the tokenizer's size and the embedding's rows)
//!   decodes to nothing.
//! * The pieces of an [`OutputText`], joined, are the text up to the first stop text, and none of
//!   them shows a part of one before it is clear whether it is one.
//! * A token costs time in the length of its own text, however long the run.
//!
//! # Example
//!
//! ```
//! let checkpoint = concat!(
//!     env!("CARGO_MANIFEST_DIR"),
//!     "/../bundled-checkpoints/checkpoints/tiny-dsv3"
//! );
//! let tokenizer = tokenization::Tokenizer::load(checkpoint.as_ref())?;
//! let ids = tokenizer.encode("x = 'Größe'")?;
//! assert_eq!(Some(ids[0]), tokenizer.bos_token_id());
//!
//! let mut decoder = tokenizer.incremental_decoder(true);
//! let mut text = String::new();
//! for &id in &ids {
//!     decoder.push(id, &mut text);
//!     assert!(!text.contains('\u{FFFD}'));
//! }
//! decoder.finish(&mut text);
//! assert_eq!(text, "x = 'Größe'");
//! # Ok::<(), tokenization::TokenizationError>(())
//! ```

mod decoder;
mod error;
mod matcher;
mod output_text;
mod pieces;
mod tokenizer;

#[cfg(test)]
mod tests;

pub use decoder::IncrementalDecoder;
pub use error::TokenizationError;
pub use output_text::{OutputText, StopRules, StopTextDetector};
pub use tokenizer::Tokenizer;
