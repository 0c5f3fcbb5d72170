//! Index keys, selections and sparse attention; the oracle is a scalar loop in double precision.

use super::*;

const INDEX_HEADS: i64 = 2;
const INDEX_DIM: i64 = 20;

/// Index queries, head weights and index keys of some sequences, over one index cache in which
/// every slot that was not written reads as NaN.
struct IndexBatch {
    /// Latents and block tables.
    attention: Batch,
    q: Vec<Tensor>,
    weights: Vec<Tensor>,
    keys: Vec<Tensor>,
    cache: Tensor,
}

impl IndexBatch {
    fn new(lens: &[i64], block_size: u32, kind: Kind) -> Self {
        let attention = Batch::new(lens, block_size, Kind::Float);
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let each = |shape: &[i64]| -> Vec<Tensor> {
            lens.iter().map(|&len| random(&[&[len], shape].concat())).collect()
        };
        let n_slots = attention.cache.size()[0];
        let cache = match kind {
            Kind::Uint8 => Tensor::full([n_slots, INDEX_DIM + 4], 127, (kind, Device::Cpu)),
            _ => Tensor::full([n_slots, INDEX_DIM], f64::NAN, (kind, Device::Cpu)),
        };
        Self {
            attention,
            q: each(&[INDEX_HEADS, INDEX_DIM]),
            weights: each(&[INDEX_HEADS]),
            keys: each(&[INDEX_DIM]),
            cache,
        }
    }

    /// Writes the keys of the rows and selects for them.
    fn select(
        &self,
        backend: &dyn AttentionBackend,
        rows: &[Rows],
        topk: usize,
    ) -> (Selection, u64) {
        let layout = self.attention.layout(rows);
        let gather = |of: &[Tensor]| {
            let part = |&(seq, start, len): &Rows| of[seq].narrow(0, start, len);
            Tensor::cat(&rows.iter().map(part).collect::<Vec<_>>(), 0)
        };
        backend.write_index_keys(&self.cache, &gather(&self.keys), &layout).unwrap();
        let (q, weights) = (gather(&self.q), gather(&self.weights));
        let query = IndexQuery { q: &q, weights: &weights, topk };
        backend.select(query, &self.cache, &layout).unwrap()
    }

    /// The keys that a row must select, by plain loops over those it sees.
    fn expected(&self, seq: usize, position: i64, topk: usize) -> Vec<i32> {
        let floats = |tensor: Tensor| Vec::<f64>::try_from(tensor.flatten(0, -1)).unwrap();
        let weights = floats(self.weights[seq].get(position));
        let scale = (INDEX_DIM as f64).powf(-0.5);
        let score = |key: i64| -> f64 {
            let key = floats(self.keys[seq].get(key));
            let dot = |head: i64| -> f64 {
                let q = floats(self.q[seq].get(position).get(head));
                q.iter().zip(&key).map(|(q, k)| q * k).sum()
            };
            (0..INDEX_HEADS).zip(&weights).map(|(head, w)| w * (scale * dot(head)).max(0.0)).sum()
        };
        let mut ranked: Vec<(f64, i64)> = (0..=position).map(|key| (score(key), key)).collect();
        // Stable: the lower position stays in front.
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        ranked.truncate(topk);
        let mut keys: Vec<i32> =
            ranked.iter().map(|&(_, key)| i32::try_from(key).unwrap()).collect();
        keys.sort_unstable();
        keys
    }
}

fn tokens(rows: &[Rows]) -> impl Iterator<Item = (usize, i64)> {
    rows.iter().flat_map(|&(seq, start, len)| (start..start + len).map(move |p| (seq, p)))
}

#[test]
fn ragged_batches_select_what_scalar_loops_select() {
    let (earlier, rows) = mixed_rows();
    let lens: Vec<i64> = rows.iter().map(|(_, computed, query)| computed + query).collect();
    for backend in backends() {
        for block_size in [1, 4, 16, 64] {
            let batch = IndexBatch::new(&lens, block_size, Kind::Float);
            for rows in [&earlier, &rows] {
                let (selection, n_scored) = batch.select(backend, rows, 8);
                let expected: Vec<Vec<i32>> =
                    tokens(rows).map(|(seq, p)| batch.expected(seq, p, 8)).collect();
                assert_eq!(selection.to_rows().unwrap(), expected, "{}", backend.name());
                let scored = tokens(rows).map(|(_, p)| p + 1).filter(|&n| n > 8).sum::<i64>();
                assert_eq!(n_scored, scored as u64, "{}", backend.name());
            }
        }
    }
}

