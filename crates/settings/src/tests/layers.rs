//! Which layer wins, and what a layer is refused for.

use super::{Command, faults, file, run, serve};
use crate::{ServeSettings, SettingsError, tree};

/// A value for each key that is not its default.
const OTHERS: &[(&str, &str)] = &[
    ("model", "tiny-dsv3"),
    ("load-format", "dummy"),
    ("num-speculative-tokens", "5"),
    ("index-share", "off"),
    ("draft-sampling", "sampled"),
    ("spec-decode-acceptance-length", "2.5"),
    ("spec-decode-acceptance-rate", "0.1"),
    ("dtype", "float32"),
    ("index-cache-dtype", "fp8"),
    ("block-size", "32"),
    ("num-blocks", "77"),
    ("kv-cache-memory", "512"),
    ("max-num-seqs", "3"),
    ("max-num-batched-tokens", "100"),
    ("max-model-len", "1000"),
    ("max-queued-requests", "9"),
    ("max-queue-wait", "0.1"),
    ("drafting", "fixed"),
    ("output-mode", "deferred"),
    ("scheduling-policy", "priority"),
    ("priority-aging-steps", "50"),
    ("chunk-alignment", "8"),
    ("long-prefill-token-threshold", "256"),
    ("no-prefix-caching", "true"),
    ("device", "cpu"),
    ("gpu-memory-utilization", "0.5"),
    ("no-gpu-graphs", "true"),
    ("threads", "2"),
    ("host", "::1"),
    ("port", "4"),
    ("served-model-name", "a \"b\" = [c]"),
    ("drain-timeout", "0"),
    ("max-request-bytes", "4096"),
    ("max-buffered-steps", "7"),
    ("keepalive-interval", "8"),
    ("keepalive-timeout", "9"),
    ("max-connection-age", "3600"),
    ("reflection", "on"),
    ("allow-insecure-public", "true"),
    ("tls-cert", "a/cert.pem"),
    ("tls-key", "a/key.pem"),
    ("tls-client-ca", "a/ca.pem"),
    ("api-keys-file", "keys"),
    ("admin-keys-file", "admin"),
    ("max-concurrent-per-key", "6"),
    ("http-host", "127.0.0.2"),
    ("http-port", "0"),
    ("metrics-compat", "vllm"),
    ("http-prompts", "off"),
    ("allow-insecure-public-http", "true"),
    ("smg-port", "1"),
    ("vllm-port", "2"),
    ("compat-host", "127.0.0.3"),
    ("log-format", "json"),
    ("otlp-endpoint", "http://localhost:4317"),
    ("service-name", "x"),
];

/// The settings as parsed, which another rule may refuse.
fn parsed(args: &[&str], variables: &[(&str, &str)]) -> ServeSettings {
    let (command, _) = run(&[&["serve"], args].concat(), variables).unwrap();
    let Command::Serve(args) = command else { panic!("the command is serve") };
    args.settings
}

