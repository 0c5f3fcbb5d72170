//! Fused CPU kernels over plain slices, chosen for the processor at run time.
