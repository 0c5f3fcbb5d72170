//! What the pool should do, with lists, maps of whole contents, and slots that hold something.

use std::collections::BTreeMap;

use kv_block_manager::PrefixSpace;

pub(crate) const SPACES: [PrefixSpace<'static>; 4] = [
    PrefixSpace { salt: None, drafted: false, n_lookahead: 0 },
    PrefixSpace { salt: None, drafted: true, n_lookahead: 1 },
    PrefixSpace { salt: Some(b"a"), drafted: true, n_lookahead: 2 },
    PrefixSpace { salt: Some(b"b"), drafted: true, n_lookahead: 2 },
];

/// What decides the KV of a position: the space, by its place in [`SPACES`], and all tokens up to
/// the position and the look-ahead. That of a block is its last position's.
pub(crate) type Content = (usize, Vec<u32>);

/// A sequence and its blocks.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) space: usize,
    pub(crate) tokens: Vec<u32>,
    pub(crate) blocks: Vec<u32>,
    pub(crate) n_published: usize,
    /// Tokens whose KV is written for good.
    pub(crate) n_computed: usize,
}

impl Sequence {
    pub(crate) fn new(space: usize, tokens: Vec<u32>) -> Self {
        Self { space, tokens, blocks: vec![], n_published: 0, n_computed: 0 }
    }

    pub(crate) fn n_lookahead(&self) -> usize {
        SPACES[self.space].n_lookahead as usize
    }

    /// The content of the last of `n_tokens` tokens.
    fn content(&self, n_tokens: usize) -> Content {
        (self.space, self.tokens[..n_tokens + self.n_lookahead()].to_vec())
    }
}

#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) block_size: usize,
    pub(crate) sequences: Vec<Sequence>,
    /// The last one is taken first.
    free: Vec<u32>,
    /// The first one is evicted first.
    cached: Vec<u32>,
    /// Which block holds a content that others can find.
    pub(crate) known: BTreeMap<Content, u32>,
    pub(crate) n_evictions: u64,
    /// What is written in each place of each block; `None` is anything of no use.
    slots: Vec<Vec<Option<Content>>>,
}

impl Reference {
    pub(crate) fn new(n_blocks: u32, block_size: usize) -> Self {
        Self {
            block_size,
            sequences: vec![],
            free: (0..n_blocks).rev().collect(),
            cached: vec![],
            known: BTreeMap::new(),
            n_evictions: 0,
            slots: vec![vec![None; block_size]; n_blocks as usize],
        }
    }

    /// How many tokens all blocks hold.
    pub(crate) fn n_slots(&self) -> usize {
        self.slots.len() * self.block_size
    }

    pub(crate) fn n_free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn n_cached(&self) -> usize {
        self.cached.len()
    }

