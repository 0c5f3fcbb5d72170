// The state of decoding slots, and the rows of each pass of a speculative step, all on the device.
// A slot has a window of `width` rows: its last token, then its drafts. State of each slot:
//   valid_len   tokens with KV, -1 for an empty slot; the next token to run is at this position
//   last_token  that token
//   drafts      [width - 1] of them, n_drafts valid
//   n_wanted    drafts to propose, at most width - 1
//   limit       positions that the slot has blocks for; none from there on is run or written
// The rows of a pass: row_pos, row_seq, row_slot (all -1: a padding row), ids; row_start, kv_len.

#define STATE_PARAMS                                                                             \
    const int *valid_len, const int *limit, const int *block_table, int table_stride,           \
        int block_size, int n_cache_slots, int n_slots, int width
#define ROWS_PARAMS int *row_pos, int *row_seq, int *row_slot, int *ids, int *row_start, int *kv_len

#define SET_ROW(row, seq, runs, writes, pos, id)                                                 \
    row_pos[row] = (runs) ? (pos) : -1;                                                          \
    row_seq[row] = (runs) ? (seq) : -1;                                                          \
    row_slot[row] = (runs) && (writes)                                                           \
                        ? (int)slot_of(Blocks{block_table, table_stride, block_size,             \
                                              n_cache_slots}, seq, pos)                          \
                        : -1;                                                                    \
    ids[row] = (runs) ? (id) : 0

// The verify pass. n_verified: drafts of each slot that fit below its limit, -1 for a slot that
// does not run.
KERNEL(128) step_verify(ROWS_PARAMS, int* n_verified, const int* last_token, const int* drafts,
                        const int* n_drafts, STATE_PARAMS) {
    const int row = blockIdx.x * 128 + threadIdx.x;
    if (row >= n_slots * width) return;
    const int slot = row / width, i = row % width, len = valid_len[slot];
    const bool lives = len >= 0 && len < limit[slot];
    const int n = lives ? max(0, min(min(n_drafts[slot], width - 1), limit[slot] - 1 - len)) : -1;
    SET_ROW(row, slot, i <= n, true, len + i,
            i == 0 ? last_token[slot] : drafts[slot * (width - 1) + i - 1]);
    if (i == 0) {
        row_start[slot] = row;
        kv_len[slot] = n + 1 > 0 ? len + n + 1 : 0;
        n_verified[slot] = n;
        if (slot == 0) row_start[n_slots] = n_slots * width;
    }
}

// A draft layer's pass over all valid rows of the window, that of draft step `step`: the row at
// position p embeds the token at p + 1 + step, or the last known one. Step 0 also decides how many
// drafts each slot proposes.
KERNEL(128) step_draft(ROWS_PARAMS, int* n_propose, const int* emitted, const int* n_emitted,
                       const int* drafts, const int* n_wanted, int step, STATE_PARAMS) {
    const int row = blockIdx.x * 128 + threadIdx.x;
    if (row >= n_slots * width) return;
    const int slot = row / width, i = row % width, len = valid_len[slot];
    const int n = min(n_emitted[slot], width), end = len + n, at = i + step;
    int id = 0;
    if (i < n) {
        const int n_known = n + (step == 0 ? 0 : min(step, n_propose[slot]));
        const int token = min(at, n_known - 1);
        id = token < n ? emitted[slot * width + token] : drafts[slot * (width - 1) + token - n];
    }
    SET_ROW(row, slot, i < n, true, len + i, id);
    if (i == 0) {
        row_start[slot] = row;
        kv_len[slot] = n > 0 ? end : 0;
        if (slot == 0) row_start[n_slots] = n_slots * width;
        if (step == 0) {
            const int most = min(min(n_wanted[slot], width - 1), limit[slot] - 1 - end);
            n_propose[slot] = n > 0 ? max(0, most) : 0;
        }
    }
}

// One row for each slot that proposes a draft in step `step`, `behind` positions behind the first
// one that follows the valid rows. `behind` is -1 for the last valid row itself, whose KV the pass
// over the window has written; otherwise the row embeds the draft before.
KERNEL(128) step_single(ROWS_PARAMS, const int* n_propose, const int* n_emitted, const int* drafts,
                        int step, int behind, STATE_PARAMS) {
    const int slot = blockIdx.x * 128 + threadIdx.x;
    if (slot >= n_slots) return;
    const int pos = valid_len[slot] + n_emitted[slot] + behind;
    const bool runs = n_propose[slot] > step && pos < limit[slot];
    SET_ROW(slot, slot, runs, behind >= 0, pos,
            behind >= 0 ? drafts[slot * (width - 1) + step - 1] : 0);
    row_start[slot] = slot;
    kv_len[slot] = runs ? pos + 1 : 0;
    if (slot == 0) row_start[n_slots] = n_slots;
}

// Takes the drafts of step `step`. A slot whose row had no choice (-1) proposes no further.
KERNEL(128) step_take(int* drafts, int* n_propose, const int* chosen, int step, int n_slots,
                      int width) {
    const int slot = blockIdx.x * 128 + threadIdx.x;
    if (slot >= n_slots || n_propose[slot] <= step) return;
    if (chosen[slot] < 0) {
        n_propose[slot] = step;
    } else {
        drafts[slot * (width - 1) + step] = chosen[slot];
    }
}

// Moves the state behind what was emitted; a slot without a run stays as it is.
KERNEL(128) step_advance(int* valid_len, int* last_token, int* n_drafts, const int* emitted,
                         const int* n_emitted, const int* n_propose, int n_slots, int width) {
    const int slot = blockIdx.x * 128 + threadIdx.x;
    if (slot >= n_slots || n_emitted[slot] == 0) return;
    last_token[slot] = emitted[slot * width + n_emitted[slot] - 1];
    valid_len[slot] += n_emitted[slot];
    n_drafts[slot] = n_propose[slot];
}
