//! The target and its MTP layers as lists of launches.

use gpu_kernels::{MtpInput, Norm};
use gpu_runtime::{Buffer, GpuError, View};

use crate::device::Device;
use crate::layer::{Keys, LayerCache};
use crate::loader::Element;
use crate::pass::Pass;
use crate::weights::{Layer, MtpLayer};
use crate::workspace::Workspace;

/// The target's parts.
pub(crate) struct Target<'a, E> {
    pub(crate) table: &'a Buffer<E>,
    pub(crate) layers: &'a [Layer<E>],
    pub(crate) norm: &'a Buffer<f32>,
}

impl<E: Element> Target<'_, E> {
    /// All layers; hidden states after the final norm come to `ws.x`.
    pub(crate) fn forward(
        &self,
        device: &Device<E>,
        pass: &Pass<'_>,
        caches: &mut [LayerCache<E>],
        ws: &mut Workspace<E>,
    ) -> Result<(), GpuError> {
        let (kernels, hidden) = (&device.kernels, device.sizes.hidden);
        let (table, residual) = (self.table.view(), ws.residual.view_mut());
        kernels.embed(pass.rows, pass.ids, table, hidden, residual)?;
        let first = device.norm(&self.layers[0].input_norm);
        kernels.rms_norm(pass.rows, ws.residual.view(), first, ws.x.view_mut())?;
        let is_sparse = device.indexer.is_some();
        for (idx, (layer, cache)) in self.layers.iter().zip(caches).enumerate() {
            let keys = match layer.indexer {
                Some(_) => Keys::Choose,
                None if is_sparse => Keys::Selected,
                None => Keys::All,
            };
            layer.write_kv(device, pass, keys, cache, ws)?;
            let next = self.layers.get(idx + 1).map_or(self.norm, |next| &next.input_norm);
            layer.attend(device, pass, keys, cache, (ws, device.norm(next)))?;
        }
        Ok(())
    }
}

/// An MTP layer with the target's embeddings where it has none of its own.
#[derive(Clone, Copy)]
pub(crate) struct Drafter<'a, E> {
    layer: &'a MtpLayer<E>,
    table: &'a Buffer<E>,
}

impl<'a, E: Element> Drafter<'a, E> {
    pub(crate) fn of(layer: &'a MtpLayer<E>, table: &'a Buffer<E>) -> Self {
        Self { layer, table: layer.table.as_ref().unwrap_or(table) }
    }

    pub(crate) fn keys(&self, is_given: bool) -> Keys {
        match (is_given, &self.layer.block.indexer) {
            (true, _) => Keys::Selected,
            (false, Some(_)) => Keys::Choose,
            (false, None) => Keys::All,
        }
    }

    /// Everything up to the KV of all rows.
    pub(crate) fn begin(
        &self,
        device: &Device<E>,
        pass: &Pass<'_>,
        hidden: View<'_, E>,
        (cache, keys): (&mut LayerCache<E>, Keys),
        ws: &mut Workspace<E>,
    ) -> Result<(), GpuError> {
        let layer = self.layer;
        let (enorm, hnorm) = (device.norm(&layer.enorm), device.norm(&layer.hnorm));
        let input = MtpInput { ids: pass.ids, table: self.table.view(), hidden, enorm, hnorm };
        device.kernels.mtp_input(pass.rows, &input, ws.mtp.view_mut())?;
        let (n_rows, width) = (pass.rows.n_rows, 2 * device.sizes.hidden);
        let x = (ws.mtp.view(), width);
        device.linear(n_rows, x, &layer.eh_proj, ws.residual.view_mut())?;
        let norm: Norm<'_> = device.norm(&layer.block.input_norm);
        device.kernels.rms_norm(pass.rows, ws.residual.view(), norm, ws.x.view_mut())?;
        layer.block.write_kv(device, pass, keys, cache, ws)
    }

    /// Takes some of the rows that [`Self::begin`] left in `from` to `to`.
    pub(crate) fn narrow(
        &self,
        device: &Device<E>,
        rows: View<'_, i32>,
        from: &Workspace<E>,
        to: &mut Workspace<E>,
    ) -> Result<(), GpuError> {
        let (kernels, sizes) = (&device.kernels, &device.sizes);
        let hidden = sizes.hidden;
        kernels.gather_rows(rows, from.residual.view(), hidden, to.residual.view_mut())?;
        kernels.gather_rows(rows, from.x.view(), hidden, to.x.view_mut())?;
        if sizes.has_latent {
            return kernels.gather_rows(rows, from.q_a.view(), sizes.q, to.q_a.view_mut());
        }
        let width = sizes.qkv(self.layer.block.indexer.is_some());
        kernels.gather_rows(rows, from.qkv.view(), width, to.qkv.view_mut())
    }

    /// Attention and feed-forward; hidden states after `shared_head.norm` come to `ws.x`.
    pub(crate) fn end(
        &self,
        device: &Device<E>,
        pass: &Pass<'_>,
        (cache, keys): (&LayerCache<E>, Keys),
        ws: &mut Workspace<E>,
    ) -> Result<(), GpuError> {
        let next = device.norm(&self.layer.norm);
        self.layer.block.attend(device, pass, keys, cache, (ws, next))
    }
}
