//! Grouped-query attention: the same suite for every backend.

use super::*;

const N_KV_HEADS: i64 = 2;
const N_QUERY_HEADS: i64 = 6;
const HEAD_DIM: i64 = 20;

/// A sequence's queries, keys and values by position, `[len, H, head_dim]` each.
struct Tokens {
    blocks: Vec<u32>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

/// Some sequences over one cache full of NaN. Their blocks interleave and are not in order.
struct Grouped {
    sequences: Vec<Tokens>,
    block_size: u32,
    cache: Tensor,
}

impl Grouped {
    fn new(lens: &[i64], block_size: u32, kind: Kind) -> Self {
        tch::manual_seed(11);
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let n_seqs = u32::try_from(lens.len()).unwrap();
        let longest = u32::try_from(*lens.iter().max().unwrap()).unwrap();
        let n_blocks = longest.div_ceil(block_size);
        let tokens = |(seq, &len): (u32, &i64)| Tokens {
            blocks: (0..n_blocks).rev().map(|block| block * n_seqs + seq).collect(),
            q: random(&[len, N_QUERY_HEADS, HEAD_DIM]),
            k: random(&[len, N_KV_HEADS, HEAD_DIM]),
            v: random(&[len, N_KV_HEADS, HEAD_DIM]),
        };
        let shape = [i64::from(n_blocks * n_seqs * block_size), N_KV_HEADS, 2, HEAD_DIM];
        Self {
            sequences: (0..n_seqs).zip(lens).map(tokens).collect(),
            block_size,
            cache: Tensor::full(shape, f64::NAN, (kind, Device::Cpu)),
        }
    }

    /// Writes the keys and values of `(seq, n_computed, n_query)` each and attends their queries.
    fn run(&self, backend: &dyn AttentionBackend, rows: &[Rows]) -> Tensor {
        let mut layout = BatchLayout::new(self.block_size);
        for &(seq, n_computed, n_query) in rows {
            let [n_computed, n_query] = [n_computed, n_query].map(|n| u32::try_from(n).unwrap());
            layout.push(SeqSpec { n_computed, n_query }, &self.sequences[seq].blocks);
        }
        layout.finish();
        let layout = DeviceLayout::upload(&layout, Device::Cpu);
        let gather = |part: fn(&Tokens) -> &Tensor| {
            let part = |&(seq, start, len): &Rows| part(&self.sequences[seq]).narrow(0, start, len);
            Tensor::cat(&rows.iter().map(part).collect::<Vec<_>>(), 0)
        };
        let (q, k, v) = (gather(|s| &s.q), gather(|s| &s.k), gather(|s| &s.v));
        backend.write_kv(&self.cache, &k, &v, &layout).unwrap();
        backend.gqa(GqaQuery { q: &q, scale: SCALE }, &self.cache, &layout).unwrap()
    }

    /// What a row must be, by plain loops over its visible keys.
    fn expected(&self, seq: usize, position: i64) -> Vec<f64> {
        let floats = |tensor: Tensor| Vec::<f64>::try_from(tensor.flatten(0, -1)).unwrap();
        let Tokens { q, k, v, .. } = &self.sequences[seq];
        let mut out = Vec::new();
        for head in 0..N_QUERY_HEADS {
            let of_head =
                |rows: &Tensor, p: i64| floats(rows.get(p).get(head * N_KV_HEADS / N_QUERY_HEADS));
            let q = floats(q.get(position).get(head));
            let weights: Vec<f64> = (0..=position)
                .map(|p| of_head(k, p).iter().zip(&q).map(|(a, b)| a * b).sum::<f64>())
                .map(|score| (SCALE * score).exp())
                .collect();
            let values: Vec<Vec<f64>> = (0..=position).map(|p| of_head(v, p)).collect();
            let total: f64 = weights.iter().sum();
            out.extend((0..usize::try_from(HEAD_DIM).unwrap()).map(|i| {
                weights.iter().zip(&values).map(|(w, value)| w * value[i]).sum::<f64>() / total
            }));
        }
        out
    }

