//! The sections beside `[engine]`: listeners, who may call, what is told about it.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum, value_parser};
use serde::Serialize;

use crate::seconds;

/// `[listen]`: the gRPC port.
#[derive(Clone, Debug, PartialEq, Args, Serialize)]
#[group(id = "listen")]
#[serde(rename_all = "kebab-case")]
pub struct ListenSettings {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 50051)]
    pub port: u16,
    /// Name under which clients see the model [default: the folder's name]
    #[arg(long)]
    pub served_model_name: Option<String>,
    /// Seconds that running requests may take after a request to stop
    #[arg(long, default_value = "30", value_parser = seconds::whole)]
    #[serde(serialize_with = "seconds::serialize")]
    pub drain_timeout: Duration,
    /// Largest size of a request message in bytes; a larger one is refused
    #[arg(long, default_value_t = 16 << 20, value_parser = value_parser!(u32).range(1024..))]
    pub max_request_bytes: u32,
    /// Steps of a stream that may wait for its reader before its request is aborted
    #[arg(long, default_value_t = 1024, value_parser = value_parser!(u32).range(1..=1 << 20))]
    pub max_buffered_steps: u32,
    /// Seconds without traffic after which a connection is probed
    #[arg(long, default_value = "30", value_parser = seconds::at_least_1)]
    #[serde(serialize_with = "seconds::serialize")]
    pub keepalive_interval: Duration,
    /// Seconds that a probe may stay without an answer before its connection is closed
    #[arg(long, default_value = "10", value_parser = seconds::at_least_1)]
    #[serde(serialize_with = "seconds::serialize")]
    pub keepalive_timeout: Duration,
    /// Seconds after which a connection takes no new calls, so that clients spread over servers;
    /// its running calls go on [default: no limit]
    #[arg(long, value_parser = seconds::at_least_1)]
    #[serde(serialize_with = "seconds::serialize")]
    pub max_connection_age: Option<Duration>,
    /// Whether the server describes its services to clients: auto does on a loopback address
    #[arg(long, value_enum, default_value_t = ReflectionArg::Auto)]
    pub reflection: ReflectionArg,
    /// Listen on an address that others can reach without TLS
    #[arg(long)]
    pub allow_insecure_public: bool,
}

impl ListenSettings {
    /// Whether reflection is served, on the address as it is.
    pub fn serves_reflection(&self) -> bool {
        match self.reflection {
            ReflectionArg::Auto => !is_public(self.host),
            ReflectionArg::On => true,
            ReflectionArg::Off => false,
        }
    }
}

/// Whether the services describe themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReflectionArg {
    /// On loopback addresses
    Auto,
    /// Everywhere
    On,
    /// Nowhere
    Off,
}

/// `[tls]`: the certificate of the gRPC port, and who must show one.
#[derive(Clone, Debug, PartialEq, Args, Serialize)]
#[group(id = "tls")]
#[serde(rename_all = "kebab-case")]
pub struct TlsSettings {
    /// PEM file with the server's certificate and its chain [default: no TLS]
    #[arg(long)]
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key
    #[arg(long)]
    pub tls_key: Option<PathBuf>,
    /// PEM file with the authorities of clients: a client without a certificate of theirs is
    /// refused
    #[arg(long)]
    pub tls_client_ca: Option<PathBuf>,
}

/// `[auth]`: files of bearer tokens; a token itself is no setting.
#[derive(Clone, Debug, PartialEq, Args, Serialize)]
#[group(id = "auth")]
#[serde(rename_all = "kebab-case")]
pub struct AuthSettings {
    /// File with one bearer token a line, as `token` or `name:token`; a line that begins with `#`
    /// is a comment [default: everyone may call]
    #[arg(long)]
    pub api_keys_file: Option<PathBuf>,
    /// The same for calls that change the server, show what others ask or describe it; other calls
    /// take these tokens, too [default: with --api-keys-file nobody may make such calls]
    #[arg(long)]
    pub admin_keys_file: Option<PathBuf>,
    /// Largest number of calls that run at once with one token of --api-keys-file [default: no
    /// limit]
    #[arg(long, value_parser = value_parser!(u32).range(1..))]
    pub max_concurrent_per_key: Option<u32>,
}

