//! The compiler of constraints.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use engine_types::{BoxedGuide, TokenId};
use llguidance::api::{ParserLimits, StopReason, TopLevelGrammar};
use llguidance::earley::CGrammar;
use llguidance::{JsonCompileOptions, Matcher, ParserFactory, TokenParser};
use serde_json::Value;
use tokenization::Tokenizer;

use crate::error::{ConstraintKind, GrammarError};
use crate::guide::LlGuide;
use crate::vocabulary::Vocabulary;

/// Longest text of a constraint, in bytes.
pub const MAX_CONSTRAINT_BYTES: usize = 64 << 10;

/// Most levels of brackets in a constraint's text.
pub const MAX_NESTING: usize = 64;

/// Compiled constraints that are kept.
const CACHE_CAPACITY: usize = 64;

/// Stack of the thread that compiles. Only what is touched takes memory.
const STACK_BYTES: usize = 256 << 20;

/// Blanks between two JSON tokens. A bound, so that a model that likes blanks comes to an end.
const JSON_BLANKS: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// What an output is to keep to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// It is JSON that meets this schema.
    JsonSchema(String),
    /// All of it matches this regular expression.
    Regex(String),
    /// It is a text of this Lark grammar, from its rule `start`.
    Lark(String),
}

impl Constraint {
    /// What it is written in.
    #[must_use]
    pub fn kind(&self) -> ConstraintKind {
        match self {
            Self::JsonSchema(_) => ConstraintKind::JsonSchema,
            Self::Regex(_) => ConstraintKind::Regex,
            Self::Lark(_) => ConstraintKind::Lark,
        }
    }

    fn text(&self) -> &str {
        let (Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text)) = self;
        text
    }
}

/// Compiles constraints over one vocabulary and keeps the latest ones.
pub struct Grammars {
    factory: ParserFactory,
    vocabulary: Arc<Vocabulary>,
    /// The one used last is the last.
    cache: Mutex<Vec<(Constraint, Arc<Matcher>)>>,
}

impl Grammars {
    /// A compiler for outputs of `tokenizer`'s ids that end with one of `end_ids`.
    ///
    /// # Errors
    ///
    /// If there is no such id, or one that the tokenizer does not have.
    pub fn new(tokenizer: &Tokenizer, end_ids: &[TokenId]) -> Result<Self, GrammarError> {
        let (vocabulary, environment) = Vocabulary::new(tokenizer, end_ids)?;
        let mut factory = ParserFactory::new_simple(&environment)
            .map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, vocabulary: Arc::new(vocabulary), cache: Mutex::default() })
    }

    /// A guide at the beginning of an output. It shares nothing with other guides.
    ///
    /// This takes milliseconds, and blocks: call it where waiting is allowed.
    ///
    /// # Errors
    ///
    /// If the constraint has a fault, cannot be met, or is larger than one request may ask for.
    pub fn compile(&self, constraint: &Constraint) -> Result<BoxedGuide, GrammarError> {
        let start = match self.cached(constraint) {
            Some(start) => start,
            None => {
                let start = Arc::new(self.compile_apart(constraint)?);
                self.keep(constraint, Arc::clone(&start));
                start
            }
        };
        Ok(BoxedGuide(Box::new(LlGuide::new(start, Arc::clone(&self.vocabulary)))))
    }

    fn cached(&self, constraint: &Constraint) -> Option<Arc<Matcher>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let idx = cache.iter().position(|(kept, _)| kept == constraint)?;
        let entry = cache.remove(idx);
        let start = Arc::clone(&entry.1);
        cache.push(entry);
        Some(start)
    }

    fn keep(&self, constraint: &Constraint, start: Arc<Matcher>) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|(kept, _)| kept != constraint);
        if cache.len() == CACHE_CAPACITY {
            cache.remove(0);
        }
        cache.push((constraint.clone(), start));
    }

    /// Compiles on a thread of its own: `llguidance` recurses from rule to rule, and a text of the
    /// greatest length has room for rules enough to overflow a usual stack.
    fn compile_apart(&self, constraint: &Constraint) -> Result<Matcher, GrammarError> {
        thread::scope(|scope| {
            let builder = thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES);
            let compiling = builder.spawn_scoped(scope, || self.compile_new(constraint));
            let compiling = compiling.map_err(|error| GrammarError::NoThread(error.to_string()))?;
            compiling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn compile_new(&self, constraint: &Constraint) -> Result<Matcher, GrammarError> {
        let kind = constraint.kind();
        check_size(constraint)?;
        let grammar = match constraint {
            Constraint::JsonSchema(schema) => TopLevelGrammar::from_json_schema(parse(schema)?),
            Constraint::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Constraint::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        };
        let parser = self.factory.create_parser(grammar);
        let parser = parser.map_err(|error| fault(kind, &format!("{error:#}")))?;
        check_attributes(&parser)?;
        let mut matcher = Matcher::new(Ok(parser));
        // The first mask shows whether there is any text at all, and fills the lexer's tables.
        match matcher.compute_mask() {
            Ok(_) => Ok(matcher),
            Err(error) => Err(fault(kind, &error.to_string())),
        }
    }
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("n_ids", &self.vocabulary.n_ids()).finish_non_exhaustive()
    }
}

