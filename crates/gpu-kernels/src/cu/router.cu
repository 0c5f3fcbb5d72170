// The expert router: float32 logits of a tile of rows, and, in the last block that works on the
// tile, the choice of its experts.

namespace router {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int ROWS = 8;
constexpr int EXPERTS = 4;
constexpr int PER_LANE = 512 / WARP;  // Experts of a row that a lane has, at most.

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
struct Candidates {
    unsigned ranks[PER_LANE];  // Of values lane, lane + WARP and so on; 0 for what is taken.
    unsigned best;             // Of this lane.
    int best_at;

    __device__ __forceinline__ Candidates(const float* values, int n, int lane) {
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
struct Candidates {
    float* values;
    int n;

    __device__ __forceinline__ Candidates(float* values, int n, int) : values(values), n(n) {}
    __device__ __forceinline__ int take(int lane) { return take_best(values, n, lane); }
};
#endif

DEVICE void to_scores(float* scores, const Config& config, int lane) {
    const int n = config.n_experts;
    if (!config.is_softmax) {
        for (int i = lane; i < n; i += WARP) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
        return;
    }
    float max = -F32_INFINITY, total = 0.0f;
    for (int i = lane; i < n; i += WARP) max = fmaxf(max, scores[i]);
    max = warp_max(max);
    for (int i = lane; i < n; i += WARP) total += scores[i] = expf(scores[i] - max);
    total = warp_sum(total);
    for (int i = lane; i < n; i += WARP) scores[i] /= total;
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

// The experts of a row by one warp, best first; `scratch` holds three values for each expert, the
// logits first.
DEVICE void choose(float* scratch, const float* bias, const Config& config, int* ids,
                   float* weights) {
    const int lane = threadIdx.x % WARP, n = config.n_experts;
    float *scores = scratch, *biased = scratch + n, *groups = scratch + 2 * n;
    to_scores(scores, config, lane);
    for (int i = lane; i < n; i += WARP) {
        // A broken score loses against every other one and can still be chosen.
        const float sum = bias ? scores[i] + bias[i] : scores[i];
        biased[i] = sum != sum ? -F32_INFINITY : sum;
    }
    sync_warp();
    if (config.topk_group < config.n_group) drop_groups(biased, groups, config, lane);
    Candidates candidates(biased, n, lane);
    // The addend keeps the quotient finite when all chosen scores are zero.
    float total = 0.0f, weight = 0.0f;
    int id = 0;
    for (int k = 0; k < config.top_k; ++k) {
        const int best = candidates.take(lane);
        total += scores[best];
        if (lane == k) id = best, weight = scores[best];
    }
    total += 1e-20f;
    if (lane >= config.top_k) return;
    if (config.normalise) weight /= total;
    ids[lane] = id;
    weights[lane] = weight * config.scale;
}

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
DEVICE void tile_logits(const elem_t* x, int hidden, const float* gate, int first, int n_experts,
                        int n_rows, float* logits) {
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

}  // namespace router

// Grid: blocks that share the experts, tiles of rows. A block with several tiles of experts reads
// its rows from the nearest cache again. `arrived` has a zero for each tile of rows, and zeros it
// again. Dynamic shared memory: three values for each warp and expert.
extern "C" __global__ void __launch_bounds__(router::THREADS, 2)
route(const int* row_seq, int n_rows, const elem_t* x, int hidden, const float* gate,
      const float* bias, int n_experts, int is_softmax, int n_group, int topk_group,
      int by_two_best, int top_k, int normalise, float scale, float* logits, unsigned* arrived,
      int* ids, float* weights) {
    using namespace router;
    extern __shared__ float scratch[];
    __shared__ bool is_last;
    const int start = blockIdx.y * ROWS;
    const int n_tile = min(ROWS, n_rows - start);
    logits += (u64)start * n_experts;
    for (int first = blockIdx.x * EXPERTS; first < n_experts; first += gridDim.x * EXPERTS) {
        tile_logits(x + (u64)start * hidden, hidden, gate, first, n_experts, n_tile, logits);
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
    const Config config = {n_experts, is_softmax, n_group,   topk_group,
                           by_two_best, top_k,    normalise, scale};
    const int warp = threadIdx.x / WARP;
    float* own = scratch + warp * 3 * n_experts;
    for (int row = warp; row < n_tile; row += WARPS) {
        const u64 at = start + row;
        if (row_seq[at] < 0) continue;
        // Volatile: written by other blocks of this launch.
        const volatile float* from = logits + row * n_experts;
        for (int i = threadIdx.x % WARP; i < n_experts; i += WARP) own[i] = from[i];
        sync_warp();
        choose(own, bias, config, ids + at * top_k, weights + at * top_k);
        sync_warp();
    }
}
