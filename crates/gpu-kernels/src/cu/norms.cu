// Embedding and normalisation, a block for each row. Padding rows are left alone.

// residual[r] = table[ids[r]]
KERNEL(1024) embed(const int* ids, const int* row_seq, const elem_t* table, int vocab, int n,
                   float* residual) {
    const u64 row = blockIdx.x;
    if (row_seq[row] < 0) return;
    float x[ROW_CHUNKS][8];
    load_embedding(x, table, ids[row], vocab, n);
    store_row(x, residual + row * n, n);
}

// out[r] = rms_norm(residual[r]) * weight
KERNEL(1024) rms_norm(const int* row_seq, const float* residual, const float* weight, float eps,
                      int n, elem_t* out) {
    const u64 row = blockIdx.x;
    if (row_seq[row] < 0) return;
    float x[ROW_CHUNKS][8];
    load_row(x, residual + row * n, n);
    store_rms_normed(x, weight, eps, out + row * n, n);
}

// residual[r] += x[r], then as rms_norm
KERNEL(1024) add_rms_norm(const int* row_seq, const elem_t* added, float* residual,
                          const float* weight, float eps, int n, elem_t* out) {
    const u64 row = blockIdx.x;
    if (row_seq[row] < 0) return;
    float x[ROW_CHUNKS][8], sum[ROW_CHUNKS][8];
    load_row(x, added + row * n, n);
    load_row(sum, residual + row * n, n);
#pragma unroll
    for (int chunk = 0; chunk < ROW_CHUNKS; ++chunk)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[chunk][i] += x[chunk][i];
    store_row(sum, residual + row * n, n);
    store_rms_normed(sum, weight, eps, out + row * n, n);
}

// out[r] = rms_norm(table[ids[r]]) * enorm, rms_norm(hidden[r]) * hnorm; a block for each half.
KERNEL(1024) mtp_input(const int* ids, const int* row_seq, const elem_t* table, int vocab,
                       const elem_t* hidden, const float* enorm, const float* hnorm, float eps,
                       int n, elem_t* out) {
    const u64 row = blockIdx.x;
    if (row_seq[row] < 0) return;
    float x[ROW_CHUNKS][8];
    if (blockIdx.y == 0) {
        load_embedding(x, table, ids[row], vocab, n);
    } else {
        load_row(x, hidden + row * n, n);
    }
    const float* weight = blockIdx.y == 0 ? enorm : hnorm;
    store_rms_normed(x, weight, eps, out + (2 * row + blockIdx.y) * n, n);
}
