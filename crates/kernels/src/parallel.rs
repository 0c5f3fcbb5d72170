//! Spreading independent tasks over the current rayon pool.

use rayon::prelude::*;

/// The cost from which a call is spread over threads, in multiply-adds of a long product.
///
/// Two threads break even at about 40 microseconds: a call from outside the pool waits for a
/// worker to wake and then to be woken itself.
const PARALLEL_COST: usize = 1 << 22;

/// How many threads a call of some cost is spread over.
pub(crate) fn n_threads(cost: usize) -> usize {
    if cost >= PARALLEL_COST { rayon::current_num_threads() } else { 1 }
}

/// Calls `task` for every index below `n_tasks`, in parallel where there is more than one thread.
///
/// Tasks must be independent: their order and their threads are not defined.
pub(crate) fn for_each_task(n_tasks: usize, n_threads: usize, task: impl Fn(usize) + Sync) {
    if n_tasks > 1 && n_threads > 1 {
        // Tasks are few, coarse and uneven, so that each one may be stolen.
        (0..n_tasks).into_par_iter().with_max_len(1).for_each(&task);
    } else {
        (0..n_tasks).for_each(task);
    }
}

/// A mutable buffer that tasks write disjoint parts of.
pub(crate) struct Disjoint<'a, T> {
    ptr: *mut T,
    len: usize,
    marker: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer comes from an exclusive borrow that lives as long as this value, and the
// only access is `slice`, whose callers keep the parts disjoint: elements are sent, not shared.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(buffer: &'a mut [T]) -> Self {
        Self { ptr: buffer.as_mut_ptr(), len: buffer.len(), marker: std::marker::PhantomData }
    }

    /// The part of `len` elements at `start`.
    ///
    /// # Safety
    ///
    /// No two live slices may overlap.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the caller keeps the parts disjoint")]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "a part lies inside the buffer");
        // SAFETY: the part is in bounds, and the caller promises that it is not aliased.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }
}
