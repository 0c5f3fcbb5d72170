//! Tests of the layout arithmetic.

use super::*;

fn layout(block_size: u32, rows: &[(u32, u32, &[u32])]) -> BatchLayout {
    let mut layout = BatchLayout::new(block_size);
    refill(&mut layout, rows);
    layout
}

fn refill(layout: &mut BatchLayout, rows: &[(u32, u32, &[u32])]) {
    layout.clear();
    for &(n_computed, n_query, blocks) in rows {
        layout.push(SeqSpec { n_computed, n_query }, blocks);
    }
    layout.finish();
}

/// Fault case L07: the token-to-sequence map follows every change of the batch's shape.
#[test]
fn maps_are_rebuilt_when_the_layout_changes() {
    let tables: [&[u32]; 3] = [&[0, 1, 2], &[3, 4, 5], &[6, 7, 8]];
    let mut layout = layout(4, &[(5, 4, tables[0]), (6, 4, tables[1]), (7, 4, tables[2])]);
    assert_eq!(layout.token_to_seq(), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
    assert_eq!(layout.max_query_len(), 4);

    refill(&mut layout, &[(9, 1, tables[0]), (10, 1, tables[1]), (11, 1, tables[2])]);
    assert_eq!(layout.token_to_seq(), [0, 1, 2]);
    assert_eq!(layout.cu_seqlens_q(), [0, 1, 2, 3]);
    assert_eq!(layout.positions(), [9, 10, 11]);
    assert_eq!(layout.slot_mapping(), [2 * 4 + 1, 5 * 4 + 2, 8 * 4 + 3]);
    assert_eq!(layout.kv_lens(), [10, 11, 12]);
    assert_eq!(layout.block_tables(), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(layout.max_query_len(), 1);

    refill(&mut layout, &[(5, 3, tables[0]), (6, 1, tables[1]), (7, 4, tables[2])]);
    assert_eq!(layout.token_to_seq(), [0, 0, 0, 1, 2, 2, 2, 2]);
    assert_eq!(layout.cu_seqlens_q(), [0, 3, 4, 8]);
}

/// Fault case L16: the rows of a verify window see one token more each.
#[test]
fn verify_rows_see_growing_lengths() {
    let layout = layout(4, &[(5, 4, &[1, 2, 3]), (9, 4, &[4, 5, 6, 7])]);
    let visible: Vec<i32> = layout.positions().iter().map(|position| position + 1).collect();
    assert_eq!(visible, [6, 7, 8, 9, 10, 11, 12, 13]);
    assert_eq!(layout.kv_lens(), [9, 13]);
}

#[test]
fn tables_are_cut_to_the_blocks_in_use_and_padded() {
    let layout = layout(4, &[(0, 4, &[7, 8, 9]), (4, 5, &[1, 2, 3, 4]), (0, 1, &[5])]);
    assert_eq!(layout.max_blocks(), 3);
    assert_eq!(layout.block_tables(), [7, -1, -1, 1, 2, 3, 5, -1, -1]);
    assert_eq!((layout.n_seqs(), layout.n_tokens()), (3, 10));
}

/// Each slot is the formula of the crate doc, whatever the block size.
#[test]
fn slots_follow_the_block_table_for_every_block_size() {
    for block_size in [1, 2, 4, 16, 64] {
        let (n_computed, n_query) = (13_u32, 9);
        let n_blocks = (n_computed + n_query).div_ceil(block_size);
        let blocks: Vec<u32> = (0..n_blocks).map(|i| (i * 7 + 3) % 31).collect();
        let layout = layout(block_size, &[(n_computed, n_query, &blocks)]);
        for (offset, &slot) in layout.slot_mapping().iter().enumerate() {
            let position = n_computed + u32::try_from(offset).unwrap();
            let block = blocks[(position / block_size) as usize];
            assert_eq!(slot, i32::try_from(block * block_size + position % block_size).unwrap());
        }
    }
}

#[test]
fn an_empty_batch_has_no_rows() {
    let layout = layout(4, &[]);
    assert_eq!((layout.n_seqs(), layout.n_tokens(), layout.max_blocks()), (0, 0, 0));
    assert_eq!(layout.cu_seqlens_q(), [0]);
    assert!(layout.block_tables().is_empty());
}

#[test]
#[should_panic(expected = "9 tokens need 3 blocks of 4, the table has 2")]
fn a_short_table_is_refused() {
    layout(4, &[(8, 1, &[0, 1])]);
}

#[test]
#[should_panic(expected = "at least one token")]
fn an_empty_query_is_refused() {
    layout(4, &[(8, 0, &[0, 1])]);
}

#[test]
#[should_panic(expected = "below 2^31")]
fn a_slot_beyond_i32_is_refused() {
    layout(64, &[(0, 1, &[1 << 26])]);
}
