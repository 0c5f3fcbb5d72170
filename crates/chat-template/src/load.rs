//! Where a checkpoint keeps its template and its special tokens.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use checkpoint_files::read_bounded;
use serde_json::{Map, Value as Json};

use crate::{ChatTemplate, ChatTemplateError};

/// Bytes that a file may have. Old checkpoints list all their added tokens in the configuration.
const MAX_FILE_BYTES: u64 = 1 << 26;

/// Where a checkpoint has its special tokens.
const CONFIG: &str = "tokenizer_config.json";
/// Where old checkpoints have them.
const OLD_TOKENS: &str = "special_tokens_map.json";

impl ChatTemplate {
    /// The template of a checkpoint folder: its `chat_template.jinja`, else what
    /// `tokenizer_config.json` has under `chat_template`, which may be a list of templates by name.
    /// `None` if the checkpoint has none.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is not what it should be, or a template has a syntax error.
    pub fn load(folder: &Path) -> Result<Option<Self>, ChatTemplateError> {
        let config_file = folder.join(CONFIG);
        let config = read_config(&config_file)?;
        let special_tokens = special_tokens(folder, &config)?;
        let file = folder.join("chat_template.jinja");
        if let Some(source) = read(&file)? {
            return Self::new(&file.to_string_lossy(), &source, special_tokens).map(Some);
        }

        let field = |reason| ChatTemplateError::Field { file: config_file.clone(), reason };
        let name = format!("{} (chat_template)", config_file.display());
        let list = match config.get("chat_template") {
            None | Some(Json::Null) => return Ok(None),
            Some(Json::String(source)) => {
                return Self::new(&name, source, special_tokens).map(Some);
            }
            Some(Json::Array(list)) => list,
            Some(_) => return Err(field("chat_template is neither a text nor a list")),
        };
        let source_of = |wanted: &str| {
            let entry = list.iter().find(|entry| entry["name"] == wanted)?;
            entry["template"].as_str()
        };
        let default = source_of("default")
            .ok_or_else(|| field("chat_template has no template with the name default"))?;
        let mut template = Self::new(&name, default, special_tokens)?;
        if let Some(source) = source_of("tool_use") {
            let name = format!("{} (chat_template, tool_use)", config_file.display());
            template.add(&name, source)?;
            template.with_tools = Some(name);
        }
        Ok(Some(template))
    }

    /// The template in `file`, with the special tokens of a checkpoint folder that has another one,
    /// or none.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or is not what it should be, or the template has a syntax error.
    pub fn load_file(folder: &Path, file: &Path) -> Result<Self, ChatTemplateError> {
        let absent = || ChatTemplateError::Read {
            file: file.to_owned(),
            source: io::ErrorKind::NotFound.into(),
        };
        let source = read(file)?.ok_or_else(absent)?;
        let config = read_config(&folder.join(CONFIG))?;
        Self::new(&file.to_string_lossy(), &source, special_tokens(folder, &config)?)
    }
}

/// The fields of a JSON object; none if there is no such file.
fn read_config(file: &Path) -> Result<Map<String, Json>, ChatTemplateError> {
    let Some(text) = read(file)? else { return Ok(Map::new()) };
    serde_json::from_str(&text)
        .map_err(|source| ChatTemplateError::Json { file: file.to_owned(), source })
}

/// The text of a file; `None` if there is no such file.
fn read(file: &Path) -> Result<Option<String>, ChatTemplateError> {
    let text = read_bounded(file, MAX_FILE_BYTES).and_then(|bytes| {
        String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    });
    match text {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ChatTemplateError::Read { file: file.to_owned(), source }),
    }
}

/// Every `..._token` that is a text, or an object with the text as its `content`. As transformers
/// has it, those of the old file come first where the new one does not list its added tokens.
fn special_tokens(
    folder: &Path,
    config: &Map<String, Json>,
) -> Result<BTreeMap<String, String>, ChatTemplateError> {
    let old = match config.contains_key("added_tokens_decoder") {
        true => Map::new(),
        false => read_config(&folder.join(OLD_TOKENS))?,
    };
    let tokens = config.iter().chain(&old).filter(|(name, _)| name.ends_with("_token"));
    let tokens = tokens.filter_map(|(name, token)| {
        let text = token.as_str().or_else(|| token["content"].as_str())?;
        Some((name.clone(), text.to_owned()))
    });
    Ok(tokens.collect())
}
