//! Prefix-cache statistics (`manager.md` §6.4, C21).

use kvyard_core::stats::PrefixCacheStats;

use crate::harness::{Harness, Options, full, v251};

fn refused_three_times(world: &mut Harness) {
    world.add("A", 0..60);
    for _ in 0..3 {
        let with = Options { hit: Some(world.lookup("A")), must_fit: true, ..Options::default() };
        assert_eq!(world.allocate_with("A", 60, with), None);
    }
}

#[test]
fn c21_vllm_counts_every_lookup() {
    let mut world = Harness::new(v251(full(11)));
    refused_three_times(&mut world);
    let expected = PrefixCacheStats { requests: 3, queries: 180, ..PrefixCacheStats::default() };
    assert_eq!(world.manager.make_prefix_cache_stats(), Some(expected));
    assert_eq!(world.manager.make_prefix_cache_stats(), Some(PrefixCacheStats::default()));
}

#[test]
fn c21_corrected_counts_each_admission_once() {
    let mut world = Harness::new(full(11));
    refused_three_times(&mut world);
    assert_eq!(world.manager.prefix_cache_stats(), Some(&PrefixCacheStats::default()));
    // Admitted by a smaller demand; later calls count no more.
    assert!(world.allocate("A", 20).is_some());
    assert!(world.allocate("A", 20).is_some());
    let expected = PrefixCacheStats { requests: 1, queries: 60, ..PrefixCacheStats::default() };
    assert_eq!(world.manager.prefix_cache_stats(), Some(&expected));
}

#[test]
fn c21_preempted_requests_count_apart() {
    let first = PrefixCacheStats { requests: 1, queries: 9, ..PrefixCacheStats::default() };
    let both = PrefixCacheStats {
        preempted_requests: 1,
        preempted_queries: 9,
        preempted_hits: 8,
        ..first
    };
    for (config, after_lookup) in [(full(11), first), (v251(full(11)), both)] {
        let mut world = Harness::new(config);
        world.start("A", 0..9);
        world.preempt("A");
        assert_eq!(world.hit("A").0, 8);
        assert_eq!(world.manager.prefix_cache_stats(), Some(&after_lookup));
    }
    let mut world = Harness::new(full(11));
    world.start("A", 0..9);
    world.preempt("A");
    world.allocate_all("A");
    assert_eq!(world.manager.prefix_cache_stats(), Some(&both));
}

/// Who does not read the cache asks nothing of it, whenever statistics are taken.
#[test]
fn requests_that_skip_reading_do_not_count() {
    for config in [full(11), v251(full(11))] {
        let mut world = Harness::new(config);
        world.add("A", 0..9);
        world.request("A").skip_reading_prefix_cache = true;
        world.allocate_all("A");
        assert_eq!(world.manager.prefix_cache_stats(), Some(&PrefixCacheStats::default()));
    }
}

#[test]
fn nothing_is_counted_unasked() {
    let mut config = full(11);
    config.log_stats = false;
    let mut world = Harness::new(config);
    world.start("A", 0..9);
    assert_eq!(world.manager.make_prefix_cache_stats(), None);
    assert_eq!(world.manager.prefix_cache_stats(), None);
}
