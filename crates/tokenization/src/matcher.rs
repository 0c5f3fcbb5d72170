//! Looks for stop texts in a text that grows.

use std::sync::Arc;

/// A stop text, with the Knuth-Morris-Pratt table that makes each byte cost a constant time.
#[derive(Debug)]
struct Pattern {
    bytes: Box<[u8]>,
    /// For each length of a match, the length of the longest shorter one that ends at its end.
    fallback: Box<[usize]>,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes: Box<[u8]> = text.as_bytes().into();
        let mut pattern = Self { fallback: vec![0; bytes.len() + 1].into(), bytes };
        let mut matched = 0;
        for idx in 1..pattern.bytes.len() {
            matched = pattern.advance(matched, pattern.bytes[idx]);
            pattern.fallback[idx + 1] = matched;
        }
        pattern
    }

    /// How much of the pattern the text ends with once `byte` follows `matched` bytes of it.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        loop {
            if self.bytes.get(matched) == Some(&byte) {
                return matched + 1;
            }
            if matched == 0 {
                return 0;
            }
            matched = self.fallback[matched];
        }
    }
}

/// Where a stop text was found, in bytes relative to the start of the text pushed last: it may
/// begin before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StopMatch {
    pub(crate) index: usize,
    pub(crate) start: isize,
    pub(crate) end: usize,
}

/// Finds stop texts as a text grows, whatever pieces it comes in.
#[derive(Clone, Debug)]
pub(crate) struct StopMatcher {
    patterns: Arc<[Pattern]>,
    /// How much of each pattern the text ends with.
    matched: Vec<usize>,
}

impl StopMatcher {
    /// # Panics
    ///
    /// If a text is empty, which is found everywhere.
    pub(crate) fn new(texts: &[String]) -> Self {
        assert!(texts.iter().all(|text| !text.is_empty()), "a stop text is empty");
        let patterns = texts.iter().map(|text| Pattern::new(text)).collect();
        Self { patterns, matched: vec![0; texts.len()] }
    }

    /// Goes on by `text`. Of the stop texts that end in it, returns the one that begins first, and
    /// of those the first of the list.
    pub(crate) fn push(&mut self, text: &str) -> Option<StopMatch> {
        let mut first: Option<StopMatch> = None;
        for (index, (pattern, matched)) in self.patterns.iter().zip(&mut self.matched).enumerate() {
            for (idx, byte) in text.bytes().enumerate() {
                *matched = pattern.advance(*matched, byte);
                if *matched < pattern.bytes.len() {
                    continue;
                }
                let end = idx + 1;
                let start = end.cast_signed() - pattern.bytes.len().cast_signed();
                if first.is_none_or(|first| start < first.start) {
                    first = Some(StopMatch { index, start, end });
                }
            }
        }
        first
    }

    /// Bytes at the end of the text that may become a stop text: the longest end that is the
    /// beginning of one. They are whole characters.
    pub(crate) fn n_held(&self) -> usize {
        let unfinished = |(pattern, matched): (&Pattern, &usize)| {
            // A whole match was looked at already; only a part of it can go on.
            if *matched == pattern.bytes.len() { pattern.fallback[*matched] } else { *matched }
        };
        self.patterns.iter().zip(&self.matched).map(unfinished).max().unwrap_or(0)
    }
}
