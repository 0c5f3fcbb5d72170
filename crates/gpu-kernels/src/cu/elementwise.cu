// Small operations on rows, eight values a thread. Padding rows are left alone.

DEVICE float silu(float x) {
#if TANDEM_BF16 && TANDEM_SM80
    // A bfloat16 keeps less than these approximations (22 bits) leave.
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exp2_of(-LOG2_E * x)));
    return x * inverse;
#else
    return x / (1.0f + expf(-x));
#endif
}

// out[r, i] = silu(gate_up[r, i]) * gate_up[r, width + i]
KERNEL(128) silu_and_mul(const int* row_seq, const elem_t* gate_up, int width, elem_t* out) {
    const u64 row = blockIdx.x;
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (row_seq[row] < 0 || at >= width) return;
    float gate[8], up[8];
    load8(gate_up + 2 * row * width + at, gate);
    load8(gate_up + (2 * row + 1) * width + at, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) up[i] *= silu(gate[i]);
    store8(out + row * width + at, up);
}

// residual[r] += x[r]
KERNEL(128) add_rows(const int* row_seq, const elem_t* added, int width, float* residual) {
    const u64 row = blockIdx.x;
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (row_seq[row] < 0 || at >= width) return;
    float x[8], sum[8];
    load8(added + row * width + at, x);
    load8(residual + row * width + at, sum);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += x[i];
    store8(residual + row * width + at, sum);
}

// out[r] = x[r], rounded
KERNEL(128) cast_rows(const int* row_seq, const float* x, int width, elem_t* out) {
    const u64 row = blockIdx.x;
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (row_seq[row] < 0 || at >= width) return;
    float values[8];
    load8(x + row * width + at, values);
    store8(out + row * width + at, values);
}

// out[r] = x[rows[r]] of rows of `width` 16-byte pieces; nothing where there is no such row.
KERNEL(128) gather_rows(const int* rows, int n_rows, const uint4* x, int width, uint4* out) {
    const u64 row = blockIdx.x;
    const int at = blockIdx.y * blockDim.x + threadIdx.x;
    const int from = rows[row];
    if (from < 0 || from >= n_rows || at >= width) return;
    out[row * width + at] = x[(u64)from * width + at];
}
