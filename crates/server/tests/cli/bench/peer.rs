//! A peer with OpenAI's API in the same sitting, as a script of one.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;

use serde_json::{Value, json};

use super::{counts, measure};
use crate::harness::fail;

/// Serves on a port until the test ends; `n_counted` of a prompt's ids are told as its tokens.
fn peer(n_counted: fn(usize) -> usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || answer(stream.unwrap(), n_counted));
        }
    });
    format!("http://{address}/v1")
}

fn answer(mut stream: TcpStream, n_counted: fn(usize) -> usize) {
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
    let text = if lines.iter().any(|line| line.starts_with("get /v1/models")) {
        json!({"data": [{"id": "other"}]}).to_string()
    } else {
        events(&serde_json::from_slice(&body).unwrap(), n_counted)
    };
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close", text.len());
    // Whoever asked may have gone.
    let _ = write!(stream, "{head}\r\n\r\n{text}");
}

/// A token a message, as many as are asked for.
fn events(request: &Value, n_counted: fn(usize) -> usize) -> String {
    let ids = request["prompt"].as_array().unwrap();
    assert!(ids.iter().all(|id| id.as_u64().unwrap() < 300), "{ids:?}");
    let n_output = request["max_tokens"].as_u64().unwrap();
    let token = json!({"choices": [{"text": "a", "token_ids": [5]}]});
    let usage = json!({"prompt_tokens": n_counted(ids.len()), "completion_tokens": n_output});
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
