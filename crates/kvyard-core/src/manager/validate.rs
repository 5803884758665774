//! Every invariant of the manager at once, and a digest of its whole state: what every kind of test
//! calls after every step.

use xxhash_rust::xxh3::Xxh3;

use super::KVCacheManager;
use crate::block_pool::BlockPool;
use crate::event_log::KVCacheEvent;
use crate::id::BlockId;
use crate::single_type::SingleTypeKVCacheManager;

impl KVCacheManager {
    /// Checks all invariants, in O(blocks).
    ///
    /// # Panics
    /// If one does not hold; the message names it.
    pub fn validate(&self) {
        self.pool.validate();
        self.requests.validate();
        let mut occurrences = vec![0; self.pool.num_blocks() as usize];
        for (row, name) in self.requests.iter() {
            for manager in &self.managers {
                let blocks = self.tables.row(row, manager.group());
                let cached = manager.num_cached_block(row).unwrap_or(0) as usize;
                assert!(cached <= blocks.len(), "I10: request {name:?}: {cached} offered");
                for (position, block) in blocks.iter().enumerate().filter(|(_, id)| !id.is_null()) {
                    occurrences[block.index()] += 1;
                    self.validate_key(manager, position, *block);
                }
                let mut sorted = blocks.to_vec();
                sorted.retain(|block| !block.is_null());
                sorted.sort_unstable();
                let twice = sorted.windows(2).find(|pair| pair[0] == pair[1]);
                assert!(twice.is_none(), "I19: a block twice in the row of {name:?}: {twice:?}");
            }
        }
        for (block, expected) in occurrences.iter().enumerate() {
            let block = BlockId::from_index(block);
            let found = self.pool.row_references[block.index()];
            assert_eq!(found, *expected, "I4: row references of block {block}");
        }
    }

    /// What the key of a block says of its place in a row.
    pub(super) fn validate_key(
        &self,
        manager: &SingleTypeKVCacheManager,
        position: usize,
        block: BlockId,
    ) {
        if let Some(key) = self.pool.block_key(block) {
            assert_eq!(key.group, manager.group(), "I19: the key of block {block}");
            let full = (position + 1) * manager.block_size() as usize;
            let covered = key.covered_tokens as usize;
            assert!(covered <= full, "I9: block {block} at {position} covers {covered} tokens");
        }
    }

    /// A fingerprint of everything that decides later answers. Capacities are not part of it.
    pub fn state_digest(&self) -> u128 {
        let mut digest = StateDigest::default();
        digest.pool(&self.pool);
        for (row, name) in self.requests.iter() {
            digest.number(u64::from(row.0));
            digest.bytes(name.as_bytes());
            for manager in &self.managers {
                manager.state_numbers(row).into_iter().for_each(|number| digest.number(number));
                digest.blocks(self.tables.row(row, manager.group()));
            }
        }
        for manager in &self.managers {
            digest.blocks(manager.new_block_ids());
            let mut hashes: Vec<_> = manager.step_hashes().collect();
            hashes.sort_unstable();
            for hash in hashes {
                digest.bytes(&hash.0);
            }
        }
        let stats = &self.prefix_cache_stats;
        for number in [
            u64::from(stats.reset),
            stats.requests,
            stats.queries,
            stats.hits,
            stats.preempted_requests,
            stats.preempted_queries,
            stats.preempted_hits,
        ] {
            digest.number(number);
        }
        digest.0.digest128()
    }
}

impl BlockPool {
    /// A fingerprint of everything in the pool that decides later answers.
    pub fn state_digest(&self) -> u128 {
        let mut digest = StateDigest::default();
        digest.pool(self);
        digest.0.digest128()
    }
}

#[derive(Default)]
struct StateDigest(Xxh3);

impl StateDigest {
    fn number(&mut self, number: u64) {
        self.0.update(&number.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.update(bytes);
    }

    fn blocks(&mut self, blocks: &[BlockId]) {
        self.number(blocks.len() as u64);
        for block in blocks {
            self.number(u64::from(block.0));
        }
    }

    fn pool(&mut self, pool: &BlockPool) {
        self.number(pool.epoch());
        self.number(pool.num_blocks_stored());
        self.number(pool.num_blocks_removed());
        for block in pool.free_blocks_in_order() {
            self.number(u64::from(block.0));
        }
        for block in (0..pool.num_blocks()).map(BlockId) {
            self.number(u64::from(pool.row_references[block.index()]));
            self.number(u64::from(pool.handed_out[block.index()]));
            self.number(u64::from(pool.leased[block.index()]));
            let keys = pool.prefix.primary(block).into_iter().chain(pool.prefix.aliases(block));
            for key in keys {
                self.bytes(&key.hash.0);
                self.number(u64::from(key.group.0));
                self.number(u64::from(key.covered_tokens));
                self.number(
                    pool.prefix.get(&key.hash, key.group).map_or(0, |first| first.0.into()),
                );
            }
        }
        for event in pool.events.iter() {
            self.event(&event);
        }
    }

    fn event(&mut self, event: &KVCacheEvent<'_>) {
        // The debug form has every field; a digest is for tests and audits, not for speed.
        self.bytes(format!("{event:?}").as_bytes());
    }
}
