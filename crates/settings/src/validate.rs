//! Rules that more than one setting takes part in, and files that must be there.

use std::fs::File;
use std::net::IpAddr;
use std::path::PathBuf;

use crate::sections::is_public;
use crate::{EngineSettings, MetricsCompatArg, PolicyArg, ServeSettings, SettingsError, Sources};

impl EngineSettings {
    /// Checks `[engine]` as far as that needs no checkpoint.
    ///
    /// # Errors
    ///
    /// All faults at once, each with the setting, the place of its value and the way out.
    pub fn validate(&self, sources: &Sources) -> Result<(), SettingsError> {
        SettingsError::of_faults(self.faults(sources))
    }

    fn faults(&self, sources: &Sources) -> Vec<String> {
        let mut faults = Vec::new();
        if let (PolicyArg::Fcfs, Some(steps)) = (self.scheduling_policy, self.priority_aging_steps)
        {
            let name = sources.name("--priority-aging-steps", steps);
            faults.push(format!("{name}: only with --scheduling-policy priority"));
        }
        let (threshold, block_size) = (self.long_prefill_token_threshold, self.block_size);
        if threshold != 0 && threshold < block_size {
            let name = sources.name("--long-prefill-token-threshold", threshold);
            let block_size = sources.name("--block-size", block_size);
            faults.push(format!("{name}: give at least {block_size}, or 0 for no limit"));
        }
        let schedules = [
            ("--spec-decode-acceptance-length", self.spec_decode_acceptance_length),
            ("--spec-decode-acceptance-rate", self.spec_decode_acceptance_rate),
        ];
        let named = |(flag, value): (&str, Option<f64>)| Some(sources.name(flag, value?));
        let schedules: Vec<String> = schedules.into_iter().filter_map(named).collect();
        match &schedules[..] {
            [length, rate] => faults.push(format!("{length}: cannot be used with {rate}")),
            [name] if self.num_speculative_tokens == 0 => faults.push(format!(
                "{name}: there are no drafts to accept; give --num-speculative-tokens"
            )),
            _ => {}
        }
        faults
    }
}

impl ServeSettings {
    /// Checks the tree as far as that needs no checkpoint.
    ///
    /// # Errors
    ///
    /// All faults at once, each with the setting, the place of its value and the way out.
    pub fn validate(&self, sources: &Sources) -> Result<(), SettingsError> {
        let mut faults = self.engine.faults(sources);
        faults.extend(self.address_faults(sources));
        faults.extend(self.lone_faults(sources));
        faults.extend(self.file_faults(sources));
        if let Some(url) = &self.telemetry.otlp_endpoint
            && !url.starts_with("http://")
        {
            let name = sources.name("--otlp-endpoint", url);
            faults.push(format!("{name}: give http://HOST:PORT; spans are sent without TLS"));
        }
        SettingsError::of_faults(faults)
    }

    /// Addresses that others can reach, and nobody said that they may.
    fn address_faults(&self, sources: &Sources) -> Vec<String> {
        let Self { listen, tls, http, compat, .. } = self;
        let is_encrypted = tls.tls_cert.is_some() && tls.tls_key.is_some();
        let has_compat = compat.smg_port.or(compat.vllm_port).is_some();
        let insecure = listen.allow_insecure_public;
        let listeners: [(&str, IpAddr, bool, &str); 3] = [
            (
                "--host",
                listen.host,
                insecure || is_encrypted,
                "give --tls-cert and --tls-key, or --allow-insecure-public",
            ),
            (
                "--http-host",
                http.http_host,
                http.allow_insecure_public_http || http.http_port.is_none(),
                "this listener has no TLS; give a loopback address, or \
                 --allow-insecure-public-http",
            ),
            (
                "--compat-host",
                compat.compat_host,
                insecure || !has_compat,
                "these listeners have no TLS; give a loopback address, or \
                 --allow-insecure-public",
            ),
        ];
        let refused =
            listeners.into_iter().filter(|(_, host, is_fine, _)| is_public(*host) && !is_fine);
        let fault = |(flag, host, _, way_out): (&str, IpAddr, bool, &str)| {
            let name = sources.name(flag, host);
            format!("{name}: others can reach this address: {way_out}")
        };
        refused.map(fault).collect()
    }

    /// Settings that mean nothing without another one.
    fn lone_faults(&self, sources: &Sources) -> Vec<String> {
        let Self { tls, auth, http, .. } = self;
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        let (cert, key) = (path(&tls.tls_cert), path(&tls.tls_key));
        let per_key = auth.max_concurrent_per_key.map(|n| n.to_string());
        let metrics = (http.metrics_compat == MetricsCompatArg::Vllm).then(|| "vllm".to_owned());
        let pairs = [
            ("--tls-cert", &cert, "--tls-key", key.is_some()),
            ("--tls-key", &key, "--tls-cert", cert.is_some()),
            ("--tls-client-ca", &path(&tls.tls_client_ca), "--tls-cert", cert.is_some()),
            ("--max-concurrent-per-key", &per_key, "--api-keys-file", auth.api_keys_file.is_some()),
            ("--metrics-compat", &metrics, "--http-port", http.http_port.is_some()),
        ];
        let lone = pairs.into_iter().filter(|(_, _, _, has_other)| !has_other);
        let fault = |(flag, value, other, _): (&str, &Option<String>, &str, bool)| {
            let value = value.as_ref()?;
            Some(format!("{}: give {other}, too", sources.name(flag, value)))
        };
        lone.filter_map(fault).collect()
    }

    /// Files that cannot be opened.
    fn file_faults(&self, sources: &Sources) -> Vec<String> {
        let Self { tls, auth, .. } = self;
        let files = [
            ("--tls-cert", &tls.tls_cert),
            ("--tls-key", &tls.tls_key),
            ("--tls-client-ca", &tls.tls_client_ca),
            ("--api-keys-file", &auth.api_keys_file),
            ("--admin-keys-file", &auth.admin_keys_file),
        ];
        let fault = |(flag, file): (&str, &Option<PathBuf>)| {
            let file = file.as_ref()?;
            let error = File::open(file).err()?;
            let name = sources.name(flag, file.display());
            Some(format!("{name}: cannot be read: {error}; correct the path or its permissions"))
        };
        files.into_iter().filter_map(fault).collect()
    }
}
