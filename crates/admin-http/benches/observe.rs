//! What a call costs its metrics: one step of four tokens, and one end.

use std::hint::black_box;
use std::time::Duration;

use admin_http::{Metrics, Names};
use criterion::{Criterion, criterion_group, criterion_main};
use engine_types::{FinishReason, SpecDecodeStats, Usage};
use serving::{CallObserver as _, ObservedOutput, ObservedStep, OutputTimes, RequestFacts};

fn observe(criterion: &mut Criterion) {
    let since_last = Duration::from_millis(30);
    let step = |n_tokens| ObservedStep { n_tokens, since_last, is_first: false };
    let at = |millis| Some(Duration::from_millis(millis));
    let reason = FinishReason::MaxTokens;
    let output = ObservedOutput {
        reason: Some(&reason),
        usage: Usage { prompt_tokens: 900, completion_tokens: 120, cached_tokens: 0 },
        spec_decode: SpecDecodeStats::default(),
        request: RequestFacts { n_prompt: 900, max_tokens: 120, n: 1 },
        times: OutputTimes {
            started: at(1),
            first_token: at(40),
            last_token: at(900),
            finished: Duration::from_millis(900),
        },
    };
    for (names, label) in [(Names::Own, "own"), (Names::Vllm, "own and vllm")] {
        let metrics = Metrics::new(names);
        for n_tokens in [1, 4] {
            let id = format!("step of {n_tokens} ({label})");
            criterion.bench_function(&id, |b| b.iter(|| metrics.step(black_box(&step(n_tokens)))));
        }
        let id = format!("end ({label})");
        criterion.bench_function(&id, |b| b.iter(|| metrics.finished(black_box(&output))));
    }
}

criterion_group!(benches, observe);
criterion_main!(benches);
