//! The *Strict* column of `manager.md` §10: outcome, and for errors an unchanged state.

use kvyard_core::{
    AllocateSlots, AttentionKind, BlockId, CacheHit, KVCacheBlocks, KVCacheError, KVCacheGroupSpec,
    KVCacheManager, KVCacheManagerConfig,
};

use crate::harness::{BLOCK_SIZE, Harness, NUM_BLOCKS, Options, full, numbers, of_kind};

fn refused_config(config: KVCacheManagerConfig) -> &'static str {
    match KVCacheManager::new(config, None) {
        Err(KVCacheError::Config { field, .. }) => field,
        Err(other) => panic!("{other}"),
        Ok(_) => "accepted",
    }
}

/// The call must fail and change nothing.
fn refused(world: &mut Harness, id: &str, new: u32, with: Options) -> KVCacheError {
    let before = world.manager.state_digest();
    let error = world.try_allocate(id, new, with).unwrap_err();
    assert_eq!(world.manager.state_digest(), before, "{error} changed the state");
    error
}

fn is_invalid(error: &KVCacheError, argument: &str) -> bool {
    matches!(error, KVCacheError::InvalidArgument { argument: found, .. } if *found == argument)
}

#[test]
fn rows_1_to_4_constructor_arguments() {
    let with = |change: fn(&mut KVCacheManagerConfig)| {
        let mut config = full(NUM_BLOCKS);
        change(&mut config);
        refused_config(config)
    };
    assert_eq!(with(|config| config.num_blocks = 0), "num_blocks");
    assert_eq!(with(|config| config.watermark = -0.1), "watermark");
    assert_eq!(with(|config| config.watermark = f64::NAN), "watermark");
    assert_eq!(with(|config| config.scheduler_block_size = 6), "scheduler_block_size");
    assert_eq!(
        with(|config| {
            config.hash_block_size = 2;
            config.scheduler_block_size = 6;
        }),
        "scheduler_block_size"
    );
    assert_eq!(with(|config| config.hash_block_size = 2), "hash_block_size");
    assert_eq!(with(|config| config.dcp_world_size = 2), "hash_block_size");
    assert_eq!(with(|config| config.dcp_world_size = 0), "dcp_world_size");
    assert_eq!(with(|config| config.max_model_len = 0), "max_model_len");
    assert_eq!(with(|config| config.groups[0].spec.block_size = 0), "block_size");
    // Row 5: no group, and several of one specification, are fine.
    let group = KVCacheGroupSpec::new(AttentionKind::FullAttention, BLOCK_SIZE);
    for (count, enable_caching) in [(0, false), (0, true), (3, false), (3, true)] {
        let groups = vec![group; count];
        let config = KVCacheManagerConfig { groups, enable_caching, ..full(NUM_BLOCKS) };
        KVCacheManager::new(config, None).unwrap();
    }
}

/// Another request took the block in between, or it lost its key, or both.
#[test]
fn row_21_a_stale_hit() {
    let mut world = Harness::new(full(4));
    world.start("A", 0..8);
    world.free("A");
    world.add("B", 0..9);
    let hit = world.lookup("B");
    assert_eq!(hit.num_tokens, 8);
    let with = |hit: &CacheHit| Options { hit: Some(hit.clone()), ..Options::default() };
    world.manager.pool_mut().evict_blocks(&[BlockId(2)]).unwrap();
    let error = refused(&mut world, "B", 1, with(&hit));
    let expected =
        KVCacheError::StaleBlock { block: BlockId(2), request: Some("B".into()), what: "evicted" };
    assert_eq!(error, expected);
    // Now block 2 belongs to C, and is cached again under C's key.
    assert_eq!(world.start("C", 100..108), [3, 2]);
    let error = refused(&mut world, "B", 1, with(&hit));
    let expected = KVCacheError::StaleBlock {
        block: BlockId(2),
        request: Some("B".into()),
        what: "re-allocated",
    };
    assert_eq!(error, expected);
    // Freed and cached it is still another's.
    world.free("C");
    let error = refused(&mut world, "B", 1, with(&hit));
    assert!(matches!(error, KVCacheError::StaleBlock { .. }), "{error}");
    // A new lookup is good.
    world.allocate_all("B");
    assert_eq!(world.row("B")[0], 1);
}

