//! One conformance suite for every backend; the oracle is a scalar loop in double precision.

mod grouped;
mod sparse;

use batch_layout::{BatchLayout, SeqSpec};
use tch::{Device, Kind, Tensor};

use crate::*;

const N_HEADS: i64 = 3;
const KV_RANK: i64 = 20;
const ROPE: i64 = 6;
const WIDTH: i64 = KV_RANK + ROPE;
const SCALE: f64 = 0.3;

/// A sequence, its tokens computed before, and its queried tokens.
type Rows = (usize, i64, i64);

fn backends() -> [&'static dyn AttentionBackend; 2] {
    [&ReferenceBackend, &CpuBackend]
}

/// What a sequence's tokens are, by position.
struct Sequence {
    blocks: Vec<u32>,
    q_latent: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
}

/// Some sequences over one cache full of NaN. Their blocks interleave and are not in order.
struct Batch {
    sequences: Vec<Sequence>,
    block_size: u32,
    cache: Tensor,
}

impl Batch {
    fn new(lens: &[i64], block_size: u32, kind: Kind) -> Self {
        tch::manual_seed(7);
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let n_seqs = u32::try_from(lens.len()).unwrap();
        let longest = u32::try_from(*lens.iter().max().unwrap()).unwrap();
        let n_blocks = longest.div_ceil(block_size);
        let sequence = |(seq, &len): (u32, &i64)| Sequence {
            blocks: (0..n_blocks).rev().map(|block| block * n_seqs + seq).collect(),
            q_latent: random(&[len, N_HEADS, KV_RANK]),
            q_pe: random(&[len, N_HEADS, ROPE]),
            latent: random(&[len, KV_RANK]),
            k_pe: random(&[len, ROPE]),
        };
        let n_slots = i64::from(n_blocks * n_seqs * block_size);
        Self {
            sequences: (0..n_seqs).zip(lens).map(sequence).collect(),
            block_size,
            cache: Tensor::full([n_slots, WIDTH], f64::NAN, (kind, Device::Cpu)),
        }
    }

    /// The layout of `(seq, n_computed, n_query)` each.
    fn layout(&self, rows: &[Rows]) -> DeviceLayout {
        let mut layout = BatchLayout::new(self.block_size);
        for &(seq, n_computed, n_query) in rows {
            let as_u32 = |n: i64| u32::try_from(n).unwrap();
            let spec = SeqSpec { n_computed: as_u32(n_computed), n_query: as_u32(n_query) };
            layout.push(spec, &self.sequences[seq].blocks);
        }
        layout.finish();
        DeviceLayout::upload(&layout, Device::Cpu)
    }

    fn gather(&self, rows: &[Rows], part: fn(&Sequence) -> &Tensor) -> Tensor {
        let part = |&(seq, start, len): &Rows| part(&self.sequences[seq]).narrow(0, start, len);
        Tensor::cat(&rows.iter().map(part).collect::<Vec<_>>(), 0)
    }

    /// Writes the latents of the rows and attends their queries to all that they see.
    fn run(&self, backend: &dyn AttentionBackend, rows: &[Rows]) -> Tensor {
        let layout = self.layout(rows);
        let (latent, k_pe) = (self.gather(rows, |s| &s.latent), self.gather(rows, |s| &s.k_pe));
        backend.write_latent(&self.cache, &latent, &k_pe, &layout).unwrap();
        self.attend(backend, rows, None)
    }

    /// Attends the queries of the rows, whose latents are written.
    fn attend(
        &self,
        backend: &dyn AttentionBackend,
        rows: &[Rows],
        selection: Option<&Selection>,
    ) -> Tensor {
        let (q_latent, q_pe) = (self.gather(rows, |s| &s.q_latent), self.gather(rows, |s| &s.q_pe));
        let query = MlaQuery { q_latent: &q_latent, q_pe: &q_pe, scale: SCALE, selection };
        backend.mla(query, &self.cache, &self.layout(rows)).unwrap()
    }

    /// The cache row of a position.
    fn slot_of(&self, seq: usize, position: i64) -> Tensor {
        let block_size = i64::from(self.block_size);
        let block = self.sequences[seq].blocks[usize::try_from(position / block_size).unwrap()];
        self.cache.get(i64::from(block) * block_size + position % block_size)
    }

    /// What a row must be, by plain loops over its visible keys.
    fn expected(&self, seq: usize, position: i64) -> Vec<f64> {
        self.expected_of(seq, position, &(0..=position).collect::<Vec<_>>())
    }

