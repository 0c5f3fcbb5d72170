//! Where the user's lines come from.

use std::fs;
use std::io::{self, BufRead};
use std::path::{Path, PathBuf};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

/// What a user does at the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A line, or several of one message.
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// Ctrl-D, or the end of a pipe.
    End,
}

/// A source of lines.
pub trait Lines {
    /// The next line, without its end.
    ///
    /// # Errors
    ///
    /// If it cannot be read.
    fn read(&mut self, prompt: &str) -> io::Result<Input>;
}

/// The next message: a line, and the next one as long as a backslash ends it.
///
/// # Errors
///
/// If a line cannot be read.
pub fn read_message(lines: &mut dyn Lines) -> io::Result<Input> {
    let mut message = String::new();
    let mut prompt = "> ";
    loop {
        match lines.read(prompt)? {
            Input::Text(line) => match line.strip_suffix('\\') {
                Some(line) => message.extend([line, "\n"]),
                None => return Ok(Input::Text(message + &line)),
            },
            Input::End if !message.is_empty() => return Ok(Input::Text(message)),
            other => return Ok(other),
        }
        prompt = "… ";
    }
}

/// A terminal, with the keys of readline and a history.
pub struct Editor {
    inner: DefaultEditor,
    history: Option<PathBuf>,
}

impl Editor {
    /// An editor whose lines are kept in the file `history`, if that is given.
    ///
    /// # Errors
    ///
    /// If the file cannot be made or read.
    pub fn new(history: Option<&Path>) -> io::Result<Self> {
        let mut inner = DefaultEditor::new().map_err(io_error)?;
        if let Some(file) = history {
            fs::create_dir_all(file.parent().unwrap_or(Path::new(".")))?;
            match inner.load_history(file).map_err(io_error) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(Self { inner, history: history.map(Path::to_owned) })
    }
}

impl Lines for Editor {
    fn read(&mut self, prompt: &str) -> io::Result<Input> {
        let line = match self.inner.readline(prompt) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => return Ok(Input::Interrupted),
            Err(ReadlineError::Eof) => return Ok(Input::End),
            Err(error) => return Err(io_error(error)),
        };
        let is_new = self.inner.add_history_entry(&line).map_err(io_error)?;
        if let Some(file) = self.history.as_deref().filter(|_| is_new) {
            self.inner.append_history(file).map_err(io_error)?;
        }
        Ok(Input::Text(line))
    }
}

fn io_error(error: ReadlineError) -> io::Error {
    match error {
        ReadlineError::Io(error) => error,
        error => io::Error::other(error),
    }
}

/// A pipe or a file: no prompt.
pub struct Piped<R>(pub R);

impl<R: BufRead> Lines for Piped<R> {
    fn read(&mut self, _prompt: &str) -> io::Result<Input> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Ok(Input::End);
        }
        let end = line.trim_end_matches(['\n', '\r']).len();
        line.truncate(end);
        Ok(Input::Text(line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(text: &str) -> Vec<String> {
        let mut lines = Piped(text.as_bytes());
        let mut all = vec![];
        while let Input::Text(message) = read_message(&mut lines).unwrap() {
            all.push(message);
        }
        all
    }

    #[test]
    fn a_line_is_a_message_unless_a_backslash_ends_it() {
        assert_eq!(messages("a\r\n\nb"), ["a", "", "b"]);
        assert_eq!(messages("def f():\\\n    return\\\n\nb\n"), ["def f():\n    return\n", "b"]);
        assert_eq!(messages("cut\\"), ["cut\n"]);
    }

    #[test]
    fn an_interrupt_drops_the_lines_of_a_message() {
        struct Script(Vec<Input>);
        impl Lines for Script {
            fn read(&mut self, _prompt: &str) -> io::Result<Input> {
                Ok(self.0.remove(0))
            }
        }
        let text = |text: &str| Input::Text(text.to_owned());
        let mut lines = Script(vec![text("a\\"), Input::Interrupted, text("b"), Input::End]);
        assert_eq!(read_message(&mut lines).unwrap(), Input::Interrupted);
        assert_eq!(read_message(&mut lines).unwrap(), text("b"));
        assert_eq!(read_message(&mut lines).unwrap(), Input::End);
    }
}
