//! Rejection samplers with one fault each, as engines have shipped them.

use sampler::{Purpose, SamplingParams, oracle};

use crate::generation::{Sequence, Step};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bias {
    /// The control.
    None,
    /// A rejected draft may come back: the token in its place is drawn from p.
    KeepsRejected,
    /// A draft is accepted if it is the most likely token, else that one is emitted.
    Greedy,
    /// The target's distribution lacks `top_k`, `top_p` and `min_p`.
    SkipsTruncation,
    /// Drafts are not part of the history.
    ForgetsDrafts,
    /// One uniform number both accepts and recovers.
    ReusesNoise,
    /// A drawn draft is accepted with min(1, p/q), then replaced as if it had been chosen.
    WrongResidual,
    /// A draft is accepted with its probability relative to the most likely token's.
    Relaxed,
}

impl Bias {
    pub(crate) fn verify(self, step: &Step<'_>) -> Vec<Vec<u32>> {
        let q = step.q.as_ref().map(|q| Vec::<Vec<f64>>::try_from(q).unwrap());
        let mut n_before = 0;
        let windows = step.seqs.iter().zip(&step.drafts);
        windows
            .map(|(seq, drafts)| {
                let q = q.as_ref().map(|q| &q[n_before..n_before + drafts.len()]);
                n_before += drafts.len();
                self.verify_one(step, seq, drafts, q)
            })
            .collect()
    }

    fn verify_one(
        self,
        step: &Step<'_>,
        seq: &Sequence,
        drafts: &[u32],
        q: Option<&[Vec<f64>]>,
    ) -> Vec<u32> {
        let mut run = Vec::new();
        for (at, &draft) in drafts.iter().enumerate() {
            let (p, row) = (self.target(step, seq, &drafts[..at]), seq.row(&drafts[..at]));
            let id = draft as usize;
            let q_of = |of: usize| q.map_or(f64::from(u8::from(of == id)), |q| q[at][of]);
            let max = p.iter().copied().fold(0.0, f64::max);
            let accept = row.uniform(Purpose::Accept);
            let is_accepted = match self {
                Self::Greedy => p[id] == max,
                Self::Relaxed => accept * max < p[id],
                _ => accept * q_of(id) < p[id],
            };
            if is_accepted {
                run.push(draft);
                continue;
            }
            let recover =
                if self == Self::ReusesNoise { accept } else { row.uniform(Purpose::Recover) };
            let weight = |(of, &p): (usize, &f64)| match self {
                Self::KeepsRejected => p,
                Self::Greedy => f64::from(u8::from(p == max)),
                Self::WrongResidual => {
                    if of == id {
                        0.0
                    } else {
                        p
                    }
                }
                _ => (p - q_of(of)).max(0.0),
            };
            let weights: Vec<f64> = p.iter().enumerate().map(weight).collect();
            run.push(oracle::choose(&weights, recover));
            return run;
        }
        let p = self.target(step, seq, drafts);
        run.push(oracle::choose(&p, seq.row(drafts).uniform(Purpose::Sample)));
        run
    }

    /// The target's distribution behind `drafts`.
    fn target(self, step: &Step<'_>, seq: &Sequence, drafts: &[u32]) -> Vec<f64> {
        let untruncated = SamplingParams { top_k: 0, top_p: 1.0, min_p: 0.0, ..seq.params.clone() };
        let mut row = seq.row(drafts);
        match self {
            Self::SkipsTruncation => row.params = &untruncated,
            Self::ForgetsDrafts => row.drafts = &[],
            _ => {}
        }
        oracle::distribution(step.target.row(seq.last(drafts)), &row)
    }
}
