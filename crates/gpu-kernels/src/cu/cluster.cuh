// Hopper's copy engine, the barriers in shared memory that its copies arrive at, and clusters of
// two blocks that run at once and reach each other's shared memory.
//
// Source: PTX ISA 8.0, "mbarrier", "cp.async.bulk.tensor", "barrier.cluster".

#if TANDEM_SM90
// How the copy engine reads tiles of a matrix; made by the host.
struct alignas(64) TensorMap {
    u64 words[16];
};

namespace hopper {

// A barrier of a count of arrivals, whose phases are numbered 0, 1, 0, 1 and so on.
DEVICE void init_barrier(u64* barrier, int n_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(n_arrivals)
                 : "memory");
}

// Arrives; what this thread wrote before is seen by who waits.
DEVICE void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// Arrives, and lets the phase wait for the bytes of copies as well.
DEVICE void arrive_with_bytes(u64* barrier, int n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(n_bytes)
                 : "memory");
}

// Arrives at the same barrier of a block of this cluster. What is told is that reads are over, so
// that no write needs the scope of the cluster, at which each wait would empty the nearest cache.
DEVICE void arrive_at(u64* barrier, int block) {
    asm volatile("{.reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [at];}" ::"r"(shared_address(barrier)),
                 "r"(block)
                 : "memory");
}

// Waits until a phase of this number is over: the one under way, or the one before it. The caller
// is at most one phase behind the barrier, so that it cannot mean an older one.
DEVICE void wait_phase(u64* barrier, int phase) {
    unsigned is_over = 0;
    while (!is_over)
        asm volatile("{.reg .pred p; "
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(is_over)
                     : "r"(shared_address(barrier)), "r"(phase)
                     : "memory");
}

// Copies the box of a matrix at `column` and `row` to the same place in the shared memory of both
// blocks, whose barriers count its bytes. What is outside the matrix becomes zero.
DEVICE void copy_box_to_both(void* to, const TensorMap& map, int column, int row, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"((unsigned short)3)
        : "memory");
}

// A warp group changes how many registers its threads have: some give what others take.
template <int N>
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

DEVICE int block_of_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of both blocks wait for each other.
DEVICE void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// Makes fresh barriers known to the other block and to the copy engine, before `sync_cluster`.
DEVICE void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace hopper
#endif
