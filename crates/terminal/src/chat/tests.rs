//! Conversations with a model that follows a script.

use std::fs;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use engine_types::ExecutorLimits;
use serde_json::json;
use test_engine::{FAIL_STEP, HOLD, Script, Setup, TestEngine};

use super::*;
use crate::lines::Piped;

/// The text of each token. `.` ends an answer.
const TEXTS: &[&str] = &["<s>", "?", "a", "b", "c", "d", "e", ".", "x", "#", "\n"];
const EOS: &[u32] = &[7];

/// Says `abcde.` to every question. The draft for `d` is always wrong.
pub(crate) fn setup(max_model_len: u32) -> Setup {
    let next = |last: u32| if last == 1 { 2 } else { (last + 1).min(7) };
    let logits = move |(_, last)| {
        let mut logits = vec![0.0; TEXTS.len()];
        logits[next(last) as usize] = 5.0;
        logits
    };
    let draft = move |(_, last)| if next(last) == 5 { 8 } else { next(last) };
    let limits =
        ExecutorLimits { vocab_size: TEXTS.len() as u32, max_model_len, ..Setup::default().limits };
    Setup {
        limits,
        tokenizer: true,
        texts: TEXTS,
        eos_token_ids: EOS,
        script: Some(Script::new(logits, draft)),
        ..Setup::default()
    }
}

