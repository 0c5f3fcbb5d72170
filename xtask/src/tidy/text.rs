//! Rules that one file alone can break.

use super::functions;

const LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 70;
const COLUMNS_MAX: usize = 100;

/// Crates whose job includes unsafe code.
const UNSAFE_CRATES: &[&str] =
    &["crates/torch-ext/", "crates/kernels/", "crates/gpu-runtime/", "crates/gpu-kernels/"];

/// Where the environment may be read: the edges, tests and tools.
const ENVIRONMENT_READERS: &[&str] = &[
    "crates/bench/build.rs",
    "crates/bench/src/program/",
    "crates/server/",
    "xtask/",
    "tests/",
    "crates/fuzz/",
    "crates/gpu-kernels/src/unit/tests/",
    "crates/grpc-codegen/",
    "crates/grpc-server/tests/fuzz/",
];

/// The faults of one file, each with its place.
pub(super) fn check(name: &str, content: &str) -> Vec<String> {
    let mut faults = Vec::new();
    // Cargo writes where a package comes from.
    if name != "Cargo.lock" {
        places(name, content, &mut faults);
    }
    // Generated code keeps the generator's style.
    if name.ends_with(".rs") && !name.contains("/gen/") {
        rust(name, content, &mut faults);
    }
    faults
}

fn places(name: &str, content: &str, faults: &mut Vec<String>) {
    // Split, so that this file does not hold what it looks for.
    let hosts = [
        ["pypi", ".org"],
        ["pythonhosted", ".org"],
        ["static.crates", ".io"],
        ["index.crates", ".io"],
        ["registry.np", "mjs.org"],
        ["deb.debian", ".org"],
    ]
    .map(|parts| parts.concat());
    let folders = [["/home", "/"], ["/root", "/"], ["/work", "/"], ["/tmp", "/"], ["/Users", "/"]];
    let folders = folders.map(|parts| parts.concat());
    for (idx, line) in content.lines().enumerate() {
        for host in hosts.iter().filter(|host| line.contains(host.as_str())) {
            faults.push(format!("{name}:{}: names the registry host {host}", idx + 1));
        }
        for folder in folders.iter().filter(|folder| starts_a_path(line, folder)) {
            faults.push(format!("{name}:{}: names a folder of one machine: {folder}", idx + 1));
        }
    }
}

/// Whether `folder` stands in `line` as the beginning of an absolute path.
fn starts_a_path(line: &str, folder: &str) -> bool {
    line.match_indices(folder).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && !matches!(c, '_' | '.' | '-' | '}' | '/'))
    })
}

fn rust(name: &str, content: &str, faults: &mut Vec<String>) {
    let lines: Vec<&str> = content.lines().collect();
    if !lines.first().is_some_and(|line| line.starts_with("//! ")) {
        faults.push(format!("{name}:1: the first line is not a module doc"));
    }
    if lines.len() > LINES_MAX {
        faults.push(format!("{name}: {} lines, at most {LINES_MAX}", lines.len()));
    }
    for (idx, line) in lines.iter().enumerate() {
        let place = format!("{name}:{}", idx + 1);
        if line.chars().count() > COLUMNS_MAX {
            faults.push(format!("{place}: over {COLUMNS_MAX} columns"));
        }
        if line.ends_with([' ', '\t']) {
            faults.push(format!("{place}: trailing blanks"));
        }
        if reads_environment(line) && !ENVIRONMENT_READERS.iter().any(|e| name.starts_with(e)) {
            faults.push(format!("{place}: reads the environment outside the edges"));
        }
        if uses_unsafe(line) {
            if !UNSAFE_CRATES.iter().any(|allowed| name.starts_with(allowed)) {
                faults.push(format!("{place}: unsafe code outside the crates for it"));
            } else if !has_reason(&lines, idx) {
                faults.push(format!("{place}: unsafe code without its SAFETY reason"));
            }
        }
    }
    for function in functions::find(content) {
        if function.n_lines > FUNCTION_LINES_MAX {
            let (line, fn_name, n_lines) = (function.line, &function.name, function.n_lines);
            faults.push(format!(
                "{name}:{line}: `{fn_name}` has {n_lines} lines, at most {FUNCTION_LINES_MAX}"
            ));
        }
    }
}

