//! What the control plane pulls in: it must build without libtorch, and up to the engine without a
//! C compiler. Services need one for TLS and compression.

/// The highest layer that builds without a C compiler: the engine's.
pub(super) const ENGINE_LAYER: u64 = 3;

/// Packages that bind libtorch.
pub(super) const LIBTORCH: &[&str] = &["tch", "torch-sys"];

/// Packages that compile or bind foreign code.
pub(super) const FOREIGN: &[&str] = &["bindgen", "cc", "cmake", "tch", "torch-sys"];

/// The faults of a package list as `cargo tree --prefix none` prints it, one package a line.
pub(super) fn check(tree: &str, forbidden: &[&str]) -> Vec<String> {
    let mut found: Vec<&str> = tree
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| forbidden.contains(name))
        .collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().map(|name| format!("the control plane pulls in `{name}`")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_packages_are_found_once() {
        assert_eq!(check("engine v0.1.0 (x)\ncc-like v1.0.0\n\n", FOREIGN), [""; 0]);
        let tree = "engine v0.1.0\ntorch-sys v0.24.0\ncc v1.2.0\n\nengine v0.1.0\ncc v1.2.0 (*)\n";
        let expected =
            ["the control plane pulls in `cc`", "the control plane pulls in `torch-sys`"];
        assert_eq!(check(tree, FOREIGN), expected);
        assert_eq!(check(tree, LIBTORCH), expected[1..]);
    }
}
