//! Pages that are well-formed, hold every figure, and say what must be said.

use super::*;
use crate::machine::MachineLoad;
use crate::provenance::{Fact, Process, Server, Source};
use crate::record::Counted;
use crate::result::{ResultFile, RunResult};
use crate::sample;
use crate::series::{Series, StepRates, Timeline};
use crate::summary::Summary;

/// A sweep over two servers, three repeats each.
fn sweep() -> ResultFile {
    let mut file = sample::file(&["k = 0", "k = 3 <b>"]);
    for concurrency in [1, 4, 16] {
        let name = format!("concurrency {concurrency}");
        for repeat in 0..3 {
            for (server, slowness) in [("k = 0", 1.0), ("k = 3 <b>", 0.6)] {
                let mut run = sample::run((&name, server), repeat, concurrency, slowness);
                if server == "k = 0" {
                    run.counters = None;
                }
                file.push(run).unwrap();
            }
        }
    }
    file.judge_pairs("k = 0", "k = 3 <b>");
    file
}

/// The same with everything that can be wrong.
fn warned() -> ResultFile {
    let mut file = sample::file(&["A"]);
    let source = |commit: &str| Fact::Known(Source { commit: commit.to_owned(), is_dirty: true });
    let process = Process { is_replaced: true, ..Process::of(std::process::id()).unwrap() };
    file.add_server(Server {
        source: source("0123456789"),
        process: Fact::Known(process),
        synthetic_acceptance: Fact::Known(true),
        ..Server::untold("A", "grpc://127.0.0.1:1")
    });
    let mut run = sample::run(("rate 4", "A"), 0, 4, 1.0);
    run.is_partial = true;
    run.machine = MachineLoad {
        is_quiet: Some(false),
        why_not: Some("others used 31 % of all processors during the run: rustc 30 %".to_owned()),
        ..run.machine
    };
    let generator = run.generator.as_mut().unwrap();
    generator.is_bottleneck = true;
    generator.why = Some("it used 140 % of a processor".to_owned());
    run.metrics.failures.insert("UNAVAILABLE".to_owned(), 2);
    run.kept_prompts = true;
    run.metrics.counted = Counted::Messages;
    run.metrics.n_short = 3;
    file.push(run).unwrap();
    file
}

fn parsed(page: &str) -> roxmltree::Document<'_> {
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    roxmltree::Document::parse_with_options(page, options).unwrap()
}

/// The text of all elements of this name.
fn texts(page: &str, name: &str) -> Vec<String> {
    let page = parsed(page);
    let elements = page.descendants().filter(|node| node.tag_name().name() == name);
    let text = |node: roxmltree::Node<'_, '_>| {
        node.descendants().filter_map(|of| of.text().filter(|_| of.is_text())).collect()
    };
    elements.map(text).collect()
}

#[test]
fn every_figure_of_every_run_is_on_the_page() {
    let file = sweep();
    let page = html(&file).unwrap();
    let cells = [texts(&page, "td"), texts(&page, "dd")].concat();
    let has = |value: f64| {
        let value = number(value);
        assert!(cells.contains(&value), "{value} is missing");
    };
    for run in file.runs() {
        let metrics = &run.metrics;
        for value in [
            metrics.output_throughput,
            metrics.request_throughput,
            metrics.total_throughput,
            metrics.peak_output_throughput,
            metrics.mean_concurrency,
            metrics.duration_s,
            metrics.goodput.unwrap(),
        ] {
            has(value);
        }
        let summaries = [
            metrics.ttft_ms,
            metrics.tpot_ms,
            metrics.itl_token_ms,
            metrics.itl_message_ms,
            metrics.e2el_ms,
            metrics.tokens_per_message,
            metrics.send_lag_ms,
        ];
        for of in summaries.into_iter().flatten() {
            for value in [of.mean, of.std, of.min, of.p50, of.p90, of.p95, of.p99, of.max] {
                has(value);
            }
        }
        assert!(cells.contains(&metrics.n_output_tokens.to_string()));
    }
    assert!(cells.contains(&"75.7 %, 65.7 %, 55.7 %".to_owned()), "acceptance by position");
}

#[test]
fn a_page_needs_nothing_else_and_no_text_is_markup() {
    let page = html(&sweep()).unwrap();
    let document = parsed(&page);
    let names: Vec<&str> = document.descendants().map(|node| node.tag_name().name()).collect();
    for outside in ["script", "link", "img", "iframe", "b", "a"] {
        assert!(!names.contains(&outside), "{outside}");
    }
    assert!(!page.contains("url(") && !page.contains("@import"));
    assert_eq!(texts(&page, "h1"), ["A <title> & \"more\""]);
    assert!(texts(&page, "summary").contains(&"k = 3 <b>".to_owned()));
    assert!(texts(&page, "pre").iter().any(|text| text.contains("\"<script>\"")));
    // Its two plots over all settings; of each setting four, and one of each server's steps.
    assert_eq!(names.iter().filter(|name| **name == "svg").count(), 2 + 3 * (4 + 2));
    let viewport = document.descendants().find(|of| of.attribute("name") == Some("viewport"));
    assert!(viewport.unwrap().attribute("content").unwrap().starts_with("width=device-width"));
}

