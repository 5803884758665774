//! The block pool by itself: transitions (`manager.md` §1.3), duplicates (§4.1), keys (§4.3 to §4.5),
//! and what misuse gets (§10, *Strict*).

use std::sync::Arc;

use kvyard_core::blocks::GroupEnds;
use kvyard_core::caching::{BlockMask, CacheFullBlocks};
use kvyard_core::event_log::{EventLog, KVCacheEvent};
use kvyard_core::hashing::{BlockHasher, HashAlgorithm};
use kvyard_core::stats::{ResidencyMetrics, ResidencySample};
use kvyard_core::{
    BlockId, BlockLease, BlockPool, BlockPoolConfig, GroupId, KVCacheError, NULL_BLOCK, Request,
    Semantics,
};

const GROUP: GroupId = GroupId(0);

/// Tokens per hash; blocks of three hashes where a test needs boundaries inside them.
const SIZE: u32 = 4;

fn config(num_blocks: u32) -> BlockPoolConfig {
    BlockPoolConfig {
        num_blocks,
        enable_caching: true,
        hash_block_size: SIZE,
        enable_kv_cache_events: true,
        verify_tokens: false,
        semantics: Semantics::vllm_0_25_1(),
    }
}

fn pool(num_blocks: u32) -> BlockPool {
    BlockPool::new(config(num_blocks), None).unwrap()
}

fn request(first_token: u32, num_tokens: u32) -> Request {
    let algorithm = HashAlgorithm::Sha256Cbor;
    let root = algorithm.hash_text("0");
    let hasher = BlockHasher::new(algorithm, root, SIZE, Semantics::vllm_0_25_1()).unwrap();
    let prompt = (first_token..first_token + num_tokens).collect();
    Request::new("r", prompt, Arc::default(), Some(Arc::new(hasher)))
}

fn cache(
    pool: &mut BlockPool,
    request: &Request,
    row: &[BlockId],
    block_size: u32,
) -> Result<(), KVCacheError> {
    let call = request.call(true);
    pool.cache_full_blocks(&CacheFullBlocks {
        request: &call,
        row,
        start: 0,
        stop: row.len(),
        block_size,
        group: GROUP,
        mask: BlockMask::All,
    })
}

/// A boundary inside a block of three hashes.
fn cache_partial(pool: &mut BlockPool, request: &Request, block: BlockId, num_tokens: u32) {
    let call = request.call(true);
    let key = pool.cache_partial_block(&call, block, num_tokens, GROUP, 3 * SIZE);
    assert_eq!(key.unwrap().unwrap().covered_tokens, num_tokens);
}

fn ids(blocks: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    blocks.into_iter().map(BlockId).collect()
}

fn order(pool: &BlockPool) -> Vec<u32> {
    pool.free_blocks_in_order().map(|block| block.0).collect()
}

/// Blocks held by id.
fn dissolved(pool: &mut BlockPool, count: usize) -> Vec<BlockId> {
    let lease = take(pool, count);
    pool.dissolve(lease).unwrap()
}

fn take(pool: &mut BlockPool, count: usize) -> BlockLease {
    pool.get_new_blocks(count).unwrap()
}

/// A pool whose block 1 is free and cached: `FREE_CACHED`.
fn pool_with_a_free_cached_block() -> (BlockPool, Request) {
    let (mut pool, request) = (pool(4), request(0, 4));
    let lease = take(&mut pool, 1);
    cache(&mut pool, &request, lease.ids(), SIZE).unwrap();
    pool.free(lease).unwrap();
    assert_eq!(order(&pool), [2, 3, 1]);
    clear_events(&mut pool);
    (pool, request)
}

fn clear_events(pool: &mut BlockPool) {
    pool.take_events(&mut EventLog::default());
}

/// Each waiting event as "stored N", "removed N" or "cleared".
fn events(pool: &BlockPool) -> Vec<String> {
    let name = |event: KVCacheEvent<'_>| match event {
        KVCacheEvent::BlockStored { block_hashes, .. } => format!("stored {}", block_hashes.len()),
        KVCacheEvent::BlockRemoved { block_hashes, .. } => {
            format!("removed {}", block_hashes.len())
        }
        KVCacheEvent::AllBlocksCleared => "cleared".into(),
    };
    pool.events().iter().map(name).collect()
}

/// What a block is, in the words of §1.2.
fn state(pool: &BlockPool, block: u32) -> (&'static str, u32) {
    let block = BlockId(block);
    let references = pool.ref_cnt(block);
    let queued = pool.free_blocks_in_order().any(|free| free == block);
    assert_eq!(queued, references == 0, "I2");
    let name = match (queued, pool.block_key(block).is_some()) {
        (true, false) => "FREE_PLAIN",
        (true, true) => "FREE_CACHED",
        (false, false) => "HELD_PLAIN",
        (false, true) => "HELD_CACHED",
    };
    (name, references)
}

