// The products of the experts for many rows each, by Hopper's matrix unit. Two blocks, a cluster,
// go through tiles of one expert's rows and 256 of its weight rows; each has half of the tile's
// rows, and half of the weights, which the copy engine writes to both. One warp group of a block
// copies, without a pause between tiles, the other two compute. Weight rows are the rows of the
// products. A token's sum runs over its inputs in the order of `moe_hopper.cu`.

#if TANDEM_BF16 && TANDEM_SM90
namespace moe_wide {

constexpr int COMPUTERS = 256, COPIERS = 128, THREADS = COMPUTERS + COPIERS, BLOCKS = 2;
constexpr int STAGES = 4, MAX_TOKENS = 160;
constexpr int WEIGHT_ROWS = 256, BOX_ROWS = 64, BOX_BYTES = BOX_ROWS * hopper::ROW_BYTES;
constexpr int TOKENS_AT = WEIGHT_ROWS * hopper::ROW_BYTES;
constexpr int STAGE_BYTES = TOKENS_AT + MAX_TOKENS * hopper::ROW_BYTES;
// Steps whose copies of tokens may be under way. More would wait for a stage that is not free yet.
constexpr int UNDER_WAY = STAGES - 2;

// A stage of the ring, and which time around it is.
struct Place {
    int stage, phase;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Exchanges rows and columns of 8 x 8 values, of which each four threads have a row, two a thread.
DEVICE unsigned transposed(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Gates and ups are halves of one warp group, so that a thread has both of its products.
template <bool IS_GATE_UP>
struct Work {
    static constexpr int WIDTH = IS_GATE_UP ? WEIGHT_ROWS / 2 : WEIGHT_ROWS;

    const int *tiles, *pair_of;
    int n_units, n_slices, top_k, n_in, n_out;
    const elem_t* x;
    elem_t* out;
    unsigned char* stages;
    // Of each stage: its inputs are there; both blocks are done with it.
    u64 *full, *empty;
    int rank;

    // This block's part of a tile: the expert's rows `first ..`, and the outputs `start ..`.
    struct Part {
        int expert, first, n_rows, start;
    };

    __device__ __forceinline__ Part part(int unit) const {
        const int* tile = tiles + 3 * (unit / n_slices);
        const int half = (tile[2] + 1) / 2;
        return {tile[0], tile[1] + rank * half, rank ? tile[2] - half : half,
                unit % n_slices * WIDTH};
    }

    // The first weight row of a box. Rows behind the expert's last are those of other outputs; what
    // they make is not written.
    __device__ __forceinline__ int weight_row(const Part& own, int box) const {
        if (!IS_GATE_UP) return own.expert * n_out + own.start + box * BOX_ROWS;
        return (own.expert * 2 + box % 2) * n_out + own.start + box / 2 * BOX_ROWS;
    }

    // Copies this block's half of a step's weights to both blocks; by one thread.
    __device__ __forceinline__ void copy_weights(const TensorMap& weight, const Part& own, int at,
                                                 unsigned char* stage, u64* barrier) const {
        hopper::arrive_with_bytes(barrier, WEIGHT_ROWS * hopper::ROW_BYTES);
#pragma unroll
        for (int i = 0; i < WEIGHT_ROWS / BOX_ROWS / BLOCKS; ++i) {
            const int box = rank * (WEIGHT_ROWS / BOX_ROWS / BLOCKS) + i;
            hopper::copy_box_to_both(stage + box * BOX_BYTES, weight, at, weight_row(own, box),
                                     barrier);
        }
    }

    __device__ __forceinline__ void copy_all(const TensorMap& weight) const {
        constexpr int AT_ONCE = COPIERS / 8;
        const int thread = threadIdx.x - COMPUTERS, row = thread / 8, piece = thread % 8;
        Place next = {0, 0}, oldest = {0, 0};
        int n_under_way = 0;
        for (int unit = blockIdx.x / BLOCKS; unit < n_units; unit += gridDim.x / BLOCKS) {
            const Part own = part(unit);
            const elem_t* tokens[MAX_TOKENS / AT_ONCE];
#pragma unroll
            for (int i = 0; i < MAX_TOKENS / AT_ONCE; ++i) {
                const int place = own.first + row + i * AT_ONCE;
                tokens[i] = nullptr;
                if (row + i * AT_ONCE >= own.n_rows) continue;
                const int token = IS_GATE_UP ? pair_of[place] / top_k : place;
                tokens[i] = x + (u64)token * n_in + piece * 8;
            }
            for (int at = 0; at < n_in; at += hopper::SLAB_WIDTH) {
                hopper::wait_phase(empty + next.stage, next.phase ^ 1);
                unsigned char* stage = stages + next.stage * STAGE_BYTES;
                if (thread == 0) copy_weights(weight, own, at, stage, full + next.stage);
                unsigned char* to = stage + TOKENS_AT + hopper::piece_at(row, piece);
                const bool is_input = at + piece * 8 < n_in;
#pragma unroll
                for (int i = 0; i < MAX_TOKENS / AT_ONCE; ++i) {
                    if (i * AT_ONCE >= own.n_rows) break;
                    const bool is_real = is_input && tokens[i];
                    // Without a source, any readable address will do.
                    copy16_async(to + i * AT_ONCE * hopper::ROW_BYTES,
                                 is_real ? tokens[i] + at : x, is_real);
                }
                copy_commit();
                next.advance();
                if (++n_under_way <= UNDER_WAY) continue;
                copy_wait<UNDER_WAY>();
                hopper::publish();
                hopper::arrive(full + oldest.stage);
                oldest.advance();
                --n_under_way;
            }
        }
        copy_wait<0>();
        hopper::publish();
        for (; n_under_way > 0; --n_under_way) {
            hopper::arrive(full + oldest.stage);
            oldest.advance();
        }
    }

    // Tells both blocks that this warp is done with a stage.
    __device__ __forceinline__ void release(int stage) const {
        if (threadIdx.x % 32 < BLOCKS) hopper::arrive_at(empty + stage, threadIdx.x % 32);
    }

    // The products of a tile's part of at most N rows.
    template <int N>
    __device__ __forceinline__ void run(const Part& own, Place& next) const {
        float sums[2][N / 2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sums[half][i] = 0.0f;
        const int group = threadIdx.x / 128;
        int previous = -1;
        for (int at = 0; at < n_in; at += hopper::SLAB_WIDTH) {
            hopper::wait_phase(full + next.stage, next.phase);
            const unsigned char* stage = stages + next.stage * STAGE_BYTES;
            const u64 low = hopper::operand(stage + 2 * group * BOX_BYTES);
            const u64 high = hopper::operand(stage + (2 * group + 1) * BOX_BYTES);
            hopper::multiply_halves(sums, low, high, hopper::operand(stage + TOKENS_AT));
            hopper::wait<1>();
            if (previous >= 0) release(previous);
            previous = next.stage;
            next.advance();
        }
        hopper::wait<0>();
        hopper::pin(sums[0]);
        hopper::pin(sums[1]);
        release(previous);
        elem_t* to = out + (u64)own.first * n_out;
        if (IS_GATE_UP) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sums[0][i] = silu(sums[0][i]) * sums[1][i];
            write(sums[0], to, own.start + group * BOX_ROWS, own.n_rows);
        } else {
            write(sums[0], to, own.start + 2 * group * BOX_ROWS, own.n_rows);
            write(sums[1], to, own.start + (2 * group + 1) * BOX_ROWS, own.n_rows);
        }
    }

    // Writes 64 outputs from `column` on of each row. Each four threads of a warp have 16 of a row.
    template <int COUNT>
    __device__ __forceinline__ void write(const float (&sums)[COUNT], elem_t* to, int column,
                                          int n_rows) const {
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
            if (row < n_rows && column < n_out)
                *(uint2*)(to + (u64)row * n_out + column) =
                    make_uint2(is_odd ? other : low, is_odd ? high : other);
        }
    }

    __device__ __forceinline__ void compute_all() const {
        Place next = {0, 0};
        for (int unit = blockIdx.x / BLOCKS; unit < n_units; unit += gridDim.x / BLOCKS) {
            const Part own = part(unit);
            if (own.n_rows > 144) run<160>(own, next);
            else if (own.n_rows > 136) run<144>(own, next);
            else if (own.n_rows > 128) run<136>(own, next);
            else if (own.n_rows > 112) run<128>(own, next);
            else if (own.n_rows > 96) run<112>(own, next);
            else if (own.n_rows > 64) run<96>(own, next);
            else run<64>(own, next);
        }
    }

    __device__ __forceinline__ void run_all(const TensorMap& weight) {
        full = (u64*)(stages + STAGES * STAGE_BYTES);
        empty = full + STAGES;
        rank = hopper::block_of_cluster();
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < STAGES; ++stage) {
                hopper::init_barrier(full + stage, COPIERS + 1);
                hopper::init_barrier(empty + stage, BLOCKS * COMPUTERS / 32);
            }
            hopper::publish_barriers();
        }
        hopper::sync_cluster();
        if (threadIdx.x >= COMPUTERS) {
            hopper::give_registers<56>();
            copy_all(weight);
        } else {
            hopper::take_registers<224>();
            compute_all();
        }
        // Neither block ends while the other may still write to its memory.
        hopper::sync_cluster();
    }
};

}  // namespace moe_wide

