// The rows of a mixture of experts: grouped by expert before its products, summed after them.

namespace moe {

constexpr int MAX_EXPERTS = 512;

// Pairs (row, choice) are numbered row * top_k + choice; one of a padding row has no expert.
DEVICE int expert_of(const int* ids, const int* row_seq, int pair, int top_k, int n_experts) {
    const int id = ids[pair];
    return row_seq[pair / top_k] >= 0 && id >= 0 && id < n_experts ? id : -1;
}

// The weighted sum of a row's experts in the order of their choice, eight values from `at` on, plus
// those of `shared` if there is one. An id without an expert makes it NaN.
DEVICE void combine(float (&sum)[8], u64 row, int at, const elem_t* expert_out,
                    const int* place_of, const int* ids, const float* weights, int top_k,
                    int n_experts, const elem_t* shared, int n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
#pragma unroll 4
    for (int choice = 0; choice < top_k; ++choice) {
        const u64 pair = row * top_k + choice;
        const bool has_expert = ids[pair] >= 0 && ids[pair] < n_experts;
        const float weight = has_expert ? weights[pair] : F32_NAN;
        const u64 place = has_expert ? place_of[pair] : 0;
        float x[8];
        load8(expert_out + place * n + at, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = fmaf(weight, x[i], sum[i]);
    }
    if (!shared) return;
    float x[8];
    load8(shared + row * n + at, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += x[i];
}

}  // namespace moe

// Sorts pairs by expert, those of an expert ascending: `pair_of[place]` and `place_of[pair]`, and
// cuts each expert's places into tiles {expert, first place, places} of at most `tile_rows`. A
// block for each expert, which counts all pairs, so that it knows what lies before its own.
KERNEL(256) moe_group(const int* ids, const int* row_seq, int n_pairs, int top_k, int n_experts,
                      int tile_rows, int* pair_of, int* place_of, int* tiles, int* n_tiles) {
    __shared__ int counts[moe::MAX_EXPERTS], sums[64], in_warp[256 / WARP];
    const int own = blockIdx.x, thread = threadIdx.x, warp = thread / WARP;
    for (int i = thread; i < n_experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int pair = thread; pair < n_pairs; pair += blockDim.x) {
        const int expert = moe::expert_of(ids, row_seq, pair, top_k, n_experts);
        if (expert >= 0) atomicAdd(counts + expert, 1);
    }
    __syncthreads();
    int before = 0, tiles_before = 0;
    for (int i = thread; i < own; i += blockDim.x) {
        before += counts[i];
        tiles_before += (counts[i] + tile_rows - 1) / tile_rows;
    }
    before = block_sum(before, sums);
    tiles_before = block_sum(tiles_before, sums + 32);
    const int count = counts[own], n_own = (count + tile_rows - 1) / tile_rows;
    if (own == n_experts - 1 && thread == 0) *n_tiles = tiles_before + n_own;
    for (int i = thread; i < n_own; i += blockDim.x) {
        int* tile = tiles + 3 * (tiles_before + i);
        tile[0] = own;
        tile[1] = before + i * tile_rows;
        tile[2] = min(tile_rows, count - i * tile_rows);
    }
    if (count == 0) return;
    for (int start = 0; start < n_pairs; start += blockDim.x) {
        const int pair = start + thread;
        const bool is_own = pair < n_pairs &&
                            moe::expert_of(ids, row_seq, pair, top_k, n_experts) == own;
        const u64 lanes = warp_ballot(is_own);
        if (thread % WARP == 0) in_warp[warp] = __popcll(lanes);
        __syncthreads();
        int place = before + __popcll(lanes & ((1ull << thread % WARP) - 1));
        for (int i = 0; i < (int)(blockDim.x / WARP); ++i) {
            if (i < warp) place += in_warp[i];
            before += in_warp[i];
        }
        if (is_own) pair_of[place] = pair, place_of[pair] = place;
        __syncthreads();
    }
}

// out[r] = the sum of the row's experts
KERNEL(128) moe_combine(const int* row_seq, const elem_t* expert_out, const int* place_of,
                        const int* ids, const float* weights, int top_k, int n_experts,
                        const elem_t* shared, int n, elem_t* out) {
    const u64 row = blockIdx.x;
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (row_seq[row] < 0 || at >= n) return;
    float sum[8];
    moe::combine(sum, row, at, expert_out, place_of, ids, weights, top_k, n_experts, shared, n);
    store8(out + row * n + at, sum);
}

// residual[r] += the sum of the row's experts, then out[r] = rms_norm(residual[r]) * weight
KERNEL(1024) moe_combine_rms_norm(const int* row_seq, const elem_t* expert_out,
                                  const int* place_of, const int* ids, const float* weights,
                                  int top_k, int n_experts, const elem_t* shared, float* residual,
                                  const float* weight, float eps, int n, elem_t* out) {
    const u64 row = blockIdx.x;
    if (row_seq[row] < 0) return;
    float x[ROW_CHUNKS][8] = {};
#pragma unroll
    for (int chunk = 0; chunk < ROW_CHUNKS; ++chunk) {
        const int at = row_chunk(chunk);
        if (at >= n) continue;
        moe::combine(x[chunk], row, at, expert_out, place_of, ids, weights, top_k, n_experts,
                     shared, n);
        float old[8];
        load8(residual + row * n + at, old);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[chunk][i] += old[i];
    }
    store_row(x, residual + row * n, n);
    store_rms_normed(x, weight, eps, out + row * n, n);
}
