//! A batch layout on the device that runs the pass.

use batch_layout::{BatchLayout, SeqSpec};
use tch::{Device, Tensor};

/// The arrays of a [`BatchLayout`] as i32 tensors of one device, and the layout itself for code
/// that runs on the host.
#[derive(Debug)]
pub struct DeviceLayout {
    /// Position of each queried token, `[n_tokens]`.
    pub positions: Tensor,
    /// Cache slot that each queried token writes, `[n_tokens]`.
    pub slot_mapping: Tensor,
    /// Sequence of each queried token, `[n_tokens]`.
    pub token_to_seq: Tensor,
    /// Prefix sum of the query lengths, `[n_seqs + 1]`.
    pub cu_seqlens_q: Tensor,
    /// Valid KV length of each sequence after this pass, `[n_seqs]`.
    pub kv_lens: Tensor,
    /// Block tables padded with -1, `[n_seqs, max_blocks]`.
    pub block_tables: Tensor,
    host: BatchLayout,
}

impl DeviceLayout {
    /// Copies `layout`, which must be finished, to `device`.
    ///
    /// # Panics
    ///
    /// If the device has no memory left for these few integers.
    #[must_use]
    pub fn upload(layout: &BatchLayout, device: Device) -> Self {
        let tensor = |values: &[i32]| Tensor::from_slice(values).to_device(device);
        let table_shape = [layout.n_seqs() as i64, layout.max_blocks() as i64];
        Self {
            positions: tensor(layout.positions()),
            slot_mapping: tensor(layout.slot_mapping()),
            token_to_seq: tensor(layout.token_to_seq()),
            cu_seqlens_q: tensor(layout.cu_seqlens_q()),
            kv_lens: tensor(layout.kv_lens()),
            block_tables: tensor(layout.block_tables()).view(table_shape),
            host: layout.clone(),
        }
    }

    /// The layout in host memory.
    #[must_use]
    pub fn host(&self) -> &BatchLayout {
        &self.host
    }

    /// The layout of some of the tokens, each as a sequence of its own that queries one row and
    /// sees what it sees here. `rows` are indices of tokens.
    ///
    /// # Panics
    ///
    /// If a row is not below `n_tokens`.
    #[must_use]
    pub fn select_rows(&self, rows: &[i64]) -> Self {
        let as_u32 = |value: i32| u32::try_from(value).expect("positions and blocks are >= 0");
        let mut layout = BatchLayout::new(self.host.block_size());
        for &row in rows {
            let row = usize::try_from(row).expect("rows are not negative");
            let seq = self.host.token_to_seq()[row] as usize;
            let n_computed = as_u32(self.host.positions()[row]);
            let n_blocks = (n_computed + 1).div_ceil(self.host.block_size()) as usize;
            let table = &self.host.block_tables()[seq * self.host.max_blocks()..][..n_blocks];
            let blocks: Vec<u32> = table.iter().map(|&block| as_u32(block)).collect();
            layout.push(SeqSpec { n_computed, n_query: 1 }, &blocks);
        }
        layout.finish();
        Self::upload(&layout, self.positions.device())
    }
}
