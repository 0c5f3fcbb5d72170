//! First stage: the fields of `config.json` as the file spells them.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::ConfigError;

/// Below it every whole float is one integer.
const WHOLE_FLOATS_MAX: f64 = (1u64 << 53) as f64;
/// Of a value that an error shows.
const SHOWN_CHARS: usize = 100;

/// One id or a list of them, both found in the field `eos_token_id`.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a token id or a list of token ids")]
pub(crate) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    pub(crate) fn as_slice(&self) -> &[u32] {
        match self {
            Self::One(id) => std::slice::from_ref(id),
            Self::Many(ids) => ids,
        }
    }
}

/// Letters as one text or as a list, both found in the field `index_topk_pattern`.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub(crate) enum Letters {
    Text(String),
    List(Vec<String>),
}

/// Declares [`RawConfig`] and reads each field from the JSON object, so that a field of the wrong
/// type is refused by name, which deriving `Deserialize` for the whole would not do.
macro_rules! raw_config {
    ($($field:ident: $type:ty,)*) => {
        /// The known fields of a `config.json`, unvalidated. Null and absent are the same here.
        #[derive(Clone, Debug)]
        pub struct RawConfig {
            pub(crate) file: PathBuf,
            $(pub(crate) $field: Option<$type>,)*
        }

        impl RawConfig {
            /// The fields of usable types, and the errors of the others.
            fn from_object(
                file: PathBuf,
                mut object: Map<String, Value>,
            ) -> (Self, Vec<ConfigError>) {
                let mut errors = Vec::new();
                $(let $field = take(&file, &mut object, stringify!($field)).unwrap_or_else(|error| {
                    errors.push(error);
                    None
                });)*
                (Self { file, $($field,)* }, errors)
            }

            /// Takes a field for absent; whether it was there.
            pub(crate) fn forget(&mut self, field: &str) -> bool {
                match field {
                    $(stringify!($field) => self.$field.take().is_some(),)*
                    _ => false,
                }
            }
        }
    };
}

raw_config! {
    architectures: Vec<String>,
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_nextn_predict_layers: usize,
    num_mtp_layers: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    tie_word_embeddings: bool,
    torch_dtype: String,
    dtype: String,
    eos_token_id: TokenIds,
    bos_token_id: u32,
    hidden_act: String,
    attention_bias: bool,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    q_lora_rank: usize,
    kv_lora_rank: usize,
    qk_nope_head_dim: usize,
    qk_rope_head_dim: usize,
    qk_head_dim: usize,
    v_head_dim: usize,
    rope_theta: f64,
    rope_scaling: Map<String, Value>,
    rope_parameters: Map<String, Value>,
    rope_interleave: bool,
    partial_rotary_factor: f64,
    use_qk_norm: bool,
    n_routed_experts: usize,
    num_experts_per_tok: usize,
    n_shared_experts: usize,
    moe_intermediate_size: usize,
    n_group: usize,
    topk_group: usize,
    routed_scaling_factor: f64,
    norm_topk_prob: bool,
    scoring_func: String,
    topk_method: String,
    first_k_dense_replace: usize,
    moe_layer_freq: usize,
    mlp_layer_types: Vec<String>,
    layer_types: Vec<String>,
    index_topk: usize,
    index_n_heads: usize,
    index_head_dim: usize,
    indexer_rope_interleave: bool,
    indexer_types: Vec<String>,
    index_topk_pattern: Letters,
    index_topk_freq: usize,
    index_skip_topk_offset: usize,
    index_share_for_mtp_iteration: bool,
    quantization_config: Map<String, Value>,
    text_config: Value,
    vision_config: Value,
    mlp_bias: bool,
    sliding_window: Value,
    swiglu_limit: Value,
}

