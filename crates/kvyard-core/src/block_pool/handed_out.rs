//! References outside rows: who takes them, and who may give them back.

use super::BlockPool;
use crate::blocks::{BlockLease, GroupEnds};
use crate::error::{KVCacheError, Result};
use crate::id::{BlockId, NULL_BLOCK, length};

impl BlockPool {
    /// Takes `count` blocks from the head of the queue; cached ones are evicted.
    ///
    /// # Errors
    /// `OutOfBlocks`; nothing is taken then.
    pub fn get_new_blocks(&mut self, count: usize) -> Result<BlockLease> {
        self.check_available(count)?;
        let mut ids = Vec::new();
        ids.try_reserve(count)?;
        self.events.reserve(self.events_of_evictions(count))?;
        self.begin_change();
        for _ in 0..count {
            let block = self.take_head();
            self.handed_out[block.index()] = 1;
            ids.push(block);
        }
        Ok(self.lease(ids))
    }

    /// Takes a reference to each block, so that it cannot be evicted.
    ///
    /// # Errors
    /// `InvalidArgument` for an id outside the pool; `StaleBlock` for a block that is neither held
    /// nor cached: whoever names it has an old result.
    pub fn touch(&mut self, blocks: &[BlockId]) -> Result<BlockLease> {
        for block in blocks {
            self.check_block("blocks", *block)?;
            if !block.is_null() && self.ref_cnt(*block) == 0 && !self.prefix.is_cached(*block) {
                return Err(KVCacheError::StaleBlock {
                    block: *block,
                    request: String::from("(touch)"),
                    what: if self.was_ever_allocated(*block) { "evicted" } else { "never cached" },
                });
            }
        }
        let mut ids = Vec::new();
        ids.try_reserve(blocks.len())?;
        for block in blocks {
            self.on_accessed(*block);
            if !block.is_null() {
                if self.ref_cnt(*block) == 0 {
                    self.queue.remove(*block);
                }
                self.handed_out[block.index()] += 1;
            }
            ids.push(*block);
        }
        Ok(self.lease(ids))
    }

    /// Gives a lease back, in its order: blocks that nobody holds any more go to the head of the
    /// queue if they are not cached, else to its tail.
    ///
    /// # Errors
    /// `ForeignBlock` for a lease of another pool; `DoubleFree` if its references were given back
    /// through its ids already. The lease comes back with the error.
    pub fn free(&mut self, lease: BlockLease) -> Result<(), (KVCacheError, BlockLease)> {
        if let Err(error) = self.check_lease(&lease) {
            return Err((error, lease));
        }
        self.release_handed_out(lease.ids.iter().copied());
        Ok(())
    }

    /// As `free`, from the last block to the first.
    ///
    /// # Errors
    /// As `free`.
    pub fn free_reversed(&mut self, lease: BlockLease) -> Result<(), (KVCacheError, BlockLease)> {
        if let Err(error) = self.check_lease(&lease) {
            return Err((error, lease));
        }
        self.release_handed_out(lease.ids.iter().rev().copied());
        Ok(())
    }

    /// Gives handed-out references back by id, one for each time a block is listed; the order is the
    /// eviction order. For ids of a dissolved lease.
    ///
    /// # Errors
    /// `InvalidArgument` for an id outside the pool; `DoubleFree` if a block is listed more often than
    /// references to it are handed out; `NotOwned` if none is, but a request holds the block or it
    /// was never allocated. Nothing is freed then.
    pub fn free_counted(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.check_handed_out(blocks)?;
        self.release_handed_out(blocks.iter().copied());
        Ok(())
    }

    pub(crate) fn check_lease(&mut self, lease: &BlockLease) -> Result<()> {
        if lease.pool != self.id {
            return Err(KVCacheError::ForeignBlock {
                what: "the lease".into(),
                found: lease.pool,
                expected: self.id,
            });
        }
        self.check_handed_out(&lease.ids)
    }

    /// Whether each block may be given back as often as it is listed.
    fn check_handed_out(&mut self, blocks: &[BlockId]) -> Result<()> {
        for block in blocks {
            self.check_block("blocks", *block)?;
        }
        // Occurrences are counted in the column itself and put back: no memory, and O(n).
        let mut refused = None;
        for (counted, block) in blocks.iter().enumerate() {
            if block.is_null() {
                continue;
            }
            let handed_out = &mut self.handed_out[block.index()];
            if *handed_out == 0 {
                refused = Some((counted, *block));
                break;
            }
            *handed_out -= 1;
        }
        let counted = refused.map_or(blocks.len(), |(counted, _)| counted);
        for block in blocks[..counted].iter().filter(|block| !block.is_null()) {
            self.handed_out[block.index()] += 1;
        }
        match refused {
            Some((_, block)) => Err(self.refuse_free(block, blocks)),
            None => Ok(()),
        }
    }

    /// Checked before; the order is the eviction order.
    pub(crate) fn release_handed_out(&mut self, blocks: impl Iterator<Item = BlockId>) {
        let mut last_plain = NULL_BLOCK;
        for block in blocks.filter(|block| !block.is_null()) {
            self.handed_out[block.index()] -= 1;
            self.requeue_if_unused(block, &mut last_plain);
        }
    }

    fn refuse_free(&self, block: BlockId, blocks: &[BlockId]) -> KVCacheError {
        let handed_out = self.handed_out[block.index()];
        let in_rows = self.row_references[block.index()];
        if handed_out == 0 && in_rows > 0 {
            return KVCacheError::NotOwned {
                block,
                reason: format!(
                    "{in_rows} request(s) hold it, and none handed it out; free the request instead"
                ),
            };
        }
        if handed_out == 0 && !self.was_ever_allocated(block) {
            return KVCacheError::NotOwned { block, reason: "it was never allocated".into() };
        }
        let times = blocks.iter().filter(|other| **other == block).count();
        KVCacheError::DoubleFree {
            block,
            times: u32::try_from(times).unwrap_or(u32::MAX),
            handed_out,
            owner: if in_rows > 0 {
                format!(" ({in_rows} request(s) hold it besides)")
            } else {
                String::new()
            },
        }
    }

    fn lease(&self, ids: Vec<BlockId>) -> BlockLease {
        let end = length(ids.len());
        let ends = GroupEnds::from_slice(&[end]);
        BlockLease { ids, ends, pool: self.id, epoch: self.epoch }
    }

    /// A row's references become handed-out ones.
    pub(crate) fn hand_out(&mut self, ids: Vec<BlockId>, ends: GroupEnds) -> BlockLease {
        for block in ids.iter().filter(|block| !block.is_null()) {
            self.row_references[block.index()] -= 1;
            self.handed_out[block.index()] += 1;
        }
        BlockLease { ids, ends, pool: self.id, epoch: self.epoch }
    }
}
