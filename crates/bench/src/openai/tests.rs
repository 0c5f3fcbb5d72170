//! What is sent to servers of several kinds, and what is made of their answers.

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const TOKEN: &str = r#"{"choices": [{"text": "a", "finish_reason": null}]}"#;
const LAST: &str = r#"{"choices": [{"text": "", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2}}"#;

#[test]
fn chunks_are_counted_by_ids_where_there_are_any() {
    let mut reader = Reader::default();
    let mut read = |data: &str| reader.event(data);
    let ids = r#"{"choices": [{"text": "ab", "token_ids": [5, 6]}]}"#;
    assert_eq!(read(ids), Ok(Some(Piece::Tokens(2))));
    assert_eq!(read(r#"{"choices": [{"text": "ab"}]}"#), Ok(Some(Piece::Text)));
    assert_eq!(read(r#"{"choices": [{"text": "", "finish_reason": "length"}]}"#), Ok(None));
    let last = r#"{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}"#;
    assert_eq!(read(last), Ok(None));
    for error in [
        r#"{"error": {"message": "no", "code": 500}}"#,
        r#"{"error": "no"}"#,
        r#"{"object": "error", "message": "no", "code": 400}"#,
    ] {
        assert_eq!(read(error), Err(Failure::new("stream error", "no")));
    }
    let untold = r#"{"error": {"code": 500}}"#;
    assert_eq!(read(untold).unwrap_err().message, r#"{"code":500}"#);
    assert_eq!(read(r#"{"object": "text_completion", "error": null}"#), Ok(None));
    assert_eq!(read("no json").unwrap_err().class, "malformed");
    let aborted = r#"{"choices": [{"text": "", "finish_reason": "abort"}]}"#;
    assert_eq!(read(aborted).unwrap_err().class, "finish reason abort");
    let totals = Totals { n_prompt: Some(3), n_output: Some(9) };
    assert_eq!(read("[DONE]"), Ok(Some(Piece::Finished(totals))));
}

#[test]
fn an_answer_of_nothing_is_no_answer() {
    let empty = Reader::default().event("[DONE]").unwrap_err();
    assert_eq!(empty.class, "empty");
    // A model may end its answer at once, and some servers do not say why they end one.
    for said in [r#"{"choices": [{"finish_reason": "stop"}]}"#, TOKEN] {
        let mut reader = Reader::default();
        reader.event(said).unwrap();
        assert_eq!(reader.event("[DONE]"), Ok(Some(Piece::Finished(Totals::default()))));
    }
}

#[tokio::test]
async fn an_address_that_asks_for_tls_is_refused() {
    let failure = OpenAiTarget::connect("https://127.0.0.1:1/v1", Some("tiny"), None).await.err();
    let failure = failure.unwrap();
    assert!(failure.class == "address" && failure.message.contains("no TLS"), "{failure}");
}

/// A server with one model, which answers as `answer` says of a request's body.
async fn server(answer: fn(&Value) -> (u16, String)) -> OpenAiTarget {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(exchange(stream, answer));
        }
    });
    OpenAiTarget::connect(&url, None, None).await.unwrap()
}

/// Keeps the connection open, and refuses what comes over a used one.
async fn exchange(stream: TcpStream, answer: fn(&Value) -> (u16, String)) {
    let mut stream = BufReader::new(stream);
    let mut is_used = false;
    while let Some((head, body)) = request(&mut stream).await {
        let (status, text) = if is_used {
            (409, "a used connection".to_owned())
        } else if head.starts_with("GET /v1/models ") {
            (200, json!({"data": [{"id": "tiny"}]}).to_string())
        } else {
            answer(&serde_json::from_slice(&body).unwrap())
        };
        let head = format!("HTTP/1.1 {status} so\r\ncontent-length: {}", text.len());
        stream.write_all(format!("{head}\r\n\r\n{text}").as_bytes()).await.unwrap();
        is_used = true;
    }
}

/// Head and body of the next request; none at the end.
async fn request(stream: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let (mut head, mut n_bytes) = (String::new(), 0);
    while !head.ends_with("\r\n\r\n") {
        let start = head.len();
        if stream.read_line(&mut head).await.unwrap_or(0) == 0 {
            return None;
        }
        if let Some(n) = head[start..].to_lowercase().strip_prefix("content-length:") {
            n_bytes = n.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; n_bytes];
    stream.read_exact(&mut body).await.unwrap();
    Some((head, body))
}

fn stream(events: &[&str]) -> (u16, String) {
    let events = events.iter().map(|event| format!("data: {}\n\n", event.replace('\n', "")));
    (200, events.collect())
}

async fn ask(target: &OpenAiTarget) -> Result<Vec<Piece>, Failure> {
    let mut planned = Planned::greedy(Prompt::TokenIds(vec![7, 8, 9]), 2);
    planned.ignore_eos = true;
    target.send(&planned).await?.collect().await
}

const WHOLE: [Piece; 3] =
    [Piece::Text, Piece::Text, Piece::Finished(Totals { n_prompt: Some(3), n_output: Some(2) })];

#[tokio::test]
async fn the_plan_is_sent_in_the_fields_that_peers_know() {
    let target = server(|body| {
        let expected = json!({
            "model": "tiny", "prompt": [7, 8, 9], "max_tokens": 2, "temperature": 0.0,
            "stream": true, "stream_options": {"include_usage": true}, "return_token_ids": true,
            "ignore_eos": true,
        });
        assert_eq!(*body, expected);
        stream(&[TOKEN, TOKEN, LAST, "[DONE]"])
    });
    let pieces = ask(&target.await).await.unwrap();
    assert_eq!(pieces[..3], WHOLE, "nobody reads behind the end");
}

#[tokio::test]
async fn an_answer_without_done_is_whole_if_it_says_why_it_ended() {
    let target = server(|_| stream(&[TOKEN, TOKEN, LAST])).await;
    assert_eq!(ask(&target).await.unwrap(), WHOLE);
    let target = server(|_| stream(&[TOKEN, TOKEN])).await;
    assert_eq!(ask(&target).await.unwrap(), WHOLE[..2], "nothing says that this is the end");
}

#[tokio::test]
async fn a_server_that_refuses_to_tell_ids_is_not_asked_for_them_again() {
    let target = server(|body| match body.get("return_token_ids") {
        Some(_) => (422, "unexpected field".to_owned()),
        None => stream(&[TOKEN, TOKEN, LAST]),
    });
    let target = target.await;
    for _ in 0..2 {
        assert_eq!(ask(&target).await.unwrap(), WHOLE);
        assert!(!target.asks_for_ids.load(Ordering::Relaxed));
    }
}

#[tokio::test]
async fn what_is_refused_for_another_reason_fails_and_changes_nothing() {
    let target = server(|_| (400, "too long".to_owned())).await;
    assert_eq!(ask(&target).await.unwrap_err(), Failure::new("HTTP 400", "too long"));
    assert!(target.asks_for_ids.load(Ordering::Relaxed));
}
