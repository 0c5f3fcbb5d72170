// What every kernel source builds on: the storage type, 16-byte accesses, reductions and the matrix
// unit, for CUDA and HIP. All sources of a module are one translation unit, this one first.
//
// Defined by the host: TANDEM_BF16, 1 where weights, activations and caches are bfloat16, 0 where
// they are float32. Every sum is float32 either way.

#if defined(__HIP__) || defined(__HIPCC_RTC__) || defined(__HIP_PLATFORM_AMD__)
#define TANDEM_HIP 1
#else
#define TANDEM_HIP 0
#endif

#if TANDEM_HIP && defined(__GFX9__)
#define WARP 64
#else
#define WARP 32
#endif

#if !TANDEM_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define TANDEM_SM80 1
#else
#define TANDEM_SM80 0
#endif

#define DEVICE static __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)

typedef unsigned long long u64;

#define F32_NAN __uint_as_float(0x7fc00000u)
#define F32_INFINITY __uint_as_float(0x7f800000u)

constexpr float LOG2_E = 1.4426950408889634f;

// ---- storage type

struct bf16_t {
    unsigned short bits;
};

#if TANDEM_BF16
typedef bf16_t elem_t;
#else
typedef float elem_t;
#endif

DEVICE float to_f32(float x) { return x; }
DEVICE float to_f32(bf16_t x) { return __uint_as_float((unsigned)x.bits << 16); }

// Two values to bfloat16, to nearest even, any NaN to 0x7fff; `low` in the low half.
DEVICE unsigned pack_bf16(float low, float high) {
#if TANDEM_SM80
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#else
    const float x[2] = {low, high};
    unsigned half[2];
    for (int i = 0; i < 2; ++i) {
        const unsigned bits = __float_as_uint(x[i]);
        half[i] = x[i] != x[i] ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    }
    return half[0] | half[1] << 16;
#endif
}

DEVICE void store(float* at, float x) { *at = x; }
DEVICE void store(bf16_t* at, float x) { at->bits = (unsigned short)pack_bf16(x, 0.0f); }

// What is left of `x` once it is stored and read back.
DEVICE float rounded(float x) {
#if TANDEM_BF16
    return __uint_as_float(pack_bf16(x, 0.0f) << 16);
#else
    return x;
#endif
}

