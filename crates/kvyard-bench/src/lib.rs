//! Engines of a given size, filled to the brim, for benches, instruction counts and memory checks.
//!
//! Block hashes come from a counter instead of tokens, so that what is measured is the manager.

#![forbid(unsafe_code)]

pub mod events;

use kvyard_core::event_log::EventLog;
use kvyard_core::hashing::ExtraKeySource;
use kvyard_core::request_view::BlockContent;
use kvyard_core::{
    AllocateSlots, BlockHash, BlockPool, BlockPoolConfig, KVCacheManager, KVCacheManagerConfig,
    RequestCall, RequestStatus, RequestView, Semantics,
};

/// Tokens per block.
pub const BLOCK_SIZE: u32 = 16;

/// The pools to compare.
pub const SIZES: [u32; 3] = [4 << 10, 64 << 10, 1 << 20];

/// Blocks of a prompt.
pub const PROMPT_BLOCKS: u32 = 128;

/// Tokens of a prompt.
pub const PROMPT_TOKENS: u32 = PROMPT_BLOCKS * BLOCK_SIZE;

/// Longest request: the decoding one.
const MAX_MODEL_LEN: u32 = 1 << 20;

/// 32 bytes as uniform as a digest: the `SplitMix64` generator, four times.
pub fn digest(number: u64) -> BlockHash {
    let mut bytes = [0; 32];
    let (words, _) = bytes.as_chunks_mut::<8>();
    for (index, word) in words.iter_mut().enumerate() {
        let mut mixed = (number * 4 + index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        *word = (mixed ^ (mixed >> 31)).to_le_bytes();
    }
    BlockHash(bytes)
}

/// A pool of free blocks.
///
/// # Panics
/// If the configuration is refused.
pub fn block_pool(num_blocks: u32) -> BlockPool {
    let config = BlockPoolConfig {
        num_blocks,
        enable_caching: true,
        hash_block_size: BLOCK_SIZE,
        enable_kv_cache_events: false,
        verify_tokens: false,
        semantics: Semantics::corrected(),
    };
    BlockPool::new(config, None).expect("a valid configuration")
}

/// A manager all of whose blocks are cached, and prompts to use it with.
#[derive(Debug)]
pub struct Engine {
    manager: KVCacheManager,
    /// The hashes of each prompt; twice as many prompts as the pool can hold.
    prompts: Vec<Vec<BlockHash>>,
    next_prompt: usize,
    /// The hashes of the request that decodes, and how far it is.
    decoding: Vec<BlockHash>,
    num_decoded: u32,
    /// What every request says while events are on, and nothing else.
    tokens: Vec<u32>,
    keys: ExtraKeySource,
}

fn call<'a>(
    request_id: &'a str,
    hashes: &'a [BlockHash],
    computed: u32,
    tokens: u32,
    content: Option<BlockContent<'a>>,
) -> RequestCall<'a> {
    RequestCall {
        request_id,
        view: RequestView {
            num_tokens: tokens,
            num_prompt_tokens: tokens,
            num_computed_tokens: computed,
            status: RequestStatus::Running,
            ..RequestView::default()
        },
        block_hashes: hashes,
        fingerprints: &[],
        content,
    }
}

fn content<'a>(token_ids: &'a [u32], keys: &'a ExtraKeySource) -> Option<BlockContent<'a>> {
    (!token_ids.is_empty()).then_some(BlockContent { token_ids, first_token: 0, keys })
}

impl Engine {
    /// Every block of the pool carries a key and is free.
    ///
    /// # Panics
    /// If the configuration is refused.
    pub fn new(num_blocks: u32) -> Self {
        Self::with_events(num_blocks, false)
    }

