//! A model folder's tokenizer.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use checkpoint_files::read_bounded;
use engine_types::TokenId;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::decoder::IncrementalDecoder;
use crate::error::TokenizationError;
use crate::output_text::{OutputText, StopRules, StopTextDetector};
use crate::pieces::{DecodeRules, PieceTable};

/// Bytes that a file may have; the vocabularies of the largest have some 40 MB.
const MAX_FILE_BYTES: u64 = 1 << 28;

/// Ids that a tokenizer may have: each costs memory, whether a token has it or not.
const MAX_IDS: u32 = 1 << 24;

/// Where no token reaches across. It is no character, and no text of any language has it.
const SEAM: char = '\u{FDD0}';

/// Turns text into token ids and back, as a model folder's files say.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pieces: Arc<PieceTable>,
    bos_token_id: Option<TokenId>,
    max_token_bytes: usize,
}

/// The part of `tokenizer_config.json` that matters here.
#[derive(Debug, Default, Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    add_bos_token: Option<bool>,
    #[serde(default)]
    bos_token: Option<NamedToken>,
}

/// A token in `tokenizer_config.json`: its name, or an object with the name.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum NamedToken {
    Name(String),
    Object { content: String },
}

impl Tokenizer {
    /// Loads `tokenizer.json` and, if there is one, `tokenizer_config.json` of `folder`.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or understood; each error names the file.
    pub fn load(folder: &Path) -> Result<Self, TokenizationError> {
        let path = folder.join("tokenizer.json");
        let mut tokenizer = Self::from_json(&read(&path)?, &path)?;
        tokenizer.bos_token_id = load_bos(folder, &tokenizer.inner)?;
        Ok(tokenizer)
    }

    /// Reads the content of a `tokenizer.json`; `path` is what errors call it. No prompt starts
    /// with a token that the file itself does not add.
    ///
    /// # Errors
    ///
    /// If it cannot be understood, or has ids or texts that would take too much memory.
    pub fn from_json(json: &[u8], path: &Path) -> Result<Self, TokenizationError> {
        let malformed =
            |message: String| TokenizationError::Malformed { path: path.to_owned(), message };
        // The library panics at a file that is cut, and loses where.
        serde_json::from_slice::<IgnoredAny>(json).map_err(|error| malformed(error.to_string()))?;
        let parsed = unless_it_panics(|| tokenizers::Tokenizer::from_bytes(json));
        let mut inner = parsed.map_err(malformed)?;
        // A prompt that is too long is refused by whoever knows the limit, never cut silently.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| malformed(error.to_string()))?;
        let pieces = Arc::new(piece_table(&inner, path)?);
        // A name holds at least one byte for each byte of text.
        let max_token_bytes = inner.get_vocab(true).keys().map(String::len).max().unwrap_or(1);
        Ok(Self { inner, pieces, bos_token_id: None, max_token_bytes })
    }

    /// Like [`load`](Self::load); `None` where `folder` has no `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// As for [`load`](Self::load).
    pub fn load_if_present(folder: &Path) -> Result<Option<Self>, TokenizationError> {
        match Self::load(folder) {
            Err(TokenizationError::Read { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                Ok(None)
            }
            loaded => loaded.map(Some),
        }
    }

    /// The ids of `text`, special tokens in it included.
    ///
    /// What the tokenizer's own post-processor adds is added. If `tokenizer_config.json` says
    /// `add_bos_token`, the ids start with the beginning-of-sequence id, once: a text that already
    /// starts with that token gets no second one.
    ///
    /// # Errors
    ///
    /// If the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TokenizationError> {
        let mut ids = self.encode_with(text, true)?;
        if let Some(bos) = self.bos_token_id
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The ids of a text that has its special tokens in it already, as chat templates write it:
    /// none are added. No token spans a seam of [`plain_text`](Self::plain_text), which has no id.
    ///
    /// # Errors
    ///
    /// If the tokenizer refuses the text.
    pub fn encode_as_is(&self, text: &str) -> Result<Vec<TokenId>, TokenizationError> {
        let pieces = text.split(SEAM).filter(|piece| !piece.is_empty());
        let ids = pieces.map(|piece| self.encode_with(piece, false)).collect::<Result<Vec<_>, _>>();
        Ok(ids?.concat())
    }

    /// A text with seams in whatever stands there like a control token, so that
    /// [`encode_as_is`](Self::encode_as_is) finds text and no token there: for what users say,
    /// where a template puts it among true ones. Control tokens are the special tokens, and the
    /// added ones whose names begin with `<` or `[`; models give their marks either way. Others,
    /// such as `/nothink` of GLM, are meant to be said.
    ///
    /// (transformers and vLLM take control tokens from anywhere in a conversation.)
    #[must_use]
    pub fn plain_text(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for token in self.inner.get_added_tokens_decoder().values() {
            let name = token.content.as_str();
            let is_control = token.special || name.starts_with(['<', '[']);
            let Some((at, _)) = name.char_indices().nth(1).filter(|_| is_control) else { continue };
            // Again, since a name that overlaps itself leaves one behind.
            while text.contains(name) {
                text = text.replace(name, &format!("{}{SEAM}{}", &name[..at], &name[at..]));
            }
        }
        text
    }

    /// The ids of `text`, with what the post-processor adds or without.
    fn encode_with(
        &self,
        text: &str,
        is_processed: bool,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        let encoding = unless_it_panics(|| self.inner.encode_fast(text, is_processed));
        Ok(encoding.map_err(TokenizationError::Encode)?.get_ids().to_vec())
    }

    /// The text of `ids`; special tokens have no text if `skip_special_tokens`.
    #[must_use]
    pub fn decode(&self, ids: &[TokenId], skip_special_tokens: bool) -> String {
        let mut decoder = self.incremental_decoder(skip_special_tokens);
        let mut text = String::new();
        for &id in ids {
            decoder.push(id, &mut text);
        }
        decoder.finish(&mut text);
        text
    }

    /// A decoder for one run of ids.
    #[must_use]
    pub fn incremental_decoder(&self, skip_special_tokens: bool) -> IncrementalDecoder {
        IncrementalDecoder::new(Arc::clone(&self.pieces), skip_special_tokens)
    }

    /// A detector of `texts` in the text of a run of ids, in which special tokens have no text.
    ///
    /// # Panics
    ///
    /// If a text is empty.
    #[must_use]
    pub fn stop_text_detector(&self, texts: &[String]) -> StopTextDetector {
        StopTextDetector::new(self.incremental_decoder(true), texts)
    }

    /// A decoder for one run of ids up to the first stop text; special tokens have no text.
    ///
    /// # Panics
    ///
    /// If a stop text is empty.
    #[must_use]
    pub fn output_text(&self, rules: &StopRules) -> OutputText {
        OutputText::new(self.incremental_decoder(true), rules)
    }

    /// The bytes that a token adds to a text, or the name of a special one; `None` for an id
    /// without a token. They may be a part of a character.
    #[must_use]
    pub fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.pieces.bytes(id)
    }

