//! Managers, requests and the specification's own notation, in one line each. Whatever changes a
//! manager here checks all of its invariants afterwards.

use std::sync::Arc;

use kvyard_core::caching::{BlockMask, CacheFullBlocks};
use kvyard_core::event_log::{EventLog, KVCacheEvent};
use kvyard_core::hashing::{BlockHasher, HashAlgorithm};
use kvyard_core::spec::MambaCacheMode;
use kvyard_core::{
    AllocateSlots, AttentionKind, BlockHash, BlockId, CacheHit, GroupId, KVCacheBlocks,
    KVCacheGroupSpec, KVCacheManager, KVCacheManagerConfig, Request, Result, Semantics,
};

/// Ids of the blocks of each group; 0 is the null block.
pub(crate) type Rows = Vec<Vec<u32>>;

/// Where one value holds under both names.
pub(crate) const BOTH: [Semantics; 2] = [VLLM, CORRECTED];
pub(crate) const VLLM: Semantics = Semantics::vllm_0_25_1();
pub(crate) const CORRECTED: Semantics = Semantics::corrected();

pub(crate) const ALL: MambaCacheMode = MambaCacheMode::All;
pub(crate) const ALIGN: MambaCacheMode = MambaCacheMode::Align;

pub(crate) fn full(block_size: u32) -> KVCacheGroupSpec {
    KVCacheGroupSpec::new(AttentionKind::FullAttention, block_size)
}

/// Full attention of another number of heads, which makes it another spec.
pub(crate) fn full_of_layout(block_size: u32, layout: u32) -> KVCacheGroupSpec {
    let mut group = full(block_size);
    group.spec.layout = layout;
    group
}

pub(crate) fn mla(block_size: u32) -> KVCacheGroupSpec {
    KVCacheGroupSpec::new(AttentionKind::MLAAttention, block_size)
}

pub(crate) fn rswa(block_size: u32, rswa_window: u32) -> KVCacheGroupSpec {
    KVCacheGroupSpec::new(AttentionKind::RSWA { rswa_window }, block_size)
}

pub(crate) fn sink(block_size: u32, sink_len: u32) -> KVCacheGroupSpec {
    KVCacheGroupSpec::new(AttentionKind::SinkFullAttention { sink_len }, block_size)
}

pub(crate) fn swa(block_size: u32, sliding_window: u32) -> KVCacheGroupSpec {
    KVCacheGroupSpec::new(AttentionKind::SlidingWindow { sliding_window }, block_size)
}

pub(crate) fn swa_mla(block_size: u32, sliding_window: u32) -> KVCacheGroupSpec {
    KVCacheGroupSpec::new(AttentionKind::SlidingWindowMLA { sliding_window }, block_size)
}

pub(crate) fn chunked(block_size: u32, attention_chunk_size: u32) -> KVCacheGroupSpec {
    let kind = AttentionKind::ChunkedLocalAttention { attention_chunk_size };
    KVCacheGroupSpec::new(kind, block_size)
}

pub(crate) fn mamba(block_size: u32, mode: MambaCacheMode) -> KVCacheGroupSpec {
    mamba_with_drafts(block_size, mode, 0)
}

pub(crate) fn mamba_with_drafts(
    block_size: u32,
    mamba_cache_mode: MambaCacheMode,
    num_speculative_blocks: u32,
) -> KVCacheGroupSpec {
    let kind = AttentionKind::Mamba { mamba_cache_mode, num_speculative_blocks };
    KVCacheGroupSpec::new(kind, block_size)
}

pub(crate) fn cross(block_size: u32) -> KVCacheGroupSpec {
    KVCacheGroupSpec::new(AttentionKind::CrossAttention, block_size)
}

pub(crate) fn eagle(group: KVCacheGroupSpec) -> KVCacheGroupSpec {
    KVCacheGroupSpec { is_eagle_group: true, ..group }
}

