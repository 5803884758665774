//! The pool as plain lists: the free queue, references, the copies of each key in the order in which
//! they were inserted, and what the events must say. Rules from `manager.md` §2.2, §4 and §8.2.

use std::collections::BTreeMap;

use kvyard_core::event_log::KVCacheEvent;
use kvyard_core::op::{Misuse, Op};
use kvyard_core::prefix_map::PrefixKey;
use kvyard_core::semantics::{RemovalEvent, SparseStoreEvent};
use kvyard_core::world::World;
use kvyard_core::{
    BlockHash, BlockId, GroupId, KVCacheManagerConfig, NULL_BLOCK, Request, Semantics,
};

#[derive(Clone, Debug, PartialEq, Eq)]
enum Event {
    Stored {
        hashes: Vec<BlockHash>,
        parent: Option<BlockHash>,
        tokens: Vec<u32>,
        block_size: u32,
        group: GroupId,
    },
    Removed(BlockHash, GroupId),
    Cleared,
}

#[derive(Clone, Debug, Default)]
struct Block {
    references: usize,
    /// References that belong to leases.
    leased: usize,
    primary: Option<PrefixKey>,
    aliases: Vec<PrefixKey>,
}

#[derive(Debug)]
pub(crate) struct PoolModel {
    semantics: Semantics,
    hash_block_size: u32,
    free: Vec<BlockId>,
    blocks: Vec<Block>,
    copies: BTreeMap<(GroupId, BlockHash), Vec<BlockId>>,
    events: Vec<Event>,
}

/// A span of a row as `cache_full_blocks` takes it.
struct Span<'a> {
    request: &'a Request,
    start: usize,
    blocks: Vec<BlockId>,
    mask: Vec<bool>,
    block_size: u32,
    group: GroupId,
}

