//! Tests against what transformers renders, of the files of a checkpoint, and of errors.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Derived {
    special_tokens: BTreeMap<String, String>,
    cases: Vec<Case>,
}

/// A conversation and what transformers renders it to.
#[derive(Deserialize)]
struct Case {
    template: String,
    messages: Vec<Value>,
    options: BTreeMap<String, Value>,
    text: String,
}

fn testdata(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)).unwrap()
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new("t.jinja", source, BTreeMap::new()).unwrap()
}

fn rendered(source: &str) -> Result<String, ChatTemplateError> {
    template(source).render(&[Message::new("user", "Hi")], &RenderOptions::default())
}

#[test]
fn texts_are_those_of_transformers() {
    let derived: Derived = serde_json::from_str(&testdata("cases.json")).unwrap();
    assert_eq!(derived.cases.len(), 21);
    for (idx, case) in derived.cases.into_iter().enumerate() {
        let source = testdata(&case.template);
        let tokens = derived.special_tokens.clone();
        let template = ChatTemplate::new(&case.template, &source, tokens).unwrap();
        let mut variables = case.options;
        let options = RenderOptions {
            add_generation_prompt: variables
                .remove("add_generation_prompt")
                .is_some_and(|value| value.is_true()),
            tools: variables.remove("tools"),
            variables,
        };
        let text = template.render(&case.messages, &options).unwrap();
        assert_eq!(text, case.text, "case {idx}, {}", case.template);
    }
}

#[test]
fn the_bundled_models_go_on_where_the_user_stopped() {
    let checkpoints =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../bundled-checkpoints/checkpoints");
    let messages = [
        Message::new("system", "Short\nnames."),
        Message::new("user", "def add(a, b):\n    return"),
        Message::new("assistant", " a + b"),
        Message::new("user", "\n\ndef sub("),
    ];
    for name in ["tiny-dsv3", "tiny-glm52"] {
        let template = ChatTemplate::load(&checkpoints.join(name)).unwrap().unwrap();
        let text = template.render(&messages, &RenderOptions::default()).unwrap();
        let code = "# Short\n# names.\ndef add(a, b):\n    return a + b\n\n\ndef sub(";
        assert_eq!(text, format!("<｜begin▁of▁sentence｜>{code}"));
        let tool = [Message::new("tool", "3")];
        let error = template.render(&tool, &RenderOptions::default()).unwrap_err();
        assert!(matches!(error, ChatTemplateError::Refused { .. }), "{error}");
    }
}

#[test]
fn a_template_can_refuse_a_conversation() {
    let template = ChatTemplate::new("d", &testdata("deepseek.jinja"), [].into()).unwrap();
    let messages = [Message::new("critic", "Bad.")];
    let error = template.render(&messages, &RenderOptions::default()).unwrap_err();
    assert!(matches!(&error, ChatTemplateError::Refused { reason } if reason.contains("critic")));
    // In a macro as well.
    let source = "{% macro no() %}{{ raise_exception('not ' ~ 3) }}{% endmacro %}{{ no() }}";
    let error = rendered(source).unwrap_err();
    assert_eq!(error.to_string(), "the chat template refuses this: not 3");
}

#[test]
fn faults_are_found_at_their_line() {
    let error = ChatTemplate::new("a/t.jinja", "\n\n{% if x %}", [].into()).unwrap_err();
    assert!(error.to_string().starts_with("a/t.jinja:3: syntax error: "), "{error}");
    let error = rendered("ok\n{{ messages[0].content.no_such_method() }}").unwrap_err();
    assert!(error.to_string().starts_with("t.jinja:2: unknown method: "), "{error}");
    assert!(!error.to_string().contains("Hi"), "{error}");
    let error = rendered("{{ absent.field }}").unwrap_err();
    assert!(error.to_string().starts_with("t.jinja:1: undefined value"), "{error}");
    let error = rendered("{{ [absent] | tojson }}").unwrap_err();
    assert!(error.to_string().contains("tojson cannot write a value that is undefined"), "{error}");
}

#[test]
fn work_and_text_are_bounded() {
    let loops = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}";
    let error = rendered(loops).unwrap_err();
    assert!(error.to_string().contains("fuel"), "{error}");
    let writes = "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}";
    let error = rendered(writes).unwrap_err();
    assert!(matches!(error, ChatTemplateError::TooLong { .. }), "{error}");
    let fits = "{% for i in range(16) %}{{ 'x' * 1000 * 1000 }}{% endfor %}";
    assert_eq!(rendered(fits).unwrap().len(), 16_000_000);
}

