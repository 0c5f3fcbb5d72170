//! `vllm.Control`, and the health of both services.

use std::sync::Arc;

use serving::{Frontend, FrontendConfig};
use test_engine::Setup;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use vllm_proto as vllm;

use crate::harness::{Clients, Server, request};

#[tokio::test]
async fn the_server_says_what_a_sidecar_asks_first() {
    let server = Server::start(Setup { tokenizer: true, ..Setup::default() }).await;
    let info = server.control().get_server_info(vllm::GetServerInfoRequest {}).await;
    let info = info.unwrap().into_inner();
    assert_eq!((info.api_version.as_str(), info.proto_version.as_str()), ("vllm", vllm::VERSION));
    assert_eq!((info.max_model_len, info.kv_block_size, info.total_kv_blocks), (4096, 16, 1024));
    assert_eq!((info.max_running_requests, info.max_batched_tokens), (8, 64));
    assert_eq!(info.parallelism.unwrap().data_parallel_size, 1);
    assert!(!info.instance_id.is_empty() && !info.engine_version.is_empty());

    let model = server.control().get_model_info(vllm::GetModelInfoRequest {}).await;
    let model = model.unwrap().into_inner();
    assert_eq!(model.served_model_name, "counting");
    assert!(std::path::Path::new(&model.model_id).join("tokenizer.json").is_file());
    assert!(model.supports_text_input && model.supports_token_ids_input);
    assert!(!model.supports_lora && !model.supports_multimodal);

    let sources = server.control().get_kv_event_sources(vllm::GetKvEventSourcesRequest {}).await;
    assert!(sources.unwrap().into_inner().sources.is_empty());

    let without = Server::start(Setup::default()).await;
    let model = without.control().get_model_info(vllm::GetModelInfoRequest {}).await;
    assert!(!model.unwrap().into_inner().supports_text_input);
}

#[tokio::test]
async fn what_it_cannot_do_it_refuses() {
    let server = Server::start(Setup::default()).await;
    let mut control = server.control();
    let shutdown = control.shutdown(vllm::ShutdownRequest {}).await.unwrap_err();
    assert_eq!(shutdown.code(), Code::FailedPrecondition);
    assert!(shutdown.message().contains("SIGTERM"), "{shutdown:?}");
    let refusals = [
        control.load_lora(vllm::LoadLoraRequest::default()).await.map(|_| ()),
        control.unload_lora(vllm::UnloadLoraRequest::default()).await.map(|_| ()),
        control.list_loras(vllm::ListLorasRequest {}).await.map(|_| ()),
        control.pause_generation(vllm::PauseGenerationRequest::default()).await.map(|_| ()),
        control.resume_generation(vllm::ResumeGenerationRequest {}).await.map(|_| ()),
        control.is_paused(vllm::IsPausedRequest {}).await.map(|_| ()),
        control.sleep(vllm::SleepRequest::default()).await.map(|_| ()),
        control.wake_up(vllm::WakeUpRequest::default()).await.map(|_| ()),
        control.is_sleeping(vllm::IsSleepingRequest {}).await.map(|_| ()),
        control.start_weight_update(vllm::StartWeightUpdateRequest {}).await.map(|_| ()),
        control.update_weights(vllm::UpdateWeightsRequest::default()).await.map(|_| ()),
        control.get_weight_version(vllm::GetWeightVersionRequest {}).await.map(|_| ()),
    ];
    for refusal in refusals {
        let refusal = refusal.unwrap_err();
        assert_eq!(refusal.code(), Code::Unimplemented);
        assert!(refusal.message().contains(' '), "{refusal:?}");
    }
}

/// Waits until the health of a service is `status`.
async fn wait_for_health(clients: &Clients, service: &str, status: ServingStatus) {
    let mut health = HealthClient::new(clients.channel.clone());
    let request = HealthCheckRequest { service: service.to_owned() };
    let mut changes = health.watch(request).await.unwrap().into_inner();
    while changes.message().await.unwrap().unwrap().status() != status {}
}

#[tokio::test]
async fn health_has_the_names_that_gateways_ask_for() {
    let server = Server::start(Setup::default()).await;
    let frontend = Arc::new(Frontend::loading(FrontendConfig::default()));
    let loading = Clients::of(frontend).await;
    for name in ["vllm.Inference", "vllm.Control"] {
        wait_for_health(&server, name, ServingStatus::Serving).await;
        wait_for_health(&loading, name, ServingStatus::NotServing).await;
    }
    let early = loading.inference().generate(request(&[1], 1)).await.unwrap_err();
    assert_eq!(early.code(), Code::Unavailable);
    let early = loading.control().get_server_info(vllm::GetServerInfoRequest {}).await;
    assert_eq!(early.unwrap_err().code(), Code::Unavailable);
}
