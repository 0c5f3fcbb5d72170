//! Chat templates.

use chat_template::{ChatTemplate, RenderOptions};
use serde_json::{Value, json};

use crate::files_of;

/// The input as a template, which renders a conversation with all that there is.
pub(crate) fn run(input: &[u8]) {
    let Ok(source) = std::str::from_utf8(input) else { return };
    let tokens = [("bos_token".to_owned(), "<s>".to_owned())];
    let Ok(template) = ChatTemplate::new("fuzzed.jinja", source, tokens.into()) else { return };
    let function = json!({"name": "count", "arguments": {"what": "ä", "limits": [1, 2.5, null]}});
    let messages: [Value; 5] = [
        json!({"role": "system", "content": "Count."}),
        json!({"role": "user", "content": [{"type": "text", "text": " How {{ many }}? "}]}),
        json!({"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTwo.",
               "tool_calls": [{"type": "function", "function": function}]}),
        json!({"role": "tool", "content": "3"}),
        json!({"role": "user", "content": "And now?"}),
    ];
    let tools = [json!({"type": "function", "function": {"name": "count", "parameters": {}}})];
    let options = RenderOptions {
        add_generation_prompt: true,
        tools: serde_json::from_value(json!(tools)).ok(),
        variables: [("enable_thinking".to_owned(), true.into())].into(),
    };
    // Whatever it says, it says it in time.
    drop(template.render(&messages, &options));
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    files_of("crates/chat-template/testdata", ".jinja")
}