// ---------------------------------------------------------------------------------- transitions (§1.3)

#[test]
fn t1_a_plain_block_is_taken_from_the_head() {
    let mut pool = pool(4);
    assert_eq!(state(&pool, 1), ("FREE_PLAIN", 0));
    let lease = take(&mut pool, 1);
    assert_eq!(lease.ids(), ids([1]));
    assert_eq!(state(&pool, 1), ("HELD_PLAIN", 1));
    assert_eq!(order(&pool), [2, 3]);
    assert!(events(&pool).is_empty());
    pool.validate();
}

#[test]
fn t2_a_cached_block_loses_its_keys_when_it_is_taken() {
    let (mut pool, request) = pool_with_a_free_cached_block();
    let lease = take(&mut pool, 3);
    assert_eq!(lease.ids(), ids([2, 3, 1]));
    assert_eq!(state(&pool, 1), ("HELD_PLAIN", 1));
    assert_eq!(pool.prefix_map().get(&request.block_hashes()[0], GROUP), None);
    assert_eq!(events(&pool), ["removed 1"]);
    assert_eq!(pool.num_blocks_removed(), 1);
}

#[test]
fn t3_a_hit_takes_a_cached_block_out_of_the_middle() {
    let (mut pool, _) = pool_with_a_free_cached_block();
    let lease = take(&mut pool, 2);
    pool.free(lease).unwrap();
    let lease = pool.touch(&ids([1])).unwrap();
    assert_eq!(state(&pool, 1), ("HELD_CACHED", 1));
    assert_eq!(order(&pool), [2, 3]);
    assert!(events(&pool).is_empty());
    pool.free(lease).unwrap();
}

#[test]
fn t4_and_t8_a_block_in_use_is_shared_and_released() {
    let mut pool = pool(4);
    let first = take(&mut pool, 1);
    let second = pool.touch(first.ids()).unwrap();
    assert_eq!(state(&pool, 1), ("HELD_PLAIN", 2));
    pool.free(first).unwrap();
    assert_eq!(state(&pool, 1), ("HELD_PLAIN", 1));
    assert_eq!(order(&pool), [2, 3]);
    pool.free(second).unwrap();
    assert_eq!(order(&pool), [1, 2, 3]);
}

#[test]
fn t5_a_held_block_gets_a_key() {
    let (mut pool, request) = (pool(4), request(0, 8));
    let lease = take(&mut pool, 2);
    cache(&mut pool, &request, lease.ids(), SIZE).unwrap();
    assert_eq!(state(&pool, 2), ("HELD_CACHED", 1));
    let key = pool.block_key(BlockId(2)).unwrap();
    assert_eq!((key.hash, key.covered_tokens), (request.block_hashes()[1], 8));
    assert_eq!(events(&pool), ["stored 2"]);
    assert_eq!(pool.num_blocks_stored(), 2);
}

#[test]
fn t6_a_longer_key_replaces_the_shorter_ones() {
    let (mut pool, request) = (pool(4), request(0, 12));
    let lease = take(&mut pool, 1);
    cache_partial(&mut pool, &request, BlockId(1), 8);
    cache_partial(&mut pool, &request, BlockId(1), 4);
    clear_events(&mut pool);
    cache(&mut pool, &request, lease.ids(), 3 * SIZE).unwrap();
    // Both old keys go before the new one comes.
    assert_eq!(events(&pool), ["removed 1", "removed 1", "stored 1"]);
    assert_eq!(pool.block_key(BlockId(1)).unwrap().covered_tokens, 12);
    assert_eq!(pool.prefix_map().num_keys(), 1);
    pool.validate();
}

#[test]
fn t6_a_longer_partial_key_replaces_a_shorter_one() {
    let (mut pool, request) = (pool(4), request(0, 12));
    let _lease = take(&mut pool, 1);
    cache_partial(&mut pool, &request, BlockId(1), 4);
    cache_partial(&mut pool, &request, BlockId(1), 8);
    assert_eq!(events(&pool), ["stored 1", "removed 1", "stored 1"]);
    assert_eq!(pool.prefix_map().num_keys_of(BlockId(1)), 1);
}

