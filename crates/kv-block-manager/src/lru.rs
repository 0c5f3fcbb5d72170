//! Blocks in the order in which they are evicted.

use engine_types::BlockId;

/// A list that is linked through arrays: pushing, popping and removing a given block are O(1) and
/// allocate nothing.
#[derive(Debug)]
pub(crate) struct LruList {
    /// The neighbours of each block; the last entry is the head of the ring.
    links: Vec<Link>,
    len: u32,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    previous: u32,
    next: u32,
}

impl LruList {
    /// An empty list for blocks below `num_blocks`.
    pub(crate) fn new(num_blocks: u32) -> Self {
        let alone = Link { previous: num_blocks, next: num_blocks };
        Self { links: vec![alone; num_blocks as usize + 1], len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    fn head(&self) -> u32 {
        u32::try_from(self.links.len() - 1).expect("block ids are u32")
    }

    /// Makes `block`, which is not in the list, the last one to be popped.
    pub(crate) fn push_back(&mut self, block: BlockId) {
        let head = self.head();
        let last = self.links[head as usize].previous;
        self.links[block.0 as usize] = Link { previous: last, next: head };
        self.links[last as usize].next = block.0;
        self.links[head as usize].previous = block.0;
        self.len += 1;
    }

    /// Takes out `block`, which is in the list.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let Link { previous, next } = self.links[block.0 as usize];
        self.links[previous as usize].next = next;
        self.links[next as usize].previous = previous;
        self.len -= 1;
    }

    /// Takes out the first block.
    pub(crate) fn pop_front(&mut self) -> Option<BlockId> {
        let first = self.iter().next()?;
        self.remove(first);
        Some(first)
    }

    /// The blocks, the next one to be popped first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> {
        let head = self.head();
        let next = move |block: u32| Some(self.links[block as usize].next).filter(|n| *n != head);
        std::iter::successors(next(head), move |block| next(*block)).map(BlockId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_that_of_pushing() {
        let mut list = LruList::new(5);
        let ids = |list: &LruList| list.iter().map(|block| block.0).collect::<Vec<_>>();
        assert_eq!(list.pop_front(), None);
        for block in [3, 0, 4, 1] {
            list.push_back(BlockId(block));
        }
        list.remove(BlockId(4));
        assert_eq!((ids(&list), list.len()), (vec![3, 0, 1], 3));
        assert_eq!(list.pop_front(), Some(BlockId(3)));
        list.push_back(BlockId(3));
        list.remove(BlockId(3));
        list.push_back(BlockId(4));
        assert_eq!((ids(&list), list.len()), (vec![0, 1, 4], 3));
    }
}
