//! How the copy engine of a Hopper GPU reads a matrix.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use crate::error::invalid;
use crate::memory::Allocation;
use crate::{DType, GemmElement, Gpu, GpuError, View};

/// `CUresult cuTensorMapEncodeTiled(CUtensorMap *, CUtensorMapDataType, cuuint32_t rank, void
/// *address, const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box, const
/// cuuint32_t *element_strides, interleave, swizzle, promotion, fill)`.
pub(crate) type EncodeTensorMap = unsafe extern "C" fn(
    *mut MapWords,
    c_int,
    u32,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// `CUtensorMap`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct MapWords([u64; 16]);

/// Bytes of a row of a box: those over which pieces of 16 bytes are exchanged.
const BOX_ROW_BYTES: usize = 128;

/// How the copy engine reads boxes of a row-major matrix. A box of some rows of 128 bytes each
/// comes to lie row after row, piece `i` of 16 bytes of row `r` at the place of piece
/// `i ^ r % 8`; what is outside the matrix is zero.
///
/// Source: CUDA Driver API, "Tensor Map Object Management".
#[derive(Clone, Copy)]
pub struct TensorMap<'a> {
    pub(crate) words: MapWords,
    pub(crate) memory: &'a Arc<Allocation>,
}

impl fmt::Debug for TensorMap<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorMap({:x?})", self.words.0)
    }
}

impl Gpu {
    /// Whether [`Gpu::tensor_map`] can be asked: the driver knows them. The device must be a Hopper
    /// GPU or later as well.
    #[must_use]
    pub fn has_tensor_maps(&self) -> bool {
        self.tensor_map_encoder().is_some()
    }

    /// A map of `matrix` `[rows, columns]` in boxes of `box_rows` rows.
    ///
    /// # Errors
    ///
    /// Rows that are no multiple of 16 bytes, or a matrix that does not begin at one; more than 256
    /// rows of a box; a driver without tensor maps.
    pub fn tensor_map<'a, T: GemmElement>(
        &self,
        matrix: View<'a, T>,
        columns: usize,
        box_rows: u32,
    ) -> Result<TensorMap<'a>, GpuError> {
        let Some(encode) = self.tensor_map_encoder() else {
            return invalid("the driver of this GPU knows no tensor maps: CUDA 12 has them");
        };
        let row_bytes = columns * size_of::<T>();
        let address = matrix.ptr().address();
        if columns == 0 || !matrix.len().is_multiple_of(columns) {
            return invalid(format!("{} values are no matrix of {columns} columns", matrix.len()));
        }
        if !row_bytes.is_multiple_of(16) || !address.is_multiple_of(16) {
            return invalid(format!("rows of {row_bytes} bytes from {address:#x} on, not of 16s"));
        }
        if !(1..=256).contains(&box_rows) {
            return invalid(format!("a box of {box_rows} rows"));
        }
        // From `cuda.h`.
        let dtype = match T::DTYPE {
            DType::F32 => 7,
            DType::Bf16 => 9,
        };
        const NO_INTERLEAVE: c_int = 0;
        const SWIZZLE_128B: c_int = 3;
        const PROMOTION_256B: c_int = 3;
        const FILL_ZEROS: c_int = 0;
        let sizes = [columns as u64, (matrix.len() / columns) as u64];
        let strides = [row_bytes as u64];
        let shape = [(BOX_ROW_BYTES / size_of::<T>()) as u32, box_rows];
        let mut words = MapWords([0; 16]);
        let driver = self.enter()?;
        // SAFETY: the map and the arrays of two values (one stride) live; the address is that of
        // the view's memory, which is not read here.
        let code = unsafe {
            (encode.call)(
                &mut words,
                dtype,
                2,
                ptr::without_provenance_mut(address as usize),
                sizes.as_ptr(),
                strides.as_ptr(),
                shape.as_ptr(),
                [1, 1].as_ptr(),
                NO_INTERLEAVE,
                SWIZZLE_128B,
                PROMOTION_256B,
                FILL_ZEROS,
            )
        };
        driver.check(encode.name, code)?;
        Ok(TensorMap { words, memory: matrix.memory() })
    }
}
