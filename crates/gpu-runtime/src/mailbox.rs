//! Host memory that goes to the device and comes back, while the host does something else.

use crate::{Event, Gpu, GpuError, Pinned, Pod, Stream, View, ViewMut};

/// Page-locked memory whose content is sent to the device.
///
/// What is sent is not touched before it has arrived: [`Outbox::fill`] waits for that.
#[derive(Debug)]
pub struct Outbox<T> {
    memory: Pinned<T>,
    sent: Event,
    is_on_its_way: bool,
}

/// Page-locked memory that results of the device come to.
#[derive(Debug)]
pub struct Inbox<T> {
    memory: Pinned<T>,
    arrived: Event,
    is_on_its_way: bool,
}

impl<T: Pod> Outbox<T> {
    /// Of `n` elements.
    ///
    /// # Errors
    ///
    /// No room; a failure of the driver.
    pub fn new(gpu: &Gpu, n: usize) -> Result<Self, GpuError> {
        Ok(Self { memory: gpu.pinned(n)?, sent: gpu.event()?, is_on_its_way: false })
    }

    /// The memory, to be written; waits until what was sent of it has arrived.
    ///
    /// # Errors
    ///
    /// A failure of the device.
    pub fn fill(&mut self) -> Result<&mut [T], GpuError> {
        if std::mem::take(&mut self.is_on_its_way) {
            self.sent.synchronize()?;
        }
        Ok(&mut self.memory)
    }

    /// Queues a copy of `to.len()` elements from element `start` on.
    ///
    /// # Errors
    ///
    /// The memory ends too early; a capture in progress, whose replays would read what is written
    /// meanwhile; a failure of the driver.
    pub fn send<'a>(
        &mut self,
        stream: &Stream,
        start: usize,
        to: impl Into<ViewMut<'a, T>>,
    ) -> Result<(), GpuError> {
        stream.refuse_in_capture("sending")?;
        self.is_on_its_way = true;
        // SAFETY: `fill` alone gives the memory away, after the event behind this copy.
        unsafe { stream.upload_async(&self.memory, start, to) }?;
        stream.record(&self.sent)
    }
}

impl<T: Pod> Inbox<T> {
    /// Of `n` elements.
    ///
    /// # Errors
    ///
    /// No room; a failure of the driver.
    pub fn new(gpu: &Gpu, n: usize) -> Result<Self, GpuError> {
        Ok(Self { memory: gpu.pinned(n)?, arrived: gpu.event()?, is_on_its_way: false })
    }

    /// Queues a copy of all of `from` to the beginning of the memory.
    ///
    /// # Errors
    ///
    /// `from` is longer than the memory; a capture in progress, whose replays would write what is
    /// read meanwhile; a failure of the driver.
    pub fn receive<'a>(
        &mut self,
        stream: &Stream,
        from: impl Into<View<'a, T>>,
    ) -> Result<(), GpuError> {
        stream.refuse_in_capture("receiving")?;
        self.is_on_its_way = true;
        // SAFETY: `read` alone shows the memory, after the event behind this copy.
        unsafe { stream.download_async(from, &mut self.memory, 0) }?;
        stream.record(&self.arrived)
    }

    /// What has come; waits for it.
    ///
    /// # Errors
    ///
    /// A failure of the device.
    pub fn read(&mut self) -> Result<&[T], GpuError> {
        if std::mem::take(&mut self.is_on_its_way) {
            self.arrived.synchronize()?;
        }
        Ok(&self.memory)
    }
}

impl<T> Drop for Outbox<T> {
    fn drop(&mut self) {
        // The memory must outlive a copy; a device that has failed copies nothing.
        let _ = if self.is_on_its_way { self.sent.synchronize() } else { Ok(()) };
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        // As for an outbox.
        let _ = if self.is_on_its_way { self.arrived.synchronize() } else { Ok(()) };
    }
}
