//! Requests that go well.

use engine_types::IndexerCounts;
use grpc_api::control::v1 as pb;
use grpc_api::control::v1::control_service_client::ControlServiceClient;
use grpc_api::control::v1::{GetModelInfoRequest, GetServerInfoRequest, GetStatsRequest};
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::{FinishReason, SpeculationParams, TokenIds};

use crate::harness::{DRAFT, Server, Setup, VERIFY, VOCAB, streaming, unary};

#[tokio::test]
async fn a_stream_is_one_message_a_step_and_a_last_one() {
    let server = Server::start(Setup { tokenizer: true, ..Setup::default() }).await;
    let request = streaming(&[100, 101], 40);
    let mut stream = server.client().generate_stream(request).await.unwrap().into_inner();
    let (mut ids, mut text, mut n_accepted, mut n_drafts) = (vec![], String::new(), 0, 0);
    let finished = loop {
        match stream.message().await.unwrap().unwrap().event.unwrap() {
            Event::Delta(delta) => {
                assert_eq!(delta.text_pieces.len(), delta.token_ids.len());
                let n = delta.n_accepted as usize;
                assert_eq!(delta.token_ids[..n], delta.draft_token_ids[..n]);
                n_accepted += u64::from(delta.n_accepted);
                n_drafts += delta.draft_token_ids.len() as u64;
                ids.extend(delta.token_ids);
                text.extend(delta.text_pieces);
            }
            Event::Finished(finished) => break finished,
            other @ Event::PromptLogprobs(_) => panic!("{other:?}"),
        }
    };
    assert!(stream.message().await.unwrap().is_none());
    assert_eq!(ids, (102..142).collect::<Vec<u32>>());
    assert_eq!(finished.finish_reason(), FinishReason::MaxTokens);
    let usage = finished.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (2, 40));
    let stats = finished.speculation.unwrap();
    assert_eq!((stats.accepted_tokens, stats.draft_tokens), (n_accepted, n_drafts));
    assert!(n_accepted > 10 && n_accepted < n_drafts, "drafts both pass and fail");
    assert_eq!(stats.accepted_histogram.iter().sum::<u64>(), stats.verify_steps);

    let reply = server.generate(unary(&[100, 101], 40)).await;
    assert_eq!(reply.token_ids, ids);
    assert_eq!(reply.text.as_deref(), Some((text + &finished.tail_text).as_str()));
    assert_eq!(reply.finish_reason(), FinishReason::MaxTokens);
    server.wait_until_empty().await;
}

#[tokio::test]
async fn drafting_can_be_turned_off_for_a_request() {
    let server = Server::start(Setup::default()).await;
    let mut request = unary(&[1], 20);
    request.speculation = Some(SpeculationParams { num_speculative_tokens: Some(0) });
    let reply = server.generate(request).await;
    assert_eq!(reply.token_ids, (2..22).collect::<Vec<u32>>());
    assert_eq!(reply.speculation.as_ref().unwrap().verify_steps, 0);
    assert_eq!(reply.text, None, "no tokenizer, no text");
}

#[tokio::test]
async fn stops_say_what_matched() {
    let server = Server::start(Setup::default()).await;
    let mut request = unary(&[1], 20);
    request.stopping.as_mut().unwrap().stop_token_ids = vec![7];
    let reply = server.generate(request).await;
    assert_eq!(reply.finish_reason(), FinishReason::StopToken);
    assert_eq!((reply.token_ids.last(), reply.matched_token_id), (Some(&7), Some(7)));

    let mut request = unary(&[1], 20);
    request.stopping.as_mut().unwrap().stop_sequences =
        vec![TokenIds { ids: vec![9, 8] }, TokenIds { ids: vec![8, 9] }];
    let reply = server.generate(request).await;
    assert_eq!(reply.finish_reason(), FinishReason::StopSequence);
    assert_eq!((reply.token_ids.last(), reply.matched_stop_sequence), (Some(&9), Some(1)));
}

#[tokio::test]
async fn text_is_tokenized_and_absent_limits_run_to_the_models_length() {
    let mut setup = Setup { tokenizer: true, ..Setup::default() };
    setup.limits.max_model_len = 64;
    let server = Server::start(setup).await;
    let mut request = streaming(&[], 1);
    request.prompt = Some(Prompt::Text("x".into()));
    request.stopping = None;
    let mut stream = server.client().generate_stream(request).await.unwrap().into_inner();
    let finished = loop {
        if let Event::Finished(finished) = stream.message().await.unwrap().unwrap().event.unwrap() {
            break finished;
        }
    };
    assert_eq!(finished.finish_reason(), FinishReason::ModelLength);
    let usage = finished.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (2, 62));
}

#[tokio::test]
async fn the_server_describes_itself() {
    let server = Server::start(Setup::default()).await;
    server.check_serves().await;
    server.wait_until_empty().await;
    let mut control = ControlServiceClient::new(server.channel.clone());
    let model = control.get_model_info(GetModelInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((model.served_model_name.as_str(), model.vocab_size), ("counting", VOCAB));
    assert_eq!((model.num_speculative_tokens, model.has_tokenizer), (3, false));
    let info = control.get_server_info(GetServerInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.block_size, info.total_blocks), (16, 1024));
    let stats = control.get_stats(GetStatsRequest {}).await.unwrap().into_inner();
    assert!(stats.alive && stats.steps >= 2);
    assert_eq!((stats.finished_requests, stats.completion_tokens, stats.used_blocks), (1, 3, 0));
    assert_eq!((model.index_topk, model.index_share), (0, false));
    assert_eq!(stats.indexer, None, "attention is dense");
}

#[tokio::test]
async fn what_indexers_did_is_told_of_models_that_have_them() {
    let server = Server::start(Setup { index_topk: 64, ..Setup::default() }).await;
    server.check_serves().await;
    let mut control = ControlServiceClient::new(server.channel.clone());
    let model = control.get_model_info(GetModelInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((model.index_topk, model.index_share), (64, true));
    let stats = control.get_stats(GetStatsRequest {}).await.unwrap().into_inner();
    let indexer = stats.indexer.unwrap();
    let after_steps = |counts: IndexerCounts| pb::IndexerCounts {
        launches: stats.steps * counts.n_launches,
        rows: stats.steps * counts.n_rows,
        scored_keys: stats.steps * counts.n_scored_keys,
    };
    let none = pb::IndexerCounts::default();
    assert_eq!(indexer.target_prefill, Some(none));
    assert_eq!(indexer.target_verify, Some(after_steps(VERIFY)));
    assert_eq!(indexer.draft_steps, [none, after_steps(DRAFT), none], "as many as drafts a step");
}