    /// What a row must be if it attends `keys` only.
    fn expected_of(&self, seq: usize, position: i64, keys: &[i64]) -> Vec<f64> {
        let floats = |tensor: Tensor| Vec::<f64>::try_from(tensor.flatten(0, -1)).unwrap();
        let seq = &self.sequences[seq];
        let keys: Vec<(Vec<f64>, Vec<f64>)> =
            keys.iter().map(|&p| (floats(seq.latent.get(p)), floats(seq.k_pe.get(p)))).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut out = Vec::new();
        for head in 0..N_HEADS {
            let q_latent = floats(seq.q_latent.get(position).get(head));
            let q_pe = floats(seq.q_pe.get(position).get(head));
            let scores = keys.iter().map(|(c, pe)| SCALE * (dot(&q_latent, c) + dot(&q_pe, pe)));
            let weights: Vec<f64> = scores.map(f64::exp).collect();
            // Without keys the sum is empty, hence zero.
            let total = weights.iter().sum::<f64>().max(f64::MIN_POSITIVE);
            let rank = usize::try_from(KV_RANK).unwrap();
            out.extend((0..rank).map(|i| {
                let terms = weights.iter().zip(&keys).map(|(weight, (c, _))| weight * c[i]);
                terms.sum::<f64>() / total
            }));
        }
        out
    }

    fn check(&self, found: &Tensor, rows: &[Rows], tolerance: f64) {
        let tokens =
            rows.iter().flat_map(|&(seq, start, len)| (start..start + len).map(move |p| (seq, p)));
        let mut n_tokens = 0;
        for (row, (seq, position)) in tokens.enumerate() {
            let found = Vec::<f64>::try_from(found.get(row as i64).flatten(0, -1)).unwrap();
            for (found, expected) in found.iter().zip(self.expected(seq, position)) {
                let difference = (found - expected).abs();
                assert!(difference < tolerance, "sequence {seq} at {position}: {difference}");
            }
            n_tokens += 1;
        }
        assert_eq!(found.size(), [n_tokens, N_HEADS, KV_RANK]);
    }
}

/// A long prefill, verify windows and decodes of every width, over earlier chunks.
fn mixed_rows() -> (Vec<Rows>, Vec<Rows>) {
    let computed = [0, 5, 1, 17, 64, 3, 2, 31, 4, 70];
    let queries = [33, 1, 2, 3, 4, 5, 6, 7, 8, 9];
    let earlier = computed.iter().enumerate().filter(|(_, n)| **n > 0);
    let earlier = earlier.map(|(seq, &n)| (seq, 0, n)).collect();
    let rows = computed.iter().zip(queries).enumerate();
    (earlier, rows.map(|(seq, (&computed, query))| (seq, computed, query)).collect())
}

#[test]
fn ragged_batches_agree_with_scalar_loops_for_every_block_size() {
    let (earlier, rows) = mixed_rows();
    let lens: Vec<i64> = rows.iter().map(|(_, computed, query)| computed + query).collect();
    for backend in backends() {
        for block_size in [1, 4, 16, 64] {
            let batch = Batch::new(&lens, block_size, Kind::Float);
            batch.check(&batch.run(backend, &earlier), &earlier, 1e-5);
            batch.check(&batch.run(backend, &rows), &rows, 1e-5);
        }
    }
}

#[test]
fn a_bfloat16_cache_rounds_keys_only() {
    let (earlier, rows) = mixed_rows();
    let lens: Vec<i64> = rows.iter().map(|(_, computed, query)| computed + query).collect();
    for backend in backends() {
        let batch = Batch::new(&lens, 16, Kind::BFloat16);
        let _ = batch.run(backend, &earlier);
        batch.check(&batch.run(backend, &rows), &rows, 0.05);
    }
}

#[test]
fn a_rejected_tail_is_overwritten_or_never_read() {
    for backend in backends() {
        let batch = Batch::new(&[12, 12], 4, Kind::Float);
        let _ = batch.run(backend, &[(0, 0, 5), (1, 0, 6)]);
        // Three drafts behind position 5, all rejected; their slots are poisoned.
        let _ = batch.run(backend, &[(0, 5, 4)]);
        for position in [6i64, 7, 8] {
            let _ = batch.slot_of(0, position).fill_(f64::NAN);
        }
        let rows = [(1, 6, 1), (0, 6, 2)];
        batch.check(&batch.run(backend, &rows), &rows, 1e-5);
    }
}

