//! Device memory and page-locked host memory.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::mem::{align_of, size_of};
use std::ops::{Bound, Deref, DerefMut, Range, RangeBounds};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use half::bf16;

use crate::driver::Handle;
use crate::error::invalid;
use crate::{Gpu, GpuError};

/// Plain data that a GPU may write: every pattern of bits is a value.
///
/// # Safety
///
/// The type has no padding, no invalid pattern of bits and no pointer.
pub unsafe trait Pod: Copy + Send + Sync + 'static {}

macro_rules! pod {
    ($($ty:ty)*) => { $(
        // SAFETY: a number of the machine, all of whose patterns are values.
        unsafe impl Pod for $ty {}
    )* };
}
pod!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 bf16);

/// What a captured graph keeps alive.
pub(crate) type Kept = Arc<dyn Any + Send + Sync>;

/// A block of device memory, freed with its last reference.
pub(crate) struct Allocation {
    gpu: Gpu,
    address: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Ok(driver) = self.gpu.enter() {
            // SAFETY: allocated in `alloc` and freed here alone; the driver waits for what runs.
            // A failure can only be that of an earlier launch, which its own caller hears of.
            let _ = unsafe { driver.mem_free(self.address) };
        }
    }
}

/// An address on the device. Whoever launches a kernel with it sees that its buffer lives.
pub struct Ptr<T>(u64, PhantomData<fn() -> T>);

impl<T> Ptr<T> {
    /// The null address, for an argument that a kernel takes as absent.
    pub const NULL: Self = Self(0, PhantomData);

    /// The number of the address.
    #[must_use]
    pub fn address(self) -> u64 {
        self.0
    }

    /// The address `n` elements further.
    #[must_use]
    pub fn offset(self, n: usize) -> Self {
        Self(self.0 + (n * size_of::<T>()) as u64, PhantomData)
    }
}

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Ptr<T> {}

impl<T> fmt::Debug for Ptr<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ptr({:#x})", self.0)
    }
}

/// `len` elements on the device.
///
/// Device memory is no memory of Rust's: launches on several streams may race for it, which yields
/// wrong numbers and nothing worse. It is freed when the buffer, and every graph that was captured
/// with it, is dropped; the driver then waits for what still runs.
pub struct Buffer<T> {
    memory: Arc<Allocation>,
    len: usize,
    _elements: PhantomData<T>,
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:#x}, {} elements)", self.memory.address, self.len)
    }
}

impl<T: Pod> Buffer<T> {
    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first element, aligned to at least 256 bytes.
    #[must_use]
    pub fn ptr(&self) -> Ptr<T> {
        Ptr(self.memory.address, PhantomData)
    }

    /// All elements.
    #[must_use]
    pub fn view(&self) -> View<'_, T> {
        self.into()
    }

    /// All elements, to be written.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        self.into()
    }

    /// A range of the elements.
    ///
    /// # Panics
    ///
    /// When the range does not lie in the buffer.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> View<'_, T> {
        self.view().slice(range)
    }

    /// A range of the elements, to be written.
    ///
    /// # Panics
    ///
    /// When the range does not lie in the buffer.
    #[must_use]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> ViewMut<'_, T> {
        self.view_mut().slice(range)
    }
}

/// The range in numbers, inside `0..len`.
fn resolve(range: &impl RangeBounds<usize>, len: usize) -> Range<usize> {
    let start = match range.start_bound() {
        Bound::Included(&at) => at,
        Bound::Excluded(&at) => at + 1,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&at) => at + 1,
        Bound::Excluded(&at) => at,
        Bound::Unbounded => len,
    };
    assert!(start <= end && end <= len, "range {start}..{end} of {len} elements");
    start..end
}

