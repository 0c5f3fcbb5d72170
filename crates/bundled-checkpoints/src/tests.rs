//! Tests of the lookup.

use std::fs;

use super::*;

#[test]
fn every_name_has_a_complete_folder_and_every_folder_a_name() {
    assert!(names().is_sorted() && configurations().is_sorted());
    for name in names() {
        let dir = find(name, None).unwrap();
        for file in ["config.json", "generation_config.json", "tokenizer.json"] {
            assert!(dir.join(file).is_file(), "{name} lacks {file}");
        }
        assert!(dir.join("model.safetensors.index.json").is_file(), "{name} lacks weights");
        assert_eq!(resolve(name, None), Ok(dir));
    }
    for name in configurations() {
        let files = fs::read_dir(find(name, None).unwrap()).unwrap();
        let files: Vec<_> = files.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(files, ["config.json"], "{name}");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("checkpoints");
    let entries = fs::read_dir(root).unwrap().map(|entry| entry.unwrap());
    let n_folders = entries.filter(|entry| entry.path().is_dir()).count();
    assert_eq!(n_folders, names().len() + configurations().len());
}

#[test]
fn an_existing_folder_is_taken_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(resolve(dir.path().to_str().unwrap(), None), Ok(dir.path().to_path_buf()));
}

#[test]
fn the_search_root_comes_first_and_is_no_obstacle() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let workspace = find("tiny-dsv3", None).unwrap();
    assert_eq!(find("tiny-dsv3", Some(root)), Some(workspace));

    let moved = root.join("tiny-dsv3");
    fs::create_dir_all(&moved).unwrap();
    fs::write(moved.join("config.json"), "{}").unwrap();
    assert_eq!(find("tiny-dsv3", Some(root)), Some(moved));
}

#[test]
fn an_unknown_name_is_refused_with_the_known_ones() {
    for model in ["tiny-dsv4", "", "../checkpoints/tiny-dsv4", "tiny-dsv3/../..", "a\0b"] {
        let message = resolve(model, None).unwrap_err().to_string();
        assert!(message.contains(&format!("`{model}`")), "{message}");
        assert!(message.contains("tiny-dsv3, tiny-glm52"), "{message}");
        assert!(message.contains("dsv3-lite, glm52-lite"), "{message}");
        assert_eq!(find(model, None), None);
    }
}

#[test]
fn a_bundled_name_without_its_folder_lists_where_it_was_looked_for() {
    let searched = roots(Some(Path::new("elsewhere")));
    assert_eq!(searched[0], Path::new("elsewhere"));
    let error = ResolveError::NotFound { name: "tiny-dsv3".into(), searched };
    assert!(error.to_string().contains("elsewhere"), "{error}");
}