#[test]
fn t7_a_shorter_boundary_becomes_an_alias() {
    let (mut pool, request) = (pool(4), request(0, 12));
    let lease = take(&mut pool, 1);
    cache(&mut pool, &request, lease.ids(), 3 * SIZE).unwrap();
    cache_partial(&mut pool, &request, BlockId(1), 8);
    assert_eq!(pool.block_key(BlockId(1)).unwrap().covered_tokens, 12);
    assert_eq!(pool.prefix_map().num_aliases(), 1);
    for hash in &request.block_hashes()[1..] {
        assert_eq!(pool.prefix_map().get(hash, GROUP), Some(BlockId(1)));
    }
    // Repeats say nothing.
    cache_partial(&mut pool, &request, BlockId(1), 8);
    assert_eq!(events(&pool), ["stored 1", "stored 1"]);
    pool.validate();
    // All keys go together, the primary first.
    pool.evict_blocks(&ids([1])).unwrap();
    assert_eq!(pool.prefix_map().num_keys(), 0);
    let removed: Vec<_> = pool.events().iter().skip(2).collect();
    let KVCacheEvent::BlockRemoved { block_hashes, .. } = removed[0] else {
        panic!("{removed:?}");
    };
    assert_eq!((removed.len(), block_hashes[0]), (2, request.block_hashes()[2]));
    pool.validate();
}

#[test]
fn t9_and_t10_plain_blocks_go_to_the_head_and_cached_ones_to_the_tail() {
    let (mut pool, request) = (pool(7), request(0, 8));
    let lease = take(&mut pool, 4);
    cache(&mut pool, &request, &lease.ids()[..2], SIZE).unwrap();
    let mut blocks = pool.dissolve(lease).unwrap();
    blocks.reverse();
    pool.free_counted(&blocks).unwrap();
    // Supplied 4 3 2 1: the plain run keeps its order at the head, the cached one at the tail.
    assert_eq!(order(&pool), [4, 3, 5, 6, 2, 1]);
    assert_eq!(state(&pool, 4), ("FREE_PLAIN", 0));
    assert_eq!(state(&pool, 1), ("FREE_CACHED", 0));
}

#[test]
fn t11_an_evicted_block_keeps_its_place() {
    let (mut pool, _) = pool_with_a_free_cached_block();
    let lease = take(&mut pool, 1);
    pool.free(lease).unwrap();
    let before = order(&pool);
    pool.evict_blocks(&ids([1])).unwrap();
    assert_eq!(state(&pool, 1), ("FREE_PLAIN", 0));
    assert_eq!(order(&pool), before);
    assert_eq!(events(&pool), ["removed 1"]);
}

#[test]
fn t12_an_evicted_block_stays_held() {
    let (mut pool, request) = (pool(4), request(0, 4));
    let lease = take(&mut pool, 1);
    cache(&mut pool, &request, lease.ids(), SIZE).unwrap();
    pool.evict_blocks(lease.ids()).unwrap();
    assert_eq!(state(&pool, 1), ("HELD_PLAIN", 1));
    assert_eq!(events(&pool), ["stored 1", "removed 1"]);
    // Nothing is left to evict, and the null block never has anything.
    pool.evict_blocks(&ids([0, 1])).unwrap();
    assert_eq!(events(&pool).len(), 2);
}

#[test]
fn t13_a_reset_clears_every_key_and_leaves_the_order() {
    let (mut pool, _) = pool_with_a_free_cached_block();
    assert!(pool.reset_prefix_cache().unwrap());
    assert_eq!(state(&pool, 1), ("FREE_PLAIN", 0));
    assert_eq!(order(&pool), [2, 3, 1]);
    assert_eq!(pool.prefix_map().num_keys(), 0);
    // One event for all; resets do not count as removals.
    assert_eq!(events(&pool), ["cleared"]);
    assert_eq!(pool.num_blocks_removed(), 0);
}

// ------------------------------------------------------------------------------------ duplicates (§4.1)

fn pool_with_duplicates(semantics: Semantics) -> (BlockPool, Request, BlockLease) {
    let config = BlockPoolConfig { semantics, ..config(6) };
    let (mut pool, request) = (BlockPool::new(config, None).unwrap(), request(0, 8));
    let lease = take(&mut pool, 4);
    cache(&mut pool, &request, &ids([1, 2]), SIZE).unwrap();
    cache(&mut pool, &request, &ids([3, 4]), SIZE).unwrap();
    (pool, request, lease)
}

fn copies(pool: &BlockPool, request: &Request, position: usize) -> Vec<u32> {
    let hash = &request.block_hashes()[position];
    pool.prefix_map().copies(hash, GROUP).map(|block| block.0).collect()
}

#[test]
fn the_earliest_surviving_copy_is_found() {
    let (mut pool, request, _lease) = pool_with_duplicates(Semantics::vllm_0_25_1());
    assert_eq!(copies(&pool, &request, 0), [1, 3]);
    assert_eq!(copies(&pool, &request, 1), [2, 4]);
    assert_eq!(pool.prefix_map().num_keys(), 2);
    pool.evict_blocks(&ids([1])).unwrap();
    assert_eq!(copies(&pool, &request, 0), [3]);
    // A hit may mix copies.
    let mut found = Vec::new();
    for hash in request.block_hashes() {
        assert!(pool.get_cached_block(hash.into(), &[GROUP], &mut found));
    }
    assert_eq!(found, ids([3, 2]));
    // One removal, though copy 3 still serves the hash.
    assert_eq!(events(&pool), ["stored 2", "stored 2", "removed 1"]);
    pool.validate();
}

