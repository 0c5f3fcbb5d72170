//! Compilation, its cache, and kernels.

use std::fs;

use gpu_runtime::{
    Api, Compiler, Found, GpuError, KernelResources, Libraries, Program, compile_only,
};

use crate::libraries::Standin;
use crate::{BOTH, SOURCE};

const PROGRAM: Program<'_> = Program { name: "add_one", sources: &SOURCE, defines: &[] };

fn compiles(standin: &Standin) -> usize {
    standin.calls("nvrtcCompileProgram") + standin.calls("hiprtcCompileProgram")
}

#[test]
fn the_compiler_is_told_all_it_needs() {
    for (api, arch, target) in [
        (Api::Cuda, "sm_90", "--gpu-architecture=sm_90a"),
        (Api::Rocm, "gfx942", "--offload-arch=gfx942"),
    ] {
        let standin = Standin::new(api);
        let compiler = Compiler::load(api, &standin.options().libraries).unwrap();
        let defines = [("TANDEM_BF16", "1".to_owned())];
        let code = compiler.compile(arch, &Program { defines: &defines, ..PROGRAM }).unwrap();
        let code = String::from_utf8(code).unwrap();
        let (options, sources) = code.split_once('\n').unwrap();
        for option in [target, "-std=c++17", "-DTANDEM_BF16=1"] {
            assert!(options.split(' ').any(|one| one == option), "{options}");
        }
        assert_eq!(sources, "add_one.cukernelportable.cuhheader");
        assert_eq!(standin.live(), 0);
    }
}

