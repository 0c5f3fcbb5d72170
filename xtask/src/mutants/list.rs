//! The list of faults, and how one is put into a source text.

use std::collections::HashSet;

use anyhow::{Context, Result, bail, ensure};

/// One deliberate fault: a line of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// Its line in the list, from 1.
    pub(super) line: usize,
    pub(super) name: String,
    /// The file, under `crates/`.
    pub(super) file: String,
    /// What stands in the file exactly once.
    pub(super) text: String,
    pub(super) replacement: String,
    /// What kills it if the simulation does not.
    pub(super) test: Option<UnitTest>,
    /// Why nothing can kill it.
    pub(super) equivalent: Option<String>,
}

/// A unit test of a crate.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct UnitTest {
    pub(super) package: String,
    /// The end of its path, enough to name it alone.
    pub(super) name: String,
}

impl std::fmt::Display for UnitTest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}::{}", self.package, self.name)
    }
}

/// Reads a list: one fault a line; empty lines and those that begin with `#` say nothing.
pub(super) fn parse(list: &str) -> Result<Vec<Fault>> {
    let mut faults = Vec::new();
    let mut names = HashSet::new();
    for (idx, line) in list.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let fault = parse_line(idx + 1, line).with_context(|| format!("line {}", idx + 1))?;
        ensure!(names.insert(fault.name.clone()), "line {}: `{}` again", fault.line, fault.name);
        faults.push(fault);
    }
    ensure!(!faults.is_empty(), "there is no fault");
    Ok(faults)
}

fn parse_line(line: usize, content: &str) -> Result<Fault> {
    let mut columns = columns(content);
    ensure!((4..=6).contains(&columns.len()), "{} columns, not 4 to 6", columns.len());
    columns.resize(6, String::new());
    let [name, file, text, replacement, test, equivalent]: [String; 6] =
        columns.try_into().expect("six columns");
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    ensure!(!name.is_empty() && name.chars().all(is_plain), "`{name}` is no name");
    ensure!(file.contains("/src/") && !file.contains(".."), "`{file}` is no file under crates/");
    ensure!(!text.is_empty() && text != replacement, "nothing is replaced");
    let equivalent = match equivalent.strip_prefix("equivalent: ") {
        Some(reason) => Some(reason.to_owned()),
        None if equivalent.is_empty() => None,
        None => bail!("the sixth column is `equivalent: REASON`, not `{equivalent}`"),
    };
    let test = match test.split_once("::") {
        Some((package, name)) => Some(UnitTest { package: package.into(), name: name.into() }),
        None if test.is_empty() => None,
        None => bail!("the fifth column is `CRATE::TEST`, not `{test}`"),
    };
    Ok(Fault { line, name, file, text, replacement, test, equivalent })
}

/// The columns of a line, trimmed. A bar within a column is written `\|`.
fn columns(line: &str) -> Vec<String> {
    let mut columns = vec![String::new()];
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        let last = columns.last_mut().expect("there is a first column");
        match c {
            '\\' if chars.next_if_eq(&'|').is_some() => last.push('|'),
            '|' => columns.push(String::new()),
            _ => last.push(c),
        }
    }
    columns.iter().map(|column| column.trim().to_owned()).collect()
}

impl Fault {
    /// The source with the fault in it.
    pub(super) fn apply(&self, source: &str) -> Result<String> {
        let n = source.matches(&self.text).count();
        ensure!(
            n == 1,
            "line {}: `{}` stands {n} times in {}, not once",
            self.line,
            self.text,
            self.file
        );
        Ok(source.replacen(&self.text, &self.replacement, 1))
    }

    /// The crate of its file.
    pub(super) fn package(&self) -> &str {
        self.file.split('/').next().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(line: &str) -> Fault {
        let mut faults = parse(line).unwrap();
        assert_eq!(faults.len(), 1);
        faults.remove(0)
    }

    fn refused(list: &str) -> String {
        format!("{:#}", parse(list).unwrap_err())
    }

    #[test]
    fn four_to_six_columns_make_a_fault() {
        let list = "# Comment.\n\na | c/src/f.rs | x = 1; | \n\
                    b-2 | c/src/f.rs | x \\|\\| y | \\|z\\| y | c::tests::t | equivalent: so\n";
        let faults = parse(list).unwrap();
        assert_eq!((faults[0].line, faults[1].line), (3, 4));
        assert_eq!((faults[0].text.as_str(), faults[0].replacement.as_str()), ("x = 1;", ""));
        assert_eq!((&faults[0].test, &faults[0].equivalent), (&None, &None));
        assert_eq!(faults[1].text, "x || y");
        assert_eq!(faults[1].replacement, "|z| y");
        assert_eq!(faults[1].test.as_ref().unwrap().to_string(), "c::tests::t");
        assert_eq!(faults[1].equivalent.as_deref(), Some("so"));
        assert_eq!(faults[1].package(), "c");
    }

    #[test]
    fn a_reason_needs_no_test() {
        let fault = one("a | c/src/f.rs | x | y | | equivalent: both are the same");
        assert_eq!(fault.test, None);
        assert_eq!(fault.equivalent.as_deref(), Some("both are the same"));
    }

    #[test]
    fn a_line_that_says_too_little_is_refused_by_its_number() {
        let good = "a | c/src/f.rs | x | y";
        assert_eq!(refused("a | c/src/f.rs | x"), "line 1: 3 columns, not 4 to 6");
        assert_eq!(refused(&format!("{good}\n\n{good}")), "line 3: `a` again");
        assert!(refused(&format!("#\n{good} || z")).starts_with("line 2: the sixth column"));
        assert!(refused(&format!("{good} | t")).contains("`CRATE::TEST`, not `t`"));
        assert!(refused(" | c/src/f.rs | x | y").contains("is no name"));
        assert!(refused("a | c/../src/f.rs | x | y").contains("is no file"));
        assert!(refused("a | c/src/f.rs | x | x").contains("nothing is replaced"));
        assert!(refused("# Nothing.\n").contains("no fault"));
    }

    #[test]
    fn a_text_that_occurs_once_is_replaced() {
        let fault = one("a | c/src/f.rs | x += 1 | x += 2");
        assert_eq!(fault.apply("{ x += 1; }").unwrap(), "{ x += 2; }");
        let error = fault.apply("x += 1; x += 1;").unwrap_err().to_string();
        assert_eq!(error, "line 1: `x += 1` stands 2 times in c/src/f.rs, not once");
        assert!(fault.apply("").unwrap_err().to_string().contains("stands 0 times"));
    }
}
