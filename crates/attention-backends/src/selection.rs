//! Which keys each row of sparse attention attends.

use tch::{Device, Kind, Tensor};
use torch_ext::{TensorError, empty, slice_mut};

use crate::device_layout::DeviceLayout;

/// The keys that each row attends, as positions of its own sequence.
///
/// Row `t` attends exactly the first `counts[t]` entries of `indices[t]`: ascending positions, none
/// behind the row's own. The entries behind them are -1 and are never looked at. Positions, not
/// slots: a selection stays right in every layer, whose caches share block tables, and in a later
/// draft step, whose layout is another one.
#[derive(Debug)]
pub struct Selection {
    indices: Tensor,
    counts: Tensor,
}

impl Selection {
    /// From `indices` i32 `[rows, topk]` and `counts` i32 `[rows]`.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if kinds or shapes do not fit each other.
    pub fn new(indices: Tensor, counts: Tensor) -> Result<Self, TensorError> {
        for tensor in [&indices, &counts] {
            if tensor.f_kind()? != Kind::Int {
                return Err(TensorError::WrongKind {
                    found: tensor.f_kind()?,
                    expected: Kind::Int,
                });
            }
        }
        let (found, rows) = (indices.size(), counts.size());
        if found.len() != 2 || rows != found[..1] {
            return Err(TensorError::WrongShape {
                what: "the indices of a selection",
                found,
                expected: vec![rows.first().copied().unwrap_or(-1), -1],
            });
        }
        Ok(Self { indices, counts })
    }

    /// All keys that the rows of `layout` see; as wide as the row that sees most.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if memory is short.
    pub fn all_visible(layout: &DeviceLayout) -> Result<Self, TensorError> {
        let positions = layout.host().positions();
        let topk = positions.iter().max().map_or(1, |&position| position as usize + 1);
        let mut indices = empty::<i32>(&[positions.len() as i64, topk as i64])?;
        let rows = slice_mut::<i32>(&mut indices)?.chunks_exact_mut(topk);
        for (row, &position) in rows.zip(positions) {
            let (seen, rest) = row.split_at_mut(position as usize + 1);
            seen.iter_mut().zip(0..).for_each(|(index, position)| *index = position);
            rest.fill(-1);
        }
        let counts: Vec<i32> = positions.iter().map(|position| position + 1).collect();
        let device = layout.positions.device();
        let counts = Tensor::f_from_slice(&counts)?.f_to_device(device)?;
        Self::new(indices.f_to_device(device)?, counts)
    }

    /// The rows `rows` i64 `[R]`, in that order.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if a row is not there.
    pub fn select_rows(&self, rows: &Tensor) -> Result<Self, TensorError> {
        Ok(Self {
            indices: self.indices.f_index_select(0, rows)?,
            counts: self.counts.f_index_select(0, rows)?,
        })
    }

    /// Positions, i32 `[rows, topk]`; those behind a row's count are -1.
    pub fn indices(&self) -> &Tensor {
        &self.indices
    }

    /// Selected keys of each row, i32 `[rows]`.
    pub fn counts(&self) -> &Tensor {
        &self.counts
    }

    /// Number of rows.
    #[must_use]
    pub fn n_rows(&self) -> usize {
        self.counts.numel()
    }

    /// The most keys that a row may select.
    #[must_use]
    pub fn topk(&self) -> usize {
        self.indices.size()[1] as usize
    }

    /// The selected positions of each row, for tests and reports.
    ///
    /// # Errors
    ///
    /// [`TensorError`] if the selection cannot be copied to the host.
    pub fn to_rows(&self) -> Result<Vec<Vec<i32>>, TensorError> {
        let on_host = |tensor: &Tensor| -> Result<Vec<i32>, TensorError> {
            let flat = tensor.f_to_device(Device::Cpu)?.f_contiguous()?.f_view([-1])?;
            Ok(Vec::<i32>::try_from(&flat)?)
        };
        let (indices, counts) = (on_host(&self.indices)?, on_host(&self.counts)?);
        let topk = self.topk();
        let row = |(row, &count): (usize, &i32)| indices[row * topk..][..count as usize].to_vec();
        Ok(counts.iter().enumerate().map(row).collect())
    }

    /// Refuses a selection whose rows are not those of `layout`.
    pub(crate) fn check(&self, layout: &DeviceLayout) -> Result<(), TensorError> {
        let n_rows = layout.host().n_tokens();
        if self.n_rows() == n_rows {
            return Ok(());
        }
        Err(TensorError::WrongShape {
            what: "the selection of a pass",
            found: self.indices.size(),
            expected: vec![n_rows as i64, self.topk() as i64],
        })
    }
}
