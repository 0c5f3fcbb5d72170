//! Exact values of metrics after known requests.

use std::sync::atomic::Ordering;

use admin_http::{Format, HttpConfig, Metrics, Names};
use grpc_api::inference::v1 as pb;
use serving::{CallContext, Frontend, FrontendConfig, InferenceEngine as _, Messages};
use tokio_stream::StreamExt as _;

use crate::exposition::Exposition;
use crate::harness::*;

impl Server {
    /// What is scraped, which must be the same series in both formats.
    pub(crate) async fn scrape(&self) -> Exposition {
        let plain = self.get("/metrics").await;
        assert_eq!(plain.status, 200);
        assert!(plain.head.contains("content-type: text/plain; version=0.0.4"), "{}", plain.head);
        let accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";
        let open = self.get_with("/metrics", accept).await;
        assert!(open.head.contains("content-type: application/openmetrics-text"), "{}", open.head);
        let open = Exposition::read(&open.body, Format::OpenMetrics);
        let plain = Exposition::read(&plain.body, Format::Prometheus);
        // Bounds of buckets are written in two ways.
        assert_eq!((open.names(), open.series.len()), (plain.names(), plain.series.len()));
        plain
    }

    pub(crate) async fn call(&self, request: pb::GenerateStreamRequest) -> Messages {
        self.of.frontend.generate(CallContext::default(), request).await.unwrap()
    }

    /// Runs requests to their ends; the number of messages with tokens of each.
    async fn finish(&self, requests: Vec<pb::GenerateStreamRequest>) -> Vec<u64> {
        let mut all = vec![];
        for request in requests {
            let mut messages = self.call(request).await;
            let mut n = 0;
            while let Some(message) = messages.next().await {
                n += u64::from(matches!(
                    message.unwrap().event,
                    Some(pb::generate_stream_response::Event::Delta(_))
                ));
            }
            all.push(n);
        }
        self.of.wait_until_empty().await;
        all
    }
}

fn stopping_at(id: u32) -> pb::GenerateStreamRequest {
    let mut request = streaming(&[1, 2, 3], 50);
    request.stopping.as_mut().unwrap().stop_token_ids = vec![id];
    request
}

#[tokio::test]
async fn totals_are_those_of_the_engine() {
    let server = Server::start(Setup::default()).await;
    server.finish(vec![streaming(&[5; 40], 30), streaming(&[5; 40], 7), stopping_at(17)]).await;
    let (scraped, stats) = (server.scrape().await, server.of.frontend.stats().unwrap());
    let speculation = stats.speculation.unwrap();
    assert!(speculation.accepted_tokens > 0 && stats.prefix_hit_tokens > 0);
    assert!(speculation.accepted_tokens < speculation.draft_tokens);
    let expected = [
        ("tandem_prompt_tokens_total", 83),
        ("tandem_generation_tokens_total", 30 + 7 + 14),
        ("tandem_steps_total", stats.steps),
        ("tandem_steps_failed_total", 0),
        ("tandem_computed_tokens_total", stats.computed_tokens),
        ("tandem_preemptions_total", 0),
        ("tandem_prefix_cache_queried_tokens_total", stats.prefix_queried_tokens),
        ("tandem_prefix_cache_hit_tokens_total", stats.prefix_hit_tokens),
        ("tandem_spec_decode_verify_steps_total", speculation.verify_steps),
        ("tandem_spec_decode_draft_tokens_total", speculation.draft_tokens),
        ("tandem_spec_decode_accepted_tokens_total", speculation.accepted_tokens),
        ("tandem_outputs_finished_total{reason=\"length\"}", 2),
        ("tandem_outputs_finished_total{reason=\"stop\"}", 1),
        ("tandem_outputs_finished_total{reason=\"error\"}", 0),
        ("tandem_engine_state{state=\"serving\"}", 1),
        ("tandem_engine_state{state=\"dead\"}", 0),
        ("tandem_requests_running", 0),
        ("tandem_requests_waiting", 0),
        ("tandem_kv_blocks{state=\"used\"}", 0),
        ("tandem_kv_blocks{state=\"cached\"}", stats.cached_blocks.into()),
        ("tandem_kv_blocks{state=\"free\"}", 1024 - u64::from(stats.cached_blocks)),
    ];
    for (series, value) in expected {
        assert_eq!(scraped.get(series), value as f64, "{series}");
    }
    for at in 0..3 {
        let of = |what: &str| {
            let name = format!("tandem_spec_decode_position_{what}_tokens_total");
            scraped.get(&format!("{name}{{position=\"{at}\"}}"))
        };
        assert_eq!(of("draft"), speculation.drafted_per_position[at] as f64);
        assert_eq!(of("accepted"), speculation.accepted_per_position[at] as f64);
    }
    let runs: f64 = (0..=3)
        .map(|n| scraped.get(&format!("tandem_spec_decode_runs_total{{accepted=\"{n}\"}}")))
        .sum();
    assert_eq!(runs, speculation.verify_steps as f64);
}

