// Hopper's matrix unit: products of 64 x N x 16 by four neighbouring warps (a warp group), whose
// operands lie in shared memory and which run beside other work until they are waited for.
//
// Operands lie in *slabs*: rows of 64 bfloat16, 128 bytes each, whose 16-byte pieces are exchanged
// by a rule (`piece` at `piece ^ row % 8`) that keeps every access pattern free of bank conflicts.
// A slab begins at a multiple of 1024 bytes.
//
// Source: PTX ISA 8.0, "Asynchronous warpgroup level matrix instructions".

#if !TANDEM_HIP && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TANDEM_SM90 1
#else
#define TANDEM_SM90 0
#endif

#if TANDEM_SM90
namespace hopper {

constexpr int SLAB_WIDTH = 64;              // Values of a row of a slab.
constexpr int ROW_BYTES = SLAB_WIDTH * 2;

// Where a 16-byte piece (0..8) of a row lies, in bytes from the slab's start.
DEVICE int piece_at(int row, int piece) { return row * ROW_BYTES + (piece ^ row % 8) * 16; }

// Where the values of columns `column` and `column + 1` of a row lie; `column` is even.
DEVICE int pair_at(int row, int column) {
    return piece_at(row, column / 8) + column % 8 * 2;
}

// An operand in slabs. Its rows are the rows (a) or columns (b) of the product and its columns what
// is summed; or the other way round (`trans_a`, `trans_b`), where `slab_bytes` lead from 64 columns
// of the product to the next 64. 16 summed columns further are 32 bytes further in a slab; 16
// summed rows further, 16 rows.
DEVICE u64 operand(const void* at, int slab_bytes = 16) {
    const u64 address = __cvta_generic_to_shared(at);
    return (address & 0x3ffff) >> 4 | (u64)(slab_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 |
           1ull << 62;
}

// What this thread wrote to shared memory can be seen by the matrix unit behind a barrier.
DEVICE void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before the first product whose registers were written.
DEVICE void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving reads or writes of a product's registers across this place.
template <int N>
DEVICE void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Waits until at most `N` groups of this warp group are under way; `pin` sums that are read next.
template <int N>
DEVICE void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define TEN(t) \
    "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define D8 "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define D16 "{" TEN() ",%10,%11,%12,%13,%14,%15}"
#define D32 "{" TEN() "," TEN(1) "," TEN(2) ",%30,%31}"
#define D48 "{" TEN() "," TEN(1) "," TEN(2) "," TEN(3) ",%40,%41,%42,%43,%44,%45,%46,%47}"
#define D56                                                                                      \
    "{" TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) ",%50,%51,%52,%53,%54,%55}"
#define D60_BEGIN "{" TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5)
#define D64 D60_BEGIN ",%60,%61,%62,%63}"
#define D68 D60_BEGIN ",%60,%61,%62,%63,%64,%65,%66,%67}"
#define D72 D60_BEGIN "," TEN(6) ",%70,%71}"
#define D80 D60_BEGIN "," TEN(6) "," TEN(7) "}"
#define D128                                                                                     \
    D60_BEGIN "," TEN(6) "," TEN(7) "," TEN(8) "," TEN(9) "," TEN(10) "," TEN(11)                \
              ",%120,%121,%122,%123,%124,%125,%126,%127}"
#define IO4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define IO8(i) IO4(i), IO4(i + 4)
#define IO16(i) IO8(i), IO8(i + 8)
#define IO32(i) IO16(i), IO16(i + 16)
#define IO48(i) IO32(i), IO16(i + 32)
#define IO56(i) IO48(i), IO8(i + 48)
#define IO64(i) IO32(i), IO32(i + 32)
#define IO68(i) IO64(i), IO4(i + 64)
#define IO72(i) IO64(i), IO8(i + 64)
#define IO80(i) IO64(i), IO16(i + 64)
#define IO128(i) IO64(i), IO64(i + 64)

// d (+)= a * b^T, both as `operand`s; without the sum where `adds` is false. Thread `t` of the
// warp group has, of warp w = t / 32, g = t % 32 / 4 and c = t % 4, in d[4 * j + i] the product's
// row 16 * w + g + i / 2 * 8 and column 8 * j + 2 * c + i % 2.
#define PRODUCT(NAME, N, COUNT, TRANS_A, LIST, A, B, P)                                          \
    DEVICE void NAME(float (&d)[COUNT], u64 a, u64 b, bool adds) {                               \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; "                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 " LIST ", " A     \
                     ", " B ", p, 1, 1, " #TRANS_A ", 0;}"                                       \
                     : IO##COUNT(0)                                                              \
                     : "l"(a), "l"(b), "r"((int)adds));                                          \
    }
PRODUCT(multiply, 16, 8, 0, D8, "%8", "%9", "%10")
PRODUCT(multiply, 32, 16, 0, D16, "%16", "%17", "%18")
PRODUCT(multiply, 64, 32, 0, D32, "%32", "%33", "%34")
PRODUCT(multiply, 96, 48, 0, D48, "%48", "%49", "%50")
PRODUCT(multiply, 112, 56, 0, D56, "%56", "%57", "%58")
PRODUCT(multiply, 128, 64, 0, D64, "%64", "%65", "%66")
PRODUCT(multiply, 136, 68, 0, D68, "%68", "%69", "%70")
PRODUCT(multiply, 144, 72, 0, D72, "%72", "%73", "%74")
PRODUCT(multiply, 160, 80, 0, D80, "%80", "%81", "%82")
// The same with an `a` whose rows are summed.
PRODUCT(multiply_trans_a, 16, 8, 1, D8, "%8", "%9", "%10")

// The products of a step of 64 summed columns: two operands of 64 rows, `low` and `high`, with the
// same `b`.
template <int N>
DEVICE void multiply_halves(float (&sums)[2][N], u64 low, u64 high, u64 b) {
    begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        multiply(sums[0], low + 2 * k, b + 2 * k, true);
        multiply(sums[1], high + 2 * k, b + 2 * k, true);
    }
    commit();
}

// d (+)= a * b, where `a` are registers of this thread as `mma_16x8x16` takes them for the rows
// 16 * w .. 16 * w + 16, and `b` an `operand` whose rows are summed.
#define PRODUCT_OF_REGISTERS(N, COUNT, LIST, A, B, P)                                            \
    DEVICE void multiply_trans_b(float (&d)[COUNT], const unsigned (&a)[4], u64 b, bool adds) {  \
        asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; "                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 " LIST ", " A     \
                     ", " B ", p, 1, 1, 1;}"                                                     \
                     : IO##COUNT(0)                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));      \
    }
PRODUCT_OF_REGISTERS(128, 64, D64, "{%64,%65,%66,%67}", "%68", "%69")
PRODUCT_OF_REGISTERS(256, 128, D128, "{%128,%129,%130,%131}", "%132", "%133")

#undef PRODUCT_OF_REGISTERS
#undef PRODUCT
#undef IO4
#undef IO8
#undef IO16
#undef IO32
#undef IO48
#undef IO56
#undef IO64
#undef IO68
#undef IO72
#undef IO80
#undef IO128
#undef D8
#undef D16
#undef D32
#undef D48
#undef D56
#undef D60_BEGIN
#undef D64
#undef D68
#undef D72
#undef D80
#undef D128
#undef TEN

}  // namespace hopper
#endif
