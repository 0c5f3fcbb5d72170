//! A model of any element type, behind one trait.

use batch_layout::BatchLayout;
use gpu_runtime::GpuError;
use model_config::ModelConfig;

use gpu_kernels::SlotRecord;

use crate::decode::{CapturedStep, DecodeOptions, SlotResult, TableUpdate};
use crate::loader::Element;
use crate::model::{DraftPass, GpuModel, HiddenRows, Selected};

/// A [`GpuModel`] whose element type does not matter.
pub trait AnyModel {
    /// As [`GpuModel::config`].
    fn config(&self) -> &ModelConfig;

    /// As [`GpuModel::num_mtp_layers`].
    fn num_mtp_layers(&self) -> usize;

    /// As [`GpuModel::can_share_selection`].
    fn can_share_selection(&self) -> bool;

    /// As [`GpuModel::forward`].
    ///
    /// # Errors
    ///
    /// As there.
    fn forward(&mut self, ids: &[i32], layout: &BatchLayout) -> Result<(), GpuError>;

    /// As [`GpuModel::logits`].
    ///
    /// # Errors
    ///
    /// As there.
    fn logits(&mut self, hidden: HiddenRows<'_>, mtp: Option<usize>) -> Result<Vec<f32>, GpuError>;

    /// As [`GpuModel::draft`].
    ///
    /// # Errors
    ///
    /// As there.
    fn draft(&mut self, draft: DraftPass<'_>) -> Result<Option<Selected>, GpuError>;

    /// As [`GpuModel::copy_block`].
    ///
    /// # Errors
    ///
    /// As there.
    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), GpuError>;

    /// As [`GpuModel::synchronize`].
    ///
    /// # Errors
    ///
    /// As there.
    fn synchronize(&self) -> Result<(), GpuError>;

    /// As [`GpuModel::allocate_caches`].
    ///
    /// # Errors
    ///
    /// As there.
    fn allocate_caches(&mut self, num_blocks: usize) -> Result<(), GpuError>;

    /// As [`GpuModel::prepare_decode`].
    ///
    /// # Errors
    ///
    /// As there.
    fn prepare_decode(&mut self, options: DecodeOptions) -> Result<Vec<CapturedStep>, GpuError>;

    /// As [`GpuModel::launch_step`].
    ///
    /// # Errors
    ///
    /// As there.
    fn launch_step(
        &mut self,
        updates: &[TableUpdate<'_>],
        slots: &[SlotRecord<'_>],
    ) -> Result<(), GpuError>;

    /// As [`GpuModel::collect_step`].
    ///
    /// # Errors
    ///
    /// As there.
    fn collect_step(
        &mut self,
        n_slots: usize,
        show: &mut dyn FnMut(usize, SlotResult<'_>),
    ) -> Result<(), GpuError>;
}

impl<E: Element> AnyModel for GpuModel<E> {
    fn config(&self) -> &ModelConfig {
        self.config()
    }

    fn num_mtp_layers(&self) -> usize {
        self.num_mtp_layers()
    }

    fn can_share_selection(&self) -> bool {
        self.can_share_selection()
    }

    fn forward(&mut self, ids: &[i32], layout: &BatchLayout) -> Result<(), GpuError> {
        self.forward(ids, layout)
    }

    fn logits(&mut self, hidden: HiddenRows<'_>, mtp: Option<usize>) -> Result<Vec<f32>, GpuError> {
        self.logits(hidden, mtp)
    }

    fn draft(&mut self, draft: DraftPass<'_>) -> Result<Option<Selected>, GpuError> {
        self.draft(draft)
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<(), GpuError> {
        self.copy_block(from, to)
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        self.synchronize()
    }

    fn allocate_caches(&mut self, num_blocks: usize) -> Result<(), GpuError> {
        self.allocate_caches(num_blocks)
    }

    fn prepare_decode(&mut self, options: DecodeOptions) -> Result<Vec<CapturedStep>, GpuError> {
        self.prepare_decode(options)
    }

    fn launch_step(
        &mut self,
        updates: &[TableUpdate<'_>],
        slots: &[SlotRecord<'_>],
    ) -> Result<(), GpuError> {
        self.launch_step(updates, slots)
    }

    fn collect_step(
        &mut self,
        n_slots: usize,
        show: &mut dyn FnMut(usize, SlotResult<'_>),
    ) -> Result<(), GpuError> {
        self.collect_step(n_slots, show)
    }
}
