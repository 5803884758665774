//! Taking keys away on request: of some blocks, of what was never written, of all.

use super::BlockPool;
use crate::error::Result;
use crate::event_log::EventReserve;
use crate::history::Effect;
use crate::id::BlockId;
use crate::op::Op;

impl BlockPool {
    /// Takes all keys from the given blocks, in this order; references and places in the queue stay.
    ///
    /// # Errors
    /// `InvalidArgument` for an id outside the pool; nothing is evicted then.
    pub fn evict_blocks(&mut self, blocks: &[BlockId]) -> Result<()> {
        for block in blocks {
            self.check_block("block_ids", *block)?;
        }
        self.reserve(blocks.len(), 0, self.events_of_evictions(blocks.len()))?;
        self.history.begin(Op::Evict { blocks: Vec::new() });
        self.begin_change();
        for block in blocks.iter().filter(|block| !block.is_null()) {
            self.on_evicted(*block);
            self.unkey(*block);
        }
        Ok(())
    }

    /// Takes all keys from blocks, because what they promise is not there.
    pub(crate) fn forget_keys<'a>(
        &mut self,
        op: Op,
        blocks: impl Iterator<Item = &'a BlockId> + Clone,
    ) -> Result<()> {
        self.reserve(0, 0, self.events_of_evictions(blocks.clone().count()))?;
        self.history.begin(op);
        self.begin_change();
        for block in blocks {
            self.unkey(*block);
        }
        Ok(())
    }

    /// Takes all keys from a block, if it has any, while it stays where it is: hits on it are stale.
    pub(crate) fn unkey(&mut self, block: BlockId) {
        if self.prefix.is_cached(block) {
            self.mark_lost(block, self.relative_epoch());
            self.history.note(Effect::Unkeyed, block);
            self.drop_keys(block);
        }
    }

    /// Forgets the whole prefix cache, if no block is held. Whether it did.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn reset_prefix_cache(&mut self) -> Result<bool> {
        if self.queue.len() != self.num_usable_blocks() as usize {
            return Ok(false);
        }
        self.events.reserve(EventReserve { records: 1, ..EventReserve::default() })?;
        self.history.begin(Op::Reset);
        self.begin_change();
        let now = self.relative_epoch();
        for block in 1..self.config.num_blocks {
            if self.prefix.is_cached(BlockId(block)) {
                self.lost_at[block as usize] = now;
            }
        }
        self.prefix.clear();
        if let Some(residency) = &mut self.residency {
            residency.reset();
        }
        self.events.record_cleared();
        Ok(true)
    }
}
