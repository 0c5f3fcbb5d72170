//! Panels of codes and their scales.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice;

use quantization::{QuantizedMatrix, Scales};

use super::TASK_PANELS;
use super::panels::{F32Row, PANEL, PanelRow, join, pack};
use super::tile::{Input, Output, Tile};
use crate::simd::{CODE_FACTOR, F32x16, Isa, Kernel, LANES, dispatch};

/// Inputs whose weights are decoded at once: with [`TASK_PANELS`], what fits a near cache.
const CHUNK: usize = 64;
/// The exponent of [`CODE_FACTOR`].
const FACTOR_EXPONENT: u8 = 8;

/// Panels of codes. A code of input `k` has the scale of group `k / group`.
#[derive(Clone, Debug)]
pub(super) struct QuantizedPanels<C> {
    n_in: usize,
    /// `[n_panels, n_in]`.
    codes: Vec<C>,
    group: usize,
    scales: PanelScales,
}

/// Scales times [`CODE_FACTOR`], `[n_panels, n_groups]`.
#[derive(Clone, Debug)]
enum PanelScales {
    /// One for all outputs of a panel.
    Panel(Vec<f32>),
    /// One for each output.
    Outputs(Vec<F32Row>),
    /// One for each output, as E8M0 codes above 0.
    Exponents(Vec<[u8; PANEL]>),
}

impl<C: PanelRow<Element = u8>> QuantizedPanels<C> {
    /// Packs a weight with its codes; `None` if it has values that decoding would not give.
    pub(super) fn new(weight: &QuantizedMatrix, codes: &[u8]) -> Option<Self> {
        let n_in = weight.n_in();
        let (group, scales) = match weight.scales() {
            Scales::Blocks { block, values } => {
                (block[1], PanelScales::new(weight, *block, values)?)
            }
            Scales::Groups { group, exponents } => {
                // The greatest code is no power of two.
                let factored = |code: &u8| match code.checked_add(FACTOR_EXPONENT) {
                    Some(u8::MAX) => None,
                    factored => factored,
                };
                let exponents: Option<Vec<u8>> = exponents.iter().map(factored).collect();
                let set = |row: &mut [u8; PANEL], output, code| row[output] = code;
                let rows = spread(weight, [1, *group], &exponents?, ([1; PANEL], set));
                (*group, PanelScales::Exponents(rows))
            }
        };
        Some(Self { n_in, codes: pack(codes, n_in), group, scales })
    }

    /// Appends panels, emptying `other`; `false` if their scales lie in another way.
    pub(super) fn join(&mut self, other: &mut Self) -> bool {
        let is_joined = self.group == other.group
            && match (&mut self.scales, &mut other.scales) {
                (PanelScales::Panel(scales), PanelScales::Panel(others)) => join(scales, others),
                (PanelScales::Outputs(scales), PanelScales::Outputs(others)) => {
                    join(scales, others)
                }
                (PanelScales::Exponents(scales), PanelScales::Exponents(others)) => {
                    join(scales, others)
                }
                _ => false,
            };
        is_joined && join(&mut self.codes, &mut other.codes)
    }

    /// Some rows times some panels, at most [`TASK_PANELS`].
    pub(super) fn run(&self, isa: Isa, panels: Range<usize>, input: Input<'_>, output: Output<'_>) {
        let mut weights = [const { MaybeUninit::uninit() }; TASK_PANELS * CHUNK];
        for first in (0..self.n_in).step_by(CHUNK) {
            let inputs = first..self.n_in.min(first + CHUNK);
            let input = input.columns(inputs.clone());
            let panels = panels.clone();
            let decode = Decode { from: self, panels, inputs, weights: &mut weights };
            let panels = dispatch(isa, decode);
            dispatch(isa, Tile { input, panels, output, is_continued: first > 0 });
        }
    }
}

impl PanelScales {
    fn new(weight: &QuantizedMatrix, block: [usize; 2], values: &[f32]) -> Option<Self> {
        let values: Vec<f32> = values.iter().map(|value| value * CODE_FACTOR).collect();
        if values.iter().any(|value| value.is_infinite()) {
            return None;
        }
        if block[0].is_multiple_of(PANEL) || block[0] >= weight.n_out() {
            let set = |scale: &mut f32, _, value| *scale = value;
            return Some(Self::Panel(spread(weight, block, &values, (0.0, set))));
        }
        let set =
            |row: &mut F32Row, output, value| F32Row::set(slice::from_mut(row), output, value);
        Some(Self::Outputs(spread(weight, block, &values, (F32Row::ZERO, set))))
    }

    #[inline(always)]
    fn load<V: F32x16>(&self, index: usize) -> [V; 2] {
        match self {
            Self::Panel(scales) => [V::splat(scales[index]); 2],
            Self::Outputs(scales) => scales[index].load(),
            Self::Exponents(exponents) => {
                let (halves, _) = exponents[index].as_chunks::<LANES>();
                [V::load_e8m0(&halves[0]), V::load_e8m0(&halves[1])]
            }
        }
    }
}

/// Scales `[ceil(n_out / rows), n_groups]` as `[n_panels, n_groups]` rows of a panel's outputs.
fn spread<T: Copy, R: Clone>(
    weight: &QuantizedMatrix,
    [rows, columns]: [usize; 2],
    scales: &[T],
    (empty, set): (R, impl Fn(&mut R, usize, T)),
) -> Vec<R> {
    let n_groups = weight.n_in().div_ceil(columns);
    let mut panels = vec![empty; weight.n_out().div_ceil(PANEL) * n_groups];
    for output in 0..weight.n_out() {
        let panel = &mut panels[output / PANEL * n_groups..][..n_groups];
        for (row, &scale) in panel.iter_mut().zip(&scales[output / rows * n_groups..]) {
            set(row, output % PANEL, scale);
        }
    }
    panels
}

/// The weights of some inputs of some panels in f32, `[n_panels, n_inputs]`.
struct Decode<'a, 'w, C> {
    from: &'a QuantizedPanels<C>,
    panels: Range<usize>,
    inputs: Range<usize>,
    weights: &'w mut [MaybeUninit<F32Row>],
}

impl<'w, C: PanelRow> Kernel for Decode<'_, 'w, C> {
    type Output = &'w [F32Row];

    #[inline(always)]
    fn run<V: F32x16>(self) -> &'w [F32Row] {
        let QuantizedPanels { n_in, codes, group, scales } = self.from;
        let n_groups = n_in.div_ceil(*group);
        let weights = &mut self.weights[..self.panels.len() * self.inputs.len()];
        let mut at = 0;
        for panel in self.panels {
            let mut first = self.inputs.start;
            while first < self.inputs.end {
                let group_idx = first / group;
                let end = self.inputs.end.min((group_idx + 1) * group);
                let scale = scales.load::<V>(panel * n_groups + group_idx);
                let codes = &codes[panel * n_in + first..panel * n_in + end];
                for (code, weight) in codes.iter().zip(&mut weights[at..]) {
                    let [low, high] = code.load::<V>();
                    let row = weight.write(F32Row::ZERO);
                    low.mul(scale[0]).store(&mut row.0[0].0);
                    high.mul(scale[1]).store(&mut row.0[1].0);
                }
                at += codes.len();
                first = end;
            }
        }
        assert_eq!(at, weights.len(), "every weight is written");
        // SAFETY: the loop wrote the weights from the first to the one before `at`, which is all.
        unsafe { weights.assume_init_ref() }
    }
}
