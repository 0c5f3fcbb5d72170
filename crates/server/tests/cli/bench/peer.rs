//! A peer with OpenAI's API in the same sitting, as a script of one.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};

use super::{Place, counts, measure};
use crate::harness::fail;

/// Serves on a port until the test ends; `n_counted` of a prompt's ids are told as its tokens.
fn peer(n_counted: fn(usize) -> usize) -> String {
    peer_until(usize::MAX, n_counted)
}

/// The same with so many answers; then all fail.
fn peer_until(n_answers: usize, n_counted: fn(usize) -> usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let n_answered = Arc::new(AtomicUsize::new(0));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let n_answered = Arc::clone(&n_answered);
            let is_dead = move || n_answered.fetch_add(1, Ordering::Relaxed) >= n_answers;
            thread::spawn(move || answer(stream.unwrap(), n_counted, is_dead));
        }
    });
    format!("http://{address}/v1")
}

fn answer(mut stream: TcpStream, n_counted: fn(usize) -> usize, is_dead: impl Fn() -> bool) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut lines = vec![];
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        lines.push(line.to_lowercase());
    }
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length:"));
    let mut body = vec![0; length.map_or(0, |n| n.trim().parse().unwrap())];
    reader.read_exact(&mut body).unwrap();
    let mut status = "200 OK";
    let text = if lines.iter().any(|line| line.starts_with("get /v1/models")) {
        json!({"data": [{"id": "other"}]}).to_string()
    } else if is_dead() {
        status = "500 Internal Server Error";
        String::new()
    } else {
        events(&serde_json::from_slice(&body).unwrap(), n_counted)
    };
    let length = text.len();
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close");
    // Whoever asked may have gone.
    let _ = write!(stream, "{head}\r\n\r\n{text}");
}

/// A token a message, as many as are asked for.
fn events(request: &Value, n_counted: fn(usize) -> usize) -> String {
    // A text is a token.
    let ids = request["prompt"].as_array().map_or(&[][..], Vec::as_slice);
    assert!(ids.iter().all(|id| id.as_u64().unwrap() < 300), "{ids:?}");
    let n_output = request["max_tokens"].as_u64().unwrap();
    let token = json!({"choices": [{"text": "a", "token_ids": [5]}]});
    let usage =
        json!({"prompt_tokens": n_counted(ids.len().max(1)), "completion_tokens": n_output});
    let mut events = format!("data: {token}\n\n").repeat(usize::try_from(n_output).unwrap());
    events += &format!("data: {}\n\n", json!({"choices": [], "usage": usage}));
    events + "data: [DONE]\n\n"
}

fn args(peer: &str) -> Vec<&str> {
    let args = "ab --a=--model=tiny-dsv3 --pairs 1 --num-prompts 4 --random-input-len 8 \
                --random-output-len 4 --num-warmups 1 --vocab-size 300 --peer";
    args.split_whitespace().chain([peer]).collect()
}

#[test]
fn a_peer_gets_the_same_ids_and_is_called_so() {
    let (result, printed) = measure(&args(&peer(|n| n + 1)));
    assert_eq!(counts(&result), [(4, 32, 16), (4, 36, 16)]);
    let server = &result["provenance"]["servers"][1];
    assert_eq!(server["name"], "peer");
    assert_eq!(server["config"]["model"], "other");
    assert_eq!(server["config"]["prompts"], "sent as token ids, which it counts");
    assert_eq!(result["ab"][0]["b"], "peer");
    let told = "Prompts: A sent as token ids; peer sent as token ids, which it counts.";
    assert!(printed.contains(told), "{printed}");
}

#[test]
fn a_peer_that_makes_other_tokens_of_ids_is_refused() {
    let peer = peer(|n| 3 * n);
    let args = args(&peer);
    let message = fail(&[&["bench"], &args[..]].concat());
    assert!(message.contains("48 tokens of 16 token ids"), "{message}");
}

/// What a peer that gives so many answers, the probe's included, ends two runs with.
fn measure_until(n_answers: usize, args: &str) -> (Place, String) {
    let url = format!("openai+{}", peer_until(n_answers, |n| n));
    let fixed = "serve --repeats 2 --num-prompts 4 --random-input-len 8 --random-output-len 4 \
                 --max-concurrency 1 --served-model-name mine --vocab-size 300";
    let place = Place::new();
    let all: Vec<&str> = fixed.split_whitespace().chain(args.split_whitespace()).collect();
    let output = place.command(&[&all[..], &["--url", &url]].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report = String::from_utf8(output.stdout).unwrap();
    assert!(report.contains("| setting"), "{report}");
    (place, String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_fault_loses_nothing_of_the_runs_before() {
    // The probe, a warm-up and a run; the next warm-up fails.
    let (place, told) = measure_until(1 + 1 + 4, "--num-warmups 1");
    assert!(told.contains("warming up") && told.contains("the warm-up failed"), "{told}");
    let result = place.result();
    assert_eq!(counts(&result), [(4, 32, 16)]);
    assert_eq!(result["is_partial"], true);
    assert_eq!(result["provenance"]["servers"][0]["config"]["model"], "mine");
    assert!(place.file().with_extension("html").exists());
}

#[test]
fn runs_without_an_answer_are_written_and_fail() {
    let (place, told) = measure_until(1, "--num-warmups 0");
    assert!(told.contains("no request was completed"), "{told}");
    assert_eq!(counts(&place.result()), [(0, 0, 0); 2]);
}

#[test]
fn texts_are_warmed_up_with_text_and_repeats_ask_others() {
    let url = format!("openai+{}", peer(|n| n));
    let args = "serve --dataset-name builtin --repeats 2 --num-prompts 3 --random-output-len 4 \
                --metadata place=here --url";
    let (result, _) = measure(&args.split_whitespace().chain([&*url]).collect::<Vec<_>>());
    assert_eq!(counts(&result), [(3, 3, 12); 2]);
    let of = |name: &str| [0, 1].map(|idx: usize| result["runs"][idx][name].clone());
    assert_eq!(of("seed"), [0, 1]);
    let [first, second] = of("workload").map(|workload| workload["sha256"].clone());
    assert_ne!(first, second);
    let output = &result["provenance"]["settings"]["serve"]["output"];
    assert_eq!(output["metadata"], json!(["place=here"]));
}
