//! The invariants a slice at a time, so that production can leave the check on. `validate` checks them
//! all at once.
//!
//! A pass goes over the rows, then over the blocks. Of a row: its name finds it (I18), what it offered
//! to the cache is its own (I10), and each of its blocks is counted as often as rows hold it (I4) and
//! carries its group's key (I9, I19). Of a block: it is queued exactly while nobody holds it (I1, I2),
//! a lookup of its keys finds it (I5 to I8), its leases are references (I20), and if rows are said to
//! hold it the pass has met one that does, or one that began to since (I4).

use super::KVCacheManager;
use crate::error::Result;
use crate::id::{BlockId, RequestRow};
use crate::memory::Grow;

/// Where the audit stands.
#[derive(Clone, Copy, Debug)]
pub(super) enum AuditCursor {
    /// The next position of a row, of one group.
    Rows { row: usize, group: usize, position: usize },
    /// The next block.
    Blocks { block: u32 },
}

/// How the audit stands.
#[derive(Debug)]
pub(super) struct Audit {
    cursor: AuditCursor,
    num_passes: u64,
    /// The pool's epoch when the pass began.
    began: u64,
}

impl Default for Audit {
    fn default() -> Self {
        let cursor = AuditCursor::Rows { row: 0, group: 0, position: 0 };
        Self { cursor, num_passes: 0, began: 0 }
    }
}

impl KVCacheManager {
    /// Checks a slice of the invariants, going on where the last call stopped. `budget` bounds the
    /// memory accesses, roughly; each takes some nanoseconds. Returns how often all was checked.
    ///
    /// # Errors
    /// `OutOfMemory`, at the first call.
    ///
    /// # Panics
    /// If an invariant does not hold; the message names it.
    pub fn audit(&mut self, budget: usize) -> Result<u64> {
        if self.pool.seen_in_pass.is_empty() {
            let blocks = self.pool.num_blocks() as usize;
            self.pool.seen_in_pass.make_room(blocks)?;
            self.pool.seen_in_pass.resize(blocks, 0);
            self.begin_pass();
        }
        let mut spent = 0;
        while spent < budget {
            spent += match self.audit.cursor {
                AuditCursor::Rows { row, group, position } => self.audit_row(row, group, position),
                AuditCursor::Blocks { block } => self.audit_block(block),
            };
        }
        Ok(self.audit.num_passes)
    }

    /// Breaks I2, for tests of who finds it: a free block is lost.
    #[cfg(feature = "testing")]
    pub fn break_invariant(&mut self, block: BlockId) {
        self.pool.queue.remove(block);
    }

    fn begin_pass(&mut self) {
        self.pool.audit_pass = self.pool.audit_pass.wrapping_add(1).max(1);
        self.audit.began = self.pool.epoch();
        self.audit.cursor = AuditCursor::Rows { row: 0, group: 0, position: 0 };
    }

    /// One position of a row. Returns what it cost.
    fn audit_row(&mut self, row: usize, group: usize, position: usize) -> usize {
        let number = RequestRow::from_index(row);
        if row >= self.requests.num_rows() {
            self.audit.cursor = AuditCursor::Blocks { block: 1 };
            return 1;
        }
        let name = self.requests.name(number);
        let (Some(name), Some(manager)) = (name, self.managers.get(group)) else {
            self.audit.cursor = AuditCursor::Rows { row: row + 1, group: 0, position: 0 };
            return 1;
        };
        let blocks = self.tables.row(number, manager.group());
        if position == 0 {
            assert_eq!(self.requests.find(name, None), Some(number), "I18: request {name:?}");
            let cached = manager.num_cached_block(number).unwrap_or(0) as usize;
            assert!(cached <= blocks.len(), "I10: request {name:?}: {cached} offered");
        }
        let Some(block) = blocks.get(position).copied() else {
            self.audit.cursor = AuditCursor::Rows { row, group: group + 1, position: 0 };
            return 1;
        };
        self.audit.cursor = AuditCursor::Rows { row, group, position: position + 1 };
        if block.is_null() {
            return 1;
        }
        assert!(block.0 < self.pool.num_blocks(), "I4: request {name:?} holds block {block}");
        self.validate_key(manager, position, block);
        // Rows share a block at the same position: its key says which.
        let holds =
            |row: &RequestRow| self.tables.row(*row, manager.group()).get(position) == Some(&block);
        let holders = self.requests.iter().filter(|(row, _)| holds(row)).count();
        let counted = self.pool.row_references[block.index()] as usize;
        assert_eq!(holders, counted, "I4: rows that hold block {block}, as request {name:?} does");
        self.pool.mark_seen(block);
        4 + self.requests.num_rows()
    }