/// Block sizes as `manager.md` §3.6 resolves them: hits aligned to the least common multiple, hashes
/// of the greatest common divisor.
pub(crate) fn config(num_blocks: u32, groups: &[KVCacheGroupSpec]) -> KVCacheManagerConfig {
    let sizes = || groups.iter().map(|group| group.spec.block_size);
    KVCacheManagerConfig {
        groups: groups.to_vec(),
        scheduler_block_size: sizes().reduce(|a, b| a / gcd(a, b) * b).unwrap_or(4),
        hash_block_size: sizes().reduce(gcd).unwrap_or(4),
        ..KVCacheManagerConfig::new(num_blocks, 4, 8192)
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The arguments of one `allocate_slots`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ask<'a> {
    pub(crate) new: u32,
    pub(crate) hit: Option<&'a CacheHit>,
    pub(crate) external: u32,
    pub(crate) lookahead: u32,
    pub(crate) encoder: u32,
    pub(crate) delayed: bool,
    pub(crate) full_sequence_must_fit: bool,
    pub(crate) reserved: u32,
}

/// `new` tokens and nothing else.
pub(crate) fn new(new: u32) -> Ask<'static> {
    Ask { new, ..Ask::default() }
}

/// A manager and the hasher of its requests.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) manager: KVCacheManager,
    hasher: Arc<BlockHasher>,
}

impl Engine {
    pub(crate) fn new(config: KVCacheManagerConfig) -> Self {
        let algorithm = HashAlgorithm::Sha256Cbor;
        let root = algorithm.hash_text("0");
        let hasher = BlockHasher::new(algorithm, root, config.hash_block_size, config.semantics);
        let manager = KVCacheManager::new(config, None).unwrap();
        Self { manager, hasher: Arc::new(hasher.unwrap()) }
    }

    pub(crate) fn of(num_blocks: u32, groups: &[KVCacheGroupSpec]) -> Self {
        Self::new(config(num_blocks, groups))
    }

    pub(crate) fn request(&self, name: &str, tokens: impl IntoIterator<Item = u32>) -> Request {
        let prompt = tokens.into_iter().collect();
        Request::new(name, prompt, Arc::default(), Some(self.hasher.clone()))
    }

    // ------------------------------------------------------------------------------------- calls

    pub(crate) fn try_allocate(
        &mut self,
        request: &Request,
        ask: &Ask<'_>,
    ) -> Result<Option<Rows>> {
        let call = request.call(true);
        let found = self.manager.allocate_slots(&slots(&call, ask));
        self.manager.validate();
        Ok(found?.map(|blocks| rows_of(&blocks)))
    }

    /// The new blocks; none if they do not fit.
    pub(crate) fn allocate(&mut self, request: &Request, ask: &Ask<'_>) -> Option<Rows> {
        self.try_allocate(request, ask).unwrap()
    }

    /// How many free blocks the call needs: with all others reserved it is admitted, with one fewer
    /// left it is not. None if it never is. First releases what the call itself would.
    pub(crate) fn predict(&mut self, request: &Request, ask: &Ask<'_>) -> Option<u32> {
        let hit = ask.hit.map_or(0, |hit| hit.num_tokens);
        let total = request.num_computed_tokens + hit + ask.external;
        let total = total - request.num_in_flight_tokens;
        let prompt = u32::try_from(request.num_prompt_tokens()).unwrap();
        let name = request.request_id();
        self.manager.remove_skipped_blocks(name, None, total, Some(prompt)).unwrap();
        let free = self.num_free();
        let call = request.call(true);
        (0..=free).find(|wanted| {
            let ask = Ask { reserved: free - wanted, ..*ask };
            self.manager.plan_allocate_slots(&slots(&call, &ask)).unwrap().is_admitted()
        })
    }

    /// A step that fits: how many blocks it took, and the new blocks. It takes as many as predicted
    /// (P1 of `groups.md` §2.12).
    pub(crate) fn step_with(&mut self, request: &mut Request, ask: &Ask<'_>) -> (u32, Rows) {
        // Before it is refused, a request that is alone gives its look-ahead up, so that no number of
        // reserved blocks tells the prediction.
        let gives_up = self.manager.config().semantics.gate_counts_lookahead && ask.lookahead > 0;
        let predicted = (!gives_up).then(|| self.predict(request, ask).expect("it fits"));
        let before = self.num_free();
        let new = self.allocate(request, ask).expect("it fits");
        let taken = before - self.num_free();
        assert_eq!(taken, predicted.unwrap_or(taken), "P1: predicted is taken");
        request.num_computed_tokens +=
            ask.hit.map_or(0, |hit| hit.num_tokens) + ask.external + ask.new;
        (taken, new)
    }

