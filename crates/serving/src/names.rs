//! The names that callers of other APIs give their requests.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Unfinished calls by the name that their caller chose; what an `Abort` of such a name needs.
///
/// A clone shares the names.
#[derive(Clone, Default)]
pub struct RequestNames {
    calls: Arc<Mutex<HashMap<String, Arc<Call>>>>,
}

/// A call under its name.
#[derive(Default)]
struct Call {
    aborted: tokio::sync::Notify,
}

/// A name in use; it is free again when this is dropped.
pub struct NamedCall {
    name: String,
    names: RequestNames,
    call: Arc<Call>,
}

impl RequestNames {
    /// Takes a name; `None` if an unfinished call has it.
    #[must_use]
    pub fn take(&self, name: &str) -> Option<NamedCall> {
        let mut calls = self.lock();
        if calls.contains_key(name) {
            return None;
        }
        let call = Arc::<Call>::default();
        calls.insert(name.to_owned(), Arc::clone(&call));
        Some(NamedCall { name: name.to_owned(), names: self.clone(), call })
    }

    /// Asks for the end of the call of this name; false if there is none.
    pub fn abort(&self, name: &str) -> bool {
        let calls = self.lock();
        let call = calls.get(name);
        if let Some(call) = call {
            // Kept for the call if it does not wait yet.
            call.aborted.notify_one();
        }
        call.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Call>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NamedCall {
    /// Waits until the end of the call is asked for.
    pub async fn aborted(&self) {
        self.call.aborted.notified().await;
    }
}

impl Drop for NamedCall {
    fn drop(&mut self) {
        self.names.lock().remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_is_free_after_its_call_and_an_early_abort_is_not_lost() {
        let names = RequestNames::default();
        assert!(!names.abort("a"));
        let call = names.take("a").unwrap();
        assert!(names.take("a").is_none());
        assert!(names.abort("a"));
        call.aborted().await;
        drop(call);
        assert!(!names.abort("a"));
        assert!(names.take("a").is_some());
    }
}
