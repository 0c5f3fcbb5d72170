// Scores by Hopper's matrix unit. Keys are the rows of the products, 64 at a time, and the heads of
// several query rows their columns, so that a thread sums the heads of two keys mostly by itself.
// The terms of a score have one order whatever the form: first over the heads of a thread, then
// over the four threads that share them.

#if TANDEM_BF16 && TANDEM_SM90 && (INDEX_HEADS == 32 || INDEX_HEADS == 64) && INDEX_DIM % 64 == 0
namespace indexer {
namespace on_hopper {

constexpr int KEYS = 64;  // Keys of a tile.
constexpr int AHEAD = 2;      // Tiles that are copied ahead.
constexpr int UNROLLED = 4;
constexpr int PER_HALF = 128 / INDEX_HEADS;  // Rows of a product of 128 columns.
constexpr int SLABS = INDEX_DIM / 64;
constexpr int KEY_SLAB = KEYS * hopper::ROW_BYTES, KEY_BYTES = SLABS * KEY_SLAB;

// The greater of `x` and 0; a NaN stays one.
DEVICE float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

// The work of a block: `ROWS` rows of one sequence at most, and a part of their keys.
template <int GROUPS, int ROWS>
struct Work {
    static constexpr int THREADS = GROUPS * 128, AT_ONCE = THREADS / 8;
    // While the tile behind it begins, a tile is still multiplied.
    static constexpr int STAGES = AHEAD + (ROWS > GROUPS * PER_HALF ? 2 : 1);
    static constexpr int Q_SLAB = ROWS * INDEX_HEADS * hopper::ROW_BYTES;

    const elem_t* cache;
    Blocks blocks;
    int seq, key0, key_end;
    unsigned char *q_s, *keys_s;
    const float* weights_s;  // [ROWS, INDEX_HEADS], the scale included.
    const int* visible_s;    // [ROWS], how far keys are scored.
    float* out;              // The scores of the first row.
    int score_stride;
    int slots[KEYS / AT_ONCE];

    __device__ __forceinline__ int n_tiles() const { return (key_end - key0 + KEYS - 1) / KEYS; }

    // Slots are looked up a tile before its copies need them.
    __device__ __forceinline__ void find_slots(int tile) {
#pragma unroll
        for (int i = 0; i < KEYS / AT_ONCE; ++i) {
            const int key = key0 + tile * KEYS + (int)threadIdx.x / 8 + i * AT_ONCE;
            slots[i] = key < key_end ? (int)slot_of(blocks, seq, key) : -1;
        }
    }

    // Copies the tile whose slots were looked up, if it is there.
    __device__ __forceinline__ void copy_tile(int tile) {
        unsigned char* to = keys_s + tile % STAGES * KEY_BYTES;
#pragma unroll
        for (int i = 0; i < KEYS / AT_ONCE && tile < n_tiles(); ++i) {
            const int piece = threadIdx.x % 8;
            const elem_t* from = cache + (long long)max(slots[i], 0) * INDEX_DIM + piece * 8;
            const int at = hopper::piece_at(threadIdx.x / 8 + i * AT_ONCE, piece);
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
                copy16_async(to + slab * KEY_SLAB + at, from + slab * 64, slots[i] >= 0);
        }
        copy_commit();
        find_slots(tile + 1);
    }

    // Waits for a tile, as all threads do.
    __device__ __forceinline__ void wait_for_tile() const {
        copy_wait<AHEAD - 1>();
        hopper::publish();
        __syncthreads();
    }

    // Begins the products of a tile with the heads from row `row` on.
    template <int N>
    __device__ __forceinline__ void begin(float (&dots)[N], int tile, int row) const {
        const u64 k = hopper::operand(keys_s + tile % STAGES * KEY_BYTES);
        const u64 q = hopper::operand(q_s + row * INDEX_HEADS * hopper::ROW_BYTES);
        hopper::begin();
#pragma unroll
        for (int at = 0; at < INDEX_DIM / 16; ++at)
            hopper::multiply(dots, k + at / 4 * (KEY_SLAB / 16) + at % 4 * 2,
                             q + at / 4 * (Q_SLAB / 16) + at % 4 * 2, at > 0);
        hopper::commit();
    }

