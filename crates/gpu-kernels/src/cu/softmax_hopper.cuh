// The softmax of attention by Hopper's matrix unit, tile of keys after tile of keys.

#if TANDEM_SM90
namespace hopper {

DEVICE bool any_of_warp(bool yes) { return warp_ballot(yes) != 0; }

// The scores of a tile of keys, then its probabilities, of the two query rows of a thread: rows g
// and g + 8 of its warp's 16, with g = lane / 4, as `multiply` leaves them.
template <int KEYS>
struct Scores {
    float s[KEYS / 2];
    float row_max[2], row_sum[2];

    // From scores to probabilities; `left` says how many keys of the tile each row sees. The
    // factors are for what was summed before.
    __device__ __forceinline__ void to_probabilities(const int (&left)[2], float scale,
                                                     float (&factor)[2]) {
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = MINUS_INF;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = s[4 * j + 2 * h + i];
                    if (8 * j + column + i >= left[h]) x = MINUS_INF;
                    top = fmaxf(top, x);
                }
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            top = fmaxf(top * scale, row_max[h]);
            // Of a row that has seen no key yet, any finite base gives zeros.
            const float base = top == MINUS_INF ? 0.f : top;
            factor[h] = exp2_of(row_max[h] - base);
            row_max[h] = top;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = s[4 * j + 2 * h + i];
                    x = exp2_of(fmaf(x, scale, -base));
                    sum += x;
                }
            row_sum[h] = row_sum[h] * factor[h] + sum;
        }
    }

    // The probabilities of 16 keys as the left side of a product.
    __device__ __forceinline__ void pack(int keys16, unsigned (&p)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = 8 * keys16 + 2 * i;
            p[i] = pack_bf16(s[at], s[at + 1]);
        }
    }

    // The sums of whole rows: four threads have a row's keys.
    __device__ __forceinline__ void end() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row_sum[h] += shuffle_xor(row_sum[h], 1);
            row_sum[h] += shuffle_xor(row_sum[h], 2);
        }
    }
};

// Cleans `n` pairs of values, by `threads` threads. A probability of zero does not undo a value that
// is no number, so that a row would get it from a key behind it. The rows that do see such a key
// have it from their scores.
DEVICE void clean_values(unsigned* pairs, int n, int threads) {
    for (int at = threadIdx.x; at < n; at += threads) {
        unsigned& bits = pairs[at];
        if ((bits & 0x7f80u) == 0x7f80u) bits &= 0xffff0000u;
        if ((bits & 0x7f800000u) == 0x7f800000u) bits &= 0xffffu;
    }
}

}  // namespace hopper
#endif
