//! The crate graph: layers, planes, and who may see whom.

use crate::workspace::Member;

/// A crate as it was designed.
struct Crate {
    name: &'static str,
    layer: u64,
    plane: &'static str,
    /// Members that it may depend on; its tests and benches may see more of its own plane.
    may_use: &'static [&'static str],
}

const fn known(
    name: &'static str,
    layer: u64,
    plane: &'static str,
    may_use: &'static [&'static str],
) -> Crate {
    Crate { name, layer, plane, may_use }
}

/// Every member. A new crate or edge is an architectural change: it is added here, in its manifest
/// and in ARCHITECTURE.md at once.
const CRATES: &[Crate] = &[
    known("chat-template", 1, "control", &["checkpoint-files"]),
    known("engine-types", 0, "control", &[]),
    known("grpc-api", 0, "control", &[]),
    known("settings", 0, "control", &[]),
    known("kv-block-manager", 1, "control", &["engine-types"]),
    known("tokenization", 1, "control", &["checkpoint-files", "engine-types"]),
    known("scheduler", 2, "control", &["engine-types", "kv-block-manager"]),
    known("grammar", 2, "control", &["engine-types", "tokenization"]),
    known(
        "fuzz",
        2,
        "control",
        &["chat-template", "checkpoint-files", "model-config", "tokenization"],
    ),
    known("engine", 3, "control", &["engine-types", "scheduler"]),
    known(
        "serving",
        4,
        "control",
        &["engine", "engine-types", "grammar", "grpc-api", "tokenization"],
    ),
    known("admin-http", 5, "control", &["engine-types", "grpc-api", "serving"]),
    known("grpc-server", 5, "control", &["grpc-api", "serving"]),
    known("compat-smg", 5, "control", &["checkpoint-files", "grpc-api", "serving"]),
    known("compat-vllm", 5, "control", &["grpc-api", "serving"]),
    known("soak", 5, "control", &["grpc-api"]),
    known("bench", 5, "control", &["grpc-api", "serving"]),
    known("telemetry", 5, "control", &["serving"]),
    known("terminal", 5, "control", &["chat-template", "grpc-api", "serving", "tokenization"]),
    known(
        "test-engine",
        5,
        "control",
        &["engine", "engine-types", "grpc-api", "scheduler", "serving", "tokenization"],
    ),
    known("engine-sim", 4, "control", &["engine-types", "kv-block-manager", "scheduler", "engine"]),
    known("bundled-checkpoints", 0, "shared", &[]),
    known("checkpoint-files", 0, "shared", &[]),
    known("model-config", 0, "shared", &[]),
    known("quantization", 0, "shared", &[]),
    known("batch-layout", 0, "device", &[]),
    known("gpu-runtime", 0, "device", &[]),
    known(
        "gpu-model",
        4,
        "device",
        &[
            "gpu-kernels",
            "gpu-runtime",
            "batch-layout",
            "model-config",
            "nn-layers",
            "torch-ext",
            "weights",
        ],
    ),
    known("gpu-kernels", 1, "device", &["gpu-runtime", "model-config"]),
    known("kernels", 1, "device", &["quantization"]),
    known("torch-ext", 0, "device", &[]),
    known("sampler", 1, "device", &["engine-types", "torch-ext"]),
    known(
        "weights",
        1,
        "device",
        &["checkpoint-files", "model-config", "quantization", "torch-ext"],
    ),
    known("attention-backends", 2, "device", &["batch-layout", "kernels", "torch-ext"]),
    known(
        "nn-layers",
        2,
        "device",
        &["kernels", "model-config", "quantization", "torch-ext", "weights"],
    ),
    known(
        "spec-decode",
        3,
        "device",
        &["attention-backends", "batch-layout", "engine-types", "sampler", "torch-ext"],
    ),
    known(
        "models",
        4,
        "device",
        &[
            "attention-backends",
            "batch-layout",
            "engine-types",
            "model-config",
            "nn-layers",
            "spec-decode",
            "torch-ext",
            "weights",
        ],
    ),
    known(
        "model-runner",
        5,
        "device",
        &[
            "attention-backends",
            "batch-layout",
            "engine-types",
            "gpu-model",
            "gpu-runtime",
            "model-config",
            "models",
            "sampler",
            "spec-decode",
            "torch-ext",
            "weights",
        ],
    ),
    known("server", 6, "binary", ANY),
    known("integration-tests", 7, "binary", ANY),
    known("grpc-codegen", 0, "tool", &[]),
    known("xtask", 6, "tool", &[]),
];

/// The programs wire everything.
const ANY: &[&str] = &["*"];

/// The contract between the planes, which both of them see.
const CONTRACT: &str = "engine-types";

/// The faults of the graph.
pub(super) fn check(members: &[Member], architecture: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for Crate { name, .. } in CRATES {
        if !members.iter().any(|member| member.name == *name) {
            faults.push(format!("{name}: in tidy's table, but no member of the workspace"));
        }
    }
    for member in members {
        let name = &member.name;
        let Some(designed) = find(name) else {
            faults.push(format!("{name}: a crate that tidy's table does not know"));
            continue;
        };
        let Crate { layer, plane, .. } = designed;
        if member.layer != Some(*layer) || member.plane.as_deref() != Some(plane) {
            faults.push(format!("{name}: its manifest does not say layer {layer}, plane {plane}"));
        }
        if !mentions(architecture, member) {
            faults.push(format!("{name}: ARCHITECTURE.md does not mention it"));
        }
        faults.extend(member.dependencies.iter().filter_map(|to| check_edge(designed, to)));
        faults.extend(member.dev_dependencies.iter().filter_map(|to| check_dev_edge(designed, to)));
    }
    faults
}

