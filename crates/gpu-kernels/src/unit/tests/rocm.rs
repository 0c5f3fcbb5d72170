//! Every kernel compiles for AMD's devices, with a Clang that needs neither ROCm nor a GPU.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::{env, fs, thread};

use gpu_runtime::Program;

use super::for_each_program;
use crate::{elementwise, moe, norms, rope, router};

pub(super) const ARCHS: [&str; 2] = ["gfx90a", "gfx942"];

/// Bytes of local data share that a workgroup can have, and registers of a lane.
const MAX_LDS: u32 = 65_536;
const MAX_REGISTERS: u32 = 512;

/// Kernels that the host asks for outside the tables of layers.
const OTHERS: &[&str] = &[
    "moe_gate_up_16",
    "moe_gate_up_64",
    "moe_gate_up_128",
    "moe_down_16",
    "moe_down_64",
    "moe_down_128",
    "mla_plain",
    "index_scores_plain",
    "index_select",
    "index_count",
    "gather_selection",
    "argmax_elem",
    "argmax_f32",
    "argmax_join",
    "reject_greedy",
    "step_verify",
    "step_draft",
    "step_single",
    "step_take",
    "step_advance",
    "step_begin",
];

#[test]
#[ignore = "needs a Clang for AMD GPUs, which `cargo xtask test rocm` brings"]
fn every_kernel_compiles_for_rocm() {
    let zig = env::var_os("TANDEM_ZIG").expect("TANDEM_ZIG names the program `zig`");
    let (zig, folder) = (zig.as_os_str(), tempfile::tempdir().unwrap());
    let folder = folder.path();
    let tables = [
        norms::Table::NAMES,
        rope::Table::NAMES,
        elementwise::Table::NAMES,
        router::Table::NAMES,
        moe::Table::NAMES,
        OTHERS,
    ];
    thread::scope(|scope| {
        for arch in ARCHS {
            scope.spawn(move || {
                let kernels = compile_all(zig, arch, &folder.join(arch));
                for name in tables.into_iter().flatten() {
                    assert!(kernels.contains_key(*name), "{arch} has no kernel {name}");
                }
                let most = |of: fn(&Resources) -> u32| kernels.values().map(of).max().unwrap();
                let (vgprs, lds) = (most(|kernel| kernel.vgprs), most(|kernel| kernel.lds));
                println!(
                    "{arch}: {} kernels, none with scratch memory, at most {vgprs} vector \
                     registers and {lds} bytes of static LDS",
                    kernels.len()
                );
            });
        }
    });
}

/// What the compiler tells of a kernel; the most of all programs that have it.
#[derive(Clone, Copy, Default)]
struct Resources {
    vgprs: u32,
    lds: u32,
}

fn compile_all(zig: &OsStr, arch: &str, folder: &Path) -> BTreeMap<String, Resources> {
    fs::create_dir(folder).unwrap();
    let mut kernels = BTreeMap::<String, Resources>::new();
    for_each_program(|program| {
        for kernel in compile(zig, arch, program, folder) {
            let value = |key: &str| -> u32 { kernel[key].parse().unwrap() };
            let at = format!("{} of {} for {arch}", kernel["name"], program.name);
            // Private memory lies in device memory: a kernel that needs it is far too slow.
            assert_eq!(value("private_segment_fixed_size"), 0, "scratch memory of {at}");
            assert_eq!(value("vgpr_spill_count") + value("sgpr_spill_count"), 0, "spills of {at}");
            assert_eq!(value("wavefront_size"), 64, "lanes of {at}");
            let (vgprs, lds) = (value("vgpr_count"), value("group_segment_fixed_size"));
            assert!(vgprs <= MAX_REGISTERS && lds <= MAX_LDS, "{at}: {vgprs} VGPRs, LDS {lds}");
            let most = kernels.entry(kernel["name"].to_owned()).or_default();
            *most = Resources { vgprs: most.vgprs.max(vgprs), lds: most.lds.max(lds) };
        }
    });
    kernels
}

/// Compiles and links a program as hipRTC would, to a code object without open symbols, and returns
/// what it says of each kernel.
fn compile(
    zig: &OsStr,
    arch: &str,
    program: &Program<'_>,
    folder: &Path,
) -> Vec<BTreeMap<String, String>> {
    let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
    write("hiprtc.h", include_str!("hiprtc.h"));
    for (name, text) in program.sources {
        write(name, text);
    }
    let run = |args: &[&str]| {
        let output = Command::new(zig).args(args).current_dir(folder).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{} for {arch}: zig {args:?}\n{said}", program.name);
    };
    let arch_option = format!("--offload-arch={arch}");
    let defines: Vec<_> = program.defines.iter().map(|(k, v)| format!("-D{k}={v}")).collect();
    let mut args = vec!["clang", "-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib"];
    args.extend([arch_option.as_str(), "-O3", "-std=c++17", "-Wall", "-Werror"]);
    args.extend(["-include", "hiprtc.h", "-S", "-o", "module.s", program.sources[0].0]);
    args.extend(defines.iter().map(String::as_str));
    run(&args);
    let cpu = format!("-mcpu={arch}");
    run(&["clang", "--target=amdgcn-amd-amdhsa", &cpu, "-c", "-o", "module.o", "module.s"]);
    run(&["ld.lld", "-shared", "--no-undefined", "-o", "module.hsaco", "module.o"]);
    kernels_of(&fs::read_to_string(folder.join("module.s")).unwrap())
}

/// The entries of `amdhsa.kernels` in an assembly file: keys and values. A program that is for
/// other devices has none.
fn kernels_of(assembly: &str) -> Vec<BTreeMap<String, String>> {
    let mut kernels = Vec::new();
    let Some((_, metadata)) = assembly.split_once("amdhsa.kernels:\n") else { return kernels };
    for line in metadata.lines().take_while(|line| line.starts_with("  ")) {
        if line.starts_with("  - ") {
            kernels.push(BTreeMap::new());
        }
        // Lines that are indented further are of the kernel's arguments.
        let entry = line.get(4..).and_then(|entry| entry.strip_prefix('.')?.split_once(':'));
        if let Some((key, value)) = entry {
            let kernel = kernels.last_mut().expect("keys belong to a kernel");
            kernel.insert(key.to_owned(), value.trim().to_owned());
        }
    }
    kernels
}
