//! Connections that can be cut as by a client that dies.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use grpc_api::control::v1::control_service_client::ControlServiceClient;
use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use tokio::task::AbortHandle;
use tonic::transport::{Channel, Endpoint};

/// The tasks that drive a connection.
#[derive(Clone, Default)]
struct Tasks(Arc<Mutex<Vec<AbortHandle>>>);

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

impl hyper::rt::Executor<Task> for Tasks {
    fn execute(&self, task: Task) {
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.retain(|task| !task.is_finished());
        tasks.push(tokio::spawn(task).abort_handle());
    }
}

/// A connection of one client.
#[derive(Clone)]
pub(crate) struct Connection {
    channel: Channel,
    tasks: Tasks,
}

impl Connection {
    /// Connects; of a stream, `window` bytes may be on their way, or as many as is usual.
    pub(crate) async fn open(
        address: &str,
        window: Option<u32>,
    ) -> Result<Self, tonic::transport::Error> {
        let tasks = Tasks::default();
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .connect_timeout(Duration::from_secs(10))
            .initial_stream_window_size(window)
            .executor(tasks.clone());
        Ok(Self { channel: endpoint.connect().await?, tasks })
    }

    pub(crate) fn inference(&self) -> InferenceServiceClient<Channel> {
        InferenceServiceClient::new(self.channel.clone()).max_decoding_message_size(64 << 20)
    }

    pub(crate) fn control(&self) -> ControlServiceClient<Channel> {
        ControlServiceClient::new(self.channel.clone())
    }

    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Closes the socket in the midst of whatever goes on, without a word of HTTP/2.
    pub(crate) fn cut(self) {
        for task in self.tasks.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
    }
}
