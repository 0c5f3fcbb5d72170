// The rows of a mixture of experts: grouped by expert before its products, summed after them.

namespace moe {

constexpr int MAX_EXPERTS = 512;
constexpr int AT_ONCE = 4;  // Pairs that a thread looks at together.

// The experts of the pairs `pair`, `pair + WARP` and so on, -1 where there is none: behind the last
// pair and in padding rows. Pairs (row, choice) are numbered row * top_k + choice. All loads are
// under way at once.
DEVICE void experts_of(int (&experts)[AT_ONCE], const int* ids, const int* row_seq, int pair,
                       int n_pairs, int top_k, int n_experts) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        const int at = min(pair + i * WARP, n_pairs - 1);
        const int id = ids[at], seq = row_seq[at / top_k];
        const bool is_real = pair + i * WARP < n_pairs && seq >= 0 && id >= 0 && id < n_experts;
        experts[i] = is_real ? id : -1;
    }
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
// cuts each expert's places evenly into tiles {expert, first place, places} of at most `tile_rows`.
// A block for each expert, which counts all pairs, so that it knows what lies before its own.
KERNEL(1024) moe_group(const int* ids, const int* row_seq, int n_pairs, int top_k, int n_experts,
                       int tile_rows, int* pair_of, int* place_of, int* tiles, int* n_tiles) {
    __shared__ int counts[moe::MAX_EXPERTS], sums[64], in_warp[1024 / WARP];
    const int own = blockIdx.x, thread = threadIdx.x, warp = thread / WARP;
    const int n_warps = blockDim.x / WARP, n_at_once = blockDim.x * moe::AT_ONCE;
    // A warp's pairs lie side by side.
    const int first = warp * moe::AT_ONCE * WARP + thread % WARP;
    for (int i = thread; i < n_experts; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    int experts[moe::AT_ONCE];
    for (int start = first; start < n_pairs; start += n_at_once) {
        moe::experts_of(experts, ids, row_seq, start, n_pairs, top_k, n_experts);
#pragma unroll
        for (int i = 0; i < moe::AT_ONCE; ++i)
            if (experts[i] >= 0) atomicAdd(counts + experts[i], 1);
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
    if (count == 0) return;
    // No tile is empty: fewer rows each than `tile_rows`, and there are fewer tiles than rows each.
    const int n_each = (count + n_own - 1) / n_own;
    for (int i = thread; i < n_own; i += blockDim.x) {
        int* tile = tiles + 3 * (tiles_before + i);
        tile[0] = own;
        tile[1] = before + i * n_each;
        tile[2] = min(n_each, count - i * n_each);
    }
    for (int start = 0; start < n_pairs; start += n_at_once) {
        moe::experts_of(experts, ids, row_seq, start + first, n_pairs, top_k, n_experts);
        u64 lanes[moe::AT_ONCE];
        int in_own_warp = 0;
#pragma unroll
        for (int i = 0; i < moe::AT_ONCE; ++i) {
            lanes[i] = warp_ballot(experts[i] == own);
            in_own_warp += __popcll(lanes[i]);
        }
        if (thread % WARP == 0) in_warp[warp] = in_own_warp;
        __syncthreads();
        int place = before;
        for (int i = 0; i < n_warps; ++i) {
            if (i < warp) place += in_warp[i];
            before += in_warp[i];
        }
#pragma unroll
        for (int i = 0; i < moe::AT_ONCE; ++i) {
            const int pair = start + first + i * WARP;
            const int at = place + __popcll(lanes[i] & ((1ull << thread % WARP) - 1));
            if (experts[i] == own) pair_of[at] = pair, place_of[pair] = at;
            place += __popcll(lanes[i]);
        }
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
