//! Messages: valid requests, requests of random fields, those with bytes changed, and no requests.

use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::output_constraint::Kind;
use grpc_api::inference::v1::{
    GenerateStreamRequest, OutputConstraint, SamplingParams, SpeculationParams, StoppingParams,
    TokenIds,
};
use proptest::collection::{hash_map, vec};
use proptest::num::f64::ANY as ANY_NUMBER;
use proptest::option::{of, weighted};
use proptest::prelude::{BoxedStrategy, Just, Strategy, any, prop_oneof};
use proptest::sample::{Index, select};
use prost::Message as _;

/// Encoded messages.
pub(crate) fn messages() -> BoxedStrategy<Vec<u8>> {
    let any_request = prop_oneof![valid(), requests()];
    let changed = (any_request, vec(change(), 1..8)).prop_map(|(request, changes)| {
        let mut bytes = request.encode_to_vec();
        for change in changes {
            apply(&mut bytes, &change);
        }
        bytes
    });
    // Groups within groups, which a decoder that recurses would not survive.
    let nested = (0..50_000_usize).prop_map(|depth| vec![0x0b; depth]);
    prop_oneof![
        2 => valid().prop_map(|request| request.encode_to_vec()),
        4 => requests().prop_map(|request| request.encode_to_vec()),
        6 => changed,
        1 => vec(any::<u8>(), 0..200),
        1 => nested,
    ]
    .boxed()
}

/// A place, what to do there, and a byte for it.
type Change = (Index, u8, u8);

fn change() -> impl Strategy<Value = Change> {
    (any::<Index>(), 0..5_u8, any::<u8>())
}

fn apply(bytes: &mut Vec<u8>, (place, kind, byte): &Change) {
    let at = place.index(bytes.len() + 1);
    match kind {
        0 => bytes.insert(at, *byte),
        1 => bytes.truncate(at),
        // A varint without an end.
        2 => drop(bytes.splice(at..at, [0xff; 11])),
        _ if at == bytes.len() => bytes.push(*byte),
        3 => bytes[at] = *byte,
        _ => bytes[at] ^= 1 << (byte % 8),
    }
}

/// Requests without a fault.
fn valid() -> BoxedStrategy<GenerateStreamRequest> {
    let prompt = prop_oneof![
        (1..20_usize).prop_map(|n| Prompt::Text("word ".repeat(n))),
        vec(0..4096_u32, 1..20).prop_map(|ids| Prompt::TokenIds(TokenIds { ids })),
    ];
    let kind = select(vec![
        Kind::Regex("a+".to_owned()),
        Kind::JsonSchema(r#"{"type":"boolean"}"#.to_owned()),
        Kind::LarkGrammar("start: \"a\"+".to_owned()),
    ]);
    (prompt, 0.0..2.0_f64, 0.1..1.0_f64, 1..4_u32, 1..20_u32, weighted(0.3, kind))
        .prop_map(|(prompt, temperature, top_p, n, max_tokens, kind)| GenerateStreamRequest {
            prompt: Some(prompt),
            sampling: Some(SamplingParams {
                temperature: Some(temperature),
                top_p: Some(top_p),
                n: Some(n),
                logprobs: Some(n),
                ..SamplingParams::default()
            }),
            stopping: Some(StoppingParams {
                max_tokens: Some(max_tokens),
                stop_texts: vec!["end".to_owned()],
                ..StoppingParams::default()
            }),
            constraint: kind.map(|kind| OutputConstraint { kind: Some(kind) }),
            ..GenerateStreamRequest::default()
        })
        .boxed()
}

fn requests() -> BoxedStrategy<GenerateStreamRequest> {
    (
        weighted(0.95, prompt()),
        weighted(0.7, sampling()),
        weighted(0.9, stopping()),
        of(of(count()).prop_map(|n| SpeculationParams { num_speculative_tokens: n })),
        weighted(0.1, text()),
        of(any::<i32>()),
        weighted(0.3, weighted(0.95, constraint()).prop_map(|kind| OutputConstraint { kind })),
    )
        .prop_map(|(prompt, sampling, stopping, speculation, cache_salt, priority, constraint)| {
            GenerateStreamRequest {
                prompt,
                sampling,
                stopping,
                speculation,
                cache_salt,
                priority,
                constraint,
            }
        })
        .boxed()
}

fn prompt() -> BoxedStrategy<Prompt> {
    prop_oneof![text().prop_map(Prompt::Text), ids().prop_map(Prompt::TokenIds)].boxed()
}

fn text() -> BoxedStrategy<String> {
    prop_oneof![
        vec(any::<char>(), 0..100).prop_map(String::from_iter),
        (0..5000_usize).prop_map(|n| "word ".repeat(n)),
    ]
    .boxed()
}

fn id() -> impl Strategy<Value = u32> {
    prop_oneof![20 => 0..4096_u32, 1 => any::<u32>()]
}

fn ids() -> BoxedStrategy<TokenIds> {
    prop_oneof![9 => vec(id(), 0..20), 1 => vec(0..4096_u32, 0..300)]
        .prop_map(|ids| TokenIds { ids })
        .boxed()
}

fn count() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0..4_u32, 1 => select(vec![20, 21, 128, 129, u32::MAX]), 1 => any::<u32>()]
}

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![3 => 0.0..1.0_f64, 1 => Just(f64::NAN), 1 => ANY_NUMBER]
}

