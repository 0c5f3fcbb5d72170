//! `tandem serve`: its address, a stream through its port, and its end by SIGTERM.

use std::io::{BufRead, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use grpc_api::control::v1::control_service_client::ControlServiceClient;
use grpc_api::control::v1::{GetModelInfoRequest, GetServerInfoRequest, GetStatsRequest};
use grpc_api::inference::v1::generate_stream_request::Prompt;
use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use grpc_api::inference::v1::{FinishReason, GenerateStreamRequest, StoppingParams, TokenIds};
use tonic::Code;
use tonic::transport::Channel;

use crate::dummy::small_config;
use crate::harness::{cases, fail_with, tandem};

/// How long a machine under load may take to end the server.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running server; killed if a test fails before its end.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Starts it and waits until it says where it listens.
    fn start(args: &[&str]) -> Self {
        let mut child = tandem()
            .args(["serve", "--port", "0", "--dtype", "float32"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix("listening on ").unwrap().to_owned();
        Self { child, address }
    }

    async fn connect(&self) -> Channel {
        let endpoint = Channel::from_shared(format!("http://{}", self.address)).unwrap();
        endpoint.connect().await.unwrap()
    }

    fn terminate(&self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    }

    /// Ends the server and returns its log.
    fn log(mut self) -> String {
        self.terminate();
        assert_eq!(self.exit_code(), Some(0));
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        log
    }

    /// Waits for the exit code.
    fn exit_code(&mut self) -> Option<i32> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(started.elapsed() < PATIENCE, "the server still runs");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has usually ended, and then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn request(prompt: &str, max_tokens: u32, ignore_eos: bool) -> GenerateStreamRequest {
    GenerateStreamRequest {
        prompt: Some(Prompt::Text(prompt.to_owned())),
        stopping: Some(StoppingParams {
            max_tokens: Some(max_tokens),
            ignore_eos: Some(ignore_eos),
            ..StoppingParams::default()
        }),
        ..GenerateStreamRequest::default()
    }
}

/// What a stream brought: the number of tokens, the text, and why it ended.
async fn read(channel: Channel, request: GenerateStreamRequest) -> (usize, String, FinishReason) {
    let mut client = InferenceServiceClient::new(channel);
    let mut stream = client.generate_stream(request).await.unwrap().into_inner();
    let (mut n_tokens, mut text) = (0, String::new());
    loop {
        match stream.message().await.unwrap().unwrap().event.unwrap() {
            Event::Delta(delta) => {
                n_tokens += delta.token_ids.len();
                text.extend(delta.text_pieces);
            }
            Event::Finished(finished) => {
                return (n_tokens, text + &finished.tail_text, finished.finish_reason());
            }
            Event::PromptLogprobs(_) => panic!("nobody asked for them"),
        }
    }
}

#[tokio::test]
async fn it_says_where_it_listens_serves_and_ends_with_0() {
    let mut server = Server::start(&["--served-model-name", "small"]);
    let case = &cases()[0];
    let channel = server.connect().await;
    let mut control = ControlServiceClient::new(channel.clone());
    let model = control.get_model_info(GetModelInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((model.served_model_name.as_str(), model.dtype.as_str()), ("small", "float32"));
    assert_eq!((model.index_topk, model.index_share), (64, true));
    let (n_tokens, text, reason) =
        read(channel, request(case["prompt"].as_str().unwrap(), 48, false)).await;
    assert_eq!((n_tokens, reason), (48, FinishReason::MaxTokens));
    assert_eq!(text, case["greedy_text"].as_str().unwrap());
    let stats = control.get_stats(GetStatsRequest {}).await.unwrap().into_inner();
    let draft_steps = stats.indexer.unwrap().draft_steps;
    let launches: Vec<u64> = draft_steps.iter().map(|counts| counts.launches).collect();
    assert!(launches.len() == 3 && launches[0] > 0, "{launches:?}");
    assert_eq!(launches[1..], [0, 0], "draft steps share a selection");
    server.terminate();
    assert_eq!(server.exit_code(), Some(0));
}

#[tokio::test]
async fn prefix_caching_is_on_until_the_flag_turns_it_off() {
    let case = &cases()[12];
    for (args, is_on) in [(&[][..], true), (&["--no-prefix-caching"], false)] {
        let server = Server::start(args);
        let channel = server.connect().await;
        for _ in 0..2 {
            let request = request(case["prompt"].as_str().unwrap(), 32, false);
            let (_, text, _) = read(channel.clone(), request).await;
            assert_eq!(text, case["greedy_text"].as_str().unwrap());
        }
        let mut control = ControlServiceClient::new(channel);
        let info = control.get_server_info(GetServerInfoRequest {}).await.unwrap().into_inner();
        assert_eq!(info.prefix_caching, is_on);
        let stats = control.get_stats(GetStatsRequest {}).await.unwrap().into_inner();
        let found = (stats.prefix_queried_tokens, stats.prefix_hit_tokens);
        assert_eq!(found, if is_on { (2 * 331, 320) } else { (0, 0) });
    }
}

/// The stream that runs when the signal comes is finished, not cut.
#[tokio::test]
async fn sigterm_lets_a_running_stream_finish() {
    let mut server = Server::start(&["--drain-timeout", "600"]);
    let mut client = InferenceServiceClient::new(server.connect().await);
    let long = request("import numpy as np", 400, true);
    let mut stream = client.generate_stream(long).await.unwrap().into_inner();
    let mut n_tokens = 0;
    let finished = loop {
        match stream.message().await.unwrap().unwrap().event.unwrap() {
            Event::Delta(delta) => {
                if n_tokens == 0 {
                    server.terminate();
                }
                n_tokens += delta.token_ids.len();
            }
            Event::Finished(finished) => break finished,
            Event::PromptLogprobs(_) => panic!("nobody asked for them"),
        }
    };
    assert_eq!((n_tokens, finished.finish_reason()), (400, FinishReason::MaxTokens));
    assert_eq!(stream.message().await.unwrap(), None);
    drop((stream, client));
    assert_eq!(server.exit_code(), Some(0));
}

#[tokio::test]
async fn a_stream_that_outlasts_the_drain_is_aborted_with_its_last_message() {
    let mut server = Server::start(&["--drain-timeout", "0"]);
    let mut client = InferenceServiceClient::new(server.connect().await);
    let long = request("import numpy as np", 2000, true);
    let mut stream = client.generate_stream(long).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    server.terminate();
    let finished = loop {
        if let Event::Finished(finished) = stream.message().await.unwrap().unwrap().event.unwrap() {
            break finished;
        }
    };
    assert_eq!(finished.finish_reason(), FinishReason::Aborted);
    drop((stream, client));
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    fail_with(&["serve", "--port", &port], &[&format!("127.0.0.1:{port}"), "--port"]);
}

#[test]
fn the_log_says_once_that_draft_steps_share_keys() {
    let line = "MTP draft index_share_for_mtp_iteration enabled: step 0 computes indexer top-k, \
                steps 1+ reuse the buffer.";
    for (args, n_times) in [
        (&["--index-share", "auto"][..], 1),
        (&["--index-share", "off"], 0),
        (&["--num-speculative-tokens", "0"], 0),
        (&["--model", "tiny-dsv3"], 0),
    ] {
        let log = Server::start(args).log();
        assert_eq!(log.matches(line).count(), n_times, "{args:?}: {log}");
    }
}

#[test]
fn a_log_for_programs_has_one_object_a_line() {
    let log = Server::start(&["--log-format", "json"]).log();
    let lines: Vec<serde_json::Value> =
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().any(|line| line["message"] == "stopped"), "{log}");
}

#[tokio::test]
async fn a_config_alone_takes_ids_and_refuses_text() {
    let dir = small_config();
    let server =
        Server::start(&["--model", dir.path().to_str().unwrap(), "--load-format", "dummy"]);
    let channel = server.connect().await;
    let mut control = ControlServiceClient::new(channel.clone());
    let model = control.get_model_info(GetModelInfoRequest {}).await.unwrap().into_inner();
    assert!(!model.has_tokenizer);
    assert_eq!((model.architecture.as_str(), model.vocab_size), ("GlmMoeDsaForCausalLM", 512));

    let text = request("a", 8, true);
    let mut client = InferenceServiceClient::new(channel.clone());
    let status = client.generate_stream(text.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("no tokenizer: give token_ids"), "{status}");
    let prompt = Some(Prompt::TokenIds(TokenIds { ids: vec![1, 511, 3] }));
    let (n_tokens, text, reason) = read(channel, GenerateStreamRequest { prompt, ..text }).await;
    assert_eq!((n_tokens, text.as_str(), reason), (8, "", FinishReason::MaxTokens));
}
