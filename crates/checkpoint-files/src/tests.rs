//! Hostile headers, indexes and files, each with the text of its error.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::*;

/// A file of a header's length, the header and `n_data` bytes.
fn file_of(header: &[u8], n_data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, &vec![0; n_data]].concat()
}

fn header_error(file: &[u8]) -> String {
    Header::parse(file).unwrap_err().to_string()
}

/// Checks what is said of a header that describes these tensors, each `(name, description)`, in a
/// file with 8 bytes of data.
fn check(tensors: &[(&str, &str)], expected: &str) {
    let entries = tensors.iter().map(|(name, entry)| format!("\"{name}\": {entry}"));
    let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(", "));
    let error = header_error(&file_of(header.as_bytes(), 8));
    assert!(error.starts_with(expected), "{header}: {error}");
}

/// The JSON of a tensor.
fn tensor(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}"#)
}

#[test]
fn lengths_beyond_the_file_are_refused() {
    for n_bytes in 0..8 {
        let expected = format!("a file of {n_bytes} bytes has no room for the header's length");
        assert_eq!(header_error(&vec![0xff; n_bytes]), expected);
    }
    let claims = |length: u64, n_behind: usize| {
        header_error(&[&length.to_le_bytes()[..], &vec![b' '; n_behind]].concat())
    };
    for (length, n_behind) in [(1, 0), (3, 2), (1 << 32, 9), (1 << 63, 9), (u64::MAX - 7, 9)] {
        let expected = format!(
            "the header claims {length} bytes, but {n_behind} follow and 100000000 are allowed"
        );
        assert_eq!(claims(length, n_behind), expected);
    }
    assert!(claims(0, 0).starts_with("EOF while parsing"));
}

