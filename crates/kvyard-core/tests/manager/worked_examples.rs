//! `manager.md` §2.3, §6.3.1, §6.4 and §9.13; `groups.md` §2.2, §2.4, §2.9 and §2.10.

use kvyard_core::{AttentionKind, KVCacheManagerConfig, RequestStatus};

use crate::harness::{Harness, NUM_BLOCKS, Options, full, of_kind, v251};

// ------------------------------------------------------------------------------ the free queue (§2.3)

#[test]
fn e1_prefixes_outlive_tails_and_one_request_evicts_another() {
    let mut world = Harness::new(v251(full(8)));
    assert_eq!(world.order(), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(world.start("A", 0..10), [1, 2, 3]);
    assert_eq!(world.cached(), [1, 2]);
    assert_eq!(world.order(), [4, 5, 6, 7]);
    assert!((world.manager.usage() - 3.0 / 7.0).abs() < 1e-12);
    world.free("A");
    assert_eq!(world.order(), [3, 4, 5, 6, 7, 2, 1]);
    world.add("B", (0..8).chain(50..54));
    assert_eq!(world.hit("B"), (8, vec![1, 2]));
    assert_eq!(world.allocate_all("B"), [3]);
    assert_eq!(world.order(), [4, 5, 6, 7]);
    world.free("B");
    assert_eq!(world.order(), [4, 5, 6, 7, 3, 2, 1]);
    world.take_events();
    let (third, second) = (world.hashes("B")[2], world.hashes("B")[1]);
    assert_eq!(world.start("C", 100..124), [4, 5, 6, 7, 3, 2]);
    let removed = &world.take_events()[..2];
    assert_eq!(removed, [("removed", vec![third]), ("removed", vec![second])]);
    assert_eq!(world.order(), [1]);
}

#[test]
fn e2_a_later_free_puts_its_tail_in_front() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..10);
    world.start("B", 100..114);
    assert_eq!(world.order(), [8, 9, 10, 11]);
    world.free("A");
    assert_eq!(world.order(), [3, 8, 9, 10, 11, 2, 1]);
    world.free("B");
    assert_eq!(world.order(), [7, 3, 8, 9, 10, 11, 2, 1, 6, 5, 4]);
}

#[test]
fn a_deferred_free_of_one_group_is_an_immediate_one() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..10);
    let lease = world.manager.pop_blocks_for_free("A", None).unwrap();
    assert_eq!(crate::harness::numbers(lease.ids()), [1, 2, 3]);
    assert_eq!((world.num_free(), world.manager.num_tracked_requests()), (8, 0));
    // Still there to be found (T15).
    world.add("B", 0..10);
    assert_eq!(world.hit("B"), (8, vec![1, 2]));
    world.manager.free_popped(lease).unwrap();
    assert_eq!(world.order(), [3, 4, 5, 6, 7, 8, 9, 10, 11, 2, 1]);
}

// --------------------------------------------------------------------------- allocate_slots (§6.3.1)

#[test]
fn drafts_get_slots_and_no_keys() {
    let mut world = Harness::new(v251(full(NUM_BLOCKS)));
    assert_eq!(world.start("A", 0..6), [1, 2]);
    world.request("A").append_output_tokens(&[6]);
    let with = Options { lookahead: 3, ..Options::default() };
    // One token and three drafts: 6 + 4 + 3 = 13 slots.
    assert_eq!(world.allocate_with("A", 4, with), Some(vec![3, 4]));
    assert_eq!(world.cached(), [1]);
}

#[test]
fn slots_end_at_max_model_len() {
    let config = KVCacheManagerConfig { max_model_len: 10, ..full(NUM_BLOCKS) };
    let mut world = Harness::new(config);
    world.add("A", 0..10);
    let with = Options { lookahead: 5, ..Options::default() };
    assert_eq!(world.allocate_with("A", 10, with), Some(vec![1, 2, 3]));
}

#[test]
fn the_watermark_holds_back_new_requests_while_others_run() {
    let config = KVCacheManagerConfig { watermark: 0.25, ..full(10) };
    let mut world = Harness::new(config);
    assert_eq!(world.manager.watermark_blocks(), 2);
    world.add("A", 0..32);
    let before = world.manager.state_digest();
    assert_eq!(world.allocate("A", 32), None);
    assert_eq!(world.manager.state_digest(), before);
    let alone = || Options { nothing_scheduled: true, ..Options::default() };
    assert_eq!(world.allocate_with("A", 32, alone()).unwrap().len(), 8);
    // A running request may have the last block.
    world.request("A").append_output_tokens(&[32]);
    assert_eq!(world.allocate("A", 1), Some(vec![9]));
}