    pub(crate) fn step(&mut self, request: &mut Request, new_tokens: u32) -> (u32, Rows) {
        self.step_with(request, &new(new_tokens))
    }

    /// Admits a request with all of its tokens in one step; the length of its hit.
    pub(crate) fn admit(&mut self, request: &mut Request) -> u32 {
        let hit = self.manager.lookup(&request.call(true));
        let left = request.view().num_tokens - hit.num_tokens;
        self.step_with(request, &Ask { hit: Some(&hit), ..new(left) });
        hit.num_tokens
    }

    /// A request of these tokens, admitted as a whole.
    pub(crate) fn run(&mut self, name: &str, tokens: impl IntoIterator<Item = u32>) -> Request {
        let mut request = self.request(name, tokens);
        self.admit(&mut request);
        request
    }

    /// The same, and freed again: its tokens are cached.
    pub(crate) fn run_and_free(&mut self, name: &str, tokens: impl IntoIterator<Item = u32>) {
        let request = self.run(name, tokens);
        self.free(request.request_id());
    }

    pub(crate) fn free(&mut self, name: &str) {
        self.manager.free(name, None);
        self.manager.validate();
    }

    /// Caches the given blocks of a request in one group, whatever its rules say, and frees them.
    /// Returns the id of each position of the row up to the last of them.
    pub(crate) fn cache(&mut self, group: usize, request: &Request, blocks: &[usize]) -> Vec<u32> {
        let stop = blocks.iter().max().map_or(0, |last| last + 1);
        let flags: Vec<bool> = (0..stop).map(|at| blocks.contains(&at)).collect();
        let block_size = self.manager.single_type_managers()[group].block_size();
        let pool = self.manager.pool_mut();
        let lease = pool.get_new_blocks(stop).unwrap();
        let ids = lease.ids().iter().map(|block| block.0).collect();
        let call = request.call(true);
        let span = CacheFullBlocks {
            request: &call,
            row: lease.ids(),
            start: 0,
            stop,
            block_size,
            group: GroupId::from_index(group),
            mask: BlockMask::Flags(&flags),
        };
        pool.cache_full_blocks(&span).unwrap();
        pool.free_reversed(lease).unwrap();
        self.manager.validate();
        ids
    }

    // -------------------------------------------------------------------------------------- looks

    /// The hit of a request: its length and the blocks.
    pub(crate) fn lookup(&mut self, request: &Request) -> (u32, Rows) {
        let hit = self.manager.lookup(&request.call(true));
        self.check_hit(&hit, request.view().num_tokens - 1);
        (hit.num_tokens, rows_of(&hit.blocks))
    }

    /// The hit of at most `max_length` tokens.
    pub(crate) fn find(&self, request: &Request, max_length: u32) -> (u32, Rows) {
        let hit = self.manager.find_longest_cache_hit(&request.call(true), max_length);
        self.check_hit(&hit, max_length);
        (hit.num_tokens, rows_of(&hit.blocks))
    }

    /// I16: every group's list is as long as the hit, which is aligned and within the cap.
    pub(crate) fn check_hit(&self, hit: &CacheHit, max_length: u32) {
        let config = self.manager.config();
        assert!(hit.num_tokens <= max_length, "I16: {hit:?}");
        let aligned = hit.num_tokens % config.scheduler_block_size;
        assert_eq!(aligned, 0, "I16: {hit:?}");
        assert_eq!(hit.blocks.num_groups(), config.groups.len());
        for group in 0..config.groups.len() {
            let tokens = hit.blocks.blocks(group).len() * config.block_size(group) as usize;
            assert_eq!(tokens, hit.num_tokens as usize, "I16: group {group} of {hit:?}");
        }
    }

