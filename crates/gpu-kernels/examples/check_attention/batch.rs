//! Random ragged batches over shuffled blocks, and their arrays on the device.

use anyhow::Result;
use gpu_kernels::PagedRows;
use gpu_runtime::{Buffer, GemmElement, Gpu, Pod, Stream};
use half::bf16;
use rand::seq::SliceRandom;
use rand::{Rng, RngExt};
use rand_chacha::ChaCha8Rng;

/// An element of weights, activations and caches.
pub(crate) trait Elem: GemmElement + PartialEq + std::fmt::Debug {
    const NAME: &'static str;
    /// What an error may be, relative to the largest value of a row.
    const TOLERANCE: f64;
    fn of(x: f32) -> Self;
    fn f32(self) -> f32;
}

impl Elem for f32 {
    const NAME: &'static str = "f32";
    const TOLERANCE: f64 = 1e-4;
    fn of(x: f32) -> Self {
        x
    }
    fn f32(self) -> f32 {
        self
    }
}

impl Elem for bf16 {
    const NAME: &'static str = "bf16";
    const TOLERANCE: f64 = 1.5e-2;
    fn of(x: f32) -> Self {
        Self::from_f32(x)
    }
    fn f32(self) -> f32 {
        self.to_f32()
    }
}

/// A sequence of a pass: tokens with KV before it, rows, and padding rows behind them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seq {
    pub(crate) n_computed: usize,
    pub(crate) n_query: usize,
    pub(crate) n_padding: usize,
}

/// The arrays of a pass on the host.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) seqs: Vec<Seq>,
    pub(crate) row_pos: Vec<i32>,
    pub(crate) row_seq: Vec<i32>,
    pub(crate) row_start: Vec<i32>,
    pub(crate) kv_len: Vec<i32>,
    pub(crate) tables: Vec<i32>,
    pub(crate) stride: usize,
    pub(crate) block_size: usize,
    pub(crate) n_slots: usize,
}

impl Batch {
    /// Lays sequences out over shuffled blocks, of which as many again belong to nobody.
    pub(crate) fn new(rng: &mut ChaCha8Rng, seqs: &[Seq], block_size: usize) -> Self {
        let blocks = |seq: &Seq| (seq.n_computed + seq.n_query).div_ceil(block_size);
        let stride = seqs.iter().map(blocks).max().unwrap_or(0) + 1;
        let n_blocks = 2 * seqs.iter().map(blocks).sum::<usize>();
        let mut ids: Vec<i32> = (0..n_blocks as i32).collect();
        ids.shuffle(rng);
        let mut tables = Vec::new();
        for seq in seqs {
            let own = ids.split_off(ids.len() - blocks(seq));
            tables.extend_from_slice(&own);
            tables.extend(std::iter::repeat_n(-1, stride - own.len()));
        }
        Self::with_tables(seqs, tables, (stride, block_size, n_blocks * block_size))
    }

    fn with_tables(
        seqs: &[Seq],
        tables: Vec<i32>,
        (stride, block_size, n_slots): (usize, usize, usize),
    ) -> Self {
        let (mut row_pos, mut row_seq, mut row_start) = (Vec::new(), Vec::new(), vec![0]);
        for (at, seq) in seqs.iter().enumerate() {
            row_pos.extend((0..seq.n_query).map(|i| (seq.n_computed + i) as i32));
            row_seq.extend((0..seq.n_query).map(|_| at as i32));
            row_pos.extend((0..seq.n_padding).map(|_| -1));
            row_seq.extend((0..seq.n_padding).map(|_| -1));
            row_start.push(row_pos.len() as i32);
        }
        let kv_len = seqs.iter().map(|seq| (seq.n_computed + seq.n_query) as i32).collect();
        let seqs = seqs.to_vec();
        Self { seqs, row_pos, row_seq, row_start, kv_len, tables, stride, block_size, n_slots }
    }

    /// The pass of one sequence alone, over the same caches.
    pub(crate) fn alone(&self, seq: usize) -> Self {
        let table = self.tables[seq * self.stride..][..self.stride].to_vec();
        let sizes = (self.stride, self.block_size, self.n_slots);
        Self::with_tables(&self.seqs[seq..=seq], table, sizes)
    }

    /// The rows of a sequence, padding included.
    pub(crate) fn rows_of(&self, seq: usize) -> std::ops::Range<usize> {
        self.row_start[seq] as usize..self.row_start[seq + 1] as usize
    }

    pub(crate) fn n_rows(&self) -> usize {
        self.row_pos.len()
    }

