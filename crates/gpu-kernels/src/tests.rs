//! Every source compiles, where a compiler is at hand.

use gpu_runtime::{Api, GpuError, compile_only};

use super::*;

#[test]
fn sources_compile_for_both_element_types() {
    for dtype in [DType::Bf16, DType::F32] {
        // One architecture with a matrix unit, one that takes the plain forms.
        for arch in ["sm_90", "sm_75"] {
            match compile_only(Api::Cuda, arch, &program(dtype, &defines(dtype))) {
                Ok(code) => assert!(!code.is_empty()),
                Err(GpuError::MissingLibrary { .. }) => return,
                Err(error) => panic!("{arch}: {error}"),
            }
        }
    }
}

#[test]
fn the_first_source_includes_every_other() {
    let (_, first) = SOURCES[0];
    let included: Vec<&str> = first
        .lines()
        .filter_map(|line| line.strip_prefix("#include ")?.split('"').nth(1))
        .collect();
    let others: Vec<&str> = SOURCES[1..].iter().map(|(name, _)| *name).collect();
    assert_eq!(included, others);
}
