//! The stream of a call.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use serving::{Messages, NamedCall};
use tokio_stream::Stream;
use tonic::Status;

use crate::engine::GenerateResponse;
use crate::reply::Reply;

/// What a call answers. Dropping it, an abort by name and an error free its request.
pub struct Generation {
    /// `None` once no more messages are wanted.
    running: Option<Running>,
    reply: Reply,
    /// The last messages of an aborted call.
    last: VecDeque<GenerateResponse>,
}

struct Running {
    messages: Messages,
    /// Resolves when the call is aborted; the call's name is free when this is dropped.
    aborted: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Generation {
    pub(crate) fn new(messages: Messages, call: NamedCall, reply: Reply) -> Self {
        let aborted = Box::pin(async move { call.aborted().await });
        Self { running: Some(Running { messages, aborted }), reply, last: VecDeque::new() }
    }
}

impl Stream for Generation {
    type Item = Result<GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(running) = &mut self.running else {
                return Poll::Ready(self.last.pop_front().map(Ok));
            };
            if running.aborted.as_mut().poll(cx).is_ready() {
                self.running = None;
                self.last = self.reply.abort().into();
                continue;
            }
            match ready!(Pin::new(&mut running.messages).poll_next(cx)) {
                Some(Ok(message)) => {
                    let response = self.reply.take(message);
                    if self.reply.is_over() {
                        // Its caller may use the name again once it has read the last message.
                        self.running = None;
                    }
                    if let Some(response) = response {
                        return Poll::Ready(Some(Ok(response)));
                    }
                }
                Some(Err(status)) => {
                    self.running = None;
                    return Poll::Ready(Some(Err(status)));
                }
                None => self.running = None,
            }
        }
    }
}
