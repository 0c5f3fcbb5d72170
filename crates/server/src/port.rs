//! The port of the own API, as settings have it.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use grpc_server::{Access, KeySet, Port, Security, ServeConfig, Services, Tls};
use serving::InferenceEngine;
use settings::{AuthSettings, ListenSettings, ServeSettings, TlsSettings};
use tokio::net::TcpListener;

/// Reads certificate and keys: a fault in them is known before anything is bound or loaded.
pub(crate) fn security(settings: &ServeSettings) -> Result<Security> {
    let TlsSettings { tls_cert, tls_key, tls_client_ca } = &settings.tls;
    let tls = match (tls_cert, tls_key) {
        (Some(cert), Some(key)) => Some(Tls::read(cert, key, tls_client_ca.as_deref())?),
        _ => None,
    };
    let AuthSettings { api_keys_file, admin_keys_file, max_concurrent_per_key } = &settings.auth;
    let keys = |file: &Option<PathBuf>| file.as_deref().map(KeySet::read).transpose();
    let (usual, admin) = (keys(api_keys_file)?, keys(admin_keys_file)?);
    let access = Access::new(usual, admin, *max_concurrent_per_key)?;
    Ok(Security { tls, access })
}

/// The port over an engine.
pub(crate) fn own(
    listener: TcpListener,
    listen: &ListenSettings,
    engine: &Arc<dyn InferenceEngine>,
    security: Security,
) -> Port {
    let mut services = Services::own(engine, listen.max_request_bytes as usize);
    if listen.serves_reflection() {
        services = services.with_reflection();
    }
    Port { listener, services, security }
}

/// How connections are treated.
pub(crate) fn config(listen: &ListenSettings) -> ServeConfig {
    ServeConfig {
        drain_timeout: listen.drain_timeout,
        keepalive_interval: listen.keepalive_interval,
        keepalive_timeout: listen.keepalive_timeout,
        max_connection_age: listen.max_connection_age,
        ..ServeConfig::default()
    }
}
