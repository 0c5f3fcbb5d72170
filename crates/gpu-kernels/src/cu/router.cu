// The expert router: float32 logits of a tile of rows, and, in the last block that works on the
// tile, the choice of its experts.

namespace router {

constexpr int MAX_PER_LANE = 512 / WARP;  // Experts of a row that a lane has, at most.

// How experts are chosen.
struct Config {
    int n_experts, is_softmax;
    // Groups limit the choice if fewer are kept than there are; their score is the sum of their
    // two best or their best.
    int n_group, topk_group, by_two_best;
    int top_k, normalise;
    float scale;
};

struct Best {
    float value;
    int at;

    // NaN stands for what is taken.
    __device__ __forceinline__ void offer(float other, int other_at) {
        const bool wins = other > value || (other == value && other_at < at);
        if (wins) value = other, at = other_at;
    }
};

// The index of the greatest value, the lowest among equals, by a warp together; the value becomes
// NaN.
DEVICE int take_best(float* values, int n, int lane) {
    Best best = {-F32_INFINITY, 0x7fffffff};
    for (int i = lane; i < n; i += WARP) best.offer(values[i], i);
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2)
        best.offer(shuffle_xor(best.value, mask), shuffle_xor(best.at, mask));
    sync_warp();
    if (lane == 0 && best.at < n) values[best.at] = F32_NAN;
    sync_warp();
    return best.at;
}

// Values that `take` takes the best of, again and again, as `take_best` does.
#if TANDEM_SM80
template <int PER_LANE>
struct Candidates {
    unsigned ranks[PER_LANE];  // Of values lane, lane + WARP and so on; 0 for what is taken.
    unsigned best;             // Of this lane.
    int best_at;

    __device__ __forceinline__ void init(const float* values, int n, int lane) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const int i = j * WARP + lane;
            ranks[j] = i < n ? rank_of(values[i]) : 0;
        }
        find_best(lane);
    }

    __device__ __forceinline__ void find_best(int lane) {
        best = 0;
        best_at = lane;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            if (ranks[j] > best) best = ranks[j], best_at = j * WARP + lane;
    }

    __device__ __forceinline__ int take(int lane) {
        const unsigned all = 0xffffffffu, most = __reduce_max_sync(all, best);
        const int taken = __reduce_min_sync(all, best == most ? best_at : PER_LANE * WARP);
        if (taken == best_at) {
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j)
                if (taken == j * WARP + lane) ranks[j] = 0;
            find_best(lane);
        }
        return taken;
    }
};
#else
template <int PER_LANE>
struct Candidates {
    float* values;
    int n;

    __device__ __forceinline__ void init(float* all, int n_all, int) { values = all, n = n_all; }
    __device__ __forceinline__ int take(int lane) { return take_best(values, n, lane); }
};
#endif

// Logits to scores; a lane's places without an expert have a logit of -infinity.
template <int PER_LANE>
DEVICE void to_scores(float (&scores)[PER_LANE], bool is_softmax) {
    if (!is_softmax) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) scores[j] = 1.0f / (1.0f + expf(-scores[j]));
        return;
    }
    float max = -F32_INFINITY, total = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) max = fmaxf(max, scores[j]);
    max = warp_max(max);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) total += scores[j] = expf(scores[j] - max);
    total = warp_sum(total);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) scores[j] /= total;
}

// Takes the experts outside the best groups.
DEVICE void drop_groups(float* biased, float* groups, const Config& config, int lane) {
    const int size = config.n_experts / config.n_group;
    for (int group = lane; group < config.n_group; group += WARP) {
        float first = -F32_INFINITY, second = -F32_INFINITY;
        for (int i = group * size; i < (group + 1) * size; ++i) {
            second = fmaxf(second, fminf(first, biased[i]));
            first = fmaxf(first, biased[i]);
        }
        groups[group] = config.by_two_best && size > 1 ? first + second : first;
    }
    sync_warp();
    for (int i = 0; i < config.topk_group; ++i) take_best(groups, config.n_group, lane);
    for (int i = lane; i < config.n_experts; i += WARP) {
        const bool kept = groups[i / size] != groups[i / size];
        if (!kept) biased[i] = F32_NAN;
    }
    sync_warp();
}

