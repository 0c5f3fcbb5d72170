//! A softmax router without correction bias: the weights of a DeepSeek-V2 model under a
//! configuration of DeepSeek-V3, which differs in the router alone.

use super::*;

#[test]
fn softmax_routers_agree() {
    let fixture = data("fixtures/v2-softmax");
    let text = std::fs::read_to_string(fixture.join("config.json")).unwrap();
    let router = r#""model_type": "deepseek_v3", "scoring_func": "softmax""#;
    let text = text.replace(r#""model_type": "deepseek_v2""#, router);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), text).unwrap();
    std::fs::copy(fixture.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();

    let expected = read_tensors("fixtures/v2-softmax/expected.safetensors");
    let tokens = expected["input_ids"].to_kind(Kind::Int64);
    let n = usize::try_from(tokens.size()[1]).unwrap();
    let tokens = Vec::<i64>::try_from(tokens.flatten(0, 1)).unwrap();
    for ops in [Ops::Torch, Ops::Fused] {
        let mut rig = Rig::open(dir.path(), false, ops, ComputeDtype::Float32);
        rig.reset(16, 1024);
        let found = rig.forward(&[(0, 0, n), (1, 0, n)], &tokens);
        let hidden = relative_difference(&found, &expected["last_hidden_state"].flatten(0, 1));
        let last = super::fixtures::last_rows(&found, &expected["logits"]);
        let logits = relative_difference(&rig.logits(&last), &expected["logits"].flatten(0, 1));
        assert!(hidden < 1e-4 && logits < 1e-4, "{ops:?}: hidden {hidden}, logits {logits}");
    }
}
