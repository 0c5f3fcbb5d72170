//! JSON as Python's `json.dumps` writes it.

use std::fmt::Write as _;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use crate::OUTPUT_BYTES_MAX;

/// Values in values, as far as Python goes.
const DEPTH_MAX: usize = 1000;

/// How JSON is laid out.
pub(crate) struct Style {
    /// Whether other characters than those of ASCII are escaped.
    pub(crate) ensure_ascii: bool,
    /// Whether keys are sorted.
    pub(crate) sort_keys: bool,
    /// Blanks a level, each item on a line of its own; all on one line if absent.
    pub(crate) indent: Option<usize>,
    /// What stands between two items.
    pub(crate) between_items: String,
    /// What stands between a key and its value.
    pub(crate) behind_key: String,
}

/// The JSON of a value.
pub(crate) fn dump(value: &Value, style: &Style) -> Result<String, Error> {
    let mut out = String::new();
    write(&mut out, value, style, 0)?;
    Ok(out)
}

fn write(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value)?,
        ValueKind::String => quote(out, value.as_str().unwrap_or_default(), style),
        ValueKind::Seq | ValueKind::Iterable => {
            write_items(out, value.try_iter()?, ['[', ']'], style, depth, |out, item| {
                write(out, &item, style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            write_items(out, keys.into_iter(), ['{', '}'], style, depth, |out, key| {
                quote(out, &key.to_string(), style);
                out.push_str(&style.behind_key);
                write(out, &value.get_item(&key)?, style, depth + 1)
            })?;
        }
        kind => {
            let reason = format!("tojson cannot write a value that is {kind}");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    }
    Ok(())
}

fn write_items(
    out: &mut String,
    items: impl Iterator<Item = Value>,
    [open, close]: [char; 2],
    style: &Style,
    depth: usize,
    mut write_item: impl FnMut(&mut String, Value) -> Result<(), Error>,
) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: values are nested too deep"));
    }
    out.push(open);
    let mut is_empty = true;
    for item in items {
        check_room(out, style.between_items.len() + style.behind_key.len())?;
        if !is_empty {
            out.push_str(&style.between_items);
        }
        is_empty = false;
        break_line(out, style, depth + 1)?;
        write_item(out, item)?;
    }
    if !is_empty {
        break_line(out, style, depth)?;
    }
    out.push(close);
    Ok(())
}

fn break_line(out: &mut String, style: &Style, depth: usize) -> Result<(), Error> {
    if let Some(indent) = style.indent {
        let n_blanks = indent.saturating_mul(depth);
        check_room(out, n_blanks)?;
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', n_blanks));
    }
    Ok(())
}

/// Checks that `n_bytes` of layout, which are not counted as steps, may follow.
fn check_room(out: &str, n_bytes: usize) -> Result<(), Error> {
    if out.len().saturating_add(n_bytes) <= OUTPUT_BYTES_MAX {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidOperation, "tojson: the text is too long"))
}

fn write_number(out: &mut String, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        out.push_str(&value.to_string());
        return Ok(());
    }
    let number = f64::try_from(value.clone())?;
    if number.is_finite() {
        // Both languages write the fewest digits, and an exponent from the same sizes on.
        let text = format!("{number:?}");
        match text.split_once('e') {
            Some((digits, exponent)) => {
                let (sign, size) = match exponent.strip_prefix('-') {
                    Some(size) => ('-', size),
                    None => ('+', exponent),
                };
                out.push_str(&format!("{digits}e{sign}{size:0>2}"));
            }
            None => out.push_str(&text),
        }
    } else if number.is_nan() {
        out.push_str("NaN");
    } else {
        out.push_str(if number > 0.0 { "Infinity" } else { "-Infinity" });
    }
    Ok(())
}

fn quote(out: &mut String, text: &str, style: &Style) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || style.ensure_ascii && !(' '..='~').contains(&c) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}").expect("a string takes everything");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
