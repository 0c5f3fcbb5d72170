// Paged attention over latents with absorbed projections:
//   out[t, h] = sum_p softmax_p(scale * (q_latent[t, h] . c_p + q_pe[t, h] . k_pe_p)) c_p
// over the keys 0..=position of a row's sequence, or the row's selection. The work of a window of
// few rows is cut by keys, by a rule that sees nothing but the sequence's own length; a second
// kernel joins the parts in order. Sizes are defines: KV_LORA, ROPE.

namespace mla {

constexpr int WIDTH = KV_LORA + ROPE;

struct Mla {
    elem_t* out;            // [n_rows, n_heads, KV_LORA]
    float* parts;           // [n_seqs * window, n_heads, part_stride, KV_LORA]
    float* stats;           // [n_seqs * window, n_heads, part_stride, 2]: maximum, sum
    const elem_t* q_latent;
    const elem_t* q_pe;
    const elem_t* cache;
    const int* row_pos;
    const int* row_seq;
    const int* row_start;
    const int* kv_len;
    Blocks blocks;
    const int* indices;  // [n_rows, topk], or null
    const int* counts;   // [n_rows], or null
    const int* skipped;  // [n_seqs], or null: not negative for sequences that are left out
    int n_rows, n_seqs, n_heads, topk, window, split_keys, max_splits;
    int part_stride;     // Parts of a query row that there is room for.
    float scale;
};
#define MLA_PARAMS                                                                               \
    elem_t *out, float *parts, float *stats, const elem_t *q_latent, const elem_t *q_pe,         \
        const elem_t *cache, const int *row_pos, const int *row_seq, const int *row_start,       \
        const int *kv_len, const int *block_table, const int *indices, const int *counts,        \
        const int *skipped, int table_stride, int block_size, int n_slots, int n_rows,           \
        int n_seqs, int n_heads, int topk, int window, int split_keys, int max_splits,           \
        int part_stride, float scale
#define MLA_ARGS                                                                                 \
    Mla{out, parts, stats, q_latent, q_pe, cache, row_pos, row_seq, row_start, kv_len,           \
        Blocks{block_table, table_stride, block_size, n_slots}, indices, counts, skipped,        \
        n_rows, n_seqs, n_heads, topk, window, split_keys, max_splits, part_stride, scale}

#if TANDEM_BF16 && TANDEM_SM80 && KV_LORA % 64 == 0 && ROPE % 16 == 0
// Keys of each part of a window's work over `len` keys; everything at once for more rows. Parts of
// long sequences are longer, as what joins them costs by their number.
DEVICE int keys_per_split(const Mla& a, int seq, int len) {
    if (a.row_start[seq + 1] - a.row_start[seq] > a.window) return max(len, 1);
    long long keys = a.split_keys;
    if (keys * a.max_splits < 2LL * len) keys *= 2;
    while (keys * a.max_splits < len) keys *= 2;
    return (int)keys;
}

// What a block does: a tile of query rows (a row of the pass and a head each) and a part of what
// they attend.
struct Part {
    SeqTile tile;
    int row0;         // The pass' row that `tile.first` counts from.
    int begin, end;   // Of the sequence's keys, or of the selection.
    int len;          // All keys.
    int number, n_parts;
    int in_window;    // Where row0 is in its sequence's window.

