// Rotary embedding, and what is written to the caches with it. Padding rows are left alone.

namespace rope {

// Cosines and sines of all positions, `[n_positions, half]`, and which elements form a pair:
// `2i` and `2i + 1` if interleaved, else `i` and `i + half`.
struct Table {
    const float* cos;
    const float* sin;
    int n_positions, half, interleaved;

    // Rotates pair `i`; to NaN where the table has no such position.
    __device__ __forceinline__ void rotate(int i, int position, float& a, float& b) const {
        float c = F32_NAN, s = c;
        if (position >= 0 && position < n_positions) {
            c = cos[(u64)position * half + i];
            s = sin[(u64)position * half + i];
        }
        const float first = a * c - b * s;
        b = b * c + a * s;
        a = first;
    }

    __device__ __forceinline__ int first(int i) const { return interleaved ? 2 * i : i; }
    __device__ __forceinline__ int second(int i) const {
        return interleaved ? 2 * i + 1 : i + half;
    }
};

}  // namespace rope

// Rotates `2 * half` values at the start of each head of `x` into `out`, which may be `x`.
KERNEL(128) rope_heads(const elem_t* x, int x_row, int x_head, elem_t* out, int out_row,
                       int out_head, int n_heads, const int* row_seq, const int* row_pos,
                       const float* cos, const float* sin, int n_positions, int half,
                       int interleaved) {
    const u64 row = blockIdx.x;
    const int pair = blockIdx.y * blockDim.x + threadIdx.x;
    if (row_seq[row] < 0 || pair >= n_heads * half) return;
    const rope::Table table = {cos, sin, n_positions, half, interleaved};
    const int head = pair / half, i = pair % half;
    const elem_t* from = x + row * x_row + (u64)head * x_head;
    elem_t* to = out + row * out_row + (u64)head * out_head;
    float a = to_f32(from[table.first(i)]), b = to_f32(from[table.second(i)]);
    table.rotate(i, row_pos[row], a, b);
    store(to + table.first(i), a);
    store(to + table.second(i), b);
}

// Of rows [query latent (q_width), latent (kv_rank), key (2 * half)]: the normalised query latent
// to `q_a`, and the normalised latent and the rotated key to the cache slot of the row. Blocks with
// y = 0 do the former, and there is none of them where queries have no latent.
KERNEL(1024) mla_latent(const int* row_seq, const int* row_pos, const int* row_slot,
                        const float* cos, const float* sin, int n_positions, int half,
                        int interleaved, const elem_t* qkv, int qkv_row, int q_width, int kv_rank,
                        const float* q_norm, float q_eps, const float* kv_norm, float kv_eps,
                        elem_t* q_a, elem_t* cache, int n_slots) {
    const u64 row = blockIdx.x;
    if (row_seq[row] < 0) return;
    const elem_t* from = qkv + row * qkv_row;
    float x[ROW_CHUNKS][8];
    if (blockIdx.y + 1 < gridDim.y) {
        load_row(x, from, q_width);
        store_rms_normed(x, q_norm, q_eps, q_a + row * q_width, q_width);
        return;
    }
    const int slot = row_slot[row];
    if (slot < 0 || slot >= n_slots) return;
    from += q_width;
    elem_t* to = cache + (u64)slot * (kv_rank + 2 * half);
    load_row(x, from, kv_rank);
    store_rms_normed(x, kv_norm, kv_eps, to, kv_rank);
    from += kv_rank;
    to += kv_rank;
    const rope::Table table = {cos, sin, n_positions, half, interleaved};
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float a = to_f32(from[table.first(i)]), b = to_f32(from[table.second(i)]);
        table.rotate(i, row_pos[row], a, b);
        store(to + table.first(i), a);
        store(to + table.second(i), b);
    }
}

// Layer norm of the row's key, rotated at its start, to the index cache slot of the row.
KERNEL(128) index_key(const int* row_seq, const int* row_pos, const int* row_slot,
                      const float* cos, const float* sin, int n_positions, int half,
                      int interleaved, const elem_t* keys, int keys_row, const float* weight,
                      const float* bias, float eps, int n, elem_t* cache, int n_slots) {
    __shared__ float key[1024], scratch[64];
    const u64 row = blockIdx.x;
    const int slot = row_slot[row];
    if (row_seq[row] < 0 || slot < 0 || slot >= n_slots) return;
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        key[i] = to_f32(keys[row * keys_row + i]);
        sum += key[i];
    }
    const float mean = block_sum(sum, scratch) / n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const float centred = key[i] - mean;
        squares = fmaf(centred, centred, squares);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch + 32) / n + eps);
    elem_t* to = cache + (u64)slot * n;
    const rope::Table table = {cos, sin, n_positions, half, interleaved};
    auto normed = [&](int i) { return fmaf((key[i] - mean) * scale, weight[i], bias[i]); };
    for (int i = threadIdx.x; i < n - half; i += blockDim.x) {
        if (i >= half) {
            store(to + i + half, normed(i + half));
            continue;
        }
        float a = normed(table.first(i)), b = normed(table.second(i));
        table.rotate(i, row_pos[row], a, b);
        store(to + table.first(i), a);
        store(to + table.second(i), b);
    }
}
