//! How weights lie in memory.

use half::bf16;
use rayon::prelude::*;

use crate::simd::{F32x16, LANES, Lanes};

/// Outputs of a panel: two vectors.
pub(super) const PANEL: usize = 2 * LANES;
/// Inputs that are packed at once.
const PACK_INPUTS: usize = 64;

/// The weights of one input and the outputs of one panel.
pub(super) trait PanelRow: Copy + Send + Sync {
    type Element: Copy + Sync;
    /// Inputs whose weights share an element.
    const SHARING: usize = 1;
    const ZERO: Self;

    /// Sets the weights that an element holds, which are zero so far: of an output and
    /// [`PanelRow::SHARING`] inputs.
    fn set(rows: &mut [Self], output: usize, element: Self::Element);

    /// The weights; those of codes over [`crate::simd::CODE_FACTOR`] and not scaled yet.
    fn load<V: F32x16>(&self) -> [V; 2];
}

#[derive(Clone, Copy, Debug)]
pub(super) struct F32Row(pub(super) [Lanes; 2]);

/// Word `i` holds output `i` in its low half and output `16 + i` in its high half.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Bf16Row([u32; LANES]);

/// Byte `2i` holds output `i`, byte `2i + 1` output `16 + i`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct E4m3Row([u8; PANEL]);

/// Byte `i` holds output `i` in its low half and output `16 + i` in its high half.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub(super) struct E2m1Row([u8; LANES]);

impl PanelRow for F32Row {
    type Element = f32;
    const ZERO: Self = Self([Lanes::ZERO; 2]);

    fn set(rows: &mut [Self], output: usize, weight: f32) {
        rows[0].0[output / LANES].0[output % LANES] = weight;
    }

    #[inline(always)]
    fn load<V: F32x16>(&self) -> [V; 2] {
        [V::load(&self.0[0].0), V::load(&self.0[1].0)]
    }
}

impl PanelRow for Bf16Row {
    type Element = bf16;
    const ZERO: Self = Self([0; LANES]);

    fn set(rows: &mut [Self], output: usize, weight: bf16) {
        rows[0].0[output % LANES] |= u32::from(weight.to_bits()) << (16 * (output / LANES));
    }

    #[inline(always)]
    fn load<V: F32x16>(&self) -> [V; 2] {
        V::load_bf16_pair(&self.0)
    }
}

impl PanelRow for E4m3Row {
    type Element = u8;
    const ZERO: Self = Self([0; PANEL]);

    fn set(rows: &mut [Self], output: usize, code: u8) {
        rows[0].0[output % LANES * 2 + output / LANES] = code;
    }

    #[inline(always)]
    fn load<V: F32x16>(&self) -> [V; 2] {
        V::load_e4m3_pair(&self.0)
    }
}

impl PanelRow for E2m1Row {
    type Element = u8;
    const SHARING: usize = 2;
    const ZERO: Self = Self([0; LANES]);

    fn set(rows: &mut [Self], output: usize, codes: u8) {
        let shift = 4 * (output / LANES);
        rows[0].0[output % LANES] |= (codes & 0xf) << shift;
        rows[1].0[output % LANES] |= (codes >> 4) << shift;
    }

    #[inline(always)]
    fn load<V: F32x16>(&self) -> [V; 2] {
        V::load_e2m1_pair(&self.0)
    }
}

/// The panels of a weight `[n_out, n_in]`, of whose rows each is `n_in / SHARING` elements.
pub(super) fn pack<W: PanelRow>(weight: &[W::Element], n_in: usize) -> Vec<W> {
    let width = n_in / W::SHARING;
    let n_panels = (weight.len() / width).div_ceil(PANEL);
    let mut panels = Vec::new();
    (0..n_panels * n_in).into_par_iter().map(|_| W::ZERO).collect_into_vec(&mut panels);
    let outputs = weight.par_chunks(PANEL * width);
    panels.par_chunks_mut(n_in).zip(outputs).for_each(|(panel, rows)| {
        // A few inputs at a time, so that what is written stays in the nearest cache.
        for first in (0..width).step_by(PACK_INPUTS) {
            let elements = first..width.min(first + PACK_INPUTS);
            let inputs = elements.start * W::SHARING..elements.end * W::SHARING;
            for (output, row) in rows.chunks_exact(width).enumerate() {
                let dst = panel[inputs.clone()].chunks_exact_mut(W::SHARING);
                for (dst, &element) in dst.zip(&row[elements.clone()]) {
                    W::set(dst, output, element);
                }
            }
        }
    });
    panels
}

/// Appends the panels or scales of a part to those of the part before it.
pub(super) fn join<T>(last: &mut Vec<T>, part: &mut Vec<T>) -> bool {
    last.reserve_exact(part.len());
    last.append(part);
    true
}