#[test]
fn plots_have_colours_of_the_page_alone() {
    let page = html(&sweep()).unwrap();
    let document = parsed(&page);
    let mut n_lines = 0;
    let of_plots = document.descendants().filter(|node| node.tag_name().name() == "svg");
    for element in of_plots.flat_map(|svg| svg.descendants()) {
        for attribute in ["fill", "stroke"] {
            let colour = element.attribute(attribute).unwrap_or("none");
            let is_of_page =
                colour == "none" || colour == "currentColor" || colour.starts_with("var(");
            assert!(is_of_page || element.attribute("opacity") == Some("0"), "{element:?}");
            n_lines += usize::from(element.attribute("stroke") == Some("var(--s1)"));
        }
    }
    assert!(n_lines > 0);
}

#[test]
fn what_a_reader_must_know_comes_first() {
    let file = warned();
    let titles: Vec<&str> = warnings(&file).iter().map(|warning| warning.title).collect();
    for title in [
        "Partial",
        "Stale server",
        "Synthetic acceptance",
        "The machine was not quiet",
        "The generator is a bottleneck",
        "Failed requests",
        "Prompts not forgotten",
        "Tokens not told",
        "Short answers",
        "Dirty tree",
        "Few repeats",
    ] {
        assert!(titles.contains(&title), "{title} is not in {titles:?}");
    }
    let page = html(&file).unwrap();
    let at = |part: &str| page.find(part).unwrap_or_else(|| panic!("{part} is missing"));
    let contention = "Contention does not scale results proportionally";
    assert!(at("Partial.") < at(contention) && at(contention) < at("<table>"));
    let text = markdown(&file);
    let line = text.find("**The machine was not quiet.** 1 of 1 runs, rate 4, A, repeat 1: others");
    assert!(line.unwrap() < text.find("| setting").unwrap(), "{text}");
    for part in [
        "UNAVAILABLE 2",
        "A was not made to forget its prompts: later runs may be answered from its cache.",
        "The tokens of A are counted by messages",
        "A ended 3 of 16 answers before their planned length",
        "The generator used 4.0 % of one processor at most.",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn the_headline_is_the_sentence_of_pairs_or_the_best_of_each_server() {
    let mut file = sample::file(&["A", "B"]);
    for (server, concurrency) in [("A", 4), ("B", 4), ("A", 16)] {
        let name = format!("concurrency {concurrency}");
        file.push(sample::run((&name, server), 0, concurrency, 1.0)).unwrap();
    }
    let headline = |file: &ResultFile| {
        let page = html(file).unwrap();
        let page = parsed(&page);
        let mut sections = page.descendants();
        let section = sections.find(|node| node.attribute("class") == Some("headline")).unwrap();
        let texts = section.descendants().filter(|node| node.is_text());
        texts.filter_map(|node| node.text()).map(str::to_owned).collect::<String>()
    };
    let text = headline(&file);
    assert!(
        text.contains("A: up to ")
            && text.contains(" output tokens/s at concurrency 16, TTFT p50 ")
    );
    assert!(text.contains("B: ") && text.contains(" output tokens/s at concurrency 4, TTFT p50 "));
    assert!(!text.contains("B: up to"), "{text}");
    file.judge_pairs("A", "B");
    let text = headline(&file);
    assert!(text.contains("concurrency 4: B against A: ") && !text.contains("up to"), "{text}");
}

#[test]
fn what_batches_take_is_on_the_page() {
    let mut file = sample::file(&["A"]);
    let run = sample::run(("batch of 8", "A"), 0, 8, 1.0);
    let batch_ms = Summary::of([1234.0, 4321.0, 1235.0]);
    file.push(RunResult { batch_ms, ..run }).unwrap();
    let page = html(&file).unwrap();
    assert!(texts(&page, "th").contains(&"batch p50".to_owned()));
    let cells = texts(&page, "td");
    assert!(["batch (ms)", "1235", "4321"].iter().all(|cell| cells.contains(&(*cell).to_owned())));
    assert!(!texts(&html(&sweep()).unwrap(), "td").contains(&"batch (ms)".to_owned()));
}

#[test]
fn a_timeline_shows_the_steps_that_a_server_tells() {
    let mut file = sample::file(&["A"]);
    file.push(sample::run(("load", "A"), 0, 4, 1.0)).unwrap();
    let titles = |file: &ResultFile| texts(&html(file).unwrap(), "h3");
    assert!(titles(&file).contains(&"Steps over time, A".to_owned()));
    let mut untold = sample::file(&["A"]);
    let run = sample::run(("load", "A"), 0, 4, 1.0);
    let timeline = Timeline { steps: StepRates::default(), ..run.series.timeline };
    let series = Series { timeline, ..run.series };
    untold.push(RunResult { series, ..run }).unwrap();
    assert_eq!(titles(&untold).len(), titles(&file).len() - 1);
}

#[test]
fn labels_of_points_lie_over_nothing() {
    let mut file = sample::file(&["A", "B", "C"]);
    for (server, slowness) in [("A", 1.0), ("B", 0.95), ("C", 0.9)] {
        for concurrency in [1, 2, 3, 16] {
            let name = format!("concurrency {concurrency}");
            file.push(sample::run((&name, server), 0, concurrency, slowness)).unwrap();
        }
    }
    let page = html(&file).unwrap();
    let page = parsed(&page);
    let plot = page.descendants().find(|node| node.tag_name().name() == "svg").unwrap();
    let is_label = |node: &roxmltree::Node<'_, '_>| {
        let colour = node.attribute("fill").unwrap_or_default();
        node.tag_name().name() == "text" && colour.starts_with("var(--s")
    };
    let number = |node: &roxmltree::Node<'_, '_>, of: &str| -> f64 {
        node.attribute(of).unwrap().parse().unwrap()
    };
    let labels: Vec<_> = plot.descendants().filter(is_label).collect();
    assert!(labels.len() >= 6, "few points have labels: {}", labels.len());
    for (idx, a) in labels.iter().enumerate() {
        for b in &labels[idx + 1..] {
            let apart = |of| (number(a, of) - number(b, of)).abs();
            assert!(apart("x") >= 8.0 || apart("y") >= 14.0, "{a:?} {b:?}");
        }
    }
}

#[test]
fn a_clean_measurement_has_no_warning_but_of_its_tree() {
    let file = sweep();
    let mut titles = warnings(&file).into_iter().map(|warning| warning.title);
    // Whoever runs this test may have changes.
    assert!(titles.all(|title| title == "Dirty tree"));
}

#[test]
fn programs_that_nobody_knows_or_should_measure_are_told() {
    let mut json = serde_json::to_value(sweep()).unwrap();
    json["provenance"]["bench"]["is_optimized"] = false.into();
    json["is_partial"] = true.into();
    let unknown = serde_json::json!({"unknown": "it does not tell"});
    json["provenance"]["servers"][1]["source"] = unknown;
    let warnings = warnings(&ResultFile::from_json(&json.to_string()).unwrap());
    let text = |title| &warnings.iter().find(|warning| warning.title == title).unwrap().text;
    assert!(text("Built for debugging").contains("an optimized build"));
    assert!(text("Partial").contains("are not there"));
    let source = text("Source not known");
    assert!(source.starts_with("Of k = 3 <b>: ") && source.contains("`cargo xtask bench`"));
}

#[test]
fn servers_that_were_asked_different_things_are_told() {
    let mut file = sample::file(&["A", "B"]);
    file.push(sample::run(("load", "A"), 0, 4, 1.0)).unwrap();
    file.push(sample::run(("load", "B"), 0, 8, 1.0)).unwrap();
    let is_told = warnings(&file).iter().any(|of| of.title == "Servers were not asked the same");
    assert!(is_told);
}

#[test]
fn markdown_tables_are_aligned() {
    let text = markdown(&sweep());
    let mut widths: Vec<usize> = vec![];
    for line in text.lines() {
        if line.starts_with('|') {
            widths.push(line.chars().count());
        } else {
            assert!(widths.windows(2).all(|two| two[0] == two[1]), "{text}");
            widths.clear();
        }
    }
    assert!(text.contains("| setting"), "{text}");
    assert!(text.contains("| k = 3 &lt;b> |"), "{text}");
}

#[test]
fn a_comparison_says_what_is_noise_and_what_fails() {
    let of = |throughput: f64| {
        let mut file = sample::file(&["A"]);
        for repeat in 0..3 {
            let run: RunResult = sample::run(("concurrency 4", "A"), repeat, 4, 1.0);
            file.push(sample::with_throughput(run, throughput + f64::from(repeat))).unwrap();
        }
        file
    };
    let text = |a, b| comparison_markdown(&crate::compare(&of(a), &of(b), false).unwrap());
    assert!(text(100.0, 101.0).ends_with("\nNo regression.\n"));
    assert!(text(100.0, 101.0).contains(" +1.0 % |   noise |"), "{}", text(100.0, 101.0));
    let worse = text(100.0, 90.0);
    assert!(
        worse.ends_with("**Regression**: concurrency 4: output throughput -9.9 %\n"),
        "{worse}"
    );
}

#[test]
fn numbers_have_four_figures() {
    let texts = [0.0, 1234.56, 123.456, 12.3456, 1.23456, 0.0123, -12.0].map(number);
    assert_eq!(texts, ["0", "1235", "123.5", "12.35", "1.235", "0.012", "-12.00"]);
}

#[test]
fn a_page_of_many_runs_stays_small() {
    let page = html(&sweep()).unwrap();
    // 18 runs of a few seconds each; timelines of hours have at most 120 points too.
    assert!(page.len() < 300_000, "{} bytes", page.len());
}