macro_rules! view {
    ($(#[$doc:meta])* $view:ident, $buffer:ty, $method:ident) => {
        $(#[$doc])*
        pub struct $view<'a, T> {
            memory: &'a Arc<Allocation>,
            address: u64,
            len: usize,
            _elements: PhantomData<$buffer>,
        }

        impl<T> fmt::Debug for $view<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($view), "({:#x}, {})"), self.address, self.len)
            }
        }

        impl<'a, T: Pod> From<$buffer> for $view<'a, T> {
            fn from(buffer: $buffer) -> Self {
                let Buffer { memory, len, .. } = buffer;
                Self { memory, address: memory.address, len: *len, _elements: PhantomData }
            }
        }

        impl<'a, T: Pod> $view<'a, T> {
            /// Elements.
            #[must_use]
            pub fn len(&self) -> usize {
                self.len
            }

            /// Whether there is no element.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// The address of the first element.
            #[must_use]
            pub fn ptr(&self) -> Ptr<T> {
                Ptr(self.address, PhantomData)
            }

            /// A range of the elements.
            ///
            /// # Panics
            ///
            /// When the range does not lie in the view.
            #[must_use]
            pub fn slice(self, range: impl RangeBounds<usize>) -> Self {
                let Range { start, end } = resolve(&range, self.len);
                let address = self.ptr().offset(start).0;
                Self { address, len: end - start, ..self }
            }

            /// The same bytes as elements of another type.
            ///
            /// # Panics
            ///
            /// When the bytes are no whole number of them, or are not aligned for them.
            #[must_use]
            pub fn cast<U: Pod>(self) -> $view<'a, U> {
                let bytes = self.len * size_of::<T>();
                assert!(bytes.is_multiple_of(size_of::<U>()), "{bytes} bytes are cast");
                assert!(self.address.is_multiple_of(align_of::<U>() as u64), "unaligned cast");
                let (memory, address) = (self.memory, self.address);
                let len = bytes / size_of::<U>();
                $view { memory, address, len, _elements: PhantomData }
            }

            pub(crate) fn memory(&self) -> &'a Arc<Allocation> {
                self.memory
            }
        }
    };
}

view!(
    /// Elements of a [`Buffer`], to be read.
    View, &'a Buffer<T>, view
);
view!(
    /// Elements of a [`Buffer`], to be written.
    ViewMut, &'a mut Buffer<T>, view_mut
);

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for View<'_, T> {}

impl<T: Pod> ViewMut<'_, T> {
    /// The same elements for a shorter while, so that `self` can be used again.
    #[must_use]
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { _elements: PhantomData, ..*self }
    }

    /// The same elements, to be read.
    #[must_use]
    pub fn as_view(&self) -> View<'_, T> {
        let Self { memory, address, len, .. } = *self;
        View { memory, address, len, _elements: PhantomData }
    }

    /// The elements before `at`, and the others.
    ///
    /// # Panics
    ///
    /// When `at` lies behind the end.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        let Range { start, end } = resolve(&(at..), self.len);
        let tail = self.ptr().offset(start).0;
        let Self { memory, address, .. } = self;
        let part = |address, len| Self { memory, address, len, _elements: PhantomData };
        (part(address, at), part(tail, end - start))
    }
}

/// Page-locked host memory, which copies to and from the device need to be asynchronous.
pub struct Pinned<T> {
    memory: Arc<HostAllocation>,
    len: usize,
    _elements: PhantomData<T>,
}

pub(crate) struct HostAllocation {
    gpu: Gpu,
    at: NonNull<u8>,
}

// SAFETY: it is memory that its owner alone hands out; the address is good on every thread.
unsafe impl Send for HostAllocation {}
// SAFETY: as for `Send`; access goes through `Pinned`, by the rules of slices.
unsafe impl Sync for HostAllocation {}

impl Drop for HostAllocation {
    fn drop(&mut self) {
        if let Ok(driver) = self.gpu.enter() {
            // SAFETY: nothing is asked of the caller. A copy that still runs must end first.
            let _ = unsafe { driver.ctx_synchronize() };
            // SAFETY: allocated in `pinned` and freed here alone.
            let _ = unsafe { driver.mem_free_host(self.at.as_ptr().cast()) };
        }
    }
}

