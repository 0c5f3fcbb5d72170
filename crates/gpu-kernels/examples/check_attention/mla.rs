//! Paged attention against its definition in f64.

use anyhow::{Result, ensure};
use gpu_kernels::{Mla, MlaBatch, MlaSizes, SelectedKeys, Splits};
use gpu_runtime::{Buffer, Stream};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::batch::{Batch, Elem, Seq, Uploaded, normal, parallel, poisoned, ragged, upload};

/// Few keys a part and few parts, so that contexts here have one part, several, and longer ones.
const SPLITS: Splits = Splits { window: 9, keys: 256, most: 8 };

#[derive(Clone)]
struct Case<E> {
    sizes: MlaSizes,
    batch: Batch,
    cache: Vec<E>,
    q_latent: Vec<E>,
    q_pe: Vec<E>,
    /// Positions of each row.
    selection: Option<(usize, Vec<Vec<i32>>)>,
}

pub(crate) fn check<E: Elem>(
    stream: &Stream,
    sizes: MlaSizes,
    topk: usize,
    is_quick: bool,
) -> Result<()> {
    let mla = Mla::<E>::new(stream.gpu(), sizes, SPLITS)?;
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let prefill = [
        Seq { n_computed: 0, n_query: 33, n_padding: 1 },
        Seq { n_computed: 700, n_query: 5, n_padding: 0 },
        // Not so many where the queries alone would take minutes to make.
        Seq { n_computed: 500, n_query: 32_768 / sizes.n_heads.max(16), n_padding: 0 },
        Seq { n_computed: 1500, n_query: 33, n_padding: 2 },
    ];
    let batches = [("windows", ragged(&mut rng, 12, 5000)), ("prefill", prefill.to_vec())];
    for (name, seqs) in batches.into_iter().take(if is_quick { 1 } else { 2 }) {
        for is_selected in [false, true] {
            let case = Case::<E>::new(&mut rng, sizes, &seqs, is_selected.then_some(topk));
            let first = case.run(&mla, stream, &case.batch, 0)?;
            for _ in 0..10 {
                let again = case.run(&mla, stream, &case.batch, 0)?;
                let differs = |&at: &usize| first[at] != again[at];
                let n = (0..first.len()).filter(differs).count();
                let at = (0..first.len()).find(differs).unwrap_or(0);
                let row = at / (sizes.n_heads * sizes.kv_lora_rank);
                let what = format!("{:?} and {:?}", first[at], again[at]);
                ensure!(n == 0, "two runs differ in {n} values, first in row {row}: {what}");
            }
            case.check_alone(&mla, stream, &first)?;
            let error = case.error(&first)?;
            let keys = if is_selected { "selected" } else { "all" };
            let MlaSizes { n_heads, kv_lora_rank, rope_dim, .. } = sizes;
            println!(
                "mla     {:4} {n_heads:3} heads {kv_lora_rank}+{rope_dim} {name:8} {keys:8} keys: \
                 error {error:.1e} of {:.1e}",
                E::NAME,
                E::TOLERANCE
            );
            ensure!(error < E::TOLERANCE, "the error is too large");
            if name == "windows" && !is_selected {
                case.check_absent_block(&mla, stream)?;
                case.check_later_nan(&mla, stream, &first)?;
            }
        }
    }
    check_all_selected::<E>(&mut rng, stream, &mla, topk)
}

/// A selection of all visible keys is dense attention.
fn check_all_selected<E: Elem>(
    rng: &mut ChaCha8Rng,
    stream: &Stream,
    mla: &Mla<E>,
    topk: usize,
) -> Result<()> {
    let sizes = mla.sizes();
    let seqs = ragged(rng, 9, topk - 16);
    let mut case = Case::<E>::new(rng, sizes, &seqs, None);
    let dense = case.clone();
    case.selection = Some((topk, case.batch.row_pos.iter().map(|&p| (0..=p).collect()).collect()));
    let error = dense.error(&case.run(mla, stream, &case.batch, 0)?)?;
    ensure!(error < E::TOLERANCE, "all keys selected differ from dense by {error:.1e}");
    Ok(())
}

