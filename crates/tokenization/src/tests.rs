//! Tests of decoding and of stop texts.

mod decoding;
mod stop_texts;
