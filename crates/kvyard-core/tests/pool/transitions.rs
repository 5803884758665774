//! Transitions of a block (`manager.md` §1.3), and how long it stays (§5).

use kvyard_core::event_log::KVCacheEvent;
use kvyard_core::stats::{ResidencyMetrics, ResidencySample};
use kvyard_core::{BlockId, BlockPool};

use crate::fixture::{
    GROUP, SIZE, cache, cache_partial, clear_events, config, events, ids, order, pool,
    pool_with_a_free_cached_block, request, take,
};

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

/// A block that lost its keys is another block to who found it before, also where it has the same key
/// again: `evict_blocks`, a reset, an allocation.
#[test]
fn whoever_found_a_block_sees_that_it_changed() {
    let changes: [fn(&mut BlockPool); 3] = [
        |pool| pool.evict_blocks(&[BlockId(1)]).unwrap(),
        |pool| assert!(pool.reset_prefix_cache().unwrap()),
        |pool| drop(take(pool, 3)),
    ];
    for change in changes {
        let (mut pool, _) = pool_with_a_free_cached_block();
        let before = pool.epoch();
        assert!(!pool.changed_since(BlockId(1), before));
        change(&mut pool);
        assert!(pool.changed_since(BlockId(1), before));
        assert!(!pool.changed_since(BlockId(1), pool.epoch()));
    }
}

/// The queue of a new pool ascends, and plain blocks go to its head in the order they are given.
#[test]
fn a_lease_is_given_back_in_either_order() {
    let (mut forward, mut backward) = (pool(6), pool(6));
    let lease = take(&mut forward, 3);
    forward.free(lease).unwrap();
    assert_eq!(order(&forward), [1, 2, 3, 4, 5]);
    let lease = take(&mut backward, 3);
    backward.free_reversed(lease).unwrap();
    assert_eq!(order(&backward), [3, 2, 1, 4, 5]);
}

/// A block counts once as stored, however many keys it has: the longer one first, then an alias.
#[test]
fn an_alias_is_no_stored_block() {
    let (mut pool, request) = (pool(4), request(0, 12));
    let lease = take(&mut pool, 1);
    cache_partial(&mut pool, &request, lease.ids()[0], 8);
    cache_partial(&mut pool, &request, lease.ids()[0], 4);
    assert_eq!(pool.prefix_map().num_keys(), 2);
    assert_eq!((pool.num_blocks_stored(), pool.num_blocks_removed()), (1, 0));
    pool.evict_blocks(lease.ids()).unwrap();
    assert_eq!((pool.num_blocks_stored(), pool.num_blocks_removed()), (1, 1));
}
