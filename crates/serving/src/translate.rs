//! What services of other APIs share when they translate to and from the own one.

use grpc_api::inference::v1::OutputConstraint;
use grpc_api::inference::v1::output_constraint::Kind;
use tonic::Status;
use tonic_types::StatusExt as _;

use crate::status::invalid_argument;

/// An output that is some JSON object.
#[must_use]
pub fn json_object_constraint() -> OutputConstraint {
    OutputConstraint { kind: Some(Kind::JsonSchema(r#"{"type":"object"}"#.to_owned())) }
}

/// An output that is one of `choices`, literally; `None` if there are none.
#[must_use]
pub fn choice_constraint(choices: &[String]) -> Option<OutputConstraint> {
    let texts: Vec<String> = choices.iter().map(|choice| escaped(choice)).collect();
    let regex = format!("({})", texts.join("|"));
    (!choices.is_empty()).then_some(OutputConstraint { kind: Some(Kind::Regex(regex)) })
}

/// A regular expression that matches `text` alone.
fn escaped(text: &str) -> String {
    let mut regex = String::with_capacity(text.len());
    for character in text.chars() {
        if r"\.+*?()|[]{}^$#&-~".contains(character) {
            regex.push('\\');
        }
        regex.push(character);
    }
    regex
}

/// The status with the fields that it blames called by the names of another API.
///
/// Each pair is a field of the own API, which stands for the fields in it as well, and the other
/// API's; the first pair that fits counts. What fits none keeps its name, and a status that blames
/// no field is handed back as it is.
#[must_use]
pub fn rename_fields(status: Status, pairs: &[(&str, &str)]) -> Status {
    let Some(mut blame) = status.get_details_bad_request() else { return status };
    for violation in &mut blame.field_violations {
        let renamed = |(own, theirs): &(&str, &str)| {
            let rest = violation.field.strip_prefix(own)?;
            (rest.is_empty() || rest.starts_with('.')).then(|| format!("{theirs}{rest}"))
        };
        if let Some(field) = pairs.iter().find_map(renamed) {
            violation.field = field;
        }
    }
    invalid_argument(blame.field_violations)
}

#[cfg(test)]
mod tests {
    use tonic::Code;
    use tonic_types::FieldViolation;

    use super::*;

    #[test]
    fn choices_match_themselves_and_nothing_else() {
        assert_eq!(choice_constraint(&[]), None);
        let choices = ["a.b".to_owned(), "(c|d)*\\[1-2]{3}^$#&~?+".to_owned(), "ä\n".to_owned()];
        let Some(OutputConstraint { kind: Some(Kind::Regex(regex)) }) = choice_constraint(&choices)
        else {
            panic!("no regular expression");
        };
        let whole = regex::Regex::new(&format!("^(?:{regex})$")).unwrap();
        assert!(choices.iter().all(|choice| whole.is_match(choice)));
        for other in ["axb", "c", "", "a.b|ä"] {
            assert!(!whole.is_match(other), "{other}");
        }
    }

    #[test]
    fn fields_are_renamed_with_what_is_in_them() {
        let pairs = [("sampling.n", "n"), ("sampling", "params"), ("stopping.max_tokens", "max")];
        let fields = ["sampling.n", "sampling.top_p", "samplings", "stopping.max_tokens", "prompt"];
        let own = fields.map(|field| FieldViolation::new(field, "is wrong")).to_vec();
        let renamed = rename_fields(invalid_argument(own), &pairs);
        assert_eq!(renamed.code(), Code::InvalidArgument);
        let blamed = renamed.get_details_bad_request().unwrap().field_violations;
        let fields: Vec<&str> = blamed.iter().map(|violation| violation.field.as_str()).collect();
        assert_eq!(fields, ["n", "params.top_p", "samplings", "max", "prompt"]);
        assert!(renamed.message().starts_with("n: is wrong; params.top_p: is wrong"));
        assert_eq!(renamed.get_details_error_info().unwrap().reason, "INVALID_REQUEST");

        let other = rename_fields(Status::internal("no luck"), &pairs);
        assert_eq!((other.code(), other.message()), (Code::Internal, "no luck"));
    }
}
