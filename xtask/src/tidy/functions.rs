//! Finds functions and their lengths by matching braces.

/// A function of a source file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Function {
    pub(super) name: String,
    /// Line of its `fn`, from 1.
    pub(super) line: usize,
    /// Lines from its `fn` to its closing brace.
    pub(super) n_lines: usize,
}

/// The functions with a body. Source that rustfmt has formatted is assumed: a function ends at the
/// first closing brace that is indented like its `fn`.
pub(super) fn find(content: &str) -> Vec<Function> {
    let lines: Vec<&str> = content.lines().collect();
    let mut functions = Vec::new();
    for (idx, line) in lines.iter().enumerate() {
        let Some(name) = declared(line) else { continue };
        let indent = line.len() - line.trim_start().len();
        let end = lines[idx..].iter().position(|line| closes(line, indent));
        // A body on one line, or a signature without a body, ends where it begins.
        let is_short = line.trim_end().ends_with(['}', ';']);
        if let (Some(end), false) = (end, is_short) {
            functions.push(Function { name, line: idx + 1, n_lines: end + 1 });
        }
    }
    functions
}

/// The name of the function that a line declares.
fn declared(line: &str) -> Option<String> {
    const QUALIFIERS: &[&str] = &["const", "async", "unsafe", "extern", "\"C\""];
    let is_qualifier = |word: &str| word.starts_with("pub") || QUALIFIERS.contains(&word);
    let mut words = line.split_whitespace().skip_while(|word| is_qualifier(word) || is_scope(word));
    if words.next()? != "fn" {
        return None;
    }
    let name: String =
        words.next()?.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!name.is_empty()).then_some(name)
}

/// The rest of `pub(in path)`, which holds a blank.
fn is_scope(word: &str) -> bool {
    word.ends_with(')') && !word.contains('(')
}

fn closes(line: &str, indent: usize) -> bool {
    let trimmed = line.trim_end();
    let is_end = trimmed.trim_start() == "}" || trimmed.trim_start().ends_with(';');
    trimmed.len() - trimmed.trim_start().len() == indent && is_end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_with_their_lengths() {
        let source = "impl A {\n    pub(crate) fn one(\n        &self,\n    ) {\n        x();\n\
                      \x20   }\n}\ntrait B {\n    fn two(&self);\n}\nfn three() {}\n\
                      async fn four() {\n    if x {\n    }\n}\n";
        let found = find(source);
        let shown: Vec<_> = found.iter().map(|f| (f.name.as_str(), f.line, f.n_lines)).collect();
        assert_eq!(shown, [("one", 2, 5), ("four", 12, 4)]);
    }
}
