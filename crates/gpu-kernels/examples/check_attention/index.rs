//! The indexer: exact selections where scores are exact, near ones elsewhere, and gathering.

use anyhow::{Result, ensure};
use gpu_kernels::{IndexBatch, IndexSizes, Indexer, SelectedKeys, SelectionMut};
use gpu_runtime::Stream;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::batch::{Batch, Elem, Seq, Uploaded, normal, parallel, poisoned, ragged, upload};

struct Case<E> {
    sizes: IndexSizes,
    batch: Batch,
    cache: Vec<E>,
    q: Vec<E>,
    weights: Vec<f32>,
}

/// Positions and counts, as they come from the device.
type Selected = (Vec<i32>, Vec<i32>);
/// The bits of the scores of the last rows that were scored at once, `[rows, max_kv_len]`.
type ScoreBits = Vec<u32>;

pub(crate) fn check<E: Elem>(stream: &Stream, sizes: IndexSizes) -> Result<()> {
    let indexer = Indexer::<E>::new(stream.gpu(), sizes)?;
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut windows = ragged(&mut rng, 14, 5000);
    // Rows on both sides of topk.
    windows.push(Seq { n_computed: sizes.topk - 4, n_query: 9, n_padding: 0 });
    let chunk = [
        Seq { n_computed: 30, n_query: 2048, n_padding: 1 },
        Seq { n_computed: 2500, n_query: 3, n_padding: 0 },
        Seq { n_computed: 2100, n_query: 33, n_padding: 0 },
    ];
    for (name, seqs) in [("windows", windows), ("prefill", chunk.to_vec())] {
        for is_exact in [true, false] {
            let case = Case::<E>::new(&mut rng, sizes, &seqs, is_exact);
            let n_rows = case.batch.n_rows();
            let (first, scores) = case.run(&indexer, stream, &case.batch, (0, n_rows))?;
            let (again, _) = case.run(&indexer, stream, &case.batch, (0, 7))?;
            ensure!(first == again, "another size of the scratch changes the selection");
            case.check_alone(&indexer, stream, &first, &scores)?;
            let slack = case.check(&first, is_exact)?;
            let IndexSizes { n_heads, head_dim, topk } = sizes;
            let kind = if is_exact { "exact, with ties and NaN" } else { "random" };
            let (sizes, element) = (format!("{n_heads:3} x {head_dim} top {topk}"), E::NAME);
            println!("indexer {element:4} {sizes} {name:8} {kind}: slack {slack:.1e}");
            case.check_count(&indexer, stream)?;
            case.check_gather(&indexer, stream, &mut rng, &first)?;
        }
    }
    Ok(())
}

impl<E: Elem> Case<E> {
    /// Exact scores are small whole numbers of one head a row, and some keys are NaN.
    fn new(rng: &mut ChaCha8Rng, sizes: IndexSizes, seqs: &[Seq], is_exact: bool) -> Self {
        let IndexSizes { n_heads, head_dim, .. } = sizes;
        let batch = Batch::new(rng, seqs, 64);
        let mut cache = batch.cache::<E>(rng, head_dim);
        let n_q = batch.n_rows() * n_heads;
        let mut q: Vec<E> = (0..n_q * head_dim).map(|_| E::of(normal(rng))).collect();
        let mut weights: Vec<f32> = (0..n_q).map(|_| normal(rng)).collect();
        if is_exact {
            for x in cache.iter_mut().filter(|x| !x.f32().is_nan()) {
                *x = E::of(x.f32().round().clamp(-1.0, 1.0));
            }
            q.iter_mut().for_each(|x| *x = E::of(x.f32().round()));
            for weights in weights.chunks_exact_mut(n_heads) {
                weights.fill(0.0);
                weights[rng.random_range(0..n_heads)] = [0.5, 2.0, -1.0][rng.random_range(0..3)];
            }
            for (seq, &len) in batch.kv_len.iter().enumerate() {
                for _ in 0..len / 100 {
                    let slot = batch.slot(seq, rng.random_range(0..len) as usize);
                    cache[slot * head_dim] = E::of(f32::NAN);
                }
            }
        }
        Self { sizes, batch, cache, q, weights }
    }