#[test]
fn a_header_that_is_no_object_of_tensors_is_refused() {
    let f32s = tensor("F32", "[2]", "[0, 8]");
    for (header, expected) in [
        (&b"{\"a\xff\": 1}"[..], "the header is not UTF-8: invalid utf-8 sequence"),
        (br#"{"\ud800": 1}"#, "unexpected end of hex escape"),
        (b"####", "expected value at line 1 column 1"),
        (b"{} {}", "trailing characters"),
        (b"[]", "invalid type: sequence, expected an object with an entry for each tensor"),
        (br#"{"a": 3}"#, "invalid type: integer `3`, expected struct RawEntry"),
        (br#"{"a": {"dtype": "F32", "shape": [2]}}"#, "missing field `data_offsets`"),
    ] {
        let error = header_error(&file_of(header, 8));
        assert!(error.starts_with(expected), "{error}");
    }
    for deep in ["{\"a\": ", "{\"__metadata__\": ", "{\"a\": {\"dtype\": \"F32\", \"shape\": "] {
        let header = deep.to_owned() + &"[".repeat(1 << 20);
        let error = Header::parse(&file_of(header.as_bytes(), 8)).unwrap_err();
        assert!(matches!(error, HeaderError::Json(_)), "{error}");
    }
    check(&[("a", &f32s), ("a", &f32s)], "the tensor \"a\" is named twice");
    check(&[("a", &tensor("F33", "[2]", "[0, 8]"))], "unknown variant `F33`, expected one of");
    for shape in ["[-2]", "[2.0]", "2", "[\"2\"]", "[18446744073709551616]"] {
        check(&[("a", &tensor("F32", shape, "[0, 8]"))], "invalid ");
    }
    for offsets in ["[0]", "[0, 8, 8]", "[-8, 0]", "[0, 1e1]"] {
        assert!(Header::parse(&file_of(tensor("F32", "[2]", offsets).as_bytes(), 8)).is_err());
    }
}

#[test]
fn sizes_are_those_of_shape_and_dtype() {
    let wrong = "the data of \"a\" have not the size that shape and dtype ask for";
    for (dtype, shape) in [
        ("F32", "[3]"),
        ("F32", "[]"),
        ("F64", "[2]"),
        ("F4", "[15]"),
        // The product overflows, in values or in bits, to what the data would have.
        ("F32", "[4611686018427387904, 4, 2]"),
        ("U8", "[9223372036854775808, 2]"),
        ("F64", "[288230376151711745]"),
        ("F32", "[18446744073709551615, 18446744073709551615]"),
    ] {
        check(&[("a", &tensor(dtype, shape, "[0, 8]"))], wrong);
    }
    for shape in ["[1]", "[1, 18446744073709551615]"] {
        check(
            &[("b", &tensor("U8", "[8]", "[0, 8]")), ("a", &tensor("U8", shape, "[8, 8]"))],
            wrong,
        );
    }
    let zeros = tensor("F32", "[18446744073709551615, 0, 18446744073709551615]", "[0, 0]");
    let all = tensor("F4", "[16]", "[0, 8]");
    let header = format!(r#"{{"__metadata__": {{"by": [3]}}, "all": {all}, "none": {zeros}}}"#);
    let header = Header::parse(&file_of(header.as_bytes(), 8)).unwrap();
    assert_eq!(header.entries.keys().collect::<Vec<_>>(), ["all", "none"]);
    assert_eq!(header.entries["none"].bytes.len(), 0);
}

#[test]
fn data_fill_the_file_without_gap_and_overlap() {
    let half = |offsets: &str| tensor("F32", "[1]", offsets);
    for second in ["[2, 6]", "[0, 4]", "[3, 7]", "[5, 9]", "[18446744073709551612, 0]"] {
        check(&[("a", &half("[0, 4]")), ("b", &half(second))], "the data of ");
    }
    let gap = "the data of \"b\" are at 5..9, but the data before them end at 4: there may be \
               neither gap nor overlap";
    check(&[("b", &half("[5, 9]")), ("a", &half("[0, 4]"))], gap);
    check(&[("a", &half("[4, 0]"))], "the data of \"a\" are at 4..0");
    // In another order than the names'.
    let swapped = format!(r#"{{"a": {}, "b": {}}}"#, half("[4, 8]"), half("[0, 4]"));
    let header = Header::parse(&file_of(swapped.as_bytes(), 8)).unwrap();
    assert_eq!(header.entries["b"].bytes, 8 + swapped.len()..12 + swapped.len());

    let cut = header_error(&file_of(swapped.as_bytes(), 5));
    assert!(cut.ends_with("; it was cut, the first tensor hurt is a"), "{cut}");
    let longer = header_error(&file_of(swapped.as_bytes(), 9));
    assert!(longer.ends_with("; it has trailing bytes"), "{longer}");
    let far = tensor("U8", "[18446744073709551615]", "[0, 18446744073709551615]");
    check(&[("a", &far)], "the file has ");
}

#[test]
fn an_index_names_files_beside_it() {
    let shards = |shard: &str| {
        let text = serde_json::json!({"weight_map": {"a": "model.safetensors", "b": shard}});
        Index::parse(text.to_string().as_bytes())
    };
    assert_eq!(shards("model-2.safetensors").unwrap().weight_map.len(), 2);
    for shard in
        ["", ".", "..", "../x", "/etc/passwd", "a/b", "a/", "..\\x", "C:x", "x\0.safetensors"]
    {
        let error = shards(shard).unwrap_err().to_string();
        assert_eq!(error, format!("the shard {shard:?} is no plain file name"));
    }
    for (text, expected) in [
        (&br#"{"weight_map": {"a": 1}}"#[..], "invalid type: integer `1`, expected a string"),
        (br#"{"weight_map": {"a": "x", "a": "y"}}"#, "the tensor \"a\" is named twice"),
        (br#"{"weight_map": []}"#, "invalid type: sequence, expected an object"),
        (b"{}", "missing field `weight_map`"),
        (b"{\"weight_map\": {\"\xff\": \"x\"}}", "invalid unicode code point"),
        (b"", "EOF while parsing"),
    ] {
        let error = Index::parse(text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let names = (0..100_000).map(|idx| format!(r#""t{idx}": "s{idx}""#)).collect::<Vec<_>>();
    let huge = format!(r#"{{"weight_map": {{{}}}}}"#, names.join(","));
    assert_eq!(Index::parse(huge.as_bytes()).unwrap().weight_map["t99999"], "s99999");
}

#[test]
fn only_regular_files_of_a_bounded_size_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("file"), "12345").unwrap();
    fs::create_dir(path("folder")).unwrap();
    let error = |file: &Path| read_bounded(file, 5).unwrap_err().to_string();
    assert_eq!(read_bounded(&path("file"), 5).unwrap(), b"12345");
    assert_eq!(read_bounded(&path("file"), 4).unwrap_err().to_string(), "it has more than 4 bytes");
    assert_eq!(error(&path("folder")), "it is not a regular file");
    assert!(error(&path("absent")).starts_with("No such file"));
    if cfg!(unix) {
        let said = Command::new("mkfifo").arg(path("fifo")).status().unwrap();
        assert!(said.success());
        assert_eq!(error(&path("fifo")), "it is not a regular file");
        assert_eq!(error(Path::new("/dev/zero")), "it is not a regular file");
    }
    #[cfg(unix)]
    for (link, target) in
        [("to-file", "file"), ("to-zero", "/dev/zero"), ("to-itself", "to-itself")]
    {
        std::os::unix::fs::symlink(target, path(link)).unwrap();
        assert_eq!(read_bounded(&path(link), 5).is_ok(), target == "file", "{link}");
    }
}
