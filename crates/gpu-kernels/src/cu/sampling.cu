// Greedy choice over the vocabulary, and which drafts it confirms.

namespace sampling {

// Orders floats as unsigned integers: NaN above everything, both zeros alike.
DEVICE unsigned order_of(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return 0xffffffffu;
    if (x == 0) return 0x80000000u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The larger order wins, then the lower id.
DEVICE u64 warp_best(u64 best) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        const u64 other = shuffle_xor(best, mask);
        best = other > best ? other : best;
    }
    return best;
}

constexpr int ARGMAX_CHUNK = 4096;

// Block (chunk of the vocabulary, row): the best of the chunk to best[row, chunk].
template <typename T>
DEVICE void argmax_chunk(u64* best, const T* logits, const int* row_seq, int vocab) {
    __shared__ u64 scratch[32];
    const int row = blockIdx.y, tid = threadIdx.x, begin = blockIdx.x * ARGMAX_CHUNK;
    if (row_seq && row_seq[row] < 0) return;
    const int end = min(begin + ARGMAX_CHUNK, vocab);
    const T* from = logits + (long long)row * vocab;
    u64 top = 0;
    auto take = [&](float x, int id) {
        const u64 key = (u64)order_of(x) << 32 | (unsigned)~id;
        top = key > top ? key : top;
    };
    if (vocab % 8 == 0) {
        for (int id = begin + 8 * tid; id < end; id += 8 * 256) {
            float x[8];
            load8(from + id, x);
#pragma unroll
            for (int i = 0; i < 8; i++) take(x[i], id + i);
        }
    } else {
        for (int id = begin + tid; id < end; id += 256) take(to_f32(from[id]), id);
    }
    top = warp_best(top);
    if (tid % WARP == 0) scratch[tid / WARP] = top;
    __syncthreads();
    if (tid == 0) {
        for (int i = 1; i < 256 / WARP; i++) top = scratch[i] > top ? scratch[i] : top;
        best[(long long)row * gridDim.x + blockIdx.x] = top;
    }
}

KERNEL(256) argmax_elem(u64* best, const elem_t* logits, const int* row_seq, int vocab) {
    argmax_chunk(best, logits, row_seq, vocab);
}
KERNEL(256) argmax_f32(u64* best, const float* logits, const int* row_seq, int vocab) {
    argmax_chunk(best, logits, row_seq, vocab);
}

// A warp for each row: its id, or -1 where the row holds a NaN, which has no largest element.
KERNEL(128) argmax_join(int* ids, const u64* best, const int* row_seq, int n_rows, int n_chunks) {
    const int row = blockIdx.x * (128 / WARP) + threadIdx.x / WARP;
    if (row >= n_rows || (row_seq && row_seq[row] < 0)) return;
    u64 top = 0;
    for (int i = threadIdx.x % WARP; i < n_chunks; i += WARP) {
        const u64 other = best[(long long)row * n_chunks + i];
        top = other > top ? other : top;
    }
    top = warp_best(top);
    if (threadIdx.x % WARP == 0) {
        ids[row] = (unsigned)(top >> 32) == 0xffffffffu ? -1 : (int)~(unsigned)top;
    }
}

// A thread for each sequence: its accepted run. Row seq * width + i holds the target's choice
// behind the last known token (i = 0) or draft i - 1; n_drafts is -1 for a sequence without rows.
// With `forced`, that many drafts are accepted whatever the target says.
KERNEL(64) reject_greedy(int* emitted, int* n_emitted, int* last_row, const int* ids,
                         const int* drafts, const int* n_drafts, const int* forced, int n_seqs,
                         int width) {
    const int seq = blockIdx.x * 64 + threadIdx.x;
    if (seq >= n_seqs) return;
    const int n = min(n_drafts[seq], width - 1);
    int* run = emitted + seq * width;
    const int* choice = ids + seq * width;
    const int* draft = drafts + seq * (width - 1);
    int n_accepted = 0;
    if (forced) {
        n_accepted = max(0, min(forced[seq], n));
    } else {
        while (n_accepted < n && draft[n_accepted] == choice[n_accepted]) n_accepted++;
    }
    // A run that would end at a row without a choice is a fault: nothing is emitted.
    const bool is_run = n >= 0 && choice[n_accepted] >= 0;
    for (int i = 0; i < width; i++) {
        run[i] = !is_run || i > n_accepted ? -1 : i < n_accepted ? draft[i] : choice[i];
    }
    n_emitted[seq] = is_run ? n_accepted + 1 : 0;
    last_row[seq] = is_run ? seq * width + n_accepted : -1;
}

}  // namespace sampling
