//! Pools, requests and the pool's own notation, in one line each.

use std::sync::Arc;

use kvyard_core::caching::{BlockMask, CacheFullBlocks};
use kvyard_core::event_log::{EventLog, KVCacheEvent};
use kvyard_core::hashing::{BlockHasher, HashAlgorithm};
use kvyard_core::{
    BlockId, BlockLease, BlockPool, BlockPoolConfig, GroupId, Request, RequestCall, Result,
    Semantics,
};

pub(crate) const GROUP: GroupId = GroupId(0);

/// Tokens per hash; blocks of three hashes where a test needs boundaries inside them.
pub(crate) const SIZE: u32 = 4;

pub(crate) fn config(num_blocks: u32) -> BlockPoolConfig {
    BlockPoolConfig {
        num_blocks,
        enable_caching: true,
        hash_block_size: SIZE,
        enable_kv_cache_events: true,
        verify_tokens: false,
        semantics: Semantics::vllm_0_25_1(),
    }
}

pub(crate) fn pool(num_blocks: u32) -> BlockPool {
    BlockPool::new(config(num_blocks), None).unwrap()
}

pub(crate) fn request(first_token: u32, num_tokens: u32) -> Request {
    let algorithm = HashAlgorithm::Sha256Cbor;
    let root = algorithm.hash_text("0");
    let hasher = BlockHasher::new(algorithm, root, SIZE, Semantics::vllm_0_25_1()).unwrap();
    let prompt = (first_token..first_token + num_tokens).collect();
    Request::new("r", prompt, Arc::default(), Some(Arc::new(hasher)))
}

/// Every block of a row of the first group, in blocks of one hash; tests change what they are about.
pub(crate) fn whole_row<'a>(call: &'a RequestCall<'a>, row: &'a [BlockId]) -> CacheFullBlocks<'a> {
    CacheFullBlocks {
        request: call,
        row,
        start: 0,
        stop: row.len(),
        block_size: SIZE,
        group: GROUP,
        mask: BlockMask::All,
    }
}

pub(crate) fn cache(
    pool: &mut BlockPool,
    request: &Request,
    row: &[BlockId],
    block_size: u32,
) -> Result<()> {
    let call = request.call(true);
    pool.cache_full_blocks(&CacheFullBlocks { block_size, ..whole_row(&call, row) })
}

/// A boundary inside a block of three hashes.
pub(crate) fn cache_partial(
    pool: &mut BlockPool,
    request: &Request,
    block: BlockId,
    num_tokens: u32,
) {
    let call = request.call(true);
    let key = pool.cache_partial_block(&call, block, num_tokens, GROUP, 3 * SIZE);
    assert_eq!(key.unwrap().unwrap().covered_tokens, num_tokens);
}

pub(crate) fn ids(blocks: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    blocks.into_iter().map(BlockId).collect()
}

pub(crate) fn order(pool: &BlockPool) -> Vec<u32> {
    pool.free_blocks_in_order().map(|block| block.0).collect()
}

pub(crate) fn take(pool: &mut BlockPool, count: usize) -> BlockLease {
    pool.get_new_blocks(count).unwrap()
}

/// A pool whose block 1 is free and cached: `FREE_CACHED`.
pub(crate) fn pool_with_a_free_cached_block() -> (BlockPool, Request) {
    let (mut pool, request) = (pool(4), request(0, 4));
    let lease = take(&mut pool, 1);
    cache(&mut pool, &request, lease.ids(), SIZE).unwrap();
    pool.free(lease).unwrap();
    assert_eq!(order(&pool), [2, 3, 1]);
    clear_events(&mut pool);
    (pool, request)
}

pub(crate) fn clear_events(pool: &mut BlockPool) {
    pool.take_events(&mut EventLog::default());
}

/// Each waiting event as "stored N", "removed N" or "cleared".
pub(crate) fn events(pool: &BlockPool) -> Vec<String> {
    let name = |event: KVCacheEvent<'_>| match event {
        KVCacheEvent::BlockStored { block_hashes, .. } => format!("stored {}", block_hashes.len()),
        KVCacheEvent::BlockRemoved { block_hashes, .. } => {
            format!("removed {}", block_hashes.len())
        }
        KVCacheEvent::AllBlocksCleared => "cleared".into(),
    };
    pool.events().iter().map(name).collect()
}
