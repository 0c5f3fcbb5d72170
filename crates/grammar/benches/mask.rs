//! What a guide costs the engine thread: a mask before each token, and `accept` behind it.
//!
//! The question is how long one choice of one request holds up a step, at a vocabulary of 4,096
//! ids: on average over an output, for a JSON schema, a regular expression and a Lark grammar; and
//! what a guide costs before its first token (compiled anew, kept from before, cloned).

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use engine_types::{Guide, TokenId};
use grammar::{Constraint, Grammars};
use tokenization::Tokenizer;

const SCHEMA: &str = r#"{"type": "object", "properties": {
    "name": {"type": "string"},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
    "price": {"type": "number", "minimum": 0},
    "in_stock": {"type": "boolean"}},
    "required": ["name", "tags", "price", "in_stock"], "additionalProperties": false}"#;
const JSON: &str = r#"{"name": "A blue kettle", "tags": ["kitchen", "steel"], "price": 24.5,
"in_stock": true}"#;

fn mask(c: &mut Criterion) {
    let folder = bundled_checkpoints::resolve("tiny-glm52", None).expect("a checkpoint");
    let tokenizer = Tokenizer::load(&folder).expect("a tokenizer");
    let grammars = Grammars::new(&tokenizer, &[1]).expect("a vocabulary");
    let sum = "start: NUMBER (\" + \" NUMBER)*\nNUMBER: /[0-9]{1,9}/\n";
    let cases = [
        ("json schema", Constraint::JsonSchema(SCHEMA.to_owned()), JSON),
        ("regex", Constraint::Regex(r"[a-z ]{1,60}\.".to_owned()), "the rest of it is all here."),
        ("lark", Constraint::Lark(sum.to_owned()), "17 + 4 + 2026 + 123456"),
    ];
    for (name, constraint, text) in cases {
        let tokens = tokenizer.encode(text).expect("a text").split_off(1);
        let guide = grammars.compile(&constraint).expect("a constraint").0;
        let mut group = c.benchmark_group(name);
        group.throughput(criterion::Throughput::Elements(tokens.len() as u64));
        // A guide that has seen such a text before has the lexer's states in its tables.
        let mut warm = guide.clone_guide();
        follow(&mut *warm, &tokens);
        warm.go_back(tokens.len());
        group.bench_function("output, warm", |b| {
            b.iter_batched_ref(
                || warm.clone_guide(),
                |guide| follow(&mut **guide, &tokens),
                BatchSize::SmallInput,
            );
        });
        group.bench_function("output, new", |b| {
            b.iter_batched_ref(
                || guide.clone_guide(),
                |guide| follow(&mut **guide, &tokens),
                BatchSize::SmallInput,
            );
        });
        group.finish();
        c.bench_function(&format!("{name}/clone"), |b| b.iter(|| guide.clone_guide()));
        c.bench_function(&format!("{name}/compile, kept"), |b| {
            b.iter(|| grammars.compile(&constraint).expect("a constraint"));
        });
        c.bench_function(&format!("{name}/compile, new"), |b| {
            b.iter_batched(
                || Grammars::new(&tokenizer, &[1]).expect("a vocabulary"),
                |grammars| grammars.compile(&constraint).expect("a constraint"),
                BatchSize::SmallInput,
            );
        });
    }
}

/// A mask before each token of an output, and the token.
fn follow(guide: &mut dyn Guide, tokens: &[TokenId]) {
    let mut mask = [0; 128];
    for token in tokens {
        guide.fill_mask(&mut mask);
        assert!(guide.accept(*token), "the text is one of the grammar");
    }
}

criterion_group!(benches, mask);
criterion_main!(benches);
