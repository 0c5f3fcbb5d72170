//! What a checkpoint holds, and every fault of it, from its headers and its config.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use model_config::{
    ConfigDiagnosis, ConfigError, ConfigSummary, LoadDtype, ModelConfig, StoredDtype, TensorSpec,
    WeightFormat,
};
use safetensors::Dtype;

use crate::checkpoint::TensorInfo;
use crate::error::WeightsError;
use crate::open::Survey;
use crate::parameters::{ParameterCounts, is_companion, mtp_layer, weight_name};
use crate::storage::{MX_GROUP, SCALES};

/// What a description is made from, beside the config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightsSource {
    /// The headers of shards; all that are there.
    Shards,
    /// An index whose shards are all absent: its names, with shapes and dtypes by the config.
    Index,
    /// Nothing: what the config asks for.
    Config,
}

/// Something that loading would fail for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What is wrong, and with which file, field or tensor: a line, and more for a list.
    pub text: String,
    /// Whether it is in the way of drafting alone.
    pub only_drafting: bool,
}

/// Values that a model keeps of its weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadedValues {
    /// In the dtype that the model computes in.
    pub model: u64,
    /// Always in float32.
    pub float32: u64,
}

impl LoadedValues {
    /// Bytes with `value_bytes` a value of the model's dtype.
    #[must_use]
    pub fn n_bytes(self, value_bytes: u64) -> u64 {
        self.model * value_bytes + self.float32 * 4
    }
}

/// A checkpoint folder described without reading tensor data.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointSummary {
    /// What `config.json` says.
    pub config: ConfigSummary,
    /// What the rest is made from.
    pub source: WeightsSource,
    /// Parameters by part.
    pub parameters: ParameterCounts,
    /// Bytes of tensor data by stored dtype (safetensors names), sorted by name.
    pub bytes_by_dtype: BTreeMap<String, u64>,
    /// What of the target is kept when it is loaded, packed weights as unpacked ones; `None` if
    /// the config does not say which tensors it has.
    pub loaded: Option<LoadedValues>,
    /// The same of the MTP layers.
    pub loaded_mtp: LoadedValues,
    /// MTP layers that the checkpoint has any tensor of.
    pub num_mtp_layers_present: usize,
    /// Whether every MTP tensor that drafting needs is there, in its shape as far as that is
    /// known; `None` if the config does not say what it needs, or has no MTP layers, or if it is
    /// alone.
    pub is_mtp_complete: Option<bool>,
    /// Everything that loading would fail for, in the order in which it is met. Shards that are all
    /// absent are none.
    pub problems: Vec<Problem>,
}

impl CheckpointSummary {
    /// Describes a folder, also one without shards or index, or with a config that cannot run.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if `config.json` cannot be read at all.
    pub fn of(dir: &Path) -> Result<Self, ConfigError> {
        let ConfigDiagnosis { raw, errors, model } = ConfigDiagnosis::load(dir)?;
        let specs = model.as_ref().map(|model| [model.target_tensors(), model.all_mtp_tensors()]);
        let mut summary = Self {
            config: ConfigSummary::new(&raw),
            source: WeightsSource::Config,
            parameters: ParameterCounts::default(),
            bytes_by_dtype: BTreeMap::new(),
            loaded: None,
            loaded_mtp: LoadedValues::default(),
            num_mtp_layers_present: 0,
            is_mtp_complete: None,
            problems: errors.iter().map(|error| Problem::new(error, false)).collect(),
        };
        let survey = match Survey::of(dir) {
            Ok(survey) => Some(survey),
            Err(WeightsError::NoWeights { .. }) => None,
            Err(fault) => {
                summary.problems.push(Problem::new(&fault, false));
                return Ok(summary);
            }
        };
        let tensors =
            Tensors { survey: survey.as_ref(), dtype: model.as_ref().and_then(|m| m.dtype) };
        summary.count(&tensors, specs.as_ref());
        if let Some(survey) = &survey {
            if survey.is_index_alone {
                summary.source = WeightsSource::Index;
            } else {
                let faults = survey.faults.iter().map(|fault| Problem::new(fault, false));
                summary.problems.extend(faults);
                summary.source = WeightsSource::Shards;
            }
        }
        if let (Some(model), Some(specs)) = (&model, &specs) {
            let quantization = |field: &str| field.starts_with("quantization_config");
            let is_declared = !errors.iter().any(|error| error.field().is_some_and(quantization));
            summary.check(dir, model, (survey.as_ref(), specs), is_declared);
        }
        Ok(summary)
    }

