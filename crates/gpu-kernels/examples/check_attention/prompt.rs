//! Attention of prompt chunks over expanded keys against its definition in f64.

use std::ops::Range;

use anyhow::{Result, ensure};
use gpu_kernels::{KeyGroup, PromptAttention, PromptBatch, PromptSizes};
use gpu_runtime::Stream;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::batch::{Batch, Elem, Seq, Uploaded, normal, parallel, poisoned, upload};

const N_HEADS: usize = 3;
const NOPE: usize = 128;
const ROPE: usize = 64;
const VALUE: usize = 128;
/// Queries and rotary keys lie in wider rows.
const Q_STRIDE: usize = N_HEADS * (NOPE + ROPE) + 40;
const PE_STRIDE: usize = ROPE + 24;
const SCALE: f32 = 0.07;

struct Case<E> {
    batch: Batch,
    first_key: Vec<i32>,
    q: Vec<E>,
    q_pe: Vec<E>,
    expanded: Vec<E>,
    k_pe: Vec<E>,
}

pub(crate) fn check<E: Elem>(stream: &Stream) -> Result<()> {
    let sizes = PromptSizes {
        n_heads: N_HEADS,
        nope_dim: NOPE,
        rope_dim: ROPE,
        v_dim: VALUE,
        scale: SCALE,
    };
    let Some(attention) = PromptAttention::<E>::new(stream.gpu(), sizes)? else { return Ok(()) };
    let mut case = Case::<E>::new(&mut ChaCha8Rng::seed_from_u64(8));
    let all = 0..case.batch.seqs.len();
    let first = case.run(&attention, stream, all.clone())?;
    for _ in 0..20 {
        ensure!(first == case.run(&attention, stream, all.clone())?, "two runs differ");
    }
    let error = case.error(&first)?;
    println!(
        "prompt  {:4} {N_HEADS} heads {NOPE}+{ROPE}, {VALUE}: error {error:.1e} of {:.1e}",
        E::NAME,
        E::TOLERANCE
    );
    ensure!(error < E::TOLERANCE, "the error is too large");
    for seq in all.clone() {
        let rows = case.batch.rows_of(seq);
        let width = N_HEADS * VALUE;
        let alone = case.run(&attention, stream, seq..seq + 1)?;
        let same = alone == first[rows.start * width..rows.end * width];
        ensure!(same, "sequence {seq} alone differs from itself in the batch");
    }
    // A key and values that are no numbers reach their own row and those behind it alone.
    let (seq, row) = (1, 150);
    let pos = case.batch.row_pos[case.batch.row_start[seq] as usize + row] as usize;
    let width = N_HEADS * (NOPE + VALUE);
    let key = case.first_key[seq] as usize + pos;
    case.expanded[key * width..][..width].fill(E::of(f32::NAN));
    let broken = case.run(&attention, stream, all)?;
    let begin = (case.batch.row_start[seq] as usize + row) * N_HEADS * VALUE;
    let end = case.batch.rows_of(seq).end * N_HEADS * VALUE;
    let has_nan = broken[begin..end].iter().all(|x| x.f32().is_nan());
    let others = broken[..begin] == first[..begin] && broken[end..] == first[end..];
    ensure!(has_nan && others, "a key that is no number is seen by others, or not by its row");
    Ok(())
}

impl<E: Elem> Case<E> {
    fn new(rng: &mut ChaCha8Rng) -> Self {
        let seq = |n_computed, n_query, n_padding| Seq { n_computed, n_query, n_padding };
        // The third has its keys elsewhere.
        let seqs = [seq(0, 33, 1), seq(70, 300, 0), seq(9, 40, 3), seq(1000, 129, 0), seq(0, 1, 0)];
        let batch = Batch::new(rng, &seqs, 64);
        let mut first_key: Vec<i32> = vec![];
        let mut n_keys = 0;
        for (seq, &len) in batch.kv_len.iter().enumerate() {
            first_key.push(if seq == 2 { -1 } else { n_keys });
            n_keys += if seq == 2 { 0 } else { len };
        }
        let n_keys = n_keys as usize;
        let mut draw = |n: usize| (0..n).map(|_| E::of(normal(rng))).collect();
        Self {
            q: draw(batch.n_rows() * Q_STRIDE),
            q_pe: draw(batch.n_rows() * N_HEADS * ROPE),
            expanded: draw(n_keys * N_HEADS * (NOPE + VALUE)),
            k_pe: draw(n_keys * PE_STRIDE),
            batch,
            first_key,
        }
    }

