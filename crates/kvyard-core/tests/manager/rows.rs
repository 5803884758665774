//! Rows, plans, snapshots, the digest.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kvyard_core::block_table::RowEdit;
use kvyard_core::hashing::{BlockHasher, HashAlgorithm};
use kvyard_core::{
    AllocateSlots, AttentionKind, BlockId, GroupId, KVCacheError, KVCacheManager,
    KVCacheManagerConfig, Request, RequestRow,
};

use crate::harness::{Harness, NUM_BLOCKS, Options, full, numbers, of_kind};

#[test]
fn the_lowest_free_row_is_taken() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    for (id, row) in [("A", 0), ("B", 1), ("C", 2)] {
        world.start(id, 0..4);
        assert_eq!(world.manager.request_row(id), Some(RequestRow(row)));
    }
    world.free("B");
    world.free("A");
    assert_eq!(world.manager.request_row("C"), Some(RequestRow(2)));
    assert_eq!(world.manager.request_name(RequestRow(0)), None);
    for (id, row) in [("D", 0), ("E", 1), ("F", 3)] {
        world.start(id, 0..4);
        assert_eq!(world.manager.request_row(id), Some(RequestRow(row)));
        assert_eq!(world.manager.request_name(RequestRow(row)), Some(id));
    }
    assert_eq!(world.manager.num_tracked_requests(), 4);
}

#[test]
fn a_refused_request_gets_no_row() {
    let mut world = Harness::new(full(3));
    world.add("A", 0..12);
    assert_eq!(world.allocate("A", 12), None);
    assert_eq!(world.manager.request_row("A"), None);
}

/// A hint only saves the look-up of the name.
#[test]
fn a_wrong_hint_does_no_harm() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    world.start("B", 100..108);
    for hint in [None, Some(RequestRow(0)), Some(RequestRow(1)), Some(RequestRow(77))] {
        let blocks = world.manager.get_blocks("B", hint);
        assert_eq!(numbers(blocks.ids()), [3, 4]);
        assert!(world.manager.get_blocks("nobody", hint).is_empty());
    }
    world.manager.free("B", Some(RequestRow(0)));
    assert_eq!(world.row("A"), [1, 2]);
    assert_eq!(world.row("B"), []);
}

#[test]
fn edits_tell_how_rows_changed() {
    let config = KVCacheManagerConfig {
        track_row_edits: true,
        ..of_kind(AttentionKind::RSWA { rswa_window: 6 }, full(NUM_BLOCKS))
    };
    let mut world = Harness::new(config);
    world.start("A", 0..10);
    world.request("A").append_output_tokens(&(10..22).collect::<Vec<_>>());
    world.allocate("A", 12);
    world.request("A").append_output_tokens(&[22]);
    world.allocate("A", 1);
    world.free("A");
    let (row, group) = (RequestRow(0), GroupId(0));
    let expected = [
        RowEdit::Append { row, group, start: 0, blocks: &[1, 2, 3].map(BlockId) },
        RowEdit::Append { row, group, start: 3, blocks: &[4, 5, 6].map(BlockId) },
        RowEdit::Null { row, group, start: 3, stop: 4 },
        RowEdit::Clear { row },
    ];
    let edits = world.manager.row_edits_mut();
    assert_eq!(edits.iter().collect::<Vec<_>>(), expected);
    edits.clear();
    assert_eq!(edits.iter().count(), 0);
}

#[test]
fn hits_and_external_blocks_are_appended_too() {
    let config = KVCacheManagerConfig { track_row_edits: true, ..full(NUM_BLOCKS) };
    let mut world = Harness::new(config);
    world.start("A", 0..4);
    world.manager.row_edits_mut().clear();
    world.add("B", 0..16);
    let with = Options { hit: Some(world.lookup("B")), external: 4, ..Options::default() };
    world.allocate_with("B", 8, with);
    let mut mirrored = Vec::new();
    for edit in world.manager.row_edits_mut().iter() {
        let RowEdit::Append { start, blocks, .. } = edit else {
            panic!("{edit:?}");
        };
        assert_eq!(start as usize, mirrored.len());
        mirrored.extend(numbers(blocks));
    }
    assert_eq!(mirrored, [1, 2, 3, 4]);
    assert_eq!(mirrored, world.row("B"));
}

