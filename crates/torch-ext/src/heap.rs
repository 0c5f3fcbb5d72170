//! The C library's heap while a model is loaded.

/// While it lives, memory of 256 KiB and more comes from the system and goes back to it at once.
///
/// glibc raises that threshold to 32 MiB by itself when large memory is freed. Loading holds each
/// tensor for a moment and its packed copy for good, and with a high threshold the ones leave gaps
/// between the others. Serving wants the high one: it needs the same sizes again and again. With
/// any other C library this does nothing.
#[derive(Debug)]
pub struct LoadingHeap(());

impl LoadingHeap {
    /// From here on, for the whole process.
    #[must_use]
    pub fn begin() -> Self {
        set_threshold(256 << 10);
        Self(())
    }
}

impl Drop for LoadingHeap {
    fn drop(&mut self) {
        // The highest that glibc goes to.
        set_threshold(32 << 20);
    }
}

#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "the C library's heap is set through a foreign function")]
fn set_threshold(n_bytes: i32) {
    // SAFETY: both parameters only change where later memory comes from; the call takes the heap's
    // own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, n_bytes);
        // Twice the threshold, as glibc keeps it.
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * n_bytes);
    }
}

#[cfg(not(target_env = "gnu"))]
fn set_threshold(_n_bytes: i32) {}
