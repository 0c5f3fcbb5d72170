//! Two settings, interleaved: is one faster?

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF as _, StudentsT};

use super::{FIGURES, HEADLINE, N_REPEATS_MIN, Spread};
use crate::result::RunResult;

/// How often the interval of a ratio holds the true one: two settings that are the same are told
/// apart in 1 of 50 measurements.
pub const CONFIDENCE: f64 = 0.98;

/// The least difference that is told from noise. Two starts of the same program differ by as much:
/// memory is laid out anew, and pairs do not average that.
pub const EFFECT_MIN: f64 = 0.01;

/// What the pairs of one setting say.
///
/// Each pair's ratio is taken by itself, so that what changes slowly over a sitting drops out. The
/// logarithms of the ratios have a mean, and an interval by Student's t distribution.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbResult {
    /// The setting of the load.
    pub name: String,
    /// The server that the other is compared to.
    pub a: String,
    /// The other one.
    pub b: String,
    /// Each figure that all pairs have, and none of them as 0.
    pub rows: Vec<AbRow>,
    /// Whether the output throughputs differ by more than noise.
    pub is_above_noise: bool,
    /// That in a sentence, and another one where the machine was not quiet.
    pub sentence: String,
}

/// A figure over pairs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AbRow {
    /// What it is.
    pub figure: String,
    /// Its unit.
    pub unit: String,
    /// Of the one.
    pub a: Spread,
    /// Of the other.
    pub b: Spread,
    /// B's value over A's, by pair.
    pub ratios: Vec<f64>,
    /// The ratio: the geometric mean of theirs.
    pub ratio: f64,
    /// Interval that holds the true ratio with [`CONFIDENCE`]; unset for fewer than 3 pairs.
    pub interval: Option<(f64, f64)>,
    /// Whether the interval leaves out 1 and the ratio is at least [`EFFECT_MIN`] from it.
    pub is_above_noise: bool,
}

impl AbResult {
    /// What the runs of two servers say, for each setting with a pair: runs of the same repeat.
    #[must_use]
    pub fn of_runs(runs: &[RunResult], a: &str, b: &str) -> Vec<Self> {
        let mut names: Vec<&str> = vec![];
        for run in runs {
            if !names.contains(&run.name.as_str()) {
                names.push(&run.name);
            }
        }
        let of = |name| Self::of_pairs(name, (a, b), &pairs(runs, name, (a, b)));
        names.into_iter().filter_map(of).collect()
    }

    fn of_pairs(
        name: &str,
        (a, b): (&str, &str),
        pairs: &[(&RunResult, &RunResult)],
    ) -> Option<Self> {
        if pairs.is_empty() {
            return None;
        }
        let runs = || pairs.iter().flat_map(|(a, b)| [a, b]);
        let (mut rows, mut without) = (vec![], vec![]);
        for figure in &FIGURES {
            let values = pairs.iter().map(|(a, b)| Some(((figure.of)(a)?, (figure.of)(b)?)));
            let Some(values) = values.collect::<Option<Vec<_>>>() else { continue };
            match AbRow::of((figure.label, figure.unit), &values) {
                Some(row) => rows.push(row),
                None => without.push(figure.label),
            }
        }
        let headline = rows.iter().find(|row| row.figure == HEADLINE);
        let mut sentence = match headline {
            Some(row) => row.sentence((a, b)),
            None => nothing(runs()),
        };
        without.retain(|figure| *figure != HEADLINE);
        if !without.is_empty() {
            sentence += &format!(" A pair has 0, and so no ratio, of {}.", without.join(", "));
        }
        let n_disturbed = runs().filter(|run| run.machine.is_quiet == Some(false)).count();
        if n_disturbed > 0 {
            let n_runs = runs().count();
            sentence += &format!(" The machine was not quiet in {n_disturbed} of {n_runs} runs.");
        }
        Some(Self {
            name: name.to_owned(),
            a: a.to_owned(),
            b: b.to_owned(),
            is_above_noise: headline.is_some_and(|row| row.is_above_noise),
            sentence,
            rows,
        })
    }
}

