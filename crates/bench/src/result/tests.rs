//! Documents that are written and read.

use std::fs;

use super::*;
use crate::provenance::Fact;
use crate::sample;

fn document() -> ResultFile {
    let mut file = sample::file(&["A", "B"]);
    for (server, slowness) in [("A", 1.0), ("B", 1.1)] {
        file.push(sample::run(("concurrency 4", server), 0, 4, slowness)).unwrap();
    }
    file.judge_pairs("A", "B");
    file
}

#[test]
fn what_is_written_reads_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("result.json");
    fs::write(&path, "an older one").unwrap();
    let file = document();
    file.write(&path).unwrap();
    assert!(ResultFile::read(&path).unwrap() == file);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no part is left");
    let json: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(json["schema"], SCHEMA);
    assert_eq!(json["runs"][1]["load"]["closed"]["concurrency"], 4);
}

#[test]
fn a_file_that_cannot_be_written_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // A folder has the name.
    let path = folder.path().join("result.json");
    fs::create_dir(&path).unwrap();
    assert!(matches!(document().write(&path), Err(ResultFileError::Io(_))));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_run_of_an_unknown_server_is_not_taken() {
    let mut file = sample::file(&["A"]);
    let error = file.push(sample::run(("concurrency 4", "B"), 0, 4, 1.0)).unwrap_err();
    assert!(error.to_string().contains("the server B"), "{error}");
    assert_eq!(file.runs().len(), 0);
}

#[test]
fn documents_of_other_forms_are_refused_by_name() {
    let json = serde_json::to_value(document()).unwrap();
    let without = |key: &str| {
        let mut json = json.clone();
        json.as_object_mut().unwrap().remove(key);
        ResultFile::from_json(&json.to_string()).unwrap_err()
    };
    assert!(matches!(without("schema"), ResultFileError::Schema(None)));
    let error = without("provenance");
    assert!(error.to_string().contains("provenance"), "{error}");
    let with = |key: &str, value: serde_json::Value| {
        let mut json = json.clone();
        json[key] = value;
        ResultFile::from_json(&json.to_string()).unwrap_err().to_string()
    };
    let newer = with("schema", "tandem-bench/2".into());
    assert!(newer.contains("tandem-bench/2") && newer.contains(SCHEMA), "{newer}");
    assert!(with("surprise", 1.into()).contains("surprise"));
    let mut no_servers = json["provenance"].clone();
    no_servers["servers"] = serde_json::json!([]);
    assert!(with("provenance", no_servers).contains("the server A"));
    assert!(matches!(ResultFile::from_json("{"), Err(ResultFileError::Malformed(_))));
}

#[test]
fn a_server_of_which_more_is_known_takes_its_place() {
    let mut file = document();
    let known = Fact::Known("0.2.0".to_owned());
    file.add_server(Server { version: known.clone(), ..Server::untold("B", "grpc://b") });
    assert_eq!(file.provenance().servers.len(), 2);
    assert_eq!(file.server("B").unwrap().version, known);
}

#[test]
fn a_workload_is_known_by_its_requests() {
    let request = |id| Planned::greedy(crate::Prompt::TokenIds(vec![id]), 8);
    let of = |id| Workload::of("fixed", &[request(id)]);
    assert_eq!(of(1), of(1));
    assert_ne!(of(1).sha256, of(2).sha256);
    // The same prompts with other numbers of drafts are the same work.
    let drafted = Planned { num_speculative_tokens: Some(3), ..request(1) };
    assert_eq!(Workload::of("fixed", &[drafted]), of(1));
    assert_ne!(Workload::of("fixed", &[Planned { max_tokens: 9, ..request(1) }]), of(1));
}
