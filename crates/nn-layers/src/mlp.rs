//! The gated feed-forward layer.

use half::bf16;
use kernels::SwiGluMlp;
use tch::{Kind, Tensor};
use torch_ext::{TensorError, empty, slice, slice_mut};

use crate::ops::{Ops, matrix, rows};

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
    pub fn new(gate_up_down: [&Tensor; 3], ops: Ops) -> Result<Self, TensorError> {
        let form = match ops {
            Ops::Torch => {
                check_shapes(gate_up_down)?;
                let [gate, up, down] = gate_up_down;
                let gate_up = Tensor::f_cat(&[gate, up], 0)?;
                Form::Torch { gate_up, down: down.shallow_clone() }
            }
            Ops::Fused => Form::Fused(pack_mlp(gate_up_down)?),
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

/// Packs the weights of gate, up and down.
fn pack_mlp(gate_up_down: [&Tensor; 3]) -> Result<SwiGluMlp, TensorError> {
    check_shapes(gate_up_down)?;
    let [gate, up, down] = gate_up_down;
    let hidden = matrix(gate)?.1;
    if gate.f_kind()? == Kind::BFloat16 {
        let (gate, up) = (slice::<bf16>(gate)?, slice(up)?);
        return Ok(SwiGluMlp::from_bf16(gate, up, slice(down)?, hidden));
    }
    Ok(SwiGluMlp::from_f32(slice(gate)?, slice(up)?, slice(down)?, hidden))
}

fn check_shapes([gate, up, down]: [&Tensor; 3]) -> Result<(), TensorError> {
    let (inner, hidden) = matrix(gate)?;
    let shape = [inner as i64, hidden as i64];
    for (what, weight, expected) in [
        ("the weight of up_proj", up, shape),
        ("the weight of down_proj", down, [shape[1], shape[0]]),
    ] {
        if weight.size() != expected {
            let (found, expected) = (weight.size(), expected.to_vec());
            return Err(TensorError::WrongShape { what, found, expected });
        }
    }
    Ok(())
}
