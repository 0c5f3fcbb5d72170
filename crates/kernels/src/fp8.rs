//! Index keys in fp8: e4m3 codes and one scale a key.

/// Bytes of the scale behind the codes of a key.
pub const FP8_SCALE_BYTES: usize = size_of::<f32>();
/// The greatest value of a code.
const MAX: f32 = 448.0;
/// Keys that are all smaller than this are stored with its scale.
const LEAST_AMAX: f32 = 1e-4;
const SIGN: u8 = 0x80;
const MAX_CODE: u8 = 0x7e;
const NAN_CODE: u8 = 0x7f;
/// Bits of an f32 mantissa that a code has no room for.
const DROPPED_BITS: u32 = 20;

/// Writes a key `[head_dim]` as e4m3 codes followed by its scale, a little-endian f32.
///
/// The scale is the greatest magnitude, at least 1e-4, over 448, rounded up to a power of two;
/// a value over the scale is rounded to the nearest code, ties to even. A NaN stays NaN, and a
/// key with an infinity scores NaN.
///
/// # Panics
///
/// If `out` is not `head_dim + 4` bytes.
pub fn store_fp8_key(key: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), key.len() + FP8_SCALE_BYTES, "out is [head_dim + 4]");
    let amax = key.iter().fold(LEAST_AMAX, |max, value| max.max(value.abs()));
    let scale = round_up_to_power_of_two(amax / MAX);
    let (codes, scale_bytes) = out.split_at_mut(key.len());
    for (code, value) in codes.iter_mut().zip(key) {
        *code = encode(value / scale);
    }
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
}

/// The codes and the scale of a stored key.
#[inline(always)]
pub(crate) fn split_key(key: &[u8]) -> (&[u8], f32) {
    let (codes, scale) =
        key.split_last_chunk::<FP8_SCALE_BYTES>().expect("a key ends with its scale");
    (codes, f32::from_le_bytes(*scale))
}

/// For a positive normal value; infinity stays itself.
fn round_up_to_power_of_two(value: f32) -> f32 {
    const MANTISSA: u32 = (1 << 23) - 1;
    f32::from_bits((value.to_bits() + MANTISSA) & !MANTISSA)
}

/// The nearest code, ties to even; magnitudes above 448 become 448.
fn encode(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { SIGN } else { 0 };
    let magnitude = value.abs();
    let code = if magnitude.is_nan() {
        NAN_CODE
    } else if magnitude < 1.0 / 64.0 {
        // Subnormal codes are multiples of 2^-9; rounding up to the first normal one is right.
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        let bits = magnitude.to_bits();
        let odd = bits >> DROPPED_BITS & 1;
        let rounded = (bits + (1 << (DROPPED_BITS - 1)) - 1 + odd) >> DROPPED_BITS;
        (rounded - ((127 - 7) << 3)).min(u32::from(MAX_CODE)) as u8
    };
    sign | code
}

#[cfg(test)]
mod tests;
