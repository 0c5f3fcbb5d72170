//! A layer of quantised weights is one of the values that they stand for: the same bits in the
//! fused form.

use std::sync::Arc;

use model_config::DsaConfig;
use quantization::{Codes, QuantizedMatrix, Scales};
use weights::LoadedWeight;

use super::*;

#[derive(Clone, Copy)]
enum Format {
    Fp8,
    Mxfp8,
    Mxfp4,
}

/// A random weight whose blocks do not divide it.
fn quantized(n_out: usize, n_in: usize, format: Format) -> LoadedWeight {
    let bytes = |n: usize, end: i64| -> Vec<u8> {
        let values = Tensor::randint(end, [i64::try_from(n).unwrap()], (Kind::Int64, Device::Cpu));
        Vec::<i64>::try_from(values).unwrap().into_iter().map(|value| value as u8).collect()
    };
    // Codes up to 15, of both signs.
    let e4m3 = || bytes(n_out * n_in, 256).into_iter().map(|code| code & 0xd7).collect();
    let groups = |group: usize| {
        let n_scales = n_out * n_in.div_ceil(group);
        let exponents = bytes(n_scales, 3).into_iter().map(|exponent| 122 + exponent).collect();
        Scales::Groups { group, exponents }
    };
    let (codes, scales) = match format {
        Format::Fp8 => {
            let block = [5, 6];
            let n_scales = n_out.div_ceil(block[0]) * n_in.div_ceil(block[1]);
            let values = bytes(n_scales, 100).into_iter().map(|value| f32::from(value) / 1e3);
            (Codes::E4m3(e4m3()), Scales::Blocks { block, values: values.collect() })
        }
        Format::Mxfp8 => (Codes::E4m3(e4m3()), groups(8)),
        Format::Mxfp4 => (Codes::E2m1(bytes(n_out * n_in / 2, 256)), groups(8)),
    };
    LoadedWeight::Quantized(Arc::new(QuantizedMatrix::new([n_out, n_in], codes, scales).unwrap()))
}

fn values(weight: &LoadedWeight) -> LoadedWeight {
    weight.to_tensor().unwrap().into()
}

/// Compares a layer of quantised weights with one of their values, and its plain form.
#[track_caller]
fn check_forms(build: &dyn Fn(bool, Ops) -> Vec<Tensor>) {
    let expected = build(false, Ops::Fused);
    let plain = build(true, Ops::Torch);
    for ((found, expected), plain) in build(true, Ops::Fused).iter().zip(&expected).zip(&plain) {
        assert_eq!(found, expected);
        let difference = (found - plain).abs().max() / plain.abs().max();
        assert!(difference.double_value(&[]) < 1e-5, "{difference}");
    }
}

/// Weights as they are, or their values.
fn as_stored(weights: &[LoadedWeight], stays: bool) -> Vec<LoadedWeight> {
    let of = |weight: &LoadedWeight| if stays { weight.into() } else { values(weight) };
    weights.iter().map(of).collect()
}

#[test]
fn linear_layers_and_stacks() {
    let x = random(&[5, 20]);
    let weights = [
        quantized(37, 20, Format::Fp8),
        quantized(64, 20, Format::Mxfp4),
        random(&[3, 20]).into(),
        quantized(33, 20, Format::Mxfp8),
    ];
    check_forms(&|stays, ops| {
        let weights = as_stored(&weights, stays);
        let alone = weights.iter().map(|weight| Linear::new(weight, ops).unwrap());
        let mut outputs: Vec<Tensor> = alone.map(|it| it.share().forward(&x).unwrap()).collect();
        let whole = Tensor::cat(&outputs, 1);
        let stack = Linear::stack::<4>(weights.try_into().unwrap(), ops).unwrap();
        outputs.push(stack.forward(&x).unwrap());
        check(&outputs[4], &whole);
        outputs
    });
    let [other, weight] = [19, 20].map(|n_in| random(&[4, n_in]).into());
    assert!(Linear::stack([weight, other], Ops::Fused).is_err());
}

#[test]
fn gated_layers_of_one_format_and_of_several() {
    let x = random(&[6, 20]);
    let mixed = [
        quantized(34, 20, Format::Fp8),
        quantized(34, 20, Format::Mxfp4),
        quantized(20, 34, Format::Mxfp8),
    ];
    let alike = [34, 34, 20].map(|n_out| quantized(n_out, 54 - n_out, Format::Mxfp4));
    for weights in [mixed, alike] {
        check_forms(&|stays, ops| {
            let weights: [_; 3] = as_stored(&weights, stays).try_into().unwrap();
            vec![GatedMlp::new(weights, ops).unwrap().forward(&x).unwrap()]
        });
        let [gate, up, _] = &weights;
        assert!(GatedMlp::new([gate, up, up], Ops::Fused).is_err());
    }
}

#[test]
fn latent_attention_and_its_indexer() {
    let mla = MlaConfig {
        num_heads: 3,
        q_lora_rank: Some(14),
        kv_lora_rank: 10,
        qk_nope_head_dim: 7,
        qk_rope_head_dim: 4,
        v_head_dim: 6,
    };
    let dsa = DsaConfig {
        index_n_heads: 3,
        index_head_dim: 6,
        index_topk: 4,
        rope_interleaved: false,
        indexer_kinds: Vec::new(),
        index_share_for_mtp_iteration: false,
    };
    let rope = RopeConfig { theta: 100.0, interleaved: true, yarn: None };
    let table = RotaryTable::new(&rope, 4, 32, Device::Cpu).unwrap();
    let rows = table.rows(&Tensor::from_slice(&[0i64, 3, 31])).unwrap();
    let x = random(&[3, 20]);
    let weights = [
        quantized(14, 20, Format::Fp8),
        quantized(33, 14, Format::Fp8),
        quantized(14, 20, Format::Mxfp8),
        quantized(20, 18, Format::Mxfp4),
        quantized(18, 14, Format::Fp8),
        quantized(6, 20, Format::Fp8),
    ];
    let (q_norm, kv_norm, kv_b) = (random(&[14]), random(&[10]), random(&[3 * 13, 10]));
    let (k_norm, head_weights) = ((random(&[6]), random(&[6])), random(&[3, 20]));
    check_forms(&|stays, ops| {
        let [q_a, q_b, kv_a, o, q, k]: [_; 6] = as_stored(&weights, stays).try_into().unwrap();
        let weights = MlaWeights {
            q_a,
            q_b: Some((q_norm.shallow_clone(), q_b)),
            kv_a,
            kv_a_norm: kv_norm.shallow_clone(),
            kv_b: kv_b.shallow_clone(),
            o,
        };
        let layer = MlaProjections::new(&weights, &mla, 1e-6, ops).unwrap();
        let latents = layer.latents(&x, &rows).unwrap();
        let (q_latent, q_pe) = layer.queries(&latents.q_a, &rows).unwrap();
        let output = layer.output(&q_latent).unwrap();
        let weights = IndexerWeights {
            q,
            k,
            k_norm: (k_norm.0.shallow_clone(), k_norm.1.shallow_clone()),
            head_weights: head_weights.shallow_clone(),
        };
        let indexer = Indexer::new(&weights, &dsa, ops).unwrap();
        let keys = indexer.keys(&x, &rows).unwrap();
        let (index_q, _) = indexer.queries(&latents.q_a, &x, &rows).unwrap();
        vec![latents.latent, latents.k_pe, q_latent, q_pe, output, keys, index_q]
    });
}
