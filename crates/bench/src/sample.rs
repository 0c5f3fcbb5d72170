//! Results for tests: what a server of a given speed would have come to.

use std::time::Duration;

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::compare::FIGURES;
use crate::{
    Arrival, Build, Counted, Counters, Fact, GeneratorLoad, Load, LoadWindow, MachineLoad, Metrics,
    Outcome, Planned, Prompt, Provenance, Record, ResultFile, RunResult, Series, Server,
    ServerProcess, Slo, StepCount, Workload,
};

/// A document without runs, of these servers.
pub(crate) fn file(servers: &[&str]) -> ResultFile {
    let settings = serde_json::json!({"num_prompts": 160, "seed": 0});
    let arguments = ["bench", "serve", "--seed", "0"].map(str::to_owned);
    let build = Build { is_optimized: true, ..Build::of_this_program("0.1.0+4769999a") };
    let provenance = Provenance::now(build, &arguments, settings);
    let mut file = ResultFile::new(provenance, "A <title> & \"more\"");
    for name in servers {
        file.add_server(Server {
            source: file.provenance().bench.source.clone(),
            synthetic_acceptance: Fact::Known(false),
            config: serde_json::json!({"block_size": 16, "name": "<script>"}),
            ..Server::untold(*name, "grpc://127.0.0.1:50051")
        });
    }
    file
}

/// A run at this concurrency whose every time is `slowness` times as long.
pub(crate) fn run(
    (name, server): (&str, &str),
    repeat: u32,
    concurrency: usize,
    slowness: f64,
) -> RunResult {
    let rng = ChaCha8Rng::seed_from_u64(u64::from(repeat));
    let records = records(rng, concurrency, slowness);
    let slo = Slo { ttft_ms: Some(400.0), ..Slo::default() };
    let metrics = Metrics::of(&records, &slo);
    let requests = [Planned::greedy(Prompt::TokenIds(vec![1, 2, repeat]), 96)];
    let during = LoadWindow { server: 0.9, generator: 0.02, ..LoadWindow::default() };
    let machine = MachineLoad {
        n_cpus: 2,
        governor: None,
        before: LoadWindow::default(),
        during,
        is_quiet: Some(true),
        why_not: None,
    };
    RunResult {
        name: name.to_owned(),
        server: server.to_owned(),
        load: Load::Closed { concurrency },
        workload: Workload::of("random, input 64, output 96", &requests),
        repeat,
        seed: u64::from(repeat),
        n_warmup: 4,
        kept_prompts: false,
        slo,
        generator: GeneratorLoad::of(&machine, ServerProcess::Elsewhere, &metrics, None),
        metrics,
        counters: Some(counters(657)),
        machine,
        is_partial: false,
        batch_ms: None,
        series: Series::with_steps(&records, &steps(&records)),
        records: None,
    }
}

/// Of 1,000 steps with 3 drafts each, so many of which were accepted of each thousand.
pub(crate) fn counters(per_thousand: u64) -> Counters {
    Counters {
        verify_steps: 1000,
        draft_tokens: 3000,
        accepted_tokens: per_thousand * 3,
        drafted_per_position: vec![1000, 1000, 1000],
        accepted_per_position: vec![per_thousand + 100, per_thousand, per_thousand - 100],
        decode_steps: 1000,
        ..Counters::default()
    }
}

/// Looks at a server that does 40 decode steps a second, and a prefill step every half second.
fn steps(records: &[Record]) -> Vec<StepCount> {
    let end = records.iter().map(|record| record.ended).max().unwrap_or_default();
    let look = |i: u32| {
        let at = (Duration::from_millis(250) * i).min(end);
        let counters = Counters {
            decode_steps: u64::from(10 * i),
            prefill_steps: u64::from(i / 2),
            ..Counters::default()
        };
        StepCount::new(at, &counters)
    };
    let n = u32::try_from(end.as_millis() / 250).expect("a short run");
    (0..=n + 1).map(look).collect()
}

/// Requests one after the other in each place, with messages of 1 to 4 tokens.
#[expect(clippy::cast_precision_loss, reason = "a few requests")]
fn records(mut rng: ChaCha8Rng, concurrency: usize, slowness: f64) -> Vec<Record> {
    let step_s = 0.02 * slowness * (1.0 + concurrency as f64 / 16.0);
    let mut records = vec![];
    for place in 0..concurrency {
        let mut now = 0.0;
        for _ in 0..4 {
            let due = now;
            now += step_s * rng.random_range(3.0..6.0);
            let mut messages = vec![];
            let mut n_left = 96_u32;
            while n_left > 0 {
                let n_tokens = rng.random_range(1..=4).min(n_left);
                messages.push(Arrival { at: Duration::from_secs_f64(now), n_tokens });
                n_left -= n_tokens;
                now += step_s * rng.random_range(0.9..1.2);
            }
            records.push(Record {
                index: records.len() + place,
                due: Duration::from_secs_f64(due),
                sent: Duration::from_secs_f64(due),
                messages,
                ended: Duration::from_secs_f64(now),
                outcome: Outcome::Completed,
                n_prompt: 64,
                n_planned: Some(96),
                counted: Counted::Ids,
            });
        }
    }
    records
}

/// A run of which only the output throughput and the acceptance matter.
pub(crate) fn with_throughput(mut run: RunResult, output_throughput: f64) -> RunResult {
    let known = FIGURES[0].of;
    run.metrics.output_throughput = output_throughput;
    assert_eq!(known(&run), Some(output_throughput));
    run
}
