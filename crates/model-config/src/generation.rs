//! `generation_config.json`: the ids that end a sequence.

use std::path::{Path, PathBuf};

use crate::config::ModelConfig;
use crate::error::ConfigError;
use crate::raw::{TokenIds, parse_object, read, take};

/// What a `generation_config.json` says about ends; its sampling defaults are not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerationConfig {
    file: PathBuf,
    /// Ids that end a sequence, in the file's order; empty if it names none.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationConfig {
    /// Reads `generation_config.json` of a checkpoint folder; `None` if there is no such file.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Read`], [`ConfigError::Json`], or [`ConfigError::Invalid`] for ids that are
    /// neither a number nor a list of numbers.
    pub fn load(dir: &Path) -> Result<Option<Self>, ConfigError> {
        let file = dir.join("generation_config.json");
        if !file.exists() {
            return Ok(None);
        }
        let text = read(&file)?;
        Self::parse(&text, file).map(Some)
    }

    /// Reads the text of a `generation_config.json`; `file` is what errors call it.
    ///
    /// # Errors
    ///
    /// As [`GenerationConfig::load`].
    pub fn parse(text: &str, file: impl Into<PathBuf>) -> Result<Self, ConfigError> {
        let file = file.into();
        let mut object = parse_object(&file, text)?;
        let eos: Option<TokenIds> = take(&file, &mut object, "eos_token_id")?;
        let eos_token_ids = eos.map(|ids| ids.as_slice().to_vec()).unwrap_or_default();
        Ok(Self { file, eos_token_ids })
    }
}

impl ModelConfig {
    /// Adds the end-of-sequence ids of a generation config to those of the model config.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Invalid`] for an id outside the vocabulary.
    pub fn merge_generation(&mut self, generation: &GenerationConfig) -> Result<(), ConfigError> {
        for &id in &generation.eos_token_ids {
            if id as usize >= self.vocab_size {
                return Err(ConfigError::Invalid {
                    file: generation.file.clone(),
                    field: "eos_token_id".into(),
                    reason: format!("{id} is not below vocab_size ({})", self.vocab_size),
                });
            }
            if !self.eos_token_ids.contains(&id) {
                self.eos_token_ids.push(id);
            }
        }
        Ok(())
    }
}
