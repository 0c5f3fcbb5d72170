// Attention over latents by Hopper's matrix unit: a block for 64 query rows (a row of the pass and
// a head each) and a part of their keys, 64 keys at a time. Two warp groups compute the same scores
// and half of the output each, so that probabilities never leave registers and the groups meet at
// tiles of keys alone. Queries and two tiles of keys fill the shared memory of a multiprocessor.

#if TANDEM_BF16 && TANDEM_SM90 && KV_LORA == 512 && ROPE % 64 == 0
namespace mla_hopper {

using namespace mla;

constexpr int ROWS = 64, KEYS = 64;
constexpr int SLABS = WIDTH / hopper::SLAB_WIDTH;
constexpr int SLAB_BYTES = 64 * hopper::ROW_BYTES;
constexpr int TILE_BYTES = SLABS * SLAB_BYTES;
constexpr int THREADS = 256;
constexpr int AT_ONCE = THREADS / 8;  // Rows of a slab that the threads copy at once.

// The first of a thread's two query rows; the other one is 8 behind it.
DEVICE int own_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// A tile's first query row.
DEVICE long long first_row(const Mla& a, const Part& part) {
    return (long long)part.row0 * a.n_heads + part.tile.first;
}

// Copies the queries of a tile to their slabs.
DEVICE void copy_queries(const Mla& a, const Part& part, unsigned char* slabs) {
    const int piece = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < ROWS / AT_ONCE; ++i) {
        const int m = threadIdx.x / 8 + i * AT_ONCE;
        const bool is_row = m < part.tile.n;
        const long long row = first_row(a, part) + (is_row ? m : 0);
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            const int c = slab * 64 + piece * 8;
            const elem_t* from = c < KV_LORA ? a.q_latent + row * KV_LORA + c
                                             : a.q_pe + row * ROPE + (c - KV_LORA);
            copy16_async(slabs + slab * SLAB_BYTES + hopper::piece_at(m, piece), from, is_row);
        }
    }
}

// Which keys the query rows of a block see: those of a thread, and over all of them.
struct Visible {
    int own[2], most;
    unsigned least;
};

// The output of a part of the keys.
DEVICE void put_part(const Mla& a, const Part& part, const Visible& visible,
                     const hopper::Scores<KEYS>& scores, const float (&latents)[KV_LORA / 4]) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
    const bool is_part = part.n_parts > 1;
    const long long part0 = first_part(a, part);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (visible.own[h] < 0) continue;
        const int m = own_row() + 8 * h, column = group * (KV_LORA / 2) + lane % 4 * 2;
        const float sum = scores.row_sum[h];
        if (is_part && group == 0 && lane % 4 == 0)
            put_stat(a, part, part0 + m, scores.row_max[h], sum);
        const float by = is_part || sum == 0 ? 1.f : 1.f / sum;
        float* sums = sums_of_part(a, part, part0 + m) + column;
        elem_t* to = a.out + (first_row(a, part) + m) * KV_LORA + column;
#pragma unroll
        for (int j = 0; j < KV_LORA / 16; ++j) {
            const float x = latents[4 * j + 2 * h] * by, y = latents[4 * j + 2 * h + 1] * by;
            if (is_part) *(float2*)(sums + 8 * j) = make_float2(x, y);
            else *(unsigned*)(to + 8 * j) = pack_bf16(x, y);
        }
    }
}

