//! What a world checks after each operation beside the manager's own invariants, from its own books.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::{Actor, records_new_blocks};
use crate::block_hash::BlockHash;
use crate::block_pool::BlockPool;
use crate::block_table::RowEdit;
use crate::blocks::KVCacheBlocks;
use crate::event_log::KVCacheEvent;
use crate::id::{BlockId, GroupId, RequestRow};
use crate::manager::{AllocateSlots, KVCacheManager};
use crate::prefix_map::PrefixKey;
use crate::semantics::RemovalEvent;
use crate::spec::AttentionKind;

/// The books.
#[derive(Debug)]
pub(super) struct Audit {
    /// References handed out, for each block.
    outstanding: Vec<u32>,
    /// How many of them belong to leases.
    leased: Vec<u32>,
    /// What a reader of the events believes to be cached, and how often.
    announced: HashMap<(BlockHash, GroupId), u32>,
    seen_events: usize,
    /// The rows as a reader of the row edits has them.
    mirror: BTreeMap<(RequestRow, GroupId), Vec<BlockId>>,
    /// Rows by request, as first seen.
    rows: BTreeMap<String, RequestRow>,
    /// What `take_new_block_ids` must tell.
    pub(super) new_block_ids: Vec<BlockId>,
}

impl Audit {
    pub(super) fn new(manager: &KVCacheManager) -> Self {
        Self {
            outstanding: vec![0; manager.pool().num_blocks() as usize],
            leased: vec![0; manager.pool().num_blocks() as usize],
            announced: HashMap::new(),
            seen_events: 0,
            mirror: BTreeMap::new(),
            rows: BTreeMap::new(),
            new_block_ids: Vec::new(),
        }
    }

    // ----------------------------------------------------------------------- references handed out

    /// Blocks with references that are only counted.
    pub(super) fn counted(&self) -> Vec<BlockId> {
        let held = |at: &usize| self.outstanding[*at] > self.leased[*at];
        let held = (0..self.outstanding.len()).filter(held);
        held.map(BlockId::from_index).collect()
    }

    pub(super) fn hand_out(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().filter(|block| !block.is_null()) {
            self.outstanding[block.index()] += 1;
            self.leased[block.index()] += 1;
        }
    }

    pub(super) fn dissolve(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().filter(|block| !block.is_null()) {
            self.leased[block.index()] -= 1;
        }
    }

    pub(super) fn lease_again(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().filter(|block| !block.is_null()) {
            self.leased[block.index()] += 1;
        }
    }

    /// Whether these blocks may be given back by id, each as often as it is listed.
    pub(super) fn may_free(&self, blocks: &[BlockId]) -> bool {
        blocks.iter().all(|block| {
            let times = blocks.iter().filter(|other| *other == block).count();
            let Some(held) = self.outstanding.get(block.index()) else {
                return false;
            };
            block.is_null() || times <= (held - self.leased[block.index()]) as usize
        })
    }

    pub(super) fn give_back(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().filter(|block| !block.is_null()) {
            self.outstanding[block.index()] -= 1;
        }
    }

    // ----------------------------------------------------------------------------------- allocation

    /// After an admission: the row is as long as it must be, and no longer than it may be.
    pub(super) fn admitted(
        &mut self,
        manager: &KVCacheManager,
        call: &AllocateSlots<'_>,
        row_before: &KVCacheBlocks,
    ) {
        let view = &call.request.view;
        let local = view.num_computed_tokens + call.num_new_computed_tokens;
        let computed = local + call.num_external_computed_tokens;
        let longest = manager.config().max_model_len;
        let needed = (computed + call.num_new_tokens).min(longest);
        let wanted = (computed + call.num_new_tokens + call.num_lookahead_tokens).min(longest);
        let row = manager.get_blocks(call.request.request_id, None);
        for (index, group) in manager.single_type_managers().iter().enumerate() {
            let (blocks, blocks_before) = (row.blocks(index), row_before.blocks(index).len());
            let size = group.block_size();
            let hits = call.new_computed_blocks.map_or(0, |hit| hit.blocks(index).len());
            let most = wanted.max(computed).div_ceil(size) as usize;
            // States have positions of their own, the encoder's blocks no tokens of the request.
            let by_token = !matches!(
                group.kind(),
                AttentionKind::Mamba { .. } | AttentionKind::CrossAttention
            );
            if by_token {
                assert!(blocks.len() >= needed.div_ceil(size) as usize, "{blocks:?}");
                assert!(blocks.len() <= most.max(blocks_before).max(hits), "{blocks:?}");
            }
            if records_new_blocks(group.kind()) && manager.config().track_new_blocks {
                self.new_block_ids.extend_from_slice(&blocks[blocks_before.max(hits)..]);
            }
        }
    }

    // --------------------------------------------------------------------------------------- checks

    pub(super) fn events_were_taken(&mut self) {
        self.seen_events = 0;
    }