#[test]
fn corrected_a_removal_is_told_when_the_last_copy_goes() {
    let (mut pool, request, _lease) = pool_with_duplicates(Semantics::corrected());
    pool.evict_blocks(&ids([1])).unwrap();
    assert_eq!(events(&pool), ["stored 2", "stored 2"]);
    pool.evict_blocks(&ids([3])).unwrap();
    assert_eq!(events(&pool), ["stored 2", "stored 2", "removed 1"]);
    assert!(copies(&pool, &request, 0).is_empty());
}

#[test]
fn a_hash_is_found_only_if_every_group_has_it() {
    let (mut pool, request) = pool_with_a_free_cached_block();
    let hash = &request.block_hashes()[0];
    let mut found = ids([9]);
    assert!(!pool.get_cached_block(hash.into(), &[GROUP, GroupId(1)], &mut found));
    assert_eq!(found, ids([9]), "nothing is appended on a miss");
    let lease = take(&mut pool, 1);
    let call = request.call(true);
    pool.cache_full_blocks(&CacheFullBlocks {
        request: &call,
        row: lease.ids(),
        start: 0,
        stop: 1,
        block_size: SIZE,
        group: GroupId(1),
        mask: BlockMask::All,
    })
    .unwrap();
    assert!(pool.get_cached_block(hash.into(), &[GroupId(1), GROUP], &mut found));
    assert_eq!(found, ids([9, 2, 1]));
}

// ---------------------------------------------------------------------------------------- keys (§4.3)

#[test]
fn null_and_masked_positions_get_no_key() {
    let (mut pool, request) = (pool(6), request(0, 16));
    let _lease = take(&mut pool, 3);
    let call = request.call(true);
    pool.cache_full_blocks(&CacheFullBlocks {
        request: &call,
        row: &ids([1, 0, 2, 3]),
        start: 0,
        stop: 4,
        block_size: SIZE,
        group: GROUP,
        mask: BlockMask::Flags(&[true, true, false, true]),
    })
    .unwrap();
    let cached: Vec<bool> =
        (0..4).map(|block| pool.prefix_map().is_cached(BlockId(block))).collect();
    assert_eq!(cached, [false, true, false, true]);
    // vLLM 0.25.1 announces the tokens of the whole span (§8.2).
    let event = pool.events().iter().next().unwrap();
    let KVCacheEvent::BlockStored { block_hashes, token_ids, .. } = event else {
        panic!("{event:?}");
    };
    assert_eq!((block_hashes.len(), token_ids.len()), (2, 16));
}

#[test]
fn corrected_each_run_is_told_with_its_own_tokens() {
    let semantics = Semantics::corrected();
    let config = BlockPoolConfig { semantics, ..config(8) };
    let (mut pool, request) = (BlockPool::new(config, None).unwrap(), request(0, 24));
    let _lease = take(&mut pool, 5);
    let call = request.call(true);
    pool.cache_full_blocks(&CacheFullBlocks {
        request: &call,
        row: &ids([1, 2, 0, 3, 4, 5]),
        start: 0,
        stop: 6,
        block_size: SIZE,
        group: GROUP,
        mask: BlockMask::Flags(&[true, true, true, true, false, true]),
    })
    .unwrap();
    let told: Vec<_> = pool
        .events()
        .iter()
        .map(|event| match event {
            KVCacheEvent::BlockStored { block_hashes, parent_block_hash, token_ids, .. } => {
                (block_hashes.len(), parent_block_hash, token_ids[0], token_ids.len())
            }
            other => panic!("{other:?}"),
        })
        .collect();
    let hashes = request.block_hashes();
    // The parent is the nearest ancestor that was announced.
    assert_eq!(told, [(2, None, 0, 8), (1, Some(&hashes[1]), 12, 4), (1, Some(&hashes[3]), 20, 4)]);
}

#[test]
fn a_dropped_short_key_can_come_back_as_an_alias() {
    let (mut pool, request) = (pool(4), request(0, 12));
    let lease = take(&mut pool, 1);
    cache_partial(&mut pool, &request, BlockId(1), 4);
    cache(&mut pool, &request, lease.ids(), 3 * SIZE).unwrap();
    assert_eq!(pool.prefix_map().get(&request.block_hashes()[0], GROUP), None);
    cache_partial(&mut pool, &request, BlockId(1), 4);
    assert_eq!(pool.prefix_map().get(&request.block_hashes()[0], GROUP), Some(BlockId(1)));
    assert_eq!(pool.block_key(BlockId(1)).unwrap().covered_tokens, 12);
}