#[test]
fn every_key_can_be_set_in_every_layer_and_is_written_back() {
    let keys = tree::keys();
    let names: Vec<&str> = keys.iter().map(|key| key.name.as_str()).collect();
    assert_eq!(names, OTHERS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    let flags: Vec<String> = OTHERS
        .iter()
        .zip(&keys)
        .map(|((name, value), key)| match key.is_switch() {
            true => format!("--{name}"),
            false => format!("--{name}={value}"),
        })
        .collect();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let by_flags = parsed(&flags, &[]);
    let variables: Vec<String> = keys.iter().map(tree::Key::variable).collect();
    let variables: Vec<(&str, &str)> =
        variables.iter().zip(OTHERS).map(|(name, (_, value))| (name.as_str(), *value)).collect();
    assert_eq!(parsed(&[], &variables), by_flags);
    let written = by_flags.to_toml();
    let (_folder, name) = file(&written);
    assert_eq!(parsed(&["--config", &name], &[]), by_flags, "{written}");
    assert_eq!(parsed(&[], &[("TANDEM_CONFIG", &name)]), by_flags);
    // Each of them differs from what it is without: every key was written.
    let default: toml::Table = ServeSettings::default().to_toml().parse().unwrap();
    let written: toml::Table = written.parse().unwrap();
    for key in keys {
        let [default, other] = [&default, &written]
            .map(|table| table.get(&key.section).and_then(|section| section.get(&key.name)));
        assert!(other.is_some() && other != default, "{}: {other:?}", key.name);
    }
}

#[test]
fn the_defaults_are_written_back() {
    let default = ServeSettings::default();
    let (_folder, name) = file(&default.to_toml());
    assert_eq!(serve(&["--config", &name], &[]).unwrap(), default);
    assert_eq!(serve(&[], &[]).unwrap(), default);
}

#[test]
fn flags_win_over_variables_over_the_file_over_defaults() {
    let (_folder, name) = file(
        "[engine]\nblock-size = 32\nmax-num-seqs = 5\nthreads = 2\nno-prefix-caching = true\n\
         [listen]\nport = 1\n",
    );
    let variables = [
        ("TANDEM_MAX_NUM_SEQS", "6"),
        ("TANDEM_THREADS", "3"),
        ("TANDEM_NO_PREFIX_CACHING", "false"),
        ("TANDEM_PORT", ""),
        ("OTHER_PORT", "2"),
    ];
    let settings = serve(&["--threads", "4", "--config", &name], &variables).unwrap();
    let engine = &settings.engine;
    assert_eq!((engine.chunk_alignment, engine.block_size), (64, 32));
    assert_eq!((engine.max_num_seqs, engine.threads), (6, Some(4)));
    assert!(!engine.no_prefix_caching, "a variable turns a switch of the file off");
    assert_eq!(settings.listen.port, 1, "an empty variable says nothing");
}

#[test]
fn the_file_of_a_flag_wins_over_that_of_the_variable() {
    let (_one, one) = file("[listen]\nport = 1\n");
    let (_two, two) = file("[listen]\nport = 2\n");
    let settings = serve(&["--config", &one], &[("TANDEM_CONFIG", &two)]).unwrap();
    assert_eq!(settings.listen.port, 1);
}

#[test]
fn other_commands_take_their_part_of_the_engine_section() {
    let (_folder, name) = file("[engine]\nmodel = \"b\"\nblock-size = 32\n[listen]\nport = 1\n");
    let variables = [("TANDEM_CONFIG", name.as_str()), ("TANDEM_HOST", "127.0.0.2")];
    let generate = |args: &[&str]| {
        let (command, _) = run(&[&["generate"], args].concat(), &variables).unwrap();
        let Command::Generate(args) = command else { panic!("the command is generate") };
        args
    };
    assert_eq!(generate(&[]).engine.block_size, 16, "the file only with --config");
    let args = generate(&["--config", &name]);
    assert_eq!((args.engine.block_size, args.port), (32, None));
    let (command, _) = run(&["score"], &[("TANDEM_MODEL", "b"), ("TANDEM_THREADS", "1")]).unwrap();
    assert!(matches!(command, Command::Score(args) if args.model == "b"));
    assert!(run(&["inspect"], &[("TANDEM_PORT", "x"), ("TANDEM_SPEED", "1")]).is_ok());
}

#[test]
fn all_values_that_flags_refuse_are_named_with_their_place() {
    let (_folder, name) = file(
        "[engine]\nmax-num-seqs = 0\nindex-share = \"never\"\nmodel = [\"a\"]\nthreads = 2.5\n\
         [listen]\nport = 65536\nhost = \"localhost\"\nallow-insecure-public = 1\n",
    );
    let variables = [("TANDEM_PORT", "tcp://127.0.0.1:1"), ("TANDEM_NO_PREFIX_CACHING", "yes")];
    // What overrides them does not make them right.
    let found = faults(&["--config", &name, "--port", "1"], &variables);
    let expected = [
        (format!("engine.model in {name}: "), "single value"),
        (format!("engine.index-share in {name}: "), "[possible values: auto, on, off]"),
        (format!("engine.max-num-seqs in {name}: "), "1..=65536"),
        ("TANDEM_NO_PREFIX_CACHING: ".to_owned(), "`yes` is neither true nor false"),
        (format!("engine.threads in {name}: "), "'2.5' for '--threads <THREADS>'"),
        (format!("listen.host in {name}: "), "'localhost'"),
        (format!("listen.port in {name}: "), "65536 is not in 0..=65535"),
        ("TANDEM_PORT: ".to_owned(), "'tcp://127.0.0.1:1' for '--port <PORT>'"),
        (format!("listen.allow-insecure-public in {name}: "), "neither true nor false"),
    ];
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (fault, (place, reason)) in found.iter().zip(&expected) {
        assert!(fault.starts_with(place) && fault.contains(reason), "{fault}\n{place}{reason}");
    }
}

#[test]
fn what_does_not_exist_is_refused() {
    let (_folder, name) =
        file("port = 1\n[engine]\nmax_num_seqs = 1\nspeed = 2\nport = 1\n[metrics]\na = 1\n");
    let found = faults(&["--config", &name], &[("TANDEM_SPEED", "1")]);
    let expected = [
        "`max_num_seqs` in [engine] is `max-num-seqs` of [engine]",
        "`port` in [engine] is `port` of [listen]",
        "there is no setting `speed` in [engine]",
        "there is no section [metrics], but engine, listen, tls, auth, http, compat, telemetry",
        "`port` outside the sections is `port` of [listen]",
    ];
    let mut expected = expected.map(|fault| format!("{name}: {fault}")).to_vec();
    expected.push(
        "TANDEM_SPEED: there is no such setting; correct the name or unset the variable".into(),
    );
    let sorted = |mut faults: Vec<String>| {
        faults.sort();
        faults
    };
    assert_eq!(sorted(found), sorted(expected));
}

#[test]
fn a_file_that_is_none_is_named() {
    let error = serve(&["--config", "no/such.toml"], &[]).unwrap_err();
    assert!(error.to_string().starts_with("no/such.toml: cannot be read: "), "{error}");
    let (_folder, name) = file("[engine\n");
    let error = serve(&[], &[("TANDEM_CONFIG", &name)]).unwrap_err();
    assert!(matches!(error, SettingsError::NotToml { .. }));
    let text = error.to_string();
    assert!(text.starts_with(&format!("{name}: ")) && text.contains("line 1"), "{text}");
}

#[test]
fn the_command_line_keeps_its_own_errors() {
    let error = serve(&["--port", "x"], &[("TANDEM_PORT", "y")]).unwrap_err();
    assert!(matches!(error, SettingsError::Arguments(_)), "{error}");
}
