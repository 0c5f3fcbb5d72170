//! What is noise and what is not.

use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, Normal, StudentT};

use serde_json::json;

use super::*;
use crate::provenance::{Checkpoint, Covers, Fact, Server};
use crate::result::ResultFile;
use crate::sample;

const NAME: &str = "concurrency 4";

/// A document of one server with these output throughputs and this acceptance per thousand.
fn file(throughputs: &[f64], per_thousand: u64) -> ResultFile {
    let mut file = sample::file(&["tandem"]);
    for (repeat, throughput) in (0..).zip(throughputs) {
        let run = sample::run((NAME, "tandem"), repeat, 4, 1.0);
        let mut run = sample::with_throughput(run, *throughput);
        run.counters = Some(sample::counters(per_thousand));
        file.push(run).unwrap();
    }
    file
}

fn headline(a: &ResultFile, b: &ResultFile) -> Row {
    compare(a, b, false).unwrap().settings[0].rows[0].clone()
}

#[test]
fn a_spread_has_the_middle_and_the_ends() {
    assert_eq!(Spread::of([]), None);
    assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { n: 3, median: 2.0, min: 1.0, max: 3.0 }));
    assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
}

#[test]
fn a_difference_counts_beyond_ranges_that_do_not_overlap() {
    let finding = |a: &[f64], b: &[f64]| headline(&file(a, 600), &file(b, 600)).finding;
    assert_eq!(finding(&[100., 101., 102.], &[103., 104., 105.]), Finding::Better);
    assert_eq!(finding(&[103., 104., 105.], &[100., 101., 102.]), Finding::Worse);
    assert_eq!(finding(&[100., 101., 104.], &[103., 108., 109.]), Finding::Noise, "overlap");
    assert_eq!(finding(&[100., 100., 110.], &[111., 111., 111.]), Finding::Better);
    assert_eq!(finding(&[100., 109., 110.], &[111., 111., 111.]), Finding::Noise, "a wide range");
    let row = headline(&file(&[100., 101., 102.], 600), &file(&[50., 50.5, 51.], 600));
    assert_eq!((row.ratio, row.a.median, row.b.median), (0.5, 101.0, 50.5));
}

#[test]
fn single_runs_differ_by_more_than_a_twentieth_or_not_at_all() {
    let finding = |a, b| headline(&file(&[a], 600), &file(&[b], 600)).finding;
    assert_eq!(finding(100.0, 100.3), Finding::Noise);
    assert_eq!(finding(100.0, 95.0), Finding::Noise);
    assert_eq!(finding(100.0, 94.0), Finding::Worse);
    let comparison = compare(&file(&[1.0], 600), &file(&[1.0], 600), false).unwrap();
    assert!(comparison.cautions.iter().any(|text| text.contains("fewer than 3 repeats")));
}

#[test]
fn throughput_and_acceptance_fail_a_build() {
    let (good, acceptance) = ([100., 101., 102.], 657);
    let regressions = |throughputs: &[f64], per_thousand| {
        let (a, b) = (file(&good, acceptance), file(throughputs, per_thousand));
        compare(&a, &b, false).unwrap().regressions()
    };
    assert_eq!(regressions(&good, acceptance), Vec::<String>::new());
    assert_eq!(regressions(&[200., 201., 202.], 900), Vec::<String>::new());
    assert_eq!(regressions(&good, 648), Vec::<String>::new(), "0.9 percentage points");
    assert_eq!(regressions(&good, 647), Vec::<String>::new(), "exactly 1");
    assert_eq!(regressions(&good, 646), ["concurrency 4: acceptance rate -1.1 percentage points"]);
    assert_eq!(regressions(&[90.; 3], 600).len(), 2, "both");
    assert_eq!(regressions(&good, 640), ["concurrency 4: acceptance rate -1.7 percentage points"]);
    assert_eq!(
        regressions(&[95., 96., 97.], acceptance),
        ["concurrency 4: output throughput -5.0 %"]
    );
    assert_eq!(regressions(&[99., 100., 101.], acceptance), Vec::<String>::new());
}

