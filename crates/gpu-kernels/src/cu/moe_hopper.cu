// The products of the experts by Hopper's matrix unit: a block for each tile of one expert's rows
// and 128 of its weight rows. Weight rows are the rows of the products, so that a tile of few
// tokens costs no more than they need; two blocks of a multiprocessor hide each other's waits. A
// token's sum runs over its inputs in one order whatever the tile, so that it has the same bits in
// each of them.

#if TANDEM_BF16 && TANDEM_SM90
namespace moe_hopper {

constexpr int THREADS = 128, AT_ONCE = THREADS / 8, HALF = 64;
constexpr int HALF_BYTES = HALF * hopper::ROW_BYTES;

// Two halves of 64 weight rows by N tokens, in steps of 64 inputs, of which STAGES are under way.
template <int N_, int STAGES>
struct Tile {
    static constexpr int N = N_;
    static constexpr int STAGE_BYTES = (2 * HALF + N) * hopper::ROW_BYTES;
    static_assert(N * (2 * HALF + 8) * 2 <= STAGES * STAGE_BYTES, "outputs fit where inputs were");

    unsigned char* stages;
    int n_in;
    // The first row of each half, and how many of its rows there are.
    const elem_t* halves[2];
    int n_rows[2];
    // Of the tokens that this thread copies; null for those that the tile lacks.
    const elem_t* tokens[N / AT_ONCE];
    float sums[2][N / 2];

    __device__ __forceinline__ void load(int step) const {
        unsigned char* to = stages + step % STAGES * STAGE_BYTES;
        const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
        const int column = step * hopper::SLAB_WIDTH + piece * 8;
        const bool is_input = column < n_in;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < HALF; i += AT_ONCE) {
                const bool is_real = is_input && row + i < n_rows[half];
                const elem_t* from = halves[half] + (u64)(is_real ? row + i : 0) * n_in;
                copy16_async(to + half * HALF_BYTES + hopper::piece_at(row + i, piece),
                             from + (is_real ? column : 0), is_real);
            }
#pragma unroll
        for (int i = 0; i < N / AT_ONCE; ++i) {
            const bool is_real = is_input && tokens[i];
            const int at = 2 * HALF_BYTES + hopper::piece_at(row + i * AT_ONCE, piece);
            // Without a source, any readable address will do.
            copy16_async(to + at, is_real ? tokens[i] + column : halves[0], is_real);
        }
    }

    // Leaves the products in `sums`, and the stages free.
    __device__ __forceinline__ void run() {
        const int n_steps = (n_in + hopper::SLAB_WIDTH - 1) / hopper::SLAB_WIDTH;
#pragma unroll
        for (int step = 0; step < STAGES - 1; ++step) {
            if (step < n_steps) load(step);
            copy_commit();
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sums[half][i] = 0.0f;
        for (int step = 0; step < n_steps; ++step) {
            copy_wait<STAGES - 2>();
            hopper::publish();
            __syncthreads();
            const unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
            const u64 low = hopper::operand(stage), high = hopper::operand(stage + HALF_BYTES);
            const u64 token = hopper::operand(stage + 2 * HALF_BYTES);
            hopper::multiply_halves(sums, low, high, token);
            // The copies begin while the matrix unit is busy.
            const int next = step + STAGES - 1;
            if (next < n_steps) load(next);
            copy_commit();
            hopper::wait<0>();
            hopper::pin(sums[0]);
            hopper::pin(sums[1]);
        }
        copy_wait<0>();
        __syncthreads();
    }
};

// Calls `put(token, row, at)` for each product of a thread: `row` of a half and where it is in it.
template <int N, typename Put>
DEVICE void for_each_product(Put put) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int at = 0; at < N / 2; ++at)
        put(at / 4 * 8 + lane % 4 * 2 + at % 2, row + at / 2 % 2 * 8, at);
}

// Copies `n_rows` rows of `n_pieces` pieces to `out`, of which the first `n` values count.
DEVICE void store_rows(const elem_t* rows, int line, int n_pieces, int n_rows, elem_t* out,
                       int stride, int n) {
    for (int i = threadIdx.x; i < n_rows * n_pieces; i += THREADS) {
        const int row = i / n_pieces, at = i % n_pieces * 8;
        const uint4* from = (const uint4*)(rows + row * line + at);
        if (at < n) *(uint4*)(out + (u64)row * stride + at) = *from;
    }
}