/// The hit's blocks were given to another and came back with the same content.
#[test]
fn row_21_a_block_computed_again_is_another_block() {
    let mut world = Harness::new(full(3));
    world.start("A", 0..4);
    world.free("A");
    world.add("B", 0..5);
    let hit = world.lookup("B");
    world.start("C", 100..108);
    world.free("C");
    world.start("A", 0..4);
    world.free("A");
    assert_eq!(world.hit("B").0, 4);
    if world.lookup("B").blocks.ids() == hit.blocks.ids() {
        let with = Options { hit: Some(hit), ..Options::default() };
        let error = refused(&mut world, "B", 1, with);
        assert!(matches!(error, KVCacheError::StaleBlock { .. }), "{error}");
    } else {
        panic!("the example must put the content into the same block");
    }
}

/// What does not touch the hit's blocks leaves it good.
#[test]
fn a_hit_survives_other_requests() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    world.free("A");
    world.add("B", 0..9);
    let hit = world.lookup("B");
    world.start("C", 100..116);
    world.free("C");
    world.start("D", 0..8);
    let with = Options { hit: Some(hit), ..Options::default() };
    assert!(world.allocate_with("B", 1, with).is_some());
    assert_eq!(world.row("B")[..2], [1, 2]);
}

#[test]
fn row_22_a_hit_of_another_manager() {
    let (mut mine, mut theirs) = (Harness::new(full(NUM_BLOCKS)), Harness::new(full(NUM_BLOCKS)));
    for world in [&mut mine, &mut theirs] {
        world.start("A", 0..8);
        world.add("B", 0..9);
    }
    let with = Options { hit: Some(theirs.lookup("B")), ..Options::default() };
    let error = refused(&mut mine, "B", 1, with);
    assert!(matches!(error, KVCacheError::ForeignBlock { .. }), "{error}");
}

#[test]
fn row_25_nothing_to_do() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("A", 0..8);
    let error = refused(&mut world, "A", 0, Options::default());
    assert!(is_invalid(&error, "num_new_tokens"), "{error}");
}

#[test]
fn row_26_token_counts_that_overflow() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("A", 0..8);
    let error = refused(&mut world, "A", u32::MAX, Options::default());
    assert!(is_invalid(&error, "num_new_tokens"), "{error}");
    let with = Options { lookahead: u32::MAX, external: u32::MAX, ..Options::default() };
    let error = refused(&mut world, "A", u32::MAX, with);
    assert!(is_invalid(&error, "num_new_tokens"), "{error}");
}

#[test]
fn row_27_too_few_blocks_are_no_error() {
    let mut world = Harness::new(full(3));
    world.add("A", 0..12);
    let before = world.manager.state_digest();
    assert_eq!(world.allocate("A", 12), None);
    assert_eq!(world.manager.state_digest(), before);
}

#[test]
fn row_28_a_hit_only_starts_a_request() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    world.add("B", 0..12);
    let hit = world.lookup("B");
    world.allocate_all("B");
    let with = Options { hit: Some(hit), ..Options::default() };
    let error = refused(&mut world, "B", 1, with);
    let expected = KVCacheError::AlreadyTracked { request: "B".into() };
    assert_eq!(error, expected);
}

/// Also before its first block is full.
#[test]
fn row_28_a_request_with_part_of_a_block_is_tracked() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("B", 0..12);
    world.allocate("B", 2);
    assert_eq!(world.num_cached("B"), None);
    world.start("A", 0..8);
    let with = Options { hit: Some(world.lookup("B")), ..Options::default() };
    let error = refused(&mut world, "B", 1, with);
    assert!(matches!(error, KVCacheError::AlreadyTracked { .. }), "{error}");
    let with = Options { external: 4, ..Options::default() };
    let error = refused(&mut world, "B", 1, with);
    assert!(matches!(error, KVCacheError::AlreadyTracked { .. }), "{error}");
}

/// `allocate_slots` with a hit made by hand.
fn refused_hit(world: &mut Harness, blocks: &KVCacheBlocks, num_tokens: u32) -> KVCacheError {
    let before = world.manager.state_digest();
    let call = world.requests["B"].call(true);
    let result = world.manager.allocate_slots(&AllocateSlots {
        num_new_computed_tokens: num_tokens,
        new_computed_blocks: Some(blocks),
        ..AllocateSlots::new(&call, 1)
    });
    assert_eq!(world.manager.state_digest(), before);
    result.unwrap_err()
}

