//! Keys that sparse attention is limited to.

use crate::paged::PagedRows;

/// The positions that each token attends to.
#[derive(Clone, Copy, Debug)]
pub struct SelectedKeys<'a> {
    /// Positions, ascending, `[n_tokens, topk]`; those behind the count of a row are not read.
    pub indices: &'a [i32],
    /// Positions of each row, `[n_tokens]`; a row without any gets zeros.
    pub counts: &'a [i32],
    /// Width of `indices`.
    pub topk: usize,
}

impl<'a> SelectedKeys<'a> {
    /// The positions of a token.
    pub(crate) fn row(&self, token: usize) -> &'a [i32] {
        &self.indices[token * self.topk..][..self.counts[token] as usize]
    }

    /// Panics unless the counts fit and every position that will be read is visible to its token.
    ///
    /// A wrong position is never clamped: that would hide the fault of whoever selected it.
    pub(crate) fn check(&self, rows: &PagedRows<'_>) {
        let n_tokens = rows.n_tokens();
        assert_eq!(self.counts.len(), n_tokens, "counts is [T]");
        assert_eq!(self.indices.len(), n_tokens * self.topk, "indices is [T, topk]");
        for (token, &count) in self.counts.iter().enumerate() {
            assert!(count >= 0 && count as usize <= self.topk, "a count is at most topk");
            let n_visible = rows.n_visible(token);
            for &position in self.row(token) {
                assert!(
                    position >= 0 && (position as usize) < n_visible,
                    "token {token} sees {n_visible} keys and was given position {position}"
                );
            }
        }
    }
}