#[test]
fn a_partial_entry_is_told_with_its_last_hash_block() {
    let (mut pool, request) = (pool(4), request(0, 12));
    let _lease = take(&mut pool, 1);
    cache_partial(&mut pool, &request, BlockId(1), 8);
    let event = pool.events().iter().next().unwrap();
    let KVCacheEvent::BlockStored {
        block_hashes, parent_block_hash, token_ids, block_size, ..
    } = event
    else {
        panic!("{event:?}");
    };
    let hashes = request.block_hashes();
    assert_eq!((block_hashes, parent_block_hash), (&hashes[1..2], Some(&hashes[0])));
    assert_eq!((token_ids, block_size), (&[4, 5, 6, 7][..], 4));
}

/// C17: the parent is an announced ancestor, and the tokens start behind it.
#[test]
fn corrected_a_partial_entry_continues_what_was_announced() {
    let semantics = Semantics::corrected();
    let config = BlockPoolConfig { semantics, ..config(4) };
    let (mut pool, request) = (BlockPool::new(config, None).unwrap(), request(0, 24));
    let lease = take(&mut pool, 2);
    cache(&mut pool, &request, &lease.ids()[..1], 3 * SIZE).unwrap();
    cache_partial(&mut pool, &request, BlockId(2), 20);
    let event = pool.events().iter().nth(1).unwrap();
    let KVCacheEvent::BlockStored { parent_block_hash, token_ids, block_size, .. } = event else {
        panic!("{event:?}");
    };
    // Tokens 12 to 19 after the full block; hash 3 (tokens 12 to 15) was never announced.
    assert_eq!(parent_block_hash, Some(&request.block_hashes()[2]));
    assert_eq!((token_ids.first(), token_ids.len(), block_size), (Some(&12), 8, 8));
}

// ------------------------------------------------------------------------------- misuse (§10, *Strict*)

/// The call must fail and leave the pool as it was.
fn refused<T: std::fmt::Debug>(
    pool: &mut BlockPool,
    call: impl FnOnce(&mut BlockPool) -> Result<T, KVCacheError>,
) -> KVCacheError {
    let before = pool.state_digest();
    let error = call(pool).unwrap_err();
    assert_eq!(pool.state_digest(), before, "{error} changed the state");
    pool.validate();
    error
}

#[test]
fn row_1_a_pool_needs_blocks() {
    let none = BlockPoolConfig { num_blocks: 0, ..config(1) };
    let error = BlockPool::new(none, None).unwrap_err();
    assert!(matches!(error, KVCacheError::Config { field: "num_blocks", .. }), "{error}");
    // One is legal: the null block, and nothing to use.
    let mut pool = pool(1);
    assert_eq!((pool.num_free_blocks(), pool.usage()), (0, 0.0));
    assert!(take(&mut pool, 0).ids().is_empty());
    refused(&mut pool, |pool| pool.get_new_blocks(1));
}

#[test]
fn row_10_a_group_id_must_fit() {
    let (mut pool, request) = (pool(4), request(0, 4));
    let lease = take(&mut pool, 1);
    let call = request.call(true);
    let error = refused(&mut pool, |pool| {
        pool.cache_full_blocks(&CacheFullBlocks {
            request: &call,
            row: lease.ids(),
            start: 0,
            stop: 1,
            block_size: SIZE,
            group: GroupId(u32::MAX),
            mask: BlockMask::All,
        })
    });
    assert!(matches!(error, KVCacheError::InvalidArgument { .. }), "{error}");
}

/// C02 a: a negative count cannot be said here; one too many takes nothing.
#[test]
fn row_11_more_blocks_than_there_are() {
    let mut pool = pool(11);
    let error = refused(&mut pool, |pool| pool.get_new_blocks(11));
    let expected = KVCacheError::OutOfBlocks { wanted: 11, free: 10, total: 10 };
    assert_eq!(error, expected);
    assert_eq!((pool.num_free_blocks(), pool.usage()), (10, 0.0));
}

/// C02 b.
#[test]
fn row_15_and_16_a_double_free_is_refused_whole() {
    let mut pool = pool(6);
    let blocks = dissolved(&mut pool, 2);
    let twice = [blocks[0], blocks[0]];
    let error = refused(&mut pool, |pool| pool.free_counted(&twice));
    let expected = KVCacheError::DoubleFree {
        block: blocks[0],
        times: 2,
        handed_out: 1,
        owner: String::new(),
    };
    assert_eq!(error, expected);
    pool.free_counted(&blocks[..1]).unwrap();
    let error = refused(&mut pool, |pool| pool.free_counted(&blocks[..1]));
    assert!(matches!(error, KVCacheError::DoubleFree { handed_out: 0, .. }), "{error}");
    assert_eq!(order(&pool), [1, 3, 4, 5]);
    assert_eq!(take(&mut pool, 4).ids(), ids([1, 3, 4, 5]));
}

