//! What misuse of several groups gets (`manager.md` §10, *Strict*): a typed error, and nothing has
//! changed.

use kvyard_core::{
    AllocateSlots, BlockId, KVCacheBlocks, KVCacheError, KVCacheGroupSpec, KVCacheManager,
    KVCacheManagerConfig, Request, Semantics,
};

use crate::fixture::{
    ALIGN, ALL, Ask, BOTH, Engine, chunked, config, cross, full, mamba, mla, new, rows_of, rswa,
    sink, swa,
};

/// A manager of two groups, a request that holds blocks, and one whose prefix is cached.
fn two_groups(semantics: Semantics) -> (Engine, Request, Request) {
    let base = config(40, &[full(4), swa(4, 8)]);
    let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
    let running = engine.run("running", 100..120);
    engine.run_and_free("done", 0..24);
    let waiting = engine.request("waiting", 0..30);
    (engine, running, waiting)
}

/// The call is refused with this error and changes nothing; right after it a proper one is admitted.
fn refused(
    engine: &mut Engine,
    call: &AllocateSlots<'_>,
    is_expected: impl Fn(&KVCacheError) -> bool,
) {
    let before = engine.manager.state_digest();
    let error = engine.manager.allocate_slots(call).unwrap_err();
    assert!(is_expected(&error), "{error:?}");
    assert_eq!(engine.manager.state_digest(), before, "{error}");
    engine.manager.validate();
}

fn is_argument(name: &'static str) -> impl Fn(&KVCacheError) -> bool {
    move |error| matches!(error, KVCacheError::InvalidArgument { argument, .. } if *argument == name)
}

fn blocks(engine: &Engine, groups: &[&[u32]]) -> KVCacheBlocks {
    let ids: Vec<Vec<BlockId>> =
        groups.iter().map(|row| row.iter().copied().map(BlockId).collect()).collect();
    let pool = engine.manager.pool();
    KVCacheBlocks::from_groups(ids.iter().map(Vec::as_slice), pool.id(), pool.epoch())
}

// -------------------------------------------------------------------------------------- construction

/// Rows 5 and 6, 8 and 55, and limits of each kind.
#[test]
fn configurations() {
    let make = |groups: &[KVCacheGroupSpec], enable_caching: bool| {
        let base = config(20, groups);
        KVCacheManager::new(KVCacheManagerConfig { enable_caching, ..base }, None)
    };
    for enable_caching in [false, true] {
        // Row 5: no group, and groups of one spec.
        let mut none = make(&[], enable_caching).unwrap();
        let request = Request::new("a", vec![1, 2, 3], std::sync::Arc::default(), None);
        assert_eq!(none.lookup(&request.call(false)).num_tokens, 0);
        let fresh = none.allocate_slots(&AllocateSlots::new(&request.call(false), 3)).unwrap();
        assert!(fresh.unwrap().is_empty());
        none.free("a", None);
        none.validate();
        assert!(make(&[full(4), full(4)], enable_caching).is_ok());
        // Row 8.
        assert!(make(&[sink(4, 8), swa(4, 8)], enable_caching).is_ok());
    }
    for group in [swa(4, 0), rswa(4, 0), chunked(4, 0), sink(4, 0), full(0)] {
        let groups = [KVCacheGroupSpec { ..group }, full(4)];
        let sizes = KVCacheManagerConfig {
            groups: groups.to_vec(),
            ..KVCacheManagerConfig::new(20, 4, 100)
        };
        let error = KVCacheManager::new(sizes, None).unwrap_err();
        assert!(matches!(error, KVCacheError::Config { .. }), "{group:?}: {error:?}");
    }
    // Row 55: alone and beside another group; without caching it works.
    for groups in [&[cross(4)][..], &[full(4), cross(4)]] {
        let error = make(groups, true).unwrap_err();
        assert!(matches!(error, KVCacheError::Config { field: "enable_caching", .. }), "{error}");
        assert!(make(groups, false).is_ok());
    }
}

