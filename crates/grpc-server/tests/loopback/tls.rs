//! Certificates of servers and clients.

use std::path::{Path, PathBuf};

use grpc_api::inference::v1::inference_service_client::InferenceServiceClient;
use grpc_server::{Security, ServeConfig, Tls};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Identity};

use crate::harness::{Server, Setup, unary};

/// An authority, and PEM files of what it has signed.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: tempfile::TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { issuer, folder: tempfile::tempdir().unwrap() }
    }

    fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    fn ca_file(&self) -> PathBuf {
        self.write("ca.pem", &self.issuer.pem())
    }

    /// Certificate and key for `localhost`, in PEM.
    fn sign(&self) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// The same as files.
    fn files(&self) -> (PathBuf, PathBuf) {
        let (cert, key) = self.sign();
        (self.write("cert.pem", &cert), self.write("key.pem", &key))
    }
}

async fn server(tls: Tls) -> Server {
    let security = Security { tls: Some(tls), ..Security::default() };
    Server::start_secured(Setup::default(), ServeConfig::default(), security).await
}

/// Whether a client that trusts `authority` is served.
async fn is_served(server: &Server, authority: &Authority, identity: Option<Identity>) -> bool {
    let trusted = Certificate::from_pem(authority.issuer.pem());
    let mut tls = ClientTlsConfig::new().ca_certificate(trusted).domain_name("localhost");
    if let Some(identity) = identity {
        tls = tls.identity(identity);
    }
    let channel = Channel::from_shared(format!("https://{}", server.address)).unwrap();
    let mut client = InferenceServiceClient::new(channel.tls_config(tls).unwrap().connect_lazy());
    client.generate(unary(&[1], 2)).await.is_ok()
}

#[tokio::test]
async fn only_those_who_trust_the_certificate_are_served() {
    let authority = Authority::new();
    let (cert, key) = authority.files();
    let server = server(Tls::read(&cert, &key, None).unwrap()).await;
    assert!(is_served(&server, &authority, None).await);
    assert!(!is_served(&server, &Authority::new(), None).await);
    // In the clear.
    assert!(server.client().generate(unary(&[1], 2)).await.is_err());
}

#[tokio::test]
async fn with_an_authority_of_clients_only_theirs_are_served() {
    let (authority, clients) = (Authority::new(), Authority::new());
    let (cert, key) = authority.files();
    let server = server(Tls::read(&cert, &key, Some(&clients.ca_file())).unwrap()).await;
    let identity = |of: &Authority| {
        let (cert, key) = of.sign();
        Some(Identity::from_pem(cert, key))
    };
    assert!(is_served(&server, &authority, identity(&clients)).await);
    assert!(!is_served(&server, &authority, identity(&authority)).await);
    assert!(!is_served(&server, &authority, None).await);
}

#[test]
fn faults_name_the_file() {
    let authority = Authority::new();
    let (cert, key) = authority.files();
    let (_, other_key) = authority.sign();
    let other_key = authority.write("other.pem", &other_key);
    let not_pem = authority.write("text", "no PEM here");
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let broken = authority.write("broken.pem", broken);
    let missing = Path::new("no/such/file");
    let read = |cert: &Path, key: &Path, client_ca: Option<&Path>| {
        Tls::read(cert, key, client_ca).unwrap_err().to_string()
    };
    let cases = [
        (missing, read(missing, &key, None), "cannot be read"),
        (missing, read(&cert, missing, None), "cannot be read"),
        (missing, read(&cert, &key, Some(missing)), "cannot be read"),
        (&not_pem, read(&not_pem, &key, None), "no section BEGIN CERTIFICATE"),
        (&key, read(&key, &key, None), "no section BEGIN CERTIFICATE"),
        (&cert, read(&cert, &cert, None), "has no private key"),
        (&other_key, read(&cert, &other_key, None), "does not match the certificate in"),
        (&not_pem, read(&cert, &key, Some(&not_pem)), "no section BEGIN CERTIFICATE"),
        (&broken, read(&cert, &key, Some(&broken)), "certificate of an authority"),
    ];
    for (path, text, fault) in cases {
        assert!(text.starts_with(&path.display().to_string()), "{text}");
        assert!(text.contains(fault), "{text}");
    }
    assert!(read(&broken, &key, None).contains("broken.pem"));
}
