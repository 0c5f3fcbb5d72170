// The translation unit of all kernels.

#include "portable.cuh"
#include "rows.cuh"

#include "norms.cu"
#include "rope.cu"
#include "elementwise.cu"
#include "router.cu"
#include "moe.cu"
#include "moe_gemm.cu"