/// Also where the repeats overlap: a loss is a loss of the medians.
#[test]
fn rates_that_differ_from_repeat_to_repeat_fail_by_their_medians() {
    let of = |rates: [u64; 3]| {
        let mut file = sample::file(&["tandem"]);
        for (repeat, per_thousand) in (0..).zip(rates) {
            let run = sample::run((NAME, "tandem"), repeat, 4, 1.0);
            let counters = Some(sample::counters(per_thousand));
            file.push(RunResult { counters, ..run }).unwrap();
        }
        file
    };
    let regressions = |a, b| compare(&of(a), &of(b), false).unwrap().regressions();
    assert_eq!(regressions([560, 740, 790], [570, 735, 790]), Vec::<String>::new());
    assert_eq!(regressions([560, 740, 790], [570, 670, 690]).len(), 1);
}

#[test]
fn what_must_not_be_compared_is_refused_by_name_unless_forced() {
    let a = file(&[100.0; 3], 600);
    let checkpoint = |sha256: &str| {
        let (name, sha256) = ("tiny".to_owned(), sha256.to_owned());
        Fact::Known(Checkpoint { name, sha256, covers: Covers::WholeFiles, n_bytes: 9 })
    };
    let of_server = |change: &dyn Fn(&mut Server)| {
        let mut file = file(&[100.0; 3], 600);
        let mut server = file.server("tandem").unwrap().clone();
        change(&mut server);
        file.add_server(server);
        file
    };
    let one = of_server(&|server| server.checkpoint = checkpoint("aa"));
    let other = of_server(&|server| server.checkpoint = checkpoint("bb"));
    let synthetic = of_server(&|server| server.synthetic_acceptance = Fact::Known(true));
    let mut other_load = sample::file(&["tandem"]);
    other_load.push(sample::run((NAME, "tandem"), 0, 8, 1.0)).unwrap();
    let mut other_requests = sample::file(&["tandem"]);
    let mut run = sample::run((NAME, "tandem"), 0, 4, 1.0);
    run.workload.sha256 = "other".to_owned();
    other_requests.push(run).unwrap();
    let mut other_kind = sample::file(&["tandem"]);
    let mut run = sample::run((NAME, "tandem"), 0, 4, 1.0);
    run.workload.description = "a file of prompts".to_owned();
    other_kind.push(run).unwrap();
    let parts_alone = of_server(&|server| {
        server.checkpoint = checkpoint("aa");
        if let Fact::Known(of) = &mut server.checkpoint {
            of.covers = Covers::HeadersAndSizes;
        }
    });
    for (a, b, part) in [
        (&one, &parts_alone, "the checkpoint: tiny"),
        (&a, &other_kind, "the workload of concurrency 4"),
        (&one, &other, "the checkpoint: tiny"),
        (&a, &synthetic, "acceptance: real, and synthetic"),
        (&a, &other_load, "the load of concurrency 4"),
        (&a, &other_requests, "their hashes differ"),
    ] {
        let error = compare(a, b, false).unwrap_err();
        assert!(error.0.len() == 1 && error.to_string().contains(part), "{error}");
        assert_eq!(compare(a, b, true).unwrap().forced, error.0);
    }
    // What is not known does not differ, and is told.
    let comparison = compare(&a, &one, false).unwrap();
    assert!(comparison.cautions.iter().any(|text| text.contains("same checkpoint is not known")));
    let error = compare(&a, &sample::file(&["tandem"]), true).unwrap_err();
    assert!(error.to_string().contains("no setting in common"), "{error}");
}

