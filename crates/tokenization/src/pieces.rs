//! What each token adds to a text, as bytes, precomputed from the tokenizer's `decoder`.

use serde_json::Value;

/// Bytes that the texts of all tokens may have, together and each on the way: replacements can make
/// much of little.
const MAX_BYTES: usize = 1 << 28;

/// How a token's name turns into bytes, as `decoder` in `tokenizer.json` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DecodeRules {
    /// Each character stands for one byte.
    byte_level: bool,
    /// Substrings to replace, in order.
    replacements: Vec<(String, String)>,
    /// Tokens named `<0xNN>` stand for that byte.
    byte_fallback: bool,
    /// A character that stands for a space.
    metaspace: Option<char>,
    /// The first token of a text loses its metaspaces.
    pub(crate) drop_first_metaspace: bool,
    /// How many leading characters of the text are dropped if they are `strip_char`.
    pub(crate) strip_len: usize,
    /// The character to drop.
    pub(crate) strip_char: char,
}

impl DecodeRules {
    /// Reads the rules from the JSON form of a decoder; the error says what is not supported.
    pub(crate) fn parse(decoder: &Value) -> Result<Self, String> {
        let mut rules = Self::default();
        let mut fused = false;
        let steps = match decoder["decoders"].as_array() {
            Some(steps) if decoder["type"] == "Sequence" => steps.as_slice(),
            _ => std::slice::from_ref(decoder),
        };
        for step in steps {
            rules.add_step(step, &mut fused)?;
        }
        Ok(rules)
    }

    fn add_step(&mut self, step: &Value, fused: &mut bool) -> Result<(), String> {
        let unsupported = || Err(step.to_string());
        match step["type"].as_str() {
            Some("ByteLevel") => {
                self.byte_level = true;
                *fused = true;
            }
            Some("Replace") if !*fused => {
                let (Some(from), Some(to)) =
                    (step["pattern"]["String"].as_str(), step["content"].as_str())
                else {
                    return unsupported();
                };
                self.replacements.push((from.to_owned(), to.to_owned()));
            }
            Some("ByteFallback") if !*fused => self.byte_fallback = true,
            Some("Fuse") => *fused = true,
            // Before a Fuse, Strip would cut every token.
            Some("Strip") if *fused && step["stop"] == 0 => {
                let (Some(content), Some(start)) = (
                    step["content"].as_str().and_then(|text| text.chars().next()),
                    step["start"].as_u64().and_then(|start| usize::try_from(start).ok()),
                ) else {
                    return unsupported();
                };
                self.strip_char = content;
                self.strip_len = start;
            }
            Some("Metaspace") if !*fused => {
                self.metaspace = step["replacement"].as_str().and_then(|text| text.chars().next());
                self.drop_first_metaspace = step["prepend_scheme"] != "never";
            }
            _ => return unsupported(),
        }
        Ok(())
    }

    /// The bytes of the token called `name`; `None` if they are too many.
    fn bytes(&self, name: &str) -> Option<Vec<u8>> {
        if self.byte_level
            && let Some(bytes) = name.chars().map(byte_of_char).collect::<Option<Vec<u8>>>()
        {
            return Some(bytes);
        }
        let mut text = name.to_owned();
        for (from, to) in &self.replacements {
            let n_added = text.matches(from).count().checked_mul(to.len())?;
            if n_added > MAX_BYTES {
                return None;
            }
            text = text.replace(from, to);
        }
        if self.byte_fallback
            && let Some(byte) = fallback_byte(&text)
        {
            return Some(vec![byte]);
        }
        if let Some(space) = self.metaspace {
            text = text.replace(space, " ");
        }
        Some(text.into_bytes())
    }
}

/// The byte that a character of a byte-level vocabulary stands for: printable Latin-1 characters
/// stand for themselves, and the rest, in order, are the characters from U+0100.
fn byte_of_char(c: char) -> Option<u8> {
    let stands_for_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(c) {
        code @ 0..=0xFF => u8::try_from(code).ok().filter(|&byte| stands_for_itself(byte)),
        code => (0..=0xFF_u8)
            .filter(|&byte| !stands_for_itself(byte))
            .nth(usize::try_from(code - 0x100).ok()?),
    }
}

/// The byte that a token like `<0x0A>` stands for.
fn fallback_byte(name: &str) -> Option<u8> {
    let digits = name.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The bytes of every token, in one buffer.
#[derive(Debug)]
pub(crate) struct PieceTable {
    pub(crate) rules: DecodeRules,
    bytes: Vec<u8>,
    /// `bytes[ends[id - 1]..ends[id]]` belong to `id`.
    ends: Vec<usize>,
    special: Vec<bool>,
}

impl PieceTable {
    /// Precomputes the pieces of the ids `0..n_ids`; `name_of` yields a token's name and whether
    /// it is special, `None` for an id without token. The error says that the texts are too long.
    pub(crate) fn new(
        rules: DecodeRules,
        n_ids: u32,
        name_of: impl Fn(u32) -> Option<(String, bool)>,
    ) -> Result<Self, String> {
        let mut table = Self { rules, bytes: vec![], ends: vec![], special: vec![] };
        for id in 0..n_ids {
            let token = name_of(id);
            table.special.push(token.as_ref().is_some_and(|(_, special)| *special));
            if let Some((name, _)) = token {
                let bytes = table
                    .rules
                    .bytes(&name)
                    .filter(|bytes| table.bytes.len() + bytes.len() <= MAX_BYTES);
                let bytes = bytes.ok_or_else(|| {
                    format!("the texts of the tokens up to {id} have more than {MAX_BYTES} bytes")
                })?;
                table.bytes.extend(bytes);
            }
            table.ends.push(table.bytes.len());
        }
        Ok(table)
    }

    /// One more than the largest id that a token has.
    pub(crate) fn n_ids(&self) -> u32 {
        u32::try_from(self.ends.len()).expect("they were counted by an u32")
    }

    /// What `id` adds to a text; `None` for an id without token.
    pub(crate) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)?;
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        (end > start).then(|| &self.bytes[start..end])
    }

    /// Whether `id` is a special token.
    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}