    #[track_caller]
    fn check(&self, found: &Tensor, rows: &[Rows], tolerance: f64) {
        let tokens =
            rows.iter().flat_map(|&(seq, start, len)| (start..start + len).map(move |p| (seq, p)));
        let tokens: Vec<(usize, i64)> = tokens.collect();
        assert_eq!(found.size(), [tokens.len() as i64, N_QUERY_HEADS, HEAD_DIM]);
        for (row, &(seq, position)) in tokens.iter().enumerate() {
            let found = Vec::<f64>::try_from(found.get(row as i64).flatten(0, -1)).unwrap();
            for (found, expected) in found.iter().zip(self.expected(seq, position)) {
                let difference = (found - expected).abs();
                assert!(difference < tolerance, "sequence {seq} at {position}: {difference}");
            }
        }
    }
}

#[test]
fn ragged_batches_agree_with_scalar_loops() {
    let (earlier, rows) = mixed_rows();
    let lens: Vec<i64> = rows.iter().map(|(_, computed, query)| computed + query).collect();
    for backend in backends() {
        for (block_size, kind, tolerance) in
            [(1, Kind::Float, 1e-5), (16, Kind::Float, 1e-5), (4, Kind::BFloat16, 0.05)]
        {
            let batch = Grouped::new(&lens, block_size, kind);
            batch.check(&batch.run(backend, &earlier), &earlier, tolerance);
            batch.check(&batch.run(backend, &rows), &rows, tolerance);
        }
    }
}

#[test]
fn a_rejected_tail_is_overwritten_or_never_read() {
    for backend in backends() {
        let batch = Grouped::new(&[12, 12], 4, Kind::Float);
        let _ = batch.run(backend, &[(0, 0, 5), (1, 0, 6)]);
        // Three drafts behind position 5, all rejected; their slots are poisoned.
        let _ = batch.run(backend, &[(0, 5, 4)]);
        for position in [6usize, 7, 8] {
            let block = i64::from(batch.sequences[0].blocks[position / 4]);
            let _ = batch.cache.get(block * 4 + position as i64 % 4).fill_(f64::NAN);
        }
        let rows = [(1, 6, 1), (0, 6, 2)];
        batch.check(&batch.run(backend, &rows), &rows, 1e-5);
    }
}

/// Fault case L16: a verify row sees the tokens up to its own, and is the row of a single decode.
#[test]
fn verify_windows_of_up_to_nine_rows_equal_single_decodes() {
    let batch = Grouped::new(&[14, 70], 4, Kind::Float);
    let _ = batch.run(&CpuBackend, &[(0, 0, 5), (1, 0, 60)]);
    for n in 1..=9 {
        let window = batch.run(&CpuBackend, &[(1, 60, 7), (0, 5, n)]).narrow(0, 7, n);
        for row in 0..n {
            let single = batch.run(&CpuBackend, &[(0, 5 + row, 1)]);
            assert_eq!(single, window.narrow(0, row, 1), "window of {n}, row {row}");
        }
    }
}

#[test]
fn no_row_is_a_batch_and_what_does_not_fit_is_refused() {
    let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let mut none = BatchLayout::new(4);
    none.finish();
    let none = DeviceLayout::upload(&none, Device::Cpu);
    let mut one = BatchLayout::new(4);
    one.push(SeqSpec { n_computed: 0, n_query: 1 }, &[0]);
    one.finish();
    let one = DeviceLayout::upload(&one, Device::Cpu);
    let cache = zeros(&[4, 2, 2, 8]);
    for backend in backends() {
        let query = GqaQuery { q: &zeros(&[0, 4, 8]), scale: SCALE };
        assert_eq!(backend.gqa(query, &cache, &none).unwrap().size(), [0, 4, 8]);
        for (k, v) in [([1, 2, 9], [1, 2, 9]), ([1, 3, 8], [1, 3, 8]), ([1, 2, 8], [1, 1, 8])] {
            let result = backend.write_kv(&cache, &zeros(&k), &zeros(&v), &one);
            assert!(result.is_err(), "{}: {k:?} and {v:?}", backend.name());
        }
        let query = GqaQuery { q: &zeros(&[1, 4, 9]), scale: SCALE };
        assert!(backend.gqa(query, &cache, &one).is_err(), "{}", backend.name());
    }
}
