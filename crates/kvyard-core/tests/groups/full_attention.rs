//! Full attention, latent attention, R-SWA (`groups.md` §2.2, §2.4, §2.9, §2.10).

use kvyard_core::{BlockId, KVCacheManagerConfig, Request};

use crate::fixture::{
    ALL, Ask, BOTH, Engine, VLLM, chunked, config, cross, full, logical, mamba, mla, new, rows_of,
    rswa, sink, swa, swa_mla,
};

/// A request whose first 48 tokens are cached in blocks 1, 2, 3 of 16 tokens.
fn with_a_cached_prefix(num_tokens: u32) -> (Engine, Request) {
    let mut engine = Engine::of(20, &[full(16)]);
    engine.run_and_free("a", 0..48);
    let request = engine.request("b", 0..num_tokens);
    (engine, request)
}

#[test]
fn example_1_a_new_request() {
    let mut engine = Engine::of(20, &[full(16)]);
    let request = engine.request("a", 0..50);
    assert_eq!(engine.predict(&request, &new(50)), Some(4));
}

#[test]
fn example_2_a_hit_of_free_blocks_costs_what_leaves_the_queue() {
    let (mut engine, mut request) = with_a_cached_prefix(50);
    let somebody = engine.manager.pool_mut().touch(&[BlockId(2)]).unwrap();
    let hit = engine.manager.lookup(&request.call(false));
    assert_eq!((hit.num_tokens, rows_of(&hit.blocks)), (48, vec![vec![1, 2, 3]]));
    let ask = Ask { hit: Some(&hit), ..new(2) };
    assert_eq!(engine.step_with(&mut request, &ask), (3, vec![vec![4]]));
    assert_eq!(engine.row("b"), [1, 2, 3, 4]);
    assert_eq!(engine.num_cached("b", 0), Some(3));
    engine.manager.pool_mut().free(somebody).unwrap();
}

#[test]
fn example_3_cap_drop_and_alignment() {
    let (engine, request) = with_a_cached_prefix(50);
    assert_eq!(engine.find(&request, 49), (48, vec![vec![1, 2, 3]]));
    assert_eq!(engine.find(&request, 47), (32, vec![vec![1, 2]]));
    for (use_eagle, align_to_32, expected) in
        [(true, false, vec![1, 2]), (false, true, vec![1, 2]), (true, true, vec![1, 2])]
    {
        // A Mamba group of larger blocks sets the alignment and nothing else.
        let groups = [full(16), mamba(if align_to_32 { 32 } else { 16 }, ALL)];
        let mut engine = Engine::new(KVCacheManagerConfig { use_eagle, ..config(20, &groups) });
        let request = engine.request("b", 0..50);
        let ids = engine.cache(0, &request, &[0, 1, 2]);
        assert_eq!(ids, [1, 2, 3]);
        let (hit, lengths) =
            engine.manager.find_longest_cache_hit_per_group(&request.call(false), 49);
        assert_eq!(rows_of(&hit)[0], expected, "{use_eagle} {align_to_32}");
        assert_eq!(lengths, [32, 0]);
    }
}

#[test]
fn example_4_a_row_grows_and_never_shrinks() {
    let base = config(20, &[full(16)]);
    let mut engine = Engine::new(KVCacheManagerConfig { semantics: VLLM, ..base });
    engine.run_and_free("a", 0..48);
    let mut request = engine.run("b", 0..50);
    request.append_output_tokens(&[7]);
    let ask = Ask { lookahead: 14, ..new(1) };
    assert_eq!(engine.step_with(&mut request, &ask), (1, vec![vec![5]]));
    let free = engine.num_free();
    request.num_computed_tokens = 39;
    assert_eq!(engine.step(&mut request, 1), (0, vec![vec![]]));
    assert_eq!((engine.row("b"), engine.num_free()), (vec![1, 2, 3, 4, 5], free));
}

