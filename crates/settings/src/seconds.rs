//! Seconds as flags and files say them.

use std::num::ParseIntError;
use std::time::Duration;

use serde::Serializer;

/// Whole seconds.
pub(crate) fn whole(text: &str) -> Result<Duration, ParseIntError> {
    text.parse().map(Duration::from_secs)
}

/// Whole seconds, at least 1.
pub(crate) fn at_least_1(text: &str) -> Result<Duration, String> {
    let duration = whole(text).ok().filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| "give a whole number of seconds above 0".to_owned())
}

/// Seconds above 0, with a fraction or without.
pub(crate) fn fraction(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| *seconds > 0.0);
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.ok_or_else(|| "give a number of seconds above 0".to_owned())
}

/// Writes what the functions above read.
pub(crate) fn serialize<T, S>(duration: &T, serializer: S) -> Result<S::Ok, S::Error>
where
    T: Copy + Into<Option<Duration>>,
    S: Serializer,
{
    match (*duration).into() {
        None => serializer.serialize_none(),
        Some(duration) if duration.subsec_nanos() == 0 => {
            serializer.serialize_u64(duration.as_secs())
        }
        Some(duration) => serializer.serialize_f64(duration.as_secs_f64()),
    }
}