    /// Bytes of tensor data.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.bytes_by_dtype.values().sum()
    }

    /// What is in the way of loading, with or without drafting.
    pub fn problems(&self, drafting: bool) -> impl Iterator<Item = &Problem> {
        self.problems.iter().filter(move |problem| drafting || !problem.only_drafting)
    }

    fn count(&mut self, tensors: &Tensors<'_>, specs: Option<&[Vec<TensorSpec>; 2]>) {
        let all_specs = specs.into_iter().flatten().flatten();
        let by_name: HashMap<&str, &TensorSpec> =
            all_specs.map(|spec| (spec.name.as_str(), spec)).collect();
        let names = tensors.names().unwrap_or_else(|| {
            let required = by_name.values().filter(|spec| !spec.is_optional);
            required.map(|spec| spec.name.as_str()).collect()
        });
        let mut mtp_layers = BTreeSet::new();
        for name in names {
            let spec = by_name.get(weight_name(name)).copied();
            let n_layers = self.config.num_hidden_layers;
            *self.parameters.part_of(name, n_layers) += tensors.n_parameters(name, spec);
            for (dtype, n_bytes) in tensors.stored(name, spec) {
                *self.bytes_by_dtype.entry(dtype).or_default() += n_bytes;
            }
            mtp_layers.extend(mtp_layer(name, n_layers));
        }
        self.num_mtp_layers_present = if tensors.survey.is_some() { mtp_layers.len() } else { 0 };
        let loaded = |specs: &Vec<TensorSpec>| {
            let mut values = LoadedValues::default();
            for spec in specs.iter().filter(|spec| !spec.is_optional || tensors.has(&spec.name)) {
                match spec.load_dtype {
                    LoadDtype::Model => values.model += spec.n_values() as u64,
                    LoadDtype::Float32 => values.float32 += spec.n_values() as u64,
                }
            }
            values
        };
        if let Some([target, mtp]) = specs {
            (self.loaded, self.loaded_mtp) = (Some(loaded(target)), loaded(mtp));
        }
    }

    /// `is_declared` unless the config's word on quantisation is at fault.
    fn check(
        &mut self,
        dir: &Path,
        model: &ModelConfig,
        (survey, [target, mtp]): (Option<&Survey>, &[Vec<TensorSpec>; 2]),
        is_declared: bool,
    ) {
        // What is wrong, but for the tensors of shards that are not there, and for what may be
        // right once the config is.
        let fault = |specs: &[TensorSpec]| {
            let survey = survey?;
            let mut fault = survey.checkpoint.check(specs).err()?;
            if let WeightsError::Unfit { missing, unreadable, .. } = &mut fault {
                missing.retain(|name| !survey.is_named(name));
                unreadable.retain(|(_, fault)| is_declared || !fault.is_about_config());
            }
            (!fault.faults().is_empty()).then_some(fault)
        };
        self.problems.extend(fault(target).map(|fault| Problem::new(&fault, false)));
        let dir = dir.to_path_buf();
        if model.num_mtp_layers == 0 {
            let fault = WeightsError::NoMtpLayers { dir };
            self.problems.push(Problem::new(&fault, true));
            return;
        }
        let fault =
            fault(mtp).map(|source| WeightsError::MtpIncomplete { dir, source: source.into() });
        self.is_mtp_complete = survey.map(|_| fault.is_none());
        self.problems.extend(fault.map(|fault| Problem::new(&fault, true)));
    }
}

impl Problem {
    fn new(error: &dyn std::error::Error, only_drafting: bool) -> Self {
        Self { text: error.to_string(), only_drafting }
    }
}

