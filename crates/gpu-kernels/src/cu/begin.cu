// How a step begins: each slot's state, from what the host planned or from the step before.
// A record of the host: source, table, valid_len, last_token, n_drafts, n_wanted, forced, then
// width - 1 drafts. `source` is the slot of the step before that this one continues, or -1: the
// record has the tokens. `table` is the slot's block table, -1 for an empty slot.

KERNEL(128) step_begin(int* valid_len, int* last_token, int* n_drafts, int* drafts, int* n_wanted,
                       int* forced, int* table, const int* records, const int* old_valid_len,
                       const int* old_last_token, const int* old_n_emitted, const int* old_drafts,
                       int n_slots, int n_old_slots, int width) {
    const int slot = blockIdx.x * 128 + threadIdx.x;
    if (slot >= n_slots) return;
    const int k = width - 1;
    const int* record = records + slot * (7 + k);
    const int source = record[0];
    const bool continues = source >= 0 && source < n_old_slots;
    // What continues a slot without a run has nothing to run.
    const bool lives = record[1] >= 0 && (source < 0 || (continues && old_n_emitted[source] > 0));
    table[slot] = record[1];
    valid_len[slot] = !lives ? -1 : continues ? old_valid_len[source] : record[2];
    last_token[slot] = !lives ? 0 : continues ? old_last_token[source] : record[3];
    n_drafts[slot] = lives ? record[4] : 0;
    n_wanted[slot] = lives ? record[5] : 0;
    forced[slot] = record[6];
    for (int i = 0; i < k; i++) {
        drafts[slot * k + i] = !lives ? 0 : continues ? old_drafts[source * k + i] : record[7 + i];
    }
}