#[test]
fn what_the_ratios_hold_beside_the_change_is_told() {
    let a = file(&[100.0; 3], 600);
    let mut b = sample::file(&["tandem"]);
    for repeat in 0..3 {
        let run = sample::run((NAME, "tandem"), repeat, 4, 1.0);
        let mut machine = run.machine.clone();
        machine.is_quiet = Some(false);
        machine.why_not = Some("others used 50 % of all processors".to_owned());
        b.push(RunResult { counters: None, machine, ..run }).unwrap();
    }
    let cautions = compare(&a, &b, false).unwrap().cautions;
    for part in [
        "only the first has the acceptance rate of concurrency 4",
        "not measured in one sitting",
        "the second: The machine was not quiet: 3 of 3 runs",
    ] {
        assert!(cautions.iter().any(|text| text.contains(part)), "{part}: {cautions:?}");
    }
    let back = compare(&b, &a, false).unwrap().cautions;
    assert!(back.iter().any(|text| text.starts_with("only the second has the acceptance length")));
    // A document beside itself is of one sitting and one machine.
    let same = compare(&a, &a, false).unwrap();
    assert!(same.settings[0].rows.iter().all(|row| row.finding == Finding::Noise));
    assert!(same.regressions().is_empty());
    for part in ["sitting", "machines differ", "only the"] {
        assert!(!same.cautions.iter().any(|text| text.contains(part)), "{:?}", same.cautions);
    }
    let mut json = serde_json::to_value(&a).unwrap();
    json["provenance"]["host"]["kernel"] = serde_json::json!({"known": "Linux 0.01"});
    let elsewhere = ResultFile::from_json(&json.to_string()).unwrap();
    let cautions = compare(&a, &elsewhere, false).unwrap().cautions;
    let differ = cautions.iter().find(|text| text.starts_with("the machines differ: "));
    assert!(differ.unwrap().contains("Linux 0.01"), "{cautions:?}");
}

#[test]
fn whatever_else_differs_is_told_by_name() {
    let changed = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut json = serde_json::to_value(file(&[100.0; 3], 600)).unwrap();
        change(&mut json);
        ResultFile::from_json(&json.to_string()).unwrap()
    };
    let a = file(&[100.0; 3], 600);
    let b = changed(&|json| {
        let commit = json!({"known": {"commit": "1234567", "is_dirty": false}});
        json["provenance"]["bench"]["source"] = commit.clone();
        let server = &mut json["provenance"]["servers"][0];
        server["source"] = commit;
        server["threads"] = json!({"known": 4});
        server["device"] = json!({"known": "cuda"});
        server["config"]["settings"] = json!({"max_num_seqs": 8});
        server["config"]["block_size"] = json!(32);
        for run in json["runs"].as_array_mut().unwrap() {
            run["n_warmup"] = json!(9);
            run["slo"]["ttft_ms"] = json!(500.0);
        }
    });
    let comparison = compare(&a, &b, false).unwrap();
    for part in [
        "the benchmark differs: commit: 4769999a → 1234567",
        "tandem differs: commit: 4769999a → 1234567; ",
        "threads: unknown (the server does not tell) → 4",
        " → cuda",
        "config.block_size: 16 → 32; config.settings: null → {\"max_num_seqs\":8}",
        "concurrency 4 differs: n_warmup: 4 → 9; slo.ttft_ms: 400.0 → 500.0",
        "the goodput of concurrency 4 is left out",
    ] {
        let cautions = &comparison.cautions;
        assert!(cautions.iter().any(|text| text.contains(part)), "{part}: {cautions:?}");
    }
    assert!(comparison.settings[0].row(GOODPUT).is_none());
    let same = compare(&a, &a, false).unwrap();
    assert!(!same.cautions.iter().any(|text| text.contains("differs")), "{:?}", same.cautions);
    assert!(same.settings[0].row(GOODPUT).is_some());

    let of_headers = changed(&|json| {
        let of = json!({
            "name": "large", "sha256": "aa", "covers": "headers_and_sizes", "n_bytes": 9
        });
        json["provenance"]["servers"][0]["checkpoint"] = json!({ "known": of });
    });
    let cautions = compare(&of_headers, &of_headers, false).unwrap().cautions;
    assert!(cautions.iter().any(|text| text.contains("by headers and sizes alone")));
}

