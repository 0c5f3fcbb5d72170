//! What follows from samples over time.

use std::collections::VecDeque;

use crate::top::sample::Sample;

/// Speeds that are kept: more than a wide terminal shows.
const SPEEDS_MAX: usize = 512;

/// The last sample, and what follows from it and those before it.
#[derive(Debug, Default)]
pub struct History {
    last: Option<Sample>,
    rates: Option<Rates>,
    /// Generated tokens a second, the newest first.
    speeds: VecDeque<u64>,
    /// Why there is nothing newer than the last sample.
    fault: Option<String>,
}

/// What happened between the last two samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Prompt tokens that were taken, a second.
    pub prompt: f64,
    /// Generated tokens a second.
    pub generated: f64,
    /// Mean tokens a verify step; `None` where there was none.
    pub acceptance_length: Option<f64>,
}

impl History {
    /// Takes in what a server answered, or why it did not.
    pub fn push(&mut self, answer: Result<Sample, String>) {
        let sample = match answer {
            Ok(sample) => sample,
            Err(fault) => {
                self.rates = None;
                self.fault = Some(fault);
                return;
            }
        };
        self.fault = None;
        self.rates = self.last.as_ref().and_then(|last| Rates::between(last, &sample));
        if let Some(rates) = self.rates {
            self.speeds.push_front(rates.generated.round() as u64);
            self.speeds.truncate(SPEEDS_MAX);
        } else {
            // Another server, or the same one started anew.
            self.speeds.clear();
        }
        self.last = Some(sample);
    }

    /// The last sample.
    #[must_use]
    pub fn last(&self) -> Option<&Sample> {
        self.last.as_ref()
    }

    /// What happened since the one before it.
    #[must_use]
    pub fn rates(&self) -> Option<Rates> {
        self.rates
    }

    /// Generated tokens a second, the newest first.
    pub(crate) fn speeds(&self) -> Vec<u64> {
        self.speeds.iter().copied().collect()
    }

    /// Why there is nothing newer than the last sample.
    #[must_use]
    pub fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }
}

impl Rates {
    /// `None` where totals fell, as they do when a server starts anew.
    fn between(old: &Sample, new: &Sample) -> Option<Self> {
        let seconds = (new.at - old.at).as_secs_f64();
        let (before, after) = (&old.stats, &new.stats);
        let rate = |before: u64, after: u64| Some(after.checked_sub(before)? as f64 / seconds);
        let prompt = rate(before.prompt_tokens, after.prompt_tokens)?;
        let generated = rate(before.completion_tokens, after.completion_tokens)?;
        let (before, after) = (old.speculation(), new.speculation());
        let steps = after.verify_steps.checked_sub(before.verify_steps)?;
        let accepted = after.accepted_tokens.checked_sub(before.accepted_tokens)?;
        let acceptance_length = (steps > 0).then(|| 1.0 + accepted as f64 / steps as f64);
        (seconds > 0.0).then_some(Self { prompt, generated, acceptance_length })
    }
}
