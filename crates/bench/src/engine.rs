//! An engine in this process as a target.

use std::sync::Arc;

use serving::{CallContext, InferenceEngine};
use tokio_stream::StreamExt as _;

use crate::grpc::{counters, failure, piece, request};
use crate::target::{Counters, Failure, Pieces, Target};
use crate::workload::Planned;

/// An engine in this process, without sockets between.
pub struct EngineTarget(Arc<dyn InferenceEngine>);

impl EngineTarget {
    /// This one.
    #[must_use]
    pub fn new(engine: Arc<dyn InferenceEngine>) -> Self {
        Self(engine)
    }
}

#[async_trait::async_trait]
impl Target for EngineTarget {
    async fn send(&self, planned: &Planned) -> Result<Pieces, Failure> {
        let call = self.0.generate(CallContext::default(), request(planned)).await;
        Ok(Box::pin(call.map_err(|status| failure(&status))?.filter_map(piece)))
    }

    async fn forget_prompts(&self) -> Result<bool, Failure> {
        self.0.clear_prefix_cache().map(|()| true).map_err(|status| failure(&status))
    }

    async fn counters(&self) -> Result<Option<Counters>, Failure> {
        self.0.stats().map(|stats| Some(counters(&stats))).map_err(|status| failure(&status))
    }
}
