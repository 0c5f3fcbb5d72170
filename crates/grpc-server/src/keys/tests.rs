//! Files of keys.

use super::*;

fn read(content: impl AsRef<[u8]>) -> Result<KeySet, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), content).unwrap();
    let name = file.path().display().to_string();
    KeySet::read(file.path()).map_err(|error| {
        let text = error.to_string();
        text.strip_prefix(&name).unwrap_or_else(|| panic!("{text}")).to_owned()
    })
}

#[test]
fn a_line_is_a_key_with_or_without_a_name() {
    let set = read("# people\r\nann:s3cret:x\n\n  t0ken==  \n").unwrap();
    let names: Vec<&str> = set.keys.iter().map(|key| key.name.as_str()).collect();
    assert_eq!(names, ["ann", "line-4"]);
    let name = |token: &str| set.find(&digest(token)).map(|key| key.name.as_str());
    assert_eq!(
        [name("s3cret:x"), name("t0ken=="), name("ann")],
        [Some("ann"), Some("line-4"), None]
    );
    assert_eq!(format!("{set:?}"), r#"["ann", "line-4"]"#);
}

#[test]
fn faults_name_their_lines_and_no_token() {
    let fault = |content: &str| read(content).unwrap_err();
    assert_eq!(fault("# nothing\n\n"), ": has no key; give one a line, as name:token");
    let text = fault("a:hush-1\nb:hush-1\na:hush-2\n:hush-3\nc:\nhush 4\nd:hush\u{7}\nhüsh\n");
    assert!(!text.contains("hush") && !text.contains('ü'), "{text}");
    let parts = [
        ": line 2: line 1 has the same token; line 3: line 1 has the same name",
        "; line 4: give name:token or token",
        "; line 5: give name:token or token",
        "; line 6: only visible ASCII",
        "; line 7: only visible ASCII",
        "; line 8: only visible ASCII",
    ];
    for part in parts {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(read([0xff, b'a']).unwrap_err().contains("cannot be read"));
    let missing = KeySet::read(Path::new("no/such/file")).unwrap_err();
    assert!(missing.to_string().starts_with("no/such/file: cannot be read: "), "{missing}");
}

#[test]
fn a_token_is_of_one_set_only() {
    let (usual, admin) = (read("ann:same\n").unwrap(), read("bob:other\neve:same\n").unwrap());
    let text = usual.check_apart(&admin).unwrap_err().to_string();
    assert!(text.contains("the token of ann is that of eve in "), "{text}");
    assert!(!text.contains("same:") && !text.contains(" same"), "{text}");
    usual.check_apart(&read("same:ann\n").unwrap()).unwrap();
}
