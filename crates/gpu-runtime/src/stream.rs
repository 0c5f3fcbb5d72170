//! Streams, events, and copies in their order.

use std::ffi::c_uint;
use std::fmt;
use std::mem::size_of;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{Driver, Handle};
use crate::error::invalid;
use crate::memory::Kept;
use crate::{Args, Gpu, GpuError, Kernel, Launch, Pinned, Pod, View, ViewMut};

/// A queue of work on a device, done in order. A clone is the same queue.
///
/// It does not wait for the device's default stream, nor does that wait for it. It may be used from
/// several threads: the driver orders their calls somehow.
#[derive(Clone)]
pub struct Stream(pub(crate) Arc<Queue>);

pub(crate) struct Queue {
    pub(crate) gpu: Gpu,
    pub(crate) raw: Handle,
    /// What the graph that is being captured must keep alive; `None` outside a capture.
    capture: Mutex<Option<Vec<Kept>>>,
}

impl Queue {
    /// A panic leaves the list whole, so that a poisoned lock means nothing.
    pub(crate) fn capture(&self) -> MutexGuard<'_, Option<Vec<Kept>>> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if let Ok(driver) = self.gpu.enter() {
            // SAFETY: created in `Gpu::stream` and destroyed here alone; what is queued still runs.
            let _ = unsafe { driver.stream_destroy(self.raw) };
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.0.raw.0)
    }
}

/// A point in a stream's work, with its time.
pub struct Event(Arc<Point>);

struct Point {
    gpu: Gpu,
    raw: Handle,
    /// Recorded inside a capture, hence no point in time.
    captured: AtomicBool,
}

impl Drop for Point {
    fn drop(&mut self) {
        if let Ok(driver) = self.gpu.enter() {
            // SAFETY: created in `Gpu::event` and destroyed here alone.
            let _ = unsafe { driver.event_destroy(self.raw) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:?})", self.0.raw.0)
    }
}

impl Event {
    /// Waits until the stream has come to where the event was last recorded.
    ///
    /// # Errors
    ///
    /// A failure of the driver, which may be that of an earlier launch.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let driver = self.0.gpu.enter()?;
        // SAFETY: the event lives as long as `self`.
        unsafe { driver.event_synchronize(self.0.raw) }
    }
}

/// Milliseconds of device time from one event to another; waits for both.
///
/// # Errors
///
/// A failure of the driver, such as an event that was never recorded.
pub fn elapsed_ms(start: &Event, end: &Event) -> Result<f32, GpuError> {
    start.synchronize()?;
    end.synchronize()?;
    let driver = end.0.gpu.enter()?;
    let mut ms = 0.0;
    // SAFETY: both events live; the time is written where it points.
    unsafe { driver.event_elapsed_time(&mut ms, start.0.raw, end.0.raw) }?;
    Ok(ms)
}

impl Gpu {
    /// A new stream.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    pub fn stream(&self) -> Result<Stream, GpuError> {
        const NON_BLOCKING: c_uint = 1;
        let driver = self.enter()?;
        let mut raw = Handle::NULL;
        // SAFETY: the stream is written where it points.
        unsafe { driver.stream_create(&mut raw, NON_BLOCKING) }?;
        Ok(Stream(Arc::new(Queue { gpu: self.clone(), raw, capture: Mutex::new(None) })))
    }

    /// A new event, with a time.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    pub fn event(&self) -> Result<Event, GpuError> {
        let driver = self.enter()?;
        let mut raw = Handle::NULL;
        // SAFETY: the event is written where it points.
        unsafe { driver.event_create(&mut raw, 0) }?;
        let captured = AtomicBool::new(false);
        Ok(Event(Arc::new(Point { gpu: self.clone(), raw, captured })))
    }
}

