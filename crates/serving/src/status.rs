//! Errors to status codes with `google.rpc` details.

use std::time::Duration;

use engine::{SubmitError, SubscribeError};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt};

/// The domain of every reason.
const DOMAIN: &str = "tandem";

/// Bytes of a status that may quote its request. It travels in headers, twice and encoded, of which
/// gRPC's clients take 8 KiB: beyond that they tell of headers, not of the fault.
const MAX_TEXT_BYTES: usize = 1200;
/// Faults told at once; the next try tells of others.
const MAX_VIOLATIONS: usize = 8;

/// A status with the reason as `google.rpc.ErrorInfo`, for programs to tell apart.
#[must_use]
pub fn with_reason(code: Code, reason: &str, message: &str) -> Status {
    let mut details = ErrorDetails::new();
    details.set_error_info(reason, DOMAIN, [] as [(String, String); 0]);
    Status::with_error_details(code, bounded(message, MAX_TEXT_BYTES), details)
}

/// INVALID_ARGUMENT with the faults of fields; of many or long ones with a part.
#[must_use]
pub fn invalid_argument(mut violations: Vec<FieldViolation>) -> Status {
    violations.truncate(MAX_VIOLATIONS);
    let share = MAX_TEXT_BYTES / violations.len().max(1);
    for violation in &mut violations {
        violation.description = bounded(&violation.description, share);
    }
    let message = violations
        .iter()
        .map(|violation| format!("{}: {}", violation.field, violation.description))
        .collect::<Vec<_>>()
        .join("; ");
    let mut details = ErrorDetails::with_bad_request(violations);
    details.set_error_info("INVALID_REQUEST", DOMAIN, [] as [(String, String); 0]);
    Status::with_error_details(Code::InvalidArgument, message, details)
}

/// A text of at most `max` bytes: of a longer one its beginning and its end.
fn bounded(text: &str, max: usize) -> String {
    const GAP: &str = " ... ";
    if text.len() <= max {
        return text.to_owned();
    }
    let half = (max - GAP.len()) / 2;
    let head = text.floor_char_boundary(half);
    let tail = text.ceil_char_boundary(text.len() - half);
    [&text[..head], GAP, &text[tail..]].concat()
}

/// RESOURCE_EXHAUSTED: `subject` has no room for the call now, and may have soon.
#[must_use]
pub fn exhausted(subject: &str, reason: &str, message: &str) -> Status {
    let mut details = ErrorDetails::with_retry_info(Some(Duration::from_secs(1)));
    details.add_quota_failure_violation(subject, message);
    details.set_error_info(reason, DOMAIN, [] as [(String, String); 0]);
    Status::with_error_details(Code::ResourceExhausted, message, details)
}

/// Why the engine did not take a request.
pub(crate) fn refused(error: &SubmitError) -> Status {
    let message = error.to_string();
    match error {
        SubmitError::QueueFull { .. } => exhausted("queue", "QUEUE_FULL", &message),
        SubmitError::ShuttingDown => with_reason(Code::Unavailable, "DRAINING", &message),
        SubmitError::Dead(_) => with_reason(Code::Unavailable, "ENGINE_DEAD", &message),
        SubmitError::Invalid(_) => invalid_argument(vec![FieldViolation::new("prompt", message)]),
        _ => with_reason(Code::Internal, "INTERNAL", &message),
    }
}

/// Why a subscription does not start, or ends.
pub(crate) fn unsubscribed(error: &SubscribeError) -> Status {
    let (code, reason) = match error {
        SubscribeError::NoPrefixCache => (Code::FailedPrecondition, "NO_PREFIX_CACHE"),
        SubscribeError::TooMany { .. } => (Code::ResourceExhausted, "TOO_MANY_SUBSCRIBERS"),
        SubscribeError::Stopped => (Code::Unavailable, "ENGINE_STOPPED"),
        _ => (Code::Internal, "INTERNAL"),
    };
    with_reason(code, reason, &error.to_string())
}

/// A request that was taken and failed.
pub(crate) fn failed(message: &str, engine_fault: Option<String>) -> Status {
    match engine_fault {
        Some(fault) => refused(&SubmitError::Dead(fault)),
        None => with_reason(Code::Internal, "STEP_FAILED", message),
    }
}

/// The model is still being read.
pub(crate) fn loading() -> Status {
    with_reason(Code::Unavailable, "LOADING", "the model is being loaded; try again later")
}

/// The reader of a stream fell too far behind.
pub(crate) fn slow_reader(n_steps: usize) -> Status {
    let message = format!("the stream was read too slowly: {n_steps} steps were waiting");
    with_reason(Code::ResourceExhausted, "SLOW_READER", &message)
}

/// The call's `grpc-timeout` passed.
#[must_use]
pub fn deadline_exceeded() -> Status {
    with_reason(Code::DeadlineExceeded, "DEADLINE_EXCEEDED", "the call's grpc-timeout passed")
}

/// The request did not start within the time that the server lets requests wait.
pub(crate) fn waited_too_long() -> Status {
    let message = "the request waited longer than the server lets requests wait; try again later";
    with_reason(Code::DeadlineExceeded, "WAITED_TOO_LONG", message)
}

/// No unfinished request has this id.
#[must_use]
pub fn unknown_request(id: u64) -> Status {
    with_reason(
        Code::NotFound,
        "UNKNOWN_REQUEST",
        &format!("request {id} is unknown or has finished"),
    )
}

/// A task of the server itself failed.
pub(crate) fn internal(message: &str) -> Status {
    with_reason(Code::Internal, "INTERNAL", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_fits_in_headers_whatever_it_quotes() {
        let long = format!("begin{}end", "é[".repeat(30_000));
        let faults = |n| vec![FieldViolation::new("constraint.regex", &long); n];
        let quoting = with_reason(Code::NotFound, "UNKNOWN_MODEL", &long);
        for status in [quoting, invalid_argument(faults(1)), invalid_argument(faults(2000))] {
            assert!(status.message().contains("begin") && status.message().ends_with("end"));
            let headers = status.clone().into_http::<()>().headers().clone();
            let n_bytes: usize = headers.values().map(|value| value.len()).sum();
            assert!(n_bytes < 8_000, "{n_bytes}");
        }
        let short = invalid_argument(vec![FieldViolation::new("prompt", "is empty"); 2]);
        assert_eq!(short.message(), "prompt: is empty; prompt: is empty");
    }

    #[test]
    fn a_bounded_text_stays_as_it_is() {
        let once = bounded(&"é".repeat(1000), 101);
        assert!(once.len() <= 101 && once.len() > 90, "{once}");
        assert_eq!(bounded(&once, 101), once);
    }
}
