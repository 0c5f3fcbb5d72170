// Addresses of paged caches, tiles of ragged batches, and fragments from shared memory.

#define MINUS_INF (-__int_as_float(0x7f800000))

// A cache's block tables.
struct Blocks {
    const int* table;  // [n_seqs, stride]
    int stride, size;
    int n_slots;
};

// The slot of a position of sequence `seq`; -1 where the table or the cache has none.
DEVICE long long slot_of(const Blocks& blocks, int seq, int pos) {
    const int block = pos / blocks.size;
    if (block >= blocks.stride) return -1;
    const long long id = blocks.table[(long long)seq * blocks.stride + block];
    const long long slot = id * blocks.size + (pos - block * blocks.size);
    return id >= 0 && slot < blocks.n_slots ? slot : -1;
}

// A tile of up to `tile` rows of one sequence. The rows of sequences are cut into tiles
// separately; tile numbers of sequence s begin at floor(start(s) / tile) + s, which leaves each
// sequence enough of them, so that a grid of n_rows / tile + n_seqs tiles covers every batch of
// n_rows rows whatever its lengths are. Numbers without rows have n = 0.
struct SeqTile {
    int seq;
    int first;  // Rows of the sequence before the tile, times `per_row`.
    int n;      // Rows of the tile, times `per_row`.
};

// `per_row` rows stand for each row of `row_start`; only rows begin..end of the pass count.
DEVICE SeqTile find_tile(const int* row_start, int n_seqs, int begin, int end, int per_row,
                         int tile, int number) {
    auto start = [&](int seq) {
        long long row = min(max(row_start[seq], begin), end) - begin;
        return row * per_row;
    };
    int low = 0, high = n_seqs - 1;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (start(mid) / tile + mid <= number) low = mid; else high = mid - 1;
    }
    long long from = start(low);
    long long first = (number - (from / tile + low)) * (long long)tile;
    long long left = start(low + 1) - from - first;
    return {low, (int)first, (int)max(0LL, min(left, (long long)tile))};
}

#if TANDEM_BF16 && TANDEM_SM80
// `b` of mma_16x8x16 from 8 rows (columns of the product) of 16 bfloat16 in shared memory.
DEVICE void mma_load_b(unsigned (&b)[2], const bf16_t* tile, int stride) {
    const int lane = threadIdx.x % 32;
    const bf16_t* row = tile + lane % 8 * stride + lane / 8 % 2 * 8;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
}

// The same from 16 rows of 8 columns of the product.
DEVICE void mma_load_b_trans(unsigned (&b)[2], const bf16_t* tile, int stride) {
    const int lane = threadIdx.x % 32;
    const bf16_t* row = tile + lane % 16 * stride;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
}
#endif

// The value of the lane `step` below; undefined for lanes below `step`.
template <typename T>
DEVICE T shuffle_up(T x, int step) {
#if TANDEM_HIP
    return __shfl_up(x, step);
#else
    return __shfl_up_sync(0xffffffffu, x, step);
#endif
}
