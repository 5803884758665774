//! The block pool: reference counts, free queue and prefix cache of all blocks, and the only code
//! that changes them.
//!
//! A block's references are counted in two columns: those of rows, which only the manager gives and
//! takes, and those handed out (`get_new_blocks`, `touch`, popped requests), which only
//! `free`/`free_counted` take back. With one column, a request that frees twice what another still
//! uses would go unseen. `ref_cnt` is their sum.
//!
//! Invariants, cited by `validate()` (numbers as in `manager.md` §1.4; I1 and I5 to I7 in the modules
//! below):
//! * I2: a block is queued exactly while its `ref_cnt` is 0; the null block and withdrawn blocks never
//!   are.
//! * I3: queued + held + withdrawn blocks + the null block = all blocks.
//! * I8: without caching, no keys and no events but resets.
//! * I9: every key covers a positive multiple of the hash block size.
//! * I13: usage lies in 0..=1.
//! * I20: references of leases are references handed out.

mod evict;
mod handed_out;

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{KVCacheError, Result};
use crate::event_log::{EventFilter, EventLog, EventReserve, KVCacheEvent};
use crate::free_queue::FreeKVCacheBlockQueue;
use crate::hashing::Fingerprint;
use crate::history::{Effect, History};
use crate::id::{BlockId, GroupId, NULL_BLOCK};
use crate::prefix_map::{PrefixKey, PrefixMap, SoughtBlock};
use crate::semantics::{RemovalEvent, Semantics};
use crate::stats::ResidencyMetrics;

/// Arguments of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPoolConfig {
    /// All blocks, the null block included; at least 1.
    pub num_blocks: u32,
    /// Whether blocks are cached for reuse.
    pub enable_caching: bool,
    /// Tokens per block hash.
    pub hash_block_size: u32,
    /// Whether changes of the prefix cache are recorded.
    pub enable_kv_cache_events: bool,
    /// Whether a hit must also have the fingerprint of its tokens: 16 bytes a block.
    pub verify_tokens: bool,
    /// Whose decisions.
    pub semantics: Semantics,
}

/// See the module. vLLM's `BlockPool` (`v1/core/block_pool.py`).
#[derive(Debug)]
pub struct BlockPool {
    id: u64,
    config: BlockPoolConfig,
    hash_width: Option<usize>,
    pub(crate) queue: FreeKVCacheBlockQueue,
    pub(crate) prefix: PrefixMap,
    pub(crate) row_references: Vec<u32>,
    pub(crate) handed_out: Vec<u32>,
    /// How many of the references handed out belong to leases; the others are only counted.
    pub(crate) leased: Vec<u32>,
    /// When a block last lost its key or was allocated, in epochs since `epoch_base`; 0: never.
    lost_at: Vec<u32>,
    epoch: u64,
    epoch_base: u64,
    revision: u64,
    pub(crate) events: EventLog,
    pub(crate) history: History,
    /// In which pass of the audit a row was seen to hold a block; empty before the first.
    pub(crate) seen_in_pass: Vec<u32>,
    pub(crate) audit_pass: u32,
    residency: Option<ResidencyMetrics>,
    num_blocks_stored: u64,
    num_blocks_removed: u64,
    /// Blocks 1 to this one belong to nobody's request for ever: the tokens of attention sinks.
    num_withdrawn: u32,
    /// Positions looked up so far.
    #[cfg(feature = "testing")]
    num_probes: AtomicU64,
}

