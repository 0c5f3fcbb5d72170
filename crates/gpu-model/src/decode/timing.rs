//! The parts of a decode step, and how long each takes on the device.

use gpu_runtime::{Event, Gpu, GpuError, Stream, elapsed_ms};

use super::IN_FLIGHT;

/// A part of a decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPart {
    /// State and block tables of the slots.
    Begin,
    /// The target's pass over all windows, up to its logits.
    Verify,
    /// The target's choices, and what they accept.
    Sample,
    /// A draft pass with its choice.
    Draft(usize),
    /// Where the slots are behind the step.
    Advance,
}

impl StepPart {
    /// The parts of a step with `n_drafts` drafts, in their order.
    #[must_use]
    pub fn all(n_drafts: usize) -> Vec<Self> {
        let drafts = (0..n_drafts).map(Self::Draft);
        [Self::Begin, Self::Verify, Self::Sample]
            .into_iter()
            .chain(drafts)
            .chain([Self::Advance])
            .collect()
    }
}

/// Milliseconds of a step on the device, one behind the other.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTimes {
    /// From the end of the step before; `None` for the first one.
    pub gap: Option<f32>,
    /// Of the slots and tables, to the device.
    pub upload: f32,
    /// Of each [`StepPart`], or of all of them together in one graph.
    pub parts: Vec<f32>,
    /// Of the result, to the host.
    pub download: f32,
}

/// Events between the parts of steps: of those in flight and of the one before them.
pub(super) struct Marks {
    steps: [Vec<Event>; IN_FLIGHT + 1],
}

impl Marks {
    /// For steps of up to `n_parts` parts.
    pub(super) fn new(gpu: &Gpu, n_parts: usize) -> Result<Self, GpuError> {
        let step = || (0..n_parts + 3).map(|_| gpu.event()).collect::<Result<Vec<_>, _>>();
        Ok(Self { steps: [step()?, step()?, step()?] })
    }

    /// Notes that step `step` has come to the end of its place `place`.
    pub(super) fn set(&self, stream: &Stream, step: usize, place: usize) -> Result<(), GpuError> {
        stream.record(&self.of(step)[place])
    }

    fn of(&self, step: usize) -> &[Event] {
        &self.steps[step % self.steps.len()]
    }

    /// The times of a step of `n_parts` parts that has ended.
    pub(super) fn times(&self, step: usize, n_parts: usize) -> Result<StepTimes, GpuError> {
        let events = &self.of(step)[..n_parts + 3];
        let times = events.windows(2).map(|pair| elapsed_ms(&pair[0], &pair[1]));
        let times = times.collect::<Result<Vec<_>, _>>()?;
        let before = step.checked_sub(1).map(|before| &self.of(before)[n_parts + 2]);
        Ok(StepTimes {
            gap: before.map(|end| elapsed_ms(end, &events[0])).transpose()?,
            upload: times[0],
            parts: times[1..=n_parts].to_vec(),
            download: times[n_parts + 1],
        })
    }
}
