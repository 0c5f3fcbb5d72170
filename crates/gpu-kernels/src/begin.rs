//! How a step begins: from what the host planned, or from the step before.

use gpu_runtime::{Args, GemmElement, Gpu, GpuError, Kernel, Launch, Stream, View, ViewMut};

use crate::attention::{as_i32, as_u32};
use crate::unit;

/// The kernel that fills the state of slots.
#[derive(Debug)]
pub struct Begin {
    begin: Kernel,
}

/// What the host plans for a slot. Its form on the device is that of [`SlotRecord::write`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRecord<'a> {
    /// The slot of the step before whose tokens this one continues; its length, last token and
    /// drafts are taken from there.
    pub source: Option<u32>,
    /// Block table.
    pub table: u32,
    /// Tokens with KV.
    pub valid_len: u32,
    /// The token at that position.
    pub last_token: u32,
    /// Drafts to verify; with `source`, so many of its drafts.
    pub n_drafts: u32,
    /// Drafts to propose.
    pub n_wanted: u32,
    /// For benches: how many drafts are accepted whatever the target says.
    pub forced: u32,
    /// The drafts, without `source`.
    pub drafts: &'a [u32],
}

/// The state that a step begins with, `[n_slots]` each; drafts are `[n_slots, width - 1]`.
#[derive(Debug)]
pub struct BeginState<'a> {
    /// As in [`crate::Slots`].
    pub valid_len: ViewMut<'a, i32>,
    /// The token at that position.
    pub last_token: ViewMut<'a, i32>,
    /// Drafts to verify.
    pub n_drafts: ViewMut<'a, i32>,
    /// The drafts.
    pub drafts: ViewMut<'a, i32>,
    /// Drafts to propose.
    pub n_wanted: ViewMut<'a, i32>,
    /// Drafts to accept, for benches.
    pub forced: ViewMut<'a, i32>,
    /// Block table of each slot, -1 for an empty one.
    pub table: ViewMut<'a, i32>,
}

/// The state that the step before ended with, of as many slots as that had.
#[derive(Clone, Copy, Debug)]
pub struct OldState<'a> {
    /// As [`BeginState::valid_len`].
    pub valid_len: View<'a, i32>,
    /// As [`BeginState::last_token`].
    pub last_token: View<'a, i32>,
    /// How many tokens each slot emitted; 0 for one that failed.
    pub n_emitted: View<'a, i32>,
    /// As [`BeginState::drafts`].
    pub drafts: View<'a, i32>,
}

impl SlotRecord<'_> {
    /// Integers of a record for windows of `width` rows.
    #[must_use]
    pub fn len(width: usize) -> usize {
        6 + width
    }

    /// Writes the record to `to`, of [`SlotRecord::len`].
    ///
    /// # Panics
    ///
    /// If there are more drafts than a window has.
    pub fn write(&self, to: &mut [i32]) {
        let source = self.source.map_or(-1, u32::cast_signed);
        let numbers = [self.table, self.valid_len, self.last_token, self.n_drafts, self.n_wanted];
        to.fill(0);
        to[0] = source;
        for (to, number) in to[1..].iter_mut().zip(numbers.into_iter().chain([self.forced])) {
            *to = number.cast_signed();
        }
        for (to, draft) in to[7..].iter_mut().zip(self.drafts) {
            *to = draft.cast_signed();
        }
        assert!(self.drafts.len() + 7 <= to.len(), "a window has room for the drafts");
    }

    /// Writes the record of an empty slot.
    pub fn write_empty(to: &mut [i32]) {
        to.fill(-1);
    }
}

impl Begin {
    /// Compiles the kernel.
    ///
    /// # Errors
    ///
    /// A failure of the compiler or the driver.
    pub fn new<E: GemmElement>(gpu: &Gpu) -> Result<Self, GpuError> {
        let module = unit::BEGIN.build::<E>(gpu, &[])?;
        Ok(Self { begin: module.kernel("step_begin")? })
    }

    /// Fills the state of as many slots as `state` has from `records`.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    ///
    /// # Panics
    ///
    /// If lengths do not match.
    pub fn run(
        &self,
        stream: &Stream,
        (records, width): (View<'_, i32>, usize),
        old: OldState<'_>,
        state: BeginState<'_>,
    ) -> Result<(), GpuError> {
        let (n_slots, n_old) = (state.valid_len.len(), old.valid_len.len());
        assert!(n_slots > 0 && width > 0, "there are slots");
        assert_eq!(records.len(), n_slots * SlotRecord::len(width), "a record for each slot");
        let per_slot = [&state.last_token, &state.n_drafts, &state.n_wanted, &state.forced];
        for array in per_slot.into_iter().chain([&state.table]) {
            assert_eq!(array.len(), n_slots, "an array of one element a slot");
        }
        assert_eq!(state.drafts.len(), n_slots * (width - 1), "drafts is [n_slots, width - 1]");
        assert_eq!([old.last_token.len(), old.n_emitted.len()], [n_old; 2], "the same slots");
        assert_eq!(old.drafts.len(), n_old * (width - 1), "drafts is [n_slots, width - 1]");
        let mut args = Args::new();
        args.view_mut(state.valid_len).view_mut(state.last_token).view_mut(state.n_drafts);
        args.view_mut(state.drafts).view_mut(state.n_wanted).view_mut(state.forced);
        args.view_mut(state.table).view(records).view(old.valid_len).view(old.last_token);
        args.view(old.n_emitted).view(old.drafts);
        args.i32(as_i32(n_slots)).i32(as_i32(n_old)).i32(as_i32(width));
        let launch = Launch::linear(as_u32(n_slots.div_ceil(128)), 128);
        // SAFETY: the lengths are checked above; sources are checked by the kernel.
        unsafe { stream.launch(&self.begin, launch, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_what_the_kernel_reads() {
        let mut record = vec![9; SlotRecord::len(4)];
        let slot = SlotRecord {
            source: None,
            table: 3,
            valid_len: 20,
            last_token: 7,
            n_drafts: 2,
            n_wanted: 3,
            forced: 1,
            drafts: &[11, 12],
        };
        slot.write(&mut record);
        assert_eq!(record, [-1, 3, 20, 7, 2, 3, 1, 11, 12, 0]);
        SlotRecord { source: Some(5), drafts: &[], ..slot }.write(&mut record);
        assert_eq!(record, [5, 3, 20, 7, 2, 3, 1, 0, 0, 0]);
        SlotRecord::write_empty(&mut record);
        assert_eq!(record[..2], [-1, -1]);
    }
}
