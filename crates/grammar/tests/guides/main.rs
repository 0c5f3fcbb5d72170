//! What guides allow, over the vocabulary of a bundled checkpoint.

mod limits;
mod masks;
mod parser_limits;
mod scheduled;
mod walks;

use std::sync::OnceLock;

use engine_types::{Guide, TokenId};
use grammar::{Constraint, Grammars};
use tokenization::Tokenizer;

/// The end-of-sequence id of the vocabulary.
const EOS: TokenId = 1;

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let folder = bundled_checkpoints::resolve("tiny-glm52", None).expect("a checkpoint");
        Tokenizer::load(&folder).expect("a tokenizer")
    })
}

fn grammars() -> &'static Grammars {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    GRAMMARS.get_or_init(|| Grammars::new(tokenizer(), &[EOS]).expect("a vocabulary"))
}

fn guide(constraint: &Constraint) -> Box<dyn Guide> {
    grammars().compile(constraint).unwrap_or_else(|error| panic!("{constraint:?}: {error}")).0
}

fn json(schema: &str) -> Constraint {
    Constraint::JsonSchema(schema.to_owned())
}

fn regex(regex: &str) -> Constraint {
    Constraint::Regex(regex.to_owned())
}

fn lark(grammar: &str) -> Constraint {
    Constraint::Lark(grammar.to_owned())
}

/// The ids of a text, as the tokenizer chooses them.
fn ids(text: &str) -> Vec<TokenId> {
    tokenizer().encode(text).expect("a text").split_off(1)
}

/// The id of each byte of a text.
fn byte_ids(text: &str) -> Vec<TokenId> {
    let id_of = |byte: u8| {
        let is_it = |id: &TokenId| tokenizer().token_bytes(*id) == Some(&[byte]);
        (0..tokenizer().n_ids()).find(is_it).expect("an id for each byte")
    };
    text.bytes().map(id_of).collect()
}

/// A mask that is one word wider than the vocabulary.
fn mask(guide: &mut dyn Guide) -> Vec<u32> {
    let mut mask = vec![u32::MAX; tokenizer().n_ids() as usize / 32 + 1];
    guide.fill_mask(&mut mask);
    mask
}

fn allows(mask: &[u32], id: TokenId) -> bool {
    mask[id as usize / 32] >> (id % 32) & 1 == 1
}

/// The ids that a mask allows.
fn allowed(mask: &[u32]) -> Vec<TokenId> {
    (0..mask.len() as u32 * 32).filter(|id| allows(mask, *id)).collect()
}

/// A small generator of reproducible numbers.
struct Random(u64);

impl Random {
    /// A number below `n`.
    fn below(&mut self, n: usize) -> usize {
        // The output function of SplitMix64 (Steele, Lea and Flood, 2014).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % n as u64) as usize
    }
}