/// C02 b, second half: with two references both go.
#[test]
fn a_block_handed_out_twice_may_be_freed_twice() {
    let mut pool = pool(6);
    let blocks = dissolved(&mut pool, 2);
    let touched = pool.touch(&blocks[..1]).unwrap();
    pool.dissolve(touched).unwrap();
    assert_eq!(pool.ref_cnt(blocks[0]), 2);
    pool.free_counted(&[blocks[0], blocks[0]]).unwrap();
    assert_eq!((pool.ref_cnt(blocks[0]), pool.num_free_blocks()), (0, 4));
    assert_eq!(order(&pool), [1, 3, 4, 5]);
    pool.validate();
}

#[test]
fn row_17_a_block_that_was_never_allocated_is_nobody_s() {
    let mut pool = pool(4);
    let error = refused(&mut pool, |pool| pool.free_counted(&ids([2])));
    assert!(matches!(error, KVCacheError::NotOwned { block: BlockId(2), .. }), "{error}");
}

#[test]
fn row_19_the_null_block_has_no_references() {
    let mut pool = pool(4);
    let lease = pool.touch(&[NULL_BLOCK, NULL_BLOCK]).unwrap();
    assert_eq!(pool.ref_cnt(NULL_BLOCK), 0);
    pool.free(lease).unwrap();
    pool.free_counted(&[NULL_BLOCK]).unwrap();
    assert_eq!((pool.ref_cnt(NULL_BLOCK), pool.num_free_blocks()), (0, 3));
    pool.validate();
}

#[test]
fn row_20_a_free_plain_block_cannot_be_touched() {
    let (mut pool, _) = pool_with_a_free_cached_block();
    // Neither alone nor behind one that can.
    for blocks in [ids([2]), ids([1, 2])] {
        let error = refused(&mut pool, |pool| pool.touch(&blocks));
        assert!(matches!(error, KVCacheError::StaleBlock { block: BlockId(2), .. }), "{error}");
    }
}

#[test]
fn row_22_and_51_a_lease_belongs_to_its_pool_and_comes_back_whole() {
    let (mut mine, mut theirs) = (pool(4), pool(4));
    let lease = take(&mut theirs, 2);
    let _mine = take(&mut mine, 2);
    let before = mine.state_digest();
    let (error, lease) = mine.free(lease).unwrap_err();
    let expected = KVCacheError::ForeignBlock {
        what: "the lease of 2 blocks".into(),
        found: theirs.id(),
        expected: mine.id(),
    };
    assert_eq!((error, mine.state_digest()), (expected, before));
    theirs.free(lease).unwrap();
    assert_eq!(theirs.num_free_blocks(), 3);
}

/// What a lease holds is not freed by id, however many others hold the block by id.
#[test]
fn row_51_ids_do_not_take_what_a_lease_holds() {
    let mut pool = pool(4);
    let lease = take(&mut pool, 2);
    let error = refused(&mut pool, |pool| pool.free_counted(&lease.ids()[..1]));
    assert!(matches!(error, KVCacheError::NotOwned { block: BlockId(1), .. }), "{error}");
    let touched = pool.touch(&ids([1])).unwrap();
    let touched = pool.dissolve(touched).unwrap();
    pool.free_counted(&touched).unwrap();
    let error = refused(&mut pool, |pool| pool.free_counted(&touched));
    assert!(matches!(error, KVCacheError::NotOwned { block: BlockId(1), .. }), "{error}");
    assert_eq!((pool.ref_cnt(BlockId(1)), pool.num_free_blocks()), (1, 1));
    pool.free(lease).unwrap();
    pool.validate();
}

/// The reverse of dissolving; what went back by id in between is not there to lease.
#[test]
fn counted_references_become_a_lease_again() {
    let mut pool = pool(5);
    let blocks = dissolved(&mut pool, 2);
    let ends = GroupEnds::from_slice(&[2]);
    let lease = pool.lease_counted(blocks.clone(), ends.clone(), Some("A".into())).unwrap();
    assert_eq!((lease.ids(), lease.request()), (&blocks[..], Some("A")));
    let error = refused(&mut pool, |pool| pool.free_counted(&blocks));
    assert!(matches!(error, KVCacheError::NotOwned { .. }), "{error}");
    let blocks = pool.dissolve(lease).unwrap();
    pool.free_counted(&blocks[1..]).unwrap();
    let error = refused(&mut pool, |pool| pool.lease_counted(blocks.clone(), ends, None));
    assert!(matches!(error, KVCacheError::DoubleFree { block: BlockId(2), .. }), "{error}");
    pool.free_counted(&blocks[..1]).unwrap();
    assert_eq!(pool.num_free_blocks(), 4);
}