#[test]
fn templates_that_grow_without_end_are_ended() {
    let grow = |step: &str| {
        rendered(&format!(
            "{{% set ns = namespace(x='ab', y=[]) %}}{{% for i in range(99) %}}{step}{{% endfor %}}"
        ))
    };
    for (step, expected) in [
        ("{% set ns.x = ns.x ~ ns.x %}", "fuel"),
        ("{% set ns.x = ns.x + ns.x %}", "fuel"),
        ("{% set ns.x = ns.x.replace('a', ns.x) %}", "fuel"),
        ("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}", "fuel"),
        ("{% set ns.x = ns.x * 1000000 %}", "fuel"),
        ("{{ ([ns.x * 9999999] * 99999) | tojson }}", "tojson: the text is too long"),
        ("{{ [1] | tojson(indent=9999999999) }}", "tojson: the text is too long"),
        ("{{ {'a': [1]} | tojson(indent=18446744073709551615) }}", "tojson: the text is too long"),
        ("{{ [1, 2] | tojson(separators=['x' * 17000000, '']) }}", "tojson: the text is too long"),
        ("{{ 1 | tojson(indent=-1) }}", "cannot"),
    ] {
        let error = grow(step).unwrap_err().to_string();
        assert!(error.contains(expected), "{step}: {error}");
    }
    let error = rendered("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}").unwrap_err();
    assert!(error.to_string().contains("recursion limit"), "{error}");
}

#[test]
fn what_is_nested_deep_needs_no_more_stack_than_there_is() {
    let nested = |end: &str| {
        rendered(&format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range(90000) %}}\
             {{% set ns.x = [ns.x] %}}{{% endfor %}}{end}"
        ))
    };
    assert_eq!(nested("{{ ns.x | length }}").unwrap(), "1");
    assert_eq!(nested("{{ ns.x }}").unwrap().len(), 180_002);
    let error = nested("{{ ns.x | tojson }}").unwrap_err();
    assert!(error.to_string().contains("nested too deep"), "{error}");
    let chain = |start: &str, link: &str| {
        rendered(&format!("{{{{ {start}{} }}}}", link.repeat(100_000 / link.len())))
    };
    assert_eq!(chain("1", "-1").unwrap(), "-49999");
    assert_eq!(chain("1", "|abs").unwrap(), "1");
    assert!(chain("x", ".a").unwrap_err().to_string().contains("undefined value"));
    for (open, n) in [("(", 200), ("[", 100_000)] {
        let source = format!("{{{{ {}", open.repeat(n));
        let error = ChatTemplate::new("t", &source, [].into()).unwrap_err();
        assert!(error.to_string().contains("recursion limits"), "{error}");
    }
    let error = ChatTemplate::new("t", &" ".repeat(SOURCE_BYTES_MAX + 1), [].into()).unwrap_err();
    assert_eq!(error.to_string(), "t:0: a template of more than 262144 bytes");
}

#[test]
fn messages_are_never_templates() {
    let content = "{{ raise_exception('x') }}{% if %} <&> {# #}";
    let messages = [Message::new("user", content)];
    // The name of a file has no say in how its text is escaped.
    let template = ChatTemplate::new("t.html", "{{ messages[0].content }}", [].into()).unwrap();
    assert_eq!(template.render(&messages, &RenderOptions::default()).unwrap(), content);
}

#[test]
fn the_date_is_todays() {
    let source = "{{ strftime_now('%Y-%m-%d') }}";
    let date = || jiff::ZonedDateTime::now().date().to_string();
    // Midnight may pass in between.
    let (before, text, after) = (date(), rendered(source).unwrap(), date());
    assert!(text == before || text == after, "{before} {text} {after}");
    assert!(rendered("{{ strftime_now('%') }}").is_err());
}

struct Checkpoint(tempfile::TempDir);

impl Checkpoint {
    fn new(config: &str) -> Self {
        let checkpoint = Self(tempfile::tempdir().unwrap());
        checkpoint.write("tokenizer_config.json", config);
        checkpoint
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.path(name), content).unwrap();
    }

    fn load(&self) -> Result<Option<ChatTemplate>, ChatTemplateError> {
        ChatTemplate::load(self.0.path())
    }

    fn render(&self, options: &RenderOptions) -> String {
        self.load().unwrap().unwrap().render(&[Message::new("user", "Hi")], options).unwrap()
    }
}

