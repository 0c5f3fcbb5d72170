//! The few tokens that one step yields of a request.

use std::fmt;
use std::iter::Take;
use std::ops::Deref;

use crate::MAX_SPECULATIVE_TOKENS;
use crate::ids::TokenId;

/// Longest accepted run: all drafts and one token of the target.
const CAPACITY: usize = MAX_SPECULATIVE_TOKENS + 1;

/// An accepted run or a row of drafts, at most `MAX_SPECULATIVE_TOKENS + 1` token ids, kept in
/// place: handing a step's events out allocates nothing. Reads as a slice.
///
/// ```
/// use engine_types::StepTokens;
///
/// let run = StepTokens::from(&[7, 8][..]);
/// assert_eq!((run.len(), run.last()), (2, Some(&8)));
/// assert_eq!(run.into_iter().collect::<Vec<_>>(), [7, 8]);
/// ```
#[derive(Clone, Copy, Default)]
pub struct StepTokens {
    ids: [TokenId; CAPACITY],
    len: u32,
}

impl From<&[TokenId]> for StepTokens {
    /// # Panics
    ///
    /// If there are more than one step can yield.
    #[inline]
    fn from(tokens: &[TokenId]) -> Self {
        assert!(tokens.len() <= CAPACITY, "{} tokens of one step", tokens.len());
        // A copy of a known length, which costs no call; there are several a row.
        let ids = std::array::from_fn(|idx| tokens.get(idx).copied().unwrap_or_default());
        Self { ids, len: tokens.len() as u32 }
    }
}

impl StepTokens {
    /// The first `len` of them.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    #[must_use]
    #[inline]
    pub fn first(self, len: u32) -> Self {
        assert!(len <= self.len, "{len} of {} tokens", self.len);
        Self { len, ..self }
    }
}

impl Deref for StepTokens {
    type Target = [TokenId];

    #[inline]
    fn deref(&self) -> &[TokenId] {
        &self.ids[..self.len as usize]
    }
}

impl IntoIterator for StepTokens {
    type Item = TokenId;
    type IntoIter = Take<std::array::IntoIter<TokenId, CAPACITY>>;

    fn into_iter(self) -> Self::IntoIter {
        self.ids.into_iter().take(self.len as usize)
    }
}

impl PartialEq for StepTokens {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for StepTokens {}

impl fmt::Debug for StepTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_run_fits_and_the_rest_of_the_buffer_does_not_count() {
        let ids: Vec<TokenId> = (1..=9).collect();
        let run = StepTokens::from(&ids[..]);
        assert_eq!(&*run, &ids[..]);
        let cut = run.first(2);
        assert_eq!(cut, StepTokens::from(&ids[..2]));
        assert_eq!(format!("{cut:?}"), "[1, 2]");
        assert!(StepTokens::default().is_empty());
    }

    #[test]
    #[should_panic(expected = "10 tokens of one step")]
    fn more_than_a_step_yields_is_an_error() {
        let _ = StepTokens::from(&[0; 10][..]);
    }
}
