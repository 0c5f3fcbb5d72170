//! Tells the program which compiler builds it.

use std::process::Command;

fn main() {
    let rustc = std::env::var_os("RUSTC").expect("cargo names the compiler");
    let told = Command::new(rustc).arg("--version").output().expect("the compiler runs");
    let version = String::from_utf8(told.stdout).expect("the compiler writes UTF-8");
    println!("cargo::rustc-env=BENCH_RUSTC={}", version.trim());
    println!("cargo::rerun-if-changed=build.rs");
}
