//! The free queue: which block is allocated, and so evicted, next. A doubly linked list threaded
//! through one array; every operation is O(1) a block and allocates nothing.
//!
//! The policy (unhashed blocks to the head, hashed ones to the tail) is the pool's, not the queue's.
//!
//! Invariants, cited by `validate()`:
//! * I1: the forward walk, the backward walk and `len` agree.
//!
//! Why not a ring with tombstones, which saves the pointer chase: it must be compacted, and a
//! connector walks this list with a cursor that survives removals.

use crate::id::{BlockId, NULL_BLOCK};

/// Marks a block that is not queued.
const UNLINKED: u32 = u32::MAX;

/// Free blocks in eviction order; the head goes next. The null block's place in the array is the
/// sentinel that closes the list, since it is never queued itself.
#[derive(Debug)]
pub struct FreeKVCacheBlockQueue {
    previous: Vec<u32>,
    next: Vec<u32>,
    len: usize,
}

impl FreeKVCacheBlockQueue {
    /// All blocks but the null block, in ascending order.
    pub fn new(num_blocks: u32) -> Self {
        let last = num_blocks - 1;
        let mut next: Vec<u32> = (1..=num_blocks).collect();
        next[last as usize] = 0;
        let mut previous: Vec<u32> = (0..num_blocks).map(|block| block.wrapping_sub(1)).collect();
        previous[0] = last;
        Self { previous, next, len: last as usize }
    }

    /// How many blocks are queued.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no block is free.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the block is queued.
    #[inline]
    pub fn contains(&self, block: BlockId) -> bool {
        !block.is_null() && self.next[block.index()] != UNLINKED
    }

    /// Takes the head.
    #[inline]
    pub fn pop_front(&mut self) -> Option<BlockId> {
        let head = BlockId(self.next[NULL_BLOCK.index()]);
        if head.is_null() {
            return None;
        }
        self.remove(head);
        Some(head)
    }

    /// Takes a block out, wherever it is.
    ///
    /// # Panics
    /// If the block is not queued: the pool decides that before.
    #[inline]
    pub fn remove(&mut self, block: BlockId) {
        let (previous, next) = (self.previous[block.index()], self.next[block.index()]);
        assert!(next != UNLINKED && !block.is_null(), "I1: block {block} is not queued");
        self.next[previous as usize] = next;
        self.previous[next as usize] = previous;
        self.next[block.index()] = UNLINKED;
        self.previous[block.index()] = UNLINKED;
        self.len -= 1;
    }

    /// Queues a block behind `position`; behind the null block it becomes the head.
    ///
    /// # Panics
    /// If the block is queued already or is the null block.
    #[inline]
    pub fn insert_after(&mut self, position: BlockId, block: BlockId) {
        assert!(
            self.next[block.index()] == UNLINKED && !block.is_null(),
            "I1: block {block} is queued already"
        );
        let next = self.next[position.index()];
        self.next[position.index()] = block.0;
        self.previous[block.index()] = position.0;
        self.next[block.index()] = next;
        self.previous[next as usize] = block.0;
        self.len += 1;
    }

    /// Queues a block at the tail.
    #[inline]
    pub fn push_back(&mut self, block: BlockId) {
        self.insert_after(BlockId(self.previous[NULL_BLOCK.index()]), block);
    }

    /// From head to tail.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        std::iter::successors(self.after(NULL_BLOCK), |block| self.after(*block))
    }

    /// The block behind `block`, or the head for the null block: a walk whose cursor is a block.
    #[inline]
    pub fn after(&self, block: BlockId) -> Option<BlockId> {
        match self.next[block.index()] {
            0 | UNLINKED => None,
            next => Some(BlockId(next)),
        }
    }

    /// Checks I1 where one block is concerned: its neighbours know it.
    ///
    /// # Panics
    /// If they do not.
    pub(crate) fn audit(&self, block: BlockId) {
        if self.contains(block) {
            let (previous, next) = (self.previous[block.index()], self.next[block.index()]);
            assert_eq!(self.next[previous as usize], block.0, "I1: the block before block {block}");
            assert_eq!(self.previous[next as usize], block.0, "I1: the block behind block {block}");
        }
    }

    /// Checks I1.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn validate(&self) {
        let mut walked = 0;
        let mut behind = NULL_BLOCK;
        for block in self.iter() {
            walked += 1;
            assert!(walked <= self.len, "I1: the forward walk is longer than {}", self.len);
            assert_eq!(
                self.previous[block.index()],
                behind.0,
                "I1: backward link of block {block}"
            );
            behind = block;
        }
        assert_eq!(walked, self.len, "I1: the forward walk and the count differ");
        assert_eq!(self.previous[NULL_BLOCK.index()], behind.0, "I1: the tail");
    }
}
