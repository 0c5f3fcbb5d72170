//! Identifiers, and spans into the flat buffers of plans and outcomes.

use std::fmt;
use std::ops::Range;

/// A vocabulary index.
pub type TokenId = u32;

/// Identifies a request for as long as the engine lives; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Identifies a KV block: block `b` holds the slots `b * block_size .. (b + 1) * block_size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Counts the steps that an engine has planned, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}", self.0)
    }
}

impl fmt::Display for StepId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.0)
    }
}

/// A range of a flat buffer, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Index of the first element.
    pub start: u32,
    /// Number of elements.
    pub len: u32,
}

impl Span {
    /// The span that the next `len` elements pushed to a buffer of `buffer_len` elements occupy.
    #[must_use]
    #[inline]
    pub(crate) fn after(buffer_len: usize, len: usize) -> Self {
        let fits = "a flat buffer holds at most u32::MAX elements";
        Self { start: u32::try_from(buffer_len).expect(fits), len: u32::try_from(len).expect(fits) }
    }

    /// The span as an index range.
    #[must_use]
    #[inline]
    pub fn range(self) -> Range<usize> {
        self.start as usize..self.start as usize + self.len as usize
    }
}