    /// The output of some of the sequences.
    fn run(
        &self,
        attention: &PromptAttention<E>,
        stream: &Stream,
        seqs: Range<usize>,
    ) -> Result<Vec<E>> {
        let rows = self.batch.rows_of(seqs.start).start..self.batch.rows_of(seqs.end - 1).end;
        let part = |q: &[E], width| upload(stream, &q[rows.start * width..rows.end * width]);
        let (q, q_pe) = (part(&self.q, Q_STRIDE)?, part(&self.q_pe, N_HEADS * ROPE)?);
        let expanded = upload(stream, &self.expanded)?;
        let k_pe = upload(stream, &self.k_pe)?;
        let first_key = upload(stream, &self.first_key[seqs.clone()])?;
        // All but the third are of this group.
        let group_of: Vec<i32> = seqs.clone().map(|seq| if seq == 2 { -1 } else { 1 }).collect();
        let group_of = upload(stream, &group_of)?;
        let alone = if seqs.len() == 1 { self.batch.alone(seqs.start) } else { self.batch.clone() };
        let uploaded = Uploaded::new(stream, &alone)?;
        let n = rows.len() * N_HEADS * VALUE;
        let mut out = poisoned::<E>(stream.gpu(), stream, n, 0x7b)?;
        let batch = PromptBatch {
            q: q.view(),
            q_stride: Q_STRIDE,
            q_pe: q_pe.view(),
            expanded: expanded.view(),
            k_pe: k_pe.view(),
            k_pe_stride: PE_STRIDE,
            group: KeyGroup { group_of: group_of.view(), group: 1, first_key: first_key.view() },
            rows: uploaded.rows(),
        };
        attention.attend(stream, &batch, out.view_mut())?;
        Ok(stream.download(&out)?)
    }

    /// The largest error, relative to the largest value of its row and head.
    fn error(&self, out: &[E]) -> Result<f64> {
        let errors = parallel(self.batch.n_rows() * N_HEADS, |at| {
            let got = &out[at * VALUE..][..VALUE];
            let seq = self.batch.row_seq[at / N_HEADS];
            if seq < 0 || self.first_key[seq as usize] < 0 {
                let is_untouched = got.iter().all(|&x| crate::mla::is_poison(x));
                return if is_untouched { 0.0 } else { f64::INFINITY };
            }
            self.head_error(at / N_HEADS, at % N_HEADS, got)
        });
        let worst = errors.into_iter().fold(0.0, f64::max);
        ensure!(
            worst.is_finite(),
            "a value is not a number, or a row was written that is not here"
        );
        Ok(worst)
    }

    fn head_error(&self, row: usize, head: usize, got: &[E]) -> f64 {
        let first = self.first_key[self.batch.row_seq[row] as usize] as usize;
        let keys = first..first + self.batch.row_pos[row] as usize + 1;
        let f64s = |values: &[E]| values.iter().map(|x| f64::from(x.f32())).collect::<Vec<_>>();
        let q = f64s(&self.q[row * Q_STRIDE + head * (NOPE + ROPE)..][..NOPE]);
        let q_pe = f64s(&self.q_pe[(row * N_HEADS + head) * ROPE..][..ROPE]);
        let own = |key: usize| &self.expanded[(key * N_HEADS + head) * (NOPE + VALUE)..];
        let dot = |a: &[f64], b: &[E]| -> f64 {
            a.iter().zip(b).map(|(a, b)| a * f64::from(b.f32())).sum()
        };
        let score = |key: usize| {
            f64::from(SCALE)
                * (dot(&q, &own(key)[..NOPE]) + dot(&q_pe, &self.k_pe[key * PE_STRIDE..][..ROPE]))
        };
        let scores: Vec<f64> = keys.clone().map(score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut want = vec![0.0; VALUE];
        for (key, weight) in keys.zip(&weights) {
            for (want, v) in want.iter_mut().zip(&own(key)[NOPE..][..VALUE]) {
                *want += weight / sum * f64::from(v.f32());
            }
        }
        let largest = want.iter().fold(1e-6, |most: f64, x| most.max(x.abs()));
        let error = got.iter().zip(&want).map(|(got, want)| (f64::from(got.f32()) - want).abs());
        error.map(|e| if e.is_nan() { f64::INFINITY } else { e / largest }).fold(0.0, f64::max)
    }
}