#[test]
fn the_gate_wants_room_for_the_whole_sequence() {
    let mut world = Harness::new(full(6));
    world.add("A", 0..40);
    let with = Options { must_fit: true, ..Options::default() };
    assert_eq!(world.allocate_with("A", 4, with), None);
    assert_eq!(world.allocate("A", 4), Some(vec![1]));
}

#[test]
fn an_asynchronous_load_is_cached_when_it_has_landed() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("A", 0..12);
    let with = Options { external: 8, delay: true, ..Options::default() };
    assert_eq!(world.allocate_with("A", 0, with), Some(vec![]));
    assert_eq!((world.row("A"), world.num_cached("A")), (vec![1, 2], Some(0)));
    assert!(world.cached().is_empty());
    world.cache("A", 8);
    assert_eq!((world.cached(), world.num_cached("A")), (vec![1, 2], Some(2)));
    assert_eq!(world.allocate("A", 4), Some(vec![3]));
    assert_eq!(world.cached(), [1, 2, 3]);
}

#[test]
fn a_synchronous_load_is_cached_at_once() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("A", 0..12);
    let with = Options { external: 8, ..Options::default() };
    assert_eq!(world.allocate_with("A", 4, with), Some(vec![3]));
    assert_eq!(world.row("A"), [1, 2, 3]);
    assert_eq!(world.cached(), [1, 2, 3]);
}

/// §6.3: what is needed are new blocks and hits that sit in the free queue.
#[test]
fn hits_in_the_free_queue_count_as_needed() {
    let mut world = Harness::new(full(6));
    world.start("A", 0..8);
    world.free("A");
    world.start("other", 100..108);
    assert_eq!(world.num_free(), 3);
    // Two hits from the queue and three more: 5 of 3.
    world.add("B", 0..20);
    let hit = world.lookup("B");
    assert_eq!(hit.num_tokens, 8);
    let with = Options { hit: Some(hit), ..Options::default() };
    assert_eq!(world.allocate_with("B", 12, with), None);
    assert_eq!(world.order(), [5, 2, 1], "the hits were not touched");
    // Two hits and one more fit.
    assert_eq!(world.allocate("B", 4).unwrap().len(), 1);
}

// -------------------------------------------------------------------------------------- lookup (§6.4)

#[test]
fn the_last_token_is_always_computed_again() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    world.add("B", 0..8);
    assert_eq!(world.hit("B"), (4, vec![1]));
    world.add("C", 0..9);
    assert_eq!(world.hit("C"), (8, vec![1, 2]));
}

#[test]
fn a_preempted_request_finds_its_own_blocks() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..9);
    world.preempt("A");
    assert_eq!(world.hit("A"), (8, vec![1, 2]));
    assert_eq!(world.allocate_all("A"), [3]);
}

#[test]
fn who_does_not_read_the_cache_finds_nothing() {
    let mut world = Harness::new(v251(full(NUM_BLOCKS)));
    world.start("A", 0..9);
    world.manager.make_prefix_cache_stats();
    world.add("B", 0..9);
    world.request("B").skip_reading_prefix_cache = true;
    assert_eq!(world.hit("B"), (0, vec![]));
    assert_eq!(world.manager.prefix_cache_stats().unwrap().requests, 0);
}

#[test]
fn without_caching_nothing_is_found_or_kept() {
    let config = KVCacheManagerConfig { enable_caching: false, ..full(NUM_BLOCKS) };
    let mut world = Harness::new(config);
    world.start("A", 0..9);
    assert!(world.cached().is_empty());
    world.add("B", 0..9);
    assert_eq!(world.hit("B"), (0, vec![]));
    world.free("A");
    assert_eq!(world.order(), [3, 2, 1, 4, 5, 6, 7, 8, 9, 10, 11]);
    assert!(world.take_events().is_empty());
}

#[test]
fn unknown_requests_are_none() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    let before = world.manager.state_digest();
    world.free("nobody");
    assert!(world.manager.get_blocks("nobody", None).is_empty());
    assert_eq!(world.manager.get_num_common_prefix_blocks("nobody").to_vec(), [0]);
    world.manager.remove_skipped_blocks("nobody", None, 8, Some(4)).unwrap();
    let lease = world.manager.pop_blocks_for_free("nobody", None).unwrap();
    assert_eq!((lease.ids().len(), lease.group_ends()), (0, &[0][..]));
    assert_eq!(world.manager.state_digest(), before);
    world.manager.free_popped(lease).unwrap();
}

