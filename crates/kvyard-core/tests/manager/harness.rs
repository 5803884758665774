//! A manager and its requests by name, with what a scheduler would keep beside them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use kvyard_core::event_log::{EventLog, KVCacheEvent};
use kvyard_core::hashing::{BlockHasher, HashAlgorithm};
use kvyard_core::{
    AllocateSlots, AttentionKind, BlockHash, BlockId, CacheHit, GroupId, KVCacheGroupSpec,
    KVCacheManager, KVCacheManagerConfig, Request, RequestStatus, Result, Semantics,
};

pub(crate) const NUM_BLOCKS: u32 = 12;
pub(crate) const BLOCK_SIZE: u32 = 4;

/// Full attention, block size 4.
pub(crate) fn full(num_blocks: u32) -> KVCacheManagerConfig {
    KVCacheManagerConfig {
        enable_kv_cache_events: true,
        log_stats: true,
        ..KVCacheManagerConfig::new(num_blocks, BLOCK_SIZE, 512)
    }
}

pub(crate) fn of_kind(
    kind: AttentionKind,
    mut config: KVCacheManagerConfig,
) -> KVCacheManagerConfig {
    config.groups = vec![KVCacheGroupSpec::new(kind, config.groups[0].spec.block_size)];
    config
}

/// As vLLM 0.25.1 decides.
pub(crate) fn v251(config: KVCacheManagerConfig) -> KVCacheManagerConfig {
    KVCacheManagerConfig { semantics: Semantics::vllm_0_25_1(), ..config }
}

/// Arguments of `allocate_slots` that most calls leave out.
#[derive(Default)]
pub(crate) struct Options {
    pub(crate) hit: Option<CacheHit>,
    pub(crate) lookahead: u32,
    pub(crate) external: u32,
    pub(crate) delay: bool,
    pub(crate) must_fit: bool,
    pub(crate) reserved: u32,
    pub(crate) nothing_scheduled: bool,
}

pub(crate) struct Harness {
    pub(crate) manager: KVCacheManager,
    pub(crate) requests: BTreeMap<&'static str, Request>,
    hasher: Arc<BlockHasher>,
}

impl Harness {
    pub(crate) fn new(config: KVCacheManagerConfig) -> Self {
        let algorithm = HashAlgorithm::Sha256;
        let root = algorithm.hash_text("0");
        let size = config.hash_block_size;
        let hasher = BlockHasher::new(algorithm, root, size, config.semantics).unwrap();
        Self {
            manager: KVCacheManager::new(config, None).unwrap(),
            requests: BTreeMap::new(),
            hasher: Arc::new(hasher),
        }
    }

    pub(crate) fn add(&mut self, id: &'static str, tokens: impl IntoIterator<Item = u32>) {
        let prompt = tokens.into_iter().collect();
        let hasher = Some(self.hasher.clone());
        let request = Request::new(id, prompt, Arc::default(), hasher);
        self.requests.insert(id, request);
    }

    pub(crate) fn request(&mut self, id: &str) -> &mut Request {
        self.requests.get_mut(id).unwrap()
    }

    pub(crate) fn hashes(&self, id: &str) -> &[BlockHash] {
        self.requests[id].block_hashes()
    }

    pub(crate) fn lookup(&mut self, id: &str) -> CacheHit {
        self.manager.lookup(&self.requests[id].call(true))
    }

    /// The tokens of a hit and its blocks.
    pub(crate) fn hit(&mut self, id: &str) -> (u32, Vec<u32>) {
        let hit = self.lookup(id);
        (hit.num_tokens, numbers(hit.blocks.ids()))
    }

