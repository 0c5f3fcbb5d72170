//! Parameters, counted from the config alone, against the published figures.

use model_config::{ModelConfig, TensorSpec};

use crate::{in_bfloat16, read};

/// Which tensors a published figure counts.
#[derive(Clone, Copy)]
enum Counted {
    Target,
    /// Without the embedding and the head.
    TargetLayers,
    /// With the MTP layers, which use the target's embedding and head.
    All,
    /// With the MTP layers and the copies of embedding and head that their files have.
    Stored,
}
use Counted::{All, Stored, Target, TargetLayers};

/// (model, what is counted, published figure, how far it may be off, who publishes it).
///
/// Model cards round. Counts "of the files" are what the model hub sums over the headers of the
/// safetensors files: of bfloat16 files exactly our tensors, of FP8 files with the scales as well,
/// one for 16384 values.
type Row = (&'static str, Counted, f64, f64, &'static str);

const PUBLISHED: &[Row] = &[
    ("deepseek-v2-lite", Target, 15.7e9, 0.05e9, "model card"),
    ("deepseek-v2-lite", Target, 15_706_484_224.0, 0.0, "the files"),
    ("deepseek-v2", Target, 236e9, 0.5e9, "model card"),
    ("deepseek-v3", Target, 671e9, 0.5e9, "model card"),
    ("deepseek-v3", Target, 671_026_419_200.0, 0.0, "the files without layer 61"),
    ("deepseek-v3", All, 671e9 + 11.5e9, 0.5e9, "README_WEIGHTS.md of DeepSeek-V3"),
    ("deepseek-v3", Stored, 685e9, 0.685e9, "model card"),
    ("deepseek-r1", Target, 671e9, 0.5e9, "model card"),
    ("deepseek-v3.1", Target, 671e9, 0.5e9, "model card"),
    ("deepseek-v3.2-exp", Stored, 685_396_921_376.0, 0.05e9, "the files of DeepSeek-V3.2"),
    ("moonlight-16b-a3b", Target, 15.96e9, 0.005e9, "the files"),
    ("moonlight-16b-a3b", TargetLayers, 15.29e9, 0.005e9, "model card"),
    ("kimi-k2-instruct", Target, 1_026_470_731_056.0, 0.07e9, "the files"),
    ("glm-4.5-air", Target, 106.85e9, 0.005e9, "the files without layer 46"),
    ("glm-4.5-air", Stored, 110_468_824_832.0, 0.0, "the files"),
    ("glm-4.7-flash", Stored, 31_221_488_576.0, 0.0, "the files"),
    ("glm-5", Target, 744e9, 0.5e9, "model card"),
    ("glm-5", All, 753_864_139_008.0, 0.0, "the files"),
    ("glm-5.2", All, 753_329_940_480.0, 0.0, "the files"),
];

fn count(config: &ModelConfig, counted: Counted) -> usize {
    let is_table = |spec: &TensorSpec| {
        spec.name == "lm_head.weight" || spec.name == "model.embed_tokens.weight"
    };
    let target = config.target_tensors();
    let mtp = config.all_mtp_tensors();
    let sum = |specs: &[TensorSpec], is_in: &dyn Fn(&TensorSpec) -> bool| -> usize {
        specs.iter().filter(|spec| is_in(spec)).map(TensorSpec::n_values).sum()
    };
    match counted {
        Target => sum(&target, &|_| true),
        TargetLayers => sum(&target, &|spec| !is_table(spec)),
        All => sum(&target, &|_| true) + sum(&mtp, &|spec| !spec.is_optional),
        Stored => sum(&target, &|_| true) + sum(&mtp, &|_| true),
    }
}

#[test]
fn parameters_are_as_many_as_published() {
    for &(name, counted, figure, tolerance, source) in PUBLISHED {
        let n = count(&read(&in_bfloat16(name)).unwrap(), counted);
        // Below 2^53 every count is a float.
        let difference = (n as f64 - figure).abs();
        assert!(difference <= tolerance, "{name}: {n} parameters, {figure} by {source}");
        assert!(difference / figure <= 1.1e-3, "{name}: {n} parameters, {figure} by {source}");
    }
}
