//! Every unit compiles for every kind of device, where a compiler is at hand.

mod rocm;

use std::collections::BTreeSet;
use std::fs;

use gpu_runtime::{Api, compile_only};

use super::*;

/// Every unit, with sizes that fill the tiles of the matrix unit and sizes that do not.
const UNITS: [(&Unit, &[&[usize]]); 7] = [
    (&LAYERS, &[&[]]),
    (&ATTENTION, &[&[512, 64], &[64, 16], &[40, 8]]),
    (&PROMPT, &[&[128, 64, 128]]),
    (&INDEXER, &[&[32, 128], &[4, 32], &[3, 24]]),
    (&SAMPLING, &[&[]]),
    (&STEP, &[&[]]),
    (&BEGIN, &[&[]]),
];

/// Hands each program of the crate to `compile`.
fn for_each_program(mut compile: impl FnMut(&Program<'_>)) {
    for (unit, sizes) in UNITS.iter().flat_map(|(unit, all)| all.iter().map(move |s| (unit, s))) {
        for dtype in [DType::Bf16, DType::F32] {
            unit.with_program(dtype, sizes, &mut compile);
        }
    }
}

#[test]
fn every_source_is_in_a_unit() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cu");
    let files = fs::read_dir(folder).unwrap();
    let files: BTreeSet<String> =
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    let sources = UNITS.iter().flat_map(|(unit, _)| unit.sources);
    assert_eq!(files, sources.map(|(name, _)| (*name).to_owned()).collect());
}

#[test]
fn units_compile_with_the_vendors_compilers() {
    // Of CUDA's one architecture with the matrix unit, one that takes the plain forms.
    for (api, archs) in [(Api::Cuda, ["sm_90", "sm_75"]), (Api::Rocm, rocm::ARCHS)] {
        for arch in archs {
            for_each_program(|program| match compile_only(api, arch, program) {
                Ok(code) => assert!(!code.is_empty()),
                Err(GpuError::MissingLibrary { .. }) => {}
                Err(error) => panic!("{} for {arch}: {error}", program.name),
            });
        }
    }
}