/// Row 6 and `groups.md` §2.10.
#[test]
fn context_parallelism() {
    let make = |groups: &[KVCacheGroupSpec], dcp_world_size, pcp_world_size| {
        let ranks = dcp_world_size * pcp_world_size;
        let base = config(20, groups);
        KVCacheManager::new(
            KVCacheManagerConfig {
                dcp_world_size,
                pcp_world_size,
                scheduler_block_size: base.scheduler_block_size * ranks,
                hash_block_size: base.hash_block_size * ranks,
                ..base
            },
            None,
        )
    };
    for (dcp, pcp) in [(2, 1), (1, 2)] {
        let groups: [&[KVCacheGroupSpec]; 6] = [
            &[full(4), swa(4, 8)],
            &[full(4), full(4)],
            &[swa(4, 8)],
            &[chunked(4, 8)],
            &[mamba(4, ALL)],
            &[mla(4), full(4)],
        ];
        for groups in groups {
            let error = make(groups, dcp, pcp).unwrap_err();
            let field = "dcp_world_size";
            assert!(
                matches!(error, KVCacheError::Config { field: f, .. } if f == field),
                "{error}"
            );
        }
        for group in [full(4), mla(4), rswa(4, 8), sink(4, 8)] {
            assert!(make(&[group], dcp, pcp).is_ok(), "{group:?}");
        }
    }
}

/// Row 7. Negative intervals cannot be written here.
#[test]
fn retention_intervals() {
    let make = |groups: &[KVCacheGroupSpec], interval| {
        let base = config(20, groups);
        let retention_interval = Some(interval);
        KVCacheManager::new(KVCacheManagerConfig { retention_interval, ..base }, None)
    };
    for interval in [8, 12, 24] {
        let error = make(&[full(16), swa(4, 8)], interval).unwrap_err();
        assert!(
            matches!(error, KVCacheError::Config { field: "retention_interval", .. }),
            "no multiple of 16: {error}"
        );
    }
    for interval in [0, 16, 32] {
        assert!(make(&[full(16), swa(4, 8)], interval).is_ok());
        assert!(make(&[full(16), mamba(16, ALIGN)], interval).is_ok());
        let groups: [&[KVCacheGroupSpec]; 3] =
            [&[full(16)], &[full(16), chunked(16, 32)], &[full(16), mla(16)]];
        for groups in groups {
            let error = make(groups, interval).unwrap_err();
            assert!(matches!(error, KVCacheError::Config { field: "retention_interval", .. }));
        }
    }
}

// ------------------------------------------------------------------------------------------- hits

/// Row 22: a hit of another pool, and blocks of another group.
#[test]
fn foreign_hits() {
    for semantics in BOTH {
        let (mut engine, _, waiting) = two_groups(semantics);
        let (mut other, _, _) = two_groups(semantics);
        let call = waiting.call(false);
        let foreign = other.manager.lookup(&call);
        assert_eq!(foreign.num_tokens, 24);
        let ask = AllocateSlots {
            num_new_computed_tokens: 24,
            new_computed_blocks: Some(&foreign.blocks),
            ..AllocateSlots::new(&call, 6)
        };
        refused(&mut engine, &ask, |error| matches!(error, KVCacheError::ForeignBlock { .. }));

        let own = engine.manager.lookup(&call);
        let rows = rows_of(&own.blocks);
        let swapped = blocks(&engine, &[&rows[0], &[rows[0].as_slice()].concat()]);
        let ask = AllocateSlots { new_computed_blocks: Some(&swapped), ..ask };
        refused(&mut engine, &ask, is_argument("new_computed_blocks"));

        let ask = AllocateSlots { new_computed_blocks: Some(&own.blocks), ..ask };
        assert!(engine.manager.allocate_slots(&ask).unwrap().is_some());
    }
}

/// Rows 28, 29, 30, and 26: hits for a tracked request, of another number of groups, of other lengths.
#[test]
fn hits_that_do_not_fit() {
    for semantics in BOTH {
        let (mut engine, running, waiting) = two_groups(semantics);
        let call = waiting.call(false);
        let hit = engine.manager.lookup(&call);
        let rows = rows_of(&hit.blocks);
        let of_running = running.call(false);
        let ask = AllocateSlots {
            num_new_computed_tokens: 24,
            new_computed_blocks: Some(&hit.blocks),
            ..AllocateSlots::new(&of_running, 4)
        };
        refused(&mut engine, &ask, |error| matches!(error, KVCacheError::AlreadyTracked { .. }));

        let good = AllocateSlots { request: &call, num_new_tokens: 6, ..ask };
        let one_group = blocks(&engine, &[&rows[0]]);
        let three = blocks(&engine, &[&rows[0], &rows[1], &rows[1]]);
        let shorter = blocks(&engine, &[&rows[0], &rows[1][..5]]);
        for wrong in [&one_group, &three, &shorter] {
            let ask = AllocateSlots { new_computed_blocks: Some(wrong), ..good };
            refused(&mut engine, &ask, is_argument("new_computed_blocks"));
        }
        for tokens in [0, 20, 23, 28] {
            let ask = AllocateSlots { num_new_computed_tokens: tokens, ..good };
            refused(&mut engine, &ask, is_argument("new_computed_blocks"));
        }
        let without = AllocateSlots { new_computed_blocks: None, ..good };
        refused(&mut engine, &without, is_argument("new_computed_blocks"));
        assert!(engine.manager.allocate_slots(&good).unwrap().is_some());
    }
}