impl<T> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} elements)", self.len)
    }
}

impl<T: Pod> Pinned<T> {
    pub(crate) fn memory(&self) -> &Arc<HostAllocation> {
        &self.memory
    }
}

impl<T: Pod> Deref for Pinned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements, zeroed when they were allocated, of a type without invalid
        // values; whoever lets the device write here promised that nobody reads meanwhile.
        unsafe { std::slice::from_raw_parts(self.memory.at.as_ptr().cast(), self.len) }
    }
}

impl<T: Pod> DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`; the memory has no other `Pinned`, and graphs that keep it alive
        // access it by the promises of their captured copies alone.
        unsafe { std::slice::from_raw_parts_mut(self.memory.at.as_ptr().cast(), self.len) }
    }
}

impl Gpu {
    /// `n` elements of device memory, not initialised: their values are any.
    ///
    /// # Errors
    ///
    /// [`GpuError::OutOfMemory`] with the sizes; any other failure of the driver.
    pub fn alloc<T: Pod>(&self, n: usize) -> Result<Buffer<T>, GpuError> {
        let bytes = byte_count::<T>(n)?;
        let driver = self.enter()?;
        let mut address = 0;
        // The driver refuses an empty block.
        // SAFETY: the address is written where it points.
        let outcome = unsafe { driver.mem_alloc(&mut address, bytes.max(1)) };
        driver.with_sizes(outcome, bytes)?;
        let memory = Arc::new(Allocation { gpu: self.clone(), address });
        Ok(Buffer { memory, len: n, _elements: PhantomData })
    }

    /// `n` elements of device memory whose bytes are zero.
    ///
    /// # Errors
    ///
    /// As [`Gpu::alloc`].
    pub fn alloc_zeroed<T: Pod>(&self, n: usize) -> Result<Buffer<T>, GpuError> {
        let buffer = self.alloc::<T>(n)?;
        if n > 0 {
            let driver = self.enter()?;
            let (address, bytes) = (buffer.memory.address, n * size_of::<T>());
            // SAFETY: the bytes are those of the new buffer; stream 0 exists always.
            unsafe { driver.memset_d8_async(address, 0, bytes, Handle::NULL) }?;
            // Our streams do not wait for stream 0.
            // SAFETY: stream 0 exists always.
            unsafe { driver.stream_synchronize(Handle::NULL) }?;
        }
        Ok(buffer)
    }

    /// `n` elements of page-locked host memory whose bytes are zero.
    ///
    /// # Errors
    ///
    /// [`GpuError::OutOfMemory`] when the host cannot lock so much; any other failure of the
    /// driver.
    pub fn pinned<T: Pod>(&self, n: usize) -> Result<Pinned<T>, GpuError> {
        let bytes = byte_count::<T>(n)?.max(1);
        let driver = self.enter()?;
        let mut at = ptr::null_mut();
        // SAFETY: the address is written where it points; no flag is set.
        let outcome = unsafe { driver.mem_host_alloc(&mut at, bytes, 0) };
        driver.with_sizes(outcome, bytes)?;
        let Some(at) = NonNull::new(at.cast::<u8>()) else {
            return invalid("the driver gave page-locked memory at address 0");
        };
        let memory = Arc::new(HostAllocation { gpu: self.clone(), at });
        // SAFETY: all `bytes` were just allocated, page-aligned.
        unsafe { at.write_bytes(0, bytes) };
        Ok(Pinned { memory, len: n, _elements: PhantomData })
    }
}

fn byte_count<T>(n: usize) -> Result<usize, GpuError> {
    n.checked_mul(size_of::<T>())
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .map_or_else(|| invalid(format!("{n} elements are more than memory can have")), Ok)
}