    // Writes the scores of a tile from its products.
    template <int N>
    __device__ __forceinline__ void write(const float (&dots)[N], int tile, int row) const {
        constexpr int N_ROWS = 2 * N / INDEX_HEADS;
        const int lane = threadIdx.x % 32, c = lane % 4;
        const bool is_high = c & 1, is_last = c & 2;
        float sums[N_ROWS];
#pragma unroll
        for (int r = 0; r < N_ROWS; ++r) {
            float sum[2] = {};  // Of keys g and g + 8.
#pragma unroll
            for (int j = 0; j < INDEX_HEADS / 8; ++j) {
                const int at = 4 * (r * (INDEX_HEADS / 8) + j);
                const float2 w =
                    *(const float2*)(weights_s + (row + r) * INDEX_HEADS + 8 * j + 2 * c);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    sum[h] = fmaf(w.x, relu(dots[at + 2 * h]), sum[h]);
                    sum[h] = fmaf(w.y, relu(dots[at + 2 * h + 1]), sum[h]);
                }
            }
            // Odd threads go on with key g + 8.
            const float other = shuffle_xor(is_high ? sum[0] : sum[1], 1);
            sums[r] = (is_high ? sum[1] : sum[0]) + other;
        }
        const int key = key0 + tile * KEYS + threadIdx.x / 32 % 4 * 16 + lane / 4 + (c & 1) * 8;
        if constexpr (N_ROWS == 1) {
            const float sum = sums[0] + shuffle_xor(sums[0], 2);
            if (!is_last && key < visible_s[row]) out[(long long)row * score_stride + key] = sum;
        } else {
            // And the upper two threads with the upper half of the rows.
#pragma unroll
            for (int r = 0; r < N_ROWS / 2; ++r) {
                const float low = sums[r], high = sums[r + N_ROWS / 2];
                const float sum = (is_last ? high : low) + shuffle_xor(is_last ? low : high, 2);
                const int to = row + r + (is_last ? N_ROWS / 2 : 0);
                if (key < visible_s[to]) out[(long long)to * score_stride + key] = sum;
            }
        }
    }

    // Scores `N_ROWS` rows from `row` on.
    template <int N_ROWS>
    __device__ __forceinline__ void score(int row) {
        float dots[N_ROWS * INDEX_HEADS / 2];
        for (int tile = 0; tile < n_tiles(); ++tile) {
            wait_for_tile();
            begin(dots, tile, row);
            copy_tile(tile + AHEAD);
            hopper::wait<0>();
            hopper::pin(dots);
            write(dots, tile, row);
        }
    }

