//! What stands before all services of a port.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use serving::{status, timeout_of};
use tokio::time::timeout;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};
use tonic::service::Routes;

use crate::access::Access;

/// Services behind keys and deadlines.
#[derive(Clone)]
pub(crate) struct Guard {
    pub(crate) routes: Routes,
    pub(crate) access: Arc<Access>,
}

type Answer = Result<Response<Body>, Infallible>;

impl Service<Request<Body>> for Guard {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request<Body>>::poll_ready(&mut self.routes, cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        match self.access.admit(request.uri().path(), request.headers()) {
            Ok(None) => {}
            Ok(Some(hold)) => {
                request.extensions_mut().insert(hold);
            }
            Err(status) => return Box::pin(ready(Ok(status.into_http()))),
        }
        let limit = timeout_of(request.headers());
        let answer = self.routes.call(request);
        match limit {
            None => Box::pin(answer),
            Some(limit) => Box::pin(before(limit, answer)),
        }
    }
}

/// The answer, unless it takes too long to begin. The transport would say CANCELLED. An engine that
/// has the request ends it by itself, a little earlier; this ends a call that waits before that.
async fn before(limit: Duration, answer: impl Future<Output = Answer>) -> Answer {
    let answer = timeout(limit + (limit / 20).min(Duration::from_millis(2)), answer).await;
    answer.unwrap_or_else(|_| Ok(status::deadline_exceeded().into_http()))
}