#[test]
fn rounded_caches_select_the_same_keys_on_both_backends() {
    let (earlier, rows) = mixed_rows();
    let lens: Vec<i64> = rows.iter().map(|(_, computed, query)| computed + query).collect();
    for kind in [Kind::BFloat16, Kind::Uint8] {
        let batch = IndexBatch::new(&lens, 4, kind);
        let [reference, cpu] = backends().map(|backend| {
            let _ = batch.select(backend, &earlier, 8);
            let (selection, _) = batch.select(backend, &rows, 8);
            (selection.to_rows().unwrap(), batch.cache.copy())
        });
        assert_eq!(reference.0, cpu.0, "{kind:?}");
        // Caches hold the same bytes, NaN in unused slots included.
        let bytes = |cache: &Tensor| cache.view_dtype(Kind::Uint8);
        assert_eq!(bytes(&reference.1), bytes(&cpu.1), "{kind:?}");
        // Rounding moves few choices: most rows keep nearly all of their keys.
        let exact = tokens(&rows).map(|(seq, p)| batch.expected(seq, p, 8));
        let n_kept = std::iter::zip(exact, &cpu.0)
            .map(|(exact, found)| exact.iter().filter(|key| found.contains(key)).count())
            .sum::<usize>();
        let n_all: usize = cpu.0.iter().map(Vec::len).sum();
        assert!(n_kept * 100 > n_all * 95, "{kind:?}: {n_kept} of {n_all}");
    }
}

/// Fault case L15: a row that sees at most `topk` keys attends them all, like dense attention.
#[test]
fn short_contexts_equal_dense_attention_and_longer_ones_drop_keys() {
    for backend in backends() {
        let lens = [3, 7, 8, 9];
        let batch = IndexBatch::new(&lens, 4, Kind::Float);
        let rows: Vec<Rows> = lens.iter().enumerate().map(|(seq, &len)| (seq, 0, len)).collect();
        let (selection, n_scored) = batch.select(backend, &rows, 8);
        assert_eq!(n_scored, 9, "only the last row of the last sequence sees more than eight keys");
        let dense = batch.attention.run(backend, &rows);
        let sparse = batch.attention.attend(backend, &rows, Some(&selection));
        let n_short = lens.iter().sum::<i64>() - 1;
        let difference = (dense.narrow(0, 0, n_short) - sparse.narrow(0, 0, n_short)).abs().max();
        assert!(difference.double_value(&[]) < 1e-5, "{}: {difference}", backend.name());
        if backend.name() == "cpu" {
            assert_eq!(dense.narrow(0, 0, n_short), sparse.narrow(0, 0, n_short));
        }
        let last = selection.to_rows().unwrap().pop().unwrap();
        assert_eq!((last.len(), &last), (8, &batch.expected(3, 8, 8)));
        assert_ne!(dense.get(n_short), sparse.get(n_short), "{}", backend.name());
    }
}

/// Only selected slots may be read: all others hold NaN when the rows attend.
#[test]
fn attention_reads_selected_slots_only_and_nothing_selected_is_zero() {
    for backend in backends() {
        let batch = Batch::new(&[20, 6], 4, Kind::Float);
        let rows = [(0, 17, 3), (1, 5, 1)];
        let _ = batch.run(backend, &[(0, 0, 20), (1, 0, 6)]);
        let chosen: [&[i32]; 4] = [&[2, 9, 17], &[0, 18], &[1, 3, 5, 19], &[]];
        let mut indices = vec![-1; 16];
        for (row, chosen) in indices.chunks_exact_mut(4).zip(chosen) {
            row[..chosen.len()].copy_from_slice(chosen);
        }
        let counts = chosen.map(|row| i32::try_from(row.len()).unwrap());
        let indices = Tensor::from_slice(&indices).view([4, 4]);
        let selection = Selection::new(indices, Tensor::from_slice(&counts)).unwrap();
        for position in 0..20i32 {
            if !chosen.concat().contains(&position) {
                let _ = batch.slot_of(0, i64::from(position)).fill_(f64::NAN);
            }
        }
        let found = batch.attend(backend, &rows, Some(&selection));
        for (row, (chosen, (seq, position))) in chosen.iter().zip(tokens(&rows)).enumerate() {
            let keys: Vec<i64> = chosen.iter().map(|&key| i64::from(key)).collect();
            let expected = batch.expected_of(seq, position, &keys);
            let found = Vec::<f64>::try_from(found.get(row as i64).flatten(0, -1)).unwrap();
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-5, "{} row {row}", backend.name());
            }
        }
    }
}