/// Example 5, `groups.md` §2.9 (1) and §2.10: a block spans the tokens of all ranks.
#[test]
fn context_parallel_ranks_share_a_block() {
    for (group, dcp_world_size, num_tokens, expected) in
        [(full(16), 2, 50, 2), (mla(64), 4, 1000, 4)]
    {
        let block_size = group.spec.block_size * dcp_world_size;
        let mut engine = Engine::new(KVCacheManagerConfig {
            dcp_world_size,
            scheduler_block_size: block_size,
            hash_block_size: block_size,
            ..config(20, &[group])
        });
        let mut request = engine.request("a", 0..num_tokens);
        assert_eq!(engine.step(&mut request, num_tokens).0, expected);
        assert_eq!(engine.manager.single_type_managers()[0].block_size(), block_size);
        assert_eq!(engine.keyed("a", 0).len(), (num_tokens / block_size) as usize);
        let zeroed = engine.manager.take_new_block_ids();
        assert_eq!(zeroed.len(), expected as usize, "all are to be zeroed");
    }
}

#[test]
fn example_6_external_tokens_behind_a_hit() {
    let mut engine = Engine::of(20, &[full(16)]);
    engine.run_and_free("a", 0..16);
    let mut request = engine.request("b", 0..46);
    let hit = engine.manager.lookup(&request.call(false));
    assert_eq!(rows_of(&hit.blocks), [[1]]);
    let ask = Ask { hit: Some(&hit), external: 20, ..new(10) };
    assert_eq!(engine.step_with(&mut request, &ask), (3, vec![vec![]]));
    assert_eq!(engine.row("b"), [1, 2, 3]);
}

