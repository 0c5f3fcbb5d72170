//! How each tensor is stored: decided from what the headers say of it and of its scale, and from
//! what the config declares where they do not say enough.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Bound;

use model_config::{DeclaredFormats, TensorSpec, WeightFormat};
use safetensors::Dtype;

use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::convert::kind_of;

/// Columns that share an exponent in the microscaling formats.
pub(crate) const MX_GROUP: usize = 32;
/// What follows the name of a tensor in that of its scale.
pub(crate) const SCALES: [&str; 2] = ["_scale_inv", "_scale"];
/// What compressed-tensors adds to the name of a tensor whose values are packed.
pub(crate) const PACKED: &str = "_packed";
/// What follows the name of a tensor in those of what would change its values and is not read.
const UNREAD: [&str; 4] = ["_scale_2", "_global_scale", "_zero_point", "_g_idx"];

/// How a tensor of the checkpoint is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// As values that libtorch knows.
    Dense,
    /// As codes with scales.
    Quantized(Packing),
}

/// Where the parts of a quantised matrix are and what they mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// Name of the codes.
    pub(crate) codes: String,
    /// Name of the scales.
    pub(crate) scales: String,
    /// Two E2M1 codes a byte; else one E4M3 code.
    pub(crate) is_e2m1: bool,
    /// Which elements share a scale, `[rows, columns]`.
    pub(crate) block: [usize; 2],
}

/// Why a tensor cannot be read as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StorageFault {
    /// Its dtype is none that can be loaded.
    Dtype(Dtype),
    /// It has codes of this dtype and no scale.
    NoScale {
        /// The dtype.
        dtype: Dtype,
        /// Names that its scale may have.
        scales: [String; 2],
    },
    /// Two tensors could be meant.
    Twice {
        /// Their names.
        names: [String; 2],
    },
    /// It is not quantised and has a scale.
    StrayScale {
        /// Its dtype.
        dtype: Dtype,
        /// The scale.
        scale: String,
    },
    /// Its scale is of a dtype that scales of its format do not have.
    ScaleDtype {
        /// The scale.
        scale: String,
        /// The dtype of the scale.
        dtype: Dtype,
    },
    /// Its scale has not the shape that its format asks for.
    ScaleShape {
        /// The scale.
        scale: String,
        /// The shape of the scale.
        shape: Vec<usize>,
        /// The shapes that it may have, by what the config says.
        expected: Vec<[usize; 2]>,
    },
    /// Its scale fits two sizes of blocks that the config declares for it.
    TwoBlocks {
        /// The scale.
        scale: String,
        /// The sizes, `[rows, columns]`.
        blocks: [[usize; 2]; 2],
    },
    /// Its bytes are packed, and the config does not say what they mean.
    Undeclared {
        /// The dtype.
        dtype: Dtype,
    },
    /// Something beside it changes what its codes mean.
    Unread {
        /// The name of that.
        part: String,
    },
    /// It is quantised although the config excludes it.
    Excluded {
        /// The dtype.
        dtype: Dtype,
        /// The entry of the exclusion list.
        entry: String,
    },
}

impl StorageFault {
    /// Whether another `quantization_config` could make it right.
    pub(crate) fn is_about_config(&self) -> bool {
        matches!(
            self,
            Self::ScaleShape { .. }
                | Self::TwoBlocks { .. }
                | Self::Undeclared { .. }
                | Self::Excluded { .. }
        )
    }
}

