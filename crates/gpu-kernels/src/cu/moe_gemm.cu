// The products of the experts: a block for each tile of one expert's rows and slice of its outputs.
// A row's sum runs over its inputs in one order whatever the tile, so that it has the same bits in
// each of them.

namespace moe_gemm {

// N_ROWS rows by N_OUT weight rows, in steps of 16 * PIECES bytes of inputs, of which STAGES are
// under way, by groups of 32 lanes, GROUPS_R over the rows and GROUPS_O over the outputs.
template <int N_ROWS_, int N_OUT_, int PIECES, int STAGES, int GROUPS_R, int GROUPS_O>
struct Tile {
    static constexpr int N_ROWS = N_ROWS_, N_OUT = N_OUT_;
    static constexpr int THREADS = 32 * GROUPS_R * GROUPS_O;
    static constexpr int PIECE = 16 / sizeof(elem_t);
    static constexpr int STEP = PIECES * PIECE;
    // One piece wider than a step, so that eight rows below each other lie in different banks.
    static constexpr int LINE = STEP + PIECE;
    static constexpr int LINES = N_ROWS + N_OUT;
    static constexpr int R = N_ROWS / GROUPS_R / 16, O = N_OUT / GROUPS_O / 8;
    static constexpr int OUT_LINE = N_OUT + 4;
    static_assert(N_ROWS * OUT_LINE * 4 <= STAGES * LINES * LINE * (int)sizeof(elem_t), "fits");

    // Where the lines of a step come from; null for rows that the tile lacks.
    const elem_t** sources;
    elem_t* stages;
    float sums[R][O][4];

    __device__ __forceinline__ void load(int step, int n_in) const {
        elem_t* to = stages + step % STAGES * (LINES * LINE);
        for (int i = threadIdx.x; i < LINES * PIECES; i += THREADS) {
            const int line = i / PIECES, piece = i % PIECES * PIECE;
            const elem_t* from = sources[line];
            const bool real = from && step * STEP + piece < n_in;
            // Without a source, any readable address will do.
            const elem_t* at = real ? from + step * STEP + piece : sources[N_ROWS];
            copy16_async(to + line * LINE + piece, at, real);
        }
    }

    __device__ __forceinline__ void multiply(int step) {
        const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
        const elem_t* rows = stages + step % STAGES * (LINES * LINE);
        const elem_t* outs = rows + (N_ROWS + group % GROUPS_O * O * 8) * LINE;
        rows += group / GROUPS_O * R * 16 * LINE;
#if TANDEM_BF16
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            unsigned a[R][4], b[O][2];
#pragma unroll
            for (int r = 0; r < R; ++r) mma_load_a(a[r], rows + r * 16 * LINE + k, LINE);
#pragma unroll
            for (int o = 0; o < O; o += 2) {
                unsigned pair[2][2];
                mma_load_b2(pair, outs + o * 8 * LINE + k, LINE);
                b[o][0] = pair[0][0], b[o][1] = pair[0][1];
                b[o + 1][0] = pair[1][0], b[o + 1][1] = pair[1][1];
            }
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int o = 0; o < O; ++o) mma_16x8x16(sums[r][o], a[r], b[o]);
        }
#else
        // Each lane has the values that it would have of the matrix unit.
        rows += lane / 4 * LINE;
        outs += lane % 4 * 2 * LINE;
#pragma unroll 2
        for (int k = 0; k < STEP; ++k)
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int o = 0; o < O; ++o)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sums[r][o][i] = fmaf(rows[(r * 16 + i / 2 * 8) * LINE + k],
                                             outs[(o * 8 + i % 2) * LINE + k], sums[r][o][i]);
#endif
        (void)lane;
    }

    // Leaves the products in shared memory, `[N_ROWS, OUT_LINE]`.
    __device__ __forceinline__ const float* run(int n_in) {
        const int n_steps = (n_in + STEP - 1) / STEP;
        for (int step = 0; step < STAGES - 1; ++step) {
            if (step < n_steps) load(step, n_in);
            copy_commit();
        }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int o = 0; o < O; ++o)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[r][o][i] = 0.0f;
        for (int step = 0; step < n_steps; ++step) {
            copy_wait<STAGES - 2>();
            __syncthreads();
            const int next = step + STAGES - 1;
            if (next < n_steps) load(next, n_in);
            copy_commit();
            multiply(step);
        }
        copy_wait<0>();
        __syncthreads();
        return spread();
    }

    __device__ __forceinline__ const float* spread() const {
        float* out = reinterpret_cast<float*>(stages);
        const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
        const int row = group / GROUPS_O * R * 16 + lane / 4;
        const int column = group % GROUPS_O * O * 8 + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int o = 0; o < O; ++o)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    out[(row + r * 16 + i / 2 * 8) * OUT_LINE + column + o * 8 + i % 2] =
                        sums[r][o][i];
        __syncthreads();
        return out;
    }
};

