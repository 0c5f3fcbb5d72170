//! The values of codes, as the OCP specifications of 8-bit floating point and of microscaling
//! formats define them.

/// The value of every E4M3 code: sign, four bits of exponent (bias 7), three of mantissa. This is
/// the variant without infinities ("fn"); 0x7f and 0xff are NaN, and 448 is the greatest value.
pub static E4M3: [f32; 256] = e4m3();

/// The value of every E2M1 code: sign, two bits of exponent (bias 1), one of mantissa.
pub static E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The value of an E8M0 code, `2^(code - 127)`; 255 is NaN.
#[inline]
pub const fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        u8::MAX => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

const fn e4m3() -> [f32; 256] {
    const SIGN: u8 = 0x80;
    const NAN: u8 = 0x7f;
    /// Bits of an f32 mantissa that a code has no room for.
    const DROPPED_BITS: u32 = 20;
    // 2^120 moves the exponent from the bias of f32 to that of the codes, exactly for the
    // subnormal ones as well.
    const REBIAS: f32 = f32::from_bits((127 + 120) << 23);
    let mut values = [0.0; 256];
    let mut code: u8 = 0;
    loop {
        let magnitude = code & !SIGN;
        let sign = ((code & SIGN) as u32) << 24;
        values[code as usize] = if magnitude == NAN {
            f32::from_bits(sign | f32::NAN.to_bits())
        } else {
            f32::from_bits(sign | (magnitude as u32) << DROPPED_BITS) * REBIAS
        };
        if code == u8::MAX {
            return values;
        }
        code += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(-1)^sign * mantissa * 2^exponent`, from the fields of a code, in f64.
    fn value(code: u8, exponent_bits: u32, mantissa_bits: u32, bias: i32) -> f64 {
        let code = u32::from(code);
        let mantissa =
            f64::from(code & ((1 << mantissa_bits) - 1)) / 2_f64.powi(mantissa_bits as i32);
        let exponent = (code >> mantissa_bits & ((1 << exponent_bits) - 1)) as i32;
        let sign = if code >> (mantissa_bits + exponent_bits) == 1 { -1.0 } else { 1.0 };
        let magnitude = match exponent {
            0 => mantissa * 2_f64.powi(1 - bias),
            _ => (1.0 + mantissa) * 2_f64.powi(exponent - bias),
        };
        sign * magnitude
    }

    #[test]
    fn every_e4m3_code_has_the_value_of_its_fields() {
        for code in 0..=u8::MAX {
            let got = E4M3[usize::from(code)];
            if code & 0x7f == 0x7f {
                assert!(got.is_nan(), "{code:#04x}: {got}");
            } else {
                let want = value(code, 4, 3, 7) as f32;
                assert_eq!(got.to_bits(), want.to_bits(), "{code:#04x}: {got} is not {want}");
            }
        }
        assert_eq!(E4M3[0x7e], 448.0);
        assert_eq!(E4M3[0x01], 2_f32.powi(-9));
    }

    #[test]
    fn every_e2m1_code_has_the_value_of_its_fields() {
        for code in 0..16 {
            let want = value(code, 2, 1, 1) as f32;
            assert_eq!(E2M1[usize::from(code)].to_bits(), want.to_bits(), "{code}");
        }
    }

    #[test]
    fn every_e8m0_code_is_its_power_of_two() {
        for code in 0..u8::MAX {
            assert_eq!(f64::from(e8m0(code)), 2_f64.powi(i32::from(code) - 127), "{code}");
        }
        assert!(e8m0(u8::MAX).is_nan());
    }
}