    /// New blocks, or none; the request's counters follow.
    pub(crate) fn try_allocate(
        &mut self,
        id: &str,
        new: u32,
        with: Options,
    ) -> Result<Option<Vec<u32>>> {
        let Options { hit, lookahead, external, delay, must_fit, reserved, nothing_scheduled } =
            with;
        let request = self.requests.get_mut(id).unwrap();
        let call = request.call(true);
        let local = hit.as_ref().map_or(0, |hit| hit.num_tokens);
        let fresh = self.manager.allocate_slots(&AllocateSlots {
            num_new_computed_tokens: local,
            new_computed_blocks: hit.as_ref().map(|hit| &hit.blocks),
            num_lookahead_tokens: lookahead,
            num_external_computed_tokens: external,
            delay_cache_blocks: delay,
            full_sequence_must_fit: must_fit,
            reserved_blocks: reserved,
            has_scheduled_reqs: !nothing_scheduled,
            ..AllocateSlots::new(&call, new)
        })?;
        self.manager.validate();
        if fresh.is_some() {
            request.num_computed_tokens += local + external + new;
            request.status = RequestStatus::Running;
        }
        Ok(fresh.map(|fresh| numbers(fresh.ids())))
    }

    pub(crate) fn allocate_with(&mut self, id: &str, new: u32, with: Options) -> Option<Vec<u32>> {
        self.try_allocate(id, new, with).unwrap()
    }

    pub(crate) fn allocate(&mut self, id: &str, new: u32) -> Option<Vec<u32>> {
        self.allocate_with(id, new, Options::default())
    }

    /// Looks up and allocates the rest; the new blocks.
    pub(crate) fn allocate_all(&mut self, id: &str) -> Vec<u32> {
        let hit = self.lookup(id);
        let rest = count(self.requests[id].num_tokens()) - hit.num_tokens;
        let with = Options { hit: Some(hit), ..Options::default() };
        self.allocate_with(id, rest, with).unwrap()
    }

    /// A new request, allocated whole.
    pub(crate) fn start(&mut self, id: &'static str, tokens: Range<u32>) -> Vec<u32> {
        self.add(id, tokens);
        self.allocate_all(id)
    }

    pub(crate) fn cache(&mut self, id: &str, num_tokens: u32) {
        let call = self.requests[id].call(true);
        self.manager.cache_blocks(&call, None, num_tokens).unwrap();
        self.manager.validate();
    }

    pub(crate) fn free(&mut self, id: &str) {
        self.manager.free(id, None);
        self.manager.validate();
    }

    pub(crate) fn preempt(&mut self, id: &str) {
        self.free(id);
        let request = self.request(id);
        request.num_computed_tokens = 0;
        request.num_preemptions += 1;
        request.status = RequestStatus::Preempted;
    }

    pub(crate) fn row(&self, id: &str) -> Vec<u32> {
        numbers(self.manager.get_blocks(id, None).ids())
    }

    /// The free queue, head first.
    pub(crate) fn order(&self) -> Vec<u32> {
        let pool = self.manager.pool();
        pool.free_blocks_in_order().map(|block| block.0).collect()
    }

    pub(crate) fn num_free(&self) -> usize {
        self.manager.pool().num_free_blocks()
    }

    /// Blocks with a key, by id.
    pub(crate) fn cached(&self) -> Vec<u32> {
        let pool = self.manager.pool();
        let all = 1..pool.num_blocks();
        all.filter(|block| pool.prefix_map().is_cached(BlockId(*block))).collect()
    }

    /// How many leading blocks were offered to the cache.
    pub(crate) fn num_cached(&self, id: &str) -> Option<u32> {
        let row = self.manager.request_row(id)?;
        self.manager.single_type_managers()[0].num_cached_block(row)
    }

    /// The events since the last call, as "stored"/"removed" with the low bytes of the hashes.
    pub(crate) fn take_events(&mut self) -> Vec<(&'static str, Vec<BlockHash>)> {
        let mut log = EventLog::default();
        self.manager.pool_mut().take_events(&mut log);
        let told = |event: KVCacheEvent<'_>| match event {
            KVCacheEvent::BlockStored { block_hashes, group, .. } => {
                assert_eq!(group, GroupId(0));
                ("stored", block_hashes.to_vec())
            }
            KVCacheEvent::BlockRemoved { block_hashes, .. } => ("removed", block_hashes.to_vec()),
            KVCacheEvent::AllBlocksCleared => ("cleared", Vec::new()),
        };
        log.iter().map(told).collect()
    }
}

pub(crate) fn numbers(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|block| block.0).collect()
}

pub(crate) fn count(len: usize) -> u32 {
    u32::try_from(len).unwrap()
}