#[test]
fn newly_allocated_ids_are_told_once() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.start("A", 0..8);
    world.free("A");
    world.add("B", 0..12);
    world.allocate_all("B");
    let taken = world.manager.take_new_block_ids();
    // Hits are not new.
    assert_eq!(crate::harness::numbers(&taken), [1, 2, 3]);
    assert!(world.manager.take_new_block_ids().is_empty());
}

#[test]
fn engines_that_never_zero_blocks_track_none() {
    let config = KVCacheManagerConfig { track_new_blocks: false, ..full(NUM_BLOCKS) };
    let mut world = Harness::new(config);
    world.start("A", 0..8);
    assert!(world.manager.take_new_block_ids().is_empty());
}

// -------------------------------------------------------------------- full attention (groups.md §2.2)

fn sixteen(num_blocks: u32) -> KVCacheManagerConfig {
    KVCacheManagerConfig::new(num_blocks, 16, 512)
}

#[test]
fn evictable_hits_leave_the_queue_and_used_ones_do_not() {
    let mut world = Harness::new(sixteen(10));
    world.start("A", 0..48);
    world.free("A");
    // Block 2 is in use, 1 and 3 are in the queue.
    let lease = world.manager.pool_mut().touch(&[kvyard_core::BlockId(2)]).unwrap();
    world.add("B", 0..50);
    assert_eq!(world.hit("B"), (48, vec![1, 2, 3]));
    let before = world.num_free();
    assert_eq!(world.allocate_all("B"), [4]);
    assert_eq!(before - world.num_free(), 3);
    assert_eq!((world.row("B"), world.num_cached("B")), (vec![1, 2, 3, 4], Some(3)));
    // 65 tokens: one block more; back to 40 (rejected drafts): nothing happens.
    world.request("B").append_output_tokens(&(50..65).collect::<Vec<_>>());
    assert_eq!(world.allocate("B", 15), Some(vec![5]));
    world.request("B").num_computed_tokens = 39;
    assert_eq!(world.allocate("B", 1), Some(vec![]));
    assert_eq!(world.row("B").len(), 5);
    world.manager.pool_mut().free(lease).unwrap();
}

#[test]
fn a_hit_ends_before_the_last_token_and_eagle_gives_up_a_block() {
    let mut world = Harness::new(sixteen(10));
    world.start("A", 0..48);
    // At most 47 tokens.
    world.add("B", 0..48);
    assert_eq!(world.hit("B"), (32, vec![1, 2]));
    let eagle = KVCacheManagerConfig { use_eagle: true, ..sixteen(10) };
    let mut world = Harness::new(eagle);
    world.start("A", 0..48);
    world.add("B", 0..50);
    assert_eq!(world.hit("B"), (32, vec![1, 2]));
}

/// C11, single group: the same in both versions.
#[test]
fn eagle_hits_by_prompt_length() {
    for config in [full(61), v251(full(61))] {
        let config = KVCacheManagerConfig { use_eagle: true, ..config };
        for (length, tokens) in [(47, 40), (48, 40), (49, 44)] {
            let mut world = Harness::new(config.clone());
            world.start("A", 0..length);
            world.free("A");
            world.add("B", 0..length);
            assert_eq!(world.hit("B").0, tokens, "{length}");
        }
    }
}

#[test]
fn external_tokens_follow_the_hits() {
    let mut world = Harness::new(sixteen(10));
    world.start("A", 0..16);
    world.free("A");
    world.add("B", (0..16).chain(100..130));
    let with = Options { hit: Some(world.lookup("B")), external: 20, ..Options::default() };
    // 36 tokens are computed then, in three blocks; ten more fit in them.
    let before = world.num_free();
    assert_eq!(world.allocate_with("B", 10, with), Some(vec![]));
    assert_eq!(before - world.num_free(), 3);
    assert_eq!(world.row("B"), [1, 2, 3]);
}

#[test]
fn common_prefix_of_two_requests() {
    for config in [sixteen(10), v251(sixteen(10))] {
        let mut world = Harness::new(config);
        world.start("A", 0..40);
        world.add("B", (0..32).chain(100..108));
        world.allocate_all("B");
        assert_eq!(world.manager.get_num_common_prefix_blocks("A").to_vec(), [2]);
        assert_eq!(world.manager.get_num_common_prefix_blocks("B").to_vec(), [2]);
        // A third that shares nothing.
        world.start("C", 200..210);
        assert_eq!(world.manager.get_num_common_prefix_blocks("A").to_vec(), [0]);
        world.free("C");
        world.free("B");
        assert_eq!(world.manager.get_num_common_prefix_blocks("A").to_vec(), [3]);
    }
}

