//! The build script of the binding to libtorch links the ROCm half of a PyTorch where it lies
//! beside the other libraries. A program uses nothing of it, so it must not be needed where the
//! program runs.

use std::fs;
use std::path::Path;
use std::process::Command;

/// A program that is linked as the binding is: `-l` for each library that the folder has.
const PROGRAM: &str = r#"
#[link(name = "torch_cpu")]
// SAFETY: the type is that of `stub.c`.
unsafe extern "C" {
    safe fn at_answer() -> i32;
}
fn main() {
    assert_eq!(at_answer(), 42);
}
"#;

#[test]
fn the_rocm_half_is_linked_but_not_needed_to_run() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rocm-link");
    fs::create_dir_all(&folder).unwrap();
    let run = |program: &str, args: &[&str]| {
        let mut command = Command::new(program);
        command.args(args).current_dir(&folder).env("LD_LIBRARY_PATH", ".");
        command.output().unwrap()
    };
    let succeeds = |program: &str, args: &[&str]| {
        let output = run(program, args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    fs::write(folder.join("stub.c"), "int NAME(void) { return 42; }").unwrap();
    for (library, function) in [("torch_hip", "hip"), ("torch_cpu", "answer"), ("c10_hip", "c10")] {
        let (file, name) = (format!("lib{library}.so"), format!("-DNAME=at_{function}"));
        succeeds("cc", &["-shared", "-fPIC", "-o", &file, &name, "stub.c"]);
    }
    fs::write(folder.join("main.rs"), PROGRAM).unwrap();
    let link = ["-ltorch_hip", "-ltorch_cpu", "-lc10_hip", "-Lnative=."];
    succeeds("rustc", &[&["--edition=2024", "main.rs"], &link[..]].concat());
    for library in ["torch_hip", "c10_hip"] {
        fs::remove_file(folder.join(format!("lib{library}.so"))).unwrap();
    }
    succeeds("./main", &[]);
    fs::remove_file(folder.join("libtorch_cpu.so")).unwrap();
    let output = run("./main", &[]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("libtorch_cpu.so"));
}
