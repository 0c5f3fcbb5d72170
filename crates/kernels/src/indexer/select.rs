//! The best keys of one row.

/// All visible positions, which fit.
pub(super) fn all(n_visible: usize, indices: &mut [i32]) {
    for (position, index) in indices.iter_mut().enumerate() {
        *index = if position < n_visible { position as i32 } else { -1 };
    }
}

/// The positions of the highest scores, ascending; there are more scores than `indices`.
pub(super) fn best(scores: &[f32], indices: &mut [i32]) {
    let topk = indices.len();
    let ranks: Vec<u32> = scores.iter().map(|&score| rank(score)).collect();
    let mut unordered = ranks.clone();
    let (better, &mut last, _) = unordered.select_nth_unstable(topk - 1);
    // Of the scores equal to the last one that is selected, the lowest positions are.
    let mut n_ties = topk - better.iter().filter(|&&rank| rank < last).count();
    let mut selected = indices.iter_mut();
    for (position, rank) in ranks.into_iter().enumerate() {
        if rank < last || (rank == last && n_ties > 0) {
            n_ties -= usize::from(rank == last);
            *selected.next().expect("topk scores are selected") = position as i32;
        }
    }
}

/// Orders scores from the highest (0) down to NaN; the two zeros are equal.
fn rank(score: f32) -> u32 {
    if score.is_nan() {
        return u32::MAX;
    }
    let bits = (score + 0.0).to_bits();
    // The bits of negative numbers are already in descending order, behind the positive ones.
    if bits >> 31 == 1 { bits } else { 0x7fff_ffff - bits }
}