impl fmt::Display for StorageFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dtype(dtype) => write!(
                f,
                "is {dtype:?}; only F32, F16 and BF16 can be loaded, and matrices in F8_E4M3 or \
                 packed MXFP4 with their scales"
            ),
            Self::NoScale { dtype, scales: [first, second] } => write!(
                f,
                "is {dtype:?} and has no scale, neither {first} nor {second}; get the rest of \
                 the checkpoint"
            ),
            Self::Twice { names: [first, second] } => {
                write!(f, "is ambiguous: there are both {first} and {second}; remove one of them")
            }
            Self::StrayScale { dtype, scale } => write!(
                f,
                "is {dtype:?}, not quantised, but has the scale {scale}; remove the scale, or get \
                 the quantised tensor"
            ),
            Self::ScaleDtype { scale, dtype } => {
                write!(f, "has the scale {scale} in {dtype:?}, which scales of its format are not")
            }
            Self::ScaleShape { scale, shape, expected } => {
                let expected: Vec<_> = expected.iter().map(|shape| format!("{shape:?}")).collect();
                write!(
                    f,
                    "has the scale {scale} of shape {shape:?} instead of {}; one for each block \
                     needs the right weight_block_size in quantization_config",
                    expected.join(" or ")
                )
            }
            Self::TwoBlocks { scale, blocks: [first, second] } => write!(
                f,
                "has the scale {scale}, which fits blocks of {first:?} and of {second:?}, and \
                 quantization_config declares both; let only one of its patterns match"
            ),
            Self::Undeclared { dtype } => write!(
                f,
                "is {dtype:?}, as packed values are, but quantization_config does not say that it \
                 is MXFP4; no other packed format can be loaded"
            ),
            Self::Unread { part } => write!(
                f,
                "is quantised with {part}, which is not supported; use a checkpoint without zero \
                 points and second scales"
            ),
            Self::Excluded { dtype, entry } => write!(
                f,
                "is {dtype:?}, but quantization_config excludes it from quantisation by `{entry}`; \
                 remove the entry, or get the unquantised tensor"
            ),
        }
    }
}

/// A tensor that is there, and how it is stored if its shape is right.
pub(crate) struct Stored<'a> {
    pub(crate) info: TensorInfo<'a>,
    pub(crate) storage: Result<Storage, StorageFault>,
    /// The shape that the tensor needs in the file.
    pub(crate) shape: Vec<usize>,
}

impl Checkpoint {
    /// How an expected tensor is stored; `None` if it is absent.
    pub(crate) fn stored(&self, spec: &TensorSpec) -> Option<Stored<'_>> {
        let name = &spec.name;
        let parts =
            self.shard_of.range::<str, _>((Bound::Included(name.as_str()), Bound::Unbounded));
        let (mut plain, mut packed, mut found, mut unread) = (None, None, [None, None], None);
        for (part, &shard_idx) in parts.take_while(|(part, _)| part.starts_with(name)) {
            let place = match &part[name.len()..] {
                "" => &mut plain,
                PACKED => &mut packed,
                ending if ending == SCALES[0] => &mut found[0],
                ending if ending == SCALES[1] => &mut found[1],
                ending if UNREAD.contains(&ending) => &mut unread,
                _ => continue,
            };
            *place = Some(self.info_in(shard_idx, part));
        }
        let info = plain.or(packed)?;
        let scales = || SCALES.map(|suffix| format!("{name}{suffix}"));
        let mut shape = spec.shape.clone();
        if let ([_, n_in], true) = (&mut shape[..], is_packed(info.dtype)) {
            *n_in = n_in.div_ceil(2);
        }
        let storage = match (plain, packed, found) {
            (Some(plain), Some(packed), _) => {
                Err(StorageFault::Twice { names: [plain.name, packed.name].map(str::to_owned) })
            }
            (.., [Some(_), Some(_)]) => Err(StorageFault::Twice { names: scales() }),
            (.., [scale, other]) => {
                let scale = scale.or(other);
                decide(spec, &info, scale.as_ref()).and_then(|storage| match (storage, unread) {
                    (None, _) => Err(StorageFault::NoScale { dtype: info.dtype, scales: scales() }),
                    (Some(Storage::Quantized(_)), Some(part)) => {
                        Err(StorageFault::Unread { part: part.name.to_owned() })
                    }
                    (Some(storage), _) => Ok(storage),
                })
            }
        };
        Some(Stored { info, storage, shape })
    }
}

/// Names that belong to an expected tensor.
pub(crate) fn names_of(name: &str) -> [String; 4] {
    ["", PACKED, SCALES[0], SCALES[1]].map(|suffix| format!("{name}{suffix}"))
}

/// Bytes that may hold two values each.
fn is_packed(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::U8 | Dtype::I8)
}

fn is_exponent(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::U8 | Dtype::F8_E8M0)
}

