//! Layers of quantised weights against layers of the values that they stand for.

use quantization::{Codes, E2M1, E4M3, QuantizedMatrix, Scales, e8m0};

use super::*;

/// Widths on both sides of the panel, chunk and task sizes; E2M1 takes the even ones.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (7, 3), (16, 32), (34, 31), (64, 33), (80, 129), (255, 100), (64, 160), (330, 70)];

/// Tiles and groups that divide the shapes and such that do not, those of whole rows and of the
/// whole matrix among them.
fn all_scales(random: &mut Random, n_out: usize, n_in: usize) -> Vec<Scales> {
    let blocks =
        [[128, 128], [32, 16], [1, n_in], [n_out, n_in], [1, 1], [3, 5], [64, 7], [n_out, 1]];
    let mut all: Vec<Scales> = blocks
        .into_iter()
        .map(|block| {
            let n_scales = n_out.div_ceil(block[0]) * n_in.div_ceil(block[1]);
            Scales::Blocks { block, values: random.values(n_scales) }
        })
        .collect();
    for group in [32, 1, 6, n_in] {
        let exponent = |_| 120 + random.below(9) as u8;
        let exponents = (0..n_out * n_in.div_ceil(group)).map(exponent).collect();
        all.push(Scales::Groups { group, exponents });
    }
    all
}

fn all_codes(random: &mut Random, n_out: usize, n_in: usize) -> Vec<Codes> {
    let mut bytes = |n| -> Vec<u8> { (0..n).map(|_| random.below(256) as u8).collect() };
    let mut e4m3 = bytes(n_out * n_in);
    e4m3.iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code ^= 1);
    let mut all = vec![Codes::E4m3(e4m3)];
    if n_in.is_multiple_of(2) {
        all.push(Codes::E2m1(bytes(n_out * n_in / 2)));
    }
    all
}

fn all_matrices(random: &mut Random, n_out: usize, n_in: usize) -> Vec<QuantizedMatrix> {
    let mut all = Vec::new();
    for scales in all_scales(random, n_out, n_in) {
        for codes in all_codes(random, n_out, n_in) {
            all.push(QuantizedMatrix::new([n_out, n_in], codes, scales.clone()).unwrap());
        }
    }
    all
}

fn values(matrix: &QuantizedMatrix) -> Vec<f32> {
    let mut values = vec![f32::NAN; matrix.n_out() * matrix.n_in()];
    for (row, values) in values.chunks_exact_mut(matrix.n_in()).enumerate() {
        matrix.dequantize_row(row, values);
    }
    values
}

/// Checks that a layer gives the bits of one of f32 values, on every instruction set.
#[track_caller]
fn check(layer: &PackedLinear, weight: &[f32], x: &[f32], what: &str) {
    let n_out = x.len() / layer.n_in() * layer.n_out();
    let mut expected = vec![f32::NAN; n_out];
    PackedLinear::from_f32(weight, layer.n_in()).forward(x, &mut expected);
    let found = on_every_isa(n_out, |isa, y| layer.forward_on(isa, x, y));
    assert_same_bits(&found, &expected, what);
}

fn is_packed(layer: &PackedLinear) -> bool {
    layer.parts.iter().all(|part| matches!(part.panels, Panels::E4m3(_) | Panels::E2m1(_)))
}

#[test]
fn a_quantised_weight_gives_the_bits_of_its_values() {
    let mut random = Random::new(11);
    for (n_in, n_out) in SHAPES {
        for matrix in all_matrices(&mut random, n_out, n_in) {
            let layer = PackedLinear::from_quantized(&matrix);
            assert!(is_packed(&layer));
            for n_rows in [0, 1, 3, 8, 70] {
                let x = random.values(n_rows * n_in);
                let what = format!("[{n_out}, {n_in}], {:?}, {n_rows} rows", matrix.scales());
                check(&layer, &values(&matrix), &x, &what);
            }
        }
    }
}

/// One weight an output, of every code that a scale leaves room for, times scales from the least to
/// the greatest.
#[test]
fn every_code_is_exact_with_every_scale() {
    let e4m3: Vec<u8> = (0..=u8::MAX).filter(|code| code & 0x7f != 0x7f).collect();
    let e2m1: Vec<u8> = (0..16).chain((0..16).map(|code| code << 4)).collect();
    for (n_in, all_codes) in [(1, e4m3), (2, e2m1)] {
        let shape = [all_codes.len(), n_in];
        let mut all = Vec::new();
        let least = f32::from_bits(1);
        for scale in [1.0, 0.0, -0.3, least, 1.7e-39, 3.3e-7, 1.3e36, 2.6e36, f32::MAX] {
            all.push((scale, Scales::Blocks { block: shape, values: vec![scale] }));
            all.push((scale, Scales::Blocks { block: [1, 2], values: vec![scale; shape[0]] }));
        }
        for exponent in [0, 1, 127, 246, 247, 248, 254] {
            let exponents = vec![exponent; shape[0]];
            all.push((e8m0(exponent), Scales::Groups { group: 2, exponents }));
        }
        for (scale, scales) in all {
            let value = |code: u8| match n_in {
                1 => E4M3[usize::from(code)],
                _ => E2M1[usize::from(code & 15)] + E2M1[usize::from(code >> 4)],
            };
            let fitting = |&code: &u8| if (value(code) * scale).is_finite() { code } else { 0 };
            let codes = all_codes.iter().map(fitting).collect();
            let codes = if n_in == 1 { Codes::E4m3(codes) } else { Codes::E2m1(codes) };
            let matrix = QuantizedMatrix::new(shape, codes, scales).unwrap();
            let layer = PackedLinear::from_quantized(&matrix);
            let x = vec![1.0; shape[1]];
            check(&layer, &values(&matrix), &x, &format!("{:?}", matrix.scales()));
        }
    }
}

