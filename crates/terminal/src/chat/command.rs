//! What a message means to the chat.

/// What `/help` says.
pub(crate) const HELP: &str = "\
/clear         begin a new conversation; the system message stays
/system TEXT   set the system message from the next answer on; without a text, remove it
/retry         take the last answer back and generate it again
/stats         figures of the last answer
/save FILE     write the conversation as JSON
/quit          leave, like Ctrl-D
Ctrl-C stops an answer. A line that ends with a backslash goes on in the next one. A line that
begins with a blank is never a command.";

/// What a message means to the chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command<'a> {
    /// For the model.
    Say(&'a str),
    Help,
    Clear,
    System(&'a str),
    Retry,
    Stats,
    Save(&'a str),
    Quit,
    /// Not one of these; the text says so.
    Unknown(String),
}

impl<'a> Command<'a> {
    pub(crate) fn of(message: &'a str) -> Self {
        if !message.starts_with('/') {
            return Self::Say(message);
        }
        let (name, rest) = message.split_once(char::is_whitespace).unwrap_or((message, ""));
        match (name, rest.trim()) {
            ("/system", text) => Self::System(text),
            ("/save", "") => Self::Unknown("/save: which file?".to_owned()),
            ("/save", file) => Self::Save(file),
            ("/help", "") => Self::Help,
            ("/clear", "") => Self::Clear,
            ("/retry", "") => Self::Retry,
            ("/stats", "") => Self::Stats,
            ("/quit", "") => Self::Quit,
            _ => Self::Unknown(format!("{name}: no such command, or not like this; see /help")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_messages() {
        for (message, command) in [
            ("hello", Command::Say("hello")),
            (" /help", Command::Say(" /help")),
            ("/help", Command::Help),
            ("/quit ", Command::Quit),
            ("/system  be brief\nplease ", Command::System("be brief\nplease")),
            ("/system", Command::System("")),
            ("/save a b.json", Command::Save("a b.json")),
        ] {
            assert_eq!(Command::of(message), command, "{message}");
        }
        for message in ["/", "/helper", "/clear all", "/save"] {
            assert!(matches!(Command::of(message), Command::Unknown(_)), "{message}");
        }
    }

    #[test]
    fn the_help_names_every_command() {
        for name in ["/clear", "/system", "/retry", "/stats", "/save", "/quit"] {
            assert!(HELP.contains(name), "{name}");
        }
    }
}
