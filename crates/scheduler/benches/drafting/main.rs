//! What adaptive drafting brings, and what the choice of a length costs.
//!
//! First a table: tokens by cost of no drafts, of three and of the adaptive policy, as multiples
//! of the fixed length that is best in hindsight, over measured and random acceptance, with the
//! default costs. Then criterion on the two functions, which run once a request and step.

#![expect(clippy::print_stdout, reason = "the table is what this is for")]

mod replay;

use std::hint::black_box;

use criterion::{Criterion, criterion_group};
use scheduler::{Acceptance, AdaptiveDrafting, DraftPolicy};

use crate::replay::{K_MAX, best_fixed, workloads};

fn table() {
    let costs = AdaptiveDrafting::default().costs;
    let adaptive = DraftPolicy::Adaptive(AdaptiveDrafting::default());
    println!("{costs:?}\n");
    println!("| workload | requests | best k | k = 0 | k = 3 | adaptive | its drafts a step |");
    println!("|---|---|---|---|---|---|---|");
    for workload in workloads() {
        for n_requests in [1, 4, 16, 64, 256] {
            let (best, rate) = best_fixed(&workload, &costs, n_requests);
            let run = |policy, k_max| replay::replay(&workload, policy, k_max, &costs, n_requests);
            let fixed = [0, 3].map(|k| run(&DraftPolicy::Fixed, k).rate / rate);
            let found = run(&adaptive, K_MAX);
            println!(
                "| {} | {n_requests} | {best} | {:.2} | {:.2} | {:.3} | {:.2} |",
                workload.name,
                fixed[0],
                fixed[1],
                found.rate / rate,
                found.mean_length
            );
        }
    }
}

fn functions(criterion: &mut Criterion) {
    let policy = DraftPolicy::default();
    let mut good = Acceptance::default();
    (0..100).for_each(|_| good.record(8, 8));
    for (name, acceptance) in [("fresh", Acceptance::default()), ("all accepted", good)] {
        for n_running in [1, 64] {
            let name = format!("draft_length/{name}, {n_running} requests");
            criterion.bench_function(&name, |bencher| {
                bencher.iter(|| {
                    black_box(&policy).draft_length(
                        black_box(K_MAX),
                        black_box(&acceptance),
                        black_box(n_running),
                    )
                });
            });
        }
    }
    criterion.bench_function("record", |bencher| {
        let mut acceptance = Acceptance::default();
        bencher.iter(|| acceptance.record(black_box(3), black_box(2)));
    });
}

criterion_group!(benches, functions);

fn main() {
    table();
    benches();
    Criterion::default().configure_from_args().final_summary();
}
