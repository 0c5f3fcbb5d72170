// The lightning indexer: which keys a row attends. Scores
//   score(t, s) = sum_h weights[t, h] * max(0, scale * (q[t, h] . k_s))
// of rows begin..end go to scores[end - begin, score_stride]; then each row selects the topk best,
// the lower position of equal ones. A row that sees no more than topk keys selects them all and is
// not scored. Sizes are defines: INDEX_HEADS, INDEX_DIM.

#define SCORE_PARAMS                                                                             \
    float *scores, const elem_t *q, const float *weights, const elem_t *cache,                   \
        const int *row_pos, const int *row_seq, const int *row_start, const int *block_table,    \
        int table_stride, int block_size, int n_slots, int n_seqs, int begin, int end,           \
        int score_stride, int topk, float scale

namespace indexer {

// Keys that a row sees, as far as there is room for their scores.
DEVICE int n_visible(const int* row_pos, int row, int score_stride) {
    return min(row_pos[row] + 1, score_stride);
}

#if TANDEM_BF16 && TANDEM_SM80 && INDEX_DIM % 16 == 0
constexpr int KEYS = 64;           // Keys of a tile.
constexpr int CHUNK = 512;         // Keys of a block.
constexpr int ROWS = 8;            // Rows of a block, all of one sequence.
constexpr int STAGES = 2;
constexpr int STRIDE = INDEX_DIM + 8;
constexpr int THREADS = 256;
constexpr int M_TILES = (INDEX_HEADS + 15) / 16, K_TILES = INDEX_DIM / 16;

// Block (tile of rows, chunk of keys). Each warp works for one row, whose queries it keeps in
// registers; where there are fewer rows than warps, several share the keys of a row.
extern "C" __global__ void __launch_bounds__(THREADS) index_scores(SCORE_PARAMS) {
    __shared__ __align__(16) bf16_t k_s[STAGES][KEYS * STRIDE];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const SeqTile t = find_tile(row_start, n_seqs, begin, end, 1, ROWS, blockIdx.x);
    if (t.n == 0) return;
    const Blocks blocks = {block_table, table_stride, block_size, n_slots};
    const int row0 = max(row_start[t.seq], begin) + t.first;
    int most = 0;
    for (int i = 0; i < t.n; i++) {
        if (row_seq[row0 + i] < 0) continue;
        most = max(most, n_visible(row_pos, row0 + i, score_stride));
    }
    const int key0 = blockIdx.y * CHUNK, key_end = min(key0 + CHUNK, most);
    if (most <= topk || key0 >= key_end) return;

    // Copies of the keys come first, so that they run beside the loading of queries.
    const int n_tiles = (key_end - key0 + KEYS - 1) / KEYS;
    auto copy_tile = [&](int tile) {
#pragma unroll
        for (int i = tid / 8; i < KEYS; i += THREADS / 8) {
            const int key = key0 + tile * KEYS + i;
            const long long slot = key < key_end ? slot_of(blocks, t.seq, key) : -1;
            const elem_t* from = cache + max(slot, 0LL) * INDEX_DIM;
            for (int c = tid % 8 * 8; c < INDEX_DIM; c += 64) {
                copy16_async(&k_s[tile % STAGES][i * STRIDE + c], from + c, slot >= 0);
            }
        }
    };
    for (int tile = 0; tile < STAGES - 1; tile++) {
        if (tile < n_tiles) copy_tile(tile);
        copy_commit();
    }

    const int warps_per_row = t.n == 1 ? 8 : t.n == 2 ? 4 : t.n <= 4 ? 2 : 1;
    const int in_tile = warp / warps_per_row, row = row0 + in_tile;
    int visible = 0;
    unsigned q_frag[M_TILES][K_TILES][4] = {};
    float weight[M_TILES][2] = {};
    if (in_tile < t.n && row_seq[row] >= 0) {
        visible = n_visible(row_pos, row, score_stride);
        if (visible <= topk) visible = 0;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int head = m * 16 + half * 8 + lane / 4;
                if (head >= INDEX_HEADS) continue;
                weight[m][half] = weights[(long long)row * INDEX_HEADS + head];
                const elem_t* from =
                    q + ((long long)row * INDEX_HEADS + head) * INDEX_DIM + lane % 4 * 2;
#pragma unroll
                for (int k = 0; k < K_TILES; k++) {
                    q_frag[m][k][half] = *(const unsigned*)(from + k * 16);
                    q_frag[m][k][half + 2] = *(const unsigned*)(from + k * 16 + 8);
                }
            }
        }
    }
    float* out = scores + (long long)(row - begin) * score_stride;
    for (int tile = 0; tile < n_tiles; tile++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (tile + STAGES - 1 < n_tiles) copy_tile(tile + STAGES - 1);
        copy_commit();
        const bf16_t* k_tile = k_s[tile % STAGES];
        for (int n = warp % warps_per_row; n < KEYS / 8; n += warps_per_row) {
            const int key = key0 + tile * KEYS + n * 8;
            if (key >= visible) break;
            float s[M_TILES][4] = {};
#pragma unroll
            for (int k = 0; k < K_TILES; k++) {
                unsigned k_frag[2];
                mma_load_b(k_frag, k_tile + n * 8 * STRIDE + k * 16, STRIDE);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) mma_16x8x16(s[m], q_frag[m][k], k_frag);
            }
            float sum[2] = {};
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    // A NaN must stay one, so this is no fmaxf.
                    const float dot = s[m][i] * scale;
                    sum[i % 2] += weight[m][i / 2] * (dot < 0 ? 0.f : dot);
                }
            }
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) {
                sum[0] += shuffle_xor(sum[0], mask);
                sum[1] += shuffle_xor(sum[1], mask);
            }
            if (lane < 4) {
                if (key + lane * 2 < visible) out[key + lane * 2] = sum[0];
                if (key + lane * 2 + 1 < visible) out[key + lane * 2 + 1] = sum[1];
            }
        }
    }
    copy_wait<0>();
}
#endif