#[test]
fn the_file_of_a_checkpoint_wins_over_its_configuration() {
    let checkpoint = Checkpoint::new(
        r#"{"chat_template": "C {{ eos_token }}", "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null}"#,
    );
    let plain = RenderOptions::default();
    assert_eq!(checkpoint.render(&plain), "C </s>");
    checkpoint.write("chat_template.jinja", "F {{ bos_token }}{{ pad_token }}");
    assert_eq!(checkpoint.render(&plain), "F <s>");
    let variables = [("bos_token".to_owned(), Value::from("<S>"))].into();
    assert_eq!(checkpoint.render(&RenderOptions { variables, ..plain.clone() }), "F <S>");

    checkpoint.write("other.jinja", "O {{ bos_token }}");
    let other = checkpoint.path("other.jinja");
    let template = ChatTemplate::load_file(checkpoint.0.path(), &other).unwrap();
    assert_eq!(template.render(&[Message::new("user", "Hi")], &plain).unwrap(), "O <s>");
    let missing = ChatTemplate::load_file(checkpoint.0.path(), &checkpoint.path("no.jinja"));
    assert!(missing.unwrap_err().to_string().contains("no.jinja"));
}

/// What transformers 5.17 renders of such folders.
#[test]
fn old_checkpoints_have_their_special_tokens_in_a_file_of_their_own() {
    for (config, expected) in [
        ("{}", "[<s>|</s>]"),
        (r#"{"bos_token": "<new>"}"#, "[<s>|</s>]"),
        (r#"{"bos_token": "<new>", "added_tokens_decoder": {}}"#, "[<new>|]"),
    ] {
        let checkpoint = Checkpoint::new(config);
        checkpoint.write("chat_template.jinja", "[{{ bos_token }}|{{ eos_token }}]");
        let old = r#"{"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>"}"#;
        checkpoint.write("special_tokens_map.json", old);
        assert_eq!(checkpoint.render(&RenderOptions::default()), expected);
        checkpoint.write("special_tokens_map.json", "[");
        assert_eq!(checkpoint.load().is_err(), !config.contains("decoder"));
    }
}

#[test]
fn a_list_has_one_template_for_tools() {
    let checkpoint = Checkpoint::new(
        r#"{"chat_template": [{"name": "tool_use", "template": "T {{ tools | tojson }}"},
                              {"name": "default", "template": "D {{ tools }}"}]}"#,
    );
    assert_eq!(checkpoint.render(&RenderOptions::default()), "D None");
    let tools = serde_json::from_str(r#"[{"b": 1, "a": 2}]"#).unwrap();
    let options = RenderOptions { tools: Some(tools), ..RenderOptions::default() };
    assert_eq!(checkpoint.render(&options), r#"T [{"b": 1, "a": 2}]"#);
}

#[test]
fn no_template_is_no_error_and_a_broken_file_is_one() {
    for config in ["{}", r#"{"chat_template": null}"#] {
        assert!(Checkpoint::new(config).load().unwrap().is_none());
    }
    assert!(ChatTemplate::load(Path::new("no/such/folder")).unwrap().is_none());
    for (config, expected) in [
        ("{\"x\": 1,\n", "tokenizer_config.json: EOF while parsing"),
        (r#"{"chat_template": 3}"#, "neither a text nor a list"),
        (r#"{"chat_template": [{"name": "rag", "template": ""}]}"#, "with the name default"),
        (r#"{"chat_template": "{{"}"#, "tokenizer_config.json (chat_template):1: syntax error"),
    ] {
        let error = Checkpoint::new(config).load().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let checkpoint = Checkpoint::new("{}");
    fs::write(checkpoint.path("chat_template.jinja"), [0xff]).unwrap();
    let error = checkpoint.load().unwrap_err();
    assert!(matches!(error, ChatTemplateError::Read { .. }), "{error}");
    fs::remove_file(checkpoint.path("chat_template.jinja")).unwrap();
    fs::create_dir(checkpoint.path("chat_template.jinja")).unwrap();
    let error = checkpoint.load().unwrap_err().to_string();
    assert!(error.ends_with("chat_template.jinja: it is not a regular file"), "{error}");
    let deep = format!("{{\"a\": {}", "[".repeat(100_000));
    let error = Checkpoint::new(&deep).load().unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json: recursion limit exceeded"), "{error}");
    fs::write(checkpoint.path("tokenizer_config.json"), "").unwrap();
    let file = fs::File::options().write(true).open(checkpoint.path("tokenizer_config.json"));
    file.unwrap().set_len(1 << 40).unwrap();
    let error = checkpoint.load().unwrap_err().to_string();
    assert!(error.ends_with("tokenizer_config.json: it has more than 67108864 bytes"), "{error}");
}
