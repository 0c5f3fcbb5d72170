// Attention of few query rows over their own selection of keys by Hopper's matrix unit: a block for
// the heads of a row of the pass, at most 16, and a part of its selection. Keys are the rows of the
// products, 64 at a time, so that no query row is padded; two blocks of a multiprocessor hide each
// other's copies.

#if TANDEM_BF16 && TANDEM_SM90 && KV_LORA == 512 && ROPE % 64 == 0
namespace mla_hopper {

constexpr int FEW = 16, WARPS = 4, PER_THREAD = 4;
constexpr int QUERY_BYTES = FEW * hopper::ROW_BYTES;  // Of a slab.
constexpr int OUT_LINE = KV_LORA + 4;
static_assert(FEW * OUT_LINE * 4 <= TILE_BYTES, "sums fit where keys were");

// The query rows of a thread are 8 * (q / 2) + lane % 4 * 2 + q % 2, for q in 0..4.
DEVICE int query_of(int q) { return q / 2 * 8 + threadIdx.x % 4 * 2 + q % 2; }

// What the warps of a block tell each other.
struct Told {
    float max[WARPS][FEW], sum[WARPS][FEW];
};

DEVICE float over_keys_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 4));
    x = fmaxf(x, shuffle_xor(x, 8));
    return fmaxf(x, shuffle_xor(x, 16));
}

// From scores (key 16 * warp + lane / 4 + i / 2 % 2 * 8 and query i / 4 * 2 + i % 2 in `s[i]`) to
// probabilities, in `p_s`, and the factors for what was summed before.
DEVICE void to_probabilities(float (&s)[8], int left, float scale, Told& told,
                             unsigned char* p_s, float (&row_max)[PER_THREAD],
                             float (&row_sum)[PER_THREAD], float (&factor)[PER_THREAD]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key = warp * 16 + lane / 4;
#pragma unroll
    for (int q = 0; q < PER_THREAD; ++q) {
        float &low = s[q / 2 * 4 + q % 2], &high = s[q / 2 * 4 + q % 2 + 2];
        low = key < left ? low * scale : MINUS_INF;
        high = key + 8 < left ? high * scale : MINUS_INF;
        const float top = over_keys_max(fmaxf(low, high));
        if (lane < 4) told.max[warp][query_of(q)] = top;
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < PER_THREAD; ++q) {
        float top = row_max[q];
#pragma unroll
        for (int other = 0; other < WARPS; ++other)
            top = fmaxf(top, told.max[other][query_of(q)]);
        const float base = top == MINUS_INF ? 0.f : top;
        factor[q] = exp2_of(row_max[q] - base);
        row_max[q] = top;
        float sum = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float p = exp2_of(s[q / 2 * 4 + q % 2 + 2 * h] - base);
            sum += p;
            const int at = hopper::pair_at(query_of(q), (key + 8 * h) & ~1);
            store((bf16_t*)(p_s + at) + key % 2, p);
        }
        row_sum[q] = row_sum[q] * factor[q] + sum;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) mla_hopper_rows16(MLA_PARAMS) {
    constexpr int THREADS = 32 * WARPS, AT_ONCE = THREADS / 8;
    extern __shared__ __align__(1024) unsigned char slabs[];
    __shared__ __align__(1024) unsigned char p_s[QUERY_BYTES];
    __shared__ Told told;
    const Mla a = MLA_ARGS;
    unsigned char* k_s = slabs + SLABS * QUERY_BYTES;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, piece = tid % 8;
    Part part;
    if (!find_part<FEW>(a, blockIdx.x, part)) return;
    const long long q0 = (long long)part.row0 * a.n_heads + part.tile.first;
    {
        const int m = tid / 8;
        const bool is_row = m < part.tile.n;
        const long long row = is_row ? q0 + m : q0;
        for (int slab = 0; slab < SLABS; ++slab) {
            const int c = slab * 64 + piece * 8;
            const elem_t* from = c < KV_LORA ? a.q_latent + row * KV_LORA + c
                                             : a.q_pe + row * ROPE + (c - KV_LORA);
            copy16_async(slabs + slab * QUERY_BYTES + hopper::piece_at(m, piece), from, is_row);
        }
    }
    long long slots[KEYS / AT_ONCE];
    auto find_slots = [&](int tile) {
#pragma unroll
        for (int i = 0; i < KEYS / AT_ONCE; ++i) {
            const int key = part.begin + tile * KEYS + tid / 8 + i * AT_ONCE;
            slots[i] = key < part.end ? slot_of_key(a, part, key) : -1;
        }
    };
    find_slots(0);
    float latents[KV_LORA / 64][8] = {};
    float row_max[PER_THREAD], row_sum[PER_THREAD] = {};
#pragma unroll
    for (int q = 0; q < PER_THREAD; ++q) row_max[q] = MINUS_INF;
    for (int tile = 0; part.begin + tile * KEYS < part.end; ++tile) {
#pragma unroll
        for (int i = 0; i < KEYS / AT_ONCE; ++i) {
            const elem_t* from = a.cache + max(slots[i], 0LL) * WIDTH + piece * 8;
            unsigned char* at = k_s + hopper::piece_at(tid / 8 + i * AT_ONCE, piece);
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab)
                copy16_async(at + slab * SLAB_BYTES, from + slab * 64, slots[i] >= 0);
        }
        copy_commit();
        find_slots(tile + 1);
        copy_wait<0>();
        hopper::publish();
        __syncthreads();

        float s[8];
        const u64 k = hopper::operand(k_s), q = hopper::operand(slabs);
        hopper::begin();
#pragma unroll
        for (int at = 0; at < WIDTH / 16; ++at) {
            const u64 k_at = k + at / 4 * (SLAB_BYTES / 16) + at % 4 * 2;
            hopper::multiply(s, k_at, q + at / 4 * (QUERY_BYTES / 16) + at % 4 * 2, at > 0);
        }
        hopper::commit();
        hopper::wait<0>();
        hopper::pin(s);
        float factor[PER_THREAD];
        const int left = part.end - (part.begin + tile * KEYS);
        to_probabilities(s, left, a.scale * LOG2_E, told, p_s, row_max, row_sum, factor);
#pragma unroll
        for (int slab = 0; slab < KV_LORA / 64; ++slab)
#pragma unroll
            for (int i = 0; i < 8; ++i) latents[slab][i] *= factor[i / 4 * 2 + i % 2];
        hopper::publish();
        __syncthreads();
        const u64 p = hopper::operand(p_s);
        hopper::begin();
#pragma unroll
        for (int slab = 0; slab < KV_LORA / 64; ++slab)
#pragma unroll
            for (int at = 0; at < KEYS / 16; ++at)
                hopper::multiply_trans_a(
                    latents[slab],
                    k + slab * (SLAB_BYTES / 16) + at * (16 * hopper::ROW_BYTES / 16), p + at * 2,
                    true);
        hopper::commit();
        hopper::wait<0>();
#pragma unroll
        for (int slab = 0; slab < KV_LORA / 64; ++slab) hopper::pin(latents[slab]);
        __syncthreads();
    }
    copy_wait<0>();
    __syncthreads();

    // The sums of all warps, and the output by rows.
    float* sums = (float*)k_s;
