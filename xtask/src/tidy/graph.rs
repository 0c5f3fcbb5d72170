//! The crate graph: layers, planes, and who may see whom.

use crate::workspace::Member;

/// Every member with its layer and plane. A new crate is an architectural change: it is added
/// here, in its manifest and in ARCHITECTURE.md at once.
const CRATES: &[(&str, u64, &str)] = &[
    ("attention-backends", 2, "device"),
    ("batch-layout", 0, "device"),
    ("bundled-checkpoints", 0, "shared"),
    ("engine", 3, "control"),
    ("engine-sim", 4, "control"),
    ("engine-types", 0, "control"),
    ("grpc-api", 0, "control"),
    ("grpc-codegen", 0, "tool"),
    ("grpc-server", 4, "control"),
    ("integration-tests", 7, "binary"),
    ("kernels", 0, "device"),
    ("kv-block-manager", 1, "control"),
    ("model-config", 0, "shared"),
    ("model-runner", 5, "device"),
    ("models", 4, "device"),
    ("nn-layers", 2, "device"),
    ("sampler", 1, "device"),
    ("scheduler", 2, "control"),
    ("server", 6, "binary"),
    ("spec-decode", 3, "device"),
    ("tokenization", 1, "control"),
    ("torch-ext", 0, "device"),
    ("weights", 1, "device"),
    ("xtask", 6, "tool"),
];

/// The contract between the planes, which both of them see.
const CONTRACT: &str = "engine-types";

/// The faults of the graph.
pub(super) fn check(members: &[Member], architecture: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, ..) in CRATES {
        if !members.iter().any(|member| member.name == *name) {
            faults.push(format!("{name}: in tidy's table, but no member of the workspace"));
        }
    }
    for member in members {
        let name = &member.name;
        let Some(&(_, layer, plane)) = CRATES.iter().find(|(known, ..)| known == name) else {
            faults.push(format!("{name}: a crate that tidy's table does not know"));
            continue;
        };
        if member.layer != Some(layer) || member.plane.as_deref() != Some(plane) {
            faults.push(format!("{name}: its manifest does not say layer {layer}, plane {plane}"));
        }
        if !architecture.contains(&format!("`{name}`")) && !matches!(plane, "tool" | "binary") {
            faults.push(format!("{name}: ARCHITECTURE.md does not mention it"));
        }
        for (dependency, is_dev) in edges(member) {
            faults.extend(check_edge((name, layer, plane), dependency, is_dev));
        }
    }
    faults
}

fn edges(member: &Member) -> impl Iterator<Item = (&str, bool)> {
    let normal = member.dependencies.iter().map(|name| (name.as_str(), false));
    normal.chain(member.dev_dependencies.iter().map(|name| (name.as_str(), true)))
}

fn check_edge(
    (name, layer, plane): (&str, u64, &str),
    dependency: &str,
    is_dev: bool,
) -> Option<String> {
    let Some(&(_, to_layer, to_plane)) = CRATES.iter().find(|(known, ..)| *known == dependency)
    else {
        return Some(format!(
            "{name}: depends on `{dependency}`, which tidy's table does not know"
        ));
    };
    if to_layer >= layer && !is_dev {
        return Some(format!("{name} (layer {layer}) depends on {dependency} (layer {to_layer})"));
    }
    // Tests of the device plane may drive it with the real control plane, never the other way.
    let may_cross = plane == "binary"
        || to_plane == "shared"
        || dependency == CONTRACT
        || (is_dev && plane == "device");
    if plane != to_plane && !may_cross {
        return Some(format!("{name} ({plane} plane) depends on {dependency} ({to_plane} plane)"));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, dependencies: &[&str]) -> Member {
        let known = CRATES.iter().find(|(known, ..)| *known == name);
        Member {
            name: name.to_owned(),
            folder: std::path::PathBuf::new(),
            layer: known.map(|&(_, layer, _)| layer),
            plane: known.map(|&(.., plane)| plane.to_owned()),
            dependencies: dependencies.iter().map(|&name| name.to_owned()).collect(),
            dev_dependencies: vec![],
        }
    }

    fn faults_with(changed: Member) -> Vec<String> {
        let mut members: Vec<Member> = CRATES.iter().map(|(name, ..)| member(name, &[])).collect();
        members.retain(|member| member.name != changed.name);
        members.push(changed);
        let architecture: String = CRATES.iter().map(|(name, ..)| format!("`{name}` ")).collect();
        check(&members, &architecture)
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
        assert!(faults_with(member("new-crate", &[]))[0].contains("does not know"));
        let mut moved = member("engine", &[]);
        moved.layer = Some(2);
        assert!(faults_with(moved)[0].contains("does not say layer 3"));
    }

    #[test]
    fn a_misspelt_table_entry_is_found() {
        let members = [member("engine", &[])];
        let faults = check(&members, "`engine`");
        assert!(faults.iter().any(|fault| fault.starts_with("scheduler: in tidy's table")));
    }
}