// act[place, i] = silu(gate) * up of the place's row of x; `weight` has boxes of 64 rows and 64
// inputs.
extern "C" __global__ void __cluster_dims__(moe_wide::BLOCKS, 1, 1)
__launch_bounds__(moe_wide::THREADS, 1)
moe_gate_up_wide(const int* tiles, const int* n_tiles, const int* pair_of, int top_k,
                 const elem_t* x, int hidden, const __grid_constant__ TensorMap weight, int inner,
                 elem_t* act) {
    extern __shared__ __align__(1024) unsigned char slabs[];
    typedef moe_wide::Work<true> Work;
    const int n_slices = (inner + Work::WIDTH - 1) / Work::WIDTH;
    Work work = {tiles, pair_of, *n_tiles * n_slices, n_slices, top_k, hidden, inner,
                 x, act, slabs};
    work.run_all(weight);
}

// out[place] = weight * act[place]; `weight` as above.
extern "C" __global__ void __cluster_dims__(moe_wide::BLOCKS, 1, 1)
__launch_bounds__(moe_wide::THREADS, 1)
moe_down_wide(const int* tiles, const int* n_tiles, const elem_t* act, int inner,
              const __grid_constant__ TensorMap weight, int hidden, elem_t* out) {
    extern __shared__ __align__(1024) unsigned char slabs[];
    typedef moe_wide::Work<false> Work;
    const int n_slices = (hidden + Work::WIDTH - 1) / Work::WIDTH;
    Work work = {tiles, nullptr, *n_tiles * n_slices, n_slices, 1, inner, hidden, act, out, slabs};
    work.run_all(weight);
}
#endif