// The plain form: block (row, chunk of 1024 keys), a thread for each key.
extern "C" __global__ void __launch_bounds__(128) index_scores_plain(SCORE_PARAMS) {
    __shared__ float q_s[INDEX_DIM];
    const int row = begin + blockIdx.x, seq = row_seq[row];
    if (seq < 0 || seq >= n_seqs) return;
    const Blocks blocks = {block_table, table_stride, block_size, n_slots};
    const int visible = n_visible(row_pos, row, score_stride), key0 = blockIdx.y * 1024;
    if (visible <= topk || key0 >= visible) return;
    float sum[8] = {};
    for (int head = 0; head < INDEX_HEADS; head++) {
        const long long at = (long long)row * INDEX_HEADS + head;
        __syncthreads();
        for (int c = threadIdx.x; c < INDEX_DIM; c += 128) q_s[c] = to_f32(q[at * INDEX_DIM + c]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int key = key0 + i * 128 + threadIdx.x;
            if (key >= visible) continue;
            const long long slot = slot_of(blocks, seq, key);
            const elem_t* k = cache + slot * INDEX_DIM;
            float dot = 0;
            for (int c = 0; slot >= 0 && c < INDEX_DIM; c += 8) {
                float x[8];
                load8(k + c, x);
#pragma unroll
                for (int j = 0; j < 8; j++) dot += q_s[c + j] * x[j];
            }
            dot *= scale;
            sum[i] += weights[at] * (dot < 0 ? 0.f : dot);
        }
    }
    for (int i = 0; i < 8; i++) {
        const int key = key0 + i * 128 + threadIdx.x;
        if (key < visible) scores[(long long)blockIdx.x * score_stride + key] = sum[i];
    }
}

// The sum of the counts of the threads before the caller, and of all of them.
DEVICE int2 prefix_sum(int x, int* scratch) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int sum = x;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int below = shuffle_up(sum, step);
        if (lane >= step) sum += below;
    }
    __syncthreads();
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    int before = 0, all = 0;
    for (int i = 0; i < (int)blockDim.x / WARP; i++) {
        if (i == warp) before = all;
        all += scratch[i];
    }
    return make_int2(before + sum - x, all);
}

constexpr int SELECT_THREADS = 1024, SELECT_WARPS = SELECT_THREADS / WARP;
constexpr int PER_THREAD = 8, WINDOW = PER_THREAD * SELECT_THREADS;