// The experts of `N` rows by one warp, best first; the rows hide each other's waits. Rows from
// `n_rows` on repeat the last one, and like padding rows they write nothing. `scratch` holds three
// values for each row and expert.
template <int PER_LANE, int N>
DEVICE void choose(const float* logits, const int* row_seq, int n_rows, float* scratch,
                   const float* bias, const Config& config, int* ids, float* weights) {
    const int lane = threadIdx.x % WARP, n = config.n_experts, top_k = config.top_k;
    bool is_real[N];
    float values[N][PER_LANE];
#pragma unroll
    for (int r = 0; r < N; ++r) {
        is_real[r] = r < n_rows && row_seq[r] >= 0;
        // Volatile: written by other blocks of this launch.
        const volatile float* from = logits + min(r, n_rows - 1) * n;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            values[r][j] = j * WARP + lane < n ? from[j * WARP + lane] : -F32_INFINITY;
    }
#pragma unroll
    for (int r = 0; r < N; ++r) {
        float *scores = scratch + 3 * r * n, *biased = scores + n;
        to_scores(values[r], config.is_softmax);
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const int i = j * WARP + lane;
            if (i >= n) continue;
            // A broken score loses against every other one and can still be chosen.
            const float score = values[r][j], sum = bias ? score + bias[i] : score;
            scores[i] = score;
            biased[i] = sum != sum ? -F32_INFINITY : sum;
        }
    }
    sync_warp();
    if (config.topk_group < config.n_group)
        for (int r = 0; r < N; ++r)
            drop_groups(scratch + (3 * r + 1) * n, scratch + (3 * r + 2) * n, config, lane);
    Candidates<PER_LANE> candidates[N];
#pragma unroll
    for (int r = 0; r < N; ++r) candidates[r].init(scratch + (3 * r + 1) * n, n, lane);
    float total[N] = {}, weight[N] = {};
    int id[N] = {};
#pragma unroll 1
    for (int k = 0; k < top_k; ++k)
#pragma unroll
        for (int r = 0; r < N; ++r) {
            const int best = candidates[r].take(lane);
            const float score = scratch[3 * r * n + best];
            total[r] += score;
            if (lane == k) id[r] = best, weight[r] = score;
        }
#pragma unroll
    for (int r = 0; r < N; ++r) {
        if (!is_real[r] || lane >= top_k) continue;
        // The addend keeps the quotient finite when all chosen scores are zero.
        if (config.normalise) weight[r] /= total[r] + 1e-20f;
        ids[r * top_k + lane] = id[r];
        weights[r * top_k + lane] = weight[r] * config.scale;
    }
}

// The experts of the rows of a tile, `N` by a warp at a time.
template <int PER_LANE, int N>
DEVICE void choose_all(const float* logits, const int* row_seq, int n_rows, float* scratch,
                       const float* bias, const Config& config, int* ids, float* weights) {
    const int warp = threadIdx.x / WARP, n = config.n_experts, top_k = config.top_k;
    scratch += warp * N * 3 * n;
#pragma unroll 1
    for (int row = warp * N; row < n_rows; row += WARPS * N) {
        choose<PER_LANE, N>(logits + row * n, row_seq + row, n_rows - row, scratch, bias, config,
                            ids + row * top_k, weights + row * top_k);
        sync_warp();
    }
}

#if !TANDEM_BF16 || !TANDEM_SM80

// Sums the first `N` of 32 values over the lanes of a warp, whose terms are added in the order of
// `warp_sum`: lane `i` gets the sum of value `i % 32`.
template <int N>
DEVICE float warp_sums(float (&values)[32], int lane) {
    if constexpr (N == 1) return values[0];
    const bool is_high = lane & N / 2;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        const float low = values[i], high = values[i + N / 2];
        values[i] = (is_high ? high : low) + shuffle_xor(is_high ? low : high, N / 2);
    }
    if constexpr (N > 1) return warp_sums<N / 2>(values, lane);
}

// The logits of a tile of rows with `EXPERTS` experts from `first` on. Threads share the terms of a
// sum; rows and experts that do not exist repeat the last one, so that no load waits for a
// condition.
struct PlainTile {
    static constexpr int ROWS = 8, EXPERTS = 4, SHARED = 0;