    pub(crate) fn max_kv_len(&self) -> usize {
        self.kv_len.iter().copied().max().unwrap_or(0) as usize
    }

    /// The longest sequence of at most `window` rows, padding included; 0 if there is none.
    pub(crate) fn max_split_len(&self, window: usize) -> usize {
        let is_window = |&(seq, _): &(usize, &i32)| self.rows_of(seq).len() <= window;
        let lens = self.kv_len.iter().enumerate().filter(is_window).map(|(_, &len)| len);
        lens.max().unwrap_or(0) as usize
    }

    pub(crate) fn slot(&self, seq: usize, pos: usize) -> usize {
        let block = self.tables[seq * self.stride + pos / self.block_size];
        block as usize * self.block_size + pos % self.block_size
    }

    /// A cache of rows of `width`: random where a sequence has tokens, NaN everywhere else.
    pub(crate) fn cache<E: Elem>(&self, rng: &mut ChaCha8Rng, width: usize) -> Vec<E> {
        let mut cache = vec![E::of(f32::NAN); self.n_slots * width];
        for (seq, &len) in self.kv_len.iter().enumerate() {
            for pos in 0..len as usize {
                let slot = self.slot(seq, pos);
                cache[slot * width..][..width].iter_mut().for_each(|x| *x = E::of(normal(rng)));
            }
        }
        cache
    }
}

/// The arrays on the device.
pub(crate) struct Uploaded {
    row_pos: Buffer<i32>,
    row_seq: Buffer<i32>,
    row_start: Buffer<i32>,
    kv_len: Buffer<i32>,
    tables: Buffer<i32>,
    block_size: usize,
}

impl Uploaded {
    pub(crate) fn new(stream: &Stream, batch: &Batch) -> Result<Self> {
        Ok(Self {
            row_pos: upload(stream, &batch.row_pos)?,
            row_seq: upload(stream, &batch.row_seq)?,
            row_start: upload(stream, &batch.row_start)?,
            kv_len: upload(stream, &batch.kv_len)?,
            tables: upload(stream, &batch.tables)?,
            block_size: batch.block_size,
        })
    }

    pub(crate) fn rows(&self) -> PagedRows<'_> {
        PagedRows {
            row_pos: self.row_pos.view(),
            row_seq: self.row_seq.view(),
            row_start: self.row_start.view(),
            kv_len: self.kv_len.view(),
            block_tables: self.tables.view(),
            block_size: self.block_size,
        }
    }
}

pub(crate) fn upload<T: Pod>(stream: &Stream, values: &[T]) -> Result<Buffer<T>> {
    let mut buffer = stream.gpu().alloc(values.len())?;
    stream.upload(values, &mut buffer)?;
    Ok(buffer)
}

/// A buffer whose bytes are all `byte`: 0xff for NaN and -1.
pub(crate) fn poisoned<T: Pod>(
    gpu: &Gpu,
    stream: &Stream,
    n: usize,
    byte: u8,
) -> Result<Buffer<T>> {
    let mut buffer = gpu.alloc(n)?;
    stream.fill_bytes(&mut buffer, byte)?;
    Ok(buffer)
}

/// Runs `work` over `0..n` on all processors and returns the results in order.
pub(crate) fn parallel<T: Send>(n: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let work = &work;
    let mut out: Vec<(usize, T)> = std::thread::scope(|scope| {
        let part = |thread| move || (thread..n).step_by(n_threads).map(|i| (i, work(i))).collect();
        let spawn = |thread| scope.spawn::<_, Vec<(usize, T)>>(part(thread));
        let threads: Vec<_> = (0..n_threads).map(spawn).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    out.sort_by_key(|&(i, _)| i);
    out.into_iter().map(|(_, value)| value).collect()
}

/// A normal number of mean 0 and deviation 1, nearly: the sum of 12 uniform ones.
pub(crate) fn normal(rng: &mut ChaCha8Rng) -> f32 {
    (0..4).map(|_| rng.random::<f32>() - 0.5).sum::<f32>() * 3f32.sqrt()
}

/// A mixture of prefill chunks, windows and decodes.
pub(crate) fn ragged(rng: &mut ChaCha8Rng, n_seqs: usize, max_context: usize) -> Vec<Seq> {
    let seq = |at: usize| Seq {
        n_computed: if at == 0 { 0 } else { rng.random_range(0..max_context) },
        n_query: if at == 0 { 1 } else { rng.random_range(1..=9) },
        n_padding: rng.next_u32() as usize % 3,
    };
    (0..n_seqs).map(seq).collect()
}