// Orders floats as unsigned integers: NaN below everything, and both zeros alike.
DEVICE unsigned rank_of(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return 0;
    if (x == 0) return 0x80000000u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// ---- eight values at a time: one 16-byte access of bfloat16, two of float32

DEVICE void load8(const float* at, float (&x)[8]) {
    const float4 low = reinterpret_cast<const float4*>(at)[0];
    const float4 high = reinterpret_cast<const float4*>(at)[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

DEVICE void load8(const bf16_t* at, float (&x)[8]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(at);
    const unsigned pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(pairs[i] << 16);
        x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

DEVICE void store8(float* at, const float (&x)[8]) {
    reinterpret_cast<float4*>(at)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(at)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

DEVICE void store8(bf16_t* at, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(at) = make_uint4(
        pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

// ---- warps and blocks; every thread of the warp or block takes part

template <typename T>
DEVICE T shuffle_xor(T x, int mask) {
#if TANDEM_HIP
    return __shfl_xor(x, mask);
#else
    return __shfl_xor_sync(0xffffffffu, x, mask);
#endif
}

// The value of lane `from` of the 32 lanes around the caller.
template <typename T>
DEVICE T shuffle_32(T x, int from) {
#if TANDEM_HIP
    return __shfl(x, from, 32);
#else
    return __shfl_sync(0xffffffffu, x, from, 32);
#endif
}

// Bit `i` is set where lane `i` says yes.
DEVICE u64 warp_ballot(bool yes) {
#if TANDEM_HIP
    return __ballot(yes);
#else
    return __ballot_sync(0xffffffffu, yes);
#endif
}

DEVICE void sync_warp() {
#if TANDEM_HIP
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
#else
    __syncwarp();
#endif
}

template <typename T>
DEVICE T warp_sum(T x) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
}

// The sum over a block of at most 1024 threads, a multiple of WARP, in one fixed order; `scratch`
// is shared memory of 32 values, free again after the next barrier.
template <typename T>
DEVICE T block_sum(T x, T* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    T sum = scratch[0];
    for (int warp = 1; warp < (int)(blockDim.x / WARP); ++warp) sum += scratch[warp];
    return sum;
}

DEVICE float block_max(float x, float* scratch) {
    x = warp_max(x);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    float max = scratch[0];
    for (int warp = 1; warp < (int)(blockDim.x / WARP); ++warp) max = fmaxf(max, scratch[warp]);
    return max;
}

#if TANDEM_SM80
// 2^x to 22 bits; of a result below the normal numbers zero.
DEVICE float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The address of shared memory as instructions take it.
DEVICE unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }
#endif

// ---- copies to shared memory that run beside arithmetic

// Copies 16 bytes, or writes zeros without reading where `real` is false.
DEVICE void copy16_async(void* shared, const void* global, bool real) {
#if TANDEM_SM80
    const int n_bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(n_bytes)
                 : "memory");
#else
    // No conditional expression: of two lvalues it is one, which would force the zero into memory.
    uint4 value = make_uint4(0, 0, 0, 0);
    if (real) value = *reinterpret_cast<const uint4*>(global);
    *reinterpret_cast<uint4*>(shared) = value;
#endif
}

// Ends a group of copies of this thread.
DEVICE void copy_commit() {
#if TANDEM_SM80
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `N` of this thread's groups are under way; a barrier makes them visible.
template <int N>
DEVICE void copy_wait() {
#if TANDEM_SM80
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// ---- matrix products of 16 x 8 x 16 by 32 lanes together, whatever WARP is
//
// Lane `l` holds, with g = l / 4 and t = l % 4:
//   a (16 x 16, bfloat16 pairs): {g, 2t}, {g + 8, 2t}, {g, 2t + 8}, {g + 8, 2t + 8}
//   b (8 x 16, a row for each column of the product): {g, 2t}, {g, 2t + 8}
//   d (16 x 8): {g, 2t}, {g, 2t + 1}, {g + 8, 2t}, {g + 8, 2t + 1}

// d += a * b^T
DEVICE void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if TANDEM_SM80
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
        const int half = pair / 4, from = pair % 4;
        const unsigned top = shuffle_32(a[2 * half], 4 * g + from);
        const unsigned bottom = shuffle_32(a[2 * half + 1], 4 * g + from);
        const unsigned left = shuffle_32(b[half], 8 * t + from);
        const unsigned right = shuffle_32(b[half], 8 * t + 4 + from);
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            const int shift = high ? 0 : 16;
            const unsigned mask = 0xffff0000u;
            const float r0 = __uint_as_float((top << shift) & mask);
            const float r1 = __uint_as_float((bottom << shift) & mask);
            const float c0 = __uint_as_float((left << shift) & mask);
            const float c1 = __uint_as_float((right << shift) & mask);
            d[0] = fmaf(r0, c0, d[0]), d[1] = fmaf(r0, c1, d[1]);
            d[2] = fmaf(r1, c0, d[2]), d[3] = fmaf(r1, c1, d[3]);
        }
    }
#endif
}

#if TANDEM_SM80
// Four 8 x 8 matrices, of which lane `l` says where row l % 8 of matrix l / 8 lies (as
// `shared_address` tells it); lane `l` gets the pair l % 4 of row l / 4 of each.
DEVICE void load_matrices(unsigned& m0, unsigned& m1, unsigned& m2, unsigned& m3, unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
                 : "r"(at)
                 : "memory");
}
#endif

// Loads `a` from 16 rows of 16 bfloat16 in shared memory, `stride` values apart (a multiple of 8).
DEVICE void mma_load_a(unsigned (&a)[4], const bf16_t* tile, int stride) {
    const int lane = threadIdx.x % 32;
#if TANDEM_SM80
    const bf16_t* row = tile + (lane % 16) * stride + lane / 16 * 8;
    load_matrices(a[0], a[1], a[2], a[3], shared_address(row));
#else
    const bf16_t* at = tile + lane / 4 * stride + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        a[i] = *reinterpret_cast<const unsigned*>(at + i % 2 * 8 * stride + i / 2 * 8);
#endif
}

// Loads two neighbouring `b` from 16 rows of 16 bfloat16: columns 0 to 7 of the product, then 8 to
// 15.
DEVICE void mma_load_b2(unsigned (&b)[2][2], const bf16_t* tile, int stride) {
    const int lane = threadIdx.x % 32;
#if TANDEM_SM80
    const bf16_t* row = tile + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
    load_matrices(b[0][0], b[0][1], b[1][0], b[1][1], shared_address(row));
#else
    const bf16_t* at = tile + lane / 4 * stride + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        b[i / 2][i % 2] =
            *reinterpret_cast<const unsigned*>(at + i / 2 * 8 * stride + i % 2 * 8);
#endif
}
