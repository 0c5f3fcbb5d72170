//! Tests of random weights.

use half::bf16;
use rayon::ThreadPoolBuilder;

use super::*;
use crate::dummy::{DUMMY_SEED, fill};

fn filled(spec: &TensorSpec, seed: u64) -> Vec<f32> {
    let mut out = vec![f32::NAN; spec.n_values()];
    fill(spec, seed, &mut out, |value| value);
    out
}

/// Mean, deviation and tails within five standard errors of those of a normal distribution, over
/// several chunks.
#[test]
fn a_matrix_is_normal_with_the_deviation_of_published_configs() {
    let values = filled(&spec("a.weight", &[512, 1024]), DUMMY_SEED);
    let n = values.len() as f64;
    let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    assert!(mean.abs() < 5.0 * 0.02 / n.sqrt(), "{mean}");
    let variance = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
    assert!((variance.sqrt() / 0.02 - 1.0).abs() < 5.0 / (2.0 * n).sqrt(), "{variance}");
    for (deviations, share) in [(1.0, 0.317_310_5), (2.0, 0.045_500_3), (3.0, 0.002_699_8)] {
        let n_beyond = values.iter().filter(|x| x.abs() > 0.02 * deviations).count();
        let error = n_beyond as f64 / n - share;
        assert!(error.abs() < 5.0 * (share * (1.0 - share) / n).sqrt(), "{deviations}: {error}");
    }
}

#[test]
fn a_value_depends_on_seed_name_and_place_alone() {
    let a = spec("a.weight", &[300, 512]);
    let values = filled(&a, 1);
    assert_ne!(values, filled(&a, 2), "another seed");
    assert_ne!(values, filled(&spec("b.weight", &[300, 512]), 1), "another name");
    let (first, second) = (&values[..1 << 16], &values[1 << 16..1 << 17]);
    assert_ne!(first, second, "another chunk");
    for n_threads in [1, 2, 5] {
        let pool = ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        assert_eq!(pool.install(|| filled(&a, 1)), values, "{n_threads} threads");
    }
    let mut rounded = vec![bf16::ZERO; a.n_values()];
    fill(&a, 1, &mut rounded, bf16::from_f32);
    let expected: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
    assert_eq!(rounded, expected);
}

/// They were drawn once: figures of one version can be compared with those of another.
#[test]
fn the_values_stay_what_they_are() {
    let values = filled(&spec("model.embed_tokens.weight", &[1, 3]), DUMMY_SEED);
    assert_eq!(values, [-0.006_063_289_5, 0.021_983_912, 0.034_988_746]);
}

#[test]
fn a_map_has_every_required_tensor_in_its_dtype() {
    let config = ModelConfig::load(&bundled("tiny-glm52")).unwrap();
    let mut expected = config.target_tensors();
    expected.extend(config.all_mtp_tensors());
    let dummy =
        |expected: &[TensorSpec], kind| TensorMap::dummy(expected, DUMMY_SEED, Device::Cpu, kind);
    let mut exact = dummy(&expected, Kind::Float);
    let mut coarse = dummy(&expected, Kind::BFloat16);
    for spec in &expected {
        let [exact, coarse] =
            [&mut exact, &mut coarse].map(|map| map.take_optional(&spec.name).unwrap());
        let (Some(exact), Some(coarse)) = (exact, coarse) else {
            assert!(spec.is_optional, "{} is missing", spec.name);
            continue;
        };
        assert!(!spec.is_optional, "{}", spec.name);
        let shape: Vec<usize> = exact.size().iter().map(|&n| n.try_into().unwrap()).collect();
        assert_eq!(shape, spec.shape, "{}", spec.name);
        let is_float32 = spec.load_dtype == LoadDtype::Float32;
        assert_eq!(coarse.kind(), if is_float32 { Kind::Float } else { Kind::BFloat16 });
        assert!(exact.to_kind(coarse.kind()).equal(&coarse), "{}", spec.name);
        // Alone and in company.
        let alone = dummy(std::slice::from_ref(spec), Kind::Float).take(&spec.name).unwrap();
        assert!(alone.equal(&exact), "{}", spec.name);
        let constant = match spec.role() {
            TensorRole::Norm => 1.0,
            TensorRole::Bias => 0.0,
            TensorRole::Matrix => continue,
        };
        assert!(values(&exact).iter().all(|&value| value == constant), "{}", spec.name);
    }
    assert!(exact.is_empty() && coarse.is_empty());
}