// --------------------------------------------------------------------------- R-SWA (groups.md §2.4)

fn rswa(num_blocks: u32) -> KVCacheManagerConfig {
    of_kind(AttentionKind::RSWA { rswa_window: 6 }, full(num_blocks))
}

/// Prompt 10, window 6. Without keys a released block is the next to be used.
#[test]
fn a_gap_opens_between_prompt_and_window() {
    let config = KVCacheManagerConfig { enable_caching: false, ..rswa(NUM_BLOCKS) };
    let mut world = Harness::new(config);
    world.start("A", 0..10);
    world.request("A").append_output_tokens(&(10..32).collect::<Vec<_>>());
    world.allocate("A", 11);
    let skip = |world: &mut Harness, computed| {
        world.manager.remove_skipped_blocks("A", None, computed, Some(10)).unwrap();
        world.manager.validate();
    };
    skip(&mut world, 21);
    assert_eq!(world.row("A"), [1, 2, 3, 4, 5, 6]);
    skip(&mut world, 22);
    assert_eq!(world.row("A"), [1, 2, 3, 0, 5, 6]);
    skip(&mut world, 26);
    assert_eq!(world.allocate("A", 7), Some(vec![5]));
    assert_eq!(world.row("A"), [1, 2, 3, 0, 0, 6, 5]);
    skip(&mut world, 30);
    assert_eq!(world.allocate("A", 4), Some(vec![6]));
    assert_eq!(world.row("A"), [1, 2, 3, 0, 0, 0, 5, 6]);
    assert!(world.manager.take_new_block_ids().is_empty(), "R-SWA records no new ids");
}

#[test]
fn what_was_cached_in_the_gap_can_still_be_found() {
    let mut world = Harness::new(rswa(NUM_BLOCKS));
    world.start("A", 0..10);
    for token in 10..31 {
        world.request("A").append_output_tokens(&[token]);
        world.allocate("A", 1);
    }
    // The call for the last token saw 30 as computed: 30 - 6 = 24 = position 6.
    assert_eq!(world.row("A"), [1, 2, 3, 0, 0, 0, 7, 8]);
    world.add("B", 0..25);
    assert_eq!(world.hit("B"), (24, vec![1, 2, 3, 4, 5, 6]));
}

/// E5 of §2.3 for this kind: what no token reads is released also by a call that is then refused.
#[test]
fn a_refusal_keeps_the_release_and_nothing_else() {
    // Prompt 4 = position 0; 22 - 6 = 16 = position 4: positions 1 to 3 are the gap.
    let mut world = Harness::new(rswa(7));
    world.start("P", 0..4);
    world.request("P").append_output_tokens(&(4..22).collect::<Vec<_>>());
    assert_eq!(world.allocate("P", 18).unwrap().len(), 5);
    let row = world.row("P");
    assert_eq!((row.len(), world.num_free()), (6, 0));
    world.request("P").append_output_tokens(&(22..50).collect::<Vec<_>>());
    // 50 tokens need 13 blocks.
    assert_eq!(world.allocate("P", 28), None);
    assert_eq!(world.row("P"), [row[0], 0, 0, 0, row[4], row[5]]);
    assert_eq!(world.order(), [row[3], row[2], row[1]], "the last one first, all cached");
    assert_eq!(world.num_cached("P"), Some(5));
    // Again: nothing more to release, so nothing changes at all.
    let before = world.manager.state_digest();
    assert_eq!(world.allocate("P", 28), None);
    assert_eq!(world.manager.state_digest(), before);
}

/// C10's rule for this kind: tokens in flight still read their window.
#[test]
fn tokens_in_flight_keep_their_window() {
    let mut world = Harness::new(rswa(8));
    world.start("A", 0..10);
    world.request("A").append_output_tokens(&(10..22).collect::<Vec<_>>());
    world.allocate("A", 12);
    world.request("A").append_output_tokens(&[22]);
    world.request("A").num_in_flight_tokens = 1;
    world.allocate("A", 1);
    assert_eq!(world.row("A"), [1, 2, 3, 4, 5, 6]);
    world.request("A").num_in_flight_tokens = 0;
    world.request("A").num_computed_tokens = 22;
    world.allocate("A", 1);
    assert_eq!(world.row("A"), [1, 2, 3, 0, 5, 6]);
}

