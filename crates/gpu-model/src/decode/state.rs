//! The state of slots.

use gpu_runtime::ViewMut;

/// The state of slots, in one buffer so that it is copied at once. Regions have room for the most
/// slots.
pub(crate) struct State<'a> {
    pub(super) valid_len: ViewMut<'a, i32>,
    pub(super) last_token: ViewMut<'a, i32>,
    pub(super) n_emitted: ViewMut<'a, i32>,
    pub(super) n_drafts: ViewMut<'a, i32>,
    pub(super) drafts: ViewMut<'a, i32>,
    pub(super) emitted: ViewMut<'a, i32>,
}

impl<'a> State<'a> {
    /// Integers for `n` slots.
    pub(crate) fn len(n: usize, width: usize) -> usize {
        n * (3 + 2 * width)
    }

    /// The first `n_slots` of a buffer for `n_most`.
    pub(super) fn of(
        buffer: ViewMut<'a, i32>,
        (n_most, n_slots): (usize, usize),
        width: usize,
    ) -> Self {
        let mut rest = Some(buffer);
        let mut take = |per_slot: usize| {
            let (part, behind) = rest.take().expect("there is a rest").split_at(n_most * per_slot);
            rest = Some(behind);
            part.slice(..n_slots * per_slot)
        };
        Self {
            valid_len: take(1),
            last_token: take(1),
            n_emitted: take(1),
            n_drafts: take(1),
            drafts: take(width - 1),
            emitted: take(width),
        }
    }
}