#[test]
fn what_decoding_would_not_give_becomes_f32() {
    let layer = |codes: [u8; 2], scales| {
        let matrix = QuantizedMatrix::new([1, 2], Codes::E4m3(codes.to_vec()), scales).unwrap();
        PackedLinear::from_quantized(&matrix)
    };
    let block = |value| Scales::Blocks { block: [1, 2], values: vec![value] };
    let group = |exponent| Scales::Groups { group: 2, exponents: vec![exponent] };
    assert!(is_packed(&layer([0x77, 0xf7], block(1.3e36))));
    assert!(is_packed(&layer([0x77, 0xf7], group(246))));
    for (scales, scale) in [(block(1.4e36), 1.4e36), (group(247), 2_f32.powi(120))] {
        // Of the codes the first is half the second, which is 2^-8.
        let layer = layer([1, 2], scales);
        assert!(!is_packed(&layer));
        let y = on_every_isa(1, |isa, y| layer.forward_on(isa, &[2.0, -2.0], y));
        assert_eq!(y[0], scale * -2_f32.powi(-8));
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch() {
    let mut random = Random::new(12);
    for (n_in, n_out) in [(80, 129), (34, 31)] {
        for matrix in all_matrices(&mut random, n_out, n_in) {
            let layer = PackedLinear::from_quantized(&matrix);
            let row = random.values(n_in);
            let mut alone = vec![f32::NAN; n_out];
            layer.forward(&row, &mut alone);
            for (n_rows, at) in [(2, 0), (3, 2), (8, 5), (17, 16), (70, 64)] {
                let mut x = random.values(n_rows * n_in);
                x[at * n_in..][..n_in].copy_from_slice(&row);
                let y = on_every_isa(n_rows * n_out, |isa, y| layer.forward_on(isa, &x, y));
                assert_same_bits(&alone, &y[at * n_out..][..n_out], "row in a batch");
            }
        }
    }
}

/// Layers that end inside a panel, that end with one, of the same and of other kinds.
#[test]
fn a_stack_has_the_outputs_of_its_layers() {
    let mut random = Random::new(13);
    let n_in = 70;
    for widths in [[64, 128, 32], [31, 128, 65], [128, 96, 7]] {
        let mut layers = Vec::new();
        for n_out in widths {
            let weight = random.values(n_in * n_out);
            let narrow: Vec<bf16> = weight.iter().map(|&w| bf16::from_f32(w)).collect();
            let mut kinds = vec![
                (
                    PackedLinear::from_bf16(&narrow, n_in),
                    narrow.iter().map(|w| w.to_f32()).collect(),
                ),
                (PackedLinear::from_f32(&weight, n_in), weight),
            ];
            kinds.extend(
                all_matrices(&mut random, n_out, n_in)
                    .iter()
                    .step_by(5)
                    .map(|matrix| (PackedLinear::from_quantized(matrix), values(matrix))),
            );
            layers.push(kinds);
        }
        let n_kinds = layers[0].len();
        for shift in [0, 1] {
            for kind in 0..n_kinds {
                let of = |layer: usize| &layers[layer][(kind + layer * shift) % n_kinds];
                let stack = PackedLinear::stack([0, 1, 2].map(|layer| of(layer).0.clone()));
                let is_one = shift == 0 && widths[..2].iter().all(|n_out| n_out % PANEL == 0);
                assert_eq!(stack.parts.len() == 1, is_one);
                let weight: Vec<f32> = (0..3).flat_map(|layer| of(layer).1.clone()).collect();
                for n_rows in [1, 70] {
                    let x = random.values(n_rows * n_in);
                    check(&stack, &weight, &x, &format!("{widths:?}, {kind}, {shift}"));
                }
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut random = Random::new(14);
    let (n_in, n_out, n_rows) = (300, 517, 130);
    for codes in all_codes(&mut random, n_out, n_in) {
        let scales = Scales::Blocks { block: [128, 128], values: random.values(15) };
        let matrix = QuantizedMatrix::new([n_out, n_in], codes, scales).unwrap();
        let linear = PackedLinear::from_quantized(&matrix);
        let x = random.values(n_rows * n_in);
        let [one, three] = [1, 3].map(|n_threads| in_pool(n_threads, &linear, &x));
        assert_same_bits(&one, &three, "one and three threads");
    }
}
