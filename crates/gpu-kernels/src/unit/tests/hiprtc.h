// What hipRTC puts in front of every program, as far as the kernels use it: a plain Clang, which
// knows the devices but lacks AMD's headers, compiles them behind this one. Names and meanings are
// those of the header that is built into hipRTC 6.4; nothing of this is part of the product.

#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline __attribute__((always_inline))
// A second number is of waves for each SIMD.
#define __launch_bounds__(threads, ...)                        \
    __attribute__((amdgpu_flat_work_group_size(1, threads)     \
                   __VA_OPT__(, amdgpu_waves_per_eu(__VA_ARGS__))))

#define IN_HEADER static inline __attribute__((device, always_inline))

struct uint3 { unsigned x, y, z; };
#define threadIdx                                                                   \
    (uint3{__builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),      \
           __builtin_amdgcn_workitem_id_z()})
#define blockIdx                                                                    \
    (uint3{__builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),    \
           __builtin_amdgcn_workgroup_id_z()})
#define blockDim                                                                    \
    (uint3{__builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(), \
           __builtin_amdgcn_workgroup_size_z()})
#define gridDim                                                                     \
    (uint3{__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(),    \
           __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(),    \
           __builtin_amdgcn_grid_size_z() / __builtin_amdgcn_workgroup_size_z()})

struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
IN_HEADER int2 make_int2(int x, int y) { return {x, y}; }
IN_HEADER float2 make_float2(float x, float y) { return {x, y}; }
IN_HEADER uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
IN_HEADER float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

IN_HEADER float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
IN_HEADER float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
IN_HEADER unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
IN_HEADER unsigned __popcll(unsigned long long x) { return __builtin_popcountll(x); }
IN_HEADER float expf(float x) { return __builtin_expf(x); }
IN_HEADER float exp2f(float x) { return __builtin_exp2f(x); }
IN_HEADER float sqrtf(float x) { return __builtin_sqrtf(x); }
IN_HEADER float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
IN_HEADER float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
IN_HEADER float fminf(float x, float y) { return __builtin_fminf(x, y); }
IN_HEADER int min(int x, int y) { return x < y ? x : y; }
IN_HEADER int max(int x, int y) { return x > y ? x : y; }
IN_HEADER long long min(long long x, long long y) { return x < y ? x : y; }
IN_HEADER long long max(long long x, long long y) { return x > y ? x : y; }

IN_HEADER void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
IN_HEADER void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
template <typename T>
IN_HEADER T atomicAdd(T* at, T x) {
    return __hip_atomic_fetch_add(at, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Lanes of one wave of 64. The unit that moves values takes 32 bits and a lane's number times 4.
IN_HEADER int __lane_id() {
    return __builtin_amdgcn_mbcnt_hi(-1, __builtin_amdgcn_mbcnt_lo(-1, 0));
}
template <typename T>
IN_HEADER T from_lane(T x, int lane) {
    struct Words { int at[sizeof(T) / 4]; };
    Words words = __builtin_bit_cast(Words, x);
    for (int& word : words.at) word = __builtin_amdgcn_ds_bpermute(lane << 2, word);
    return __builtin_bit_cast(T, words);
}
template <typename T>
IN_HEADER T __shfl(T x, int from, int width = 64) {
    return from_lane(x, (from & (width - 1)) + (__lane_id() & ~(width - 1)));
}
template <typename T>
IN_HEADER T __shfl_xor(T x, int mask, int width = 64) {
    const int self = __lane_id(), lane = self ^ mask;
    return from_lane(x, lane >= ((self + width) & ~(width - 1)) ? self : lane);
}
template <typename T>
IN_HEADER T __shfl_up(T x, unsigned step, int width = 64) {
    const int self = __lane_id(), lane = self - (int)step;
    return from_lane(x, lane < (self & ~(width - 1)) ? self : lane);
}
IN_HEADER unsigned long long __ballot(int predicate) {
    return __builtin_amdgcn_ballot_w64(predicate);
}