impl Stream {
    /// The device of the stream.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    pub(crate) fn enter(&self) -> Result<&Driver, GpuError> {
        self.0.gpu.enter()
    }

    /// Hands what a captured operation uses to the graph that is being captured.
    pub(crate) fn keep<I: IntoIterator<Item = Kept>>(&self, used: impl FnOnce() -> I) {
        if let Some(kept) = self.0.capture().as_mut() {
            kept.extend(used());
        }
    }

    /// A call that waits for the device has no place in a graph.
    pub(crate) fn refuse_in_capture(&self, what: &str) -> Result<(), GpuError> {
        match *self.0.capture() {
            Some(_) => invalid(format!("{what} waits for the device: not inside a capture")),
            None => Ok(()),
        }
    }

    /// Copies to the device and waits for it.
    ///
    /// # Errors
    ///
    /// Different lengths, a capture in progress, a failure of the driver.
    pub fn upload<'a, T: Pod>(
        &self,
        from: &[T],
        to: impl Into<ViewMut<'a, T>>,
    ) -> Result<(), GpuError> {
        self.refuse_in_capture("upload")?;
        let to = to.into();
        same_len(from.len(), to.len())?;
        if from.is_empty() {
            return Ok(());
        }
        let (driver, address) = (self.enter()?, to.ptr().address());
        // SAFETY: both sides have these bytes, and `from` is borrowed until the copy is done.
        let queued = unsafe {
            driver.memcpy_htod_async(address, from.as_ptr().cast(), size_of_val(from), self.0.raw)
        };
        queued.and(self.synchronize())
    }

    /// Copies from the device and waits for it.
    ///
    /// # Errors
    ///
    /// A capture in progress, a failure of the driver.
    pub fn download<'a, T: Pod>(&self, from: impl Into<View<'a, T>>) -> Result<Vec<T>, GpuError> {
        self.refuse_in_capture("download")?;
        let from = from.into();
        let mut to = Vec::<T>::with_capacity(from.len());
        if !from.is_empty() {
            let (driver, address) = (self.enter()?, from.ptr().address());
            let bytes = from.len() * size_of::<T>();
            // SAFETY: both sides have these bytes, and `to` lives until the copy is done.
            let queued = unsafe {
                driver.memcpy_dtoh_async(to.as_mut_ptr().cast(), address, bytes, self.0.raw)
            };
            queued.and(self.synchronize())?;
        }
        // SAFETY: the copy wrote all elements, and every pattern of bits is one.
        unsafe { to.set_len(from.len()) };
        Ok(to)
    }

    /// Queues a copy of `to.len()` elements, from element `start` of `from` on, to the device.
    ///
    /// # Errors
    ///
    /// `from` ends too early; a failure of the driver.
    ///
    /// # Safety
    ///
    /// Nobody writes to the source, nor drops it, before the stream has done the copy; of a
    /// captured copy this holds for each replay (the graph keeps the memory alive).
    pub unsafe fn upload_async<'a, T: Pod>(
        &self,
        from: &Pinned<T>,
        start: usize,
        to: impl Into<ViewMut<'a, T>>,
    ) -> Result<(), GpuError> {
        let to = to.into();
        let Some(from_elements) = from.get(start..).and_then(|rest| rest.get(..to.len())) else {
            return invalid(format!("{} elements from {start} of {from:?}", to.len()));
        };
        if to.is_empty() {
            return Ok(());
        }
        let (at, bytes) = (from_elements.as_ptr().cast(), size_of_val(from_elements));
        // SAFETY: both sides have these bytes; the caller keeps the source as it is.
        unsafe { self.enter()?.memcpy_htod_async(to.ptr().address(), at, bytes, self.0.raw) }?;
        self.keep(|| [to.memory().clone() as Kept, from.memory().clone() as Kept]);
        Ok(())
    }

    /// Queues a copy of all of `from` to the host, from element `start` of `to` on.
    ///
    /// # Errors
    ///
    /// `to` ends too early; a failure of the driver.
    ///
    /// # Safety
    ///
    /// Nobody reads or writes the target, nor drops it, before the stream has done the copy; of a
    /// captured copy this holds for each replay (the graph keeps the memory alive).
    pub unsafe fn download_async<'a, T: Pod>(
        &self,
        from: impl Into<View<'a, T>>,
        to: &mut Pinned<T>,
        start: usize,
    ) -> Result<(), GpuError> {
        let from = from.into();
        let n = from.len();
        let memory = to.memory().clone() as Kept;
        let Some(to) = to.get_mut(start..).and_then(|rest| rest.get_mut(..n)) else {
            return invalid(format!("{n} elements do not fit behind element {start}"));
        };
        if to.is_empty() {
            return Ok(());
        }
        let (at, bytes) = (to.as_mut_ptr().cast(), size_of_val(to));
        // SAFETY: both sides have these bytes; the caller leaves the target alone.
        unsafe { self.enter()?.memcpy_dtoh_async(at, from.ptr().address(), bytes, self.0.raw) }?;
        self.keep(|| [from.memory().clone() as Kept, memory]);
        Ok(())
    }

    /// Queues a copy on the device.
    ///
    /// # Errors
    ///
    /// Different lengths, a failure of the driver.
    pub fn copy<'a, 'b, T: Pod>(
        &self,
        from: impl Into<View<'a, T>>,
        to: impl Into<ViewMut<'b, T>>,
    ) -> Result<(), GpuError> {
        let (from, to) = (from.into(), to.into());
        same_len(from.len(), to.len())?;
        if from.is_empty() {
            return Ok(());
        }
        let (source, target) = (from.ptr().address(), to.ptr().address());
        let bytes = from.len() * size_of::<T>();
        // SAFETY: both sides have these bytes; they are freed after the stream has used them.
        unsafe { self.enter()?.memcpy_dtod_async(target, source, bytes, self.0.raw) }?;
        self.keep(|| [from.memory().clone() as Kept, to.memory().clone() as Kept]);
        Ok(())
    }

    /// Queues that every byte of `to` becomes `value`.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    pub fn fill_bytes<'a, T: Pod>(
        &self,
        to: impl Into<ViewMut<'a, T>>,
        value: u8,
    ) -> Result<(), GpuError> {
        let to = to.into();
        if to.is_empty() {
            return Ok(());
        }
        let (address, bytes) = (to.ptr().address(), to.len() * size_of::<T>());
        // SAFETY: the bytes are those of the view; they are freed after the stream has used them.
        unsafe { self.enter()?.memset_d8_async(address, value, bytes, self.0.raw) }?;
        self.keep(|| [to.memory().clone() as Kept]);
        Ok(())
    }

    /// Marks this point of the stream's work.
    ///
    /// # Errors
    ///
    /// A failure of the driver.
    pub fn record(&self, event: &Event) -> Result<(), GpuError> {
        // SAFETY: both live.
        unsafe { self.enter()?.event_record(event.0.raw, self.0.raw) }?;
        event.0.captured.store(self.0.capture().is_some(), Ordering::Release);
        self.keep(|| [event.0.clone() as Kept]);
        Ok(())
    }

    /// What is queued from here on waits for the event.
    ///
    /// # Errors
    ///
    /// An event of a capture on another stream, which would draw this one into the capture; a
    /// failure of the driver.
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        if event.0.captured.load(Ordering::Acquire) && self.0.capture().is_none() {
            return invalid("the event belongs to a capture, which is of one stream");
        }
        // SAFETY: both live.
        unsafe { self.enter()?.stream_wait_event(self.0.raw, event.0.raw, 0) }?;
        self.keep(|| [event.0.clone() as Kept]);
        Ok(())
    }

    /// Waits until all queued work is done.
    ///
    /// # Errors
    ///
    /// A capture in progress; a failure of the driver, which may be that of an earlier launch.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.refuse_in_capture("synchronize")?;
        // SAFETY: the stream lives.
        unsafe { self.enter()?.stream_synchronize(self.0.raw) }
    }

    /// Queues a kernel.
    ///
    /// # Errors
    ///
    /// A kernel of another device; a failure of the driver, such as a grid that it does not take.
    ///
    /// # Safety
    ///
    /// The arguments have the kernel's types in their order, and with them the kernel reads and
    /// writes inside living buffers only. A graph that captures the launch keeps alive what was
    /// given as a view; what was given as a `Ptr` must outlive its replays.
    pub unsafe fn launch(
        &self,
        kernel: &Kernel,
        launch: Launch,
        args: &Args<'_>,
    ) -> Result<(), GpuError> {
        if !kernel.gpu().is(self.gpu()) {
            return invalid(format!("kernel {} is of another device", kernel.name()));
        }
        // SAFETY: the caller vouches for the arguments.
        unsafe { kernel.launch(self.enter()?, self.0.raw, launch, args) }?;
        self.keep(|| args.kept().chain([kernel.kept()]));
        Ok(())
    }
}

fn same_len(from: usize, to: usize) -> Result<(), GpuError> {
    if from == to { Ok(()) } else { invalid(format!("a copy of {from} elements to {to}")) }
}
