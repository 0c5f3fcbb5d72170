//! Gated feed-forward layers: one, and one per expert.

use std::ops::Range;

use crate::exp::silu_and_mul_on;
use crate::linear::PackedLinear;
use crate::parallel::{Disjoint, for_each_task, n_threads};
use crate::simd::Isa;

/// Tokens routed at once; bounds the buffers of a long prefill.
const CHUNK_TOKENS: usize = 256;

/// `down(silu(gate(x)) * up(x))`, with gate and up packed as one layer.
#[derive(Clone, Debug)]
pub struct SwiGluMlp {
    gate_up: PackedLinear,
    down: PackedLinear,
}

impl SwiGluMlp {
    /// From gate and up `[width, hidden]` and down `[hidden, width]`.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit together.
    #[must_use]
    pub fn new(gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> Self {
        assert_eq!(gate.n_out(), up.n_out(), "gate and up have one shape");
        assert_eq!(gate.n_out(), down.n_in(), "down is [hidden, width]");
        assert_eq!(gate.n_in(), down.n_out(), "down is [hidden, width]");
        Self { gate_up: PackedLinear::stack([gate, up]), down }
    }

    /// Inputs and outputs of a row.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.down.n_out()
    }

    /// Computes `out` `[n_rows, hidden]` from `x` of the same shape.
    ///
    /// # Panics
    ///
    /// If the lengths do not match.
    pub fn forward(&self, x: &[f32], out: &mut [f32]) {
        self.forward_on(Isa::detect(), x, out);
    }

    fn forward_on(&self, isa: Isa, x: &[f32], out: &mut [f32]) {
        let n_rows = x.len() / self.hidden();
        let width = self.down.n_in();
        let mut gate_up = vec![0.0; n_rows * 2 * width];
        let mut act = vec![0.0; n_rows * width];
        self.gate_up.forward_on(isa, x, &mut gate_up);
        silu_and_mul_on(isa, &gate_up, width, &mut act);
        self.down.forward_on(isa, &act, out);
    }

    fn cost(&self, n_rows: usize) -> usize {
        self.gate_up.cost(n_rows) + self.down.cost(n_rows)
    }
}

/// The routed experts of a layer.
#[derive(Clone, Debug)]
pub struct MoeExperts {
    hidden: usize,
    experts: Vec<SwiGluMlp>,
}

impl MoeExperts {
    /// Experts in the order of their ids.
    ///
    /// # Panics
    ///
    /// If there is none or they differ in their hidden size.
    #[must_use]
    pub fn new(experts: Vec<SwiGluMlp>) -> Self {
        let hidden = experts.first().expect("a layer has at least one expert").hidden();
        assert!(experts.iter().all(|expert| expert.hidden() == hidden), "one hidden size");
        Self { hidden, experts }
    }

    /// `out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`, in ascending `k`.
    ///
    /// `x` and `out` are `[n_tokens, hidden]`, `ids` and `weights` `[n_tokens, top_k]`. Tokens are
    /// grouped by expert, and each still gets the bits that it gets alone.
    ///
    /// # Panics
    ///
    /// If the lengths do not match or an id has no expert.
    pub fn forward(&self, x: &[f32], ids: &[i32], weights: &[f32], out: &mut [f32]) {
        self.forward_on(Isa::detect(), x, (ids, weights), out);
    }