/// Fault case L16: verify rows must not see the drafts behind them.
#[test]
fn verify_rows_see_six_seven_eight_and_nine_keys() {
    for backend in backends() {
        let mut batch = Batch::new(&[9, 13], 4, Kind::Float);
        let _ = batch.run(backend, &[(0, 0, 5), (1, 0, 9)]);
        let rows = [(0, 5, 4), (1, 9, 4)];
        let first = batch.run(backend, &rows);
        batch.check(&first, &rows, 1e-5);

        // The last draft of the first sequence is another token now.
        let draft = &mut batch.sequences[0];
        for part in [&draft.latent, &draft.k_pe, &draft.q_latent, &draft.q_pe] {
            let _ = part.get(8).fill_(0.7);
        }
        let second = batch.run(backend, &rows);
        assert_eq!(second.narrow(0, 0, 3), first.narrow(0, 0, 3), "{}", backend.name());
        assert_ne!(second.get(3), first.get(3), "{}", backend.name());
        assert_eq!(second.narrow(0, 4, 4), first.narrow(0, 4, 4), "{}", backend.name());
    }
}

/// Fault case L16: four decodes of one token are one verify pass of four.
#[test]
fn four_decodes_equal_one_verify_window() {
    for backend in backends() {
        let batch = Batch::new(&[9], 4, Kind::Float);
        let _ = batch.run(backend, &[(0, 0, 5)]);
        let decodes: Vec<Tensor> = (5..9).map(|p| batch.run(backend, &[(0, p, 1)])).collect();
        let window = batch.run(backend, &[(0, 5, 4)]);
        let difference = (Tensor::cat(&decodes, 0) - &window).abs().max().double_value(&[]);
        assert!(difference < 1e-6, "{}: {difference}", backend.name());
        if backend.name() == "cpu" {
            assert_eq!(Tensor::cat(&decodes, 0), window);
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_company() {
    let (earlier, rows) = mixed_rows();
    let lens: Vec<i64> = rows.iter().map(|(_, computed, query)| computed + query).collect();
    let batch = Batch::new(&lens, 16, Kind::Float);
    let _ = batch.run(&CpuBackend, &earlier);
    let together = batch.run(&CpuBackend, &rows);
    let mut first = 0;
    for &(seq, computed, query) in &rows {
        for row in 0..query {
            let alone = batch.run(&CpuBackend, &[(seq, computed + row, 1)]);
            assert_eq!(alone, together.narrow(0, first + row, 1), "sequence {seq}, row {row}");
        }
        first += query;
    }
}

#[test]
fn selected_rows_see_what_they_saw() {
    for backend in backends() {
        let batch = Batch::new(&[9, 13], 4, Kind::Float);
        let _ = batch.run(backend, &[(0, 0, 9), (1, 0, 13)]);
        let mut layout = BatchLayout::new(4);
        layout.push(SeqSpec { n_computed: 5, n_query: 4 }, &batch.sequences[0].blocks);
        layout.push(SeqSpec { n_computed: 9, n_query: 4 }, &batch.sequences[1].blocks);
        layout.finish();
        let selected = DeviceLayout::upload(&layout, Device::Cpu).select_rows(&[1, 3, 7]);
        assert_eq!(selected.host().positions(), [6, 8, 12]);
        let pick = |a: &Tensor, b: &Tensor| Tensor::stack(&[a.get(6), a.get(8), b.get(12)], 0);
        let [a, b] = &batch.sequences[..] else { unreachable!("there are two sequences") };
        let (q_latent, q_pe) = (pick(&a.q_latent, &b.q_latent), pick(&a.q_pe, &b.q_pe));
        let query = MlaQuery { q_latent: &q_latent, q_pe: &q_pe, scale: SCALE, selection: None };
        let found = backend.mla(query, &batch.cache, &selected).unwrap();
        batch.check(&found, &[(0, 6, 1), (0, 8, 1), (1, 12, 1)], 1e-5);
        // No row is a layout, too.
        let none = DeviceLayout::upload(&layout, Device::Cpu).select_rows(&[]);
        let (q_latent, q_pe) = (q_latent.narrow(0, 0, 0), q_pe.narrow(0, 0, 0));
        let query = MlaQuery { q_latent: &q_latent, q_pe: &q_pe, scale: SCALE, selection: None };
        let found = backend.mla(query, &batch.cache, &none).unwrap();
        assert_eq!(found.size(), [0, N_HEADS, KV_RANK]);
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let mut layout = BatchLayout::new(4);
    layout.push(SeqSpec { n_computed: 0, n_query: 1 }, &[0]);
    layout.finish();
    let layout = DeviceLayout::upload(&layout, Device::Cpu);
    let cache = Tensor::zeros([4, WIDTH + 1], (Kind::Float, Device::Cpu));
    let latent = Tensor::zeros([1, KV_RANK], (Kind::Float, Device::Cpu));
    let k_pe = Tensor::zeros([1, ROPE], (Kind::Float, Device::Cpu));
    for backend in backends() {
        let result = backend.write_latent(&cache, &latent, &k_pe, &layout);
        assert!(result.is_err(), "{}", backend.name());
    }
}
