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
    len: u8,
}

impl From<&[TokenId]> for StepTokens {
    /// # Panics
    ///
    /// If there are more than one step can yield.
    fn from(tokens: &[TokenId]) -> Self {
        assert!(tokens.len() <= CAPACITY, "{} tokens of one step", tokens.len());
        let mut ids = [0; CAPACITY];
        ids[..tokens.len()].copy_from_slice(tokens);
        Self { ids, len: tokens.len() as u8 }
    }
}

impl Deref for StepTokens {
    type Target = [TokenId];

    fn deref(&self) -> &[TokenId] {
        &self.ids[..usize::from(self.len)]
    }
}

impl IntoIterator for StepTokens {
    type Item = TokenId;
    type IntoIter = Take<std::array::IntoIter<TokenId, CAPACITY>>;

    fn into_iter(self) -> Self::IntoIter {
        self.ids.into_iter().take(usize::from(self.len))
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
        let mut cut = run;
        cut.len = 2;
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