/// `None` if a scale is missing.
fn decide(
    spec: &TensorSpec,
    info: &TensorInfo<'_>,
    scale: Option<&TensorInfo<'_>>,
) -> Result<Option<Storage>, StorageFault> {
    let dtype = info.dtype;
    if kind_of(dtype).is_some() {
        return match scale {
            None => Ok(Some(Storage::Dense)),
            Some(scale) => Err(StorageFault::StrayScale { dtype, scale: scale.name.to_owned() }),
        };
    }
    let is_e2m1 = is_packed(dtype);
    let shape = match spec.shape[..] {
        [n_out, n_in] if is_e2m1 && n_in % 2 == 0 || dtype == Dtype::F8_E4M3 => [n_out, n_in],
        _ => return Err(StorageFault::Dtype(dtype)),
    };
    let DeclaredFormats { formats, excluded_by } = &spec.declared;
    if let Some(entry) = excluded_by.clone() {
        return Err(StorageFault::Excluded { dtype, entry });
    }
    if is_e2m1 && !formats.contains(&WeightFormat::Mxfp4) {
        return Err(StorageFault::Undeclared { dtype });
    }
    let Some(scale) = scale else { return Ok(None) };
    let has_exponents = is_exponent(scale.dtype);
    if !has_exponents && (is_e2m1 || kind_of(scale.dtype).is_none()) {
        let (scale, dtype) = (scale.name.to_owned(), scale.dtype);
        return Err(StorageFault::ScaleDtype { scale, dtype });
    }
    let blocks = if is_e2m1 { vec![[1, MX_GROUP]] } else { blocks(shape, formats, has_exponents) };
    let block = block_of(shape, scale, &blocks)?;
    let (codes, scales) = (info.name.to_owned(), scale.name.to_owned());
    Ok(Some(Storage::Quantized(Packing { codes, scales, is_e2m1, block })))
}

/// The blocks that E4M3 codes may have: those that the config declares and, unless it declares
/// smaller ones, those that a scale's shape can tell.
fn blocks(
    [n_out, n_in]: [usize; 2],
    formats: &[WeightFormat],
    has_exponents: bool,
) -> Vec<[usize; 2]> {
    let (group, channel, whole) = ([1, MX_GROUP], [1, n_in], [n_out, n_in]);
    let declared = formats.iter().filter_map(|format| match *format {
        WeightFormat::Fp8Block(block) => Some(block),
        WeightFormat::Fp8Channel => Some(channel),
        WeightFormat::Fp8Tensor => Some(whole),
        WeightFormat::Mxfp8 => Some(group),
        _ => None,
    });
    let mut blocks: Vec<_> = declared.collect();
    if !formats.iter().any(|format| matches!(format, WeightFormat::Fp8Block(_))) {
        blocks.extend(has_exponents.then_some(group));
        blocks.extend([channel, whole]);
    }
    blocks
}

/// The block that gives a scale its shape, no larger than the matrix.
fn block_of(
    [n_out, n_in]: [usize; 2],
    scale: &TensorInfo<'_>,
    blocks: &[[usize; 2]],
) -> Result<[usize; 2], StorageFault> {
    // One scale a channel may be a vector, and one a tensor a scalar.
    let shape = match *scale.shape {
        [] => [1, 1],
        [n] => [n, 1],
        [rows, columns] => [rows, columns],
        _ => [0, 0],
    };
    let cut = |[rows, columns]: &[usize; 2]| [n_out.min(*rows), n_in.min(*columns)];
    let scales_of = |[rows, columns]: [usize; 2]| [n_out.div_ceil(rows), n_in.div_ceil(columns)];
    let blocks: BTreeSet<_> = blocks.iter().map(cut).collect();
    let mut fitting = blocks.iter().copied().filter(|block| scales_of(*block) == shape);
    let name = scale.name.to_owned();
    match (fitting.next(), fitting.next()) {
        (Some(block), None) => Ok(block),
        (Some(first), Some(second)) => {
            Err(StorageFault::TwoBlocks { scale: name, blocks: [first, second] })
        }
        (None, _) => Err(StorageFault::ScaleShape {
            scale: name,
            shape: scale.shape.to_vec(),
            expected: blocks.into_iter().map(scales_of).collect(),
        }),
    }
}
