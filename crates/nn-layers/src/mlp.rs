//! The gated feed-forward layer.

use kernels::PackedLinear;
use tch::Tensor;
use torch_ext::{TensorError, empty, slice_mut};

use crate::ops::{Ops, matrix, pack, rows};

/// `down(silu(gate(x)) * up(x))`; gate and up are one matrix.
#[derive(Debug)]
pub struct GatedMlp {
    form: Form,
}

#[derive(Debug)]
enum Form {
    Torch { gate_up: Tensor, down: Tensor },
    Fused(PackedMlp),
}

impl GatedMlp {
    /// From the weights of gate `[inner, hidden]`, up `[inner, hidden]` and down
    /// `[hidden, inner]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if the shapes do not fit together.
    pub fn new(gate_up_down: [&Tensor; 3], ops: Ops) -> Result<Self, TensorError> {
        let [gate, up, down] = gate_up_down;
        let (inner, hidden) = matrix(gate)?;
        if matrix(down)? != (hidden, inner) {
            return Err(TensorError::WrongShape {
                what: "the weight of down_proj",
                found: down.size(),
                expected: vec![hidden as i64, inner as i64],
            });
        }
        let gate_up = Tensor::f_cat(&[gate, up], 0)?;
        let form = match ops {
            Ops::Torch => Form::Torch { gate_up, down: down.shallow_clone() },
            Ops::Fused => Form::Fused(PackedMlp { gate_up: pack(&gate_up)?, down: pack(down)? }),
        };
        Ok(Self { form })
    }

    /// `x` `[T, hidden]` to `[T, hidden]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if `x` does not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, TensorError> {
        match &self.form {
            Form::Torch { gate_up, down } => {
                let both = x.f_linear(gate_up, None::<&Tensor>)?.f_chunk(2, -1)?;
                let inner = both[0].f_silu()?.f_mul(&both[1])?;
                Ok(inner.f_linear(down, None::<&Tensor>)?)
            }
            Form::Fused(mlp) => {
                let (rows, _) = rows(x, mlp.gate_up.n_in())?;
                let mut out = empty::<f32>(&x.size())?;
                mlp.forward(rows, slice_mut(&mut out)?);
                Ok(out)
            }
        }
    }

    /// The packed weights; fused form only.
    pub(crate) fn packed(&self) -> &PackedMlp {
        match &self.form {
            Form::Fused(mlp) => mlp,
            Form::Torch { .. } => unreachable!("packed weights are used by fused layers only"),
        }
    }
}

/// The fused form: gate and up `[2 * inner, hidden]`, and down.
#[derive(Debug)]
pub(crate) struct PackedMlp {
    gate_up: PackedLinear,
    down: PackedLinear,
}

impl PackedMlp {
    /// `x` and `out` are `[n_rows, hidden]`.
    pub(crate) fn forward(&self, x: &[f32], out: &mut [f32]) {
        let n_rows = x.len() / self.gate_up.n_in();
        let inner = self.down.n_in();
        let mut gate_up = vec![0.0; n_rows * 2 * inner];
        self.gate_up.forward(x, &mut gate_up);
        let mut activated = vec![0.0; n_rows * inner];
        kernels::silu_and_mul(&gate_up, inner, &mut activated);
        self.down.forward(&activated, out);
    }
}