#[test]
fn rows_29_and_30_a_hit_fits_groups_and_tokens() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    world.add("B", 0..9);
    let hit = world.lookup("B").blocks;
    let (pool, epoch) = (hit.pool(), hit.epoch());
    let two = KVCacheBlocks::from_groups([hit.ids(), hit.ids()], pool, epoch);
    assert!(is_invalid(&refused_hit(&mut world, &two, 8), "new_computed_blocks"));
    for num_tokens in [0, 4, 7, 9, 12] {
        let error = refused_hit(&mut world, &hit, num_tokens);
        assert!(is_invalid(&error, "new_computed_blocks"), "{error}");
    }
    let none = world.manager.empty_kv_cache_blocks();
    assert!(is_invalid(&refused_hit(&mut world, &none, 4), "new_computed_blocks"));
    // A group's own hit may be shorter than what is said, but not longer.
    let own = KVCacheBlocks::from_groups([hit.ids()], pool, epoch).with_own_lengths();
    let error = refused_hit(&mut world, &own, 4);
    assert!(is_invalid(&error, "new_computed_blocks"), "{error}");
    // Longer than what the request has hashes of.
    world.add("B", 0..7);
    let error = refused_hit(&mut world, &hit, 8);
    assert!(error.to_string().contains("hashes of 1"), "{error}");
    world.add("B", 0..9);
    // A block that was never cached.
    let plain = KVCacheBlocks::from_groups([&[BlockId(9)][..]], pool, epoch);
    let error = refused_hit(&mut world, &plain, 4);
    assert!(matches!(error, KVCacheError::StaleBlock { block: BlockId(9), .. }), "{error}");
}

#[test]
fn row_31_external_tokens_end_at_max_model_len() {
    let config = KVCacheManagerConfig { max_model_len: 8, ..full(NUM_BLOCKS) };
    let mut world = Harness::new(config);
    world.add("A", 0..12);
    let with = Options { external: 12, ..Options::default() };
    let error = refused(&mut world, "A", 0, with);
    assert!(is_invalid(&error, "num_external_computed_tokens"), "{error}");
    assert_eq!(world.manager.num_tracked_requests(), 0);
    // The longest request itself is none of these.
    let with = Options { external: 8, ..Options::default() };
    assert_eq!(world.allocate_with("A", 0, with), Some(vec![]));
    assert_eq!(world.row("A"), [1, 2]);
}

#[test]
fn row_32_a_second_free_is_none() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    world.free("A");
    let before = world.manager.state_digest();
    world.free("A");
    assert_eq!(world.manager.state_digest(), before);
}

/// Row 18, and what one count a block would not see: A is freed twice, B uses its blocks.
#[test]
fn row_18_what_a_row_holds_is_not_freed_by_id() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    world.add("B", 0..9);
    world.allocate_all("B");
    world.free("A");
    let before = world.manager.state_digest();
    let error = world.manager.pool_mut().free_counted(&[BlockId(1)]).unwrap_err();
    assert!(matches!(error, KVCacheError::NotOwned { block: BlockId(1), .. }), "{error}");
    // A popped and returned, then returned again by id.
    let lease = world.manager.pop_blocks_for_free("B", None).unwrap();
    world.add("C", 0..9);
    world.allocate_all("C");
    let ids = lease.ids().to_vec();
    world.manager.free_popped(lease).unwrap();
    assert_ne!(world.manager.state_digest(), before);
    let before = world.manager.state_digest();
    let error = world.manager.pool_mut().free_counted(&ids).unwrap_err();
    assert!(matches!(error, KVCacheError::NotOwned { block: BlockId(1), .. }), "{error}");
    assert_eq!(world.manager.state_digest(), before);
    assert_eq!(world.row("C")[..2], [1, 2]);
    world.manager.validate();
}

/// A and B share a block, A gives it back twice: 0.25.1 hands it to C while B still uses it.
#[test]
fn rows_15_to_18_a_shared_block_outlives_the_double_free_of_one_owner() {
    for b_is_popped in [false, true] {
        let mut world = Harness::new(full(NUM_BLOCKS));
        world.start("A", 0..9);
        world.start("B", 0..10);
        let shared = BlockId(1);
        assert_eq!((world.row("A")[0], world.row("B")[0]), (1, 1));
        let popped = world.manager.pop_blocks_for_free("A", None).unwrap();
        let of_a = world.manager.pool_mut().dissolve(popped).unwrap();
        let of_b = b_is_popped.then(|| world.manager.pop_blocks_for_free("B", None).unwrap());
        world.manager.pool_mut().free_counted(&of_a).unwrap();
        let before = world.manager.state_digest();
        let error = world.manager.pool_mut().free_counted(&of_a).unwrap_err();
        assert!(matches!(error, KVCacheError::NotOwned { block: BlockId(1), .. }), "{error}");
        assert_eq!(
            (world.manager.state_digest(), world.manager.pool().ref_cnt(shared)),
            (before, 1)
        );
        // Not even when every free block is taken.
        let free = world.manager.pool().num_free_blocks();
        let all = world.manager.pool_mut().get_new_blocks(free).unwrap();
        assert!(!all.ids().contains(&shared));
        world.manager.pool_mut().free(all).unwrap();
        match of_b {
            Some(lease) => world.manager.free_popped(lease).unwrap(),
            None => world.free("B"),
        }
        assert_eq!(world.manager.pool().num_free_blocks(), NUM_BLOCKS as usize - 1);
        world.manager.validate();
    }
}