    /// The selection of `batch`, whose rows begin at `first_row` of the case's own.
    fn run(
        &self,
        indexer: &Indexer<E>,
        stream: &Stream,
        batch: &Batch,
        (first_row, rows_at_once): (usize, usize),
    ) -> Result<(Selected, ScoreBits)> {
        let (gpu, n_rows) = (stream.gpu(), batch.n_rows());
        let IndexSizes { n_heads, head_dim, topk } = self.sizes;
        let uploaded = Uploaded::new(stream, batch)?;
        let width = n_heads * head_dim;
        let q = upload(stream, &self.q[first_row * width..][..n_rows * width])?;
        let weights = upload(stream, &self.weights[first_row * n_heads..][..n_rows * n_heads])?;
        let cache = upload(stream, &self.cache)?;
        let max_kv_len = batch.max_kv_len();
        let n_scratch = Indexer::<E>::scratch_len(rows_at_once, max_kv_len);
        let mut scratch = poisoned::<f32>(gpu, stream, n_scratch, 0xff)?;
        let mut indices = poisoned::<i32>(gpu, stream, n_rows * topk, 0x7b)?;
        let mut counts = poisoned::<i32>(gpu, stream, n_rows, 0x7b)?;
        let batch = IndexBatch {
            q: q.view(),
            weights: weights.view(),
            cache: cache.view(),
            rows: uploaded.rows(),
            max_kv_len,
        };
        let out = SelectionMut { indices: indices.view_mut(), counts: counts.view_mut() };
        indexer.select(stream, &batch, scratch.view_mut(), out)?;
        let scores = stream.download(&scratch)?.into_iter().map(f32::to_bits).collect();
        Ok(((stream.download(&indices)?, stream.download(&counts)?), scores))
    }

    fn check_alone(
        &self,
        indexer: &Indexer<E>,
        stream: &Stream,
        all: &Selected,
        scores: &ScoreBits,
    ) -> Result<()> {
        let topk = self.sizes.topk;
        for seq in 0..self.batch.seqs.len() {
            let rows = self.batch.rows_of(seq);
            let alone = self.batch.alone(seq);
            let at_once = (rows.start, rows.len());
            let ((indices, counts), own) = self.run(indexer, stream, &alone, at_once)?;
            let (stride, own_stride) = (self.batch.max_kv_len(), alone.max_kv_len());
            for (i, row) in rows.clone().enumerate() {
                let n = (self.batch.row_pos[row] + 1) as usize;
                let n_scored = if n > topk { n } else { 0 };
                let same = scores[row * stride..][..n_scored] == own[i * own_stride..][..n_scored];
                ensure!(same, "row {row} scores otherwise where its sequence is alone");
            }
            let same = indices == all.0[rows.start * topk..rows.end * topk];
            ensure!(same && counts == all.1[rows], "sequence {seq} alone selects otherwise");
        }
        Ok(())
    }

    /// How far a selected score lies below one that was left out, in units of the largest score.
    fn check(&self, (indices, counts): &Selected, is_exact: bool) -> Result<f64> {
        let topk = self.sizes.topk;
        let slacks = parallel(self.batch.n_rows(), |row| {
            self.check_row(row, &indices[row * topk..][..topk], counts[row], is_exact)
        });
        let mut worst: f64 = 0.0;
        for (row, slack) in slacks.into_iter().enumerate() {
            worst = worst.max(slack.map_err(|error| error.context(format!("row {row}")))?);
        }
        ensure!(worst < 1e-5, "a selected score lies {worst:e} below one that was left out");
        Ok(worst)
    }