// act[place, i] = silu(gate) * up of the place's row of x
template <int N, int STAGES>
DEVICE void gate_up(const int* tiles, const int* n_tiles, const int* pair_of, int top_k,
                    const elem_t* x, int hidden, const elem_t* weight, int inner, elem_t* act) {
    extern __shared__ __align__(1024) unsigned char slabs[];
    constexpr int LINE = HALF + 8;
    if (blockIdx.x >= *n_tiles) return;
    const int expert = tiles[3 * blockIdx.x], first = tiles[3 * blockIdx.x + 1];
    const int n_rows = tiles[3 * blockIdx.x + 2], start = blockIdx.y * HALF;
    const elem_t* gates = weight + ((u64)expert * 2 * inner + start) * hidden;
    const int n_own = min(HALF, inner - start);
    Tile<N, STAGES> tile = {slabs, hidden, {gates, gates + (u64)inner * hidden}, {n_own, n_own}};
#pragma unroll
    for (int i = 0; i < N / AT_ONCE; ++i) {
        const int row = threadIdx.x / 8 + i * AT_ONCE;
        const bool is_row = row < n_rows;
        tile.tokens[i] = is_row ? x + (u64)(pair_of[first + row] / top_k) * hidden : nullptr;
    }
    tile.run();
    elem_t* out = (elem_t*)slabs;
    for_each_product<N>([&](int token, int row, int at) {
        store(out + token * LINE + row, silu(tile.sums[0][at]) * tile.sums[1][at]);
    });
    __syncthreads();
    store_rows(out, LINE, HALF / 8, n_rows, act + (u64)first * inner + start, inner, n_own);
}

// out[place] = weight * act[place]
template <int N, int STAGES>
DEVICE void down(const int* tiles, const int* n_tiles, const elem_t* act, int inner,
                 const elem_t* weight, int hidden, elem_t* out) {
    extern __shared__ __align__(1024) unsigned char slabs[];
    constexpr int LINE = 2 * HALF + 8;
    if (blockIdx.x >= *n_tiles) return;
    const int expert = tiles[3 * blockIdx.x], first = tiles[3 * blockIdx.x + 1];
    const int n_rows = tiles[3 * blockIdx.x + 2], start = blockIdx.y * 2 * HALF;
    const elem_t* low = weight + ((u64)expert * hidden + start) * inner;
    const int n_own = min(2 * HALF, hidden - start);
    // Of a half without rows no address is read.
    const elem_t* high = n_own > HALF ? low + (u64)HALF * inner : low;
    Tile<N, STAGES> tile = {slabs, inner, {low, high}, {n_own, n_own - HALF}};
#pragma unroll
    for (int i = 0; i < N / AT_ONCE; ++i) {
        const int row = threadIdx.x / 8 + i * AT_ONCE;
        tile.tokens[i] = row < n_rows ? act + (u64)(first + row) * inner : nullptr;
    }
    tile.run();
    elem_t* products = (elem_t*)slabs;
    for_each_product<N>([&](int token, int row, int at) {
        store(products + token * LINE + row, tile.sums[0][at]);
        store(products + token * LINE + HALF + row, tile.sums[1][at]);
    });
    __syncthreads();
    store_rows(products, LINE, HALF / 4, n_rows, out + (u64)first * hidden + start, hidden, n_own);
}

}  // namespace moe_hopper

#define MOE_HOPPER(N, STAGES)                                                                    \
    extern "C" __global__ void __launch_bounds__(moe_hopper::THREADS, 2) moe_gate_up_hopper_##N( \
        const int* tiles, const int* n_tiles, const int* pair_of, int top_k, const elem_t* x,    \
        int hidden, const elem_t* weight, int inner, elem_t* act) {                              \
        moe_hopper::gate_up<N, STAGES>(tiles, n_tiles, pair_of, top_k, x, hidden, weight, inner, \
                                       act);                                                     \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(moe_hopper::THREADS, 2) moe_down_hopper_##N(    \
        const int* tiles, const int* n_tiles, const elem_t* act, int inner,                      \
        const elem_t* weight, int hidden, elem_t* out) {                                         \
        moe_hopper::down<N, STAGES>(tiles, n_tiles, act, inner, weight, hidden, out);            \
    }

MOE_HOPPER(16, 5)
MOE_HOPPER(32, 5)
MOE_HOPPER(64, 4)
#endif