/// C02 b for a block of two owners: a row and a list of ids.
#[test]
fn rows_15_and_16_a_row_does_not_pay_for_ids() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    let lease = world.manager.pool_mut().touch(&[BlockId(1)]).unwrap();
    let once = world.manager.pool_mut().dissolve(lease).unwrap();
    let before = world.manager.state_digest();
    let twice = [BlockId(1), BlockId(1)];
    let error = world.manager.pool_mut().free_counted(&twice).unwrap_err();
    let KVCacheError::DoubleFree { times, handed_out, .. } = error else {
        panic!("{error}");
    };
    assert_eq!((times, handed_out), (2, 1));
    assert_eq!(world.manager.state_digest(), before);
    world.manager.pool_mut().free_counted(&once).unwrap();
    assert_eq!(world.manager.pool().ref_cnt(BlockId(1)), 1);
}

#[test]
fn rows_33_to_35_unknown_requests_leave_no_trace() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    world.add("B", 100..108);
    let before = world.manager.state_digest();
    assert!(world.row("B").is_empty());
    assert_eq!(world.manager.get_num_common_prefix_blocks("B")[0], 0);
    let call = world.requests["B"].call(true);
    let error = world.manager.cache_blocks(&call, None, 8).unwrap_err();
    let expected = KVCacheError::UnknownRequest { request: "B".into() };
    assert_eq!(error, expected);
    assert_eq!(world.manager.state_digest(), before);
    assert_eq!(world.manager.get_num_common_prefix_blocks("A")[0], 2);
    // Its real blocks are hashed later.
    world.allocate_all("B");
    assert_eq!(world.cached(), [1, 2, 3, 4]);
}

#[test]
fn rows_36_and_37_caching_ends_at_hashes_and_row() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("A", 0..8);
    let with = Options { delay: true, ..Options::default() };
    world.allocate_with("A", 8, with);
    let before = world.manager.state_digest();
    let call = world.requests["A"].call(true);
    let error = world.manager.cache_blocks(&call, None, 12).unwrap_err();
    assert!(is_invalid(&error, "num_computed_tokens"), "{error}");
    let hashes = &world.requests["A"].block_hashes()[..1];
    let short = kvyard_core::RequestCall { block_hashes: hashes, ..call };
    let error = world.manager.cache_blocks(&short, None, 8).unwrap_err();
    assert!(is_invalid(&error, "block_hashes"), "{error}");
    assert_eq!(world.manager.state_digest(), before);
    // Repeats and smaller numbers do nothing.
    world.cache("A", 8);
    let before = world.manager.state_digest();
    world.cache("A", 8);
    world.cache("A", 5);
    assert_eq!(world.manager.state_digest(), before);
}

#[test]
fn row_36_an_allocation_needs_its_hashes() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("A", 0..8);
    let before = world.manager.state_digest();
    let call = kvyard_core::RequestCall { block_hashes: &[], ..world.requests["A"].call(true) };
    let error = world.manager.allocate_slots(&AllocateSlots::new(&call, 8)).unwrap_err();
    assert!(is_invalid(&error, "block_hashes"), "{error}");
    assert_eq!(world.manager.state_digest(), before);
}

/// The keys of a row are its manager's to give: nobody else knows whose tokens its blocks hold.
#[test]
fn rows_38_and_39_a_row_gets_its_keys_from_its_manager() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("A", 0..8);
    world.allocate_with("A", 4, Options { delay: true, ..Options::default() });
    let call = world.requests["A"].call(true);
    let row = [BlockId(1)];
    let span = kvyard_core::caching::CacheFullBlocks {
        request: &call,
        row: &row,
        start: 0,
        stop: 1,
        block_size: BLOCK_SIZE,
        group: kvyard_core::GroupId(0),
        mask: kvyard_core::caching::BlockMask::All,
    };
    let before = world.manager.state_digest();
    let error = world.manager.pool_mut().cache_full_blocks(&span).unwrap_err();
    assert!(matches!(error, KVCacheError::NotOwned { block: BlockId(1), .. }), "{error}");
    assert_eq!(world.manager.state_digest(), before);
}