/// Row 30's exception: lists of the lookup group by group may be shorter than the longest, not longer.
#[test]
fn lists_of_their_own_lengths() {
    let (mut engine, _, waiting) = two_groups(Semantics::corrected());
    let call = waiting.call(false);
    let hit = engine.manager.lookup(&call);
    let rows = rows_of(&hit.blocks);
    let uneven = blocks(&engine, &[&rows[0], &[]]).with_own_lengths();
    let good = AllocateSlots {
        num_new_computed_tokens: 24,
        new_computed_blocks: Some(&uneven),
        num_external_computed_tokens: 4,
        ..AllocateSlots::new(&call, 2)
    };
    let ask = AllocateSlots { num_new_computed_tokens: 20, ..good };
    refused(&mut engine, &ask, is_argument("new_computed_blocks"));
    assert!(engine.manager.allocate_slots(&good).unwrap().is_some());
}

/// Rows 20 and 21: a hit is stale once one of its blocks, in whichever group, was given to somebody
/// else or lost its key; and not before.
#[test]
fn stale_hits() {
    for semantics in BOTH {
        for group in 0..2 {
            let (mut engine, _, waiting) = two_groups(semantics);
            let call = waiting.call(false);
            let hit = engine.manager.lookup(&call);
            let ask = AllocateSlots {
                num_new_computed_tokens: hit.num_tokens,
                new_computed_blocks: Some(&hit.blocks),
                ..AllocateSlots::new(&call, 6)
            };
            // Other requests come and go, and other blocks are evicted: the hit is as good as ever.
            engine.run_and_free("other", 500..512);
            let last = *hit.blocks.blocks(group).last().unwrap();
            let plan = engine.manager.plan_allocate_slots(&ask).unwrap();
            assert!(plan.is_admitted());
            drop(plan);
            engine.manager.pool_mut().evict_blocks(&[last]).unwrap();
            let is_stale = |error: &KVCacheError| matches!(error, KVCacheError::StaleBlock { block, .. } if *block == last);
            refused(&mut engine, &ask, is_stale);
            let again = engine.manager.lookup(&call);
            assert!(again.num_tokens < 24);
        }
        // Re-allocated, and cached again by its new owner.
        let (mut engine, _, waiting) = two_groups(semantics);
        let call = waiting.call(false);
        let hit = engine.manager.lookup(&call);
        let free = engine.num_free() / 2 * 4;
        engine.run_and_free("everything", 1000..1000 + free);
        let ask = AllocateSlots {
            num_new_computed_tokens: 24,
            new_computed_blocks: Some(&hit.blocks),
            ..AllocateSlots::new(&call, 6)
        };
        refused(&mut engine, &ask, |error| matches!(error, KVCacheError::StaleBlock { .. }));
    }
}

/// Row 54.
#[test]
fn hits_while_caching_is_off() {
    let base = config(20, &[full(4), swa(4, 8)]);
    let mut engine = Engine::new(KVCacheManagerConfig { enable_caching: false, ..base });
    let request = engine.request("a", 0..20);
    let call = request.call(false);
    let some = blocks(&engine, &[&[1], &[2]]);
    let ask = AllocateSlots {
        num_new_computed_tokens: 4,
        new_computed_blocks: Some(&some),
        ..AllocateSlots::new(&call, 4)
    };
    refused(&mut engine, &ask, is_argument("new_computed_blocks"));
}

// ------------------------------------------------------------------------------------- other calls

/// Rows 25 and 31: nothing to do, and external tokens beyond the longest request. 0.25.1 raises in
/// the middle of the latter, with one group extended.
#[test]
fn too_little_and_too_much() {
    for semantics in BOTH {
        let mut engine = Engine::new(KVCacheManagerConfig {
            max_model_len: 32,
            semantics,
            ..config(40, &[full(4), mamba(4, ALIGN)])
        });
        let request = engine.request("a", 0..40);
        let call = request.call(false);
        refused(&mut engine, &AllocateSlots::new(&call, 0), is_argument("num_new_tokens"));
        let ask = AllocateSlots {
            num_external_computed_tokens: 33,
            delay_cache_blocks: true,
            ..AllocateSlots::new(&call, 0)
        };
        refused(&mut engine, &ask, is_argument("num_external_computed_tokens"));
        let ask = AllocateSlots { num_external_computed_tokens: 32, ..ask };
        assert!(engine.manager.allocate_slots(&ask).unwrap().is_some());
    }
}