// Attends a part of the keys; queries lie in the first slabs, or are being copied there.
DEVICE void attend_part(const Mla& a, const Part& part, const Visible& visible,
                        unsigned char* slabs) {
    const int tid = threadIdx.x, group = tid / 128, begin = part.begin;
    unsigned char* keys_s = slabs + TILE_BYTES;
    const int end = min(part.end, visible.most);
    const int n_tiles = visible.most < 0 ? 0 : max(0, (end - begin + KEYS - 1) / KEYS);

    long long slots[KEYS / AT_ONCE];
    auto find_slots = [&](int tile) {
#pragma unroll
        for (int i = 0; i < KEYS / AT_ONCE; ++i) {
            const int key = begin + tile * KEYS + tid / 8 + i * AT_ONCE;
            slots[i] = key < end ? slot_of_key(a, part, key) : -1;
        }
    };
    auto copy_tile = [&](int tile) {
        unsigned char* to = keys_s + tile % 2 * TILE_BYTES;
#pragma unroll
        for (int i = 0; i < KEYS / AT_ONCE; ++i) {
            const elem_t* from = a.cache + max(slots[i], 0LL) * WIDTH + tid % 8 * 8;
            const int at = hopper::piece_at(tid / 8 + i * AT_ONCE, tid % 8);
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
                copy16_async(to + slab * SLAB_BYTES + at, from + slab * 64, slots[i] >= 0);
        }
    };
    find_slots(0);
    copy_tile(0);
    copy_commit();
    find_slots(1);

    float latents[KV_LORA / 4] = {};
    hopper::Scores<KEYS> scores = {{}, {MINUS_INF, MINUS_INF}, {0, 0}};
    const u64 q = hopper::operand(slabs);
    for (int tile = 0; tile < n_tiles; ++tile) {
        copy_wait<0>();
        hopper::publish();
        __syncthreads();
        unsigned char* k_tile = keys_s + tile % 2 * TILE_BYTES;

        // Descriptors count in 16 bytes.
        const u64 k = hopper::operand(k_tile);
        hopper::begin();
#pragma unroll
        for (int at = 0; at < WIDTH / 16; ++at) {
            const int step = at / 4 * (SLAB_BYTES / 16) + at % 4 * 2;
            hopper::multiply(scores.s, q + step, k + step, at > 0);
        }
        hopper::commit();
        // The copies begin while the matrix unit is busy.
        if (tile + 1 < n_tiles) copy_tile(tile + 1);
        copy_commit();
        find_slots(tile + 2);
        hopper::wait<0>();
        hopper::pin(scores.s);

        const int first = begin + tile * KEYS;
        const int left[2] = {min(visible.own[0], end) - first, min(visible.own[1], end) - first};
        float factor[2];
        scores.to_probabilities(left, a.scale * LOG2_E, factor);
        if (hopper::any_of_warp(factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
            for (int i = 0; i < KV_LORA / 4; ++i) latents[i] *= factor[i / 2 % 2];
        }
        if (min(first + KEYS, end) > (int)visible.least) {
            // Both groups have their scores.
            __syncthreads();
            hopper::clean_values((unsigned*)k_tile, KEYS * KV_LORA / 2, THREADS);
            hopper::publish();
            __syncthreads();
        }
        unsigned p[KEYS / 16][4];
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) scores.pack(i, p[i]);
        const u64 v = hopper::operand(k_tile + group * 4 * SLAB_BYTES, SLAB_BYTES);
        hopper::begin();
#pragma unroll
        for (int at = 0; at < KEYS / 16; ++at)
            hopper::multiply_trans_b(latents, p[at], v + at * (16 * hopper::ROW_BYTES / 16), true);
        hopper::commit();
        hopper::wait<0>();
        hopper::pin(latents);
    }
    copy_wait<0>();
    scores.end();
    put_part(a, part, visible, scores, latents);
}

// Grid: tiles of query rows, parts; a block goes on to the part behind the grid's last one.
extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_hopper_rows64(MLA_PARAMS) {
    extern __shared__ __align__(1024) unsigned char slabs[];
    __shared__ int visible_s[ROWS];
    const Mla a = MLA_ARGS;
    const int tid = threadIdx.x, lane = tid % 32;
    Part part;
    // The longest sequences of a chunk come last in it and take the most time: they begin first.
    if (!find_part<ROWS>(a, gridDim.x - 1 - blockIdx.x, part)) return;
    if (tid < ROWS) visible_s[tid] = visible_keys(a, part, tid);
    copy_queries(a, part, slabs);
    __syncthreads();
    const int low = visible_s[lane], high = visible_s[lane + 32];
    const Visible visible = {
        {visible_s[own_row()], visible_s[own_row() + 8]},
        __reduce_max_sync(0xffffffffu, max(low, high)),
        __reduce_min_sync(0xffffffffu, min((unsigned)low, (unsigned)high))};
    const int keys = keys_per_split(a, part.tile.seq, part.len);
    do {
        attend_part(a, part, visible, slabs);
        // The next part's keys overwrite these.
        __syncthreads();
    } while (part.take(part.number + gridDim.y, keys));
}

}  // namespace mla_hopper
#endif
