//! Many independent sequences of a toy target, generated with drafts or without.

use sampler::{Distribution, Purpose, SamplingParams, SamplingRow, TokenHistory, oracle};
use spec_decode::{AcceptedRuns, DraftProbs, SpecDecodeMetadata};
use tch::Tensor;

/// Elements of the logits of one call.
const N_ELEMENTS: usize = 1 << 18;

/// A model whose logits depend on the last token: row `t` of a table `[vocab, vocab]`.
pub(crate) struct Table {
    rows: Vec<Vec<f32>>,
    tensor: Tensor,
}

impl Table {
    pub(crate) fn new(rows: Vec<Vec<f32>>) -> Self {
        let tensor = Tensor::from_slice2(&rows);
        Self { rows, tensor }
    }

    pub(crate) fn vocab(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn row(&self, last: u32) -> &[f32] {
        &self.rows[last as usize]
    }

    /// Logits behind each of `last`, `[last.len(), vocab]`.
    pub(crate) fn logits(&self, last: &[i64]) -> Tensor {
        self.tensor.index_select(0, &Tensor::from_slice(last))
    }
}

/// Where drafts come from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Drafter<'a> {
    /// Nowhere: direct sampling.
    None,
    /// The most likely token of a table.
    Chosen(&'a Table),
    /// A draw from what the request's parameters leave of a table.
    Drawn(&'a Table),
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Table of {} tokens", self.vocab())
    }
}

pub(crate) struct Sequence {
    pub(crate) params: SamplingParams,
    pub(crate) history: TokenHistory,
}

impl Sequence {
    pub(crate) fn row<'a>(&'a self, drafts: &'a [u32]) -> SamplingRow<'a> {
        SamplingRow {
            params: &self.params,
            history: &self.history,
            drafts,
            position: (self.history.tokens().len() + drafts.len()) as u64,
            grammar_mask: None,
        }
    }

    pub(crate) fn last(&self, drafts: &[u32]) -> u32 {
        *drafts.last().or(self.history.tokens().last()).expect("a prompt is not empty")
    }
}

/// A verify step of some sequences with `k` drafts each.
pub(crate) struct Step<'a> {
    pub(crate) seqs: Vec<&'a Sequence>,
    pub(crate) drafts: Vec<Vec<u32>>,
    /// `[seqs * k, vocab]`, if the drafts were drawn.
    pub(crate) q: Option<Tensor>,
    pub(crate) target: &'a Table,
}

impl Step<'_> {
    fn propose<'a>(
        seqs: Vec<&'a Sequence>,
        target: &'a Table,
        drafter: Drafter<'_>,
        k: usize,
    ) -> Step<'a> {
        let mut drafts = vec![Vec::new(); seqs.len()];
        let (mut probs, n) = (Vec::new(), seqs.len() as i64);
        for _ in 0..k {
            let last: Vec<i64> =
                seqs.iter().zip(&drafts).map(|(seq, drafts)| i64::from(seq.last(drafts))).collect();
            let ids = match drafter {
                Drafter::None => break,
                Drafter::Chosen(table) => table.logits(&last).argmax(-1, false),
                Drafter::Drawn(table) => {
                    let rows: Vec<SamplingRow<'_>> =
                        seqs.iter().zip(&drafts).map(|(seq, drafts)| seq.row(drafts)).collect();
                    let q = Distribution::new(&table.logits(&last), &rows).unwrap();
                    probs.push(q.probs().shallow_clone());
                    q.sample(&rows, Purpose::Draft).unwrap()
                }
            };
            for (drafts, id) in drafts.iter_mut().zip(Vec::<i64>::try_from(ids).unwrap()) {
                drafts.push(u32::try_from(id).unwrap());
            }
        }
        let q = (!probs.is_empty())
            .then(|| Tensor::stack(&probs, 1).view([n * k as i64, target.vocab() as i64]));
        Step { seqs, drafts, q, target }
    }
}

/// The vectorised rejection sampler.
pub(crate) fn verify(step: &Step<'_>) -> Vec<Vec<u32>> {
    let mut metadata = SpecDecodeMetadata::default();
    let (mut rows, mut last) = (Vec::new(), Vec::new());
    for (seq, drafts) in step.seqs.iter().zip(&step.drafts) {
        metadata.push(rows.len()..rows.len() + drafts.len() + 1, drafts);
        for at in 0..=drafts.len() {
            rows.push(seq.row(&drafts[..at]));
            last.push(i64::from(seq.last(&drafts[..at])));
        }
    }
    let n_drafts = metadata.draft_token_ids().len() as u32;
    let q_rows: Vec<Option<u32>> = (0..n_drafts).map(Some).collect();
    let q = step.q.as_ref().map(|probs| DraftProbs { probs, rows: &q_rows });
    let mut runs = AcceptedRuns::default();
    runs.verify(&metadata, &step.target.logits(&last), &rows, q).unwrap();
    assert!((0..runs.n_seqs()).all(|seq| runs.fault(seq).is_none()));
    (0..runs.n_seqs()).map(|seq| runs.run(seq).to_vec()).collect()
}

/// A run of `n_tokens` tokens behind the prompt `[0]`.
pub(crate) struct Setting<'a> {
    pub(crate) target: &'a Table,
    pub(crate) params: &'a SamplingParams,
    pub(crate) n_tokens: usize,
}

impl Setting<'_> {
    /// Generates `n` sequences with seeds from `first_seed` on and up to `k` drafts a step.
    pub(crate) fn generate(
        &self,
        n: usize,
        first_seed: u64,
        (drafter, k): (Drafter<'_>, usize),
        verify: &dyn Fn(&Step<'_>) -> Vec<Vec<u32>>,
    ) -> Vec<Vec<u32>> {
        let mut all: Vec<Sequence> = (first_seed..first_seed + n as u64)
            .map(|seed| Sequence {
                params: SamplingParams { seed, ..self.params.clone() },
                history: TokenHistory::new(&[0]),
            })
            .collect();
        let n_at_once = (N_ELEMENTS / ((k + 1) * self.target.vocab())).max(1);
        for seqs in all.chunks_mut(n_at_once) {
            loop {
                let is_active = |seq: &&mut Sequence| seq.history.n_generated() < self.n_tokens;
                let mut active: Vec<&mut Sequence> = seqs.iter_mut().filter(is_active).collect();
                if active.is_empty() {
                    break;
                }
                let shared = active.iter().map(|seq| &**seq).collect();
                let runs = verify(&Step::propose(shared, self.target, drafter, k));
                for (seq, run) in active.iter_mut().zip(runs) {
                    let n_kept = run.len().min(self.n_tokens - seq.history.n_generated());
                    seq.history.extend(&run[..n_kept]);
                }
            }
        }
        all.iter().map(|seq| seq.history.tokens()[1..].to_vec()).collect()
    }

    /// Probability of every sequence, by the definition; the first token is the slowest digit.
    pub(crate) fn joint(&self) -> Vec<f64> {
        let mut joint = Vec::new();
        self.extend_joint(&TokenHistory::new(&[0]), 1.0, &mut joint);
        joint
    }

    fn extend_joint(&self, history: &TokenHistory, prob: f64, joint: &mut Vec<f64>) {
        if history.n_generated() == self.n_tokens {
            joint.push(prob);
            return;
        }
        let seq = Sequence { params: self.params.clone(), history: history.clone() };
        let p = oracle::distribution(self.target.row(seq.last(&[])), &seq.row(&[]));
        for (id, p) in (0..).zip(p) {
            let mut longer = history.clone();
            longer.extend(&[id]);
            self.extend_joint(&longer, prob * p, joint);
        }
    }
}