/// Rows 35, 36 and 37: caching for an unknown request, beyond the row, beyond the hashes.
#[test]
fn caching_what_is_not_there() {
    for semantics in BOTH {
        let base = config(40, &[full(8), swa(4, 64)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let mut request = engine.request("a", 0..40);
        let ask = Ask { external: 16, delayed: true, ..new(0) };
        engine.step_with(&mut request, &ask);
        let before = engine.manager.state_digest();
        let unknown = engine.request("b", 0..40);
        let error = engine.manager.cache_blocks(&unknown.call(false), None, 8).unwrap_err();
        assert!(matches!(error, KVCacheError::UnknownRequest { .. }), "{error}");
        let error = engine.manager.cache_blocks(&request.call(false), None, 24).unwrap_err();
        assert!(is_argument("num_computed_tokens")(&error), "{error}");
        let mut call = request.call(false);
        call.block_hashes = &call.block_hashes[..3];
        let error = engine.manager.cache_blocks(&call, None, 16).unwrap_err();
        assert!(is_argument("block_hashes")(&error), "{error}");
        assert_eq!(engine.manager.state_digest(), before);
        engine.manager.cache_blocks(&request.call(false), None, 16).unwrap();
        assert_eq!((engine.keyed("a", 0).len(), engine.keyed("a", 1).len()), (2, 4));
    }
}

/// Rows 32, 33 and 34: unknown requests leave no trace in any group.
#[test]
fn unknown_requests() {
    for semantics in BOTH {
        let (mut engine, _, _) = two_groups(semantics);
        let before = engine.manager.state_digest();
        engine.manager.free("nobody", None);
        engine.manager.remove_skipped_blocks("nobody", None, 100, Some(100)).unwrap();
        assert!(engine.manager.get_blocks("nobody", None).is_empty());
        assert_eq!(engine.manager.get_num_common_prefix_blocks("nobody")[..], [0, 0]);
        let computed = engine.manager.get_blocks_for_computed_tokens("nobody", None, 10);
        assert_eq!((computed.num_groups(), computed.is_empty()), (2, true));
        let lease = engine.manager.pop_blocks_for_free("nobody", None).unwrap();
        assert!(lease.ids().is_empty());
        engine.manager.free_popped(lease).unwrap();
        assert_eq!(engine.manager.state_digest(), before);
        assert_eq!(engine.manager.num_tracked_requests(), 1);
    }
}

/// Row 44: sums of different numbers of groups.
#[test]
fn sums_of_different_groups() {
    let engine = Engine::of(20, &[full(4), swa(4, 8)]);
    let two = blocks(&engine, &[&[1], &[2]]);
    let one = blocks(&engine, &[&[3]]);
    assert!(is_argument("other")(&two.concat(&one).unwrap_err()));
    assert_eq!(rows_of(&two.concat(&two).unwrap()), [[1, 1], [2, 2]]);
}

/// Row 51: a lease of several groups goes back whole, and once.
#[test]
fn a_lease_goes_back_once() {
    for semantics in BOTH {
        let (mut engine, _, _) = two_groups(semantics);
        let lease = engine.manager.pop_blocks_for_free("running", None).unwrap();
        assert_eq!(lease.group_ends(), [5, 10]);
        let ids = lease.ids().to_vec();
        // Its references do not go back by id behind its back.
        let before = engine.manager.state_digest();
        let error = engine.manager.pool_mut().free_counted(&ids).unwrap_err();
        assert!(matches!(error, KVCacheError::NotOwned { .. }), "{error}");
        // And another manager does not take it.
        let (mut other, _, _) = two_groups(semantics);
        let (error, lease) = other.manager.free_popped(lease).unwrap_err();
        assert!(error.to_string().contains("the lease of request \"running\""), "{error}");
        assert_eq!(engine.manager.state_digest(), before);
        engine.manager.free_popped(lease).unwrap();
        let error = engine.manager.pool_mut().free_counted(&ids).unwrap_err();
        assert!(matches!(error, KVCacheError::DoubleFree { .. }), "{error}");
        engine.manager.validate();
    }
}
