//! What the gateway is told about the model, the program and its load.

use std::path::Path;

use checkpoint_files::read_bounded;
use grpc_api::control::v1 as own;
use serde_json::{Map, Value, json};

use crate::engine::{GetLoadsResponse, GetModelInfoResponse, GetServerInfoResponse, SchedulerLoad};
use crate::tokenizer::MAX_FILE_BYTES;

/// Sampling parameters that a `generation_config.json` may choose for requests.
const SAMPLING_DEFAULTS: &[&str] =
    &["temperature", "top_p", "top_k", "min_p", "repetition_penalty"];

/// The model; what the engine does not know is read from its `checkpoint`.
pub(crate) fn model(
    model: own::GetModelInfoResponse,
    checkpoint: Option<&Path>,
) -> GetModelInfoResponse {
    let config = read_json(checkpoint, "config.json");
    let generation = read_json(checkpoint, "generation_config.json");
    let special_id = |name| {
        let id = generation.get(name).or_else(|| config.get(name)).and_then(Value::as_i64);
        id.and_then(|id| i32::try_from(id).ok()).unwrap_or_default()
    };
    // The gateway may run elsewhere, so that the path says where the files really are.
    let folder = checkpoint.map_or_else(String::new, |folder| {
        let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        folder.to_string_lossy().into_owned()
    });
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    GetModelInfoResponse {
        model_path: folder.clone(),
        tokenizer_path: folder,
        is_generation: true,
        max_context_length: model.max_model_len,
        vocab_size: model.vocab_size,
        served_model_name: model.served_model_name,
        model_type: model_type.to_owned(),
        architectures: vec![model.architecture],
        eos_token_ids: model.eos_token_ids.iter().map(|id| int(*id)).collect(),
        pad_token_id: special_id("pad_token_id"),
        bos_token_id: special_id("bos_token_id"),
        max_req_input_len: int(model.max_model_len.saturating_sub(1)),
        default_sampling_params_json: sampling_defaults(&generation),
    }
}

/// What requests get that do not say. A checkpoint that asks not to sample is greedy.
fn sampling_defaults(generation: &Map<String, Value>) -> String {
    if generation.get("do_sample") == Some(&Value::Bool(false)) {
        return json!({"temperature": 0.0}).to_string();
    }
    let default = |name: &&str| {
        let value = generation.get(*name).filter(|value| value.is_number())?;
        Some(((*name).to_owned(), value.clone()))
    };
    let defaults: Map<_, _> = SAMPLING_DEFAULTS.iter().filter_map(default).collect();
    if defaults.is_empty() { String::new() } else { Value::Object(defaults).to_string() }
}

/// A JSON object of the checkpoint; empty if there is none, which the model could do without.
fn read_json(checkpoint: Option<&Path>, name: &str) -> Map<String, Value> {
    let text = checkpoint.and_then(|folder| read_bounded(&folder.join(name), MAX_FILE_BYTES).ok());
    text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// The program and its capacity.
pub(crate) fn server(
    server: &own::GetServerInfoResponse,
    dtype: String,
    n_unfinished: usize,
    uptime_seconds: f64,
) -> GetServerInfoResponse {
    GetServerInfoResponse {
        active_requests: u32::try_from(n_unfinished).unwrap_or(u32::MAX),
        uptime_seconds,
        server_type: "tandem".to_owned(),
        data_parallel_size: 1,
        block_size: int(server.block_size),
        model_dtype: dtype,
        max_num_seqs: int(server.max_num_seqs),
        constrained_decoding_start: "first_token".to_owned(),
    }
}

/// The load of the only rank.
pub(crate) fn loads(
    server: own::GetServerInfoResponse,
    stats: &own::GetStatsResponse,
) -> GetLoadsResponse {
    let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    let (running, waiting) = (stats.running_requests, stats.waiting_requests);
    let n_tokens = |n_blocks: u32| int(n_blocks.saturating_mul(server.block_size));
    let load = SchedulerLoad {
        dp_rank: 0,
        num_running_reqs: int(running),
        num_waiting_reqs: int(waiting),
        num_total_reqs: int(running.saturating_add(waiting)),
        num_used_tokens: n_tokens(stats.used_blocks),
        max_total_num_tokens: n_tokens(stats.total_blocks),
        token_usage: share(stats.used_blocks.into(), stats.total_blocks.into()),
        cache_hit_rate: share(stats.prefix_hit_tokens, stats.prefix_queried_tokens),
        utilization: share(running.into(), server.max_num_seqs.into()),
        max_running_requests: int(server.max_num_seqs),
    };
    GetLoadsResponse {
        timestamp: jiff::Timestamp::now().to_string(),
        version: server.version,
        dp_rank_count: 1,
        loads: vec![load],
    }
}

/// A number in the contract's type.
fn int(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_the_checkpoint() {
        let of = |value: Value| sampling_defaults(value.as_object().unwrap());
        assert_eq!(of(json!({})), "");
        assert_eq!(of(json!({"do_sample": false, "top_p": 0.9})), r#"{"temperature":0.0}"#);
        let sampled =
            json!({"do_sample": true, "top_p": 0.95, "temperature": 1.0, "eos_token_id": 1});
        assert_eq!(of(sampled), r#"{"temperature":1.0,"top_p":0.95}"#);
    }
}