#[test]
fn without_a_reader_no_edit_is_kept() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    world.free("A");
    assert_eq!(world.manager.row_edits_mut().iter().count(), 0);
}

/// Two managers, one driven in parts with reads in between.
#[test]
fn a_plan_changes_nothing_until_it_is_applied() {
    let (mut whole, mut parts) = (Harness::new(full(NUM_BLOCKS)), Harness::new(full(NUM_BLOCKS)));
    for world in [&mut whole, &mut parts] {
        world.start("A", 0..10);
        world.free("A");
        world.add("B", 0..20);
    }
    let (hit, other) = (whole.lookup("B"), parts.lookup("B"));
    let call = parts.requests["B"].call(true);
    let arguments = AllocateSlots {
        num_new_computed_tokens: 8,
        new_computed_blocks: Some(&other.blocks),
        ..AllocateSlots::new(&call, 12)
    };
    let before = parts.manager.state_digest();
    let mut plan = parts.manager.plan_allocate_slots(&arguments).unwrap();
    assert!(plan.is_admitted());
    parts.manager.reserve_allocate_slots(&mut plan).unwrap();
    assert_eq!(parts.manager.state_digest(), before);
    assert!(parts.manager.get_blocks("B", None).is_empty());
    // A plan may be dropped, and made again.
    let mut again = parts.manager.plan_allocate_slots(&arguments).unwrap();
    parts.manager.reserve_allocate_slots(&mut again).unwrap();
    let fresh = parts.manager.apply_allocate_slots(again).unwrap();
    let with = Options { hit: Some(hit), ..Options::default() };
    assert_eq!(whole.allocate_with("B", 12, with), Some(numbers(fresh.ids())));
    assert_eq!(parts.manager.state_digest(), whole.manager.state_digest());
    // From here on the first one is void.
    let error = parts.manager.reserve_allocate_slots(&mut plan).unwrap_err();
    assert!(matches!(error, KVCacheError::InvalidArgument { argument: "plan", .. }), "{error}");
}

/// Whatever happens to the blocks or the requests in between voids a plan, and so does a plan of
/// another manager.
#[test]
fn a_plan_is_good_for_the_state_it_was_made_for() {
    type Change = fn(&mut KVCacheManager);
    let changes: [Change; 9] = [
        |manager| manager.free("A", None),
        |manager| manager.pool_mut().evict_blocks(&[BlockId(2)]).unwrap(),
        |manager| manager.remove_skipped_blocks("A", None, 8, Some(4)).unwrap(),
        |manager| {
            let lease = manager.pop_blocks_for_free("A", None).unwrap();
            manager.free_popped(lease).unwrap();
        },
        // Half of the same: the blocks stay held.
        |manager| drop(manager.pop_blocks_for_free("A", None).unwrap()),
        |manager| drop(manager.pool_mut().touch(&[BlockId(1)]).unwrap()),
        // A step inside a block, which changes no row.
        |manager| {
            let hasher = HashAlgorithm::Sha256;
            let hasher =
                BlockHasher::new(hasher, hasher.hash_text("0"), 4, manager.config().semantics);
            let request =
                Request::new("A", (0..8).collect(), Arc::default(), hasher.ok().map(Arc::new));
            let call = request.call(true);
            let fresh = manager.allocate_slots(&AllocateSlots::new(&call, 8)).unwrap();
            assert!(fresh.is_some_and(|fresh| fresh.is_empty()));
        },
        |manager| {
            let lease = manager.pool_mut().get_new_blocks(1).unwrap();
            manager.pool_mut().free(lease).unwrap();
        },
        |manager| {
            let lease = manager.pool_mut().touch(&[BlockId(1)]).unwrap();
            manager.pool_mut().free(lease).unwrap();
        },
    ];
    for change in changes {
        let window = AttentionKind::SlidingWindow { sliding_window: 2 };
        let mut world = Harness::new(of_kind(window, full(NUM_BLOCKS)));
        world.start("A", 0..8);
        world.add("B", 100..110);
        let call = world.requests["B"].call(true);
        let arguments = AllocateSlots::new(&call, 10);
        let mut plan = world.manager.plan_allocate_slots(&arguments).unwrap();
        // Another manager with the same past is another manager.
        let mut other = Harness::new(of_kind(window, full(NUM_BLOCKS)));
        other.start("A", 0..8);
        assert!(other.manager.reserve_allocate_slots(&mut plan).is_err());
        world.manager.reserve_allocate_slots(&mut plan).unwrap();
        change(&mut world.manager);
        let before = world.manager.state_digest();
        let error = world.manager.reserve_allocate_slots(&mut plan).unwrap_err();
        assert!(matches!(error, KVCacheError::InvalidArgument { argument: "plan", .. }), "{error}");
        let applied = catch_unwind(AssertUnwindSafe(|| world.manager.apply_allocate_slots(plan)));
        assert!(applied.is_err());
        assert_eq!(world.manager.state_digest(), before);
    }
}