typedef Tile<16, 32, 16, 4, 1, 2> Low;
typedef Tile<64, 128, 8, 3, 2, 2> Middle;
typedef Tile<128, 128, 8, 3, 2, 4> High;

// act[place, i] = silu(gate) * up of the place's row of x; half of the weight rows of a block are
// gates, half are ups.
template <typename T>
DEVICE void gate_up(const int* tiles, const int* n_tiles, const int* pair_of, int top_k,
                    const elem_t* x, int hidden, const elem_t* weight, int inner, elem_t* act) {
    extern __shared__ __align__(16) unsigned char stages[];
    __shared__ const elem_t* sources[T::LINES];
    constexpr int WIDTH = T::N_OUT / 2;
    if (blockIdx.x >= *n_tiles) return;
    const int expert = tiles[3 * blockIdx.x], first = tiles[3 * blockIdx.x + 1];
    const int n_rows = tiles[3 * blockIdx.x + 2], start = blockIdx.y * WIDTH;
    for (int i = threadIdx.x; i < T::LINES; i += T::THREADS) {
        const int out = (i - T::N_ROWS) % WIDTH, is_up = (i - T::N_ROWS) / WIDTH;
        if (i < T::N_ROWS) {
            sources[i] = i < n_rows ? x + (u64)(pair_of[first + i] / top_k) * hidden : nullptr;
        } else {
            const u64 row = (u64)expert * 2 * inner + is_up * inner + start + out;
            sources[i] = start + out < inner ? weight + row * hidden : nullptr;
        }
    }
    __syncthreads();
    T tile = {sources, reinterpret_cast<elem_t*>(stages)};
    const float* products = tile.run(hidden);
    for (int i = threadIdx.x; i < n_rows * (WIDTH / 8); i += T::THREADS) {
        const int row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
        if (start + column >= inner) continue;
        const float* gates = products + row * T::OUT_LINE + column;
        float values[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = silu(gates[j]) * gates[j + WIDTH];
        store8(act + (u64)(first + row) * inner + start + column, values);
    }
}

// out[place] = weight * act[place]
template <typename T>
DEVICE void down(const int* tiles, const int* n_tiles, const elem_t* act, int inner,
                 const elem_t* weight, int hidden, elem_t* out) {
    extern __shared__ __align__(16) unsigned char stages[];
    __shared__ const elem_t* sources[T::LINES];
    if (blockIdx.x >= *n_tiles) return;
    const int expert = tiles[3 * blockIdx.x], first = tiles[3 * blockIdx.x + 1];
    const int n_rows = tiles[3 * blockIdx.x + 2], start = blockIdx.y * T::N_OUT;
    for (int i = threadIdx.x; i < T::LINES; i += T::THREADS) {
        const int column = start + i - T::N_ROWS;
        if (i < T::N_ROWS) {
            sources[i] = i < n_rows ? act + (u64)(first + i) * inner : nullptr;
        } else {
            const u64 row = (u64)expert * hidden + column;
            sources[i] = column < hidden ? weight + row * inner : nullptr;
        }
    }
    __syncthreads();
    T tile = {sources, reinterpret_cast<elem_t*>(stages)};
    const float* products = tile.run(inner);
    for (int i = threadIdx.x; i < n_rows * (T::N_OUT / 8); i += T::THREADS) {
        const int row = i / (T::N_OUT / 8), column = i % (T::N_OUT / 8) * 8;
        if (start + column >= hidden) continue;
        float values[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = products[row * T::OUT_LINE + column + j];
        store8(out + (u64)(first + row) * hidden + start + column, values);
    }
}

}  // namespace moe_gemm

// Two blocks of a multiprocessor hide each other's waits. HIP counts waves of a SIMD here, and two
// of them would leave the larger tiles too few registers.
#define MOE_KERNEL(TILE) \
    extern "C" __global__ void __launch_bounds__(moe_gemm::TILE::THREADS, TANDEM_HIP ? 1 : 2)

#define MOE_GEMM(NAME, TILE)                                                                     \
    MOE_KERNEL(TILE)                                                                             \
    moe_gate_up_##NAME(const int* tiles, const int* n_tiles, const int* pair_of, int top_k,      \
                       const elem_t* x, int hidden, const elem_t* weight, int inner,             \
                       elem_t* act) {                                                            \
        moe_gemm::gate_up<moe_gemm::TILE>(tiles, n_tiles, pair_of, top_k, x, hidden, weight,     \
                                          inner, act);                                           \
    }                                                                                            \
    MOE_KERNEL(TILE)                                                                             \
    moe_down_##NAME(const int* tiles, const int* n_tiles, const elem_t* act, int inner,          \
                    const elem_t* weight, int hidden, elem_t* out) {                             \
        moe_gemm::down<moe_gemm::TILE>(tiles, n_tiles, act, inner, weight, hidden, out);         \
    }

MOE_GEMM(16, Low)
MOE_GEMM(64, Middle)
MOE_GEMM(128, High)
