//! What a reader of the events knows.

use std::collections::{BTreeMap, BTreeSet};

use engine_types::{BlockKey, KvChange, KvEvent, StoredBlocks};

use crate::reference::{Content, SPACES};

/// The prefix cache as its events tell it, from an empty one on.
#[derive(Debug, Default)]
pub(crate) struct Replay {
    sequence: u64,
    held: BTreeSet<BlockKey>,
    /// What each key stands for, be it held or not.
    contents: BTreeMap<BlockKey, Content>,
    /// The parent of first blocks, by space.
    roots: [Option<BlockKey>; SPACES.len()],
}

impl Replay {
    /// Takes an event of an operation on a sequence of `space`.
    pub(crate) fn take(&mut self, event: &KvEvent, space: usize) {
        self.sequence += 1;
        assert_eq!(event.sequence, self.sequence, "no event is missing");
        match &event.change {
            KvChange::Stored(blocks) => self.store(blocks, space),
            KvChange::Removed { keys } => {
                for key in keys {
                    assert!(self.held.remove(key), "{key:?} is removed once");
                }
            }
            KvChange::Cleared => self.held.clear(),
            KvChange::Snapshot { .. } => unreachable!("nobody asked for one"),
        }
    }

    fn store(&mut self, blocks: &StoredBlocks, space: usize) {
        let (block_size, n_lookahead) = (blocks.block_size as usize, blocks.n_lookahead as usize);
        assert_eq!(blocks.n_lookahead, SPACES[space].n_lookahead);
        assert_eq!(blocks.is_salted, SPACES[space].salt.is_some());
        assert_eq!(blocks.tokens.len(), blocks.keys.len() * block_size + n_lookahead);
        let mut tokens = if blocks.n_before == 0 {
            assert_eq!(*self.roots[space].get_or_insert(blocks.parent), blocks.parent);
            vec![]
        } else {
            let (parent_space, tokens) = &self.contents[&blocks.parent];
            assert_eq!(*parent_space, space);
            tokens[..tokens.len() - n_lookahead].to_vec()
        };
        assert_eq!(tokens.len(), blocks.n_before as usize * block_size);
        let n_before = tokens.len();
        tokens.extend(&blocks.tokens);
        for (key, n_tokens) in blocks.keys.iter().zip((n_before + block_size..).step_by(block_size))
        {
            let content = (space, tokens[..n_tokens + n_lookahead].to_vec());
            let former = self.contents.insert(*key, content.clone());
            assert!(former.is_none_or(|former| former == content), "a key means one content");
            assert!(self.held.insert(*key), "{key:?} is stored once");
        }
    }

    /// The contents that are held.
    pub(crate) fn held(&self) -> BTreeSet<&Content> {
        self.held.iter().map(|key| &self.contents[key]).collect()
    }

    /// Checks that a reader that starts now knows the same.
    pub(crate) fn check_snapshot(&self, snapshot: &KvEvent) {
        assert_eq!(snapshot.sequence, self.sequence);
        let KvChange::Snapshot { keys } = &snapshot.change else { panic!("{snapshot:?}") };
        assert_eq!(keys.len(), self.held.len());
        assert!(keys.iter().all(|key| self.held.contains(key)));
    }
}
