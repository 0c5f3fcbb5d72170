//! Tests of quantised tensors: L17, L18, every format, and every contradiction.

use model_config::DeclaredFormats;
use serde_json::{Value, json};

use super::*;

const WEIGHT: &str = "model.layers.0.mlp.up_proj.weight";
const SCALE_INV: &str = "model.layers.0.mlp.up_proj.weight_scale_inv";
const SCALE: &str = "model.layers.0.mlp.up_proj.weight_scale";
/// E4M3 of 1.
const ONE: u8 = 0x38;

struct Part {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

fn part(name: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Part {
    Part { name: name.to_owned(), dtype, shape: shape.to_vec(), data }
}

fn floats(name: &str, shape: &[usize], values: &[f32]) -> Part {
    part(name, Dtype::F32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

/// A folder with a shard for each list of parts.
fn written(shards: &[&[Part]]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut weight_map = BTreeMap::new();
    for (parts, shard_idx) in shards.iter().zip(1..) {
        let file = format!("model-{shard_idx}.safetensors");
        let views = parts.iter().map(|part| {
            let Part { name, dtype, shape, data } = part;
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        fs::write(dir.path().join(&file), safetensors::serialize(views, None).unwrap()).unwrap();
        weight_map.extend(parts.iter().map(|part| (part.name.clone(), file.clone())));
    }
    let index = json!({ "weight_map": weight_map }).to_string();
    fs::write(dir.path().join(INDEX), index).unwrap();
    dir
}

/// What a `quantization_config` declares of a tensor.
fn declared(quantization: &Value, name: &str) -> DeclaredFormats {
    let text = fs::read_to_string(bundled("tiny-dsv3").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["quantization_config"] = quantization.clone();
    let raw = RawConfig::parse(&config.to_string(), "config.json").unwrap();
    let quantization = ModelConfig::from_raw(&raw).unwrap().quantization;
    quantization.map(|it| it.declared(name)).unwrap_or_default()
}

fn block(rows: usize, columns: usize) -> Value {
    json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns]})
}

fn mxfp4(exclude: &[&str]) -> Value {
    let weight = json!({"dtype": "fp4", "qscheme": "per_group", "group_size": 32});
    json!({"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": exclude})
}

fn load_weight(
    dir: &Path,
    quantization: &Value,
    shape: [usize; 2],
) -> Result<Tensor, WeightsError> {
    let declared = declared(quantization, WEIGHT);
    let expected = [TensorSpec { declared, ..spec(WEIGHT, &shape) }];
    let checkpoint = Checkpoint::open(dir).unwrap();
    assert_eq!(checkpoint.leftovers(&expected), Vec::<&str>::new());
    checkpoint.load(&expected, Device::Cpu, Kind::Float)?.take(WEIGHT)
}

#[track_caller]
fn check_weight(shards: &[&[Part]], quantization: &Value, shape: [usize; 2], expected: &[f32]) {
    let dir = written(shards);
    let tensor = load_weight(dir.path(), quantization, shape).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(tensor.size(), shape.map(|n| n as i64));
    assert_eq!(values(&tensor), expected);
}

#[track_caller]
fn check_fault(parts: &[Part], quantization: &Value, shape: [usize; 2], words: &[&str]) {
    let dir = written(&[parts]);
    let message = load_weight(dir.path(), quantization, shape).unwrap_err().to_string();
    for words in words {
        assert!(message.contains(words), "no `{words}` in: {message}");
    }
}

fn ones(shape: [usize; 2]) -> Part {
    part(WEIGHT, Dtype::F8_E4M3, &shape, vec![ONE; shape[0] * shape[1]])
}

#[test]
fn l17_blocks_at_the_edge_are_smaller() {
    let tall = [[2.0; 16].as_slice(), &[3.0; 8]].concat();
    let scale = || floats(SCALE_INV, &[2, 1], &[2.0, 3.0]);
    check_weight(&[&[ones([6, 4]), scale()]], &block(4, 4), [6, 4], &tall);
    let wide = [2.0, 2.0, 2.0, 2.0, 3.0, 3.0].repeat(2);
    let scale_of_columns = floats(SCALE_INV, &[1, 2], &[2.0, 3.0]);
    check_weight(&[&[ones([2, 6]), scale_of_columns]], &block(4, 4), [2, 6], &wide);
    // In another file.
    check_weight(&[&[ones([6, 4])], &[scale()]], &block(4, 4), [6, 4], &tall);
    check_weight(&[&[scale()], &[ones([6, 4])]], &block(4, 4), [6, 4], &tall);
    // Any block: of 5 rows the second one has the last row alone.
    let expected = [[2.0; 20].as_slice(), &[3.0; 4]].concat();
    check_weight(&[&[ones([6, 4]), scale()]], &block(5, 4), [6, 4], &expected);
}

#[test]
fn l17_a_missing_scale_or_block_size_is_an_error() {
    let missing = [WEIGHT, "is F8_E4M3 and has no scale", SCALE_INV, SCALE];
    check_fault(&[ones([6, 4])], &block(4, 4), [6, 4], &missing);
    let parts = || [ones([6, 4]), floats(SCALE_INV, &[2, 1], &[2.0, 3.0])];
    let misfit = [WEIGHT, SCALE_INV, "of shape [2, 1]", "weight_block_size"];
    // The sizes are never guessed from the shapes, neither without a config nor against it.
    check_fault(&parts(), &Value::Null, [6, 4], &misfit);
    check_fault(&parts(), &json!({"quant_method": "fp8"}), [6, 4], &misfit);
    check_fault(&parts(), &block(2, 4), [6, 4], &[SCALE_INV, "[2, 1] instead of [3, 1]"]);
    let channels = [ones([6, 4]), floats(SCALE_INV, &[6, 1], &[1.0; 6])];
    check_fault(&channels, &block(4, 4), [6, 4], &[SCALE_INV, "[6, 1] instead of [2, 1]"]);
}

#[test]
fn one_scale_a_tensor_or_channel_shows_by_its_shape() {
    let fp8 = json!({"quant_method": "fp8"});
    for config in [&Value::Null, &fp8] {
        for shape in [&[][..], &[1], &[1, 1]] {
            let parts = [ones([2, 3]), floats(SCALE, shape, &[0.5])];
            check_weight(&[&parts], config, [2, 3], &[0.5; 6]);
        }
        for shape in [&[2][..], &[2, 1]] {
            let parts = [ones([2, 3]), floats(SCALE, shape, &[0.5, 3.0])];
            check_weight(&[&parts], config, [2, 3], &[0.5, 0.5, 0.5, 3.0, 3.0, 3.0]);
        }
    }
    // Scales in bfloat16 and half precision, of 1.5.
    for (dtype, bytes) in [(Dtype::BF16, [0xc0, 0x3f]), (Dtype::F16, [0x00, 0x3e])] {
        let parts = [ones([2, 3]), part(SCALE, dtype, &[1], bytes.to_vec())];
        check_weight(&[&parts], &fp8, [2, 3], &[1.5; 6]);
    }
}

#[test]
fn a_name_of_packed_values_does_not_make_them_packed() {
    let parts = [floats(&format!("{WEIGHT}_packed"), &[1, 2], &[1.0, -2.0])];
    check_weight(&[&parts], &mxfp4(&[]), [1, 2], &[1.0, -2.0]);
    let codes = part(&format!("{WEIGHT}_packed"), Dtype::F8_E4M3, &[1, 2], vec![ONE; 2]);
    check_weight(&[&[codes, floats(SCALE, &[], &[3.0])]], &mxfp4(&[]), [1, 2], &[3.0; 2]);
}

#[test]
fn scales_of_activations_are_not_used() {
    let input_scale = floats("model.layers.0.mlp.up_proj.input_scale", &[1], &[9.0]);
    let dir = written(&[&[ones([2, 3]), floats(SCALE, &[1], &[0.5]), input_scale]]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let expected = [spec(WEIGHT, &[2, 3])];
    let leftovers = checkpoint.leftovers(&expected);
    assert_eq!(leftovers, ["model.layers.0.mlp.up_proj.input_scale"]);
    let mut loaded = checkpoint.load(&expected, Device::Cpu, Kind::Float).unwrap();
    assert_eq!(values(&loaded.take(WEIGHT).unwrap()), [0.5; 6]);
}

/// A value by the fields of its code, and its scale `2^(exponent - 127)`.
fn e2m1(code: u8, exponent: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
    (sign * magnitude * 2_f64.powi(i32::from(exponent) - 127)) as f32
}

/// Values of packed codes `[n_out, n_in / 2]` with exponents `[n_out, ceil(n_in / 32)]`.
fn e2m1_values(codes: &[u8], exponents: &[u8], n_in: usize) -> Vec<f32> {
    let rows = codes.chunks(n_in / 2).zip(exponents.chunks(n_in.div_ceil(32)));
    rows.flat_map(|(codes, exponents)| {
        (0..n_in).map(|k| e2m1(codes[k / 2] >> (4 * (k % 2)) & 15, exponents[k / 32]))
    })
    .collect()
}

#[test]
fn microscaling_formats_share_an_exponent_by_32_columns() {
    // 40 columns: the second group of a row has eight.
    let exponents = vec![127, 130, 120, 1];
    let e8m0 = |dtype| part(SCALE, dtype, &[2, 2], exponents.clone());
    let codes: Vec<u8> = (0..40).map(|idx| (idx * 37 + 5) as u8).collect();
    let expected = e2m1_values(&codes, &exponents, 40);
    let compressed = json!({
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights":
            {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32}}}
    });
    for dtype in [Dtype::U8, Dtype::I8] {
        let packed = part(WEIGHT, dtype, &[2, 20], codes.clone());
        check_weight(&[&[packed, e8m0(Dtype::U8)]], &mxfp4(&[]), [2, 40], &expected);
        let packed = part(&format!("{WEIGHT}_packed"), dtype, &[2, 20], codes.clone());
        check_weight(&[&[packed, e8m0(Dtype::F8_E8M0)]], &compressed, [2, 40], &expected);
    }

    let row = |exponent: i32| 2_f32.powi(exponent - 127);
    let scales: Vec<f32> = [(127, 32), (130, 8), (120, 32), (1, 8)]
        .into_iter()
        .flat_map(|(exponent, n)| vec![row(exponent); n])
        .collect();
    for config in [Value::Null, json!({"quant_method": "mxfp8"})] {
        let parts = [ones([2, 40]), e8m0(Dtype::U8)];
        check_weight(&[&parts], &config, [2, 40], &scales);
    }
    // Powers of two may also be the scales of blocks.
    let parts = [ones([3, 2]), part(SCALE, Dtype::F8_E8M0, &[2, 1], vec![128, 126])];
    check_weight(&[&parts], &block(2, 2), [3, 2], &[2.0, 2.0, 2.0, 2.0, 0.5, 0.5]);
}

#[test]
fn contradictions_name_the_tensor_and_the_way_out() {
    let fp8 = json!({"quant_method": "fp8"});
    let scalar = |value| floats(SCALE, &[1], &[value]);
    let excluded = json!({"quant_method": "fp8", "ignore": ["model.layers.0.mlp"]});
    let words = [WEIGHT, "is F8_E4M3", "excludes it", "`model.layers.0.mlp`", "remove the entry"];
    check_fault(&[ones([2, 4]), scalar(1.0)], &excluded, [2, 4], &words);

    let twice = [ones([2, 4]), scalar(1.0), floats(SCALE_INV, &[1], &[1.0])];
    check_fault(&twice, &fp8, [2, 4], &[WEIGHT, SCALE, SCALE_INV, "remove one"]);
    let stray = || [floats(WEIGHT, &[1, 2], &[1.0, 2.0]), scalar(1.0)];
    for config in [&fp8, &mxfp4(&[]), &Value::Null] {
        check_fault(&stray(), config, [1, 2], &[WEIGHT, "is F32, not quantised", SCALE]);
    }

    let packed = |width: usize| part(WEIGHT, Dtype::U8, &[2, width], vec![0; 2 * width]);
    let exponents = || part(SCALE, Dtype::U8, &[2, 1], vec![127; 2]);
    for config in [Value::Null, fp8.clone(), block(128, 128)] {
        let words = [WEIGHT, "is U8, as packed values are", "MXFP4"];
        check_fault(&[packed(16), exponents()], &config, [2, 32], &words);
    }
    let excluded = mxfp4(&["*up_proj"]);
    check_fault(&[packed(16), exponents()], &excluded, [2, 32], &[WEIGHT, "`*up_proj`"]);
    check_fault(&[packed(16)], &mxfp4(&[]), [2, 32], &[WEIGHT, "is U8 and has no scale", SCALE]);
    let wide = [WEIGHT, "has shape [2, 32] instead of [2, 16]"];
    check_fault(&[packed(32), exponents()], &mxfp4(&[]), [2, 32], &wide);
    let per_block = [packed(16), floats(SCALE, &[2, 1], &[1.0; 2])];
    check_fault(&per_block, &mxfp4(&[]), [2, 32], &[WEIGHT, SCALE, "in F32"]);
    let short = [packed(32), part(SCALE, Dtype::U8, &[2, 1], vec![127; 2])];
    check_fault(&short, &mxfp4(&[]), [2, 64], &[SCALE, "[2, 1] instead of [2, 2]"]);

    for dtype in [Dtype::F8_E5M2, Dtype::F8_E4M3FNUZ] {
        let parts = [part(WEIGHT, dtype, &[2, 4], vec![0; 8]), scalar(1.0)];
        check_fault(&parts, &fp8, [2, 4], &[&format!("{WEIGHT} is {dtype:?}; only F32")]);
    }
    for (bad, scale) in [("NaN", f32::NAN), ("infinite", f32::INFINITY)] {
        let words = [WEIGHT, "model-1.safetensors", "scale 0 is", bad];
        check_fault(&[ones([2, 4]), scalar(scale)], &fp8, [2, 4], &words);
    }
    let exponents = part(SCALE, Dtype::U8, &[2, 1], vec![127, 255]);
    check_fault(&[packed(16), exponents], &mxfp4(&[]), [2, 32], &[WEIGHT, "scale 1 is NaN"]);
    let nan = part(WEIGHT, Dtype::F8_E4M3, &[2, 4], vec![0, 0, 0, 0, 0, 0, 0xff, 0]);
    check_fault(&[nan, scalar(1.0)], &fp8, [2, 4], &[WEIGHT, "element [1, 2] is NaN", "again"]);
}

#[test]
fn what_would_change_the_values_is_not_passed_over() {
    for ending in ["_scale_2", "_global_scale", "_zero_point", "_g_idx"] {
        let part = format!("{WEIGHT}{ending}");
        let check = |weight: &[Part]| {
            let dir = written(&[weight, &[floats(&part, &[1], &[0.0])]]);
            Checkpoint::open(dir.path()).unwrap().check(&[spec(WEIGHT, &[2, 4])])
        };
        let message = check(&[ones([2, 4]), floats(SCALE, &[1], &[1.0])]).unwrap_err().to_string();
        let expected = format!("{WEIGHT} is quantised with {part}, which is not supported");
        assert!(message.contains(&expected), "{message}");
        check(&[floats(WEIGHT, &[2, 4], &[1.0; 8])]).unwrap();
    }
}

#[test]
fn where_patterns_overlap_the_file_shows_the_format() {
    let weight = |spec: Value| json!({"weight": spec});
    let block = |rows: usize| {
        weight(json!({"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [rows, 4]}))
    };
    let quark = |first: Value, second: Value| {
        let layers = json!({"*mlp*": first, "*proj": second});
        json!({"quant_method": "quark", "layer_quant_config": layers})
    };
    let channel = weight(json!({"dtype": "fp8_e4m3", "qscheme": "per_channel"}));
    let channels = floats(SCALE, &[6, 1], &[2.0; 6]);
    check_weight(&[&[ones([6, 4]), channels]], &quark(block(4), channel), [6, 4], &[2.0; 24]);
    let two = || [ones([6, 4]), floats(SCALE, &[2, 1], &[2.0, 3.0])];
    let expected = [[2.0; 12].as_slice(), &[3.0; 12]].concat();
    check_weight(&[&two()], &quark(block(3), block(2)), [6, 4], &expected);
    let words = [WEIGHT, SCALE, "blocks of [4, 4] and of [5, 4]", "declares both"];
    check_fault(&two(), &quark(block(4), block(5)), [6, 4], &words);
}

/// Two layers and an MTP layer of two experts each.
fn mixed_config(quantization: &Value) -> ModelConfig {
    let config = json!({
        "model_type": "deepseek_v3", "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 64, "num_attention_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "num_nextn_predict_layers": 1, "n_routed_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 0,
        "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": true, "routed_scaling_factor": 1.0, "quantization_config": quantization
    });
    let raw = RawConfig::parse(&config.to_string(), "config.json").unwrap();
    ModelConfig::from_raw(&raw).unwrap()
}

/// A tensor's parts and its values, quantised to MXFP4 or in bfloat16.
fn mixed_tensor(spec: &TensorSpec, is_packed: bool) -> (Vec<Part>, Vec<f32>) {
    let seed = spec.name.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31) + u32::from(byte));
    let byte = |idx: usize| (seed.wrapping_add(idx as u32).wrapping_mul(0x9e37_79b9) >> 24) as u8;
    if is_packed {
        let [n_out, n_in] = spec.shape[..] else { panic!("{} is no matrix", spec.name) };
        let codes: Vec<u8> = (0..n_out * n_in / 2).map(byte).collect();
        let exponents: Vec<u8> = (0..n_out * n_in / 32).map(|idx| 117 + byte(idx) % 8).collect();
        let expected = e2m1_values(&codes, &exponents, n_in);
        let scale =
            part(&format!("{}_scale", spec.name), Dtype::U8, &[n_out, n_in / 32], exponents);
        return (vec![part(&spec.name, Dtype::U8, &[n_out, n_in / 2], codes), scale], expected);
    }
    // The upper half of a float32 between 0.5 and 1.
    let halves: Vec<u16> =
        (0..spec.n_values()).map(|idx| 0x3f00 | u16::from(byte(idx) >> 1)).collect();
    let expected = halves.iter().map(|half| f32::from_bits(u32::from(*half) << 16)).collect();
    let data = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
    (vec![part(&spec.name, Dtype::BF16, &spec.shape, data)], expected)
}

#[track_caller]
fn check_mixed(exclude: &[&str], is_packed: impl Fn(&str) -> bool) {
    let config = mixed_config(&mxfp4(exclude));
    let specs = [config.target_tensors(), config.all_mtp_tensors()].concat();
    let specs: Vec<_> = specs.into_iter().filter(|spec| !spec.is_optional).collect();
    let (parts, expected): (Vec<_>, Vec<_>) =
        specs.iter().map(|spec| mixed_tensor(spec, is_packed(&spec.name))).unzip();
    // Weights and scales alternate between the shards.
    let mut shards = [Vec::new(), Vec::new()];
    for (idx, part) in parts.into_iter().flatten().enumerate() {
        shards[idx % 2].push(part);
    }
    let dir = written(&[&shards[0], &shards[1]]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    checkpoint.check_mtp(&config).unwrap_or_else(|error| panic!("{error}"));
    let mut loaded = checkpoint.load(&specs, Device::Cpu, Kind::Float).unwrap();
    let packed = checkpoint.load(&specs, Device::Cpu, Kind::BFloat16).unwrap();
    let mut packed = packed.keep_packed(true);
    for (spec, expected) in specs.iter().zip(expected) {
        assert_eq!(values(&loaded.take(&spec.name).unwrap()), expected, "{}", spec.name);
        match packed.take_weight(&spec.name).unwrap() {
            LoadedWeight::Quantized(matrix) => {
                assert!(is_packed(&spec.name));
                let mut row = vec![0.0; matrix.n_in()];
                for (out, expected) in expected.chunks(matrix.n_in()).enumerate() {
                    matrix.dequantize_row(out, &mut row);
                    assert_eq!(row, expected, "{}", spec.name);
                }
            }
            LoadedWeight::Dense(tensor) => {
                assert!(!is_packed(&spec.name));
                assert_eq!(values(&tensor), expected, "{}", spec.name);
            }
        }
    }
    assert!(loaded.is_empty() && packed.is_empty());
}

#[test]
fn l18_what_is_packed_is_decided_tensor_by_tensor() {
    let is_expert = |name: &str| name.contains(".experts.");
    let is_mtp = |name: &str| name.starts_with("model.layers.2.");
    let leaves = [
        "model.layers.2.mlp.experts.0.gate_proj",
        "model.layers.2.mlp.experts.0.up_proj",
        "model.layers.2.mlp.experts.1.down_proj",
    ];
    let main_experts = |name: &str| is_expert(name) && !is_mtp(name);
    check_mixed(&leaves, main_experts);
    check_mixed(&["re:model.layers.2.*", "*self_attn*"], main_experts);
    check_mixed(&["model.layers.2"], main_experts);
    // Nothing says that the layer is unquantised; it has no scales.
    check_mixed(&[], main_experts);
    check_mixed(&["*self_attn*"], is_expert);
    check_mixed(&[], |name| is_expert(name) || name.ends_with("eh_proj.weight"));
    // The fused parent of what was left out.
    let is_gate_up = |name: &str| name.contains("gate_proj") || name.contains("up_proj");
    let parents = ["*.gate_up_proj"];
    check_mixed(&parents, |name| is_expert(name) && !is_gate_up(name));
}

#[test]
fn l18_contradictions_of_the_mtp_layer_are_errors() {
    let eh_proj = "model.layers.2.eh_proj.weight";
    let check = |exclude: &[&str], edit: &dyn Fn(&mut Vec<Part>), words: &[&str]| {
        let config = mixed_config(&mxfp4(exclude));
        let specs = [config.target_tensors(), config.all_mtp_tensors()].concat();
        let parts = specs.iter().map(|spec| mixed_tensor(spec, spec.name == eh_proj).0);
        let mut parts: Vec<_> = parts.flatten().collect();
        edit(&mut parts);
        let dir = written(&[&parts]);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        checkpoint.check(&config.target_tensors()).unwrap();
        let message = checkpoint.check_mtp(&config).unwrap_err().to_string();
        for words in words.iter().chain(&[eh_proj, "--num-speculative-tokens 0"]) {
            assert!(message.contains(words), "no `{words}` in: {message}");
        }
    };
    check(&["model.layers.2"], &|_| {}, &["excludes it", "`model.layers.2`"]);
    let is_scale = |part: &Part| part.name == format!("{eh_proj}_scale");
    check(&[], &|parts| parts.retain(|part| !is_scale(part)), &["is U8 and has no scale"]);
    let unpack = |parts: &mut Vec<Part>| {
        let whole = parts.iter_mut().find(|part| part.name == eh_proj).unwrap();
        *whole = part(eh_proj, Dtype::BF16, &[64, 128], vec![0; 64 * 128 * 2]);
    };
    check(&[], &unpack, &["is BF16, not quantised", "eh_proj.weight_scale"]);
}

#[test]
fn values_are_rounded_once() {
    // In bfloat16 a step at 1.9 is 2^-7: the product 1.875 * 1.01 lies between two values.
    let parts =
        [part(WEIGHT, Dtype::F8_E4M3, &[1, 2], vec![0x3f, 0xbf]), floats(SCALE, &[1], &[1.01])];
    let dir = written(&[&parts]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let expected = [spec(WEIGHT, &[1, 2])];
    let product = 1.875_f32 * 1.01;
    for (kind, rounded) in [
        (Kind::Float, product),
        (Kind::BFloat16, half::bf16::from_f32(product).to_f32()),
        (Kind::Half, half::f16::from_f32(product).to_f32()),
    ] {
        let loaded = checkpoint.load(&expected, Device::Cpu, kind).unwrap();
        // Without being asked to keep it packed.
        let LoadedWeight::Dense(tensor) = { loaded }.take_weight(WEIGHT).unwrap() else {
            panic!("it was kept packed")
        };
        assert_eq!(tensor.kind(), kind);
        assert_eq!(values(&tensor), [rounded, -rounded]);
    }
}
