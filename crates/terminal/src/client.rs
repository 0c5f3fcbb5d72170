//! A server of the own API.

use std::error::Error as _;

use grpc_api::control::v1::control_service_client::ControlServiceClient;
use grpc_api::control::v1::{
    GetModelInfoRequest, GetModelInfoResponse, GetServerInfoRequest, GetServerInfoResponse,
    GetStatsRequest, GetStatsResponse,
};
use grpc_api::inference::v1::GenerateStreamRequest;
use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use serving::Messages;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status};

/// Where a server is, and what it asks of its clients.
#[derive(Clone, Default)]
pub struct ServerAddress {
    /// `http://HOST:PORT`, or `https://HOST:PORT` for TLS.
    pub url: String,
    /// Sent with each call.
    pub api_key: Option<String>,
    /// The certificates that may sign the server's, in PEM; the system's if absent.
    pub tls_ca: Option<Vec<u8>>,
}

/// Calls a server. It connects with the first call, and again after the server went away.
#[derive(Clone, Debug)]
pub struct Client {
    inference: InferenceServiceClient<InterceptedService<Channel, Key>>,
    control: ControlServiceClient<InterceptedService<Channel, Key>>,
}

/// Adds the key to a call.
#[derive(Clone)]
struct Key(Option<MetadataValue<Ascii>>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Interceptor for Key {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

impl Client {
    /// A client of the server at `address`. Must be called within a runtime.
    ///
    /// # Errors
    ///
    /// What is wrong with the address, the key or the certificates.
    pub fn new(address: &ServerAddress) -> Result<Self, String> {
        let ServerAddress { url, api_key, tls_ca } = address;
        let is_tls = url.starts_with("https://");
        if !is_tls && !url.starts_with("http://") {
            return Err(format!("{url}: give http://HOST:PORT, or https://HOST:PORT for TLS"));
        }
        if !is_tls && tls_ca.is_some() {
            return Err(format!("{url}: certificates are for https://"));
        }
        let said = |error: tonic::transport::Error| format!("{url}: {}", with_causes(&error));
        let mut endpoint = Endpoint::from_shared(url.clone()).map_err(said)?.tcp_nodelay(true);
        if is_tls {
            let config = match tls_ca {
                Some(pem) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
                None => ClientTlsConfig::new().with_native_roots(),
            };
            endpoint = endpoint.tls_config(config).map_err(said)?;
        }
        let key = api_key.as_ref().map(|key| {
            let mut value: MetadataValue<Ascii> = format!("Bearer {key}")
                .parse()
                .map_err(|_| "the key has characters that no key may have".to_owned())?;
            value.set_sensitive(true);
            Ok::<_, String>(value)
        });
        let (channel, key) = (endpoint.connect_lazy(), Key(key.transpose()?));
        Ok(Self {
            inference: InferenceServiceClient::with_interceptor(channel.clone(), key.clone()),
            control: ControlServiceClient::with_interceptor(channel, key),
        })
    }

    /// Continues a prompt; dropping the messages ends the request.
    ///
    /// # Errors
    ///
    /// The status that the server, or the way to it, answered with; so for the others.
    pub async fn generate(&self, request: GenerateStreamRequest) -> Result<Messages, Status> {
        let messages = self.inference.clone().generate_stream(request).await?.into_inner();
        Ok(Messages::new(vec![], messages))
    }

    /// The model and the limits of a request.
    ///
    /// # Errors
    ///
    /// See [`Self::generate`].
    pub async fn model_info(&self) -> Result<GetModelInfoResponse, Status> {
        Ok(self.control.clone().get_model_info(GetModelInfoRequest {}).await?.into_inner())
    }

    /// The program and its capacity.
    ///
    /// # Errors
    ///
    /// See [`Self::generate`].
    pub async fn server_info(&self) -> Result<GetServerInfoResponse, Status> {
        Ok(self.control.clone().get_server_info(GetServerInfoRequest {}).await?.into_inner())
    }

    /// Load and totals.
    ///
    /// # Errors
    ///
    /// See [`Self::generate`].
    pub async fn stats(&self) -> Result<GetStatsResponse, Status> {
        Ok(self.control.clone().get_stats(GetStatsRequest {}).await?.into_inner())
    }
}

/// What a status says, with the causes that lie in the way to the server.
pub fn said(status: &Status) -> String {
    let code = status.code();
    match (status.source(), status.message()) {
        (Some(error), _) => with_causes(error),
        // So does a port that has other services.
        (None, "") => format!("{code} ({code:?})"),
        (None, message) => format!("{message} ({code:?})"),
    }
}

fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
