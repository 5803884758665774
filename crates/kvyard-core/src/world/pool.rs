//! The operations on the pool: references outside rows, and keys.

use super::World;
use crate::blocks::{BlockLease, GroupEnds};
use crate::caching::{BlockMask, CacheFullBlocks};
use crate::error::KVCacheError;
use crate::event_log::EventLog;
use crate::id::{BlockId, NULL_BLOCK, length};
use crate::op::{BlockChoice, Op, Outcome};

impl World {
    /// Gives back every reference that is handed out.
    ///
    /// # Panics
    /// If the pool refuses one.
    pub fn give_back_everything(&mut self) {
        while !self.leases.is_empty() {
            self.dissolve_lease(0);
        }
        while let [block, ..] = self.audit.counted()[..] {
            self.audit.give_back(&[block]);
            let given = self.manager.pool_mut().free_counted(&[block]);
            assert!(given.is_ok(), "{given:?}");
        }
        self.check();
    }

    pub(super) fn perform_on_pool(&mut self, op: &Op) -> Outcome {
        match op {
            Op::FreeLease { lease, through_manager } => self.free_lease(*lease, *through_manager),
            Op::DissolveLease { lease } => self.dissolve_lease(*lease),
            Op::LeaseCounted { blocks } => self.lease_counted(blocks),
            Op::FreeCounted { blocks } => {
                let blocks = self.resolve(blocks);
                let expected = self.audit.may_free(&blocks);
                let result = self.manager.pool_mut().free_counted(&blocks);
                assert_eq!(result.is_ok(), expected, "free {blocks:?}: {result:?}");
                if expected {
                    self.audit.give_back(&blocks);
                }
                result.into()
            }
            Op::GetNewBlocks { count } => {
                let count = (count % 8) as usize;
                let free = self.manager.pool().num_free_blocks();
                let result = self.manager.pool_mut().get_new_blocks(count);
                let refused = matches!(result, Err(KVCacheError::OutOfBlocks { .. }));
                assert_eq!(refused, count > free, "{count} of {free} blocks");
                result.map_or_else(Outcome::Error, |lease| self.keep(lease))
            }
            Op::Touch { blocks } => {
                let blocks = self.resolve(blocks);
                let result = self.manager.pool_mut().touch(&blocks);
                result.map_or_else(Outcome::Error, |lease| self.keep(lease))
            }
            Op::CacheFull { request, start, blocks, mask, group } => {
                self.cache_full(*request, *start, blocks, *mask, *group)
            }
            Op::CachePartial { request, block, boundary, group } => {
                self.cache_partial(*request, *block, *boundary, *group)
            }
            Op::Evict { blocks } => {
                let blocks = self.resolve(blocks);
                self.manager.pool_mut().evict_blocks(&blocks).into()
            }
            Op::Reset => {
                let pool = self.manager.pool();
                let idle = pool.num_free_blocks() == pool.num_usable_blocks() as usize;
                let done = self.manager.reset_prefix_cache();
                assert!(done.as_ref().is_ok_and(|done| *done == idle) || done.is_err());
                done.map_or_else(Outcome::Error, Outcome::Reset)
            }
            _ => {
                let mut log = EventLog::default();
                self.manager.pool_mut().take_events(&mut log);
                self.audit.events_were_taken();
                Outcome::Done
            }
        }
    }

    fn free_lease(&mut self, lease: u32, through_manager: bool) -> Outcome {
        let Some(lease) = self.take_lease(lease) else {
            return Outcome::Nothing;
        };
        let blocks = lease.ids().to_vec();
        let result = if through_manager {
            self.manager.free_popped(lease)
        } else {
            self.manager.pool_mut().free(lease)
        };
        assert!(result.is_ok(), "lease of {blocks:?}: {result:?}");
        self.audit.dissolve(&blocks);
        self.audit.give_back(&blocks);
        Outcome::Done
    }

    fn dissolve_lease(&mut self, lease: u32) -> Outcome {
        let Some(lease) = self.take_lease(lease) else {
            return Outcome::Nothing;
        };
        let blocks = self.manager.pool_mut().dissolve(lease).expect("a lease of this pool");
        self.audit.dissolve(&blocks);
        Outcome::Blocks(blocks)
    }

    fn lease_counted(&mut self, choices: &[BlockChoice]) -> Outcome {
        let blocks = self.resolve(choices);
        let expected = self.audit.may_free(&blocks);
        let ends = GroupEnds::from_slice(&[length(blocks.len())]);
        let result = self.manager.pool_mut().lease_counted(blocks.clone(), ends, None);
        assert_eq!(result.is_ok(), expected, "lease {blocks:?}: {result:?}");
        match result {
            Err(error) => Outcome::Error(error),
            Ok(lease) => {
                self.audit.lease_again(&blocks);
                self.leases.push(lease);
                Outcome::Blocks(blocks)
            }
        }
    }

    fn cache_full(
        &mut self,
        request: u32,
        start: u32,
        choices: &[BlockChoice],
        mask: Option<u8>,
        group: u32,
    ) -> Outcome {
        let Some(at) = self.actor(request) else {
            return Outcome::Nothing;
        };
        let blocks = self.resolve(choices);
        if blocks.iter().any(|block| self.stands_in_row(*block)) {
            return Outcome::Nothing;
        }
        let start = (start % 6) as usize;
        let mut row = vec![NULL_BLOCK; start];
        row.extend(&blocks);
        let mask: Option<Vec<bool>> =
            mask.map(|mask| (0..blocks.len()).map(|bit| mask >> bit & 1 == 1).collect());
        let (block_size, group) = self.pool_block(group);
        let call = self.actors[at].request.call(true);
        let span = CacheFullBlocks {
            request: &call,
            row: &row,
            start,
            stop: row.len(),
            block_size,
            group,
            mask: mask.as_deref().map_or(BlockMask::All, BlockMask::Flags),
        };
        self.manager.pool_mut().cache_full_blocks(&span).into()
    }

    fn cache_partial(&mut self, request: u32, block: BlockChoice, to: u32, group: u32) -> Outcome {
        let (Some(at), block) = (self.actor(request), self.block(block)) else {
            return Outcome::Nothing;
        };
        if self.stands_in_row(block) {
            return Outcome::Nothing;
        }
        let num_tokens = (to % 12) * self.manager.config().hash_block_size;
        let (block_size, group) = self.pool_block(group);
        let call = self.actors[at].request.call(true);
        let pool = self.manager.pool_mut();
        let result = pool.cache_partial_block(&call, block, num_tokens, group, block_size);
        result.map(drop).into()
    }

    /// Whoever caches a block of a row outside the manager breaks the contract unseen.
    fn stands_in_row(&self, block: BlockId) -> bool {
        let rows = &self.manager.pool().row_references;
        rows.get(block.index()).is_some_and(|rows| *rows > 0)
    }

    pub(super) fn keep(&mut self, lease: BlockLease) -> Outcome {
        self.audit.hand_out(lease.ids());
        let outcome = Outcome::Blocks(lease.ids().to_vec());
        self.leases.push(lease);
        outcome
    }

    fn take_lease(&mut self, lease: u32) -> Option<BlockLease> {
        let at = (lease as usize).checked_rem(self.leases.len())?;
        Some(self.leases.swap_remove(at))
    }
}
