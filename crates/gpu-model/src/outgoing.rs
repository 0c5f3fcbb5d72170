//! What the host tells passes: it is on its way while the host goes on.

use gpu_runtime::{Gpu, GpuError, Outbox, Stream, ViewMut};

/// Messages that may be on their way: those of two steps, each with a pass of the target and one of
/// an MTP layer.
const N_BOXES: usize = 8;

/// Page-locked memory that is used in turns.
#[derive(Debug)]
pub(crate) struct Outgoing {
    boxes: Vec<Outbox<i32>>,
    n_sent: usize,
}

impl Outgoing {
    /// For messages of up to `n` integers; a longer one takes more memory first.
    pub(crate) fn new(gpu: &Gpu, n: usize) -> Result<Self, GpuError> {
        let boxes = (0..N_BOXES).map(|_| Outbox::new(gpu, n)).collect::<Result<_, _>>()?;
        Ok(Self { boxes, n_sent: 0 })
    }

    /// Queues copies of arrays to the device, as one message; waits until the message [`N_BOXES`]
    /// before it has arrived.
    pub(crate) fn send(
        &mut self,
        stream: &Stream,
        parts: &mut [(&[i32], ViewMut<'_, i32>)],
    ) -> Result<(), GpuError> {
        let outbox = &mut self.boxes[self.n_sent % N_BOXES];
        self.n_sent += 1;
        let n: usize = parts.iter().map(|(from, _)| from.len()).sum();
        if outbox.fill()?.len() < n {
            *outbox = Outbox::new(stream.gpu(), n.next_power_of_two())?;
        }
        let mut rest = outbox.fill()?;
        for (from, _) in parts.iter() {
            let (part, behind) = rest.split_at_mut(from.len());
            part.copy_from_slice(from);
            rest = behind;
        }
        let mut start = 0;
        for (from, to) in parts {
            outbox.send(stream, start, to.reborrow())?;
            start += from.len();
        }
        Ok(())
    }
}