/// What a constraint may cost. `llguidance` counts work in "fuel", about 14 a microsecond in a mask
/// and 50 while compiling; a lexer state takes one or two kB.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 100_000,
        step_max_items: 50_000,
        max_lexer_states: 20_000,
        max_grammar_size: 100_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Refuses what would be long, or deep, to parse.
fn check_size(constraint: &Constraint) -> Result<(), GrammarError> {
    let (kind, text) = (constraint.kind(), constraint.text());
    let n_bytes = text.len();
    if n_bytes > MAX_CONSTRAINT_BYTES {
        return Err(GrammarError::TooLong { kind, n_bytes, max: MAX_CONSTRAINT_BYTES });
    }
    let mut depth = 0_usize;
    for (offset, byte) in text.bytes().enumerate() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_NESTING {
            return Err(GrammarError::TooDeep { kind, offset, max: MAX_NESTING });
        }
    }
    Ok(())
}

/// The schema, with our bound on blanks unless it says something of its own.
fn parse(schema: &str) -> Result<Value, GrammarError> {
    let mut schema: Value = serde_json::from_str(schema).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        GrammarError::NotJson { line, column, message: error.to_string() }
    })?;
    let has_options = schema.get("x-guidance").is_some();
    if schema.is_object() && !has_options {
        let blanks = Some(JSON_BLANKS.to_owned());
        JsonCompileOptions { whitespace_pattern: blanks, ..Default::default() }
            .apply_to(&mut schema);
    }
    Ok(schema)
}

/// Refuses attributes of Lark rules under which one cannot go back by a token, or that concern what
/// an executor does.
fn check_attributes(parser: &TokenParser) -> Result<(), GrammarError> {
    let grammar = parser.parser.grammar();
    let spec = grammar.lexer_spec();
    let refused = [
        (spec.has_stop, "stop", "use `suffix`"),
        (spec.has_max_tokens, "max_tokens", "bound the text itself, as in /.{1,20}/"),
        (has_temperature(grammar), "temperature", "set the request's temperature"),
    ];
    match refused.into_iter().find(|(is_used, ..)| *is_used) {
        Some((_, attribute, instead)) => Err(GrammarError::Unsupported { attribute, instead }),
        None => Ok(()),
    }
}

/// Whether a part of the grammar is to be drawn at a temperature of its own.
fn has_temperature(grammar: &CGrammar) -> bool {
    let mut seen = HashSet::from([grammar.start()]);
    let mut to_visit = vec![grammar.start()];
    while let Some(symbol) = to_visit.pop() {
        // 0 where none is set.
        if grammar.sym_data(symbol).props.temperature > 0.0 {
            return true;
        }
        let parts = grammar.rules_of(symbol).iter().flat_map(|rule| grammar.rule_rhs(*rule).0);
        to_visit.extend(parts.filter(|part| seen.insert(**part)));
    }
    grammar.lexer_spec().has_temperature
}

/// A message of the parser without what it tells of its own state.
pub(crate) fn first_part(message: &str) -> &str {
    let marks = ["\n<backtrace>", "\n<state>", "\n<non-verbose/>"].into_iter();
    let end = marks.filter_map(|mark| message.find(mark)).min().unwrap_or(message.len());
    message[..end].trim()
}

/// What the parser says of a constraint.
fn fault(kind: ConstraintKind, message: &str) -> GrammarError {
    let message = first_part(message).to_owned();
    if message == StopReason::NoExtensionBias.to_string() {
        return GrammarError::Unsatisfiable { kind };
    }
    let is_size = ["too big", "too large", "fuel", "limit"];
    match is_size.iter().any(|word| message.contains(word)) {
        true => GrammarError::TooComplex { kind, message },
        false => GrammarError::Invalid { kind, message },
    }
}
