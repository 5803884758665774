//! Duplicates (`manager.md` §4.1), keys and their events (§4.3 to §4.5).

use kvyard_core::caching::{BlockMask, CacheFullBlocks};
use kvyard_core::event_log::KVCacheEvent;
use kvyard_core::{BlockId, BlockLease, BlockPool, BlockPoolConfig, GroupId, Request, Semantics};

use crate::fixture::{
    GROUP, SIZE, cache, cache_partial, config, events, ids, pool, pool_with_a_free_cached_block,
    request, take, whole_row,
};

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
    pool.cache_full_blocks(&CacheFullBlocks { group: GroupId(1), ..whole_row(&call, lease.ids()) })
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
        mask: BlockMask::Flags(&[true, true, false, true]),
        ..whole_row(&call, &ids([1, 0, 2, 3]))
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
        mask: BlockMask::Flags(&[true, true, true, true, false, true]),
        ..whole_row(&call, &ids([1, 2, 0, 3, 4, 5]))
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