    pub(crate) fn n_available(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    pub(crate) fn n_holders(&self, block: u32) -> usize {
        self.sequences.iter().filter(|sequence| sequence.blocks.contains(&block)).count()
    }

    fn is_known(&self, block: u32) -> bool {
        self.known.values().any(|other| *other == block)
    }

    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            let block = self.cached.remove(0);
            self.known.retain(|_, other| *other != block);
            self.n_evictions += 1;
            block
        })
    }

    /// The blocks that a sequence finds: all but those whose successors it lacks, or that hold its
    /// last token.
    pub(crate) fn find(&self, sequence: &Sequence) -> Vec<u32> {
        let n_behind = sequence.n_lookahead().max(1);
        let n_blocks = sequence.tokens.len().saturating_sub(n_behind) / self.block_size;
        let known = |n: usize| self.known.get(&sequence.content(n * self.block_size)).copied();
        (1..=n_blocks).map_while(known).collect()
    }

    /// Adds a sequence with the blocks that it finds and room for `n_tokens`; says whether it did.
    pub(crate) fn admit(&mut self, mut sequence: Sequence, n_tokens: usize) -> bool {
        let found = self.find(&sequence);
        let n_blocks = n_tokens.div_ceil(self.block_size);
        let n_idle = found.iter().filter(|block| self.n_holders(**block) == 0).count();
        if n_blocks - found.len() + n_idle > self.n_available() {
            return false;
        }
        self.cached.retain(|block| !found.contains(block));
        sequence.n_published = found.len();
        sequence.n_computed = found.len() * self.block_size;
        sequence.blocks = found;
        self.sequences.push(sequence);
        assert!(self.grow(self.sequences.len() - 1, n_tokens));
        true
    }

    pub(crate) fn grow(&mut self, who: usize, n_tokens: usize) -> bool {
        let n_blocks = n_tokens.div_ceil(self.block_size);
        let n_missing = n_blocks.saturating_sub(self.sequences[who].blocks.len());
        if n_missing > self.n_available() {
            return false;
        }
        for _ in 0..n_missing {
            let block = self.take();
            self.sequences[who].blocks.push(block);
        }
        true
    }

    /// Adds a sequence that shares the first `n_shared` tokens of `source`; or says that there is
    /// no room, with `None`. The copy is made.
    pub(crate) fn fork(
        &mut self,
        source: usize,
        mut sequence: Sequence,
        n_shared: usize,
        n_tokens: usize,
    ) -> Option<Option<(u32, u32)>> {
        let n_whole = n_shared / self.block_size;
        if n_tokens.div_ceil(self.block_size) - n_whole > self.n_available() {
            return None;
        }
        let source = self.sequences[source].clone();
        sequence.blocks = source.blocks[..n_whole].to_vec();
        sequence.n_published = source.n_published.min(n_whole);
        sequence.n_computed = n_shared;
        self.sequences.push(sequence);
        assert!(self.grow(self.sequences.len() - 1, n_tokens));
        if n_shared.is_multiple_of(self.block_size) {
            return Some(None);
        }
        let forked = self.sequences.last().expect("it was added");
        let (from, to) = (source.blocks[n_whole], forked.blocks[n_whole]);
        self.slots[to as usize] = self.slots[from as usize].clone();
        Some(Some((from, to)))
    }

    /// Writes the KV of a sequence up to `n_tokens`, and what is of no use behind it, as far as its
    /// blocks go.
    pub(crate) fn compute(&mut self, who: usize, n_tokens: usize) {
        let sequence = &mut self.sequences[who];
        let n_slots = sequence.blocks.len() * self.block_size;
        for position in sequence.n_computed..n_slots {
            let block = sequence.blocks[position / self.block_size] as usize;
            let content = (position < n_tokens).then(|| sequence.content(position + 1));
            self.slots[block][position % self.block_size] = content;
        }
        sequence.n_computed = n_tokens;
    }

    pub(crate) fn publish(&mut self, who: usize, n_settled: usize) {
        let sequence = &mut self.sequences[who];
        let n_blocks = n_settled / self.block_size;
        for n in sequence.n_published + 1..=n_blocks {
            let content = sequence.content(n * self.block_size);
            self.known.entry(content).or_insert(sequence.blocks[n - 1]);
        }
        sequence.n_published = sequence.n_published.max(n_blocks);
    }

    /// Takes a sequence out, and its blocks back, the last one first.
    pub(crate) fn release(&mut self, who: usize) -> Sequence {
        let sequence = self.sequences.swap_remove(who);
        for &block in sequence.blocks.iter().rev() {
            if self.n_holders(block) > 0 {
                continue;
            }
            if self.is_known(block) {
                self.cached.push(block);
            } else {
                self.free.push(block);
            }
        }
        sequence
    }

    pub(crate) fn clear(&mut self) {
        self.known.clear();
        self.free.append(&mut self.cached);
    }

    /// Checks that each sequence reads its own KV, and that what can be found is what it is said
    /// to be.
    pub(crate) fn check_contents(&self) {
        for sequence in &self.sequences {
            for position in 0..sequence.n_computed {
                let block = sequence.blocks[position / self.block_size] as usize;
                let slot = self.slots[block][position % self.block_size].as_ref();
                let tokens = &sequence.tokens[..position + 1 + sequence.n_lookahead()];
                let is_own = slot.is_some_and(|(space, t)| *space == sequence.space && t == tokens);
                assert!(is_own, "{sequence:?} reads {slot:?} at {position}");
            }
        }
        for (content, block) in &self.known {
            let last = self.slots[*block as usize].last().expect("a block has a slot");
            assert_eq!(last.as_ref(), Some(content), "block {block} is known for what it holds");
        }
    }
}