/// The tokenizer of the same texts.
fn tokenizer() -> Arc<Tokenizer> {
    let vocab: serde_json::Map<_, _> =
        (0..).zip(TEXTS).map(|(id, text): (u32, _)| ((*text).into(), id.into())).collect();
    let special = json!({"id": 0, "content": "<s>", "special": true, "single_word": false,
                         "lstrip": false, "rstrip": false, "normalized": false});
    let content = json!({
        "added_tokens": [special], "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), content.to_string()).unwrap();
    Arc::new(Tokenizer::load(folder.path()).unwrap())
}

type Hears = Arc<dyn Fn(&str)>;

/// What a chat wrote; `on_text` hears of all of it after each write.
#[derive(Clone, Default)]
pub(crate) struct Out {
    text: Arc<Mutex<String>>,
    on_text: Option<Hears>,
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut text = self.text.lock().unwrap();
        text.push_str(str::from_utf8(bytes).unwrap());
        if let Some(on_text) = &self.on_text {
            on_text(&text);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Out {
    /// What was written since the last time.
    fn take(&self) -> String {
        std::mem::take(&mut self.text.lock().unwrap())
    }
}

const TEMPLATE: &str = "<s>{% for m in messages %}{% if m.role == 'system' %}#{% endif %}\
                        {{ m.content }}{% endfor %}?";

pub(crate) async fn chat_over(engine: Engine, out: &Out, stop: &Arc<Notify>) -> Chat<Out> {
    let template = ChatTemplate::new("test", TEMPLATE, [].into()).unwrap();
    let model = ChatModel::new(engine, template, tokenizer()).await.unwrap();
    let options = ChatOptions {
        sampling: SamplingParams::default(),
        max_tokens: None,
        paint: Paint::Marks,
        is_interactive: true,
    };
    Chat::new(model, options, out.clone(), Arc::clone(stop))
}

async fn chat_with(of: &TestEngine, out: &Out) -> Chat<Out> {
    chat_over(Engine::Here(of.frontend.clone()), out, &Arc::default()).await
}

fn text(text: &str) -> Input {
    Input::Text(text.to_owned())
}

impl Chat<Out> {
    /// Handles a message that must succeed; returns what was written.
    pub(crate) async fn on(&mut self, message: &str) -> String {
        assert_eq!(self.handle(text(message)).await.unwrap(), Flow::Continue);
        self.out.take()
    }

    fn history(&self) -> Vec<&str> {
        self.turns.iter().map(|turn| turn.content.as_str()).collect()
    }
}

#[tokio::test]
async fn an_answer_streams_with_its_accepted_drafts_marked() {
    let of = TestEngine::start(setup(256));
    let mut chat = chat_with(&of, &Out::default()).await;
    assert_eq!(chat.on("x").await, "a⟦bc⟧d⟦e⟧.\n");
    chat.options.paint = Paint::Colour;
    assert_eq!(chat.on("x").await, "a\x1b[32mbc\x1b[39md\x1b[32me\x1b[39m.\n");
    assert_eq!(chat.history(), ["x", "abcde.", "x", "abcde."]);
    // Steps: one token, two drafts and one token, one draft and the end.
    let figures = chat.on("/stats").await;
    assert!(figures.contains("6 tokens, the first after"), "{figures}");
    assert!(figures.contains("10 prompt tokens"), "{figures}");
    assert!(figures.contains("acceptance length 2.50: 3 of "), "{figures}");
    assert!(figures.contains(" in 2 verify steps"), "{figures}");
}

#[tokio::test]
async fn what_is_typed_has_no_control_tokens() {
    let of = TestEngine::start(setup(256));
    let chat = chat_with(&of, &Out::default()).await;
    let request = chat.request(0, &Message::new("user", "a<s>b")).unwrap();
    let Some(Prompt::TokenIds(prompt)) = request.prompt else { panic!("the chat sends ids") };
    // The one of the template. No token of this tokenizer has the characters of the other.
    assert_eq!(prompt.ids, [0, 2, 3, 1]);
}

#[tokio::test]
async fn retry_clear_and_system_change_what_the_model_sees() {
    let of = TestEngine::start(setup(256));
    let mut chat = chat_with(&of, &Out::default()).await;
    assert!(chat.handle(text("/retry")).await.is_err());
    chat.on("x").await;
    chat.on("xx").await;
    chat.on("/retry").await;
    chat.on(" \t").await;
    assert_eq!(chat.history(), ["x", "abcde.", "xx", "abcde."]);
    chat.on("/system d").await;
    let prompt = |chat: &Chat<Out>| {
        let request = chat.request(chat.turns.len(), &Message::new("user", "x")).unwrap();
        let Some(Prompt::TokenIds(TokenIds { ids })) = request.prompt else { panic!() };
        ids.iter().map(|id| TEXTS[*id as usize]).collect::<String>()
    };
    assert_eq!(prompt(&chat), "<s>#dxabcde.xxabcde.x?");
    chat.on("/clear").await;
    assert_eq!(prompt(&chat), "<s>#dx?");
    chat.on("/system").await;
    assert_eq!(prompt(&chat), "<s>x?");
    assert!(chat.handle(text("/retry")).await.is_err());
    assert!(chat.on("/stats").await.contains("no answer yet"));
}

#[tokio::test]
async fn an_interrupt_ends_the_answer_and_not_the_chat() {
    let of = TestEngine::start(setup(256));
    let stop = Arc::<Notify>::default();
    let (fault, notify) = (Arc::clone(&of.fault), Arc::clone(&stop));
    let on_text = move |text: &str| {
        if text == "a" {
            // The engine never gets on with it: only the interrupt can end the answer.
            fault.store(HOLD, Ordering::SeqCst);
            notify.notify_waiters();
        }
    };
    let out = Out { on_text: Some(Arc::new(on_text)), ..Out::default() };
    let mut chat = chat_over(Engine::Here(of.frontend.clone()), &out, &stop).await;
    assert_eq!(chat.on("x").await, "a\n(stopped)\n");
    assert_eq!(chat.history(), ["x", "a"]);
    of.fault.store(test_engine::OK, Ordering::SeqCst);
    of.wait_until_empty().await;

    assert_eq!(chat.handle(Input::Interrupted).await.unwrap(), Flow::Continue);
    assert_eq!(out.take(), "Ctrl-D or /quit leaves\n");
    chat.out.on_text = None;
    assert_eq!(chat.on("/retry").await, "a⟦bc⟧d⟦e⟧.\n");
    assert_eq!(chat.history(), ["x", "abcde."]);
    assert_eq!(chat.handle(Input::End).await.unwrap(), Flow::Leave);
    assert_eq!(chat.handle(text("/quit")).await.unwrap(), Flow::Leave);
}

#[tokio::test]
async fn nothing_is_cut_silently() {
    let of = TestEngine::start(setup(24));
    let mut chat = chat_with(&of, &Out::default()).await;
    chat.options.max_tokens = Some(2);
    // A draft that the end makes the last token counts as the target's.
    assert_eq!(chat.on("x").await, "ab\n(cut: --max-tokens allows longer answers)\n");
    chat.options.max_tokens = Some(100);
    chat.on("/clear").await;
    // 22 prompt tokens leave room for two.
    let cut = chat.on(&"x".repeat(20)).await;
    assert!(cut.ends_with("as long as the model takes; /clear begins a new one)\n"), "{cut}");
    let full = chat.handle(text("x")).await.unwrap_err().to_string();
    assert!(full.contains("has 25 tokens") && full.contains("/clear"), "{full}");
    assert_eq!(chat.turns.len(), 2);
    chat.on("/clear").await;
    assert_eq!(chat.on("x").await, "a⟦bc⟧d⟦e⟧.\n");
}

#[tokio::test]
async fn a_failed_answer_leaves_the_conversation_as_it_was() {
    let of = TestEngine::start(setup(256));
    let mut chat = chat_with(&of, &Out::default()).await;
    of.fault.store(FAIL_STEP, Ordering::SeqCst);
    let error = chat.handle(text("x")).await.unwrap_err().to_string();
    assert!(error.contains("no luck"), "{error}");
    assert_eq!(chat.turns.len(), 0);
    assert_eq!(chat.on("/retry").await, "a⟦bc⟧d⟦e⟧.\n");
    let unknown = chat.handle(text("/nothing")).await.unwrap_err().to_string();
    assert!(unknown.contains("/help"), "{unknown}");
    assert!(chat.on("/help").await.contains("/save"));
}

#[tokio::test]
async fn a_conversation_is_saved_as_json() {
    let of = TestEngine::start(setup(256));
    let mut chat = chat_with(&of, &Out::default()).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a conversation.json");
    chat.on("/system d").await;
    chat.on("x").await;
    assert!(chat.on(&format!("/save {}", file.display())).await.starts_with("3 messages in"));
    let saved: serde_json::Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!(saved[0], json!({"role": "system", "content": "d"}));
    assert_eq!(saved[2], json!({"role": "assistant", "content": "abcde."}));
    let nowhere = folder.path().join("no/such/folder");
    let error = chat.handle(text(&format!("/save {}", nowhere.display()))).await.unwrap_err();
    assert!(matches!(error, ChatError::File { .. }));
}

#[test]
fn a_pipe_gets_answers_alone_and_ends_at_the_first_error() {
    let runtime = Runtime::new().unwrap();
    let of = runtime.block_on(async { TestEngine::start(setup(256)) });
    let out = Out::default();
    let mut chat = runtime.block_on(chat_with(&of, &out));
    (chat.options.is_interactive, chat.options.paint) = (false, Paint::Plain);
    super::chat(&runtime, &mut chat, &mut Piped(&b"x\nx\\\nx\n"[..])).unwrap();
    assert_eq!(out.take(), "abcde.\nabcde.\n");
    assert_eq!(chat.history(), ["x", "abcde.", "x\nx", "abcde."]);
    let error = super::chat(&runtime, &mut chat, &mut Piped(&b"x\n/oh\nx\n"[..])).unwrap_err();
    assert!(matches!(error, ChatError::Command(_)));
    assert_eq!(out.take(), "abcde.\n");

    (chat.options.is_interactive, chat.options.paint) = (true, Paint::Marks);
    super::chat(&runtime, &mut chat, &mut Piped(&b"/oh\nx\n"[..])).unwrap();
    let said = out.take();
    assert!(said.starts_with("counting; accepted drafts stand in ⟦ ⟧"), "{said}");
    assert!(said.contains("/oh: no such command") && said.ends_with("a⟦bc⟧d⟦e⟧.\n"), "{said}");
}

#[tokio::test]
async fn a_tokenizer_of_another_model_is_refused() {
    let of = TestEngine::start(Setup {
        limits: ExecutorLimits { vocab_size: 5, ..Setup::default().limits },
        ..Setup::default()
    });
    let template = ChatTemplate::new("test", TEMPLATE, [].into()).unwrap();
    let engine = Engine::Here(of.frontend.clone());
    let refused = ChatModel::new(engine, template, tokenizer()).await.err().unwrap();
    assert!(refused.to_string().contains("give --model"), "{refused}");
}
