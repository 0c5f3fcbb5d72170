//! Rotary position embedding.

/// Which two elements of the rotated part form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Elements `2i` and `2i + 1`.
    Interleaved,
    /// Elements `i` and `i + rope_dim / 2`.
    HalfSplit,
}

/// The heads of a row, and the part of them that is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeHeads {
    /// Heads of a row.
    pub n_heads: usize,
    /// Width of a head.
    pub head_stride: usize,
    /// The first element of a head that is rotated; elements outside the rotated part have no
    /// position.
    pub start: usize,
}

/// Rotates heads in place; every element stays at its index.
///
/// `x` is `[n_rows, n_heads, head_stride]`, of which `start..start + rope_dim` of a head is
/// rotated. `cos` and `sin` are `[n_rows, rope_dim / 2]`, already gathered by position. Queries and
/// keys rotated in one style give the same scores as in any layout that permutes both alike.
///
/// # Panics
///
/// If the lengths do not match.
pub fn rope_in_place(
    x: &mut [f32],
    heads: RopeHeads,
    (cos, sin): (&[f32], &[f32]),
    style: RopeStyle,
) {
    let RopeHeads { n_heads, head_stride, start } = heads;
    assert!(n_heads > 0 && head_stride > 0, "heads are not empty");
    assert!(x.len().is_multiple_of(n_heads * head_stride), "x is [n_rows, n_heads, head_stride]");
    assert_eq!(cos.len(), sin.len(), "cos and sin have one shape");
    let n_rows = x.len() / (n_heads * head_stride);
    if n_rows == 0 {
        return;
    }
    assert!(cos.len().is_multiple_of(n_rows), "cos is [n_rows, rope_dim / 2]");
    let half = cos.len() / n_rows;
    assert!(half > 0 && start + 2 * half <= head_stride, "rope_dim fits a head");
    let rows = x.chunks_exact_mut(n_heads * head_stride);
    for (row, (cos, sin)) in rows.zip(cos.chunks_exact(half).zip(sin.chunks_exact(half))) {
        for head in row.chunks_exact_mut(head_stride) {
            rotate(&mut head[start..], cos, sin, style);
        }
    }
}

fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32], style: RopeStyle) {
    let half = cos.len();
    for i in 0..half {
        let (first, second) = match style {
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            RopeStyle::HalfSplit => (i, i + half),
        };
        let (a, b) = (x[first], x[second]);
        x[first] = a * cos[i] - b * sin[i];
        x[second] = b * cos[i] + a * sin[i];
    }
}

#[cfg(test)]
mod tests;