#[test]
fn row_36_and_37_hashes_and_row_must_reach() {
    let (mut pool, request) = (pool(4), request(0, 7));
    let lease = take(&mut pool, 2);
    let error = refused(&mut pool, |pool| cache(pool, &request, lease.ids(), SIZE));
    assert!(
        matches!(error, KVCacheError::InvalidArgument { argument: "block_hashes", .. }),
        "{error}"
    );
    let call = request.call(true);
    let error = refused(&mut pool, |pool| {
        pool.cache_full_blocks(&CacheFullBlocks {
            request: &call,
            row: &[],
            start: 0,
            stop: 1,
            block_size: SIZE,
            group: GROUP,
            mask: BlockMask::All,
        })
    });
    assert!(
        matches!(error, KVCacheError::InvalidArgument { argument: "num_full_blocks", .. }),
        "{error}"
    );
}

#[test]
fn row_38_a_full_block_keeps_its_key() {
    let (mut pool, request) = (pool(4), request(0, 8));
    let lease = take(&mut pool, 2);
    cache(&mut pool, &request, &lease.ids()[..1], SIZE).unwrap();
    // The second block of the list could be cached, but nothing is.
    let rows = [ids([1]), ids([1, 2])];
    for row in rows {
        let error = refused(&mut pool, |pool| cache(pool, &request, &row, SIZE));
        let expected =
            KVCacheError::HashConflict { block: BlockId(1), group: GROUP, covered: 4, wanted: 4 };
        assert_eq!(error, expected);
    }
}

/// One block would get two keys, of which the second undoes the first.
#[test]
fn a_row_names_a_block_once() {
    let (mut pool, request) = (pool(4), request(0, 8));
    let _lease = take(&mut pool, 1);
    let error = refused(&mut pool, |pool| cache(pool, &request, &ids([1, 1]), SIZE));
    assert!(matches!(error, KVCacheError::InvalidArgument { argument: "blocks", .. }), "{error}");
}

#[test]
fn row_39_a_block_that_nobody_holds_cannot_be_cached() {
    let (mut pool, request) = (pool(4), request(0, 8));
    let error = refused(&mut pool, |pool| cache(pool, &request, &ids([1]), SIZE));
    assert!(matches!(error, KVCacheError::NotOwned { block: BlockId(1), .. }), "{error}");
    let call = request.call(true);
    let error = refused(&mut pool, |pool| {
        pool.cache_partial_block(&call, BlockId(1), SIZE, GROUP, 3 * SIZE)
    });
    assert!(matches!(error, KVCacheError::NotOwned { block: BlockId(1), .. }), "{error}");
}

#[test]
fn row_40_ids_must_exist() {
    let (mut pool, request) = pool_with_a_free_cached_block();
    let invalid = |error: &KVCacheError| matches!(error, KVCacheError::InvalidArgument { .. });
    // The first could be evicted, but nothing is.
    let error = refused(&mut pool, |pool| pool.evict_blocks(&ids([1, 4])));
    assert!(invalid(&error), "{error}");
    let error = refused(&mut pool, |pool| pool.touch(&ids([1, 4])));
    assert!(invalid(&error), "{error}");
    let error = refused(&mut pool, |pool| pool.free_counted(&ids([4])));
    assert!(invalid(&error), "{error}");
    let error = refused(&mut pool, |pool| cache(pool, &request, &ids([4]), SIZE));
    assert!(invalid(&error), "{error}");
}

#[test]
fn row_41_nothing_is_reset_while_a_block_is_held() {
    let (mut pool, _) = pool_with_a_free_cached_block();
    let lease = take(&mut pool, 1);
    let before = pool.state_digest();
    assert!(!pool.reset_prefix_cache().unwrap());
    assert_eq!(pool.state_digest(), before);
    pool.free(lease).unwrap();
    assert!(pool.reset_prefix_cache().unwrap());
}

#[test]
fn row_43_a_mask_fits_its_span() {
    let (mut pool, request) = (pool(4), request(0, 8));
    let lease = take(&mut pool, 2);
    let call = request.call(true);
    let error = refused(&mut pool, |pool| {
        pool.cache_full_blocks(&CacheFullBlocks {
            request: &call,
            row: lease.ids(),
            start: 1,
            stop: 2,
            block_size: SIZE,
            group: GROUP,
            mask: BlockMask::Flags(&[true, true]),
        })
    });
    assert!(
        matches!(error, KVCacheError::InvalidArgument { argument: "block_mask", .. }),
        "{error}"
    );
}