    /// One block. Returns what it cost.
    fn audit_block(&mut self, block: u32) -> usize {
        if block >= self.pool.num_blocks() {
            self.audit.num_passes += 1;
            self.begin_pass();
            return 1;
        }
        self.audit.cursor = AuditCursor::Blocks { block: block + 1 };
        let block = BlockId(block);
        self.pool.audit(block);
        self.pool.queue.audit(block);
        let held = self.pool.row_references[block.index()];
        let is_accounted = self.pool.seen_in_pass[block.index()] == self.pool.audit_pass
            || self.pool.changed_since(block, self.audit.began);
        assert!(
            held == 0 || is_accounted,
            "I4: block {block} has {held} row references, no row has it"
        );
        4 + self.pool.prefix.audit(block)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use super::*;
    use crate::hashing::{BlockHasher, ExtraKeySource, HashAlgorithm};
    use crate::id::GroupId;
    use crate::manager::AllocateSlots;
    use crate::prefix_map::PrefixKey;
    use crate::request::Request;
    use crate::semantics::Semantics;
    use crate::spec::KVCacheManagerConfig;

    /// The first block of both rows, and the second.
    const SHARED: BlockId = BlockId(1);
    const SECOND: BlockId = BlockId(2);
    const FREE: BlockId = BlockId(9);

    fn request(name: &str, tokens: Range<u32>) -> Request {
        let algorithm = HashAlgorithm::Sha256;
        let root = algorithm.hash_text("0");
        let hasher = BlockHasher::new(algorithm, root, 4, Semantics::corrected()).unwrap();
        let keys = Arc::new(ExtraKeySource::default());
        Request::new(name, tokens.collect(), keys, Some(Arc::new(hasher)))
    }

    fn admit(manager: &mut KVCacheManager, request: &Request) {
        let call = request.call(true);
        let hit = manager.lookup(&call);
        let slots = AllocateSlots {
            num_new_computed_tokens: hit.num_tokens,
            new_computed_blocks: Some(&hit.blocks),
            ..AllocateSlots::new(&call, call.view.num_tokens - hit.num_tokens)
        };
        assert!(manager.allocate_slots(&slots).unwrap().is_some());
    }

    /// Two requests that share two blocks, one that is cached and free, and free ones.
    fn manager() -> KVCacheManager {
        let mut manager = KVCacheManager::new(KVCacheManagerConfig::new(12, 4, 64), None).unwrap();
        for (name, tokens) in [("a", 0..11_u32), ("b", 0..10), ("c", 100..105)] {
            admit(&mut manager, &request(name, tokens));
        }
        manager.free("c", None);
        manager
    }

    fn audit_all(manager: &mut KVCacheManager, budget: usize) {
        let until = manager.audit(1).unwrap() + 2;
        while manager.audit(budget).unwrap() < until {}
    }

    #[test]
    fn a_sound_manager_passes_with_any_budget() {
        for budget in [1, 7, 1000] {
            let mut manager = manager();
            audit_all(&mut manager, budget);
            manager.free("a", None);
            audit_all(&mut manager, budget);
        }
    }

    /// Gives a block another key than its own.
    fn rekey(manager: &mut KVCacheManager, group: GroupId, covered_tokens: u32) {
        let prefix = &mut manager.pool.prefix;
        let key = prefix.primary(SHARED).unwrap();
        prefix.remove_all(SHARED, |_, _| ());
        prefix.insert(SHARED, PrefixKey { group, covered_tokens, ..key }, None);
    }

    /// Panics of checks name the invariant.
    fn found_by(check: impl FnOnce(), what: &str) -> String {
        let found = catch_unwind(AssertUnwindSafe(check));
        let message = found.expect_err(&format!("{what} goes unseen"));
        message.downcast_ref::<String>().expect("an assertion's text").clone()
    }

    /// Breaks one thing at a time; a pass of the audit finds it, and so does `validate`, and both name
    /// the invariant.
    #[test]
    fn whatever_is_broken_is_found() {
        type Break = fn(&mut KVCacheManager);
        let row = RequestRow(0);
        assert_eq!(manager().tables.row(row, GroupId(0))[0], SHARED);
        let broken: [(&str, Break); 13] = [
            ("I4", |manager| manager.pool.row_references[SHARED.index()] += 1),
            ("I4", |manager| manager.pool.row_references[SHARED.index()] -= 1),
            // Held by nobody, so nobody would ever free it.
            ("I4", |manager| {
                manager.pool.queue.remove(FREE);
                manager.pool.row_references[FREE.index()] = 1;
            }),
            ("I4", |manager| {
                manager.tables.replace(RequestRow(0), GroupId(0), 0, FREE);
            }),
            ("I2", |manager| manager.pool.queue.push_back(SHARED)),
            ("I2", |manager| manager.pool.queue.remove(FREE)),
            ("I20", |manager| manager.pool.leased[SHARED.index()] = 1),
            ("I10", |manager| manager.managers[0].set_num_cached_block(RequestRow(0), 9)),
            ("I18", |manager| manager.requests.rename(RequestRow(0), "b")),
            ("I6", |manager| manager.pool.prefix.corrupt(SHARED)),
            ("I9", |manager| rekey(manager, GroupId(0), 8)),
            ("I9", |manager| rekey(manager, GroupId(0), 0)),
            ("I19", |manager| rekey(manager, GroupId(1), 4)),
        ];
        for (at, (invariant, corrupt)) in broken.into_iter().enumerate() {
            for corrupt_first in [true, false] {
                let mut manager = manager();
                if !corrupt_first {
                    audit_all(&mut manager, 3);
                }
                corrupt(&mut manager);
                let case = format!("case {at}: {invariant}");
                let message = found_by(|| manager.validate(), &case);
                assert!(message.contains(&format!("{invariant}: ")), "{case}: {message}");
                let message = found_by(|| audit_all(&mut manager, 5), &case);
                assert!(message.contains(&format!("{invariant}: ")), "{case}: {message}");
                let report = manager.report(&message);
                assert!(report.contains(invariant), "{report}");
            }
        }
    }

    /// The audit counts who holds a block at one position, and so cannot tell this from I4.
    #[test]
    fn a_row_that_names_a_block_twice_is_found() {
        let mut manager = manager();
        manager.tables.replace(RequestRow(0), GroupId(0), 2, SECOND);
        let message = found_by(|| manager.validate(), "I19");
        assert!(message.contains("I19: a block twice"), "{message}");
    }

    /// What begins to be held while a pass is among the blocks is no fault: fresh blocks, and those of
    /// a hit, of which only the row that attached them knows.
    #[test]
    fn a_pass_goes_on_while_requests_come() {
        let mut manager = manager();
        audit_all(&mut manager, 3);
        for num_blocks in 1..12 {
            // Behind the rows of this pass, in front of the block that is looked at next.
            while !matches!(manager.audit.cursor, AuditCursor::Blocks { block } if block >= num_blocks)
            {
                manager.audit(1).unwrap();
            }
            let name = format!("late {num_blocks}");
            let request = request(&name, 100..105);
            admit(&mut manager, &request);
            audit_all(&mut manager, 1);
            manager.free(&name, None);
        }
    }
}
