//! Keeping the pages of others out.
//!
//! The listener has no keys: whoever reaches it may use it. A browser on this machine does so for
//! any page that it shows, so two things are checked. A request's `Host` must be an address or
//! `localhost`, since any other name can be made to resolve to this machine (DNS rebinding); and a
//! request that changes something must come from a page of this listener, if it comes from a page.

use std::net::{IpAddr, SocketAddr};

use axum::extract::Request;
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Refuses requests that name no host, or one that is neither an address nor `localhost`.
pub(crate) async fn known_host(request: Request, next: Next) -> Response {
    match host(request.headers()) {
        Some(host) if is_literal(host) => next.run(request).await,
        _ => {
            let text = "call this listener by its address, or as localhost\n";
            (StatusCode::FORBIDDEN, text).into_response()
        }
    }
}

/// Whether the page that a request comes from, if any, is one of this listener.
pub(crate) fn is_same_origin(headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return true };
    let of_scheme = |scheme| origin.to_str().ok()?.strip_prefix(scheme);
    let authority = of_scheme("http://").or_else(|| of_scheme("https://"));
    authority.is_some() && authority == host(headers)
}

fn host(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::HOST)?.to_str().ok()
}

/// Whether a `Host` says where it leads.
fn is_literal(host: &str) -> bool {
    if host.parse::<SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.parse::<u16>().is_ok() => name,
        _ => host,
    };
    let bracketed = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    name.eq_ignore_ascii_case("localhost")
        || bracketed.is_some_and(|name| name.parse::<IpAddr>().is_ok())
}

/// Adds what keeps a page from loading, or being loaded by, anything else.
pub(crate) async fn security_headers(mut response: Response) -> Response {
    const HEADERS: [(HeaderName, &str); 5] = [
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
             img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_that_can_be_made_to_lead_here_are_unknown() {
        let known = ["localhost", "LocalHost:80", "127.0.0.1", "10.1.2.3:8000", "[::1]", "[::1]:1"];
        assert!(known.into_iter().all(is_literal));
        let unknown = ["", "example.com", "localhost.example.com", "127.0.0.1.nip.io:80", "[::1"];
        assert!(!unknown.into_iter().any(is_literal));
    }

    #[test]
    fn an_origin_is_the_host_or_absent() {
        let is_fine = |host: &'static str, origin: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_static(host));
            if let Some(origin) = origin {
                headers.insert(header::ORIGIN, HeaderValue::from_static(origin));
            }
            is_same_origin(&headers)
        };
        assert!(is_fine("localhost:1", None));
        assert!(is_fine("localhost:1", Some("http://localhost:1")));
        assert!(is_fine("localhost:1", Some("https://localhost:1")));
        for origin in ["null", "http://localhost:2", "http://127.0.0.1:1", "http://example.com", ""]
        {
            assert!(!is_fine("localhost:1", Some(origin)), "{origin}");
        }
    }
}
