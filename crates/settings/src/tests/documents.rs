//! The tree itself, and what the documentation and the files for deployment say of it.

use crate::tree;

#[test]
fn names_are_kebab_case_unique_and_described() {
    let keys = tree::keys();
    for key in &keys {
        let is_kebab = key.name.chars().all(|c| c.is_ascii_lowercase() || c == '-');
        assert!(is_kebab, "{}", key.name);
        assert!(
            key.arg.get_help().is_some_and(|help| !help.to_string().is_empty()),
            "{}",
            key.name
        );
        assert_eq!(keys.iter().filter(|other| other.name == key.name).count(), 1, "{}", key.name);
    }
}