impl<E: Elem> Case<E> {
    fn new(rng: &mut ChaCha8Rng, sizes: MlaSizes, seqs: &[Seq], topk: Option<usize>) -> Self {
        let batch = Batch::new(rng, seqs, 64);
        let (rank, rope) = (sizes.kv_lora_rank, sizes.rope_dim);
        let width = rank + rope;
        let cache = batch.cache::<E>(rng, width);
        let (mut q_latent, mut q_pe) = (Vec::new(), Vec::new());
        for row in 0..batch.n_rows() {
            // A query likes its own key and the one behind it, which it must not see.
            let pos = batch.row_pos[row];
            let near: Vec<usize> = match usize::try_from(batch.row_seq[row]) {
                Ok(seq) => (pos..(pos + 2).min(batch.kv_len[seq]))
                    .map(|pos| batch.slot(seq, pos as usize))
                    .collect(),
                Err(_) => Vec::new(),
            };
            for _ in 0..sizes.n_heads {
                for c in 0..width {
                    let liked: f32 = near.iter().map(|slot| cache[slot * width + c].f32()).sum();
                    let x = E::of(normal(rng) + 0.25 * liked);
                    if c < rank { q_latent.push(x) } else { q_pe.push(x) }
                }
            }
        }
        let selection = topk.map(|topk| {
            let choose = |&pos: &i32| {
                let n_visible = pos + 1;
                let most = rng.random_range(0..=topk as i32).min(n_visible);
                let mut left = most;
                let mut chosen = Vec::new();
                for key in 0..n_visible {
                    if rng.random_range(0..n_visible - key) < left {
                        chosen.push(key);
                        left -= 1;
                    }
                }
                chosen
            };
            (topk, batch.row_pos.iter().map(choose).collect())
        });
        Self { sizes, batch, cache, q_latent, q_pe, selection }
    }

    /// The output of `batch`, whose rows begin at `first_row` of the case's own.
    fn run(
        &self,
        mla: &Mla<E>,
        stream: &Stream,
        batch: &Batch,
        first_row: usize,
    ) -> Result<Vec<E>> {
        let gpu = stream.gpu();
        let MlaSizes { n_heads, kv_lora_rank, rope_dim, .. } = self.sizes;
        let n_rows = batch.n_rows();
        let uploaded = Uploaded::new(stream, batch)?;
        let part = |q: &[E], width: usize| {
            upload(stream, &q[first_row * n_heads * width..][..n_rows * n_heads * width])
        };
        let (q_latent, q_pe) = (part(&self.q_latent, kv_lora_rank)?, part(&self.q_pe, rope_dim)?);
        let cache = upload(stream, &self.cache)?;
        let selection = self.upload_selection(stream, first_row..first_row + n_rows)?;
        let max_kv_len = batch.max_kv_len();
        let max_len = self.selection.as_ref().map_or(max_kv_len, |&(topk, _)| topk);
        let n_scratch = mla.scratch_len(batch.kv_len.len(), max_len);
        let mut scratch = poisoned::<f32>(gpu, stream, n_scratch, 0xff)?;
        let mut out = poisoned::<E>(gpu, stream, n_rows * n_heads * kv_lora_rank, 0x7b)?;
        let batch = MlaBatch {
            q_latent: q_latent.view(),
            q_pe: q_pe.view(),
            cache: cache.view(),
            rows: uploaded.rows(),
            selection: selection.as_ref().map(|(indices, counts)| SelectedKeys {
                indices: indices.view(),
                counts: counts.view(),
            }),
            skipped: None,
            max_kv_len,
            max_split_len: batch.max_split_len(SPLITS.window),
            rows_per_seq: batch
                .seqs
                .iter()
                .map(|seq| seq.n_query + seq.n_padding)
                .max()
                .unwrap_or(1),
        };
        mla.attend(stream, &batch, scratch.view_mut(), out.view_mut())?;
        Ok(stream.download(&out)?)
    }

    fn upload_selection(
        &self,
        stream: &Stream,
        rows: std::ops::Range<usize>,
    ) -> Result<Option<(Buffer<i32>, Buffer<i32>)>> {
        let Some((topk, chosen)) = &self.selection else { return Ok(None) };
        // Behind what counts there is a position that nobody has.
        let mut indices = vec![i32::MAX; rows.len() * topk];
        for (row, chosen) in indices.chunks_exact_mut(*topk).zip(&chosen[rows.clone()]) {
            row[..chosen.len()].copy_from_slice(chosen);
        }
        let counts: Vec<i32> = chosen[rows].iter().map(|chosen| chosen.len() as i32).collect();
        Ok(Some((upload(stream, &indices)?, upload(stream, &counts)?)))
    }

    fn check_alone(&self, mla: &Mla<E>, stream: &Stream, all: &[E]) -> Result<()> {
        let width = self.sizes.n_heads * self.sizes.kv_lora_rank;
        for seq in 0..self.batch.seqs.len() {
            let rows = self.batch.rows_of(seq);
            let alone = self.run(mla, stream, &self.batch.alone(seq), rows.start)?;
            let same = alone == all[rows.start * width..rows.end * width];
            ensure!(same, "sequence {seq} alone differs from itself in the batch");
        }
        Ok(())
    }

