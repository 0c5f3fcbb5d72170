//! The gated feed-forward layer.

use kernels::SwiGluMlp;
use tch::Tensor;
use torch_ext::{TensorError, empty, slice_mut};
use weights::LoadedWeight;

use crate::ops::{Ops, matrix, pack, rows, wrong_shape};

/// `down(silu(gate(x)) * up(x))`; gate and up are one matrix.
#[derive(Debug)]
pub struct GatedMlp {
    form: Form,
}

#[derive(Debug)]
enum Form {
    Torch { gate_up: Tensor, down: Tensor },
    Fused(SwiGluMlp),
}

impl GatedMlp {
    /// From the weights of gate `[inner, hidden]`, up `[inner, hidden]` and down
    /// `[hidden, inner]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if the shapes do not fit together.
    pub fn new(gate_up_down: [impl Into<LoadedWeight>; 3], ops: Ops) -> Result<Self, TensorError> {
        let gate_up_down = gate_up_down.map(Into::into);
        check_shapes(&gate_up_down)?;
        let [gate, up, down] = &gate_up_down;
        let form = match ops {
            Ops::Torch => Form::Torch {
                gate_up: Tensor::f_cat(&[gate.to_tensor()?, up.to_tensor()?], 0)?,
                down: down.to_tensor()?,
            },
            Ops::Fused => Form::Fused(SwiGluMlp::new(pack(gate)?, pack(up)?, pack(down)?)),
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
                let (rows, _) = rows(x, mlp.hidden())?;
                let mut out = empty::<f32>(&x.size())?;
                mlp.forward(rows, slice_mut(&mut out)?);
                Ok(out)
            }
        }
    }

    pub(crate) fn into_fused(self) -> SwiGluMlp {
        match self.form {
            Form::Fused(mlp) => mlp,
            Form::Torch { .. } => panic!("the experts of a fused layer are fused"),
        }
    }
}

fn check_shapes([gate, up, down]: &[LoadedWeight; 3]) -> Result<(), TensorError> {
    let (inner, hidden) = matrix(gate)?;
    let shape = [inner as i64, hidden as i64];
    for (what, weight, expected) in [
        ("the weight of up_proj", up, shape),
        ("the weight of down_proj", down, [shape[1], shape[0]]),
    ] {
        if weight.size() != expected {
            return Err(wrong_shape(what, weight, expected.to_vec()));
        }
    }
    Ok(())
}
