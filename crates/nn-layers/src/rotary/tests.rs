//! Rotations with numbers worked out by hand, and both forms against each other.

use super::*;

fn plain(interleaved: bool) -> RopeConfig {
    RopeConfig { theta: 10_000.0, interleaved, yarn: None }
}

fn rows(table: &RotaryTable, positions: &[i64]) -> RotaryRows {
    table.rows(&Tensor::from_slice(positions)).unwrap()
}

fn check(found: &Tensor, expected: &[f64]) {
    let found = Vec::<f64>::try_from(found.flatten(0, -1)).unwrap();
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
    }
}

#[test]
fn pairs_are_neighbours_or_halves() {
    // Frequencies of a width of 4 are 1 and 0.01; the position is 2.
    let (c, s, d, t) = (2f64.cos(), 2f64.sin(), 0.02f64.cos(), 0.02f64.sin());
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0]).view([1, 1, 4]);
    let table = |style| RotaryTable::new(&plain(style), 4, 8, Device::Cpu).unwrap();
    let neighbours = [c - 2.0 * s, 2.0 * c + s, 3.0 * d - 4.0 * t, 4.0 * d + 3.0 * t];
    check(&rows(&table(true), &[2]).rotate(&x).unwrap(), &neighbours);
    let halves = [c - 3.0 * s, 2.0 * d - 4.0 * t, 3.0 * c + s, 4.0 * d + 2.0 * t];
    check(&rows(&table(false), &[2]).rotate(&x).unwrap(), &halves);
}

#[test]
fn the_fused_form_rotates_alike() {
    for interleaved in [true, false] {
        let table = RotaryTable::new(&plain(interleaved), 8, 64, Device::Cpu).unwrap();
        let rows = rows(&table, &[0, 5, 63]);
        let x = Tensor::randn([3, 2, 8], (Kind::Float, Device::Cpu));
        let expected = rows.rotate(&x).unwrap();
        let mut found = Vec::<f32>::try_from(x.flatten(0, -1)).unwrap();
        rows.rotate_in_place(&mut found, 2, RotatedPart::End).unwrap();
        let difference = (Tensor::from_slice(&found).view([3, 2, 8]) - expected).abs().max();
        assert!(difference.double_value(&[]) < 1e-6);
    }
}

#[test]
fn yarn_keeps_fast_pairs_and_stretches_slow_ones() {
    let yarn = YarnConfig {
        factor: 40.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 1.0,
        original_max_position_embeddings: 4096,
    };
    let rope = RopeConfig { theta: 10_000.0, interleaved: true, yarn: Some(yarn.clone()) };
    let found = inverse_frequencies(&rope, 64);
    let unscaled = inverse_frequencies(&plain(true), 64);
    // 32 turns over 4096 positions happen at pair 64 ln(4096 / (32 tau)) / (2 ln 10000) = 10.5,
    // one turn at 22.5, so pairs up to 10 stay and pairs from 23 on are divided by 40.
    assert_eq!(found[..=10], unscaled[..=10]);
    for pair in 23..32 {
        assert!((found[pair] * 40.0 / unscaled[pair] - 1.0).abs() < 1e-12, "pair {pair}");
    }
    let blend = 6.0 / 13.0;
    let expected = unscaled[16] * (blend / 40.0 + 1.0 - blend);
    assert!((found[16] / expected - 1.0).abs() < 1e-12);
    // Equal mscales leave cosines alone.
    assert_eq!(yarn.cos_sin_scale(), 1.0);
}

#[test]
fn mscale_multiplies_cosines_and_sines() {
    let yarn = YarnConfig {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 0.0,
        original_max_position_embeddings: 64,
    };
    let rope = RopeConfig { theta: 10_000.0, interleaved: true, yarn: Some(yarn) };
    let table = RotaryTable::new(&rope, 4, 8, Device::Cpu).unwrap();
    let x = Tensor::from_slice(&[1.0f32, 0.0, 1.0, 0.0]).view([1, 1, 4]);
    let scale = 0.1 * 4f64.ln() + 1.0;
    check(&rows(&table, &[0]).rotate(&x).unwrap(), &[scale, 0.0, scale, 0.0]);
}

#[test]
fn a_position_outside_the_table_is_refused() {
    let table = RotaryTable::new(&plain(true), 4, 8, Device::Cpu).unwrap();
    assert!(table.rows(&Tensor::from_slice(&[8i64])).is_err());
}