fn sampling() -> BoxedStrategy<SamplingParams> {
    let numbers = (
        of(number()),
        weighted(0.2, number()),
        weighted(0.2, number()),
        weighted(0.2, number()),
        weighted(0.2, number()),
        weighted(0.2, number()),
    );
    let counts = (of(count()), of(any::<u64>()), weighted(0.3, count()), of(count()), of(count()));
    let tokens = (hash_map(id(), number(), 0..3), vec(ids(), 0..3), weighted(0.1, ids()));
    (numbers, counts, tokens)
        .prop_map(|(numbers, counts, tokens)| {
            let (temperature, top_p, min_p, presence, frequency, repetition) = numbers;
            let (top_k, seed, n, logprobs, prompt_logprobs) = counts;
            let (logit_bias, bad_words, allowed_token_ids) = tokens;
            SamplingParams {
                temperature,
                top_p,
                top_k,
                seed,
                n,
                logit_bias,
                min_p,
                presence_penalty: presence,
                frequency_penalty: frequency,
                repetition_penalty: repetition,
                bad_words,
                allowed_token_ids,
                logprobs,
                prompt_logprobs,
            }
        })
        .boxed()
}

fn stopping() -> BoxedStrategy<StoppingParams> {
    (
        of(count()),
        of(any::<bool>()),
        vec(id(), 0..3),
        vec(ids(), 0..3),
        weighted(0.2, count()),
        vec(text(), 0..3),
        of(any::<bool>()),
    )
        .prop_map(|(max_tokens, ignore_eos, stop_token_ids, sequences, min, texts, include)| {
            StoppingParams {
                max_tokens,
                ignore_eos,
                stop_token_ids,
                stop_sequences: sequences,
                min_tokens: min,
                stop_texts: texts,
                include_stop_text: include,
            }
        })
        .boxed()
}

fn constraint() -> BoxedStrategy<Kind> {
    let deep = |open: &'static str, inner: &'static str, close: &'static str| {
        (0..3000_usize).prop_map(move |depth| open.repeat(depth) + inner + &close.repeat(depth))
    };
    let schema = prop_oneof![
        deep(r#"{"type":"array","items":"#, "{}", "}"),
        deep("[", "", "]"),
        deep(r#"{"anyOf":["#, "true", "]}"),
        (1..u32::MAX).prop_map(|n| format!(r#"{{"type":"string","minLength":{n}}}"#)),
        Just(r##"{"$ref":"#"}"##.to_owned()),
        text(),
    ];
    let regex = prop_oneof![
        deep("(", "a", ")*"),
        (1..100_000_u32).prop_map(|n| format!("(a{{{n}}}){{{n}}}")),
        Just("a+".to_owned()),
        text(),
    ];
    let lark = prop_oneof![
        deep("start: (", "\"a\"", ")"),
        Just("start: start start".to_owned()),
        Just("start: \"a\" start | \"b\"".to_owned()),
        text(),
    ];
    prop_oneof![
        schema.prop_map(Kind::JsonSchema),
        regex.prop_map(Kind::Regex),
        lark.prop_map(Kind::LarkGrammar),
    ]
    .boxed()
}