#[test]
fn example_7_common_prefix() {
    for semantics in BOTH {
        let base = config(20, &[full(16)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        engine.run("a", 0..40);
        engine.run("b", (0..32).chain(100..108));
        assert_eq!((engine.row("a"), engine.row("b")), (vec![1, 2, 3], vec![1, 2, 4]));
        assert_eq!(engine.manager.get_num_common_prefix_blocks("a")[..], [2]);
        // 0.25.1 gives an unknown request an entry, after which nothing is common any more.
        assert_eq!(engine.manager.get_num_common_prefix_blocks("c")[..], [0]);
        assert_eq!(engine.manager.get_num_common_prefix_blocks("a")[..], [2]);
        engine.run("c", 200..210);
        assert_eq!(engine.manager.get_num_common_prefix_blocks("a")[..], [0]);
    }
}

/// `groups.md` §2.9 (2): compression is no business of the manager.
#[test]
fn latent_attention_counts_logical_tokens() {
    let mut engine = Engine::of(20, &[mla(256)]);
    let request = engine.request("a", 0..1000);
    assert_eq!(engine.predict(&request, &new(1000)), Some(4));
}

/// `groups.md` §2.9 (3).
#[test]
fn a_window_over_latent_attention() {
    let group = swa_mla(64, 128);
    for (use_eagle, cached, expected) in
        [(false, [3, 4].as_slice(), "N N N b3 b4"), (true, &[2, 3, 4], "N N b2 b3")]
    {
        let mut engine = Engine::new(KVCacheManagerConfig { use_eagle, ..config(20, &[group]) });
        let request = engine.request("a", 0..400);
        let ids = engine.cache(0, &request, cached);
        assert_eq!(logical(&engine.find(&request, 399).1[0], &ids), expected);
        // One fewer is no window.
        engine.manager.pool_mut().evict_blocks(&[BlockId(ids[cached[0]])]).unwrap();
        assert_eq!(engine.find(&request, 399).0, 0);
    }
    for (num_blocks, fits) in [(11, false), (12, true)] {
        let mut engine = Engine::new(KVCacheManagerConfig {
            max_num_batched_tokens: 512,
            max_model_len: 4096,
            ..config(num_blocks, &[group])
        });
        let request = engine.request("a", 0..4096);
        let ask = Ask { full_sequence_must_fit: true, ..new(512) };
        assert_eq!(engine.allocate(&request, &ask).is_some(), fits, "a cap of 11 blocks");
    }
    let mut engine = Engine::of(20, &[group]);
    let mut request = engine.request("a", 0..320);
    engine.step(&mut request, 300);
    engine.manager.remove_skipped_blocks("a", None, 300, Some(320)).unwrap();
    assert_eq!(engine.row("a"), [0, 0, 3, 4, 5]);
}

/// `groups.md` §2.1.6: exactly full and latent attention report the ids to be zeroed.
#[test]
fn zeroed_are_new_blocks_of_full_attention_only() {
    let groups = [
        full(4),
        rswa(4, 8),
        swa(4, 8),
        chunked(4, 8),
        mamba(4, ALL),
        cross(4),
        mla(4),
        sink(4, 4),
    ];
    let base = config(40, &groups);
    let mut engine = Engine::new(KVCacheManagerConfig { enable_caching: false, ..base });
    let mut request = engine.request("a", 0..8);
    engine.step_with(&mut request, &Ask { encoder: 4, ..new(8) });
    let rows = engine.rows("a");
    let zeroed: Vec<u32> = engine.manager.take_new_block_ids().iter().map(|id| id.0).collect();
    assert_eq!(zeroed, [rows[0].as_slice(), &rows[6]].concat());
    assert!(engine.manager.take_new_block_ids().is_empty());
}

// ----------------------------------------------------------------------------------- R-SWA (§2.4)

#[test]
fn rswa_a_gap_opens_behind_the_prompt() {
    let base = config(20, &[rswa(4, 6)]);
    let mut engine = Engine::new(KVCacheManagerConfig { enable_caching: false, ..base });
    let mut request = engine.request("a", 0..10);
    engine.step(&mut request, 10);
    for (computed, expected) in [
        (21, [1, 2, 3, 4, 5, 6].as_slice()),
        (22, &[1, 2, 3, 0, 5, 6]),
        (26, &[1, 2, 3, 0, 0, 6, 5]),
        (30, &[1, 2, 3, 0, 0, 0, 5, 6]),
    ] {
        let outputs = vec![7; (computed + 1) as usize - request.num_tokens()];
        request.append_output_tokens(&outputs);
        request.num_computed_tokens = computed;
        engine.step(&mut request, 1);
        assert_eq!(engine.row("a"), expected, "{computed} computed");
    }
}

#[test]
fn rswa_without_a_prompt_length_keeps_everything() {
    let mut engine = Engine::of(20, &[rswa(4, 6)]);
    let mut request = engine.request("a", 0..40);
    engine.step(&mut request, 40);
    engine.manager.remove_skipped_blocks("a", None, 40, None).unwrap();
    assert_eq!(engine.row("a"), (1..=10).collect::<Vec<_>>());
    // A prompt of 10 tokens: blocks 3 to 7 lie behind it and before token 34.
    engine.manager.remove_skipped_blocks("a", None, 40, Some(10)).unwrap();
    assert_eq!(engine.row("a"), [1, 2, 3, 0, 0, 0, 0, 0, 9, 10]);
}

/// Blocks of the gap that have keys stay findable, and nulls are common to nobody.
#[test]
fn rswa_finds_its_gap_again() {
    for semantics in BOTH {
        let base = config(20, &[rswa(4, 6)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let mut request = engine.request("a", 0..10);
        engine.step(&mut request, 10);
        request.append_output_tokens(&(10..40).collect::<Vec<_>>());
        engine.step(&mut request, 30);
        engine.manager.remove_skipped_blocks("a", None, 40, Some(10)).unwrap();
        assert_eq!(engine.row("a"), [1, 2, 3, 0, 0, 0, 0, 0, 9, 10]);
        assert_eq!(engine.manager.get_num_common_prefix_blocks("a")[..], [3]);
        let again = engine.request("b", 0..42);
        assert_eq!(engine.lookup(&again), (40, vec![(1..=10).collect()]));
    }
}