#[test]
fn a_finished_request_may_drop_its_gap_first() {
    let mut world = Harness::new(rswa(8));
    world.start("A", 0..10);
    world.request("A").append_output_tokens(&(10..22).collect::<Vec<_>>());
    world.allocate("A", 12);
    // Without the prompt's length nothing is skipped.
    world.manager.remove_skipped_blocks("A", None, 22, None).unwrap();
    assert_eq!(world.row("A"), [1, 2, 3, 4, 5, 6]);
    world.manager.remove_skipped_blocks("A", None, 22, Some(10)).unwrap();
    assert_eq!(world.row("A"), [1, 2, 3, 0, 5, 6]);
    world.manager.validate();
}

// ----------------------------------------------------------- context parallelism (groups.md §2.9, 2.10)

#[test]
fn ranks_share_the_tokens_of_a_block() {
    let config = KVCacheManagerConfig {
        dcp_world_size: 4,
        scheduler_block_size: 256,
        hash_block_size: 256,
        max_model_len: 4096,
        ..of_kind(AttentionKind::MLAAttention, KVCacheManagerConfig::new(10, 64, 4096))
    };
    let mut world = Harness::new(config);
    assert_eq!(world.start("A", 0..1000), [1, 2, 3, 4]);
    assert_eq!(world.manager.take_new_block_ids().len(), 4);
    assert_eq!(world.cached(), [1, 2, 3]);
}

/// W11: 0.25.1 keeps too many.
#[test]
fn blocks_for_computed_tokens_under_context_parallelism() {
    let config = KVCacheManagerConfig {
        dcp_world_size: 2,
        scheduler_block_size: 8,
        hash_block_size: 8,
        ..full(NUM_BLOCKS)
    };
    for (config, kept) in [(config.clone(), 2), (v251(config), 3)] {
        let mut world = Harness::new(config);
        world.start("A", 0..24);
        let blocks = world.manager.get_blocks_for_computed_tokens("A", None, 9);
        assert_eq!(blocks.ids().len(), kept);
        assert!(world.manager.get_blocks_for_computed_tokens("?", None, 9).is_empty());
    }
}

// ----------------------------------------------------------------------- scheduler's traces (§9.13)

#[test]
fn a_chunked_prompt_and_two_outputs() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("A", 0..20);
    assert_eq!(world.hit("A").0, 0);
    assert_eq!(world.allocate("A", 8), Some(vec![1, 2]));
    assert_eq!(world.allocate("A", 8), Some(vec![3, 4]));
    assert_eq!(world.allocate("A", 4), Some(vec![5]));
    world.request("A").append_output_tokens(&[20]);
    assert_eq!(world.allocate("A", 1), Some(vec![6]));
    world.free("A");
    assert_eq!(world.num_free(), 11);
}

#[test]
fn a_load_with_an_invalid_block_is_computed_in_place() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("A", 0..16);
    let with = Options { external: 12, delay: true, ..Options::default() };
    assert_eq!(world.allocate_with("A", 0, with), Some(vec![]));
    // Block index 1 is bad: computed falls back to 4.
    world.request("A").num_computed_tokens = 4;
    world.cache("A", 4);
    assert_eq!(world.allocate("A", 12), Some(vec![4]));
    assert_eq!((world.row("A"), world.cached()), (vec![1, 2, 3, 4], vec![1, 2, 3, 4]));
}

#[test]
fn a_load_that_failed_whole_starts_over() {
    let mut world = Harness::new(full(NUM_BLOCKS));
    world.add("A", 0..16);
    let with = || Options { external: 12, delay: true, ..Options::default() };
    world.allocate_with("A", 0, with());
    world.free("A");
    world.request("A").num_computed_tokens = 0;
    world.request("A").status = RequestStatus::Waiting;
    assert_eq!(world.hit("A").0, 0);
    assert_eq!(world.allocate_with("A", 0, with()), Some(vec![]));
    assert_eq!(world.row("A"), [3, 2, 1]);
}

/// No look-ahead counts in 0.25.1's gate; corrected, it does, but never for a lone request.
#[test]
fn the_gate_and_look_ahead() {
    let gated = |lookahead| Options { must_fit: true, lookahead, ..Options::default() };
    // 19 tokens take 5 of 6 blocks, with 8 for look-ahead 7.
    for (config, fits) in [(v251(full(8)), true), (full(8), false)] {
        let mut world = Harness::new(config);
        world.start("other", 100..104);
        world.add("A", 0..19);
        assert_eq!(world.allocate_with("A", 4, gated(8)).is_some(), fits);
        assert!(world.allocate_with("A", 4, gated(0)).is_some());
    }
    let mut alone = Harness::new(full(6));
    alone.add("A", 0..20);
    assert_eq!(alone.allocate_with("A", 20, gated(8)).unwrap().len(), 5);
}
