//! References outside rows: who takes them, and who may give them back.
//!
//! A reference that is handed out belongs to a lease, or is only counted once its lease is dissolved
//! into plain ids. Ids give back counted references and never a lease's: else a request that frees its
//! plain list twice would take what another's lease still holds.

use super::BlockPool;
use crate::blocks::{BlockLease, GroupEnds};
use crate::error::{CHECKED, KVCacheError, Result};
use crate::history::Effect;
use crate::id::{BlockId, NULL_BLOCK, length};
use crate::memory::Grow;
use crate::op::Op;

impl BlockPool {
    /// Takes `count` blocks from the head of the queue; cached ones are evicted.
    ///
    /// # Errors
    /// `OutOfBlocks`; nothing is taken then.
    pub fn get_new_blocks(&mut self, count: usize) -> Result<BlockLease> {
        self.check_available(count)?;
        let mut ids = Vec::new();
        ids.make_room(count)?;
        self.reserve(count, 0, self.events_of_evictions(count))?;
        self.history.begin(Op::GetNewBlocks { count: length(count) });
        self.begin_change();
        for _ in 0..count {
            let block = self.take_head();
            self.handed_out[block.index()] = 1;
            self.leased[block.index()] = 1;
            ids.push(block);
        }
        self.history.note_all(Effect::Taken, ids.iter().copied());
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
                    request: None,
                    what: if self.was_ever_allocated(*block) {
                        "evicted, or never cached"
                    } else {
                        "never allocated"
                    },
                });
            }
        }
        let mut ids = Vec::new();
        ids.make_room(blocks.len())?;
        self.history.begin(Op::Touch { blocks: Vec::new() });
        self.note_change();
        for block in blocks {
            self.on_accessed(*block);
            if !block.is_null() {
                if self.ref_cnt(*block) == 0 {
                    self.queue.remove(*block);
                }
                self.handed_out[block.index()] += 1;
                self.leased[block.index()] += 1;
            }
            ids.push(*block);
        }
        self.history.note_all(Effect::Referenced, blocks.iter().copied());
        Ok(self.lease(ids))
    }

    /// Gives a lease back, in its order: blocks that nobody holds any more go to the head of the
    /// queue if they are not cached, else to its tail.
    ///
    /// # Errors
    /// `ForeignBlock` for a lease of another pool, which comes back with the error.
    pub fn free(&mut self, lease: BlockLease) -> Result<(), (KVCacheError, BlockLease)> {
        let lease = self.end_lease(lease)?;
        self.begin_free_lease(&lease, false);
        self.release_counted(lease.ids.into_iter());
        Ok(())
    }

    /// As `free`, from the last block to the first.
    ///
    /// # Errors
    /// As `free`.
    pub fn free_reversed(&mut self, lease: BlockLease) -> Result<(), (KVCacheError, BlockLease)> {
        let lease = self.end_lease(lease)?;
        self.begin_free_lease(&lease, false);
        self.release_counted(lease.ids.into_iter().rev());
        Ok(())
    }

    /// Dissolves a lease: its references are only counted from now on, and go back through
    /// `free_counted`, or become a lease again through `lease_counted`.
    ///
    /// # Errors
    /// As `free`.
    pub fn dissolve(
        &mut self,
        lease: BlockLease,
    ) -> Result<Vec<BlockId>, (KVCacheError, BlockLease)> {
        let lease = self.end_lease(lease)?;
        self.begin_of(Op::DissolveLease { lease: 0 }, lease.request());
        Ok(lease.ids)
    }

    /// Gives counted references back by id, one for each time a block is listed; the order is the
    /// eviction order. For ids of a dissolved lease.
    ///
    /// # Errors
    /// `InvalidArgument` for an id outside the pool; `DoubleFree` if a block is listed more often than
    /// references to it are counted; `NotOwned` if none is, but a request or a lease holds the block or
    /// it was never allocated. Nothing is freed then.
    pub fn free_counted(&mut self, blocks: &[BlockId]) -> Result<()> {
        self.check_counted(blocks)?;
        self.history.begin(Op::FreeCounted { blocks: Vec::new() });
        self.release_counted(blocks.iter().copied());
        Ok(())
    }

    /// Makes a lease of counted references again, the reverse of `dissolve`.
    ///
    /// # Errors
    /// As `free_counted`.
    pub fn lease_counted(
        &mut self,
        ids: Vec<BlockId>,
        ends: GroupEnds,
        request: Option<String>,
    ) -> Result<BlockLease> {
        self.check_counted(&ids)?;
        self.begin_of(Op::LeaseCounted { blocks: Vec::new() }, request.as_deref());
        for block in ids.iter().filter(|block| !block.is_null()) {
            self.leased[block.index()] += 1;
        }
        self.history.note_all(Effect::Leased, ids.iter().copied());
        Ok(BlockLease { ids, ends, pool: self.id, epoch: self.epoch, request })
    }

    fn begin_of(&mut self, op: Op, request: Option<&str>) {
        match request {
            Some(request) => self.history.begin_of(op, request),
            None => self.history.begin(op),
        }
    }

    /// A lease is given back.
    pub(crate) fn begin_free_lease(&mut self, lease: &BlockLease, through_manager: bool) {
        let op = Op::FreeLease { lease: 0, through_manager };
        self.begin_of(op, lease.request());
    }

    /// The references of a lease become counted ones, for the caller to release.
    pub(crate) fn end_lease(
        &mut self,
        lease: BlockLease,
    ) -> Result<BlockLease, (KVCacheError, BlockLease)> {
        if lease.pool != self.id {
            let what = match &lease.request {
                Some(request) => format!("the lease of request {request:?}"),
                None => format!("the lease of {} blocks", lease.ids.len()),
            };
            let (found, expected) = (lease.pool, self.id);
            return Err((KVCacheError::ForeignBlock { what, found, expected }, lease));
        }
        for block in lease.ids.iter().filter(|block| !block.is_null()) {
            self.leased[block.index()] -= 1;
        }
        Ok(lease)
    }

    /// Whether each block may be given back as often as it is listed.
    fn check_counted(&mut self, blocks: &[BlockId]) -> Result<()> {
        if !CHECKED {
            return Ok(());
        }
        for block in blocks {
            self.check_block("blocks", *block)?;
        }
        // Occurrences are counted in the column itself and put back: no memory, and O(n).
        let mut refused = None;
        for (counted, block) in blocks.iter().enumerate() {
            if block.is_null() {
                continue;
            }
            if self.handed_out[block.index()] == self.leased[block.index()] {
                refused = Some((counted, *block));
                break;
            }
            self.handed_out[block.index()] -= 1;
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
    pub(crate) fn release_counted(&mut self, blocks: impl Iterator<Item = BlockId>) {
        self.note_change();
        let mut last_plain = NULL_BLOCK;
        for block in blocks.filter(|block| !block.is_null()) {
            self.history.note(Effect::Released, block);
            self.handed_out[block.index()] -= 1;
            self.requeue_if_unused(block, &mut last_plain);
        }
    }

    fn refuse_free(&self, block: BlockId, blocks: &[BlockId]) -> KVCacheError {
        let at = block.index();
        let (leased, in_rows) = (self.leased[at], self.row_references[at]);
        let counted = self.handed_out[at] - leased;
        let reason = match (counted, leased, in_rows) {
            (0, 0, 0) if !self.was_ever_allocated(block) => "it was never allocated".into(),
            (0, 0, 1..) => format!(
                "{in_rows} request(s) hold it, and none handed it out; free the request instead"
            ),
            (0, 1.., _) => format!(
                "{leased} lease(s) hold it; give the lease back, or dissolve it into a list first"
            ),
            _ => {
                let times = blocks.iter().filter(|other| **other == block).count();
                let owner = match in_rows {
                    0 => String::new(),
                    _ => format!(" ({in_rows} request(s) hold it besides)"),
                };
                return KVCacheError::DoubleFree {
                    block,
                    times: length(times),
                    handed_out: counted,
                    owner,
                };
            }
        };
        KVCacheError::NotOwned { block, reason }
    }

    fn lease(&self, ids: Vec<BlockId>) -> BlockLease {
        let ends = GroupEnds::from_slice(&[length(ids.len())]);
        BlockLease { ids, ends, pool: self.id, epoch: self.epoch, request: None }
    }

    /// A row's references become those of a lease.
    pub(crate) fn hand_out(
        &mut self,
        ids: Vec<BlockId>,
        ends: GroupEnds,
        request: Option<String>,
    ) -> BlockLease {
        for block in ids.iter().filter(|block| !block.is_null()) {
            self.row_references[block.index()] -= 1;
            self.handed_out[block.index()] += 1;
            self.leased[block.index()] += 1;
        }
        self.history.note_all(Effect::Leased, ids.iter().copied());
        BlockLease { ids, ends, pool: self.id, epoch: self.epoch, request }
    }
}
