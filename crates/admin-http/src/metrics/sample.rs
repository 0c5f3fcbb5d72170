//! One line for one value that is read when it is asked for.

use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;

/// The label of a series.
pub(crate) type Label = [(&'static str, String); 1];

/// Values read now, entered into a registry.
pub(crate) struct Sample<'a>(pub(crate) &'a mut Registry);

impl Sample<'_> {
    pub(crate) fn gauge(&mut self, name: &str, help: &str, value: impl Into<u64>) {
        self.0.register(name, help, ConstGauge::new(value.into()));
    }

    /// A gauge between 0 and 1; 0 where `of` is.
    pub(crate) fn ratio(&mut self, name: &str, help: &str, part: u32, of: u32) {
        let ratio = if of == 0 { 0.0 } else { f64::from(part) / f64::from(of) };
        self.0.register(name, help, ConstGauge::new(ratio));
    }

    /// A counter; `_total` is added to its name.
    pub(crate) fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.0.register(name, help, ConstCounter::new(value));
    }

    /// Counters that one label tells apart.
    pub(crate) fn counters(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (String, u64)>,
    ) {
        let family = Family::<Label, Counter>::default();
        for (of, value) in values {
            family.get_or_create(&[(label, of)]).inc_by(value);
        }
        self.0.register(name, help, family);
    }

    /// Gauges that one label tells apart.
    pub(crate) fn gauges(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'static str, i64)>,
    ) {
        let family = Family::<Label, Gauge>::default();
        for (of, value) in values {
            family.get_or_create(&[(label, of.to_owned())]).set(value);
        }
        self.0.register(name, help, family);
    }

    /// Facts, as the labels of a gauge that is always 1.
    pub(crate) fn facts(&mut self, name: &str, help: &str, facts: Vec<(&'static str, String)>) {
        let family = Family::<Vec<(&'static str, String)>, Gauge>::default();
        family.get_or_create(&facts).set(1);
        self.0.register(name, help, family);
    }
}

/// Counts by their places, as many as there are drafts a step.
pub(crate) fn by_position(counts: &[u64], n_positions: u32) -> Vec<(String, u64)> {
    let n_positions = (n_positions as usize).max(counts.len());
    (0..n_positions).map(|at| (at.to_string(), counts.get(at).copied().unwrap_or(0))).collect()
}