#[test]
fn a_refusal_is_a_plan_too() {
    let mut world = Harness::new(full(3));
    world.add("A", 0..12);
    let call = world.requests["A"].call(true);
    let arguments = AllocateSlots::new(&call, 12);
    let mut plan = world.manager.plan_allocate_slots(&arguments).unwrap();
    assert!(!plan.is_admitted());
    world.manager.reserve_allocate_slots(&mut plan).unwrap();
    assert!(world.manager.apply_allocate_slots(plan).is_none());
}

/// A snapshot is one: later changes do not show in it.
#[test]
fn get_blocks_is_a_snapshot() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    let before = world.manager.get_blocks("A", None);
    world.request("A").append_output_tokens(&[8]);
    world.allocate("A", 1);
    assert_eq!(numbers(before.ids()), [1, 2]);
    assert_eq!(world.row("A"), [1, 2, 3]);
    world.free("A");
    assert_eq!(numbers(before.ids()), [1, 2]);
}

/// "Unchanged digest" says something only if every change shows in it.
#[test]
fn the_digest_sees_every_kind_of_change() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    let mut seen = vec![world.manager.state_digest()];
    let mut changed = |world: &Harness, what: &str| {
        let digest = world.manager.state_digest();
        assert!(!seen.contains(&digest), "{what} does not show in the digest");
        seen.push(digest);
    };
    world.add("A", 0..8);
    let with = Options { delay: true, ..Options::default() };
    world.allocate_with("A", 8, with);
    changed(&world, "an allocation");
    world.cache("A", 8);
    changed(&world, "a key");
    world.take_events();
    changed(&world, "taking events");
    world.manager.take_new_block_ids();
    changed(&world, "taking new ids");
    world.manager.make_prefix_cache_stats();
    changed(&world, "taking statistics");
    let lease = world.manager.pool_mut().touch(&[BlockId(1)]).unwrap();
    changed(&world, "a reference handed out");
    let ids = world.manager.pool_mut().dissolve(lease).unwrap();
    changed(&world, "a reference that is no lease's any more");
    world.manager.pool_mut().free_counted(&ids).unwrap();
    world.manager.pool_mut().evict_blocks(&[BlockId(2)]).unwrap();
    changed(&world, "an eviction");
    world.free("A");
    changed(&world, "a free");
}

/// ... and two equal histories have equal digests, whatever the pools are called.
#[test]
fn equal_histories_have_equal_digests() {
    let run = || {
        let mut world = Harness::new(full(NUM_BLOCKS));
        world.start("A", 0..10);
        world.free("A");
        world.start("B", 0..12);
        world.manager.state_digest()
    };
    assert_eq!(run(), run());
}