    // Goes on to another part of the same rows; false where there is none.
    __device__ __forceinline__ bool take(int other, int keys) {
        number = other;
        begin = number * keys;
        end = min(begin + keys, len);
        return number < max(n_parts, 1);
    }
};

// Finds the part of a block, the one of its place in the grid; false where there is none.
template <int M>
DEVICE bool find_part(const Mla& a, int number, Part& part) {
    SeqTile& tile = part.tile;
    if (a.counts) {
        const int tiles = (a.n_heads + M - 1) / M;
        part.row0 = number / tiles;
        tile.seq = a.row_seq[part.row0];
        tile.first = number % tiles * M;
        tile.n = min(M, a.n_heads - tile.first);
        if (tile.seq < 0 || tile.seq >= a.n_seqs) return false;
        part.len = min(a.counts[part.row0], a.topk);
    } else {
        tile = find_tile(a.row_start, a.n_seqs, 0, a.n_rows, a.n_heads, M, number);
        part.row0 = min(max(a.row_start[tile.seq], 0), a.n_rows);
        if (tile.n == 0 || (a.skipped && a.skipped[tile.seq] >= 0)) return false;
        part.len = a.kv_len[tile.seq];
    }
    const int keys = keys_per_split(a, tile.seq, part.len);
    part.n_parts = (part.len + keys - 1) / keys;
    part.in_window = part.row0 - a.row_start[tile.seq];
    if (!part.take(blockIdx.y, keys)) return false;
    return part.n_parts <= 1 || (part.in_window >= 0 && part.in_window < a.window);
}

// How many keys query row `m` of a tile sees; -1 for one that is not computed.
DEVICE int visible_keys(const Mla& a, const Part& part, int m) {
    const int row = part.row0 + (part.tile.first + m) / a.n_heads;
    if (m >= part.tile.n || a.row_seq[row] < 0) return -1;
    return a.counts ? part.len : a.row_pos[row] + 1;
}

// Where the parts of a tile's query rows begin, counted in query rows.
DEVICE long long first_part(const Mla& a, const Part& part) {
    const SeqTile& tile = part.tile;
    return ((long long)tile.seq * a.window + part.in_window) * a.n_heads + tile.first;
}

DEVICE float* sums_of_part(const Mla& a, const Part& part, long long query_row) {
    return a.parts + (query_row * a.part_stride + part.number) * KV_LORA;
}

DEVICE void put_stat(const Mla& a, const Part& part, long long query_row, float max, float sum) {
    float* stat = a.stats + (query_row * a.part_stride + part.number) * 2;
    *(float2*)stat = make_float2(max, sum);
}

// The slot of key `at` of a part's keys.
DEVICE long long slot_of_key(const Mla& a, const Part& part, int at) {
    const int pos = a.counts ? a.indices[(long long)part.row0 * a.topk + at] : at;
    return slot_of(a.blocks, part.tile.seq, pos);
}

constexpr int KEYS = 32;            // Keys of a tile.
constexpr int STRIDE = WIDTH + 8;   // Rows of tiles are padded against bank conflicts.
constexpr int P_STRIDE = KEYS + 8;

// One tile of 16 * MT query rows (a token and a head each) and one split of the keys.
template <int MT, int N_WARPS, int STAGES>
DEVICE void mla_tile(const Mla& a) {
    constexpr int M = 16 * MT, THREADS = 32 * N_WARPS;
    constexpr int N_TILES = KEYS / 8 / (N_WARPS / MT);   // Score tiles of a warp.
    constexpr int V_TILES = KV_LORA / 8 / N_WARPS;       // Output tiles of a warp and 16 rows.
    constexpr int SLOTS = KEYS * 8 / THREADS;            // Keys that a thread helps to copy.
    extern __shared__ __align__(16) unsigned char shared[];
    elem_t* q_s = (elem_t*)shared;
    elem_t* k_s = q_s + M * STRIDE;
    elem_t* p_s = k_s + STAGES * KEYS * STRIDE;
    float* s_s = (float*)(p_s + M * P_STRIDE);
    float* factor_s = s_s + M * P_STRIDE;
    int* visible_s = (int*)(factor_s + M);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    Part part;
    if (!find_part<M>(a, blockIdx.x, part)) return;
    const SeqTile& t = part.tile;
    const int begin = part.begin;
    for (int m = tid; m < M; m += THREADS) visible_s[m] = visible_keys(a, part, m);
    const long long q0 = (long long)part.row0 * a.n_heads + t.first;
    for (int at = tid; at < M * (WIDTH / 8); at += THREADS) {
        int m = at / (WIDTH / 8), c = at % (WIDTH / 8) * 8;
        const elem_t* src = c < KV_LORA ? a.q_latent + (q0 + m) * KV_LORA + c
                                        : a.q_pe + (q0 + m) * ROPE + (c - KV_LORA);
        copy16_async(q_s + m * STRIDE + c, m < t.n ? src : a.q_pe, m < t.n);
    }
    __syncthreads();
    int most = -1, least = 0x7fffffff;
    for (int m = 0; m < M; m++) {
        most = max(most, visible_s[m]);
        if (visible_s[m] >= 0) least = min(least, visible_s[m]);
    }
    if (most < 0) {
        copy_wait<0>();
        return;
    }
    const int end = min(part.end, most);
    const int n_tiles = max(0, (end - begin + KEYS - 1) / KEYS);

    long long slots[SLOTS];
    auto find_slots = [&](int tile) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            int key = begin + tile * KEYS + tid / 8 + i * (THREADS / 8);
            slots[i] = key < end ? slot_of_key(a, part, key) : -1;
        }
    };
    auto copy_tile = [&](int tile) {
        elem_t* dst = k_s + (tile % STAGES * KEYS + tid / 8) * STRIDE;
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            const elem_t* src = a.cache + max(slots[i], 0LL) * WIDTH;
            for (int c = tid % 8 * 8; c < WIDTH; c += 64) {
                copy16_async(dst + i * (THREADS / 8) * STRIDE + c, src + c, slots[i] >= 0);
            }
        }
    };
    find_slots(0);
    for (int tile = 0; tile < STAGES - 1; tile++) {
        if (tile < n_tiles) copy_tile(tile);
        copy_commit();
        find_slots(tile + 1);
    }

    float acc[MT][V_TILES][4] = {};
    float row_max = MINUS_INF, row_sum = 0;
    const int m_tile = warp % MT, key_group = warp / MT;
    for (int tile = 0; tile < n_tiles; tile++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (tile + STAGES - 1 < n_tiles) copy_tile(tile + STAGES - 1);
        copy_commit();
        find_slots(tile + STAGES);
        const elem_t* k_tile = k_s + tile % STAGES * KEYS * STRIDE;

        float s[N_TILES][4] = {};
#pragma unroll 4
        for (int k = 0; k < WIDTH; k += 16) {
            unsigned q_frag[4];
            mma_load_a(q_frag, q_s + m_tile * 16 * STRIDE + k, STRIDE);
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                unsigned k_frag[2];
                mma_load_b(k_frag, k_tile + (key_group * N_TILES + n) * 8 * STRIDE + k, STRIDE);
                mma_16x8x16(s[n], q_frag, k_frag);
            }
        }
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            float* dst = s_s + (m_tile * 16 + lane / 4) * P_STRIDE +
                         (key_group * N_TILES + n) * 8 + lane % 4 * 2;
            *(float2*)dst = make_float2(s[n][0], s[n][1]);
            *(float2*)(dst + 8 * P_STRIDE) = make_float2(s[n][2], s[n][3]);
        }
        __syncthreads();
        // A probability of zero does not undo a latent that is no number, so that a row would get
        // it from a key behind it. The rows that do see such a key have it from their scores.
        if (min(begin + (tile + 1) * KEYS, end) > least) {
            for (int at = tid; at < KEYS * (KV_LORA / 2); at += THREADS) {
                const int key = at / (KV_LORA / 2), c = at % (KV_LORA / 2) * 2;
                elem_t* pair = k_s + (tile % STAGES * KEYS + key) * STRIDE + c;
                unsigned bits = *(unsigned*)pair;
                if ((bits & 0x7f80u) == 0x7f80u) bits &= 0xffff0000u;
                if ((bits & 0x7f800000u) == 0x7f800000u) bits &= 0xffffu;
                *(unsigned*)pair = bits;
            }
        }

        // Four threads a row, whatever the tile: the order of sums must not depend on it.
        float factor = 1;
        if (tid < 4 * M) {
            const int m = tid / 4, key0 = tid % 4 * 8;
            const int left = visible_s[m] - (begin + tile * KEYS + key0);
            float x[8], top = MINUS_INF, sum = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float score = s_s[m * P_STRIDE + key0 + i] * (a.scale * LOG2_E);
                x[i] = i < left ? score : MINUS_INF;
                top = fmaxf(top, x[i]);
            }
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            top = fmaxf(top, row_max);
            if (top > MINUS_INF) factor = exp2f(row_max - top);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float p = i < left ? exp2f(x[i] - top) : 0.f;
                sum += p;
                store(&p_s[m * P_STRIDE + key0 + i], p);
            }
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            row_sum = row_sum * factor + sum;
            row_max = top;
            if (tid % 4 == 0) factor_s[m] = factor;
        }
        if (__syncthreads_or(factor != 1.f)) {
#pragma unroll
            for (int m = 0; m < MT; m++) {
                float low = factor_s[m * 16 + lane / 4], high = factor_s[m * 16 + lane / 4 + 8];
#pragma unroll
                for (int v = 0; v < V_TILES; v++) {
                    acc[m][v][0] *= low;
                    acc[m][v][1] *= low;
                    acc[m][v][2] *= high;
                    acc[m][v][3] *= high;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < KEYS; k += 16) {
            unsigned p_frag[MT][4];
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_load_a(p_frag[m], p_s + m * 16 * P_STRIDE + k, P_STRIDE);
            }
#pragma unroll
            for (int v = 0; v < V_TILES; v++) {
                unsigned v_frag[2];
                mma_load_b_trans(v_frag, k_tile + k * STRIDE + (warp * V_TILES + v) * 8, STRIDE);
#pragma unroll
                for (int m = 0; m < MT; m++) mma_16x8x16(acc[m][v], p_frag[m], v_frag);
            }
        }
    }
    copy_wait<0>();
    __syncthreads();

    // Out, or a part of it.
    const bool is_part = part.n_parts > 1;
    const long long part0 = first_part(a, part);
    if (tid < 4 * M && tid % 4 == 0) {
        const int m = tid / 4;
        factor_s[m] = row_sum > 0 ? 1.f / row_sum : row_sum;
        if (is_part && visible_s[m] >= 0) {
            put_stat(a, part, part0 + m, row_max, row_sum);
        }
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2 * MT; half++) {
        const int m = half * 8 + lane / 4;
        if (visible_s[m] < 0) continue;
        float* sums = sums_of_part(a, part, part0 + m);
        elem_t* out = a.out + (q0 + m) * KV_LORA;
#pragma unroll
        for (int v = 0; v < V_TILES; v++) {
            const int c = (warp * V_TILES + v) * 8 + lane % 4 * 2;
            float x = acc[half / 2][v][half % 2 * 2], y = acc[half / 2][v][half % 2 * 2 + 1];
            if (is_part) {
                *(float2*)(sums + c) = make_float2(x, y);
            } else {
                *(unsigned*)(out + c) = pack_bf16(x * factor_s[m], y * factor_s[m]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(128, 2) mla_rows16(MLA_PARAMS) {
    mla_tile<1, 4, 2>(MLA_ARGS);
}
extern "C" __global__ void __launch_bounds__(256, 1) mla_rows32(MLA_PARAMS) {
    mla_tile<2, 8, 3>(MLA_ARGS);
}
extern "C" __global__ void __launch_bounds__(256, 1) mla_rows64(MLA_PARAMS) {
    mla_tile<4, 8, 3>(MLA_ARGS);
}

// Joins the parts of a row and head: block (sequence, row of its window, head).
KERNEL(128) mla_join(MLA_PARAMS) {
    const Mla a = MLA_ARGS;
    const int head = blockIdx.x % n_heads, in_window = blockIdx.x / n_heads % window;
    const int seq = blockIdx.x / n_heads / window, row = row_start[seq] + in_window;
    if (row < 0 || row >= min(row_start[seq + 1], n_rows) || row_seq[row] < 0) return;
    const int len = counts ? min(counts[row], topk) : kv_len[seq];
    const int split = keys_per_split(a, seq, len);
    const int n_splits = min((len + split - 1) / split, part_stride);
    if (n_splits <= 1) return;
    const float2* stat = (const float2*)stats + (long long)blockIdx.x * part_stride;
    const float* part = parts + (long long)blockIdx.x * part_stride * KV_LORA;
    float top = MINUS_INF, sum = 0;
#pragma unroll 8
    for (int i = 0; i < n_splits; i++) top = fmaxf(top, stat[i].x);
    // Splits behind the row's position have no keys: their maximum is -inf and weighs nothing, as
    // do all of a row whose scores are no numbers, which their sums tell.
    if (top == MINUS_INF) top = 0;
#pragma unroll 8
    for (int i = 0; i < n_splits; i++) sum += exp2f(stat[i].x - top) * stat[i].y;
    for (int c = threadIdx.x * 2; c < KV_LORA; c += blockDim.x * 2) {
        float x = 0, y = 0;
#pragma unroll 8
        for (int i = 0; i < n_splits; i++) {
            const float weight = exp2f(stat[i].x - top);
            const float2 sums = *(const float2*)(part + i * KV_LORA + c);
            x += weight * sums.x;
            y += weight * sums.y;
        }
        *(unsigned*)(out + ((long long)row * n_heads + head) * KV_LORA + c) =
            pack_bf16(x / sum, y / sum);
    }
}
#endif

// The plain form, for f32 and for devices without the matrix instruction: block (row, head).
KERNEL(128) mla_plain(MLA_PARAMS) {
    constexpr int TILE = 64, THREADS = 128, COLUMNS = (KV_LORA + THREADS - 1) / THREADS;
    __shared__ float scores[TILE];
    __shared__ long long slots[TILE];
    const int row = blockIdx.x / n_heads, seq = row_seq[row], tid = threadIdx.x;
    if (seq < 0 || seq >= n_seqs || (skipped && skipped[seq] >= 0)) return;
    const Blocks blocks = {block_table, table_stride, block_size, n_slots};
    const int n_keys = counts ? min(counts[row], topk) : row_pos[row] + 1;
    const elem_t* q = q_latent + (long long)blockIdx.x * KV_LORA;
    const elem_t* pe = q_pe + (long long)blockIdx.x * ROPE;
    float acc[COLUMNS] = {}, row_max = MINUS_INF, row_sum = 0;
    for (int begin = 0; begin < n_keys; begin += TILE) {
        const int n = min(TILE, n_keys - begin);
        for (int key = tid / WARP; key < n; key += THREADS / WARP) {
            int pos = counts ? indices[(long long)row * topk + begin + key] : begin + key;
            const long long slot = slot_of(blocks, seq, pos);
            const elem_t* k = cache + slot * WIDTH;
            float sum = 0;
            for (int c = tid % WARP; slot >= 0 && c < WIDTH; c += WARP) {
                sum += to_f32(c < KV_LORA ? q[c] : pe[c - KV_LORA]) * to_f32(k[c]);
            }
            sum = warp_sum(sum);
            if (tid % WARP == 0) {
                scores[key] = sum * (scale * LOG2_E);
                slots[key] = slot;
            }
        }
        __syncthreads();
        float top = row_max;
        for (int key = 0; key < n; key++) top = fmaxf(top, scores[key]);
        const float factor = exp2f(row_max - top);
        row_max = top;
        row_sum *= factor;
        for (int i = 0; i < COLUMNS; i++) acc[i] *= factor;
        for (int key = 0; key < n; key++) {
            const float p = exp2f(scores[key] - top);
            row_sum += p;
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                int c = tid + i * THREADS;
                if (c < KV_LORA && slots[key] >= 0) {
                    acc[i] += p * to_f32(cache[slots[key] * WIDTH + c]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        int c = tid + i * THREADS;
        if (c < KV_LORA) {
            store(&out[(long long)blockIdx.x * KV_LORA + c], n_keys ? acc[i] / row_sum : 0.f);
        }
    }
}

}  // namespace mla