#pragma unroll
    for (int q = 0; q < PER_THREAD; ++q) {
        float sum = row_sum[q];
        sum += shuffle_xor(sum, 4);
        sum += shuffle_xor(sum, 8);
        sum += shuffle_xor(sum, 16);
        if (lane < 4) told.sum[warp][query_of(q)] = sum;
        if (lane < 4 && warp == 0) told.max[0][query_of(q)] = row_max[q];
#pragma unroll
        for (int slab = 0; slab < KV_LORA / 64; ++slab)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                sums[query_of(q) * OUT_LINE + slab * 64 + warp * 16 + lane / 4 + 8 * h] =
                    latents[slab][q / 2 * 4 + 2 * h + q % 2];
    }
    __syncthreads();
    const bool is_part = part.n_parts > 1;
    const long long part0 = first_part(a, part);
    for (int m = warp; m < part.tile.n; m += WARPS) {
        const float sum = told.sum[0][m] + told.sum[1][m] + told.sum[2][m] + told.sum[3][m];
        if (is_part && lane == 0) put_stat(a, part, part0 + m, told.max[0][m], sum);
        const float by = is_part || sum == 0 ? 1.f : 1.f / sum;
        for (int c = lane * 8; c < KV_LORA; c += 32 * 8) {
            float x[8];
            load8(sums + m * OUT_LINE + c, x);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] *= by;
            if (is_part) store8(sums_of_part(a, part, part0 + m) + c, x);
            else store8(a.out + (q0 + m) * KV_LORA + c, x);
        }
    }
}

}  // namespace mla_hopper
#endif