#[test]
fn a_program_is_compiled_once_and_damage_is_repaired() {
    for api in BOTH {
        let standin = Standin::new(api);
        let gpu = standin.open();
        assert_eq!(gpu.compile(&PROGRAM).unwrap().found(), &Found::Compiled);
        assert_eq!(gpu.compile(&PROGRAM).unwrap().found(), &Found::InCache);
        assert_eq!(standin.open().compile(&PROGRAM).unwrap().found(), &Found::InCache);
        assert_eq!(compiles(&standin), 1);

        let entries: Vec<_> =
            fs::read_dir(standin.cache()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(entries.len(), 1);
        let whole = fs::read(&entries[0]).unwrap();
        let mut damaged = whole.clone();
        damaged[40] ^= 1;
        fs::write(&entries[0], damaged).unwrap();
        assert_eq!(gpu.compile(&PROGRAM).unwrap().found(), &Found::Compiled);
        assert_eq!(fs::read(&entries[0]).unwrap(), whole);
        assert_eq!(compiles(&standin), 2);
    }
}

#[test]
fn whatever_the_code_depends_on_is_in_the_key() {
    let standin = Standin::new(Api::Cuda);
    let gpu = standin.open();
    let header = [SOURCE[0], ("portable.cuh", "another header")];
    let one = [("A", "1".to_owned())];
    let two = [("A", "2".to_owned())];
    let programs = [
        PROGRAM,
        Program { sources: &header, ..PROGRAM },
        Program { defines: &one, ..PROGRAM },
        Program { defines: &two, ..PROGRAM },
    ];
    for program in &programs {
        assert_eq!(gpu.compile(program).unwrap().found(), &Found::Compiled);
    }
    for program in &programs {
        assert_eq!(gpu.compile(program).unwrap().found(), &Found::InCache);
    }
    assert_eq!(compiles(&standin), programs.len());
}

#[test]
fn a_cache_that_cannot_be_written_does_no_harm() {
    let standin = Standin::new(Api::Cuda);
    fs::write(standin.cache(), b"a file where a folder should be").unwrap();
    let gpu = standin.open();
    let module = gpu.compile(&PROGRAM).unwrap();
    assert!(matches!(module.found(), Found::NotCached(why) if why.contains("cache")));
    module.kernel("add_one").unwrap();
}

#[test]
fn a_fault_in_a_source_comes_with_the_compilers_log() {
    for api in BOTH {
        let standin = Standin::new(api);
        let gpu = standin.open();
        let sources = [("bad.cu", "#error")];
        let error = gpu.compile(&Program { name: "bad", sources: &sources, defines: &[] });
        let error = error.unwrap_err();
        assert!(matches!(error, GpuError::Compile { .. }));
        assert_eq!(error.to_string(), "bad does not compile:\nline 1: no such thing");
        let empty = Program { name: "empty", sources: &[], defines: &[] };
        assert_eq!(gpu.compile(&empty).unwrap_err().to_string(), "program empty has no source");
        let zero = Program { name: "zero", sources: &[("a", "\0")], defines: &[] };
        assert!(gpu.compile(&zero).unwrap_err().to_string().contains("zero byte"));
        drop(gpu);
        assert_eq!(standin.live(), 0);
    }
}

#[test]
fn no_compiler_is_one_line_with_the_way_out() {
    for (api, part) in [(Api::Cuda, "nvrtc"), (Api::Rocm, "hiprtc")] {
        let standin = Standin::new(api).without(part);
        let error = standin.open().compile(&PROGRAM).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("LD_LIBRARY_PATH"), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
}

#[test]
fn every_library_that_is_missing_is_told() {
    for (api, names) in
        [(Api::Cuda, ["cuda.", "nvrtc", "cublas"]), (Api::Rocm, ["amdhip64", "hiprtc", "hipblas"])]
    {
        let needed = |standin: Standin| standin.options().libraries.needed(api);
        assert!(needed(Standin::new(api)).iter().all(Result::is_ok));
        for (idx, name) in names.into_iter().enumerate() {
            let found = needed(Standin::new(api).without(name));
            for (at, found) in found.into_iter().enumerate() {
                match found {
                    Ok(file) => assert!(at != idx && file.contains(names[at]), "{file}"),
                    Err(error) => assert!(at == idx && error.to_string().contains(name), "{error}"),
                }
            }
        }
    }
}

#[test]
fn a_kernel_has_its_name_resources_and_limits() {
    for api in BOTH {
        let standin = Standin::new(api);
        let module = standin.open().compile(&PROGRAM).unwrap();
        let error = module.kernel("absent").unwrap_err().to_string();
        assert!(error.contains("kernel absent: stand-in: invalid value"), "{error}");
        let kernel = module.kernel("add_one").unwrap();
        assert_eq!(
            kernel.resources().unwrap(),
            KernelResources {
                max_threads: 10,
                static_shared: 11,
                local_bytes: 13,
                n_registers: 14
            }
        );
        kernel.allow_shared(60_000).unwrap();
        let error = kernel.allow_shared(300_000).unwrap_err().to_string();
        assert!(error.contains("asks for 300000 bytes of shared memory"), "{error}");
        assert_eq!(standin.calls("cuFuncSetAttribute"), usize::from(api == Api::Cuda));
    }
}

/// With a real compiler, where there is one.
#[test]
fn compile_only_makes_machine_code_without_a_gpu() {
    const TEXT: &str = "#include \"body.cuh\"\nextern \"C\" __global__ void k(float *x) { BODY }";
    let sources = [("k.cu", TEXT), ("body.cuh", "#define BODY x[threadIdx.x] = VALUE;\n")];
    let defines = [("VALUE", "2.0f".to_owned())];
    let program = Program { name: "k", sources: &sources, defines: &defines };
    for (api, arch) in [(Api::Cuda, "sm_90"), (Api::Rocm, "gfx942"), (Api::Rocm, "gfx90a")] {
        match Compiler::load(api, &Libraries::system()) {
            Err(error @ GpuError::MissingLibrary { .. }) => {
                eprintln!("not tested for {arch}: {error}");
            }
            Err(other) => panic!("{other}"),
            Ok(_) => {
                let code = compile_only(api, arch, &program).unwrap();
                assert!(code.starts_with(b"\x7fELF") || code.starts_with(b"__CLANG_OFFLOAD"));
                let error = compile_only(api, arch, &Program { defines: &[], ..program });
                assert!(error.unwrap_err().to_string().contains("VALUE"));
            }
        }
    }
}
