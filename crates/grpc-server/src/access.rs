//! Who may call what.

use std::sync::Arc;

use serving::{Hold, status};
use tokio::sync::Semaphore;
use tonic::codegen::http::{HeaderMap, header::AUTHORIZATION};
use tonic::{Code, Status};

use crate::keys::{Key, KeySet, KeysError, digest};

/// What load balancers and probes ask, without a key.
const HEALTH: &str = "/grpc.health.v1.Health/";
/// Calls that change the server, show what others ask it, or describe it.
const ADMIN: [&str; 3] = [
    "/tandem.control.v1.ControlService/ClearPrefixCache",
    "/tandem.control.v1.ControlService/SubscribeKvEvents",
    "/grpc.reflection.",
];

/// The keys of a port.
///
/// Without any, which is the default, everyone may call everything. Otherwise admin calls
/// (`ClearPrefixCache`, `SubscribeKvEvents`, reflection) need an admin key, and are refused where
/// there is no set of those; other calls need a usual or an admin key, and none where there is no
/// set of usual ones. Health never needs a key.
#[derive(Debug, Default)]
pub struct Access {
    usual: Option<KeySet>,
    admin: Option<KeySet>,
}

impl Access {
    /// Access by these keys. With a usual key, at most `max_concurrent_per_key` calls run at a
    /// time; a stream runs until its end.
    ///
    /// # Errors
    ///
    /// If a token is in both sets.
    pub fn new(
        usual: Option<KeySet>,
        admin: Option<KeySet>,
        max_concurrent_per_key: Option<u32>,
    ) -> Result<Self, KeysError> {
        let mut access = Self { usual, admin };
        if let (Some(usual), Some(admin)) = (&access.usual, &access.admin) {
            usual.check_apart(admin)?;
        }
        if let (Some(usual), Some(n_max)) = (&mut access.usual, max_concurrent_per_key) {
            for key in &mut usual.keys {
                key.places = Arc::new(Semaphore::new(n_max as usize));
            }
        }
        Ok(access)
    }

    /// Whether a call may start, and what it holds as long as it runs.
    pub(crate) fn admit(&self, path: &str, headers: &HeaderMap) -> Result<Option<Hold>, Status> {
        let is_admin = ADMIN.iter().any(|call| path.starts_with(call));
        let is_open = self.usual.is_none() && (self.admin.is_none() || !is_admin);
        if is_open || path.starts_with(HEALTH) {
            return Ok(None);
        }
        let digest = digest(bearer(headers)?);
        // Both are looked through in any case.
        let usual = self.usual.as_ref().and_then(|set| set.find(&digest));
        let admin = self.admin.as_ref().and_then(|set| set.find(&digest));
        match (admin, usual) {
            (Some(_), _) => Ok(None),
            (None, Some(_)) if is_admin => Err(self.not_an_admin()),
            (None, Some(key)) => place(key).map(Some),
            (None, None) => Err(unauthenticated("UNKNOWN_KEY", "the bearer token is not known")),
        }
    }

    fn not_an_admin(&self) -> Status {
        let message = match self.admin {
            Some(_) => "this call needs an admin key",
            None => "this call needs an admin key, and the server has none",
        };
        status::with_reason(Code::PermissionDenied, "ADMIN_KEY_NEEDED", message)
    }
}

/// The token of a call.
fn bearer(headers: &HeaderMap) -> Result<&str, Status> {
    let needed = "give `authorization: Bearer TOKEN`";
    let value = headers.get(AUTHORIZATION).ok_or_else(|| {
        unauthenticated("KEY_MISSING", &format!("this call needs a key: {needed}"))
    })?;
    let token = value.to_str().ok().and_then(|value| value.split_once(' '));
    match token {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => Ok(token.trim()),
        _ => {
            let message = format!("the authorization is not of a known kind: {needed}");
            Err(unauthenticated("KEY_MALFORMED", &message))
        }
    }
}

fn unauthenticated(reason: &str, message: &str) -> Status {
    status::with_reason(Code::Unauthenticated, reason, message)
}

/// A place among the calls of a key.
fn place(key: &Key) -> Result<Hold, Status> {
    match Arc::clone(&key.places).try_acquire_owned() {
        Ok(permit) => Ok(Hold(Arc::new(permit))),
        Err(_) => {
            let message =
                format!("key {} has as many calls running as it may; try again later", key.name);
            Err(status::exhausted(&format!("key:{}", key.name), "KEY_BUSY", &message))
        }
    }
}