#[tokio::test]
async fn each_token_behind_the_first_is_observed_once() {
    let server = Server::start(Setup::default()).await;
    let lengths = [1, 2, 30, 45];
    let requests = lengths.map(|n| streaming(&[7, 8], n)).to_vec();
    let n_messages = server.finish(requests).await;
    let scraped = server.scrape().await;
    let n_tokens: u32 = lengths.iter().sum();
    let expected = [
        ("tandem_time_to_first_token_seconds_count", 4),
        ("tandem_inter_token_latency_seconds_count", n_tokens - 4),
        ("tandem_request_time_per_output_token_seconds_count", 3),
        ("tandem_request_duration_seconds_count", 4),
        ("tandem_request_queue_seconds_count", 4),
        ("tandem_request_prefill_seconds_count", 4),
        ("tandem_request_decode_seconds_count", 4),
        ("tandem_request_inference_seconds_count", 4),
        ("tandem_request_generation_tokens_sum", n_tokens),
        ("tandem_request_generation_tokens_bucket{le=\"1\"}", 1),
        ("tandem_request_generation_tokens_bucket{le=\"2\"}", 2),
        ("tandem_request_generation_tokens_bucket{le=\"20\"}", 2),
        ("tandem_request_generation_tokens_bucket{le=\"50\"}", 4),
        ("tandem_request_prompt_tokens_sum", 8),
        ("tandem_request_max_tokens_sum", n_tokens),
        ("tandem_request_outputs_sum", 4),
    ];
    for (series, value) in expected {
        assert_eq!(scraped.get(series), f64::from(value), "{series}");
    }
    // Drafting makes fewer messages than tokens, in the same time.
    let n_gaps = n_messages.iter().sum::<u64>() - 4;
    assert!(n_gaps < u64::from(n_tokens - 4));
    let sum = |name: &str| scraped.get(&format!("tandem_{name}_seconds_sum"));
    assert_eq!(scraped.get("tandem_inter_message_latency_seconds_count"), n_gaps as f64);
    assert!((sum("inter_message_latency") - sum("inter_token_latency")).abs() < 1e-6);
    assert!((sum("request_decode") - sum("inter_token_latency")).abs() < 1e-6);
    let parts = sum("request_queue") + sum("request_inference");
    assert!(sum("time_to_first_token") > 0.0 && parts <= sum("request_duration") + 1e-6);
}

#[tokio::test]
async fn every_end_counts_under_its_reason() {
    let server = Server::start(Setup::default()).await;
    let long = || streaming(&[1], 4000);
    let mut left = server.call(long()).await;
    left.next().await.unwrap().unwrap();
    drop(left);
    let mut aborted = server.call(long()).await;
    let first = aborted.next().await.unwrap().unwrap();
    assert!(server.of.frontend.abort(first.request_id));
    while let Some(message) = aborted.next().await {
        message.unwrap();
    }
    server.of.fault.store(FAIL_STEP, Ordering::SeqCst);
    let mut failed = server.call(long()).await;
    while let Some(Ok(_)) = failed.next().await {}
    let mut twins = streaming(&[1], 3);
    twins.sampling = Some(pb::SamplingParams { n: Some(2), ..pb::SamplingParams::default() });
    server.finish(vec![twins]).await;
    let hot = pb::SamplingParams { temperature: Some(-1.0), ..pb::SamplingParams::default() };
    let refused = pb::GenerateStreamRequest { sampling: Some(hot), ..long() };
    assert!(server.of.frontend.generate(CallContext::default(), refused).await.is_err());

    let scraped = server.scrape().await;
    let counts = [("cancelled", 1), ("abort", 1), ("error", 1), ("length", 2), ("stop", 0)];
    for (reason, n) in counts {
        let series = format!("tandem_outputs_finished_total{{reason=\"{reason}\"}}");
        assert_eq!(scraped.get(&series), f64::from(n), "{series}");
    }
    assert_eq!(scraped.get("tandem_requests_refused_total{code=\"INVALID_ARGUMENT\"}"), 1.0);
    assert_eq!(scraped.get("tandem_steps_failed_total"), 1.0);
    // Those that ended by themselves or were aborted; each twin has two outputs to its request.
    assert_eq!(scraped.get("tandem_request_duration_seconds_count"), 3.0);
    assert_eq!(scraped.get("tandem_request_outputs_sum"), 5.0);
}