// Block (row): the topk best of its scores, ascending by position, -1 behind them. The ranks of the
// first 8192 keys stay in registers; those of later ones are read again for each step.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 2) index_select(
    int* indices, int* counts, const float* scores, const int* row_pos, const int* row_seq,
    int begin, int score_stride, int topk) {
    __shared__ int bins[2048];
    __shared__ int n_before[PER_THREAD * SELECT_WARPS];
    __shared__ int scratch[32];
    __shared__ int found[2];
    const int row = begin + blockIdx.x, tid = threadIdx.x;
    if (row_seq[row] < 0) return;
    const int visible = n_visible(row_pos, row, score_stride);
    int* chosen = indices + (long long)row * topk;
    if (tid == 0) counts[row] = min(visible, topk);
    if (visible <= topk) {
        for (int i = tid; i < topk; i += SELECT_THREADS) chosen[i] = i < visible ? i : -1;
        return;
    }
    const float* score = scores + (long long)blockIdx.x * score_stride;
    unsigned rank[PER_THREAD];  // Of keys start + j * SELECT_THREADS + tid.
    auto read = [&](int start) {
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            const int i = start + j * SELECT_THREADS + tid;
            rank[j] = i < visible ? rank_of(score[i]) : 0;
        }
    };

    // Finds the rank of the worst chosen score, the highest bits first.
    unsigned threshold = 0;
    int left = topk;  // How many to take among the scores whose higher bits are the threshold's.
    int high = 32;
    read(0);
    for (int bits = 11; high > 0; bits = min(high, 11)) {
        const int low = high - bits;
        for (int i = tid; i < 2048; i += SELECT_THREADS) bins[i] = 0;
        __syncthreads();
        for (int start = 0; start < visible; start += WINDOW) {
            if (visible > WINDOW) read(start);
#pragma unroll
            for (int j = 0; j < PER_THREAD; j++) {
                const bool is_like = high == 32 || (rank[j] ^ threshold) >> high == 0;
                if (is_like && start + j * SELECT_THREADS + tid < visible) {
                    atomicAdd(&bins[rank[j] >> low & ((1u << bits) - 1)], 1);
                }
            }
        }
        __syncthreads();
        // Threads take the bins from the top, two each.
        const int bin = 2047 - 2 * tid;
        const int2 sums = prefix_sum(bins[bin] + bins[bin - 1], scratch);
        const int upper = sums.x + bins[bin], both = upper + bins[bin - 1];
        if (sums.x < left && left <= both) {
            found[0] = left <= upper ? bin : bin - 1;
            found[1] = left <= upper ? left - sums.x : left - upper;
        }
        __syncthreads();
        threshold |= (unsigned)found[0] << low;
        left = found[1];
        high = low;
    }

    // Takes what is above the threshold, and the first `left` that equal it.
    const int lane = tid % WARP, warp = tid / WARP;
    const u64 lanes_before = ((u64)1 << lane) - 1;
    int n_above = 0, n_equal = 0;
    for (int start = 0; start < visible; start += WINDOW) {
        if (visible > WINDOW) read(start);
        // Both counts in one number: those equal in the high half.
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            const bool is_key = start + j * SELECT_THREADS + tid < visible;
            const u64 above = warp_ballot(is_key && rank[j] > threshold);
            const u64 equal = warp_ballot(is_key && rank[j] == threshold);
            if (lane == 0)
                n_before[j * SELECT_WARPS + warp] = __popcll(above) | __popcll(equal) << 16;
        }
        __syncthreads();
        const bool has_count = tid < PER_THREAD * SELECT_WARPS;
        const int2 sums = prefix_sum(has_count ? n_before[tid] : 0, scratch);
        if (has_count) n_before[tid] = sums.x;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            const int i = start + j * SELECT_THREADS + tid, n = n_before[j * SELECT_WARPS + warp];
            const bool is_above = i < visible && rank[j] > threshold;
            const bool is_equal = i < visible && rank[j] == threshold;
            const u64 above_before = warp_ballot(is_above) & lanes_before;
            const u64 equal_before = warp_ballot(is_equal) & lanes_before;
            const int above = n_above + (n & 0xffff) + __popcll(above_before);
            const int equal = n_equal + (n >> 16) + __popcll(equal_before);
            if (is_above || (is_equal && equal < left)) chosen[above + min(equal, left)] = i;
        }
        n_above += sums.y & 0xffff;
        n_equal += sums.y >> 16;
        __syncthreads();
    }
}

// How many keys the rows of a pass score.
KERNEL(256) index_count(u64* n_scored, const int* row_pos, const int* row_seq, int n_rows,
                        int topk) {
    __shared__ u64 scratch[32];
    u64 n = 0;
    for (int row = threadIdx.x; row < n_rows; row += 256) {
        if (row_seq[row] >= 0 && row_pos[row] >= topk) n += row_pos[row] + 1;
    }
    n = block_sum(n, scratch);
    if (threadIdx.x == 0) *n_scored = n;
}

// Row i of `to` becomes row rows[i] of the selection, or selects nothing where rows[i] is -1.
KERNEL(256) gather_selection(int* to_indices, int* to_counts, const int* indices,
                             const int* counts, const int* rows, int n_rows, int topk) {
    const int row = rows[blockIdx.x], n = row < 0 || row >= n_rows ? 0 : min(counts[row], topk);
    if (threadIdx.x == 0) to_counts[blockIdx.x] = n;
    for (int i = threadIdx.x; i < topk; i += 256) {
        to_indices[(long long)blockIdx.x * topk + i] =
            i < n ? indices[(long long)row * topk + i] : -1;
    }
}

}  // namespace indexer
