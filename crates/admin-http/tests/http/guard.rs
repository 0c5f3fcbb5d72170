//! Who may do what.

use admin_http::{HttpConfig, Names};
use serde_json::json;
use serving::InferenceEngine as _;

use crate::harness::*;

fn texted() -> Setup {
    Setup { tokenizer: true, ..Setup::default() }
}

#[tokio::test]
async fn names_that_anyone_can_make_lead_here_are_refused() {
    let server = Server::start(texted()).await;
    let get = |path: &str, host: &str| format!("GET {path} HTTP/1.0\r\n{host}\r\n");
    for path in ["/", "/page.js", "/page.css", "/api/stats"] {
        assert_eq!(server.get(path).await.status, 200, "{path}");
        assert_eq!(server.ask(&get(path, "Host: localhost:80\r\n")).await.status, 200, "{path}");
        for host in ["", "Host: rebound.example.com\r\n"] {
            assert_eq!(server.ask(&get(path, host)).await.status, 403, "{path} {host}");
        }
    }
    // Probes and scrapes come under whatever name a cluster gives.
    for path in ["/metrics", "/healthz", "/readyz"] {
        assert_eq!(server.ask(&get(path, "Host: tandem.svc\r\n")).await.status, 200, "{path}");
    }
    let prompt = server.prompt(&json!({ "prompt": "a", "max_tokens": 1 }));
    assert_eq!(server.ask(&prompt).await.status, 200);
    let rebound = prompt.replace(&server.address.to_string(), "rebound.example.com");
    assert_eq!(server.ask(&rebound).await.status, 403);
}

#[tokio::test]
async fn foreign_pages_cannot_send_prompts() {
    let server = Server::start(texted()).await;
    let prompt = server.prompt(&json!({ "prompt": "a", "max_tokens": 1 }));
    let origin = format!("Origin: http://{}\r\n", server.address);
    assert_eq!(server.ask(&prompt.replace(&origin, "")).await.status, 200);
    for foreign in ["http://example.com", "null", "http://127.0.0.1:1"] {
        let answer = server.ask(&prompt.replace(&origin, &format!("Origin: {foreign}\r\n"))).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["code"]),
            (403, &json!("PERMISSION_DENIED"))
        );
        assert!(!answer.head.contains("access-control-allow"), "{}", answer.head);
    }
    for (kind, status) in [
        ("text/plain", 400),
        ("text/plain; application/json", 400),
        ("application/jsonp", 400),
        ("Application/JSON", 200),
        ("application/json; charset=utf-8", 200),
    ] {
        let answer = server.ask(&prompt.replace("application/json", kind)).await;
        assert_eq!(answer.status, status, "{kind}");
    }
    assert_eq!(server.get("/api/generate").await.status, 405);
    assert_eq!(server.of.frontend.stats().unwrap().finished_requests, 3);
}

#[tokio::test]
async fn prompts_can_be_turned_off_and_are_bounded() {
    let config = HttpConfig { prompts: false, max_body_bytes: 100 };
    let server = Server::start_with(Names::Own, config, texted()).await;
    let answer = server.generate(&json!({ "prompt": "a" })).await;
    assert_eq!(answer.status, 403);
    assert!(answer.body.contains("takes no prompts"), "{}", answer.body);
    assert_eq!(server.get("/api/stats").await.json()["prompts"], false);
    let answer = server.generate(&json!({ "prompt": "a".repeat(100) })).await;
    assert_eq!(answer.status, 413);
}

#[tokio::test]
async fn the_page_may_load_nothing_else() {
    let server = Server::start(texted()).await;
    let mut page = String::new();
    for (path, kind) in
        [("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")]
    {
        let answer = server.get(path).await;
        assert!(answer.head.contains(&format!("content-type: {kind}")), "{}", answer.head);
        assert!(answer.head.contains("content-security-policy: default-src 'none'"));
        assert!(answer.head.contains("x-content-type-options: nosniff"));
        page += &answer.body;
    }
    // The namespace of the icon is a name, and loads nothing.
    let links: Vec<&str> = page.split("http").skip(1).filter(|rest| rest.contains("://")).collect();
    let is_name = |rest: &&str| rest.starts_with("://www.w3.org/2000/svg");
    assert!(links.iter().filter(|rest| rest.starts_with([':', 's'])).all(is_name));
    for unsafe_way in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
        assert!(!page.contains(unsafe_way), "{unsafe_way}");
    }
}