#[test]
fn runs_that_were_cut_short_count_for_nothing() {
    let a = file(&[100.0; 3], 600);
    let mut cut = file(&[100.0; 3], 600);
    let run = sample::with_throughput(sample::run((NAME, "tandem"), 3, 4, 1.0), 1.0);
    cut.push(RunResult { is_partial: true, ..run }).unwrap();
    cut.mark_partial();
    let comparison = compare(&a, &cut, false).unwrap();
    assert_eq!(comparison.settings[0].rows[0].b, Spread::of([100.0; 3]).unwrap());
    let is_told = comparison.cautions.iter().any(|text| text.starts_with("the second: Partial"));
    assert!(is_told, "{:?}", comparison.cautions);
}

#[test]
fn servers_are_matched_by_name_where_there_are_several() {
    let mut two = sample::file(&["A", "B"]);
    two.push(sample::run((NAME, "A"), 0, 4, 1.0)).unwrap();
    two.push(sample::run((NAME, "B"), 0, 4, 1.0)).unwrap();
    let mut one = sample::file(&["B"]);
    one.push(sample::run((NAME, "B"), 0, 4, 1.0)).unwrap();
    let comparison = compare(&two, &one, false).unwrap();
    assert_eq!(comparison.settings.len(), 1);
    assert_eq!(comparison.settings[0].servers, ("B".to_owned(), "B".to_owned()));
    assert!(comparison.cautions.contains(&"the second has no concurrency 4 of A".to_owned()));
    let back = compare(&one, &two, false).unwrap();
    assert!(back.cautions.contains(&"the first has no concurrency 4 of A".to_owned()));
}

/// Throughputs of A and B over pairs of a sitting: both drift together, each run is off by a
/// normal deviation, and now and then by much more.
fn sitting(rng: &mut ChaCha8Rng, n_pairs: usize, cv: f64, b_is: f64) -> Vec<(f64, f64)> {
    let step = Normal::new(0.0, 0.03).unwrap();
    let heavy = StudentT::new(5.0).unwrap();
    // Student's t has the variance 5/3 at 5 degrees of freedom.
    let off = |rng: &mut ChaCha8Rng| 1.0 + cv * heavy.sample(rng) / (5.0_f64 / 3.0).sqrt();
    let mut speed = 1000.0;
    (0..n_pairs)
        .map(|_| {
            speed *= 1.0 + step.sample(rng);
            (speed * off(rng), speed * b_is * off(rng))
        })
        .collect()
}

/// Share of sittings in which B's speed is told from A's.
fn share_found(n_pairs: usize, cv: f64, b_is: f64) -> f64 {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let is_found = |_: &u32| {
        AbRow::of((HEADLINE, ""), &sitting(&mut rng, n_pairs, cv, b_is)).unwrap().is_above_noise
    };
    let n_found = (0..4000).filter(is_found).count();
    f64::from(u32::try_from(n_found).unwrap()) / 4000.0
}

#[test]
fn a_against_a_is_noise_and_a_twentieth_is_found() {
    for (n_pairs, cv, least_found) in
        [(5, 0.005, 0.999), (5, 0.01, 0.97), (5, 0.015, 0.85), (10, 0.02, 0.97)]
    {
        let false_alarms = share_found(n_pairs, cv, 1.0);
        let found = share_found(n_pairs, cv, 0.95);
        println!(
            "{n_pairs} pairs of runs that are off by {cv}: {false_alarms} of A/A told apart, \
             {found} of -5 % found"
        );
        assert!(false_alarms <= 0.03, "{cv}: {false_alarms}");
        assert!(found >= least_found, "{cv}: {found}");
    }
}

