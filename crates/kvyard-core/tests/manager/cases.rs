//! `cases.md`: C07, C14, C21, C22 c and d, and what is right in both versions, for one group.

use kvyard_core::{BlockId, KVCacheManagerConfig};

use crate::harness::{Harness, Options, full, v251};

fn both(num_blocks: u32) -> [KVCacheManagerConfig; 2] {
    [full(num_blocks), v251(full(num_blocks))]
}

fn common(world: &Harness, id: &str) -> usize {
    world.manager.get_num_common_prefix_blocks(id)[0]
}

#[test]
fn c07_popped_blocks_are_no_common_prefix() {
    for (config, while_popped) in [(full(21), 0), (v251(full(21)), 2)] {
        let mut world = Harness::new(config);
        world.add("A1", (0..8).chain([50]));
        world.allocate_all("A1");
        world.add("A2", (0..8).chain([60]));
        world.allocate_all("A2");
        world.start("B1", 100..109);
        assert_eq!(common(&world, "A1"), 0);
        let lease = world.manager.pop_blocks_for_free("A2", None).unwrap();
        assert_eq!(common(&world, "A1"), while_popped);
        world.manager.free_popped(lease).unwrap();
        assert_eq!(common(&world, "A1"), 0);
    }
}

/// The same kind: a third party's references make no prefix common either.
#[test]
fn c07_touched_blocks_are_no_common_prefix() {
    for (config, while_touched) in [(full(21), 0), (v251(full(21)), 1)] {
        let mut world = Harness::new(config);
        world.start("A", 0..9);
        world.start("B", 100..109);
        let lease = world.manager.pool_mut().touch(&[BlockId(1)]).unwrap();
        assert_eq!(common(&world, "A"), while_touched);
        world.manager.pool_mut().free(lease).unwrap();
    }
}

#[test]
fn c14_a_copy_goes_while_another_serves() {
    for (config, told) in [(full(7), 0), (v251(full(7)), 1)] {
        let mut world = Harness::new(config);
        assert_eq!(world.start("A", 0..8), [1, 2]);
        world.take_events();
        world.add("B", 0..8);
        assert_eq!(world.hit("B").0, 4);
        assert_eq!(world.allocate_all("B"), [3]);
        let second = world.hashes("A")[1];
        assert_eq!(world.take_events(), [("stored", vec![second])]);
        world.free("A");
        world.free("B");
        assert_eq!(world.order(), [4, 5, 6, 2, 3, 1]);
        assert_eq!(world.start("C", 100..116), [4, 5, 6, 2]);
        let removed = world.take_events().into_iter().filter(|(kind, _)| *kind == "removed");
        let removed: Vec<_> = removed.collect();
        assert_eq!(removed, vec![("removed", vec![second]); told]);
        world.add("D", (0..8).chain([55]));
        assert_eq!(world.hit("D"), (8, vec![1, 3]));
        // Now the last copy goes.
        world.start("E", 200..204);
        let removed = world.take_events();
        assert_eq!(removed[0], ("removed", vec![second]));
    }
}

#[test]
fn c22_c_reserved_blocks() {
    for config in both(11) {
        for (reserved, row) in [(7, None), (6, Some(vec![1, 2, 3, 4]))] {
            let mut world = Harness::new(config.clone());
            world.add("A", 0..32);
            let with = Options { external: 16, reserved, delay: true, ..Options::default() };
            let admitted = world.allocate_with("A", 0, with);
            assert_eq!(admitted.map(|_| world.row("A")), row);
        }
    }
}

