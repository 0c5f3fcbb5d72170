//! Keys of full blocks: what two blocks must have in common to hold the same KV.

use engine_types::{BlockKey, TokenId};
use sha2::{Digest, Sha256};

/// Separates the hash of a [`PrefixSpace`] from every other use of the hash function.
const LABEL: &[u8] = b"kv prefix space 1";

/// What, besides its tokens, decides whose blocks a sequence may share.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefixSpace<'a> {
    /// Sequences share blocks only with sequences of the same salt, or of none as well.
    pub salt: Option<&'a [u8]>,
    /// Whether draft layers write KV for the sequence; a block without it is of no use to a
    /// sequence that is drafted for.
    pub drafted: bool,
    /// How many tokens behind a block its KV depends on: one for each draft layer.
    pub n_lookahead: u32,
}

/// The chained keys of one sequence's full blocks, each computed once.
///
/// They stay valid as long as the sequence's tokens only grow, whoever holds its blocks.
#[derive(Clone, Debug)]
pub struct PrefixKeys {
    n_lookahead: u32,
    is_salted: bool,
    /// The parent of the first key: what stands for the space.
    root: BlockKey,
    keys: Vec<BlockKey>,
    /// The parent of the next key: the last one, or the root.
    tip: BlockKey,
}

impl PrefixKeys {
    /// No keys yet, for a sequence of `space`.
    #[must_use]
    pub fn new(space: PrefixSpace<'_>) -> Self {
        let mut hasher = Sha256::new_with_prefix(LABEL);
        hasher.update([u8::from(space.drafted), u8::from(space.salt.is_some())]);
        hasher.update(space.n_lookahead.to_le_bytes());
        hasher.update(space.salt.unwrap_or_default());
        let root = BlockKey(hasher.finalize().into());
        let is_salted = space.salt.is_some();
        Self { n_lookahead: space.n_lookahead, is_salted, root, keys: vec![], tip: root }
    }

    /// Makes room for the keys of `n_blocks` blocks.
    pub fn reserve(&mut self, n_blocks: u32) {
        self.keys.reserve((n_blocks as usize).saturating_sub(self.keys.len()));
    }

    /// How many tokens behind a block its KV depends on.
    #[must_use]
    pub fn n_lookahead(&self) -> u32 {
        self.n_lookahead
    }

    pub(crate) fn is_salted(&self) -> bool {
        self.is_salted
    }

    /// The keys that have been computed.
    pub(crate) fn known(&self) -> &[BlockKey] {
        &self.keys
    }

    /// The key of the block before block `block_idx`; the space's for the first one.
    pub(crate) fn parent(&self, block_idx: usize) -> BlockKey {
        block_idx.checked_sub(1).map_or(self.root, |before| self.keys[before])
    }

    /// The keys of the first `n_blocks` blocks of `tokens`, whose earlier ones have not changed
    /// since the last call. `bytes` is a scratch buffer.
    pub(crate) fn of(
        &mut self,
        tokens: &[TokenId],
        block_size: u32,
        n_blocks: u32,
        bytes: &mut Vec<u8>,
    ) -> &[BlockKey] {
        let (block_size, n_blocks) = (block_size as usize, n_blocks as usize);
        for block_idx in self.keys.len()..n_blocks {
            let start = block_idx * block_size;
            let end = start + block_size + self.n_lookahead as usize;
            bytes.clear();
            bytes.extend_from_slice(&self.tip.0);
            for token in &tokens[start..end] {
                bytes.extend_from_slice(&token.to_le_bytes());
            }
            self.keys.push(BlockKey(Sha256::digest(&*bytes).into()));
            self.tip = self.keys[block_idx];
        }
        &self.keys[..n_blocks]
    }
}