impl PoolModel {
    pub(crate) fn new(config: &KVCacheManagerConfig) -> Self {
        Self {
            semantics: config.semantics,
            hash_block_size: config.hash_block_size,
            free: (1..config.num_blocks).map(BlockId).collect(),
            blocks: vec![Block::default(); config.num_blocks as usize],
            copies: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    /// Carries out what concerns the pool, before the world does. Whether it is no misuse; none where
    /// the pool is not concerned.
    pub(crate) fn execute(&mut self, op: &Op, world: &World) -> Option<bool> {
        Some(match op {
            Op::GetNewBlocks { count } => self.get_new_blocks((count % 8) as usize),
            Op::Touch { blocks } => self.touch(&world.resolve(blocks)),
            Op::FreeCounted { blocks } => self.give_back(&world.resolve(blocks)),
            Op::FreeLease { lease, through_manager } => {
                let mut blocks = world.lease(*lease)?.ids().to_vec();
                if *through_manager {
                    blocks.reverse();
                }
                self.end_lease(&blocks);
                self.give_back(&blocks)
            }
            Op::DissolveLease { lease } => {
                self.end_lease(world.lease(*lease)?.ids());
                true
            }
            Op::LeaseCounted { blocks } => self.lease_counted(&world.resolve(blocks)),
            Op::Evict { blocks } => self.evict(&world.resolve(blocks)),
            Op::Reset => {
                self.reset();
                true
            }
            Op::CacheFull { request, start, blocks, mask, group } => {
                let blocks = world.resolve(blocks);
                let bit = |bit: usize| mask.is_none_or(|mask| mask >> bit & 1 == 1);
                let (block_size, group) = world.pool_block(*group);
                self.cache_full(&Span {
                    request: world.request(*request)?,
                    start: (start % 6) as usize,
                    mask: (0..blocks.len()).map(bit).collect(),
                    blocks,
                    block_size,
                    group,
                })
            }
            Op::CachePartial { request, block, boundary, group } => {
                let block = world.resolve(&[*block])[0];
                let (block_size, group) = world.pool_block(*group);
                let num_tokens = (boundary % 12) * self.hash_block_size;
                let request = world.request(*request)?;
                self.cache_partial(request, block, num_tokens, group, block_size)
            }
            Op::TakeEvents => {
                self.events.clear();
                true
            }
            Op::Misuse {
                kind: Misuse::ForeignLease | Misuse::NoSuchBlock | Misuse::TooManyBlocks,
                ..
            } => false,
            _ => return None,
        })
    }

    fn exists(&self, block: BlockId) -> bool {
        block.index() < self.blocks.len()
    }

    fn get_new_blocks(&mut self, count: usize) -> bool {
        if count > self.free.len() {
            return false;
        }
        for block in self.free.drain(..count).collect::<Vec<_>>() {
            self.drop_keys(block);
            self.blocks[block.index()].references = 1;
            self.blocks[block.index()].leased = 1;
        }
        true
    }

    fn touch(&mut self, blocks: &[BlockId]) -> bool {
        let is_known = |block: &BlockId| {
            self.exists(*block)
                && (*block == NULL_BLOCK
                    || self.blocks[block.index()].references > 0
                    || self.blocks[block.index()].primary.is_some())
        };
        if !blocks.iter().all(is_known) {
            return false;
        }
        for block in blocks.iter().filter(|block| **block != NULL_BLOCK) {
            self.free.retain(|free| free != block);
            self.blocks[block.index()].references += 1;
            self.blocks[block.index()].leased += 1;
        }
        true
    }

    fn is_counted(&self, block: BlockId, times: usize) -> bool {
        self.blocks
            .get(block.index())
            .is_some_and(|state| block == NULL_BLOCK || times <= state.references - state.leased)
    }

    fn end_lease(&mut self, blocks: &[BlockId]) {
        for block in blocks.iter().filter(|block| **block != NULL_BLOCK) {
            self.blocks[block.index()].leased -= 1;
        }
    }

    fn lease_counted(&mut self, blocks: &[BlockId]) -> bool {
        let times = |block: &BlockId| blocks.iter().filter(|other| *other == block).count();
        if !blocks.iter().all(|block| self.is_counted(*block, times(block))) {
            return false;
        }
        for block in blocks.iter().filter(|block| **block != NULL_BLOCK) {
            self.blocks[block.index()].leased += 1;
        }
        true
    }

    fn give_back(&mut self, blocks: &[BlockId]) -> bool {
        let times = |block: &BlockId| blocks.iter().filter(|other| *other == block).count();
        if !blocks.iter().all(|block| self.is_counted(*block, times(block))) {
            return false;
        }
        let (mut plain, mut hashed) = (Vec::new(), Vec::new());
        for block in blocks.iter().filter(|block| **block != NULL_BLOCK) {
            let state = &mut self.blocks[block.index()];
            state.references -= 1;
            if state.references == 0 {
                let run = if state.primary.is_some() { &mut hashed } else { &mut plain };
                run.push(*block);
            }
        }
        self.free.splice(0..0, plain);
        self.free.extend(hashed);
        true
    }

    fn evict(&mut self, blocks: &[BlockId]) -> bool {
        let all_exist = blocks.iter().all(|block| self.exists(*block));
        if all_exist {
            for block in blocks {
                self.drop_keys(*block);
            }
        }
        all_exist
    }

    fn reset(&mut self) {
        if self.free.len() + 1 == self.blocks.len() {
            self.blocks.fill(Block::default());
            self.copies.clear();
            self.events.push(Event::Cleared);
        }
    }

    fn cache_full(&mut self, span: &Span<'_>) -> bool {
        let factor = (span.block_size / self.hash_block_size) as usize;
        let hash = |position: usize| span.request.block_hashes()[(position + 1) * factor - 1];
        let stop = span.start + span.blocks.len();
        let positions = span.start..stop;
        let wanted = |position: &usize| {
            span.mask[position - span.start] && span.blocks[position - span.start] != NULL_BLOCK
        };
        let covered = |position: usize| u32::try_from(position + 1).unwrap() * span.block_size;
        if span.blocks.is_empty() {
            return true;
        }
        if !span.blocks.iter().all(|block| self.exists(*block))
            || stop * factor > span.request.block_hashes().len()
        {
            return false;
        }
        let chosen: Vec<_> = positions.clone().filter(wanted).collect();
        let block = |position: usize| span.blocks[position - span.start];
        for position in &chosen {
            let state = &self.blocks[block(*position).index()];
            let is_full = state.primary.is_some_and(|key| key.covered_tokens >= covered(*position));
            let twice =
                chosen.iter().filter(|other| block(**other) == block(*position)).count() > 1;
            if state.references == 0 || is_full || twice {
                return false;
            }
        }
        for position in &chosen {
            self.drop_keys(block(*position));
            let key = PrefixKey {
                hash: hash(*position),
                group: span.group,
                covered_tokens: covered(*position),
            };
            self.insert(block(*position), key);
        }
        self.tell_of_stores(span, &chosen, hash);
        true
    }

    fn tell_of_stores(
        &mut self,
        span: &Span<'_>,
        chosen: &[usize],
        hash: impl Fn(usize) -> BlockHash,
    ) {
        let stored = |chosen: &[usize], start: usize, stop: usize, parent| Event::Stored {
            hashes: chosen.iter().map(|position| hash(*position)).collect(),
            parent,
            tokens: span.request.token_ids()
                [start * span.block_size as usize..stop * span.block_size as usize]
                .to_vec(),
            block_size: span.block_size,
            group: span.group,
        };
        if self.semantics.sparse_store_event == SparseStoreEvent::OnePerCall {
            let stop = span.start + span.blocks.len();
            let parent = (span.start > 0).then(|| hash(span.start - 1));
            self.events.push(stored(chosen, span.start, stop, parent));
            return;
        }
        for run in chosen.chunk_by(|left, right| left + 1 == *right) {
            let (start, stop) = (run[0], run[run.len() - 1] + 1);
            let announced = |position: &usize| self.is_cached(span.group, hash(*position));
            let parent = (0..start).rev().find(announced).map(&hash);
            self.events.push(stored(run, start, stop, parent));
        }
    }

    fn cache_partial(
        &mut self,
        request: &Request,
        block: BlockId,
        num_tokens: u32,
        group: GroupId,
        block_size: u32,
    ) -> bool {
        if block == NULL_BLOCK {
            return true;
        }
        let boundary = (num_tokens / self.hash_block_size) as usize;
        let hashes = request.block_hashes();
        if !self.exists(block)
            || num_tokens.is_multiple_of(block_size)
            || boundary > hashes.len()
            || self.blocks[block.index()].references == 0
        {
            return false;
        }
        let key = PrefixKey { hash: hashes[boundary - 1], group, covered_tokens: num_tokens };
        let copies = self.copies.get(&(group, key.hash));
        if copies.is_some_and(|copies| copies.contains(&block)) {
            return true;
        }
        // What a promoted block announced is withdrawn first, so it is no ancestor.
        let primary = self.blocks[block.index()].primary;
        if primary.is_some_and(|primary| primary.covered_tokens < num_tokens) {
            self.drop_keys(block);
        }
        let announced = |at: &usize| self.is_cached(group, hashes[*at]);
        let parent = match self.semantics.sparse_store_event {
            SparseStoreEvent::OnePerCall => (boundary > 1).then(|| boundary - 2),
            SparseStoreEvent::OnePerRun => (0..boundary - 1).rev().find(announced),
        };
        let start = match self.semantics.sparse_store_event {
            SparseStoreEvent::OnePerCall => boundary - 1,
            SparseStoreEvent::OnePerRun => parent.map_or(0, |parent| parent + 1),
        };
        self.insert(block, key);
        let size = self.hash_block_size as usize;
        self.events.push(Event::Stored {
            hashes: vec![key.hash],
            parent: parent.map(|parent| hashes[parent]),
            tokens: request.token_ids()[start * size..boundary * size].to_vec(),
            block_size: u32::try_from((boundary - start) * size).unwrap(),
            group,
        });
        true
    }

    // ----------------------------------------------------------------------------------------- keys

    fn is_cached(&self, group: GroupId, hash: BlockHash) -> bool {
        self.copies.contains_key(&(group, hash))
    }

    fn insert(&mut self, block: BlockId, key: PrefixKey) {
        let state = &mut self.blocks[block.index()];
        if state.primary.is_none() {
            state.primary = Some(key);
        } else {
            state.aliases.push(key);
        }
        self.copies.entry((key.group, key.hash)).or_default().push(block);
    }

    fn drop_keys(&mut self, block: BlockId) {
        let state = &mut self.blocks[block.index()];
        let keys: Vec<_> =
            state.primary.take().into_iter().chain(state.aliases.drain(..)).collect();
        for PrefixKey { hash, group, .. } in keys {
            let copies = self.copies.get_mut(&(group, hash)).unwrap();
            copies.retain(|copy| *copy != block);
            let was_last = copies.is_empty();
            if was_last {
                self.copies.remove(&(group, hash));
            }
            if was_last || self.semantics.removal_event == RemovalEvent::EveryCopy {
                self.events.push(Event::Removed(hash, group));
            }
        }
    }

    // ----------------------------------------------------------------------------------- comparison

    pub(crate) fn compare(&self, world: &mut World) {
        let pool = world.manager().pool();
        let order: Vec<_> = pool.free_blocks_in_order().collect();
        assert_eq!(order, self.free, "the free queue");
        for (at, block) in self.blocks.iter().enumerate() {
            let id = BlockId::from_index(at);
            assert_eq!(pool.ref_cnt(id) as usize, block.references, "references of {id}");
            assert_eq!(pool.block_key(id), block.primary, "the primary key of {id}");
            let aliases: Vec<_> = pool.prefix_map().aliases(id).collect();
            assert_eq!(aliases, block.aliases, "the aliases of {id}");
        }
        assert_eq!(pool.prefix_map().num_keys(), self.copies.len(), "keys");
        for ((group, hash), copies) in &self.copies {
            let found: Vec<_> = pool.prefix_map().copies(hash, *group).collect();
            assert_eq!(found, *copies, "the copies of {hash:?}");
            assert_eq!(pool.prefix_map().get(hash, *group), copies.first().copied());
        }
        let events: Vec<_> = pool.events().iter().map(|event| told(&event)).collect();
        assert_eq!(events, self.events, "events");
    }
}

fn told(event: &KVCacheEvent<'_>) -> Event {
    match event {
        KVCacheEvent::BlockStored {
            block_hashes,
            parent_block_hash,
            token_ids,
            block_size,
            group,
            ..
        } => Event::Stored {
            hashes: block_hashes.to_vec(),
            parent: parent_block_hash.copied(),
            tokens: token_ids.to_vec(),
            block_size: *block_size,
            group: *group,
        },
        KVCacheEvent::BlockRemoved { block_hashes, group } => {
            assert_eq!(block_hashes.len(), 1, "one hash a removal");
            Event::Removed(block_hashes[0], *group)
        }
        KVCacheEvent::AllBlocksCleared => Event::Cleared,
    }
}
