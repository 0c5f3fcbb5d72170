//! What does choosing a token cost for each row, by what its request asks for? Eight rows with
//! random logits and a history of 1,000 tokens, at the vocabularies of the bundled checkpoints and
//! of GLM-5; divide by eight for one row.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sampler::{Purpose, SamplingParams, SamplingRow, TokenHistory, greedy, sample};
use tch::{Device, Kind, Tensor};

const N_ROWS: u32 = 8;

fn requests() -> [(&'static str, SamplingParams); 5] {
    let temperature = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
    let top_k_top_p = SamplingParams { top_k: 50, top_p: 0.9, ..temperature.clone() };
    let top_p = SamplingParams { top_p: 0.9, ..temperature.clone() };
    let all = SamplingParams {
        min_p: 0.01,
        presence_penalty: 0.5,
        frequency_penalty: 0.5,
        repetition_penalty: 1.1,
        logit_bias: (0..100).map(|id| (7 * id, 1.0)).collect(),
        bad_words: vec![vec![1, 2], vec![3]],
        allowed_token_ids: Some((0..4000).collect()),
        min_tokens: 2000,
        end_ids: vec![0, 1],
        ..top_k_top_p.clone()
    };
    let penalised = SamplingParams { frequency_penalty: 0.5, ..SamplingParams::default() };
    [
        ("greedy-penalised", penalised),
        ("temperature", temperature),
        ("top-k-top-p", top_k_top_p),
        ("top-p", top_p),
        ("all", all),
    ]
}

fn sampling(c: &mut Criterion) {
    for vocab in [4096u32, 154_880] {
        tch::manual_seed(1);
        let size = [i64::from(N_ROWS), i64::from(vocab)];
        let logits = Tensor::randn(size, (Kind::Float, Device::Cpu)) * 3.0;
        let mut history = TokenHistory::new(&[]);
        history.extend(&(0..1000).map(|i| i * 37 % vocab).collect::<Vec<u32>>());
        let mut group = c.benchmark_group(format!("vocab-{vocab}"));
        group.throughput(Throughput::Elements(u64::from(N_ROWS))).sample_size(20);
        group.bench_function("greedy", |b| {
            let mut ids = Vec::new();
            b.iter(|| greedy(&logits, &mut ids).expect("the logits are numbers"));
        });
        for (name, params) in requests() {
            let row = SamplingRow {
                params: &params,
                history: &history,
                drafts: &[],
                position: 1000,
                grammar_mask: None,
            };
            let rows = [row; N_ROWS as usize];
            group.bench_function(BenchmarkId::from_parameter(name), |b| {
                b.iter(|| sample(&logits, &rows, Purpose::Sample).expect("tensors fit").ids);
            });
        }
    }
}

criterion_group!(benches, sampling);
criterion_main!(benches);
