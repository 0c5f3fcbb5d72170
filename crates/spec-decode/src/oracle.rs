//! Rejection sampling by its definition, one window and one token at a time in f64: what the
//! vectorised code is tested against.

use engine_types::TokenId;
use sampler::{Purpose, SamplingRow, oracle};

/// One row of a verify window.
#[derive(Clone, Copy, Debug)]
pub struct OracleRow<'a> {
    /// The target's logits, `[vocab]`.
    pub logits: &'a [f32],
    /// What they are sampled with; its drafts are those before it in the window.
    pub row: SamplingRow<'a>,
}

/// The accepted run of a window of `drafts.len() + 1` rows. `q[j]` is what draft `j` was drawn
/// from, `[vocab]`; none if it was chosen: then the run is the one without drafts.
///
/// # Panics
///
/// If the lengths do not match, or a row without a token is reached.
#[must_use]
pub fn verify(rows: &[OracleRow<'_>], drafts: &[TokenId], q: &[Option<&[f64]>]) -> Vec<TokenId> {
    assert_eq!(rows.len(), drafts.len() + 1, "one row for each draft, and one for the bonus token");
    assert_eq!(q.len(), drafts.len(), "one entry for each draft");
    let mut run = Vec::new();
    for ((OracleRow { logits, row }, &draft), q) in rows.iter().zip(drafts).zip(q) {
        let p = oracle::distribution(logits, row);
        let Some(q) = q else {
            // What would be chosen without drafts is the draft with probability `p(draft)`.
            let choice = oracle::choose(&p, row.uniform(Purpose::Sample));
            run.push(choice);
            if choice == draft {
                continue;
            }
            return run;
        };
        let id = draft as usize;
        if row.uniform(Purpose::Accept) * q[id] < p[id] {
            run.push(draft);
            continue;
        }
        let mut left: Vec<f64> = p.iter().zip(*q).map(|(p, q)| (p - q).max(0.0)).collect();
        if left.iter().all(|&weight| weight == 0.0) {
            left = p;
        }
        run.push(oracle::choose(&left, row.uniform(Purpose::Recover)));
        return run;
    }
    let OracleRow { logits, row } = &rows[drafts.len()];
    let bonus = oracle::distribution(logits, row);
    run.push(oracle::choose(&bonus, row.uniform(Purpose::Sample)));
    run
}