    /// A latent that is no number reaches its own row, and none before it.
    fn check_later_nan(mut self, mla: &Mla<E>, stream: &Stream, clean: &[E]) -> Result<()> {
        let (sizes, batch) = (self.sizes, &self.batch);
        let width = sizes.kv_lora_rank + sizes.rope_dim;
        let mut ends = Vec::new();
        for (at, seq) in batch.seqs.iter().enumerate().filter(|(_, seq)| seq.n_query > 1) {
            let slot = batch.slot(at, seq.n_computed + seq.n_query - 1);
            self.cache[slot * width + sizes.kv_lora_rank / 2] = E::of(f32::NAN);
            ends.push(batch.row_start[at] as usize + seq.n_query - 1);
        }
        ensure!(!ends.is_empty(), "no sequence has two rows");
        let out = self.run(mla, stream, &self.batch, 0)?;
        let n = sizes.n_heads * sizes.kv_lora_rank;
        for (row, (got, clean)) in out.chunks_exact(n).zip(clean.chunks_exact(n)).enumerate() {
            let holds = match ends.contains(&row) {
                true => got.iter().all(|x| x.f32().is_nan()),
                false => got == clean,
            };
            ensure!(holds, "row {row}: a NaN of a later row came to it, or its own did not");
        }
        Ok(())
    }

    /// A block that a table lacks is one of zeros.
    fn check_absent_block(&self, mla: &Mla<E>, stream: &Stream) -> Result<()> {
        let mut lacking = self.batch.clone();
        let mut zeroed = self.clone();
        let n = self.batch.block_size * (self.sizes.kv_lora_rank + self.sizes.rope_dim);
        for (at, seq) in self.batch.seqs.iter().enumerate() {
            if seq.n_computed < 2 * self.batch.block_size {
                continue;
            }
            let entry = &mut lacking.tables[at * self.batch.stride + 1];
            zeroed.cache[*entry as usize * n..][..n].fill(E::of(0.0));
            *entry = -1;
        }
        ensure!(lacking.tables != self.batch.tables, "no sequence has two blocks");
        let same =
            self.run(mla, stream, &lacking, 0)? == zeroed.run(mla, stream, &self.batch, 0)?;
        ensure!(same, "a block that a table lacks is not zeros");
        Ok(())
    }

    /// The largest error, relative to the largest value of its row. Rows of long chunks are
    /// sampled.
    fn error(&self, out: &[E]) -> Result<f64> {
        let rank = self.sizes.kv_lora_rank;
        let errors = parallel(self.batch.n_rows(), |row| {
            let seq = self.batch.row_seq[row];
            let got = &out[row * self.sizes.n_heads * rank..][..self.sizes.n_heads * rank];
            if seq < 0 {
                let untouched = got.iter().all(|x| is_poison(*x));
                return if untouched { 0.0 } else { f64::INFINITY };
            }
            let n_query = self.batch.seqs[seq as usize].n_query;
            let in_seq = row - self.batch.row_start[seq as usize] as usize;
            if n_query > 64 && !in_seq.is_multiple_of(61) && in_seq + 1 != n_query {
                return 0.0;
            }
            let heads = got.chunks_exact(rank).enumerate();
            heads.map(|(head, got)| self.head_error(row, head, got)).fold(0.0, f64::max)
        });
        let worst = errors.into_iter().fold(0.0, f64::max);
        ensure!(worst.is_finite(), "a value is not a number, or padding was written");
        Ok(worst)
    }

    fn head_error(&self, row: usize, head: usize, got: &[E]) -> f64 {
        let MlaSizes { n_heads, kv_lora_rank: rank, rope_dim: rope, scale } = self.sizes;
        let (seq, pos) = (self.batch.row_seq[row] as usize, self.batch.row_pos[row]);
        let keys: Vec<i32> = match &self.selection {
            Some((_, chosen)) => chosen[row].clone(),
            None => (0..=pos).collect(),
        };
        let query = (row * n_heads + head, rank, rope);
        let q = self.q_latent[query.0 * rank..][..rank].iter();
        let q: Vec<f64> =
            q.chain(&self.q_pe[query.0 * rope..][..rope]).map(|x| f64::from(x.f32())).collect();
        let width = rank + rope;
        let key = |&pos: &i32| &self.cache[self.batch.slot(seq, pos as usize) * width..][..width];
        let dot = |k: &[E]| q.iter().zip(k).map(|(q, k)| q * f64::from(k.f32())).sum::<f64>();
        let scores: Vec<f64> = keys.iter().map(|pos| f64::from(scale) * dot(key(pos))).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut want = vec![0.0; rank];
        for (pos, weight) in keys.iter().zip(&weights) {
            for (want, c) in want.iter_mut().zip(key(pos)) {
                *want += weight / sum * f64::from(c.f32());
            }
        }
        let largest = want.iter().fold(1e-6, |most: f64, x| most.max(x.abs()));
        let error = got.iter().zip(&want).map(|(got, want)| (f64::from(got.f32()) - want).abs());
        // `f64::max` would lose a NaN.
        error.map(|e| if e.is_nan() { f64::INFINITY } else { e / largest }).fold(0.0, f64::max)
    }
}

/// Whether all bytes are still 0x7b.
pub(crate) fn is_poison<E: Elem>(x: E) -> bool {
    let wide = f32::from_bits(0x7b7b_7b7b);
    let narrow = f32::from_bits(0x7b7b_0000);
    x.f32() == if E::NAME == "f32" { wide } else { narrow }
}
