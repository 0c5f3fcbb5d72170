//! Figures over time, and how they look.

use std::time::{Duration, Instant};

use grpc_api::control::v1::{
    GetModelInfoResponse, GetServerInfoResponse, GetStatsResponse, IndexerCounts, IndexerStats,
};
use grpc_api::inference::v1::SpeculationStats;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;

/// A sample of a busy server, `seconds` after `start`.
fn sample(start: Instant, seconds: u64) -> Sample {
    let counts = |launches| IndexerCounts { launches, rows: 2 * launches, scored_keys: 100 };
    Sample {
        model: GetModelInfoResponse {
            served_model_name: "tiny".to_owned(),
            architecture: "Arch".to_owned(),
            dtype: "float32".to_owned(),
            num_speculative_tokens: 2,
            ..GetModelInfoResponse::default()
        },
        server: GetServerInfoResponse {
            version: "1.2.3".to_owned(),
            block_size: 16,
            max_num_seqs: 64,
            prefix_caching: true,
            ..GetServerInfoResponse::default()
        },
        stats: GetStatsResponse {
            alive: true,
            running_requests: 3,
            waiting_requests: 2,
            preempted_requests: 1,
            used_blocks: 50,
            cached_blocks: 25,
            total_blocks: 100,
            prompt_tokens: 40 * seconds,
            completion_tokens: 120 * seconds,
            decode_steps: 7,
            mixed_steps: 5,
            preemptions: 4,
            prefix_queried_tokens: 200,
            prefix_hit_tokens: 50,
            evicted_blocks: 9,
            speculation: Some(SpeculationStats {
                verify_steps: 10 * seconds,
                draft_tokens: 20 * seconds,
                accepted_tokens: 15 * seconds,
                drafted_per_position: vec![10 * seconds, 10 * seconds],
                accepted_per_position: vec![9 * seconds, 6 * seconds],
                acceptance_length: (seconds > 0).then_some(2.5),
                ..SpeculationStats::default()
            }),
            indexer: Some(IndexerStats {
                target_verify: Some(counts(11)),
                draft_steps: vec![counts(12), counts(0)],
                ..IndexerStats::default()
            }),
            ..GetStatsResponse::default()
        },
        at: start + Duration::from_secs(seconds),
    }
}

/// The rows of a screen of this size.
fn screen(history: &History, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, "http://server", history)).unwrap();
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(usize::from(width));
    rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>())
        .map(|row| row.trim_end().to_owned())
        .collect()
}

#[test]
fn rates_are_of_the_last_two_samples() {
    let start = Instant::now();
    let mut history = History::default();
    history.push(Ok(sample(start, 0)));
    assert_eq!(history.rates(), None);
    history.push(Ok(sample(start, 2)));
    let rates = Rates { prompt: 40.0, generated: 120.0, acceptance_length: Some(2.5) };
    assert_eq!(history.rates(), Some(rates));
    history.push(Ok(Sample { at: start + Duration::from_secs(3), ..sample(start, 2) }));
    let idle = Rates { prompt: 0.0, generated: 0.0, acceptance_length: None };
    assert_eq!(history.rates(), Some(idle));
    assert_eq!(history.speeds(), [0, 120]);
    // Totals that fell are those of a server that started anew.
    history.push(Ok(Sample { at: start + Duration::from_secs(4), ..sample(start, 1) }));
    assert_eq!((history.rates(), history.speeds().len()), (None, 0));
}

#[test]
fn the_screen_shows_all_figures() {
    let start = Instant::now();
    let mut history = History::default();
    history.push(Ok(sample(start, 0)));
    history.push(Ok(sample(start, 1)));
    let rows = screen(&history, 90, 30);
    let text = rows.join("\n");
    for part in [
        "tandem 1.2.3 · tiny · Arch float32",
        "http://server",
        "requests  3 of 64 running   2 waiting, 1 of them preempted",
        "KV cache  50 used   25 cached   25 free   of 100 blocks of 16 tokens",
        "tokens    120/s generated   40/s prompt   120 and 40 in all",
        "drafts    acceptance length 2.50   now 2.50   15 of 20 accepted",
        "  90 % at position 1",
        "  60 % at position 2",
        "steps     7 decode   0 prefill   5 mixed   0 failed   4 preemptions",
        "prefixes  25 % of 200 prompt tokens found   9 blocks evicted",
        "indexers                    launches        rows    scored keys",
        "          target verify           11          22            100",
        "          draft step 1            12          24            100",
        "q leaves",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert!(!text.contains("draft step 2") && !text.contains("unreachable"), "{text}");
    // Of 60 columns, three quarters are held; the other bars have 54 and 36.
    let filled: Vec<usize> = rows.iter().map(|row| row.matches('█').count()).collect();
    let bars: Vec<usize> = filled.into_iter().filter(|n| *n > 1).collect();
    assert_eq!(bars, [45, 54, 36], "{text}");
}

#[test]
fn a_server_that_goes_away_is_unreachable_and_its_figures_stay() {
    let mut history = History::default();
    assert!(screen(&history, 60, 4)[1].contains("connecting"));
    history.push(Err("refused".to_owned()));
    assert!(screen(&history, 60, 4)[1].contains("unreachable, retrying: refused"));
    history.push(Ok(sample(Instant::now(), 1)));
    assert!(!screen(&history, 60, 30)[1].contains("unreachable"));
    history.push(Err("refused".to_owned()));
    let rows = screen(&history, 60, 30);
    assert!(rows[1].contains("unreachable, retrying: refused"), "{rows:?}");
    assert!(rows[3].contains("3 of 64 running"), "{rows:?}");
}

#[test]
fn a_small_screen_shows_what_fits() {
    let mut history = History::default();
    history.push(Ok(sample(Instant::now(), 1)));
    for (width, height) in [(1, 1), (9, 3), (10, 9), (30, 7), (200, 12)] {
        let rows = screen(&history, width, height);
        assert!(rows[0].starts_with('t'), "{rows:?}");
    }
}

#[test]
fn one_sample_as_text_and_as_json() {
    let sample = sample(Instant::now(), 1);
    let text = text(&sample);
    assert!(text.contains("tokens    120 generated   40 prompt\n"), "{text}");
    assert!(text.contains("          position 2: 60 % accepted\n"), "{text}");
    let json = sample.to_json();
    assert_eq!(json["running_requests"], 3);
    assert_eq!(json["speculation"]["acceptance_length"], 2.5);
    assert_eq!(json["indexer"]["draft_step_1"]["launches"], 12);
    let dense = Sample { stats: GetStatsResponse::default(), ..sample };
    assert!(dense.to_json()["indexer"].is_null());
    assert!(!super::text(&dense).contains("indexers"));
}