    // Scores twice as many. While the products of one half are summed, the matrix unit computes
    // those of the next. This ends after `UNROLLED` tiles, because the compiler serializes products
    // that are under way from one round of a loop to the next. Tiles behind the last one hold
    // anything; their scores are not written.
    template <int N_ROWS>
    __device__ __forceinline__ void score_twice(int row) {
        float low[N_ROWS * INDEX_HEADS / 2], high[N_ROWS * INDEX_HEADS / 2];
        for (int first = 0; first < n_tiles(); first += UNROLLED) {
            wait_for_tile();
            begin(low, first, row);
            copy_tile(first + AHEAD);
#pragma unroll
            for (int i = 0; i < UNROLLED; ++i) {
                const int tile = first + i;
                begin(high, tile, row + N_ROWS);
                hopper::wait<1>();
                hopper::pin(low);
                write(low, tile, row);
                if (i + 1 < UNROLLED) {
                    wait_for_tile();
                    begin(low, tile + 1, row);
                    copy_tile(tile + 1 + AHEAD);
                    hopper::wait<1>();
                } else {
                    hopper::wait<0>();
                }
                hopper::pin(high);
                write(high, tile, row + N_ROWS);
            }
        }
    }
};

template <int GROUPS, int ROWS>
DEVICE void score_tile(SCORE_PARAMS, int chunk) {
    using Of = Work<GROUPS, ROWS>;
    extern __shared__ __align__(1024) unsigned char slabs[];
    __shared__ __align__(8) float weights_s[ROWS * INDEX_HEADS];
    __shared__ int visible_s[ROWS];
    const int tid = threadIdx.x, group = tid / 128;
    // Rows that see the most begin first.
    const int number = gridDim.x - 1 - blockIdx.x;
    const SeqTile t = find_tile(row_start, n_seqs, begin, end, 1, ROWS, number);
    if (t.n == 0) return;
    const int row0 = max(row_start[t.seq], begin) + t.first;
    if (tid < ROWS) {
        const bool is_row = tid < t.n && row_seq[row0 + tid] >= 0;
        const int visible = is_row ? n_visible(row_pos, row0 + tid, score_stride) : 0;
        visible_s[tid] = visible > topk ? visible : 0;
    }
    __syncthreads();
    int most = 0;
    for (int row = 0; row < t.n; ++row) most = max(most, visible_s[row]);
    const int key0 = blockIdx.y * chunk, key_end = min(key0 + chunk, most);
    if (key0 >= key_end) return;
    __syncthreads();
    if (tid < ROWS) visible_s[tid] = min(visible_s[tid], key_end);

    const Blocks blocks = {block_table, table_stride, block_size, n_slots};
    Of work = {cache, blocks, t.seq, key0, key_end, slabs, slabs + SLABS * Of::Q_SLAB, weights_s,
               visible_s, scores + (long long)(row0 - begin) * score_stride, score_stride};
    work.find_slots(0);
    for (int i = tid / 8; i < ROWS * INDEX_HEADS; i += Of::AT_ONCE) {
        const bool is_real = i < t.n * INDEX_HEADS;
        const long long at = (long long)row0 * INDEX_HEADS + (is_real ? i : 0);
        for (int slab = 0; slab < SLABS; ++slab)
            copy16_async(slabs + slab * Of::Q_SLAB + hopper::piece_at(i, tid % 8),
                         q + at * INDEX_DIM + slab * 64 + tid % 8 * 8, is_real);
        if (tid % 8 == 0) weights_s[i] = is_real ? weights[at] * scale : 0;
    }
    for (int tile = 0; tile < AHEAD; ++tile) work.copy_tile(tile);
    if (t.n == 1) work.template score<1>(group);
    else if (t.n <= GROUPS * PER_HALF) work.template score<PER_HALF>(group * PER_HALF);
    else if constexpr (ROWS > GROUPS * PER_HALF)
        work.template score_twice<PER_HALF>(group * (ROWS / GROUPS));
    copy_wait<0>();
}

#define SCORE_ARGS                                                                               \
    scores, q, weights, cache, row_pos, row_seq, row_start, block_table, table_stride,           \
        block_size, n_slots, n_seqs, begin, end, score_stride, topk, scale, chunk

// Grid: tiles of rows, chunks of keys. For windows of a few rows; two blocks of a multiprocessor
// hide each other's waits.
extern "C" __global__ void __launch_bounds__(128, 2)
index_scores_few(SCORE_PARAMS, int chunk) { score_tile<1, PER_HALF>(SCORE_ARGS); }

// For prompts: 16 rows of 32 heads read the keys from shared memory once.
extern "C" __global__ void __launch_bounds__(256, 1)
index_scores_many(SCORE_PARAMS, int chunk) { score_tile<2, 4 * PER_HALF>(SCORE_ARGS); }

}  // namespace on_hopper
}  // namespace indexer
#endif
