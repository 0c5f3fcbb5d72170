//! Chat templates: the messages of a conversation to the text of a prompt, as the checkpoint asks.
//!
//! **Owns** the reading of a checkpoint's `chat_template.jinja` and `tokenizer_config.json`, of old
//! checkpoints' `special_tokens_map.json`, and the rendering of conversations as transformers'
//! `apply_chat_template` does it. **Must not know** tokens, requests or protocols.
//!
//! Invariants:
//! * A text that a template renders here is the text that transformers renders; `testdata` holds
//!   what it did with templates of the shapes that the model families use. What is known to differ:
//!   `%` does not format strings, methods of Python's `str` beyond those that templates use are
//!   missing (an error names them), and numbers below 1e-4 or from 1e16 on are spelled differently,
//!   except by `tojson`.
//! * A template is not trusted: it has a bounded size, runs for a bounded number of steps, which
//!   also pay for the bytes that it keeps, and writes a bounded text. It has the stack that values
//!   and expressions need which are nested as deep as that allows.
//! * Messages are data. They are never read as templates, and no error quotes them.
//!
//! The text has the special tokens of the model in it, its beginning included: encode it without
//! adding any.
//!
//! ```
//! use chat_template::{ChatTemplate, Message, RenderOptions};
//!
//! let source = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
//!               {% if add_generation_prompt %}<assistant>{% endif %}";
//! let special_tokens = [("bos_token".to_owned(), "<s>".to_owned())].into();
//! let template = ChatTemplate::new("example.jinja", source, special_tokens)?;
//!
//! let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
//! let text = template.render(&[Message::new("user", "Hello")], &options)?;
//! assert_eq!(text, "<s><user>Hello<assistant>");
//! # Ok::<(), chat_template::ChatTemplateError>(())
//! ```

mod dialect;
mod error;
mod json;
mod load;
mod stack;

use std::collections::BTreeMap;
use std::io;

use minijinja::Environment;
/// Any value of a template; it is read from JSON with the order of the keys kept.
pub use minijinja::Value;
use minijinja::value::Serde;
use serde::Serialize;

pub use crate::error::ChatTemplateError;

/// Bytes that a template may have; the longest published ones have some 20 KB.
const SOURCE_BYTES_MAX: usize = 1 << 18;

/// Steps that one rendering may take: thousands of messages, in under a second or so. Each pays for
/// 64 bytes, too.
const STEPS_MAX: u64 = 10_000_000;

/// Bytes that one rendering may write.
const OUTPUT_BYTES_MAX: usize = 16 << 20;

/// The chat template of a checkpoint, or its set of them.
#[derive(Debug)]
pub struct ChatTemplate {
    /// Holds each template under the name that errors show: its file.
    environment: Environment<'static>,
    default: String,
    /// The one for conversations with tools, where it is another.
    with_tools: Option<String>,
    /// By the name of their variable, such as `bos_token`.
    special_tokens: BTreeMap<String, String>,
}

/// A message of text alone. [`ChatTemplate::render`] takes others as well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who says it: `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// What a rendering depends on beside the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// Whether the text ends where the assistant's next message begins.
    pub add_generation_prompt: bool,
    /// Functions that the model may call: a list of JSON schemas.
    pub tools: Option<Value>,
    /// Further variables of the template, such as `enable_thinking` and `documents`; they hide
    /// special tokens.
    pub variables: BTreeMap<String, Value>,
}

impl ChatTemplate {
    /// A template from its source, with the special tokens by the names of their variables.
    /// `name` is what errors call it.
    ///
    /// # Errors
    ///
    /// [`ChatTemplateError::Template`] if it has a syntax error.
    pub fn new(
        name: &str,
        source: &str,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, ChatTemplateError> {
        let mut environment = dialect::environment();
        environment.set_fuel(Some(STEPS_MAX));
        let mut template =
            Self { environment, default: name.to_owned(), with_tools: None, special_tokens };
        template.add(name, source)?;
        Ok(template)
    }

    fn add(&mut self, name: &str, source: &str) -> Result<(), ChatTemplateError> {
        if source.len() > SOURCE_BYTES_MAX {
            let reason = format!("a template of more than {SOURCE_BYTES_MAX} bytes");
            return Err(ChatTemplateError::Template { file: name.to_owned(), line: 0, reason });
        }
        let source = dialect::without_generation_tags(source).into_owned();
        stack::with_room(|| {
            let added = self.environment.add_template_owned(name.to_owned(), source);
            added.map_err(|error| ChatTemplateError::of(error, name))
        })
    }

    /// The text of a conversation. A message is anything that serializes to a map, mostly with
    /// `role` and `content`; which further fields count is the template's affair.
    ///
    /// # Errors
    ///
    /// [`ChatTemplateError::Refused`] if the template does not take such a conversation,
    /// [`ChatTemplateError::Template`] if it has a fault or takes too much work,
    /// [`ChatTemplateError::TooLong`] if the text does.
    pub fn render<M: Serialize>(
        &self,
        messages: &[M],
        options: &RenderOptions,
    ) -> Result<String, ChatTemplateError> {
        let nothing = Value::from(());
        let mut variables: BTreeMap<&str, Value> = [("documents", nothing.clone())].into();
        let tokens = self.special_tokens.iter();
        variables.extend(tokens.map(|(name, token)| (name.as_str(), Value::from(token))));
        let others = options.variables.iter();
        variables.extend(others.map(|(name, value)| (name.as_str(), value.clone())));
        let tools = options.tools.clone();
        variables.insert("messages", Value::from(Serde(messages)));
        variables.insert("add_generation_prompt", options.add_generation_prompt.into());
        variables.insert("tools", tools.clone().unwrap_or(nothing));

        let name = match &self.with_tools {
            Some(name) if tools.is_some() => name,
            _ => &self.default,
        };
        let variables = Value::from(variables);
        stack::with_room(|| self.render_with(name, variables))
    }

    fn render_with(&self, name: &str, variables: Value) -> Result<String, ChatTemplateError> {
        let mut output = Bounded { bytes: Vec::new(), is_full: false };
        let template = self.environment.get_template(name);
        let rendered =
            template.and_then(|template| template.render_captured_to(variables, &mut output));
        if output.is_full {
            let file = name.to_owned();
            return Err(ChatTemplateError::TooLong { file, bytes: OUTPUT_BYTES_MAX });
        }
        rendered.map_err(|error| ChatTemplateError::of(error, name))?;
        Ok(String::from_utf8(output.bytes).expect("templates write text"))
    }
}

/// Takes [`OUTPUT_BYTES_MAX`] bytes and refuses what would exceed them.
struct Bounded {
    bytes: Vec<u8>,
    is_full: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > OUTPUT_BYTES_MAX {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
