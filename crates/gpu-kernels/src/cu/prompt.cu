// Attention of prompt chunks over expanded keys and values, which costs a third of the arithmetic
// of attention over latents where the expansion serves many rows:
//   out[t, h] = sum_p softmax_p(scale * (q_nope[t, h] . k_nope_p[h] + q_pe[t, h] . k_pe_p)) v_p[h]
// over the keys 0..=position of a row's sequence. By Hopper's matrix unit: a block for a head of
// 128 rows, two warp groups with 64 of them each, 128 keys at a time. Sizes are defines: NOPE,
// ROPE, VALUE.

#if TANDEM_BF16 && TANDEM_SM90
namespace prompt {

constexpr int ROWS = 128, KEYS = 128;
constexpr int SLAB_BYTES = 128 * hopper::ROW_BYTES;  // Of 128 rows of queries, keys or values.
constexpr int NOPE_SLABS = NOPE / 64, QK_SLABS = (NOPE + ROPE) / 64, V_SLABS = VALUE / 64;
constexpr int STAGE_BYTES = (QK_SLABS + V_SLABS) * SLAB_BYTES;
constexpr int THREADS = 256, AT_ONCE = THREADS / 8;
constexpr int GATHERED = 32;  // Keys of a block of `gather_keys`.

struct Chunk {
    elem_t* out;              // [n_rows, n_heads, VALUE]
    const elem_t* q;          // [n_rows, q_stride]: NOPE values of a head, then ROPE others
    const elem_t* q_pe;       // [n_rows, n_heads, ROPE]
    const elem_t* expanded;   // [n_keys, n_heads, NOPE + VALUE]
    const elem_t* k_pe;       // [n_keys, k_pe_stride]
    const int* row_pos;
    const int* row_seq;
    const int* row_start;
    int q_stride, k_pe_stride, n_rows, n_seqs, n_heads, n_keys;
    float scale;
};

// Copies a row of 16-byte pieces to its place in slabs; by 8 threads.
template <int SLABS>
DEVICE void copy_row(unsigned char* slabs, int row, const elem_t* from, bool is_real) {
    const int piece = threadIdx.x % 8;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
        copy16_async(slabs + slab * SLAB_BYTES + hopper::piece_at(row, piece),
                     from + slab * 64 + piece * 8, is_real);
}

DEVICE void copy_queries(const Chunk& c, int row0, int n, int head, unsigned char* q_s) {
    for (int m = threadIdx.x / 8; m < ROWS; m += AT_ONCE) {
        const long long row = row0 + (m < n ? m : 0);
        copy_row<NOPE_SLABS>(q_s, m, c.q + row * c.q_stride + head * (NOPE + ROPE), m < n);
        copy_row<QK_SLABS - NOPE_SLABS>(q_s + NOPE_SLABS * SLAB_BYTES, m,
                                        c.q_pe + (row * c.n_heads + head) * ROPE, m < n);
    }
}

// Copies the keys and values of a tile, of which `n` are left.
DEVICE void copy_keys(const Chunk& c, long long first_key, int n, int head, unsigned char* stage) {
#pragma unroll
    for (int i = 0; i < KEYS / AT_ONCE; ++i) {
        const int at = threadIdx.x / 8 + i * AT_ONCE;
        const long long key = first_key + (at < n ? at : 0);
        const elem_t* own = c.expanded + (key * c.n_heads + head) * (NOPE + VALUE);
        copy_row<NOPE_SLABS>(stage, at, own, at < n);
        copy_row<QK_SLABS - NOPE_SLABS>(stage + NOPE_SLABS * SLAB_BYTES, at,
                                        c.k_pe + key * c.k_pe_stride, at < n);
        copy_row<V_SLABS>(stage + QK_SLABS * SLAB_BYTES, at, own + NOPE, at < n);
    }
}

// The output of 64 rows by a warp group. Both groups wait for each tile together: the copies of the
// next one begin while the matrix unit is busy.
DEVICE void attend(const Chunk& c, int first_key, int head, int end, unsigned least,
                   const int (&visible)[2], unsigned char* slabs, hopper::Scores<KEYS>& scores,
                   float (&values)[VALUE / 2]) {
    unsigned char* stages = slabs + QK_SLABS * SLAB_BYTES;
    const u64 q = hopper::operand(slabs + threadIdx.x / 128 * 64 * hopper::ROW_BYTES);
    for (int tile = 0; tile * KEYS < end; ++tile) {
        unsigned char* stage = stages + tile % 2 * STAGE_BYTES;
        unsigned char* v_s = stage + QK_SLABS * SLAB_BYTES;
        copy_wait<0>();
        hopper::publish();
        __syncthreads();
        const u64 k = hopper::operand(stage), v = hopper::operand(v_s, SLAB_BYTES);
        hopper::begin();
#pragma unroll
        for (int at = 0; at < QK_SLABS * 4; ++at) {
            const int step = at / 4 * (SLAB_BYTES / 16) + at % 4 * 2;
            hopper::multiply(scores.s, q + step, k + step, at > 0);
        }
        hopper::commit();
        const int first = tile * KEYS, next = first + KEYS;
        if (next < end)
            copy_keys(c, first_key + next, end - next, head, stages + (tile + 1) % 2 * STAGE_BYTES);
        copy_commit();
        hopper::wait<0>();
        hopper::pin(scores.s);
        const int left[2] = {visible[0] - first, visible[1] - first};
        float factor[2];
        scores.to_probabilities(left, c.scale * LOG2_E, factor);
        if (hopper::any_of_warp(factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
            for (int i = 0; i < VALUE / 2; ++i) values[i] *= factor[i / 2 % 2];
        }
        if (min(first + KEYS, end) > (int)least) {
            __syncthreads();
            hopper::clean_values((unsigned*)v_s, KEYS * VALUE / 2, THREADS);
            hopper::publish();
            __syncthreads();
        }
        unsigned p[KEYS / 16][4];
#pragma unroll
        for (int at = 0; at < KEYS / 16; ++at) scores.pack(at, p[at]);
        hopper::begin();
#pragma unroll
        for (int at = 0; at < KEYS / 16; ++at)
            hopper::multiply_trans_b(values, p[at], v + at * (16 * hopper::ROW_BYTES / 16), true);
        hopper::commit();
        hopper::wait<0>();
        hopper::pin(values);
    }
}

// Copies rows of the cache of `width` values to the places of their sequences' keys. Grid: tiles of
// keys, sequences.
extern "C" __global__ void __launch_bounds__(256)
gather_keys(elem_t* out, const elem_t* cache, const int* kv_len, const int* first_key,
            const int* group_of, int group, const int* block_table, int table_stride,
            int block_size, int n_slots, int width, int n_keys) {
    const Blocks blocks = {block_table, table_stride, block_size, n_slots};
    const int seq = blockIdx.y, first = first_key[seq], n_pieces = width / 8;
    if (group_of[seq] != group) return;
    const int n = min(kv_len[seq], n_keys - first);
    for (int i = threadIdx.x; i < GATHERED * n_pieces; i += blockDim.x) {
        const int key = blockIdx.x * GATHERED + i / n_pieces, at = i % n_pieces;
        if (key >= n) return;
        const long long slot = slot_of(blocks, seq, key);
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (slot >= 0) piece = ((const uint4*)(cache + slot * width))[at];
        ((uint4*)(out + (long long)(first + key) * width))[at] = piece;
    }
}

// Grid: tiles of rows, heads.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
prompt_attention(elem_t* out, const elem_t* q, const elem_t* q_pe, const elem_t* expanded,
                 const elem_t* k_pe, const int* row_pos, const int* row_seq,
                 const int* row_start, const int* first_key, const int* group_of, int group,
                 int q_stride, int k_pe_stride, int n_rows, int n_seqs, int n_heads, int n_keys,
                 float scale) {
    extern __shared__ __align__(1024) unsigned char slabs[];
    __shared__ int visible_s[ROWS];
    const Chunk c = {out, q, q_pe, expanded, k_pe, row_pos, row_seq, row_start,
                     q_stride, k_pe_stride, n_rows, n_seqs, n_heads, n_keys, scale};
    const int tid = threadIdx.x, lane = tid % 32, head = blockIdx.y;
    // Rows that see the most begin first.
    const int number = gridDim.x - 1 - blockIdx.x;
    const SeqTile tile = find_tile(row_start, n_seqs, 0, n_rows, 1, ROWS, number);
    if (tile.n == 0 || group_of[tile.seq] != group) return;
    const int key0 = first_key[tile.seq];
    const int row0 = min(max(row_start[tile.seq], 0), n_rows) + tile.first;
    if (tid < ROWS) {
        const bool is_row = tid < tile.n && row_seq[row0 + tid] >= 0;
        visible_s[tid] = is_row ? row_pos[row0 + tid] + 1 : -1;
    }
    copy_queries(c, row0, tile.n, head, slabs);
    __syncthreads();
    int most = -1;
    unsigned least = ~0u;
#pragma unroll
    for (int m = 0; m < ROWS; m += 32) {
        most = max(most, visible_s[lane + m]);
        least = min(least, (unsigned)visible_s[lane + m]);
    }
    const int end = min(__reduce_max_sync(0xffffffffu, most), n_keys - key0);
    least = __reduce_min_sync(0xffffffffu, least);
    copy_keys(c, key0, end, head, slabs + QK_SLABS * SLAB_BYTES);
    copy_commit();
    const int m0 = tid / 32 * 16 + lane / 4;
    const int visible[2] = {visible_s[m0], visible_s[m0 + 8]};
    float values[VALUE / 2] = {};
    hopper::Scores<KEYS> scores = {{}, {MINUS_INF, MINUS_INF}, {0, 0}};
    attend(c, key0, head, end, least, visible, slabs, scores, values);
    copy_wait<0>();
    scores.end();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int m = m0 + 8 * h;
        if (visible[h] < 0) continue;
        const float by = 1.f / scores.row_sum[h];
        elem_t* to = out + ((long long)(row0 + m) * n_heads + head) * VALUE + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < VALUE / 8; ++j)
            *(unsigned*)(to + 8 * j) =
                pack_bf16(values[4 * j + 2 * h] * by, values[4 * j + 2 * h + 1] * by);
    }
}

}  // namespace prompt
#endif
