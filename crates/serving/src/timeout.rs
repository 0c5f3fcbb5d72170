//! How long a call may take.

use std::time::Duration;

use tonic::codegen::http::HeaderMap;

/// The call's `grpc-timeout`; a malformed one is as good as none.
///
/// The transport ends a unary call at the same time with the wrong status, CANCELLED, so this one
/// is a little shorter.
#[must_use]
pub fn timeout_of(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    let timeout = match unit {
        "H" => Duration::from_secs(n * 3600),
        "M" => Duration::from_secs(n * 60),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return None,
    };
    Some(timeout - (timeout / 10).min(Duration::from_millis(5)))
}