/// Which of these runs have no output to take a ratio of.
fn nothing<'a>(runs: impl Iterator<Item = &'a &'a RunResult>) -> String {
    let is_nothing = |run: &&&RunResult| run.metrics.output_throughput <= 0.0;
    let text =
        |run: &&RunResult| format!("{} completed nothing in pair {}", run.server, run.repeat + 1);
    let texts: Vec<String> = runs.filter(is_nothing).map(text).collect();
    format!("{}: which is faster cannot be said.", texts.join(", "))
}

/// The runs of both servers that are of the same setting and repeat, and whole.
fn pairs<'a>(
    runs: &'a [RunResult],
    name: &str,
    (a, b): (&str, &str),
) -> Vec<(&'a RunResult, &'a RunResult)> {
    let of = |server: &str| -> Vec<&'a RunResult> {
        let is_of = |run: &&RunResult| run.name == name && run.server == server && !run.is_partial;
        runs.iter().filter(is_of).collect()
    };
    let (of_a, of_b) = (of(a), of(b));
    let partner = |run: &&'a RunResult| of_b.iter().find(|other| other.repeat == run.repeat);
    of_a.iter().filter_map(|run| Some((*run, *partner(run)?))).collect()
}

impl AbRow {
    /// Of the values of pairs; `None` if there is none, or a value has no ratio.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "few pairs")]
    pub fn of((figure, unit): (&str, &str), pairs: &[(f64, f64)]) -> Option<Self> {
        if pairs.iter().any(|(a, b)| *a <= 0.0 || *b <= 0.0) {
            return None;
        }
        let n = pairs.len() as f64;
        let logs: Vec<f64> = pairs.iter().map(|(a, b)| (b / a).ln()).collect();
        let mean = logs.iter().sum::<f64>() / n;
        let interval = (pairs.len() >= N_REPEATS_MIN).then(|| {
            let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / (n - 1.0);
            let t = StudentsT::new(0.0, 1.0, n - 1.0).expect("3 pairs have 2 degrees of freedom");
            let half = t.inverse_cdf(f64::midpoint(1.0, CONFIDENCE)) * (variance / n).sqrt();
            ((mean - half).exp(), (mean + half).exp())
        });
        let ratio = mean.exp();
        let leaves_out_1 = interval.is_some_and(|(low, high)| low > 1.0 || high < 1.0);
        Some(Self {
            figure: figure.to_owned(),
            unit: unit.to_owned(),
            a: Spread::of(pairs.iter().map(|(a, _)| *a))?,
            b: Spread::of(pairs.iter().map(|(_, b)| *b))?,
            ratios: pairs.iter().map(|(a, b)| b / a).collect(),
            ratio,
            interval,
            is_above_noise: leaves_out_1 && (ratio - 1.0).abs() >= EFFECT_MIN,
        })
    }

    fn sentence(&self, (a, b): (&str, &str)) -> String {
        let change = signed_percent(self.ratio);
        let figure = &self.figure;
        let Some((low, high)) = self.interval else {
            return format!(
                "{b} against {a}: {change} {figure}, of which {} cannot say whether it is noise; \
                 it takes {N_REPEATS_MIN}.",
                count(self.ratios.len())
            );
        };
        let of = format!(
            "{:.0} % interval {} to {}, {}",
            CONFIDENCE * 100.0,
            signed_percent(low),
            signed_percent(high),
            count(self.ratios.len())
        );
        if self.is_above_noise {
            let than = if self.ratio > 1.0 { "more" } else { "less" };
            let percent = (self.ratio - 1.0).abs() * 100.0;
            format!("{b} has {percent:.1} % {than} {figure} than {a}, above the noise ({of}).")
        } else {
            format!("Noise: {b} and {a} do not differ in {figure} ({change}; {of}).")
        }
    }
}

fn count(n_pairs: usize) -> String {
    if n_pairs == 1 { "1 pair".to_owned() } else { format!("{n_pairs} pairs") }
}

/// A ratio as a change, such as `+1.2 %`.
pub(crate) fn signed_percent(ratio: f64) -> String {
    format!("{:+.1} %", (ratio - 1.0) * 100.0)
}