    fn check_row(&self, row: usize, indices: &[i32], count: i32, is_exact: bool) -> Result<f64> {
        const POISON: i32 = 0x7b7b_7b7b;
        if self.batch.row_seq[row] < 0 {
            let untouched = count == POISON && indices.iter().all(|&index| index == POISON);
            ensure!(untouched, "padding was written");
            return Ok(0.0);
        }
        let n_visible = self.batch.row_pos[row] as usize + 1;
        let n = n_visible.min(indices.len());
        ensure!(count == n as i32, "{count} keys of {n_visible} are selected");
        let (chosen, rest) = indices.split_at(n);
        ensure!(rest.iter().all(|&index| index == -1), "-1 is behind the selection");
        ensure!(chosen.windows(2).all(|pair| pair[0] < pair[1]), "positions do not ascend");
        let visible = chosen.iter().all(|&key| key >= 0 && (key as usize) < n_visible);
        ensure!(visible, "a position is not visible");
        if n == n_visible {
            return Ok(0.0);
        }
        let scores: Vec<f64> = (0..n_visible).map(|key| self.score(row, key)).collect();
        if is_exact {
            let mut order: Vec<usize> = (0..n_visible).collect();
            let rank =
                |key: usize| if scores[key].is_nan() { f64::NEG_INFINITY } else { scores[key] };
            order.sort_by(|&a, &b| rank(b).total_cmp(&rank(a)).then(a.cmp(&b)));
            order.truncate(n);
            order.sort_unstable();
            let same = chosen.iter().zip(&order).all(|(&got, &want)| got as usize == want);
            ensure!(same, "the selection is not the definition's");
            return Ok(0.0);
        }
        let mut is_chosen = vec![false; n_visible];
        chosen.iter().for_each(|&key| is_chosen[key as usize] = true);
        let of = |wanted: bool| {
            let all = scores.iter().zip(&is_chosen);
            all.filter(move |&(_, &is)| is == wanted).map(|(&score, _)| score)
        };
        let worst_in = of(true).fold(f64::INFINITY, f64::min);
        let best_out = of(false).fold(f64::NEG_INFINITY, f64::max);
        let largest = scores.iter().fold(0.0, |most: f64, score| most.max(score.abs()));
        Ok(((best_out - worst_in) / largest).max(0.0))
    }

    fn score(&self, row: usize, key: usize) -> f64 {
        let IndexSizes { n_heads, head_dim, .. } = self.sizes;
        let slot = self.batch.slot(self.batch.row_seq[row] as usize, key);
        let k = &self.cache[slot * head_dim..][..head_dim];
        let scale = (head_dim as f64).powf(-0.5);
        let head = |head: usize| {
            let q = &self.q[(row * n_heads + head) * head_dim..][..head_dim];
            let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(q.f32() * k.f32())).sum();
            // A NaN stays one.
            let relu = if dot < 0.0 { 0.0 } else { dot };
            f64::from(self.weights[row * n_heads + head]) * scale * relu
        };
        // Both zeros are one score.
        (0..n_heads).map(head).sum::<f64>() + 0.0
    }

    fn check_count(&self, indexer: &Indexer<E>, stream: &Stream) -> Result<()> {
        let uploaded = Uploaded::new(stream, &self.batch)?;
        let mut counter = poisoned::<u64>(stream.gpu(), stream, 1, 0x7b)?;
        indexer.count_scored(stream, &uploaded.rows(), counter.view_mut())?;
        let rows = self.batch.row_pos.iter().map(|&pos| (pos + 1) as u64);
        let want: u64 = rows.filter(|&n| n > self.sizes.topk as u64).sum();
        ensure!(stream.download(&counter)? == [want], "the number of scored keys");
        Ok(())
    }

    fn check_gather(
        &self,
        indexer: &Indexer<E>,
        stream: &Stream,
        rng: &mut ChaCha8Rng,
        (indices, counts): &Selected,
    ) -> Result<()> {
        let topk = self.sizes.topk;
        let real = |row: &i32| *row < 0 || self.batch.row_seq[*row as usize] >= 0;
        let all = (0..20).map(|_| rng.random_range(-1..counts.len() as i32));
        let rows: Vec<i32> = all.filter(real).chain([-1]).collect();
        let mut to = (
            poisoned::<i32>(stream.gpu(), stream, rows.len() * topk, 0x7b)?,
            poisoned::<i32>(stream.gpu(), stream, rows.len(), 0x7b)?,
        );
        let from = (upload(stream, indices)?, upload(stream, counts)?);
        let from = SelectedKeys { indices: from.0.view(), counts: from.1.view() };
        let out = SelectionMut { indices: to.0.view_mut(), counts: to.1.view_mut() };
        indexer.gather(stream, from, upload(stream, &rows)?.view(), out)?;
        let got = (stream.download(&to.0)?, stream.download(&to.1)?);
        for (at, &row) in rows.iter().enumerate() {
            let (mut want, mut n) = (vec![-1; topk], 0);
            if row >= 0 {
                let row = row as usize;
                (want, n) = (indices[row * topk..][..topk].to_vec(), counts[row]);
            }
            let same = got.0[at * topk..][..topk] == want && got.1[at] == n;
            ensure!(same, "row {row} was not gathered");
        }
        Ok(())
    }
}
