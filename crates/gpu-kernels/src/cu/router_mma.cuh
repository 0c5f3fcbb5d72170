// Router logits by the matrix unit: a float32 weight is split into three bfloat16, whose products
// with bfloat16 inputs are exact.
//
// A logit is summed in one order, whatever the tile that its row and its expert are in: inputs are
// cut into chunks, of which every warp of a block takes each eighth; a chunk is summed by the
// matrix unit from zero, its least parts first, then added to the warp's sum; the warps' sums are
// added last. Rounding is then that of float32: the matrix unit, which cuts bits off instead of
// rounding, never adds to a long sum.

namespace router {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

#if TANDEM_BF16 && TANDEM_SM80

// The upper halves of two values, which are bfloat16: the eight bits that a product takes.
DEVICE unsigned upper_halves(float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

// What the upper half leaves of a value, exactly. NaN of a value that is not finite.
DEVICE float rest(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

// ROWS rows by EXPERTS experts. A warp has STAGES stages of GROUP chunks under way; nothing of its
// stages concerns another warp. The chunks of a stage hide each other's waits where there are few
// sums.
template <int ROWS_, int EXPERTS_, int GROUP, int STAGES>
struct MatrixTile {
    static constexpr int ROWS = ROWS_, EXPERTS = EXPERTS_;
    static constexpr int R = (ROWS + 15) / 16, O = (EXPERTS + 7) / 8;
    static constexpr int CHUNK = 32;
    // Of a row's inputs and of an expert's weights.
    static constexpr int ROW_BYTES = CHUNK * 2, EXPERT_BYTES = CHUNK * 4;
    static constexpr int CHUNK_BYTES = ROWS * ROW_BYTES + EXPERTS * EXPERT_BYTES;
    static constexpr int STAGE_BYTES = GROUP * CHUNK_BYTES;
    static constexpr int SHARED = WARPS * STAGES * STAGE_BYTES;
    static_assert(WARPS * R * O * 32 * (int)sizeof(float4) <= SHARED, "the warps' sums fit");

    const elem_t* x;
    const float* gate;
    int hidden, n_rows, n_experts;
    unsigned char* stages;  // Of this warp.
    float sums[R][O][4];

    // Where a 16-byte piece of a chunk's inputs or weights lies: places are exchanged, so that no
    // two lanes that read at once meet in a bank.
    __device__ __forceinline__ static int row_at(int row, int piece) {
        return row * ROW_BYTES + (piece ^ row / 2 % 4) * 16;
    }
    __device__ __forceinline__ static int expert_at(int expert, int piece) {
        return expert * EXPERT_BYTES + (piece ^ expert % 4 * 2) * 16;
    }

    __device__ __forceinline__ void load(int step) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
        const int start = (step * GROUP * WARPS + warp) * CHUNK;
#pragma unroll
        for (int j = 0; j < GROUP * ROWS * 4 / 32; ++j) {
            const int i = j * 32 + lane, piece = i % 4, row = i / 4 % ROWS, chunk = i / 4 / ROWS;
            const int k = start + chunk * WARPS * CHUNK + piece * 8;
            const bool real = row < n_rows && k < hidden;
            // Without a source, any readable address will do.
            copy16_async(stage + chunk * CHUNK_BYTES + row_at(row, piece),
                         real ? x + row * hidden + k : x, real);
        }
        stage += ROWS * ROW_BYTES;
#pragma unroll
        for (int j = 0; j < GROUP * EXPERTS * 8 / 32; ++j) {
            const int i = j * 32 + lane, piece = i % 8;
            const int expert = i / 8 % EXPERTS, chunk = i / 8 / EXPERTS;
            const int k = start + chunk * WARPS * CHUNK + piece * 4;
            const bool real = expert < n_experts && k < hidden;
            copy16_async(stage + chunk * CHUNK_BYTES + expert_at(expert, piece),
                         real ? gate + expert * hidden + k : gate, real);
        }
    }

    // Both halves of a chunk of 16 rows.
    __device__ __forceinline__ static void load_rows(unsigned (&a)[2][4], const void* rows) {
        const int lane = threadIdx.x % 32;
        const unsigned at = shared_address(rows);
        if constexpr (ROWS < 16) {
            load_matrices(a[0][0], a[0][2], a[1][0], a[1][2], at + row_at(lane % 8, lane / 8));
            a[0][1] = a[0][3] = a[1][1] = a[1][3] = 0;
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                load_matrices(a[half][0], a[half][1], a[half][2], a[half][3],
                              at + row_at(lane % 16, 2 * half + lane / 16));
        }
    }

    // The parts of the weights of eight experts, the least part first, for the inputs that lanes
    // get of `load_rows`.
    __device__ __forceinline__ static void load_parts(unsigned (&b)[3][2][2],
                                                      const unsigned char* experts) {
        const int lane = threadIdx.x % 32, expert = lane / 4 % EXPERTS, t = lane % 4;
        float w[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned char* at = experts + expert_at(expert, 2 * i + t / 2) + t % 2 * 8;
            const float2 pair = *reinterpret_cast<const float2*>(at);
            w[2 * i] = pair.x, w[2 * i + 1] = pair.y;
        }
#pragma unroll
        for (int part = 2; part >= 0; --part)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                b[part][i / 2][i % 2] = upper_halves(w[2 * i], w[2 * i + 1]);
                w[2 * i] = rest(w[2 * i]), w[2 * i + 1] = rest(w[2 * i + 1]);
            }
    }

    __device__ __forceinline__ void multiply(int step) {
        const unsigned char* stage = stages + step % STAGES * STAGE_BYTES;
        unsigned a[GROUP][R][2][4], b[GROUP][3][2][2];
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
#pragma unroll
            for (int r = 0; r < R; ++r)
                load_rows(a[i][r], stage + i * CHUNK_BYTES + r * 16 * ROW_BYTES);
        stage += ROWS * ROW_BYTES;
#pragma unroll
        for (int o = 0; o < O; ++o) {
#pragma unroll
            for (int i = 0; i < GROUP; ++i)
                load_parts(b[i], stage + i * CHUNK_BYTES + o * 8 * EXPERT_BYTES);
            float chunks[GROUP][R][4] = {};
#pragma unroll
            for (int part = 0; part < 6; ++part)
#pragma unroll
                for (int i = 0; i < GROUP * R; ++i)
                    mma_16x8x16(chunks[i / R][i % R], a[i / R][i % R][part % 2],
                                b[i / R][part / 2][part % 2]);
#pragma unroll
            for (int i = 0; i < GROUP * R * 4; ++i)
                sums[i / 4 % R][o][i % 4] += chunks[i / 4 / R][i / 4 % R][i % 4];
        }
    }

    __device__ __forceinline__ void run() {
        const int n_steps = (hidden + GROUP * WARPS * CHUNK - 1) / (GROUP * WARPS * CHUNK);
#pragma unroll
        for (int i = 0; i < R * O * 4; ++i) sums[i / 4 / O][i / 4 % O][i % 4] = 0.0f;
#pragma unroll
        for (int step = 0; step < STAGES; ++step) {
            if (step < n_steps) load(step);
            copy_commit();
        }
#pragma unroll 1
        for (int step = 0; step < n_steps; ++step) {
            copy_wait<STAGES - 1>();
            sync_warp();
            multiply(step);
            sync_warp();
            if (step + STAGES < n_steps) load(step + STAGES);
            copy_commit();
        }
    }

    // Adds the warps' sums and writes the logits of rows `stride` values apart.
    __device__ __forceinline__ void add_warps(float4* parts, float* logits, int stride) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        // No warp reads its stages any more.
        __syncthreads();
#pragma unroll
        for (int i = 0; i < R * O; ++i) {
            const float* sum = sums[i / O][i % O];
            parts[(warp * R * O + i) * 32 + lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = warp; i < R * O; i += WARPS) {
            float total[4] = {};
#pragma unroll
            for (int other = 0; other < WARPS; ++other) {
                const float4 part = parts[(other * R * O + i) * 32 + lane];
                total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
            }
            const int row = i / O * 16 + lane / 4, expert = i % O * 8 + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (row + j / 2 * 8 < n_rows && expert + j % 2 < n_experts)
                    logits[(row + j / 2 * 8) * stride + expert + j % 2] = total[j];
        }
    }

    // The logits of `n_rows` rows with the experts from `first` on.
    __device__ __forceinline__ static void logits(const elem_t* x, int hidden, const float* gate,
                                                  int first, int n_experts, int n_rows,
                                                  float* logits, float* shared) {
        const int n_own = min(EXPERTS, n_experts - first);
        unsigned char* stages = reinterpret_cast<unsigned char*>(shared);
        stages += threadIdx.x / 32 * STAGES * STAGE_BYTES;
        MatrixTile tile = {x, gate + (u64)first * hidden, hidden, n_rows, n_own, stages};
        tile.run();
        tile.add_warps(reinterpret_cast<float4*>(shared), logits + first, n_experts);
    }
};

typedef MatrixTile<8, 4, 4, 2> Few;
typedef MatrixTile<32, 32, 1, 2> Middle;
typedef MatrixTile<64, 64, 1, 2> Many;

#endif

}  // namespace router
