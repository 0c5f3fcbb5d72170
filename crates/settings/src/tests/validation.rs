//! Rules between settings.

use super::{Command, faults, file, run, serve};

/// Expects one fault that has each of `expected`.
fn refused(args: &[&str], variables: &[(&str, &str)], expected: &[&str]) {
    let found = faults(args, variables);
    assert_eq!(found.len(), 1, "{found:?}");
    for expected in expected {
        assert!(found[0].contains(expected), "{found:?}\nis without {expected}");
    }
}

#[test]
fn an_address_that_others_reach_needs_tls_or_a_word() {
    let ways = ["--tls-cert", "--tls-key", "--allow-insecure-public"];
    refused(&["--host", "0.0.0.0"], &[], &[&["--host 0.0.0.0: "], &ways[..]].concat());
    refused(&[], &[("TANDEM_HOST", "::")], &["--host :: (TANDEM_HOST): "]);
    for host in ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"] {
        assert!(serve(&["--host", host], &[]).is_ok(), "{host}");
    }
    assert!(serve(&["--host", "0.0.0.0", "--allow-insecure-public"], &[]).is_ok());
    let (_folder, pem) = file("");
    assert!(serve(&["--host", "0.0.0.0", "--tls-cert", &pem, "--tls-key", &pem], &[]).is_ok());
    let http = ["--http-host", "0.0.0.0", "--http-port", "1"];
    refused(&http, &[], &["--http-host 0.0.0.0: ", "--allow-insecure-public-http"]);
    assert!(serve(&[&http[..], &["--allow-insecure-public-http"]].concat(), &[]).is_ok());
    assert!(serve(&["--http-host", "0.0.0.0"], &[]).is_ok(), "it is off");
    for port in ["--smg-port", "--vllm-port"] {
        let compat = ["--compat-host", "0.0.0.0", port, "1"];
        refused(&compat, &[], &["--compat-host 0.0.0.0: ", "--allow-insecure-public"]);
        assert!(serve(&[&compat[..], &["--allow-insecure-public"]].concat(), &[]).is_ok());
    }
    assert!(serve(&["--compat-host", "0.0.0.0"], &[]).is_ok(), "they are off");
}

#[test]
fn prompts_over_http_need_no_key_only_where_calls_need_none() {
    let takes = |args: &[&str]| {
        let settings = serve(args, &[]).unwrap();
        settings.http.takes_prompts(&settings.auth)
    };
    assert!(takes(&[]) && !takes(&["--http-prompts", "off"]));
    let public = ["--http-host", "0.0.0.0", "--allow-insecure-public-http"];
    assert!(!takes(&public) && takes(&[&public[..], &["--http-prompts", "on"]].concat()));
    let keys = tempfile::NamedTempFile::new().unwrap();
    let keyed = ["--api-keys-file", keys.path().to_str().unwrap()];
    assert!(!takes(&keyed) && takes(&[&keyed[..], &["--http-prompts", "on"]].concat()));
}

#[test]
fn reflection_is_on_where_only_this_machine_listens() {
    let serves = |args: &[&str]| serve(args, &[]).unwrap().listen.serves_reflection();
    let public = ["--host", "0.0.0.0", "--allow-insecure-public"];
    assert!(serves(&[]) && !serves(&public));
    assert!(!serves(&["--reflection", "off"]));
    assert!(serves(&[&public[..], &["--reflection", "on"]].concat()));
}

#[test]
fn what_means_nothing_alone_is_refused() {
    let (_folder, pem) = file("");
    let pem = pem.as_str();
    refused(&["--tls-cert", pem], &[], &[pem, "give --tls-key, too"]);
    refused(&[], &[("TANDEM_TLS_KEY", pem)], &["(TANDEM_TLS_KEY): give --tls-cert, too"]);
    refused(&["--tls-client-ca", pem], &[], &["--tls-client-ca", "give --tls-cert, too"]);
    let per_key = ["--max-concurrent-per-key", "1"];
    refused(&per_key, &[], &["--max-concurrent-per-key 1: give --api-keys-file, too"]);
    refused(&["--metrics-compat", "vllm"], &[], &["--metrics-compat vllm: give --http-port, too"]);
    assert!(serve(&["--metrics-compat", "vllm", "--http-port", "0"], &[]).is_ok());
    assert!(serve(&[&per_key[..], &["--api-keys-file", pem]].concat(), &[]).is_ok());
}

#[test]
fn files_must_be_there() {
    for flag in ["--api-keys-file", "--admin-keys-file"] {
        refused(&[flag, "no/such"], &[], &[&format!("{flag} no/such: cannot be read: "), "path"]);
    }
    let found = faults(&["--tls-cert", "a", "--tls-key", "b", "--tls-client-ca", "c"], &[]);
    assert_eq!(found.len(), 3, "{found:?}");
}

#[test]
fn traces_go_to_a_url() {
    for url in ["localhost:4317", "https://collector:4317"] {
        refused(&["--otlp-endpoint", url], &[], &["--otlp-endpoint", "http://HOST:PORT"]);
    }
    assert!(serve(&["--otlp-endpoint", "http://collector:4317"], &[]).is_ok());
}

#[test]
fn the_engine_section_has_rules_of_its_own_for_every_command() {
    let (_folder, name) = file("[engine]\nlong-prefill-token-threshold = 15\nblock-size = 32\n");
    let place = format!("(engine.long-prefill-token-threshold in {name}): give at least");
    let block_size = format!("--block-size 32 (engine.block-size in {name}), or 0 for no limit");
    let config = ["--config", &name];
    refused(&config, &[], &["--long-prefill-token-threshold 15", &place, &block_size]);
    assert!(serve(&[&config[..], &["--block-size", "8"]].concat(), &[]).is_ok());
    refused(
        &["--priority-aging-steps", "5"],
        &[],
        &["--priority-aging-steps 5: only with --scheduling-policy priority"],
    );
    let [length, rate] = ["LENGTH", "RATE"].map(|of| format!("TANDEM_SPEC_DECODE_ACCEPTANCE_{of}"));
    refused(&[], &[(&length, "2"), (&rate, "0")], &["cannot be used with", &length, &rate]);
    let none = ["--num-speculative-tokens", "0"];
    refused(&none, &[(&length, "2")], &["no drafts to accept; give --num-speculative-tokens"]);
    let (command, sources) = run(&["generate", "--priority-aging-steps", "5"], &[]).unwrap();
    let Command::Generate(args) = command else { panic!("the command is generate") };
    assert!(args.engine.validate(&sources).is_err());
}

#[test]
fn all_faults_come_at_once() {
    let found =
        faults(&["--host", "0.0.0.0", "--tls-cert", "no/such", "--priority-aging-steps", "5"], &[]);
    assert_eq!(found.len(), 4, "{found:?}");
}
