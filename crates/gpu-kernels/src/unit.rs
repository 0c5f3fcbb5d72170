//! Which sources are compiled together, and for which sizes.

use gpu_runtime::{DType, GemmElement, Gpu, GpuError, Module, Program};

/// Sources of `src/cu` that are one translation unit.
pub(crate) struct Unit {
    name: &'static str,
    /// Name and text of each source, in their order.
    sources: &'static [(&'static str, &'static str)],
    /// The macros of sizes that the compiler must know.
    sizes: &'static [&'static str],
}

macro_rules! unit {
    ($name:literal: $($source:literal),*; $($size:literal),*) => {
        Unit {
            name: $name,
            sources: &[$(($source, include_str!(concat!("cu/", $source)))),*],
            sizes: &[$($size),*],
        }
    };
}

pub(crate) const LAYERS: Unit = unit!("layers":
    "portable.cuh", "hopper.cuh", "cluster.cuh", "rows.cuh", "norms.cu", "rope.cu",
    "elementwise.cu", "router_mma.cuh", "router.cu",
    "moe.cu", "moe_gemm.cu", "moe_hopper.cu", "moe_wide.cu";);
pub(crate) const ATTENTION: Unit = unit!("attention":
    "portable.cuh", "hopper.cuh", "paged.cuh", "softmax_hopper.cuh", "attention.cu",
    "attention_hopper.cu", "attention_hopper_few.cu";
    "KV_LORA", "ROPE");
pub(crate) const PROMPT: Unit = unit!("prompt":
    "portable.cuh", "hopper.cuh", "paged.cuh", "softmax_hopper.cuh", "prompt.cu";
    "NOPE", "ROPE", "VALUE");
pub(crate) const INDEXER: Unit = unit!("indexer":
    "portable.cuh", "hopper.cuh", "paged.cuh", "indexer.cu", "indexer_hopper.cu";
    "INDEX_HEADS", "INDEX_DIM");
pub(crate) const SAMPLING: Unit = unit!("sampling": "portable.cuh", "sampling.cu";);
pub(crate) const STEP: Unit = unit!("step": "portable.cuh", "paged.cuh", "step.cu";);
pub(crate) const BEGIN: Unit = unit!("begin": "portable.cuh", "begin.cu";);

impl Unit {
    /// Compiles the unit for the device, or takes it from the kernel cache.
    ///
    /// # Errors
    ///
    /// As [`Gpu::compile`].
    pub(crate) fn build<E: GemmElement>(
        &self,
        gpu: &Gpu,
        sizes: &[usize],
    ) -> Result<Module, GpuError> {
        self.with_program(E::DTYPE, sizes, |program| gpu.compile(program))
    }

    /// The program whose weights, activations and caches are of type `dtype`; its first source
    /// includes the others.
    pub(crate) fn with_program<T>(
        &self,
        dtype: DType,
        sizes: &[usize],
        compile: impl FnOnce(&Program<'_>) -> T,
    ) -> T {
        assert_eq!(sizes.len(), self.sizes.len(), "unit {} has other sizes", self.name);
        let is_bf16 = dtype == DType::Bf16;
        let name = format!("{} ({})", self.name, if is_bf16 { "bfloat16" } else { "float32" });
        let all: String =
            self.sources.iter().map(|(name, _)| format!("#include \"{name}\"\n")).collect();
        let mut sources = vec![("module.cu", all.as_str())];
        sources.extend(self.sources);
        let sizes = sizes.iter().map(usize::to_string);
        let mut defines: Vec<_> = self.sizes.iter().copied().zip(sizes).collect();
        defines.push(("TANDEM_BF16", u8::from(is_bf16).to_string()));
        compile(&Program { name: &name, sources: &sources, defines: &defines })
    }
}

#[cfg(test)]
mod tests;
