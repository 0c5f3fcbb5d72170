//! What transformers' Jinja has beyond, or different from, minijinja's.

use std::borrow::Cow;

use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value, syntax};

use crate::error::Raised;
use crate::json;

/// An environment that reads and renders templates as transformers does.
pub(crate) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let mut syntax = syntax::SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    environment.set_syntax(syntax.build().expect("the delimiters are the default ones"));
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    let method = minijinja_contrib::pycompat::unknown_method_callback;
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment
}

/// Python's `json.dumps` with its arguments of the same names.
fn to_json(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    let indent: Option<usize> = kwargs.get("indent")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    kwargs.assert_all_used()?;
    let mut style = json::Style {
        ensure_ascii: ensure_ascii.unwrap_or_default(),
        sort_keys: sort_keys.unwrap_or_default(),
        indent,
        // With an indentation the line break follows the comma instead of a blank.
        between_items: if indent.is_some() { "," } else { ", " }.to_owned(),
        behind_key: ": ".to_owned(),
    };
    if let Some(separators) = separators {
        let [between_items, behind_key] = <[String; 2]>::try_from(separators).map_err(|_| {
            Error::new(ErrorKind::InvalidOperation, "separators of tojson are two texts")
        })?;
        (style.between_items, style.behind_key) = (between_items, behind_key);
    }
    json::dump(value, &style)
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
}

/// The local date and time, in the format of `strftime`.
fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::ZonedDateTime::now())
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

/// Turns `{% generation %}` blocks, which mark for training what the assistant said, into blocks
/// without an effect.
pub(crate) fn without_generation_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("endgeneration") {
        return Cow::Borrowed(source);
    }
    let mut parts = source.split("{%");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push_str("{%");
        let Some((tag, rest)) = part.split_once("%}") else {
            out.push_str(part);
            continue;
        };
        let word = tag.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        match word {
            "generation" => out.push_str(&tag.replace(word, "if true")),
            "endgeneration" => out.push_str(&tag.replace(word, "endif")),
            _ => out.push_str(tag),
        }
        out.push_str("%}");
        out.push_str(rest);
    }
    Cow::Owned(out)
}