    /// Whether a token is special: a mark in the run of ids, without a text.
    #[must_use]
    pub fn is_special(&self, id: TokenId) -> bool {
        self.pieces.is_special(id)
    }

    /// One more than the largest id that a token has.
    #[must_use]
    pub fn n_ids(&self) -> u32 {
        self.pieces.n_ids()
    }

    /// Most bytes of text that one token stands for; a text of more than `n` times as many bytes
    /// has more than `n` tokens.
    #[must_use]
    pub fn max_token_bytes(&self) -> usize {
        self.max_token_bytes
    }

    /// The id that starts every prompt, where the files ask for one.
    #[must_use]
    pub fn bos_token_id(&self) -> Option<TokenId> {
        self.bos_token_id
    }
}

/// What the library makes, or why it does not. It panics at a `tokenizer.json` whose parts
/// contradict each other, be it when this is read or when a text needs them.
fn unless_it_panics<T>(make: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(make)) {
        Ok(made) => made.map_err(|error| error.to_string()),
        Err(_) => Err("the parts of tokenizer.json contradict each other".to_owned()),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TokenizationError> {
    read_bounded(path, MAX_FILE_BYTES)
        .map_err(|source| TokenizationError::Read { path: path.to_owned(), source })
}

fn piece_table(
    inner: &tokenizers::Tokenizer,
    path: &Path,
) -> Result<PieceTable, TokenizationError> {
    let malformed = |message| TokenizationError::Malformed { path: path.to_owned(), message };
    let decoder =
        serde_json::to_value(inner.get_decoder()).map_err(|error| malformed(error.to_string()))?;
    let rules = DecodeRules::parse(&decoder)
        .map_err(|what| TokenizationError::UnsupportedDecoder { path: path.to_owned(), what })?;
    let last = inner.get_vocab(true).into_iter().max_by_key(|(_, id)| *id);
    let n_ids = match last {
        None => 0,
        Some((_, id)) if id < MAX_IDS => id + 1,
        Some((name, id)) => {
            let reason = format!("the token {name:?} has the id {id}; it must be below {MAX_IDS}");
            return Err(malformed(reason));
        }
    };
    let added = inner.get_added_tokens_decoder();
    let name_of = |id| {
        let special = added.get(&id).is_some_and(|token| token.special);
        inner.id_to_token(id).map(|name| (name, special))
    };
    PieceTable::new(rules, n_ids, name_of).map_err(malformed)
}

/// The id that prompts start with, if `tokenizer_config.json` asks for one.
fn load_bos(
    folder: &Path,
    inner: &tokenizers::Tokenizer,
) -> Result<Option<TokenId>, TokenizationError> {
    let path: PathBuf = folder.join("tokenizer_config.json");
    let config = match read(&path) {
        Err(TokenizationError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            TokenizerConfig::default()
        }
        bytes => serde_json::from_slice(&bytes?).map_err(|error| TokenizationError::Malformed {
            path: path.clone(),
            message: error.to_string(),
        })?,
    };
    if config.add_bos_token != Some(true) {
        return Ok(None);
    }
    let token = match config.bos_token {
        Some(NamedToken::Name(name) | NamedToken::Object { content: name }) => name,
        None => {
            let message = "`add_bos_token` is true but there is no `bos_token`".to_owned();
            return Err(TokenizationError::Malformed { path, message });
        }
    };
    match inner.token_to_id(&token) {
        Some(id) => Ok(Some(id)),
        None => Err(TokenizationError::UnknownBosToken { path, token }),
    }
}
