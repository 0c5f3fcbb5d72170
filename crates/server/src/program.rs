//! What the program is: its version, and what it computes with.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use serving::ProgramInfo;

/// The package's version, with the commit that `cargo xtask` names when it builds.
pub(crate) fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let package = env!("CARGO_PKG_VERSION");
        match option_env!("TANDEM_COMMIT") {
            Some(commit) => format!("{package}+{commit}"),
            None => package.to_owned(),
        }
    });
    &VERSION
}

/// What clients are told, once an engine runs on `device` and its threads are decided.
pub(crate) fn info(device: &str) -> ProgramInfo {
    let libtorch = libtorch_version().map(|version| ("libtorch".to_owned(), version));
    ProgramInfo {
        version: version().to_owned(),
        device: device.to_owned(),
        n_threads: u32::try_from(rayon::current_num_threads()).unwrap_or(u32::MAX),
        libraries: HashMap::from_iter(libtorch),
    }
}

/// Of the libtorch that is loaded: what lies beside it says so.
fn libtorch_version() -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let is_libtorch = |path: &&str| path.ends_with("/libtorch_cpu.so");
    let library = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(is_libtorch);
    let folder = Path::new(library?).parent()?.parent()?;
    // libtorch by itself has the one, that of a Python package the other.
    let told = fs::read_to_string(folder.join("build-version"));
    told.map(|text| text.trim().to_owned()).ok().or_else(|| {
        let python = fs::read_to_string(folder.join("version.py")).ok()?;
        let line = python.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
        Some(line.trim_matches(['\'', '"']).to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_knows_what_it_computes_with() {
        let info = info("cpu");
        assert!(info.version.starts_with(env!("CARGO_PKG_VERSION")));
        assert!(info.n_threads >= 1);
        // A tensor makes sure that the linker keeps the library.
        assert_eq!(tch::Tensor::from_slice(&[1_i64]).size(), [1]);
        assert!(info.libraries["libtorch"].starts_with("2."), "{info:?}");
    }
}
