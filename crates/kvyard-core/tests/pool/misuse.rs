//! What misuse of a pool gets (`manager.md` §10, *Strict*).

use kvyard_core::blocks::GroupEnds;
use kvyard_core::caching::{BlockMask, CacheFullBlocks};
use kvyard_core::stats::ResidencyMetrics;
use kvyard_core::{BlockId, BlockPool, BlockPoolConfig, GroupId, KVCacheError, NULL_BLOCK};

use crate::fixture::{
    GROUP, SIZE, cache, config, events, ids, order, pool, pool_with_a_free_cached_block, request,
    take, whole_row,
};

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

/// Blocks held by id.
fn dissolved(pool: &mut BlockPool, count: usize) -> Vec<BlockId> {
    let lease = take(pool, count);
    pool.dissolve(lease).unwrap()
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
            group: GroupId(u32::MAX),
            ..whole_row(&call, lease.ids())
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
    drop(take(&mut pool, 4));
    let error = refused(&mut pool, |pool| pool.get_new_blocks(7));
    assert_eq!(error, KVCacheError::OutOfBlocks { wanted: 7, free: 6, total: 10 });
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

/// The error tells how often its own block is listed, and how many references are counted: not the
/// other blocks of the list, and not what a lease holds.
#[test]
fn a_double_free_tells_the_counts_of_its_block() {
    let mut pool = pool(6);
    let blocks = dissolved(&mut pool, 2);
    let lease = pool.touch(&blocks[..1]).unwrap();
    let list = [blocks[1], blocks[0], blocks[0]];
    let error = refused(&mut pool, |pool| pool.free_counted(&list));
    let (block, owner) = (blocks[0], String::new());
    assert_eq!(error, KVCacheError::DoubleFree { block, times: 2, handed_out: 1, owner });
    pool.free(lease).unwrap();
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
        let text = "block 2 cannot be touched: nobody holds it, and it was never allocated; look up \
                    again";
        assert_eq!(error.to_string(), text);
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
        pool.cache_full_blocks(&CacheFullBlocks { stop: 1, ..whole_row(&call, &[]) })
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
            start: 1,
            mask: BlockMask::Flags(&[true, true]),
            ..whole_row(&call, lease.ids())
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
    let error = refused(&mut pool, |pool| pool.cache_full_blocks(&whole_row(&call, lease.ids())));
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

#[test]
fn row_53_a_sample_rate_is_a_share() {
    for rate in [0.0, -0.1, 1.1, f64::NAN] {
        let error = ResidencyMetrics::new(rate, 0).unwrap_err();
        assert!(matches!(error, KVCacheError::Config { field: "sample_rate", .. }), "{error}");
    }
    ResidencyMetrics::new(1.0, 0).unwrap();
}