fn reads_environment(line: &str) -> bool {
    code_of(line).contains("env::var")
}

fn uses_unsafe(line: &str) -> bool {
    // The type of a function pointer runs nothing; its calls have reasons.
    let code = ["fn(", "extern \"C\" fn("]
        .iter()
        .fold(code_of(line).to_owned(), |code, ty| code.replace(&["unsafe", ty].join(" "), ""));
    let uses = |what: &str| code.contains(&["unsafe", what].join(" "));
    ["{", "fn", "impl", "trait", "extern"].into_iter().any(uses)
}

/// A SAFETY comment (or, on a function, its Safety section) among the lines right above.
fn has_reason(lines: &[&str], idx: usize) -> bool {
    let said = |line: &str| line.contains("SAFETY:") || line.contains("# Safety");
    lines[idx.saturating_sub(12)..=idx].iter().any(|line| said(line))
}

/// A line without its comment.
fn code_of(line: &str) -> &str {
    line.find("//").map_or(line, |at| &line[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: &str, content: &str) -> String {
        let faults = check(name, content);
        assert_eq!(faults.len(), 1, "{faults:?}");
        faults.into_iter().next().unwrap()
    }

    #[test]
    fn a_clean_file_has_no_fault() {
        let file = "//! Doc.\n\nfn f() {\n    g(\"https://example.com/work/x\");\n}\n";
        assert_eq!(check("crates/engine/src/a.rs", file), Vec::<String>::new());
    }

    #[test]
    fn every_rule_of_a_line_fires() {
        let name = "crates/engine/src/a.rs";
        let with = |line: &str| format!("//! Doc.\n{line}\n");
        assert!(one(name, "fn f() {}\n").contains("module doc"));
        assert!(one(name, &with(&format!("// {}", "x".repeat(98)))).contains("columns"));
        assert!(one(name, &with("fn f() {} ")).contains("trailing"));
        let environment = ["std::env::", "var_os(\"A\")"].concat();
        assert!(one(name, &with(&environment)).contains("environment"));
        assert_eq!(check("crates/server/src/a.rs", &with(&environment)), Vec::<String>::new());
        let block = ["unsafe", " { f() }"].concat();
        assert!(one(name, &with(&block)).contains("outside the crates"));
        let kernels = "crates/kernels/src/a.rs";
        assert!(one(kernels, &with(&block)).contains("SAFETY"));
        let pointer = ["unsafe", " extern \"C\" fn(i32)"].concat();
        assert_eq!(check(kernels, &with(&pointer)), Vec::<String>::new());
        let reasoned = format!("// SAFETY: f has no precondition.\n{block}");
        assert_eq!(check(kernels, &with(&reasoned)), Vec::<String>::new());
    }

    #[test]
    fn machines_and_registries_are_found_in_any_text() {
        let path = ["see /ro", "ot/x"].concat();
        assert!(one("README.md", &path).contains("one machine"));
        let host = ["https://py", "pi.org/simple"].concat();
        assert!(one("README.md", &host).contains("registry host"));
        assert_eq!(check("README.md", "target/home/x"), Vec::<String>::new());
    }

    #[test]
    fn long_files_and_functions_are_found() {
        let long = format!("//! Doc.\n{}", "// x\n".repeat(500));
        assert!(one("crates/engine/src/a.rs", &long).contains("501 lines"));
        let body = format!("//! Doc.\nfn long() {{\n{}}}\n", "    x();\n".repeat(69));
        assert!(one("crates/engine/src/a.rs", &body).contains("`long` has 71 lines"));
    }
}
