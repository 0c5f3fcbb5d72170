//! The certificate of a port, and whose clients it takes.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, fs, io};

use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

/// How long a client may take for its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// TLS of a port, from files that were found to be in order.
#[derive(Clone, Debug)]
pub struct Tls {
    pub(crate) config: ServerTlsConfig,
}

impl Tls {
    /// Reads PEM files: the certificate with its chain, its private key, and the authorities of
    /// clients. With those, a client without a certificate of theirs is refused.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or has nothing of its kind, and if key and certificate are not one
    /// pair.
    pub fn read(cert: &Path, key: &Path, client_ca: Option<&Path>) -> Result<Self, TlsError> {
        let cert_pem = certificates(cert)?;
        let key_pem = read(key)?;
        PrivateKeyDer::from_pem_slice(&key_pem)
            .map_err(|error| TlsError::malformed(key, "private key", &error))?;
        let identity = Identity::from_pem(cert_pem, key_pem);
        let mut config = ServerTlsConfig::new().identity(identity).timeout(HANDSHAKE_TIMEOUT);
        check(&config).map_err(|reason| TlsError::Pair {
            cert: cert.to_owned(),
            key: key.to_owned(),
            reason,
        })?;
        if let Some(client_ca) = client_ca {
            config = config.client_ca_root(Certificate::from_pem(certificates(client_ca)?));
            check(&config).map_err(|reason| TlsError::Malformed {
                path: client_ca.to_owned(),
                kind: "certificate of an authority",
                reason,
            })?;
        }
        Ok(Self { config })
    }
}

/// The content of a file with at least one certificate and no broken one.
fn certificates(path: &Path) -> Result<Vec<u8>, TlsError> {
    let pem = read(path)?;
    let mut n_found = 0;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        certificate.map_err(|error| TlsError::malformed(path, "certificate", &error))?;
        n_found += 1;
    }
    if n_found == 0 {
        let reason = "it has no section BEGIN CERTIFICATE".to_owned();
        return Err(TlsError::Malformed { path: path.to_owned(), kind: "certificate", reason });
    }
    Ok(pem)
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|source| TlsError::Unreadable { path: path.to_owned(), source })
}

/// Whether a server could start with this; the innermost reason if not.
fn check(config: &ServerTlsConfig) -> Result<(), String> {
    let Err(error) = Server::builder().tls_config(config.clone()) else { return Ok(()) };
    let mut inner: &dyn Error = &error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    Err(inner.to_string())
}

/// What is wrong with the files of a port's TLS.
#[derive(Debug)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    Unreadable {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not what it should be.
    Malformed {
        /// Which one.
        path: PathBuf,
        /// What was looked for.
        kind: &'static str,
        /// Why it was not found.
        reason: String,
    },
    /// Certificate and key are not one pair.
    Pair {
        /// The file of the certificate.
        cert: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// Why.
        reason: String,
    },
}

impl TlsError {
    fn malformed(path: &Path, kind: &'static str, reason: &dyn Error) -> Self {
        Self::Malformed { path: path.to_owned(), kind, reason: reason.to_string() }
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { path, source } => {
                write!(f, "{}: cannot be read: {source}", path.display())
            }
            Self::Malformed { path, kind, reason } => {
                write!(f, "{}: has no {kind} in PEM that can be used: {reason}", path.display())
            }
            Self::Pair { cert, key, reason } => {
                let (cert, key) = (cert.display(), key.display());
                write!(f, "{key}: the key does not match the certificate in {cert}: {reason}")
            }
        }
    }
}

impl Error for TlsError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unreadable { source, .. } => Some(source),
            _ => None,
        }
    }
}