impl BlockPool {
    /// A pool of free blocks.
    ///
    /// # Errors
    /// `Config` for no blocks, or a hash block size of 0; `OutOfMemory`.
    pub fn new(config: BlockPoolConfig, residency: Option<ResidencyMetrics>) -> Result<Self> {
        /// Tells the pools of a process apart; nothing is decided by it.
        static NEXT_POOL: AtomicU64 = AtomicU64::new(1);
        if config.num_blocks == 0 {
            return Err(KVCacheError::config("num_blocks", "must be at least 1, not 0"));
        }
        if config.hash_block_size == 0 {
            return Err(KVCacheError::config("hash_block_size", "must be at least 1, not 0"));
        }
        let blocks = config.num_blocks as usize;
        let mut prefix = PrefixMap::new(config.num_blocks, config.verify_tokens);
        if config.enable_caching {
            prefix.reserve(blocks)?;
        }
        Ok(Self {
            id: NEXT_POOL.fetch_add(1, Ordering::Relaxed),
            config,
            hash_width: None,
            queue: FreeKVCacheBlockQueue::new(config.num_blocks),
            prefix,
            row_references: vec![0; blocks],
            handed_out: vec![0; blocks],
            leased: vec![0; blocks],
            lost_at: vec![0; blocks],
            epoch: 0,
            epoch_base: 0,
            revision: 0,
            events: EventLog::new(config.enable_kv_cache_events),
            history: History::default(),
            seen_in_pass: Vec::new(),
            audit_pass: 0,
            residency,
            num_blocks_stored: 0,
            num_blocks_removed: 0,
            num_withdrawn: 0,
            #[cfg(feature = "testing")]
            num_probes: AtomicU64::new(0),
        })
    }

    /// Identity among the pools of this process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The arguments it was made with.
    pub fn config(&self) -> &BlockPoolConfig {
        &self.config
    }

    /// Bytes of a digest that count: fixed by the first hash function that is bound.
    pub fn hash_width(&self) -> Option<usize> {
        self.hash_width
    }

    /// Fixes how many bytes of a digest count: 32, or 16 for the xxhash functions.
    ///
    /// # Errors
    /// `InvalidArgument` if hashes of another width are cached here already.
    pub fn bind_hash_width(&mut self, width: usize) -> Result<()> {
        match self.hash_width {
            Some(bound) if bound != width && self.prefix.num_keys() > 0 => {
                Err(KVCacheError::argument(
                    "block_hashes",
                    format!("hashes of {width} bytes, this pool caches hashes of {bound} bytes"),
                ))
            }
            _ => {
                self.hash_width = Some(width);
                Ok(())
            }
        }
    }

    /// All blocks, the null block included.
    pub fn num_blocks(&self) -> u32 {
        self.config.num_blocks
    }

    /// Free blocks, cached ones included.
    #[inline]
    pub fn num_free_blocks(&self) -> usize {
        self.queue.len()
    }