#[test]
fn c22_d_watermark() {
    for config in both(11) {
        let config = KVCacheManagerConfig { watermark: 0.3, ..config };
        let mut world = Harness::new(config);
        assert_eq!(world.manager.watermark_blocks(), 3);
        world.add("A", 0..32);
        assert_eq!(world.allocate("A", 32), None);
        let with = Options { nothing_scheduled: true, ..Options::default() };
        assert_eq!(world.allocate_with("A", 32, with).unwrap(), [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}

// ------------------------------------------------------------------------------ right in both versions

#[test]
fn an_asynchronous_load_ends_inside_a_block() {
    for config in both(21) {
        let mut world = Harness::new(config);
        world.add("A", 0..30);
        let with = Options { external: 10, delay: true, ..Options::default() };
        world.allocate_with("A", 0, with);
        world.add("B", 0..30);
        assert_eq!(world.hit("B").0, 0);
        world.cache("A", 10);
        assert_eq!((world.row("A").len(), world.cached()), (3, vec![1, 2]));
        assert_eq!(world.hit("B").0, 8);
    }
}

#[test]
fn drafts_are_never_hashed() {
    for config in both(21) {
        let mut world = Harness::new(config);
        world.start("A", 0..6);
        world.request("A").append_output_tokens(&[6]);
        let with = Options { lookahead: 3, ..Options::default() };
        world.allocate_with("A", 4, with);
        assert_eq!((world.row("A").len(), world.cached()), (4, vec![1]));
    }
}

#[test]
fn preempt_and_resume() {
    for config in both(7) {
        let config = KVCacheManagerConfig {
            semantics: config.semantics,
            ..KVCacheManagerConfig::new(7, 16, 512)
        };
        let mut world = Harness::new(config);
        assert_eq!(world.start("r0", 0..34), [1, 2, 3]);
        assert_eq!(world.start("r1", 100..134), [4, 5, 6]);
        world.request("r0").append_output_tokens(&(34..49).collect::<Vec<_>>());
        assert_eq!(world.allocate("r0", 15), None);
        world.preempt("r1");
        assert_eq!(world.order(), [6, 5, 4]);
        assert_eq!(world.allocate("r0", 15), Some(vec![6]));
        let hit = world.lookup("r1");
        assert_eq!(hit.num_tokens, 32);
        let with = |hit| Options { hit: Some(hit), ..Options::default() };
        assert_eq!(world.allocate_with("r1", 2, with(hit)), None);
        world.free("r0");
        let hit = world.lookup("r1");
        assert_eq!(hit.num_tokens, 32);
        assert_eq!(world.allocate_with("r1", 2, with(hit)), Some(vec![6]));
        assert_eq!(world.row("r1"), [4, 5, 6]);
    }
}

#[test]
fn a_reset_waits_until_everything_is_back() {
    for config in both(11) {
        let mut world = Harness::new(config);
        world.start("A", 0..9);
        world.take_events();
        assert!(!world.manager.reset_prefix_cache().unwrap());
        let lease = world.manager.pop_blocks_for_free("A", None).unwrap();
        assert!(!world.manager.reset_prefix_cache().unwrap());
        assert!(world.take_events().is_empty());
        assert!(!world.manager.prefix_cache_stats().unwrap().reset);
        world.manager.free_popped(lease).unwrap();
        assert!(world.manager.reset_prefix_cache().unwrap());
        assert_eq!(world.take_events(), [("cleared", vec![])]);
        assert!(world.manager.prefix_cache_stats().unwrap().reset);
        world.add("B", 0..9);
        assert_eq!(world.hit("B").0, 0);
    }
}

#[test]
fn evicting_in_the_middle_of_a_chain() {
    for config in both(11) {
        let mut world = Harness::new(config);
        world.start("A", 0..20);
        world.free("A");
        world.manager.pool_mut().evict_blocks(&[BlockId(3)]).unwrap();
        assert_eq!(world.order(), [6, 7, 8, 9, 10, 5, 4, 3, 2, 1]);
        world.add("B", 0..20);
        assert_eq!(world.hit("B"), (8, vec![1, 2]));
    }
}

#[test]
fn an_evicted_running_request_is_not_published_again() {
    for config in both(11) {
        let mut world = Harness::new(config);
        world.start("A", 0..12);
        world.manager.pool_mut().evict_blocks(&[1, 2, 3].map(BlockId)).unwrap();
        world.cache("A", 12);
        world.add("B", 0..13);
        assert_eq!(world.hit("B").0, 0);
    }
}

#[test]
fn removals_are_told_before_the_stores_that_caused_them() {
    for config in both(4) {
        let mut world = Harness::new(config);
        world.start("A", 0..12);
        world.free("A");
        world.take_events();
        world.start("B", 100..108);
        let (a, b) = (world.hashes("A").to_vec(), world.hashes("B").to_vec());
        // The tail goes first.
        let expected = [("removed", vec![a[2]]), ("removed", vec![a[1]]), ("stored", b)];
        assert_eq!(world.take_events(), expected);
    }
}