fn find(name: &str) -> Option<&'static Crate> {
    CRATES.iter().find(|known| known.name == name)
}

/// By the name of the crate, or of its folder where that lies at the root.
fn mentions(architecture: &str, member: &Member) -> bool {
    let folder = member.folder.file_name().unwrap_or_default().to_string_lossy();
    architecture.contains(&format!("`{}`", member.name))
        || architecture.contains(&format!("`{folder}/`"))
}

fn check_edge(from: &Crate, to: &str) -> Option<String> {
    let name = from.name;
    let Some(target) = find(to) else {
        return Some(format!("{name}: depends on `{to}`, which tidy's table does not know"));
    };
    if target.layer >= from.layer {
        let (layer, to_layer) = (from.layer, target.layer);
        return Some(format!("{name} (layer {layer}) depends on {to} (layer {to_layer})"));
    }
    if crosses(from, target) {
        let (plane, to_plane) = (from.plane, target.plane);
        return Some(format!("{name} ({plane} plane) depends on {to} ({to_plane} plane)"));
    }
    let is_designed = from.may_use == ANY || from.may_use.contains(&to);
    (!is_designed).then(|| format!("{name}: depends on {to}, which tidy's table does not allow"))
}

/// Tests may look upward in their own plane, and tests of the device plane may drive it with the
/// real control plane, never the other way.
fn check_dev_edge(from: &Crate, to: &str) -> Option<String> {
    let target = find(to)?;
    let is_fault = crosses(from, target) && from.plane != "device";
    is_fault.then(|| format!("{}: its tests depend on {to} ({} plane)", from.name, target.plane))
}

fn crosses(from: &Crate, to: &Crate) -> bool {
    let may_cross = from.plane == "binary" || to.plane == "shared" || to.name == CONTRACT;
    from.plane != to.plane && !may_cross
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, dependencies: &[&str]) -> Member {
        let known = find(name);
        Member {
            name: name.to_owned(),
            folder: std::path::PathBuf::from(name),
            layer: known.map(|known| known.layer),
            plane: known.map(|known| known.plane.to_owned()),
            dependencies: dependencies.iter().map(|&name| name.to_owned()).collect(),
            dev_dependencies: vec![],
        }
    }

    fn faults_with(changed: Member) -> Vec<String> {
        let mut members: Vec<Member> = CRATES.iter().map(|known| member(known.name, &[])).collect();
        members.retain(|member| member.name != changed.name);
        members.push(changed);
        let architecture: String =
            CRATES.iter().map(|known| format!("`{}` ", known.name)).collect();
        check(&members, &architecture)
    }

    #[test]
    fn the_table_keeps_its_own_rules() {
        for known in CRATES.iter().filter(|known| known.may_use != ANY) {
            let faults: Vec<_> =
                known.may_use.iter().filter_map(|to| check_edge(known, to)).collect();
            assert_eq!(faults, [""; 0]);
        }
    }

    #[test]
    fn downward_edges_within_a_plane_are_fine() {
        assert_eq!(faults_with(member("models", &["weights", "model-config"])), [""; 0]);
        assert_eq!(faults_with(member("spec-decode", &["engine-types"])), [""; 0]);
        assert_eq!(faults_with(member("server", &["models", "grpc-server"])), [""; 0]);
    }

    #[test]
    fn upward_edges_crossings_and_unknown_names_are_found() {
        let upward = faults_with(member("scheduler", &["engine"]));
        assert_eq!(upward, ["scheduler (layer 2) depends on engine (layer 3)"]);
        let crossing = faults_with(member("scheduler", &["batch-layout"]));
        assert!(crossing[0].contains("control plane) depends on batch-layout"), "{crossing:?}");
        let undesigned = faults_with(member("models", &["sampler"]));
        assert_eq!(undesigned, ["models: depends on sampler, which tidy's table does not allow"]);
        assert!(faults_with(member("new-crate", &[]))[0].contains("does not know"));
        let mut moved = member("engine", &[]);
        moved.layer = Some(2);
        assert!(faults_with(moved)[0].contains("does not say layer 3"));
    }

    #[test]
    fn tests_of_the_device_plane_alone_may_cross() {
        let mut runner = member("model-runner", &[]);
        runner.dev_dependencies = vec!["scheduler".to_owned(), "engine".to_owned()];
        assert_eq!(faults_with(runner), [""; 0]);
        let mut engine = member("engine", &[]);
        engine.dev_dependencies = vec!["engine-sim".to_owned(), "model-runner".to_owned()];
        assert_eq!(
            faults_with(engine),
            ["engine: its tests depend on model-runner (device plane)"]
        );
    }

    #[test]
    fn what_the_architecture_leaves_out_is_found() {
        let members: Vec<Member> = CRATES.iter().map(|known| member(known.name, &[])).collect();
        let faults = check(&members, "`xtask/`");
        assert_eq!(faults.len(), CRATES.len() - 1);
        assert!(faults.iter().all(|fault| fault.ends_with("ARCHITECTURE.md does not mention it")));
    }

    #[test]
    fn a_misspelt_table_entry_is_found() {
        let members = [member("engine", &[])];
        let faults = check(&members, "`engine`");
        assert!(faults.iter().any(|fault| fault.starts_with("scheduler: in tidy's table")));
    }
}