    /// The free blocks in eviction order, the next one first.
    pub fn free_blocks_in_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.queue.iter()
    }

    /// References to a block, rows and handed out together. 0 for the null block.
    #[inline]
    pub fn ref_cnt(&self, block: BlockId) -> u32 {
        self.row_references[block.index()] + self.handed_out[block.index()]
    }

    /// The primary key of a block.
    pub fn block_key(&self, block: BlockId) -> Option<PrefixKey> {
        self.prefix.primary(block)
    }

    /// The prefix cache, for reading.
    pub fn prefix_map(&self) -> &PrefixMap {
        &self.prefix
    }

    /// Takes the first blocks out of use for ever, before anything is allocated.
    pub(crate) fn withdraw(&mut self, count: u32) -> Result<()> {
        self.check_available(count as usize)?;
        for block in 1..=count {
            self.queue.remove(BlockId(block));
        }
        self.num_withdrawn = count;
        Ok(())
    }

    /// Blocks that requests can have: all but the null block and withdrawn ones.
    pub fn num_usable_blocks(&self) -> u32 {
        self.config.num_blocks - 1 - self.num_withdrawn
    }

    /// Share of the blocks in use, 0 to 1; evictable blocks count as free.
    pub fn usage(&self) -> f64 {
        match self.num_usable_blocks() {
            0 => 0.0,
            #[expect(clippy::cast_precision_loss, reason = "block counts are far below 2^53")]
            usable => 1.0 - self.queue.len() as f64 / f64::from(usable),
        }
    }

    /// Blocks that got a primary key since the pool was made.
    pub fn num_blocks_stored(&self) -> u64 {
        self.num_blocks_stored
    }

    /// Blocks that lost their key since the pool was made, resets not counted.
    pub fn num_blocks_removed(&self) -> u64 {
        self.num_blocks_removed
    }

    /// Changes of the prefix cache since the log was last taken, oldest first.
    pub fn events(&self) -> &EventLog {
        &self.events
    }

    /// Leaves out of the log what nobody wants to know. To be called before anything is cached: who
    /// was told of a store waits for the removal.
    ///
    /// # Errors
    /// `InvalidArgument` if a block is cached already.
    pub fn set_event_filter(&mut self, filter: EventFilter) -> Result<()> {
        if self.prefix.num_keys() > 0 {
            let reason = "must be set before the first block is cached";
            return Err(KVCacheError::argument("event_filter", reason));
        }
        self.events.set_filter(filter);
        Ok(())
    }

    /// Exchanges the log for `spare`, which is emptied first and whose capacity is reused.
    pub fn take_events(&mut self, spare: &mut EventLog) {
        self.events.take(spare);
    }

    /// The residency metrics, if they are kept.
    pub fn residency_mut(&mut self) -> Option<&mut ResidencyMetrics> {
        self.residency.as_mut()
    }

    /// The last operations.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Now, in changes of the pool: what a snapshot remembers.
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether the block was allocated, or lost its key, after `epoch`.
    #[inline]
    pub fn changed_since(&self, block: BlockId, epoch: u64) -> bool {
        epoch < self.epoch_base || self.epoch_base + u64::from(self.lost_at[block.index()]) > epoch
    }

    /// Whether the block was ever allocated.
    pub(crate) fn was_ever_allocated(&self, block: BlockId) -> bool {
        self.epoch_base > 0 || self.lost_at[block.index()] != 0
    }

    /// Checks that an id names a block of this pool.
    ///
    /// # Errors
    /// `InvalidArgument`.
    pub fn check_block(&self, argument: &'static str, block: BlockId) -> Result<()> {
        if block.0 < self.config.num_blocks {
            return Ok(());
        }
        Err(KVCacheError::argument(
            argument,
            format!("block {block} does not exist, the pool has {}", self.config.num_blocks),
        ))
    }

    /// For each group the earliest copy of a hash (with the fingerprint, if one is asked for), appended
    /// to `found`; false, and nothing appended, if any group misses. Touches nothing.
    #[inline]
    pub fn get_cached_block(
        &self,
        sought: SoughtBlock<'_>,
        groups: &[GroupId],
        found: &mut Vec<BlockId>,
    ) -> bool {
        self.get_guessed_block(sought, groups, &[], found)
    }

    /// The same with guesses of the first groups' entries.
    #[inline]
    pub(crate) fn get_guessed_block(
        &self,
        sought: SoughtBlock<'_>,
        groups: &[GroupId],
        guesses: &[u32],
        found: &mut Vec<BlockId>,
    ) -> bool {
        // One thread at a time: a plain increment, not a locked one.
        #[cfg(feature = "testing")]
        self.num_probes.store(self.num_probes() + 1, Ordering::Relaxed);
        let before = found.len();
        for (k, group) in groups.iter().enumerate() {
            let guess = guesses.get(k).copied();
            if let Some(block) = self.prefix.find_block(sought, *group, guess) {
                found.push(block);
            } else {
                found.truncate(before);
                return false;
            }
        }
        true
    }

    /// How many positions were ever looked up: what lookups cost.
    #[cfg(feature = "testing")]
    pub fn num_probes(&self) -> u64 {
        self.num_probes.load(Ordering::Relaxed)
    }

    // --------------------------------------------- for the manager: planned before, so infallible

    /// What evicting `count` blocks may add to the log.
    pub(crate) fn events_of_evictions(&self, count: usize) -> EventReserve {
        let keys = count + self.prefix.num_aliases();
        EventReserve { records: keys, hashes: keys, ..EventReserve::default() }
    }

    /// Room for what one call does: blocks it takes or evicts, keys it gives, what it tells.
    pub(crate) fn reserve(
        &mut self,
        taken: usize,
        new_keys: usize,
        events: EventReserve,
    ) -> Result<()> {
        if let Some(residency) = &mut self.residency {
            residency.reserve(taken)?;
        }
        self.prefix.reserve(new_keys)?;
        self.events.reserve(events)
    }

    /// Changes so far: a plan is good for the revision it was made for.
    #[inline]
    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// What was planned before is void.
    #[inline]
    pub(crate) fn note_change(&mut self) {
        self.revision += 1;
    }

    /// A new epoch; every change of the pool that an old snapshot must notice happens in one.
    #[inline]
    pub(crate) fn begin_change(&mut self) {
        self.note_change();
        self.epoch += 1;
        if self.epoch - self.epoch_base > u64::from(u32::MAX) {
            // Once in four billion calls: older snapshots all count as stale from here on.
            self.epoch_base = self.epoch - 1;
            self.lost_at.fill(0);
        }
    }

    #[inline]
    pub(crate) fn relative_epoch(&self) -> u32 {
        u32::try_from(self.epoch - self.epoch_base).expect("begin_change keeps it in 32 bits")
    }

    /// An old snapshot that names the block is stale from here on.
    #[inline]
    pub(crate) fn mark_lost(&mut self, block: BlockId, now: u32) {
        self.lost_at[block.index()] = now;
    }

    pub(crate) fn check_available(&self, wanted: usize) -> Result<()> {
        if wanted <= self.queue.len() {
            return Ok(());
        }
        Err(KVCacheError::OutOfBlocks {
            wanted,
            free: self.queue.len(),
            total: self.num_usable_blocks() as usize,
        })
    }

    /// Takes blocks from the head of the queue for a row, appending them to `taken`.
    #[inline]
    pub(crate) fn take_for_row(&mut self, count: u32, taken: &mut Vec<BlockId>) {
        let start = taken.len();
        for _ in 0..count {
            let block = self.take_head();
            self.row_references[block.index()] = 1;
            taken.push(block);
        }
        self.history.note_all(Effect::Taken, taken[start..].iter().copied());
    }

    /// Notes for the audit that a row holds the block. Off until the first audit.
    #[inline]
    pub(crate) fn mark_seen(&mut self, block: BlockId) {
        if let Some(seen) = self.seen_in_pass.get_mut(block.index()) {
            *seen = self.audit_pass;
        }
    }

    /// A row attaches a block of a hit.
    #[inline]
    pub(crate) fn attach_to_row(&mut self, block: BlockId) {
        self.on_accessed(block);
        if !block.is_null() {
            self.history.note(Effect::Referenced, block);
            if self.ref_cnt(block) == 0 {
                self.queue.remove(block);
            }
            self.row_references[block.index()] += 1;
            self.mark_seen(block);
        }
    }

    /// A row lets go of blocks, in eviction order.
    #[inline]
    pub(crate) fn release_from_row(&mut self, blocks: impl Iterator<Item = BlockId>) {
        self.note_change();
        let mut last_plain = NULL_BLOCK;
        for block in blocks {
            if !block.is_null() {
                self.row_references[block.index()] -= 1;
                self.requeue_if_unused(block, &mut last_plain);
            }
        }
    }

    /// Queues a block that lost its last reference. Unhashed blocks of one call keep their order at
    /// the head, hashed ones at the tail (`manager.md` §2.2); `last_plain` is where the call is.
    #[inline]
    fn requeue_if_unused(&mut self, block: BlockId, last_plain: &mut BlockId) {
        if self.ref_cnt(block) > 0 {
            return;
        }
        if self.prefix.is_cached(block) {
            self.queue.push_back(block);
        } else {
            self.queue.insert_after(*last_plain, block);
            *last_plain = block;
        }
    }

    #[inline]
    fn take_head(&mut self) -> BlockId {
        let block = self.queue.pop_front().expect("I3: the plan counted the free blocks");
        if self.config.enable_caching {
            self.on_evicted(block);
            self.drop_keys(block);
        }
        self.lost_at[block.index()] = self.relative_epoch();
        if let Some(residency) = &mut self.residency {
            residency.on_allocated(block);
        }
        block
    }

    /// Gives a block a key; `drop_keys` came before if it had a shorter one.
    #[inline]
    pub(crate) fn insert_key(
        &mut self,
        block: BlockId,
        key: PrefixKey,
        fingerprint: Option<Fingerprint>,
    ) {
        if !self.prefix.is_cached(block) {
            self.num_blocks_stored += 1;
        }
        self.prefix.insert(block, key, fingerprint);
    }

    /// Takes all keys from a block and records their removal.
    #[inline]
    pub(crate) fn drop_keys(&mut self, block: BlockId) {
        if !self.prefix.is_cached(block) {
            return;
        }
        self.num_blocks_removed += 1;
        let (events, every) = (&mut self.events, self.config.semantics.removal_event);
        self.prefix.remove_all(block, |key, was_last_copy| {
            if was_last_copy || every == RemovalEvent::EveryCopy {
                events.record_removed(&key);
            }
        });
    }

    #[inline]
    fn on_accessed(&mut self, block: BlockId) {
        if let Some(residency) = &mut self.residency {
            residency.on_accessed(block);
        }
    }

    #[inline]
    fn on_evicted(&mut self, block: BlockId) {
        if let Some(residency) = &mut self.residency {
            residency.on_evicted(block);
        }
    }

    /// Checks what must hold of one block by itself.
    ///
    /// # Panics
    /// If something does not.
    pub(crate) fn audit(&self, block: BlockId) {
        let is_free = self.ref_cnt(block) == 0 && block.0 > self.num_withdrawn;
        assert_eq!(self.queue.contains(block), is_free, "I2: block {block} in the free queue");
        let (leased, handed_out) = (self.leased[block.index()], self.handed_out[block.index()]);
        assert!(leased <= handed_out, "I20: block {block}: {leased} of {handed_out}");
        let keys = self.prefix.primary(block).into_iter().chain(self.prefix.aliases(block));
        for key in keys {
            assert!(self.config.enable_caching, "I8: block {block} has a key");
            let covered = key.covered_tokens;
            assert!(
                covered > 0 && covered.is_multiple_of(self.config.hash_block_size),
                "I9: block {block} covers {covered} tokens"
            );
        }
    }

    /// Checks every invariant of the pool; `row_references` is what the rows say.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn validate(&self) {
        self.queue.validate();
        self.prefix.validate();
        let mut held = 0;
        for block in (1..self.config.num_blocks).map(BlockId) {
            held += usize::from(self.ref_cnt(block) > 0);
            self.audit(block);
        }
        assert_eq!(self.ref_cnt(NULL_BLOCK), 0, "I7: the null block has references");
        assert_eq!(
            self.queue.len() + held,
            self.num_usable_blocks() as usize,
            "I3: queued and held blocks"
        );
        let mut events = self.events.iter();
        let only_resets = events.all(|event| matches!(event, KVCacheEvent::AllBlocksCleared));
        assert!(self.config.enable_caching || only_resets, "I8: events");
        assert!((0.0..=1.0).contains(&self.usage()), "I13: usage {}", self.usage());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> BlockPool {
        let config = BlockPoolConfig {
            num_blocks: 4,
            enable_caching: true,
            hash_block_size: 1,
            enable_kv_cache_events: false,
            verify_tokens: false,
            semantics: Semantics::corrected(),
        };
        BlockPool::new(config, None).unwrap()
    }

    /// Epochs of blocks have 32 bits; a pool makes more changes than that.
    #[test]
    fn no_block_looks_unchanged_when_the_epoch_wraps() {
        let block = BlockId(1);
        let mut pool = pool();
        pool.epoch = u64::from(u32::MAX) - 2;
        let before = pool.epoch();
        pool.begin_change();
        pool.mark_lost(block, pool.relative_epoch());
        let after = pool.epoch();
        assert!(pool.changed_since(block, before));
        assert!(!pool.changed_since(block, after));
        assert!(!pool.changed_since(BlockId(2), before));
        for _ in 0..4 {
            pool.begin_change();
            // Of snapshots before the wrap nothing is known any more: stale is safe.
            assert!(pool.changed_since(block, before));
        }
        assert!(pool.epoch() > u64::from(u32::MAX));
        let wrapped = pool.epoch();
        assert!(!pool.changed_since(block, wrapped));
        pool.begin_change();
        pool.mark_lost(block, pool.relative_epoch());
        assert!(pool.changed_since(block, wrapped));
        assert!(!pool.changed_since(BlockId(2), wrapped));
        assert!(pool.was_ever_allocated(BlockId(3)), "unknown counts as yes");
    }
}