#[test]
fn a_partial_boundary_lies_inside_the_block() {
    let (mut pool, request) = (pool(4), request(0, 12));
    let lease = take(&mut pool, 1);
    let call = request.call(true);
    // The start, an unaligned token, the end, and one beyond the hashes.
    for num_tokens in [0, 6, 12, 16] {
        let error = refused(&mut pool, |pool| {
            pool.cache_partial_block(&call, lease.ids()[0], num_tokens, GROUP, 3 * SIZE)
        });
        assert!(matches!(error, KVCacheError::InvalidArgument { .. }), "{error}");
    }
    // Without a boundary inside there is none at all.
    let error =
        refused(&mut pool, |pool| pool.cache_partial_block(&call, lease.ids()[0], 4, GROUP, SIZE));
    assert!(matches!(error, KVCacheError::InvalidArgument { .. }), "{error}");
    let null = pool.cache_partial_block(&call, NULL_BLOCK, 4, GROUP, 3 * SIZE);
    assert_eq!(null.unwrap(), None);
}

#[test]
fn without_caching_there_are_no_keys_and_no_events_but_resets() {
    let config = BlockPoolConfig { enable_caching: false, ..config(4) };
    let (mut pool, request) = (BlockPool::new(config, None).unwrap(), request(0, 4));
    let lease = take(&mut pool, 1);
    refused(&mut pool, |pool| cache(pool, &request, lease.ids(), SIZE));
    pool.free(lease).unwrap();
    assert!(events(&pool).is_empty());
    assert!(pool.reset_prefix_cache().unwrap());
    assert_eq!(events(&pool), ["cleared"]);
}

#[test]
fn a_store_needs_its_tokens_while_events_are_on() {
    let (mut pool, request) = (pool(4), request(0, 4));
    let lease = take(&mut pool, 1);
    let call = request.call(false);
    let error = refused(&mut pool, |pool| {
        pool.cache_full_blocks(&CacheFullBlocks {
            request: &call,
            row: lease.ids(),
            start: 0,
            stop: 1,
            block_size: SIZE,
            group: GROUP,
            mask: BlockMask::All,
        })
    });
    assert!(matches!(error, KVCacheError::InvalidArgument { argument: "content", .. }), "{error}");
}

#[test]
fn one_pool_has_hashes_of_one_width() {
    let (mut pool, request) = (pool(4), request(0, 4));
    // As long as nothing is cached, any: nobody who only asks decides for others.
    pool.bind_hash_width(16).unwrap();
    pool.bind_hash_width(32).unwrap();
    let lease = take(&mut pool, 1);
    cache(&mut pool, &request, lease.ids(), SIZE).unwrap();
    pool.bind_hash_width(32).unwrap();
    let error = pool.bind_hash_width(16).unwrap_err();
    assert!(matches!(error, KVCacheError::InvalidArgument { .. }), "{error}");
    assert_eq!(pool.hash_width(), Some(32));
}

// ------------------------------------------------------------------------------------ residency (§5)

#[test]
fn residency_follows_a_block_from_allocation_to_reallocation() {
    let metrics = ResidencyMetrics::new(1.0, 0).unwrap();
    let mut pool = BlockPool::new(config(2), Some(metrics)).unwrap();
    let now = |pool: &mut BlockPool, time| pool.residency_mut().unwrap().set_now(time);
    now(&mut pool, 100);
    let mut lease = take(&mut pool, 1);
    // Six accesses, of which the last four are kept: gaps of 4, 5 and 6.
    let mut time = 100;
    for gap in 1..=6 {
        time += gap;
        now(&mut pool, time);
        let touched = pool.touch(lease.ids()).unwrap();
        pool.free(touched).unwrap();
    }
    pool.free(lease).unwrap();
    now(&mut pool, 200);
    lease = take(&mut pool, 1);
    let expected =
        ResidencySample { lifetime_ns: 100, idle_ns: 200 - 121, reuse_gaps_ns: [4, 5, 6].into() };
    assert_eq!(pool.residency_mut().unwrap().drain(), [expected]);
    // Fewer than two accesses have no gap; an explicit eviction ends a life too.
    now(&mut pool, 250);
    pool.evict_blocks(lease.ids()).unwrap();
    let samples = pool.residency_mut().unwrap().drain();
    assert_eq!((samples[0].lifetime_ns, samples[0].idle_ns), (50, 50));
    assert!(samples[0].reuse_gaps_ns.is_empty());
    assert!(pool.residency_mut().unwrap().drain().is_empty());
}

#[test]
fn row_53_a_sample_rate_is_a_share() {
    for rate in [0.0, -0.1, 1.1, f64::NAN] {
        let error = ResidencyMetrics::new(rate, 0).unwrap_err();
        assert!(matches!(error, KVCacheError::Config { field: "sample_rate", .. }), "{error}");
    }
    ResidencyMetrics::new(1.0, 0).unwrap();
}