    pub(super) fn check(&mut self, manager: &mut KVCacheManager, actors: &[Actor]) {
        let pool = manager.pool();
        assert_eq!(pool.handed_out, self.outstanding, "I4: references handed out");
        assert_eq!(pool.leased, self.leased, "I20: references of leases");
        let blocks = (1..pool.num_blocks()).map(BlockId);
        let used = blocks.filter(|block| pool.ref_cnt(*block) > 0).count();
        let usable = pool.num_usable_blocks() as usize;
        assert_eq!(pool.num_free_blocks() + used, usable, "free + used = total");
        self.replay_events(pool);
        self.check_row_numbers(manager, actors);
        self.replay_row_edits(manager, actors);
    }

    /// I12: who follows the events knows what is cached.
    fn replay_events(&mut self, pool: &BlockPool) {
        for event in pool.events().iter().skip(self.seen_events) {
            self.seen_events += 1;
            match event {
                KVCacheEvent::BlockStored { block_hashes, group, .. } => {
                    for hash in block_hashes {
                        *self.announced.entry((*hash, group)).or_default() += 1;
                    }
                }
                KVCacheEvent::BlockRemoved { block_hashes, group } => {
                    for hash in block_hashes {
                        self.withdraw(pool.config().semantics.removal_event, (*hash, group));
                    }
                }
                KVCacheEvent::AllBlocksCleared => self.announced.clear(),
            }
        }
        if !pool.events().is_enabled() {
            return;
        }
        let mut cached: HashMap<(BlockHash, GroupId), u32> = HashMap::new();
        for block in (1..pool.num_blocks()).map(BlockId) {
            let aliases = pool.prefix_map().aliases(block);
            for PrefixKey { hash, group, .. } in pool.block_key(block).into_iter().chain(aliases) {
                *cached.entry((hash, group)).or_default() += 1;
            }
        }
        if pool.config().semantics.removal_event == RemovalEvent::EveryCopy {
            assert_eq!(self.announced, cached, "I12: copies announced");
        } else {
            for key in self.announced.keys() {
                assert!(cached.contains_key(key), "I12: {key:?} is announced only");
            }
            assert_eq!(self.announced.len(), cached.len(), "I12: keys announced");
        }
    }

    /// A copy goes, or the whole key.
    fn withdraw(&mut self, rule: RemovalEvent, key: (BlockHash, GroupId)) {
        let copies = self.announced.get_mut(&key);
        let copies = copies.unwrap_or_else(|| panic!("I12: {key:?} goes but never came"));
        match rule {
            RemovalEvent::EveryCopy if *copies > 1 => *copies -= 1,
            RemovalEvent::EveryCopy | RemovalEvent::LastCopy => {
                self.announced.remove(&key);
            }
        }
    }

    /// I18: a request keeps its row, and a new one gets the lowest that is free.
    fn check_row_numbers(&mut self, manager: &KVCacheManager, actors: &[Actor]) {
        self.rows.retain(|name, row| manager.request_name(*row) == Some(name));
        for actor in actors {
            let name = &**actor.request.request_id();
            let Some(row) = manager.request_row(name) else {
                continue;
            };
            if !self.rows.contains_key(name) {
                // One operation makes one request tracked, so the others are as they were.
                let is_taken = |row: &u32| self.rows.values().any(|other| other.0 == *row);
                let skipped = (0..row.0).find(|row| !is_taken(row));
                assert_eq!(skipped, None, "I18: a lower row than {row} is free for {name:?}");
                self.rows.insert(name.into(), row);
            }
            assert_eq!(self.rows[name], row, "I18: the row of {name:?} changed");
        }
        assert_eq!(self.rows.len(), manager.num_tracked_requests(), "I18: rows");
    }

    fn replay_row_edits(&mut self, manager: &mut KVCacheManager, actors: &[Actor]) {
        for edit in manager.row_edits_mut().iter() {
            match edit {
                RowEdit::Append { row, group, start, blocks } => {
                    let mirrored = self.mirror.entry((row, group)).or_default();
                    assert_eq!(mirrored.len(), start as usize, "an append is at the end");
                    mirrored.extend_from_slice(blocks);
                }
                RowEdit::Null { row, group, start, stop } => {
                    let mirrored = self.mirror.entry((row, group)).or_default();
                    mirrored[start as usize..stop as usize].fill(crate::id::NULL_BLOCK);
                }
                RowEdit::Replace { row, group, position, block } => {
                    let mirrored = self.mirror.entry((row, group)).or_default();
                    mirrored[position as usize] = block;
                }
                RowEdit::Clear { row } => self.mirror.retain(|(other, _), _| *other != row),
            }
        }
        manager.row_edits_mut().clear();
        if !manager.config().track_row_edits {
            return;
        }
        let mut rows = BTreeMap::new();
        for actor in actors {
            let id = actor.request.request_id();
            let Some(row) = manager.request_row(id) else {
                continue;
            };
            let blocks = manager.get_blocks(id, None);
            for group in 0..blocks.num_groups() {
                let ids = blocks.blocks(group).to_vec();
                rows.insert((row, GroupId::from_index(group)), ids);
            }
        }
        self.mirror.retain(|_, blocks| !blocks.is_empty());
        rows.retain(|_, blocks| !blocks.is_empty());
        assert_eq!(self.mirror, rows, "the row edits do not replay to the rows");
    }
}