/// Fault case L16: a row's keys come from those it sees, not from the drafts behind it.
#[test]
fn a_verify_row_does_not_choose_drafts_behind_it() {
    for backend in backends() {
        let mut batch = IndexBatch::new(&[12, 15], 4, Kind::Float);
        let _ = batch.select(backend, &[(0, 0, 8), (1, 0, 11)], 4);
        let rows = [(0, 8, 4), (1, 11, 4)];
        let (first, _) = batch.select(backend, &rows, 4);
        let first = first.to_rows().unwrap();
        for (row, (_, position)) in first.iter().zip(tokens(&rows)) {
            assert!(row.iter().all(|&key| i64::from(key) <= position), "{}", backend.name());
        }
        // The last draft is another token now, whose key every row would like best.
        let wanted = batch.q[0].narrow(0, 8, 4).mean_dim(&[0i64, 1][..], false, Kind::Float);
        batch.weights[0] = batch.weights[0].abs();
        let (before, _) = batch.select(backend, &rows, 4);
        batch.keys[0].get(11).copy_(&(wanted * 100.0));
        let (after, _) = batch.select(backend, &rows, 4);
        let (before, after) = (before.to_rows().unwrap(), after.to_rows().unwrap());
        assert_eq!(before[..3], after[..3], "{}", backend.name());
        assert!(after[3].contains(&11), "{}", backend.name());
        assert_eq!(before[4..], after[4..], "{}", backend.name());
    }
}

#[test]
fn a_row_selects_the_same_alone_and_in_company() {
    let (earlier, rows) = mixed_rows();
    let lens: Vec<i64> = rows.iter().map(|(_, computed, query)| computed + query).collect();
    let batch = IndexBatch::new(&lens, 16, Kind::Float);
    let _ = batch.select(&CpuBackend, &earlier, 8);
    let (together, _) = batch.select(&CpuBackend, &rows, 8);
    let attended = batch.attention.run(&CpuBackend, &earlier);
    assert_eq!(attended.size()[1..], [N_HEADS, KV_RANK]);
    let _ = batch.attention.run(&CpuBackend, &rows);
    let attended = batch.attention.attend(&CpuBackend, &rows, Some(&together));
    let together = together.to_rows().unwrap();
    for (row, (seq, position)) in tokens(&rows).enumerate() {
        let alone = [(seq, position, 1)];
        let (selection, _) = batch.select(&CpuBackend, &alone, 8);
        assert_eq!(selection.to_rows().unwrap()[0], together[row], "sequence {seq} at {position}");
        let found = batch.attention.attend(&CpuBackend, &alone, Some(&selection));
        assert_eq!(found, attended.narrow(0, row as i64, 1), "sequence {seq} at {position}");
    }
}

/// Every row of a large launch is filled, whatever the buffers held before.
#[test]
fn large_launches_leave_no_stale_rows() {
    for n_rows in [1, 127, 128, 129, 512] {
        let batch = IndexBatch::new(&[n_rows], 16, Kind::Float);
        let expected: Vec<Vec<i32>> = (0..n_rows).map(|p| batch.expected(0, p, 8)).collect();
        // What an earlier, longer launch leaves behind in freed memory.
        drop(Tensor::full([n_rows, 8], 777, (Kind::Int, Device::Cpu)));
        let (selection, _) = batch.select(&CpuBackend, &[(0, 0, n_rows)], 8);
        assert_eq!(selection.to_rows().unwrap(), expected, "{n_rows} rows");
        let indices = Vec::<i32>::try_from(selection.indices().flatten(0, -1)).unwrap();
        let counts = Vec::<i32>::try_from(selection.counts()).unwrap();
        for (row, (indices, count)) in indices.chunks_exact(8).zip(counts).enumerate() {
            assert_eq!(usize::try_from(count).unwrap(), 8.min(row + 1));
            assert!(indices[8.min(row + 1)..].iter().all(|&rest| rest == -1), "row {row}");
        }
    }
}

