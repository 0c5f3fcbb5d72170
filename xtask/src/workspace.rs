//! The workspace as cargo sees it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process;

/// The root folder: that of the workspace whose cargo runs this, since two checkouts that share a
/// target folder share this program.
pub(crate) fn root() -> PathBuf {
    let own = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let own = own.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    own.parent().expect("xtask lies in the workspace").to_owned()
}

/// A workspace member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    /// `package.metadata.tandem.layer`.
    pub(crate) layer: Option<u64>,
    /// `package.metadata.tandem.plane`.
    pub(crate) plane: Option<String>,
    /// Names of the members that it depends on, except for tests and benches.
    pub(crate) dependencies: Vec<String>,
    /// Names of the members that its tests and benches depend on.
    pub(crate) dev_dependencies: Vec<String>,
}

impl Member {
    /// Whether its plane is one of `planes`.
    pub(crate) fn is_of(&self, planes: &[&str]) -> bool {
        self.plane.as_deref().is_some_and(|plane| planes.contains(&plane))
    }
}

/// The members, sorted by name, and cargo's target folder.
pub(crate) fn load() -> Result<(Vec<Member>, PathBuf)> {
    let args = ["metadata", "--no-deps", "--format-version", "1"];
    let json = process::output(&mut process::cargo(args))?;
    parse(&serde_json::from_str(&json).context("cargo metadata printed no JSON")?)
}

fn parse(metadata: &Value) -> Result<(Vec<Member>, PathBuf)> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let names: Vec<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    let mut members = Vec::new();
    for package in packages {
        let manifest = package["manifest_path"].as_str().context("a package has no manifest")?;
        let tandem = &package["metadata"]["tandem"];
        let internal = |is_dev: bool| -> Vec<String> {
            let all = package["dependencies"].as_array().into_iter().flatten();
            all.filter(|dependency| (dependency["kind"] == "dev") == is_dev)
                .filter_map(|dependency| dependency["name"].as_str())
                .filter(|name| names.contains(name))
                .map(str::to_owned)
                .collect()
        };
        members.push(Member {
            name: package["name"].as_str().context("a package has no name")?.to_owned(),
            folder: Path::new(manifest).parent().context("a manifest has no folder")?.into(),
            layer: tandem["layer"].as_u64(),
            plane: tandem["plane"].as_str().map(str::to_owned),
            dependencies: internal(false),
            dev_dependencies: internal(true),
        });
    }
    members.sort_by(|a, b| a.name.cmp(&b.name));
    let target = metadata["target_directory"].as_str().context("there is no target folder")?;
    Ok((members, target.into()))
}

/// `-p NAME` for each member whose plane is one of `planes`.
pub(crate) fn packages_of(planes: &[&str]) -> Result<Vec<String>> {
    let (members, _) = load()?;
    let chosen = members.iter().filter(|member| member.is_of(planes));
    Ok(chosen.flat_map(|member| ["-p".to_owned(), member.name.clone()]).collect())
}
