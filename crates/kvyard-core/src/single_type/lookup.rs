//! What a lookup asks of one group, or of several groups of one specification, and what it finds.

use std::ops::Range;

use crate::block_pool::BlockPool;
use crate::caching::MergedBlockHashes;
use crate::id::{BlockId, GroupId, NULL_BLOCK};

/// One question to the groups of one specification.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lookup<'a> {
    /// The groups; a position counts only if all of them have it.
    pub(crate) groups: &'a [GroupId],
    /// The hit may not be longer, in tokens.
    pub(crate) max_length: u32,
    /// Tokens per block.
    pub(crate) block_size: u32,
    /// The length of the hit must be a multiple of this many tokens.
    pub(crate) alignment: u32,
    /// A drafter voids the last block found.
    pub(crate) drop_last: bool,
}

impl Lookup<'_> {
    pub(crate) fn max_blocks(&self) -> usize {
        (self.max_length / self.block_size) as usize
    }

    /// Whether a hit may end behind this many blocks.
    pub(crate) fn is_aligned(&self, blocks: usize) -> bool {
        self.block_size == self.alignment
            || (blocks as u64 * u64::from(self.block_size)).is_multiple_of(self.alignment.into())
    }
}

/// A hit: positions without storage, then cached blocks; at each position one block a group.
#[derive(Clone, Debug)]
pub(crate) struct PrefixHit {
    num_null: usize,
    /// Position by position, group by group.
    columns: Vec<BlockId>,
    num_groups: usize,
}

impl PrefixHit {
    pub(crate) fn new(num_groups: usize) -> Self {
        Self { num_null: 0, columns: Vec::new(), num_groups }
    }

    /// Forgets what was found and goes on at a position; what lies before it needs no storage.
    pub(crate) fn restart(&mut self, first: usize) {
        self.num_null = first;
        self.columns.clear();
    }

    /// Adds positions, up to the first that any group misses; how many were added.
    #[inline]
    pub(crate) fn extend(
        &mut self,
        pool: &BlockPool,
        hashes: MergedBlockHashes<'_>,
        positions: Range<usize>,
        groups: &[GroupId],
    ) -> usize {
        /// Guesses at a time: about as many fetches from memory as a processor has under way.
        const GUESSES: usize = 8;
        let mut at = positions.start;
        // What misses mostly misses at once, so the first position is asked for alone.
        let mut end = at + 1;
        while at < positions.end {
            end = end.min(positions.end);
            let keys = (at..end).flat_map(|at| groups.iter().map(move |group| (at, *group)));
            let mut guesses = [0; GUESSES];
            for (guess, (at, group)) in guesses.iter_mut().zip(keys) {
                *guess = pool.prefix.guess(hashes.get(at), group);
            }
            for guesses in guesses.chunks(groups.len()).take(end - at) {
                let sought = hashes.sought(at);
                if !pool.get_guessed_block(sought, groups, guesses, &mut self.columns) {
                    return at - positions.start;
                }
                at += 1;
            }
            end = at + (GUESSES / groups.len()).max(1);
        }
        at - positions.start
    }

    pub(crate) fn num_blocks(&self) -> usize {
        self.num_null + self.columns.len() / self.num_groups
    }

    /// Cuts the hit to at most so many blocks.
    pub(crate) fn truncate(&mut self, blocks: usize) {
        self.columns.truncate(blocks.saturating_sub(self.num_null) * self.num_groups);
        self.num_null = self.num_null.min(blocks);
    }

    /// Gives up at least `least` blocks from the end, and more until the length is allowed.
    pub(crate) fn pop_until(&mut self, is_allowed: impl Fn(usize) -> bool, least: usize) {
        let mut blocks = self.num_blocks().saturating_sub(least);
        while !is_allowed(blocks) {
            blocks -= 1;
        }
        self.truncate(blocks);
    }

    /// The blocks of the k-th group.
    pub(crate) fn group(&self, k: usize) -> impl Iterator<Item = BlockId> + '_ {
        std::iter::repeat_n(NULL_BLOCK, self.num_null)
            .chain(self.columns.iter().skip(k).step_by(self.num_groups).copied())
    }
}