#[test]
#[should_panic(expected = "sees")]
fn a_selected_position_behind_the_row_is_an_error() {
    let batch = Batch::new(&[9], 4, Kind::Float);
    let _ = batch.run(&CpuBackend, &[(0, 0, 9)]);
    let indices = Tensor::from_slice(&[6i32]).view([1, 1]);
    let selection = Selection::new(indices, Tensor::from_slice(&[1i32])).unwrap();
    let _ = batch.attend(&CpuBackend, &[(0, 5, 1)], Some(&selection));
}

#[test]
fn the_rows_of_a_selection_are_taken_in_the_order_asked_for() {
    let indices = Tensor::arange(20, (Kind::Int, Device::Cpu)).view([10, 2]);
    let counts = Tensor::full([10], 2, (Kind::Int, Device::Cpu));
    let all = Selection::new(indices, counts).unwrap();
    let rows = |rows: &[i64]| all.select_rows(&Tensor::from_slice(rows)).unwrap();
    assert_eq!(rows(&[3, 7]).to_rows().unwrap(), [[6, 7], [14, 15]]);
    assert_eq!(rows(&[7, 3]).to_rows().unwrap(), [[14, 15], [6, 7]]);
    assert_eq!((rows(&[]).n_rows(), rows(&[]).topk()), (0, 2));
}

#[test]
fn selections_that_do_not_fit_are_refused() {
    let ints = |n: i64| Tensor::zeros([n], (Kind::Int, Device::Cpu));
    let of = |indices: Tensor, counts: Tensor| Selection::new(indices, counts);
    assert!(of(ints(6).view([2, 3]), ints(2)).is_ok());
    assert!(of(ints(6).view([2, 3]), ints(3)).is_err());
    assert!(of(ints(6), ints(6)).is_err());
    assert!(of(ints(6).view([2, 3]).to_kind(Kind::Int64), ints(2)).is_err());
    let batch = Batch::new(&[9], 4, Kind::Float);
    let selection = of(ints(6).view([2, 3]), ints(2)).unwrap();
    let layout = batch.layout(&[(0, 0, 3)]);
    let q = Tensor::zeros([3, N_HEADS, KV_RANK], (Kind::Float, Device::Cpu));
    let q_pe = Tensor::zeros([3, N_HEADS, ROPE], (Kind::Float, Device::Cpu));
    for backend in backends() {
        let query =
            MlaQuery { q_latent: &q, q_pe: &q_pe, scale: SCALE, selection: Some(&selection) };
        assert!(backend.mla(query, &batch.cache, &layout).is_err(), "{}", backend.name());
    }
}

/// A score that cannot be ranked would silently choose other keys.
#[test]
fn numbers_that_are_not_finite_are_refused() {
    for backend in backends() {
        for bad in [f64::NAN, f64::INFINITY] {
            let batch = IndexBatch::new(&[12], 4, Kind::Float);
            let _ = batch.select(backend, &[(0, 0, 12)], 4);
            let layout = batch.attention.layout(&[(0, 0, 12)]);
            let spoil = |tensor: &Tensor| {
                let spoilt = tensor.copy();
                let _ = spoilt.view([-1]).get(5).fill_(bad);
                spoilt
            };
            let (q, weights) = (&batch.q[0], &batch.weights[0]);
            let select = |q: &Tensor, weights: &Tensor| {
                let query = IndexQuery { q, weights, topk: 4 };
                backend.select(query, &batch.cache, &layout).map(|_| ())
            };
            let written = backend.write_index_keys(&batch.cache, &spoil(&batch.keys[0]), &layout);
            for (result, what) in [
                (written, "index keys"),
                (select(&spoil(q), weights), "index queries"),
                (select(q, &spoil(weights)), "weights of index heads"),
            ] {
                let error = result.unwrap_err().to_string();
                assert!(error.starts_with(what) && error.contains("NaN"), "{error}");
            }
        }
    }
}