    fn forward_on(&self, isa: Isa, x: &[f32], (ids, weights): (&[i32], &[f32]), out: &mut [f32]) {
        assert!(x.len().is_multiple_of(self.hidden), "x is [n_tokens, hidden]");
        assert_eq!(x.len(), out.len(), "x and out have one shape");
        assert_eq!(ids.len(), weights.len(), "ids and weights have one shape");
        let n_tokens = x.len() / self.hidden;
        if n_tokens == 0 {
            return;
        }
        assert!(ids.len().is_multiple_of(n_tokens), "ids is [n_tokens, top_k]");
        let top_k = ids.len() / n_tokens;
        out.fill(0.0);
        if top_k == 0 {
            return;
        }
        let chunks = x.chunks(CHUNK_TOKENS * self.hidden);
        let routes = ids.chunks(CHUNK_TOKENS * top_k).zip(weights.chunks(CHUNK_TOKENS * top_k));
        let outs = out.chunks_mut(CHUNK_TOKENS * self.hidden);
        for ((x, (ids, weights)), out) in chunks.zip(routes).zip(outs) {
            let groups = Groups::new(ids, self.experts.len());
            let outputs = self.run_experts(isa, x, top_k, &groups);
            self.combine(&groups, &outputs, weights, out);
        }
    }

    /// The outputs of all (token, slot) pairs, `[n_pairs, hidden]` in the order of the groups.
    fn run_experts(&self, isa: Isa, x: &[f32], top_k: usize, groups: &Groups) -> Vec<f32> {
        let hidden = self.hidden;
        let mut outputs = vec![0.0; groups.pairs.len() * hidden];
        let active = groups.ranges().zip(&self.experts).filter(|(range, _)| !range.is_empty());
        let cost = active.map(|(range, expert)| expert.cost(range.len())).sum();
        let shared = Disjoint::new(&mut outputs);
        for_each_task(self.experts.len(), n_threads(cost), |expert| {
            let (start, end) = (groups.starts[expert], groups.starts[expert + 1]);
            if start == end {
                return;
            }
            let mut rows = Vec::with_capacity((end - start) * hidden);
            for &pair in &groups.pairs[start..end] {
                rows.extend_from_slice(&x[pair / top_k * hidden..][..hidden]);
            }
            // SAFETY: the groups of the experts do not overlap, and an expert runs once.
            let out = unsafe { shared.slice(start * hidden, (end - start) * hidden) };
            self.experts[expert].forward_on(isa, &rows, out);
        });
        outputs
    }

    /// Adds the weighted outputs of each token, slot by slot.
    fn combine(&self, groups: &Groups, outputs: &[f32], weights: &[f32], out: &mut [f32]) {
        let n_tokens = out.len() / self.hidden;
        let top_k = weights.len() / n_tokens;
        let mut place = vec![0; weights.len()];
        for (at, &pair) in groups.pairs.iter().enumerate() {
            place[pair] = at;
        }
        let slots = place.chunks_exact(top_k).zip(weights.chunks_exact(top_k));
        for ((places, weights), out) in slots.zip(out.chunks_exact_mut(self.hidden)) {
            for (&at, &weight) in places.iter().zip(weights) {
                let output = &outputs[at * self.hidden..][..self.hidden];
                for (sum, &value) in out.iter_mut().zip(output) {
                    // Not fused: the same on every instruction set without asking for one.
                    *sum += weight * value;
                }
            }
        }
    }
}

/// The (token, slot) pairs of a batch, grouped by expert.
struct Groups {
    /// Pair indices `token * top_k + slot`, ascending within an expert.
    pairs: Vec<usize>,
    /// Where the pairs of each expert start, `[n_experts + 1]`.
    starts: Vec<usize>,
}

impl Groups {
    fn new(ids: &[i32], n_experts: usize) -> Self {
        let mut starts = vec![0; n_experts + 1];
        for &id in ids {
            assert!(id >= 0 && (id as usize) < n_experts, "an id has an expert");
            starts[id as usize + 1] += 1;
        }
        for expert in 0..n_experts {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let mut pairs = vec![0; ids.len()];
        for (pair, &id) in ids.iter().enumerate() {
            pairs[next[id as usize]] = pair;
            next[id as usize] += 1;
        }
        Self { pairs, starts }
    }

    /// Where the pairs of each expert are.
    fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.starts.windows(2).map(|bounds| bounds[0]..bounds[1])
    }
}

#[cfg(test)]
mod tests;