    pub(crate) fn rows(&self, name: &str) -> Rows {
        rows_of(&self.manager.get_blocks(name, None))
    }

    /// The row of the only group.
    pub(crate) fn row(&self, name: &str) -> Vec<u32> {
        let [row] = self.rows(name).try_into().unwrap();
        row
    }

    /// Positions of a row whose blocks have keys.
    pub(crate) fn keyed(&self, name: &str, group: usize) -> Vec<usize> {
        let row = &self.rows(name)[group];
        let has_key = |at: &usize| self.manager.pool().block_key(BlockId(row[*at])).is_some();
        (0..row.len()).filter(has_key).collect()
    }

    /// How many leading positions of a row were offered to the prefix cache.
    pub(crate) fn num_cached(&self, name: &str, group: usize) -> Option<u32> {
        let row = self.manager.request_row(name)?;
        self.manager.single_type_managers()[group].num_cached_block(row)
    }

    /// The free queue from its head.
    pub(crate) fn order(&self) -> Vec<u32> {
        let pool = self.manager.pool();
        pool.free_blocks_in_order().map(|block| block.0).collect()
    }

    pub(crate) fn num_free(&self) -> u32 {
        u32::try_from(self.manager.pool().num_free_blocks()).unwrap()
    }

    pub(crate) fn ref_cnt(&self, block: u32) -> u32 {
        self.manager.pool().ref_cnt(BlockId(block))
    }

    /// What happened since the last call.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        let mut log = EventLog::default();
        self.manager.pool_mut().take_events(&mut log);
        log.iter().map(Event::from).collect()
    }
}

fn slots<'a>(call: &'a kvyard_core::RequestCall<'a>, ask: &Ask<'a>) -> AllocateSlots<'a> {
    AllocateSlots {
        num_new_computed_tokens: ask.hit.map_or(0, |hit| hit.num_tokens),
        new_computed_blocks: ask.hit.map(|hit| &hit.blocks),
        num_external_computed_tokens: ask.external,
        num_lookahead_tokens: ask.lookahead,
        num_encoder_tokens: ask.encoder,
        delay_cache_blocks: ask.delayed,
        full_sequence_must_fit: ask.full_sequence_must_fit,
        reserved_blocks: ask.reserved,
        ..AllocateSlots::new(call, ask.new)
    }
}

pub(crate) fn rows_of(blocks: &KVCacheBlocks) -> Rows {
    let ids = |group| blocks.blocks(group).iter().map(|block| block.0).collect();
    (0..blocks.num_groups()).map(ids).collect()
}

/// Blocks of a row that are not null.
pub(crate) fn live(row: &[u32]) -> usize {
    row.iter().filter(|block| **block != 0).count()
}

/// A hit as the specification writes it: `N` for null, `bK` for the block of position K among `ids`.
pub(crate) fn logical(row: &[u32], ids: &[u32]) -> String {
    let name = |block: &u32| match ids.iter().position(|id| id == block) {
        _ if *block == 0 => "N".to_owned(),
        Some(position) => format!("b{position}"),
        None => format!("?{block}"),
    };
    row.iter().map(name).collect::<Vec<_>>().join(" ")
}

/// A recorded change of the prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Stored {
        group: u32,
        hashes: Vec<BlockHash>,
        parent: Option<BlockHash>,
        tokens: Vec<u32>,
        block_size: u32,
    },
    Removed {
        group: u32,
        hash: BlockHash,
    },
    Cleared,
}

impl From<KVCacheEvent<'_>> for Event {
    fn from(event: KVCacheEvent<'_>) -> Self {
        match event {
            KVCacheEvent::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                group,
                ..
            } => Self::Stored {
                group: group.0,
                hashes: block_hashes.to_vec(),
                parent: parent_block_hash.copied(),
                tokens: token_ids.to_vec(),
                block_size,
            },
            KVCacheEvent::BlockRemoved { block_hashes, group } => {
                let [hash] = block_hashes.try_into().unwrap();
                Self::Removed { group: group.0, hash }
            }
            KVCacheEvent::AllBlocksCleared => Self::Cleared,
        }
    }
}