/// The tensors of a checkpoint as far as its files say.
struct Tensors<'a> {
    /// `None` without files.
    survey: Option<&'a Survey>,
    /// The dtype that the config declares.
    dtype: Option<StoredDtype>,
}

impl<'a> Tensors<'a> {
    /// Every tensor's name; `None` without files.
    fn names(&self) -> Option<Vec<&'a str>> {
        let survey = self.survey?;
        Some(match &survey.index {
            Some(index) => index.weight_map.keys().map(String::as_str).collect(),
            None => survey.checkpoint.tensors().map(|info| info.name).collect(),
        })
    }

    fn has(&self, name: &str) -> bool {
        self.survey.is_some_and(|survey| {
            survey.is_named(name) || survey.checkpoint.tensor_info(name).is_some()
        })
    }

    fn info(&self, name: &str) -> Option<TensorInfo<'a>> {
        self.survey.and_then(|survey| survey.checkpoint.tensor_info(name))
    }

    /// Values that a stored tensor stands for.
    fn n_parameters(&self, name: &str, spec: Option<&TensorSpec>) -> u64 {
        if is_companion(name) {
            return 0;
        }
        if let Some(spec) = spec {
            return spec.n_values() as u64;
        }
        let Some(info) = self.info(name) else { return 0 };
        let n_stored: u64 = info.shape.iter().map(|&n| n as u64).product();
        let is_packed =
            info.dtype == Dtype::U8 && self.has(&format!("{}_scale", weight_name(name)));
        if is_packed { 2 * n_stored } else { n_stored }
    }

    /// Bytes of a tensor by dtype: by its header, else by the config, and then with its scales.
    fn stored(&self, name: &str, spec: Option<&TensorSpec>) -> Vec<(String, u64)> {
        if let Some(info) = self.info(name) {
            return vec![(format!("{:?}", info.dtype), info.n_bytes as u64)];
        }
        let Some(spec) = spec.filter(|_| !is_companion(name)) else { return Vec::new() };
        let is_quantized = match self.survey {
            Some(_) => SCALES.iter().any(|ending| self.has(&format!("{}{ending}", spec.name))),
            // Tools quantise the projections of layers, and no other matrix.
            None => spec.name.ends_with("_proj.weight") && !spec.name.ends_with("eh_proj.weight"),
        };
        let bytes = match spec.declared.formats.first().filter(|_| is_quantized) {
            Some(&format) => quantized_bytes(spec, format),
            None => {
                let (dtype, value_bytes) = match (spec.load_dtype, self.dtype) {
                    (LoadDtype::Float32, _) | (_, Some(StoredDtype::Float32)) => ("F32", 4),
                    (_, Some(StoredDtype::Float16)) => ("F16", 2),
                    _ => ("BF16", 2),
                };
                vec![(dtype, value_bytes * spec.n_values() as u64)]
            }
        };
        bytes.into_iter().map(|(dtype, n_bytes)| (dtype.to_owned(), n_bytes)).collect()
    }
}

/// Bytes of a weight `[n_out, n_in]` and of its scales.
fn quantized_bytes(spec: &TensorSpec, format: WeightFormat) -> Vec<(&'static str, u64)> {
    let n = spec.n_values() as u64;
    let [n_out, n_in] = spec.shape[..] else { return Vec::new() };
    let fp8 = |n_scales: usize| vec![("F8_E4M3", n), ("F32", 4 * n_scales as u64)];
    let n_groups = (n_out * n_in.div_ceil(MX_GROUP)) as u64;
    match format {
        WeightFormat::Fp8Tensor => fp8(1),
        WeightFormat::Fp8Channel => fp8(n_out),
        WeightFormat::Fp8Block([rows, columns]) => {
            fp8(n_out.div_ceil(rows) * n_in.div_ceil(columns))
        }
        WeightFormat::Mxfp8 => vec![("F8_E4M3", n), ("U8", n_groups)],
        WeightFormat::Mxfp4 => vec![("U8", n.div_ceil(2) + n_groups)],
        _ => Vec::new(),
    }
}
