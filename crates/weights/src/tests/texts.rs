//! What the errors of L19 say, word by word.

use super::*;

const EH_PROJ: &str = "model.layers.5.eh_proj.weight";

/// What opening a checkpoint for drafting says; `DIR` is its folder.
fn said(copy: &TempDir) -> String {
    let config = ModelConfig::load(copy.path()).unwrap();
    let checkpoint = Checkpoint::open(copy.path());
    let error = checkpoint.and_then(|it| it.check_mtp(&config)).unwrap_err();
    error.to_string().replace(copy.path().to_str().unwrap(), "DIR")
}

#[test]
fn l19_each_fault_has_its_words() {
    assert_eq!(
        said(&copied_without(|name| name == EH_PROJ)),
        "drafting was asked for, but MTP tensors of DIR do not fit its config: \
         model.layers.5.eh_proj.weight is missing; \
         give --num-speculative-tokens 0 to run without drafting"
    );
    let lost = [EH_PROJ, "model.layers.5.enorm.weight"];
    assert_eq!(
        said(&copied_without(|name| lost.contains(&name))),
        format!(
            "drafting was asked for, but MTP tensors of DIR do not fit its config:\n  {} is \
             missing\n  {} is missing\ngive --num-speculative-tokens 0 to run without drafting",
            lost[1], lost[0]
        )
    );

    let copy = copied_without(|name| name.starts_with(MTP));
    let config = ModelConfig::load(copy.path()).unwrap();
    let n_required = config.all_mtp_tensors().iter().filter(|spec| !spec.is_optional).count();
    assert_eq!(
        said(&copy),
        format!(
            "drafting was asked for, but MTP tensors of DIR do not fit its config: \
             model.layers.5 is missing with all its {n_required} tensors; \
             give --num-speculative-tokens 0 to run without drafting"
        )
    );

    let copy = copied();
    fs::remove_file(copy.path().join(SHARD_2)).unwrap();
    assert_eq!(said(&copy), format!("DIR/{INDEX} names files that are not there: DIR/{SHARD_2}"));

    let copy = copied();
    edit_index(copy.path(), |weight_map| {
        weight_map.insert(EH_PROJ.into(), SHARD_1.into());
    });
    assert_eq!(
        said(&copy),
        format!(
            "DIR/{INDEX} names shards that lack the tensor:\n  {EH_PROJ} is not in DIR/{SHARD_1} \
             but in DIR/{SHARD_2}"
        )
    );

    let copy = copied();
    let file = copy.path().join(SHARD_2);
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() - 64]).unwrap();
    let last = SafeTensors::deserialize(&whole).unwrap().tensors().into_iter();
    let (last, _) = last.max_by_key(|(_, view)| view.data().as_ptr()).unwrap();
    assert_eq!(
        said(&copy),
        format!(
            "DIR/{SHARD_2} has {} bytes but its header asks for {}; it was cut, the first tensor \
             hurt is {last}",
            whole.len() - 64,
            whole.len()
        )
    );
}