#[tokio::test]
async fn indexers_count_by_pass() {
    let server = Server::start(Setup { index_topk: 8, ..Setup::default() }).await;
    server.finish(vec![streaming(&[1], 9)]).await;
    let scraped = server.scrape().await;
    let steps = scraped.get("tandem_steps_total");
    let keys = |pass| scraped.get(&format!("tandem_indexer_scored_keys_total{{pass=\"{pass}\"}}"));
    assert_eq!(keys("target_prefill"), 0.0);
    assert_eq!(keys("target_verify"), steps * VERIFY.n_scored_keys as f64);
    assert_eq!(keys("draft_1"), steps * DRAFT.n_scored_keys as f64);
}

#[tokio::test]
async fn vllms_names_are_there_with_its_labels_and_buckets() {
    let server = Server::start_with(Names::Vllm, HttpConfig::default(), Setup::default()).await;
    server.finish(vec![streaming(&[3; 40], 30), streaming(&[3; 40], 5), stopping_at(9)]).await;
    let scraped = server.scrape().await;
    let of = |name: &str, more: &str| {
        scraped.get(&format!("vllm:{name}{{model_name=\"counting\",engine=\"0\"{more}}}"))
    };
    let own = |name: &str| scraped.get(&format!("tandem_{name}"));
    for (vllm, ours) in [
        ("num_requests_running", "requests_running"),
        ("num_requests_waiting", "requests_waiting"),
        ("kv_cache_usage_perc", "kv_blocks_used_ratio"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("prompt_tokens_cached_total", "prefix_cache_hit_tokens_total"),
        ("prefix_cache_queries_total", "prefix_cache_queried_tokens_total"),
        ("prefix_cache_hits_total", "prefix_cache_hit_tokens_total"),
        ("num_preemptions_total", "preemptions_total"),
        ("spec_decode_num_drafts_total", "spec_decode_verify_steps_total"),
        ("spec_decode_num_draft_tokens_total", "spec_decode_draft_tokens_total"),
        ("spec_decode_num_accepted_tokens_total", "spec_decode_accepted_tokens_total"),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("inter_token_latency_seconds_count", "inter_token_latency_seconds_count"),
        ("e2e_request_latency_seconds_count", "request_duration_seconds_count"),
        ("request_queue_time_seconds_count", "request_queue_seconds_count"),
        ("request_prefill_time_seconds_count", "request_prefill_seconds_count"),
        ("request_decode_time_seconds_count", "request_decode_seconds_count"),
        ("request_inference_time_seconds_count", "request_inference_seconds_count"),
        (
            "request_time_per_output_token_seconds_count",
            "request_time_per_output_token_seconds_count",
        ),
        ("request_prompt_tokens_sum", "request_prompt_tokens_sum"),
        ("request_generation_tokens_sum", "request_generation_tokens_sum"),
        ("request_params_max_tokens_sum", "request_max_tokens_sum"),
        ("request_params_n_sum", "request_outputs_sum"),
    ] {
        assert_eq!(of(vllm, ""), own(ours), "{vllm}");
    }
    assert!(of("spec_decode_num_accepted_tokens_total", "") > 0.0);
    let by_position: f64 = (0..3)
        .map(|at| {
            let position = format!(",position=\"{at}\"");
            of("spec_decode_num_accepted_tokens_per_pos_total", &position)
        })
        .sum();
    assert_eq!(by_position, of("spec_decode_num_accepted_tokens_total", ""));
    assert_eq!(of("request_success_total", ",finished_reason=\"length\""), 2.0);
    assert_eq!(of("request_success_total", ",finished_reason=\"stop\""), 1.0);
    let facts = scraped.series.keys().find(|series| series.starts_with("vllm:cache_config_info"));
    let facts = facts.unwrap();
    assert!(facts.contains("block_size=\"16\"") && facts.contains("num_gpu_blocks=\"1024\""));
    for (name, ends) in [
        ("time_to_first_token_seconds", ["0.001", "2560"]),
        ("inter_token_latency_seconds", ["0.01", "80"]),
        ("request_time_per_output_token_seconds", ["0.01", "80"]),
        ("e2e_request_latency_seconds", ["0.3", "7680"]),
    ] {
        for end in ends {
            of(&format!("{name}_bucket"), &format!(",le=\"{end}\""));
        }
    }
}

#[test]
fn an_engine_that_loads_has_its_state_and_metrics_of_calls() {
    let engine = Frontend::loading(FrontendConfig::default());
    for names in [Names::Own, Names::Vllm] {
        let text = Metrics::new(names).render(&engine, Format::OpenMetrics);
        let scraped = Exposition::read(&text, Format::OpenMetrics);
        assert_eq!(scraped.get("tandem_engine_state{state=\"loading\"}"), 1.0);
        assert_eq!(scraped.get("tandem_request_duration_seconds_count"), 0.0);
        assert!(!scraped.families.contains("tandem_requests_running"));
        assert!(!text.contains("vllm:"));
    }
}
