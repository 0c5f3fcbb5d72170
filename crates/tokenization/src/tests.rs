//! Tests of decoding and of stop texts.

mod decoding;
mod hostile;
mod stop_texts;