impl RawConfig {
    /// Reads `config.json` of a checkpoint folder.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Read`], [`ConfigError::Json`], or [`ConfigError::Invalid`] for a field of
    /// the wrong type.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let file = dir.join("config.json");
        let text = read(&file)?;
        Self::parse(&text, file)
    }

    /// Reads the text of a `config.json`; `file` is what errors call it.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Json`], or [`ConfigError::Invalid`] for a field of the wrong type.
    pub fn parse(text: &str, file: impl Into<PathBuf>) -> Result<Self, ConfigError> {
        let file = file.into();
        let object = parse_object(&file, text)?;
        let (config, errors) = Self::from_object(file, object);
        errors.into_iter().next().map_or(Ok(config), Err)
    }

    /// As [`RawConfig::load`], but fields of the wrong type are left out and their errors returned.
    pub(crate) fn load_usable(dir: &Path) -> Result<(Self, Vec<ConfigError>), ConfigError> {
        let file = dir.join("config.json");
        let object = parse_object(&file, &read(&file)?)?;
        Ok(Self::from_object(file, object))
    }

    /// `model_type`, if the file has it.
    #[must_use]
    pub fn model_type(&self) -> Option<&str> {
        self.model_type.as_deref()
    }

    pub(crate) fn missing(&self, field: &str) -> ConfigError {
        ConfigError::Missing { file: self.file.clone(), field: field.into() }
    }

    pub(crate) fn invalid(&self, field: &str, reason: impl Into<String>) -> ConfigError {
        ConfigError::Invalid { file: self.file.clone(), field: field.into(), reason: reason.into() }
    }

    pub(crate) fn unsupported(&self, field: &str, reason: impl Into<String>) -> ConfigError {
        ConfigError::Unsupported {
            file: self.file.clone(),
            field: field.into(),
            reason: reason.into(),
        }
    }
}

/// Bytes that a config may have; those of published models have a few KB.
const MAX_FILE_BYTES: u64 = 1 << 26;

/// Reads a regular file of a bounded size: opening a FIFO would wait for its writer, and a device
/// has no end.
pub(crate) fn read(file: &Path) -> Result<String, ConfigError> {
    let text = fs::metadata(file).and_then(|metadata| {
        if !metadata.is_file() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
        }
        if metadata.len() > MAX_FILE_BYTES {
            let reason = format!("it has more than {MAX_FILE_BYTES} bytes");
            return Err(io::Error::new(ErrorKind::FileTooLarge, reason));
        }
        fs::read_to_string(file)
    });
    text.map_err(|source| ConfigError::Read { file: file.to_path_buf(), source })
}

pub(crate) fn parse_object(file: &Path, text: &str) -> Result<Map<String, Value>, ConfigError> {
    serde_json::from_str(text)
        .map_err(|source| ConfigError::Json { file: file.to_path_buf(), source })
}

/// Removes a field and converts it; `None` if it is absent or null.
pub(crate) fn take<T: DeserializeOwned>(
    file: &Path,
    object: &mut Map<String, Value>,
    field: &str,
) -> Result<Option<T>, ConfigError> {
    let Some(mut value) = object.remove(field) else { return Ok(None) };
    let text = shortened(&value);
    use_whole_numbers(&mut value);
    serde_json::from_value(value).map_err(|error| ConfigError::Invalid {
        file: file.to_path_buf(),
        field: field.into(),
        reason: format!("has the unusable value {text}: {}", shortened(&error)),
    })
}

/// A count may be written as a float, `4096.0` or `1e6`, if it is whole.
fn use_whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let is_whole = |x: &f64| x.fract() == 0.0 && x.abs() < WHOLE_FLOATS_MAX;
            if let Some(whole) = number.as_f64().filter(is_whole) {
                *value = Value::from(whole as i64);
            }
        }
        Value::Array(list) => list.iter_mut().for_each(use_whole_numbers),
        _ => {}
    }
}

/// What an error shows of a value or quotes of it: lists can have an entry for each layer.
fn shortened(shown: &impl ToString) -> String {
    let mut text = shown.to_string();
    if let Some((end, _)) = text.char_indices().nth(SHOWN_CHARS) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}