#[test]
fn ratios_are_taken_pair_by_pair() {
    let pairs = [(100.0, 95.0), (200.0, 190.0), (50.0, 47.5)];
    let row = AbRow::of((HEADLINE, "tokens/s"), &pairs).unwrap();
    assert!((row.ratio - 0.95).abs() < 1e-12 && row.is_above_noise, "{row:?}");
    assert_eq!(row.ratios, [0.95; 3]);
    // By hand: logs 0.01, 0.02, 0.03; their mean is 0.02, its error 0.01/√3, and t = 6.9646.
    let pairs = [0.01_f64, 0.02, 0.03].map(|log| (1.0, log.exp()));
    let (low, high) = AbRow::of((HEADLINE, ""), &pairs).unwrap().interval.unwrap();
    let half = 6.964_556_734 * 0.01 / 3.0_f64.sqrt();
    assert!((low.ln() - (0.02 - half)).abs() < 1e-8 && (high.ln() - (0.02 + half)).abs() < 1e-8);
}

#[test]
fn a_sentence_says_what_the_pairs_say() {
    let sentence = |throughputs: &[(f64, f64)]| {
        let mut runs = vec![];
        for (repeat, (a, b)) in (0..).zip(throughputs) {
            for (server, throughput) in [("A", a), ("B", b)] {
                let run = sample::run((NAME, server), repeat, 4, 1.0);
                runs.push(sample::with_throughput(run, *throughput));
            }
        }
        // A run without its partner is in no pair, and neither is one that was cut short.
        runs.push(sample::run((NAME, "A"), 98, 4, 1.0));
        for (server, is_partial) in [("A", false), ("B", true)] {
            runs.push(RunResult { is_partial, ..sample::run((NAME, server), 99, 4, 1.0) });
        }
        let mut results = AbResult::of_runs(&runs, "A", "B");
        assert_eq!(results.len(), 1);
        let result = results.remove(0);
        assert!(result.rows.iter().all(|row| row.ratios.len() == throughputs.len()));
        (result.is_above_noise, result.sentence)
    };
    let (is_above, text) = sentence(&[(100.0, 95.0), (101.0, 96.0), (99.0, 94.0)]);
    assert!(is_above);
    let begins = "B has 5.0 % less output throughput than A, above the noise (98 % interval ";
    assert!(text.starts_with(begins) && text.ends_with("3 pairs)."), "{text}");
    let (is_above, text) = sentence(&[(100.0, 95.0), (100.0, 106.0), (100.0, 101.0)]);
    assert!(!is_above && text.starts_with("Noise: B and A do not differ"), "{text}");
    // Surely faster, but by less than two starts of one program may be.
    let (is_above, text) = sentence(&[(1000.0, 1003.0), (1000.0, 1003.1), (1000.0, 1003.0)]);
    assert!(!is_above && text.contains("+0.3 %"), "{text}");
    let (is_above, text) = sentence(&[(100.0, 50.0)]);
    assert!(!is_above && text.contains("1 pair cannot say"), "{text}");
    let (is_above, text) = sentence(&[(100.0, 50.0), (0.0, 50.0), (100.0, 50.0)]);
    assert!(!is_above && text.starts_with("A completed nothing in pair 2: "), "{text}");
    assert_eq!(AbResult::of_runs(&[], "A", "B"), vec![]);
    let mut runs = ["A", "B"].map(|server| sample::run((NAME, server), 0, 4, 1.0));
    runs[1].machine.is_quiet = Some(false);
    let text = AbResult::of_runs(&runs, "A", "B").remove(0).sentence;
    assert!(text.ends_with("The machine was not quiet in 1 of 2 runs."), "{text}");
    runs[0].metrics.goodput = Some(0.0);
    let text = AbResult::of_runs(&runs, "A", "B").remove(0).sentence;
    assert!(text.contains(" A pair has 0, and so no ratio, of goodput."), "{text}");
}
