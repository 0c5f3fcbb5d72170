// The products of the experts for many rows each, by Hopper's matrix unit: a block goes through
// tiles of one expert's rows and 256 of its weight rows, and copies the next tile's inputs while it
// writes the outputs of one. Weight rows are the rows of the products. A token's sum runs over its
// inputs in the order of `moe_hopper.cu`.

#if TANDEM_BF16 && TANDEM_SM90
namespace moe_wide {

constexpr int THREADS = 256, AT_ONCE = THREADS / 8, STAGES = 4, MAX_TOKENS = 160;
constexpr int WEIGHT_ROWS = 256, HALF = 64, HALF_BYTES = HALF * hopper::ROW_BYTES;
constexpr int TOKENS_AT = WEIGHT_ROWS * hopper::ROW_BYTES;
constexpr int STAGE_BYTES = TOKENS_AT + MAX_TOKENS * hopper::ROW_BYTES;
// Steps of 64 inputs that are copied ahead; one more than the products of a step are under way.
constexpr int AHEAD = STAGES - 2;

// Exchanges rows and columns of 8 x 8 values, of which each four threads have a row, two a thread.
DEVICE unsigned transposed(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// The outputs of a warp group: two halves of 64 weight rows. Gates and ups are halves of one group,
// so that a thread has both of its products.
template <bool IS_GATE_UP>
struct Work {
    static constexpr int WIDTH = IS_GATE_UP ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;

    const int *tiles, *pair_of;
    int n_units, n_slices, top_k, n_in, n_out;
    const elem_t *x, *weight;
    elem_t* out;
    unsigned char* stages;

    // The tile: the expert's rows `first ..`, and its outputs `start ..`.
    int unit, first, n_rows, start;
    const elem_t* weights;  // Of the first row that this thread copies, from its piece on.
    unsigned is_weight;     // Bit `i`: the `i`th row is there.
    const elem_t* tokens[MAX_TOKENS / AT_ONCE];

    __device__ __forceinline__ void begin(int next) {
        unit = next;
        if (unit >= n_units) return;
        const int* tile = tiles + 3 * (unit / n_slices);
        const int expert = tile[0], row = threadIdx.x / 8, column = threadIdx.x % 8 * 8;
        first = tile[1], n_rows = tile[2], start = unit % n_slices * WIDTH;
        const u64 row0 = (u64)expert * (IS_GATE_UP ? 2 * n_out : n_out) + start + row;
        weights = weight + row0 * n_in + column;
        is_weight = 0;
#pragma unroll
        for (int i = 0; i < WEIGHT_ROWS / AT_ONCE; ++i)
            is_weight |= (unsigned)(start + row + output_of(i) < n_out) << i;
#pragma unroll
        for (int i = 0; i < MAX_TOKENS / AT_ONCE; ++i) {
            const int place = first + row + i * AT_ONCE;
            tokens[i] = nullptr;
            if (row + i * AT_ONCE >= n_rows) continue;
            tokens[i] = x + (u64)(IS_GATE_UP ? pair_of[place] / top_k : place) * n_in + column;
        }
#pragma unroll
        for (int step = 0; step < AHEAD; ++step) load(step);
    }

    // How far the output of the `i`th weight row that a thread copies lies behind its first.
    static __device__ __forceinline__ int output_of(int i) {
        return IS_GATE_UP ? i / 4 * HALF + i % 2 * AT_ONCE : i * AT_ONCE;
    }

    // Copies the inputs of a step, if it is there; a group of copies in any case.
    __device__ __forceinline__ void load(int step) const {
        const int row = threadIdx.x / 8, piece = threadIdx.x % 8, at = step * hopper::SLAB_WIDTH;
        if (at < n_in) {
            unsigned char* to = stages + step % STAGES * STAGE_BYTES + hopper::piece_at(row, piece);
            const bool is_input = at + piece * 8 < n_in;
#pragma unroll
            for (int i = 0; i < WEIGHT_ROWS / AT_ONCE; ++i) {
                const bool is_real = is_input && is_weight >> i & 1;
                const int is_up = IS_GATE_UP ? i / 2 % 2 : 0;
                const u64 behind = (u64)(output_of(i) + is_up * n_out) * n_in;
                // Without a source, any readable address will do.
                const elem_t* from = is_real ? weights + behind + at : weight;
                copy16_async(to + i * AT_ONCE * hopper::ROW_BYTES, from, is_real);
            }
#pragma unroll
            for (int i = 0; i < MAX_TOKENS / AT_ONCE; ++i) {
                if (i * AT_ONCE >= n_rows) break;
                const bool is_real = is_input && tokens[i];
                copy16_async(to + TOKENS_AT + i * AT_ONCE * hopper::ROW_BYTES,
                             is_real ? tokens[i] + at : weight, is_real);
            }
        }
        copy_commit();
    }

    // The products of a tile of at most N rows, whose first inputs are under way.
    template <int N>
    __device__ __forceinline__ void run() {
        float sums[2][N / 2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sums[half][i] = 0.0f;
        const int group = threadIdx.x / 128;
        const int n_steps = (n_in + hopper::SLAB_WIDTH - 1) / hopper::SLAB_WIDTH;
        for (int step = 0; step < n_steps; ++step) {
            copy_wait<AHEAD - 1>();
            hopper::publish();
            // Behind it, the products of the step before the last are done in every warp group.
            __syncthreads();
            const unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
            const u64 low = hopper::operand(stage + 2 * group * HALF_BYTES);
            const u64 high = hopper::operand(stage + (2 * group + 1) * HALF_BYTES);
            const u64 token = hopper::operand(stage + TOKENS_AT);
            hopper::multiply_halves(sums, low, high, token);
            load(step + AHEAD);
            hopper::wait<1>();
        }
        hopper::wait<0>();
        hopper::pin(sums[0]);
        hopper::pin(sums[1]);
        copy_wait<0>();
        __syncthreads();
        elem_t* to = out + (u64)first * n_out;
        const int n_own = n_rows, own_start = start;
        begin(unit + gridDim.x);
        if (IS_GATE_UP) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sums[0][i] = silu(sums[0][i]) * sums[1][i];
            write(sums[0], to, own_start + group * HALF, n_own);
        } else {
            write(sums[0], to, own_start + 2 * group * HALF, n_own);
            write(sums[1], to, own_start + (2 * group + 1) * HALF, n_own);
        }
    }

    // Writes 64 outputs from `column` on of each row. Each four threads of a warp have 16 of a row.
    template <int COUNT>
    __device__ __forceinline__ void write(const float (&sums)[COUNT], elem_t* to, int column,
                                          int n_own) const {
        const int lane = threadIdx.x % 32, c = lane % 4;
        const bool is_odd = c & 1;
        column += threadIdx.x / 32 % 4 * 16 + (is_odd ? 8 : 0) + c / 2 * 4;
#pragma unroll
        for (int j = 0; j < COUNT / 4; ++j) {
            const unsigned low = transposed(pack_bf16(sums[4 * j], sums[4 * j + 1]));
            const unsigned high = transposed(pack_bf16(sums[4 * j + 2], sums[4 * j + 3]));
            // Even threads go on with the lower eight outputs, odd ones with the upper.
            const unsigned other = shuffle_xor(is_odd ? low : high, 1);
            const int row = 8 * j + lane / 4;
            if (row < n_own && column < n_out)
                *(uint2*)(to + (u64)row * n_out + column) =
                    make_uint2(is_odd ? other : low, is_odd ? high : other);
        }
    }

    __device__ __forceinline__ void run_all() {
        begin(blockIdx.x);
        while (unit < n_units) {
            if (n_rows > 128) run<160>();
            else if (n_rows > 96) run<128>();
            else if (n_rows > 64) run<96>();
            else run<64>();
        }
        copy_wait<0>();
    }
};

}  // namespace moe_wide

// act[place, i] = silu(gate) * up of the place's row of x
extern "C" __global__ void __launch_bounds__(moe_wide::THREADS, 1)
moe_gate_up_wide(const int* tiles, const int* n_tiles, const int* pair_of, int top_k,
                 const elem_t* x, int hidden, const elem_t* weight, int inner, elem_t* act) {
    extern __shared__ __align__(1024) unsigned char slabs[];
    typedef moe_wide::Work<true> Work;
    const int n_slices = (inner + Work::WIDTH - 1) / Work::WIDTH;
    Work work = {tiles, pair_of, *n_tiles * n_slices, n_slices, top_k, hidden, inner,
                 x, weight, act, slabs};
    work.run_all();
}

// out[place] = weight * act[place]
extern "C" __global__ void __launch_bounds__(moe_wide::THREADS, 1)
moe_down_wide(const int* tiles, const int* n_tiles, const elem_t* act, int inner,
              const elem_t* weight, int hidden, elem_t* out) {
    extern __shared__ __align__(1024) unsigned char slabs[];
    typedef moe_wide::Work<false> Work;
    const int n_slices = (hidden + Work::WIDTH - 1) / Work::WIDTH;
    Work work = {tiles, nullptr, *n_tiles * n_slices, n_slices, 1, inner, hidden,
                 act, weight, out, slabs};
    work.run_all();
}
#endif