    /// The same, with changes recorded.
    ///
    /// # Panics
    /// If the configuration is refused.
    pub fn with_events(num_blocks: u32, enable_kv_cache_events: bool) -> Self {
        let config = KVCacheManagerConfig {
            track_new_blocks: false,
            enable_kv_cache_events,
            ..KVCacheManagerConfig::new(num_blocks, BLOCK_SIZE, MAX_MODEL_LEN)
        };
        let per_prompt = u64::from(PROMPT_BLOCKS);
        let num_prompts = 2 * (u64::from(num_blocks) / per_prompt);
        let prompt =
            |number: u64| (number * per_prompt..(number + 1) * per_prompt).map(digest).collect();
        let mut engine = Self {
            manager: KVCacheManager::new(config, None).expect("a valid configuration"),
            prompts: (0..num_prompts).map(prompt).collect(),
            next_prompt: 0,
            decoding: (0..4096).map(|block| digest(u64::MAX / 8 + block)).collect(),
            num_decoded: 0,
            tokens: Vec::new(),
            keys: ExtraKeySource::default(),
        };
        if enable_kv_cache_events {
            engine.tokens = events::token_ids(4096 * BLOCK_SIZE as usize);
        }
        let mut log = EventLog::default();
        for _ in 0..=num_prompts / 2 {
            engine.prefill();
            engine.take_events(&mut log);
        }
        engine
    }

    /// The manager.
    pub fn manager(&self) -> &KVCacheManager {
        &self.manager
    }

    /// Exchanges the log of changes for `spare`.
    pub fn take_events(&mut self, spare: &mut EventLog) {
        self.manager.pool_mut().take_events(spare);
    }

    /// A prompt that is not cached comes, is computed whole and goes: as many blocks are evicted as
    /// get keys.
    ///
    /// # Panics
    /// If the blocks do not fit.
    pub fn prefill(&mut self) {
        let hashes = &self.prompts[self.next_prompt % self.prompts.len()];
        self.next_prompt += 1;
        let call = call("prefill", hashes, 0, PROMPT_TOKENS, content(&self.tokens, &self.keys));
        let fresh = self.manager.allocate_slots(&AllocateSlots::new(&call, PROMPT_TOKENS));
        assert!(fresh.is_ok_and(|fresh| fresh.is_some()), "a prompt fits");
        self.manager.free("prefill", None);
    }

    /// A lookup of a prompt that is cached to its last block but one, which holds the last token.
    /// Returns the tokens found. `number` chooses among the younger half of the prompts.
    pub fn lookup_hit(&mut self, number: usize) -> u32 {
        let cached = self.prompts.len() / 4;
        // A stride that visits them in an order the processor cannot foresee.
        let age = 1 + (number * 7919) % cached.max(1);
        let prompt = (self.next_prompt + self.prompts.len() - age) % self.prompts.len();
        let call = call("lookup", &self.prompts[prompt], 0, PROMPT_TOKENS, None);
        self.manager.lookup(&call).num_tokens
    }

    /// A lookup of a prompt of which nothing is cached. Returns the tokens found.
    pub fn lookup_miss(&mut self, number: usize) -> u32 {
        let missing = self.prompts.len() / 4;
        let ahead = number * 7919 % missing.max(1);
        let prompt = (self.next_prompt + ahead) % self.prompts.len();
        let call = call("lookup", &self.prompts[prompt], 0, PROMPT_TOKENS, None);
        self.manager.lookup(&call).num_tokens
    }

    /// One token for the request that decodes. It starts over when it is as long as it can be.
    ///
    /// # Panics
    /// If the block does not fit.
    pub fn decode(&mut self) {
        let computed = self.num_decoded;
        let content = content(&self.tokens, &self.keys);
        let call = call("decode", &self.decoding, computed, computed + 1, content);
        let fresh = self.manager.allocate_slots(&AllocateSlots::new(&call, 1));
        assert!(fresh.is_ok_and(|fresh| fresh.is_some()), "a block fits");
        self.num_decoded += 1;
        if self.num_decoded == self.max_decoded() {
            self.stop_decoding();
        }
    }

    /// The request that decodes goes.
    pub fn stop_decoding(&mut self) {
        self.manager.free("decode", None);
        self.num_decoded = 0;
    }

    /// Tokens of the longest decoding.
    pub fn max_decoded(&self) -> u32 {
        let hashes = u32::try_from(self.decoding.len()).unwrap_or(u32::MAX);
        hashes.min(self.manager.pool().num_blocks() / 2) * BLOCK_SIZE
    }
}