/// A hit is the blocks of this request's own prefix, at their places, and nothing else.
#[test]
fn row_30_a_hit_is_of_this_request() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..12);
    world.free("A");
    world.add("B", 0..13);
    world.add("C", 100..113);
    let hit = world.lookup("B");
    assert_eq!(numbers(hit.blocks.ids()), [1, 2, 3]);
    let wrong = [[1, 1, 3], [2, 1, 3], [0, 2, 3]].map(|ids| {
        let ids = ids.map(BlockId);
        KVCacheBlocks::from_groups([&ids[..]], hit.blocks.pool(), hit.blocks.epoch())
    });
    for blocks in wrong {
        let hit = CacheHit { blocks, ..hit.clone() };
        let error = refused(&mut world, "B", 1, Options { hit: Some(hit), ..Options::default() });
        assert!(matches!(error, KVCacheError::InvalidArgument { .. }), "{error}");
    }
    let error = refused(&mut world, "C", 1, Options { hit: Some(hit), ..Options::default() });
    assert!(error.to_string().contains("other tokens"), "{error}");
}

/// Counts that no request has are refused wherever they come in.
#[test]
fn row_26_counts_beyond_every_request() {
    let window = AttentionKind::SlidingWindow { sliding_window: 6 };
    for kind in [AttentionKind::FullAttention, window] {
        let mut world = Harness::new(of_kind(kind, full(NUM_BLOCKS)));
        world.start("A", 0..8);
        for huge in [u32::MAX, u32::MAX / 2] {
            let before = world.manager.state_digest();
            let call = world.requests["A"].call(true);
            assert!(world.manager.remove_skipped_blocks("A", None, huge, Some(8)).is_err());
            assert!(world.manager.remove_skipped_blocks("A", None, 8, Some(huge)).is_err());
            assert!(world.manager.cache_blocks(&call, None, huge).is_err());
            assert!(world.manager.allocate_slots(&AllocateSlots::new(&call, huge)).is_err());
            let mut far = world.requests["A"].call(true);
            far.view.num_computed_tokens = huge;
            assert!(world.manager.allocate_slots(&AllocateSlots::new(&far, 1)).is_err());
            let hit = world.manager.find_longest_cache_hit(&call, huge);
            assert!(hit.num_tokens <= 8);
            let (_, lengths) = world.manager.find_longest_cache_hit_per_group(&call, huge);
            assert!(lengths[0] <= 8);
            assert_eq!(world.manager.state_digest(), before);
        }
    }
}

#[test]
fn row_44_sums_need_equal_groups() {
    let world = Harness::new(full(NUM_BLOCKS));
    let (one, pool, epoch) = (world.manager.empty_kv_cache_blocks(), world.manager.pool().id(), 0);
    let two = KVCacheBlocks::empty(2, pool, epoch);
    assert!(matches!(one.concat(&two), Err(KVCacheError::InvalidArgument { .. })));
    let foreign = KVCacheBlocks::empty(1, pool + 1, epoch);
    assert!(matches!(one.concat(&foreign), Err(KVCacheError::ForeignBlock { .. })));
    let left = KVCacheBlocks::from_groups([&[BlockId(1)][..], &[BlockId(2)]], pool, 7);
    let right = KVCacheBlocks::from_groups([&[][..], &[BlockId(3)]], pool, 5);
    let sum = left.concat(&right).unwrap();
    assert_eq!(sum.blocks(0), [BlockId(1)]);
    assert_eq!(sum.blocks(1), [BlockId(2), BlockId(3)]);
    assert_eq!(sum.epoch(), 5, "as old as the older");
}

#[test]
fn row_54_hits_without_caching() {
    let mut cached = Harness::new(full(NUM_BLOCKS));
    cached.start("A", 0..8);
    cached.add("B", 0..9);
    let hit = cached.lookup("B").blocks;
    let config = KVCacheManagerConfig { enable_caching: false, ..full(NUM_BLOCKS) };
    let mut world = Harness::new(config);
    world.add("B", 0..9);
    assert!(is_invalid(&refused_hit(&mut world, &hit, 8), "new_computed_blocks"));
}

/// The pool knows blocks and no requests: the manager names who holds the block, and nobody else.
#[test]
fn ownership_errors_name_the_owners() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..4);
    world.start("B", 100..104);
    let error = world.manager.pool_mut().free_counted(&[BlockId(1)]).unwrap_err();
    let text = world.manager.with_owners(error).to_string();
    assert!(text.contains("\"A\"") && !text.contains("\"B\""), "{text}");
}