    __device__ __forceinline__ static void logits(const elem_t* x, int hidden, const float* gate,
                                                  int first, int n_experts, int n_rows,
                                                  float* logits, float*) {
        __shared__ float parts[WARPS][ROWS * EXPERTS];
        const int lane = threadIdx.x % WARP;
        static_assert(ROWS * EXPERTS == 32, "a sum for each lane");
        float sums[32] = {};
#pragma unroll 1
        for (int at = threadIdx.x * 8; at < hidden; at += THREADS * 8) {
            float weights[EXPERTS][8];
            float values[ROWS][8];
#pragma unroll
            for (int i = 0; i < EXPERTS; ++i)
                load8(gate + (min(first + i, n_experts - 1) * hidden + at), weights[i]);
#pragma unroll
            for (int row = 0; row < ROWS; ++row)
                load8(x + (min(row, n_rows - 1) * hidden + at), values[row]);
#pragma unroll
            for (int i = 0; i < ROWS * EXPERTS; ++i)
#pragma unroll
                for (int k = 0; k < 8; ++k)
                    sums[i] = fmaf(values[i / EXPERTS][k], weights[i % EXPERTS][k], sums[i]);
        }
#pragma unroll
        for (int mask = WARP / 2; mask >= 32; mask /= 2)
#pragma unroll
            for (int i = 0; i < 32; ++i) sums[i] += shuffle_xor(sums[i], mask);
        const float sum = warp_sums<32>(sums, lane);
        if (lane < ROWS * EXPERTS) parts[threadIdx.x / WARP][lane] = sum;
        __syncthreads();
        const int row = threadIdx.x / EXPERTS, expert = first + threadIdx.x % EXPERTS;
        if (row >= n_rows || expert >= n_experts) return;
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) total += parts[warp][threadIdx.x];
        logits[row * n_experts + expert] = total;
    }
};

#endif

// The work of a block; the grid is of blocks that share the experts, and of tiles of rows. A block
// with several tiles of experts reads its rows from the nearest cache again. `arrived` has a zero
// for each tile of rows, and zeros it again.
template <typename T>
DEVICE void run(const int* row_seq, int n_rows, const elem_t* x, int hidden, const float* gate,
                const float* bias, const Config& config, float* logits, unsigned* arrived, int* ids,
                float* weights) {
    extern __shared__ __align__(16) float scratch[];
    __shared__ bool is_last;
    const int n_experts = config.n_experts, top_k = config.top_k;
    const u64 start = (u64)blockIdx.y * T::ROWS;
    const int n_tile = min(T::ROWS, n_rows - (int)start);
    logits += start * n_experts;
    for (int first = blockIdx.x * T::EXPERTS; first < n_experts; first += gridDim.x * T::EXPERTS) {
        T::logits(x + start * hidden, hidden, gate, first, n_experts, n_tile, logits, scratch);
        __syncthreads();
    }
    // Every logit of this block is written before the block counts as arrived.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(arrived + blockIdx.y, 1u) + 1 == gridDim.x;
        if (is_last) arrived[blockIdx.y] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    row_seq += start, ids += start * top_k, weights += start * top_k;
    // Of many experts, a lane's share is enough to do for one row.
    constexpr int FEW = 64 / WARP, AT_ONCE = T::ROWS < 4 * WARPS ? 1 : 4;
    static_assert(AT_ONCE == 1 || WARPS * AT_ONCE * 3 * FEW * WARP * 4 <= T::SHARED, "rows fit");
    if (n_experts <= FEW * WARP)
        choose_all<FEW, AT_ONCE>(logits, row_seq, n_tile, scratch, bias, config, ids, weights);
    else
        choose_all<MAX_PER_LANE, 1>(logits, row_seq, n_tile, scratch, bias, config, ids, weights);
}

}  // namespace router

// Dynamic shared memory: what the tile's stages take, or at least three values for each warp and
// expert.
#define ROUTE(NAME, TILE, AT_ONCE)                                                                \
    extern "C" __global__ void __launch_bounds__(router::THREADS, AT_ONCE)                       \
    NAME(const int* row_seq, int n_rows, const elem_t* x, int hidden, const float* gate,         \
         const float* bias, int n_experts, int is_softmax, int n_group, int topk_group,          \
         int by_two_best, int top_k, int normalise, float scale, float* logits,                  \
         unsigned* arrived, int* ids, float* weights) {                                          \
        const router::Config config = {n_experts, is_softmax, n_group,   topk_group,             \
                                       by_two_best, top_k,    normalise, scale};                 \
        router::run<router::TILE>(row_seq, n_rows, x, hidden, gate, bias, config, logits,        \
                                  arrived, ids, weights);                                        \
    }

#if TANDEM_BF16 && TANDEM_SM80
ROUTE(route_few, Few, 2)
ROUTE(route_middle, Middle, 2)
ROUTE(route_many, Many, 1)
#else
ROUTE(route, PlainTile, 2)
#endif