/// `[http]`: the listener of metrics, health and the page.
#[derive(Clone, Debug, PartialEq, Args, Serialize)]
#[group(id = "http")]
#[serde(rename_all = "kebab-case")]
pub struct HttpSettings {
    /// Address of the HTTP listener
    #[arg(long, default_value = "127.0.0.1")]
    pub http_host: IpAddr,
    /// Port of the HTTP listener; 0 takes a free one [default: off]
    #[arg(long)]
    pub http_port: Option<u16>,
    /// Metrics under the names of another engine, beside our own
    #[arg(long, value_enum, default_value_t = MetricsCompatArg::None)]
    pub metrics_compat: MetricsCompatArg,
    /// Whether the page has a prompt box, for anyone who can reach the listener: auto has it on a
    /// loopback address where --api-keys-file is not given
    #[arg(long, value_enum, default_value_t = HttpPromptsArg::Auto)]
    pub http_prompts: HttpPromptsArg,
    /// Let the HTTP listener, which has neither TLS nor tokens, take an address that others can
    /// reach
    #[arg(long)]
    pub allow_insecure_public_http: bool,
}

impl HttpSettings {
    /// Whether prompts are taken, on the address as it is and with keys as they are.
    pub fn takes_prompts(&self, auth: &AuthSettings) -> bool {
        match self.http_prompts {
            HttpPromptsArg::Auto => !is_public(self.http_host) && auth.api_keys_file.is_none(),
            HttpPromptsArg::On => true,
            HttpPromptsArg::Off => false,
        }
    }
}

/// Whether the HTTP listener takes prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HttpPromptsArg {
    /// On loopback addresses, where calls need no key
    Auto,
    /// Everywhere
    On,
    /// Nowhere
    Off,
}

/// Whose metrics are imitated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MetricsCompatArg {
    /// Nobody's
    None,
    /// vLLM's
    Vllm,
}

/// `[compat]`: ports that speak the protocols of other engines, without TLS and tokens.
#[derive(Clone, Debug, PartialEq, Args, Serialize)]
#[group(id = "compat")]
#[serde(rename_all = "kebab-case")]
pub struct CompatSettings {
    /// Port for the smg gateway (vllm.grpc.engine.VllmEngine); 0 takes a free one [default: off]
    #[arg(long)]
    pub smg_port: Option<u16>,
    /// Port for NVIDIA Dynamo (vllm.Inference and vllm.Control); 0 takes a free one [default: off]
    #[arg(long)]
    pub vllm_port: Option<u16>,
    /// Address of these two; one that others can reach needs --allow-insecure-public
    #[arg(long, default_value = "127.0.0.1")]
    pub compat_host: IpAddr,
}

/// `[telemetry]`: the log and traces. Neither ever holds a prompt.
#[derive(Clone, Debug, PartialEq, Args, Serialize)]
#[group(id = "telemetry")]
#[serde(rename_all = "kebab-case")]
pub struct TelemetrySettings {
    /// Form of the log on standard error; RUST_LOG chooses what is in it
    #[arg(long, value_enum, default_value_t = LogFormatArg::Text)]
    pub log_format: LogFormatArg,
    /// URL of an OpenTelemetry collector that takes traces over gRPC without TLS [default: no
    /// traces]
    #[arg(long)]
    pub otlp_endpoint: Option<String>,
    /// Name of this service in traces
    #[arg(long, default_value = "tandem")]
    pub service_name: String,
}

/// How a line of the log looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormatArg {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// Whether others than this machine can reach an address.
pub(crate) fn is_public(host: IpAddr) -> bool {
    !host.to_canonical().is_loopback()
}
