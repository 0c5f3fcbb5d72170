// Rows that a block keeps in registers: thread `i` holds eight values from `8 * i` on, and eight
// more a block's width behind them, so that 1024 threads hold rows of up to 16,384.

constexpr int ROW_CHUNKS = 2;

DEVICE int row_chunk(int chunk) { return (chunk * blockDim.x + threadIdx.x) * 8; }

// `x` is zero behind the end of the row.
template <typename T>
DEVICE void load_row(float (&x)[ROW_CHUNKS][8], const T* row, int n) {
#pragma unroll
    for (int chunk = 0; chunk < ROW_CHUNKS; ++chunk) {
        const int at = row_chunk(chunk);
        if (at < n) {
            load8(row + at, x[chunk]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) x[chunk][i] = 0.0f;
        }
    }
}

template <typename T>
DEVICE void store_row(const float (&x)[ROW_CHUNKS][8], T* row, int n) {
#pragma unroll
    for (int chunk = 0; chunk < ROW_CHUNKS; ++chunk) {
        const int at = row_chunk(chunk);
        if (at < n) store8(row + at, x[chunk]);
    }
}

// out = x / sqrt(mean(x^2) + eps) * weight
DEVICE void store_rms_normed(const float (&x)[ROW_CHUNKS][8], const float* weight, float eps,
                             elem_t* out, int n) {
    __shared__ float scratch[32];
    float squares = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < ROW_CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = fmaf(x[chunk][i], x[chunk][i], squares);
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / n + eps);
#pragma unroll
    for (int chunk = 0; chunk < ROW_CHUNKS; ++chunk) {
        const int at = row_chunk(chunk);
        if (at >= n) continue;
        float w[8];
        load8(weight + at, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] *= x[chunk][i] * scale;
        store8(out + at, w);
    }
}

// The embedding of `id` as it is stored; NaN where the table has no such row.
DEVICE void load_embedding(float (&x)[ROW_CHUNKS][8], const elem_t* table, int id, int vocab,
                           int n) {
    if (id >= 0 && id < vocab) {
        load_row(x, table + (u64)id * n, n);
        return;
    }
#pragma unroll
    for (int chunk = 0; chunk < ROW_CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < 8; ++i) x[chunk][i] = F32_NAN;
}
