//! Why a checkpoint cannot be used.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use quantization::QuantizationError;
use torch_ext::TensorError;

use crate::parameters::layer_of;
use crate::storage::StorageFault;

/// A tensor that the index puts into a shard that does not hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misplaced {
    /// The tensor.
    pub name: String,
    /// The shard that the index names.
    pub file: PathBuf,
    /// The shard that holds it instead, if one of those that the index names does.
    pub found_in: Option<PathBuf>,
}

/// A tensor with another shape than the model needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misshapen {
    /// The tensor.
    pub name: String,
    /// The shard that holds it.
    pub file: PathBuf,
    /// Its shape in the shard.
    pub shape: Vec<usize>,
    /// The shape that the model needs.
    pub expected: Vec<usize>,
}

/// Why a checkpoint was refused. Every variant names the file or folder, and the tensors if the
/// fault is with tensors.
#[derive(Debug)]
#[non_exhaustive]
pub enum WeightsError {
    /// The folder has neither `model.safetensors.index.json` nor `model.safetensors`.
    NoWeights {
        /// Which folder.
        dir: PathBuf,
    },
    /// A file cannot be opened, mapped or read.
    Read {
        /// Which file.
        file: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The index is not a JSON object with a `weight_map` of plain file names.
    BadIndex {
        /// Which file.
        file: PathBuf,
        /// What is wrong with it.
        source: checkpoint_files::IndexError,
    },
    /// The index names shards that are not in the folder.
    ShardsAbsent {
        /// The index.
        index: PathBuf,
        /// The absent files.
        absent: Vec<PathBuf>,
    },
    /// A shard's header cannot be understood.
    BadHeader {
        /// Which shard.
        file: PathBuf,
        /// What is wrong with it.
        source: checkpoint_files::HeaderError,
    },
    /// A shard is shorter or longer than its header says.
    BadLength {
        /// Which shard.
        file: PathBuf,
        /// Bytes that the header asks for, the header included.
        expected: u64,
        /// Bytes that are there.
        actual: u64,
        /// A tensor whose data is incomplete, if the file is too short.
        first_cut: Option<String>,
    },
    /// The index puts tensors into shards that do not hold them.
    NotInShard {
        /// The index.
        index: PathBuf,
        /// The tensors.
        misplaced: Vec<Misplaced>,
    },
    /// There are shards, and no index that says which tensors they hold.
    IndexAbsent {
        /// The checkpoint folder.
        dir: PathBuf,
        /// How many files end in `.safetensors`.
        n_shards: usize,
    },
    /// Tensors that the model needs are missing, misshapen, or stored in a way that cannot be read.
    Unfit {
        /// The checkpoint folder.
        dir: PathBuf,
        /// Names of the tensors that are not there.
        missing: Vec<String>,
        /// Tensors of the wrong shape.
        misshapen: Vec<Misshapen>,
        /// Tensors that cannot be read as they are stored.
        unreadable: Vec<(String, StorageFault)>,
        /// How many tensors the model needs of each layer.
        n_required: Box<BTreeMap<usize, usize>>,
    },
    /// Drafting needs MTP tensors that the checkpoint does not bring.
    MtpIncomplete {
        /// The checkpoint folder.
        dir: PathBuf,
        /// What is wrong with the MTP tensors; [`WeightsError::Unfit`].
        source: Box<WeightsError>,
    },
    /// Drafting was asked of a checkpoint whose config has no MTP layers.
    NoMtpLayers {
        /// The checkpoint folder.
        dir: PathBuf,
    },
    /// A tensor was asked for that was not loaded, or was already taken.
    NotLoaded {
        /// The tensor.
        name: String,
    },
    /// libtorch could not make or convert a tensor.
    Tensor {
        /// The tensor.
        name: String,
        /// The shard that holds it.
        file: PathBuf,
        /// What libtorch said.
        source: TensorError,
    },
    /// The codes and scales of a tensor are no matrix.
    Quantization {
        /// The tensor.
        name: String,
        /// The shard at fault: that of the scales, or that of the codes.
        file: PathBuf,
        /// What is wrong.
        source: QuantizationError,
    },
    /// A tensor could not be moved to a device.
    Device {
        /// The tensor.
        name: String,
        /// What libtorch said.
        source: tch::TchError,
    },
    /// A dummy tensor could not be made.
    Dummy {
        /// The tensor.
        name: String,
        /// What libtorch said.
        source: TensorError,
    },
}

/// The way out where MTP layers are at fault.
const NO_DRAFTING: &str = "give --num-speculative-tokens 0 to run without drafting";

impl WeightsError {
    /// A line for each tensor that does not fit, or for a whole layer that is not there.
    pub(crate) fn faults(&self) -> Vec<String> {
        let Self::Unfit { missing, misshapen, unreadable, n_required, .. } = self else {
            return vec![self.to_string()];
        };
        let mut n_missing = BTreeMap::new();
        for layer in missing.iter().filter_map(|name| layer_of(name)) {
            *n_missing.entry(layer).or_insert(0) += 1;
        }
        let mut lines = Vec::new();
        for name in missing {
            let layer = layer_of(name);
            let whole = layer.filter(|layer| n_required.get(layer) == n_missing.get(layer));
            lines.push(match whole {
                Some(layer) => {
                    let n_tensors = n_missing[&layer];
                    format!("model.layers.{layer} is missing with all its {n_tensors} tensors")
                }
                None => format!("{name} is missing"),
            });
        }
        lines.dedup();
        lines.extend(misshapen.iter().map(Misshapen::to_string));
        lines.extend(unreadable.iter().map(|(name, fault)| format!("{name} {fault}")));
        lines
    }
}

/// One fault on the same line, more on lines of their own.
fn joined(faults: &[String]) -> String {
    match faults {
        [fault] => format!(" {fault}; "),
        faults => format!("\n  {}\n", faults.join("\n  ")),
    }
}

impl fmt::Display for WeightsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoWeights { dir } => write!(
                f,
                "{} has no weights: neither model.safetensors.index.json nor model.safetensors",
                dir.display()
            ),
            Self::IndexAbsent { dir, n_shards } => write!(
                f,
                "{} has {n_shards} .safetensors files but no model.safetensors.index.json: get it, \
                 or call a single file model.safetensors",
                dir.display()
            ),
            Self::Read { file, source } => write!(f, "cannot read {}: {source}", file.display()),
            Self::BadIndex { file, source } => {
                write!(f, "{} is not a safetensors index: {source}", file.display())
            }
            Self::ShardsAbsent { index, absent } => {
                write!(f, "{} names files that are not there:", index.display())?;
                absent.iter().try_for_each(|file| write!(f, " {}", file.display()))
            }
            Self::BadHeader { file, source } => {
                write!(f, "{} has a bad safetensors header: {source}", file.display())
            }
            Self::BadLength { file, expected, actual, first_cut } => {
                let file = file.display();
                write!(f, "{file} has {actual} bytes but its header asks for {expected}")?;
                match first_cut {
                    Some(name) => write!(f, "; it was cut, the first tensor hurt is {name}"),
                    None => write!(f, "; it has trailing bytes"),
                }
            }
            Self::NotInShard { index, misplaced } => {
                write!(f, "{} names shards that lack the tensor:", index.display())?;
                misplaced.iter().try_for_each(|tensor| write!(f, "\n  {tensor}"))
            }
            Self::Unfit { dir, .. } => {
                write!(f, "{} does not fit its config:", dir.display())?;
                self.faults().iter().try_for_each(|fault| write!(f, "\n  {fault}"))
            }
            Self::MtpIncomplete { dir, source } => write!(
                f,
                "drafting was asked for, but MTP tensors of {} do not fit its \
                 config:{}{NO_DRAFTING}",
                dir.display(),
                joined(&source.faults())
            ),
            Self::NoMtpLayers { dir } => write!(
                f,
                "drafting was asked for, but config.json of {} has num_nextn_predict_layers 0; \
                 {NO_DRAFTING}",
                dir.display()
            ),
            Self::NotLoaded { name } => write!(f, "{name} was not loaded or was already taken"),
            Self::Tensor { name, file, source } => {
                write!(f, "cannot load {name} from {}: {source}", file.display())
            }
            Self::Quantization { name, file, source } => {
                write!(
                    f,
                    "cannot load {name} from {}: {source}; get that file again",
                    file.display()
                )
            }
            Self::Device { name, source } => write!(f, "cannot move {name}: {source}"),
            Self::Dummy { name, source } => write!(f, "cannot make {name}: {source}"),
        }
    }
}

impl fmt::Display for Misplaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is not in {}", self.name, self.file.display())?;
        match &self.found_in {
            Some(file) => write!(f, " but in {}", file.display()),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Misshapen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, file, shape, expected } = self;
        write!(f, "{name} has shape {shape:?} instead of {expected:?} in {}", file.display())
    }
}

impl std::error::Error for WeightsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Read { source, .. } => Some(source),
            Self::BadIndex { source, .. } => Some(source),
            Self::BadHeader { source, .. } => Some(source),
            Self::Tensor { source, .. } => Some(source),
            Self::Quantization { source, .. } => Some(source),
            Self::Device { source, .. } => Some(source),
            Self::Dummy { source, .. } => Some(source),
            _ => None,
        }
    }
}
