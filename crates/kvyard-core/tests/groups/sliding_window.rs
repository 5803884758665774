//! Sliding windows (`groups.md` §2.3): what is skipped, found, cached and admitted.

use kvyard_core::{GroupId, KVCacheManagerConfig, Request, Semantics};

use crate::fixture::{
    ALL, Ask, BOTH, CORRECTED, Engine, Event, VLLM, chunked, config, full, live, logical, mamba,
    new, rows_of, swa,
};

/// Tokens before the window. With blocks of one token each of them is a released block.
#[test]
fn skipped_tokens() {
    for (computed, expected) in [(6, 0), (7, 0), (8, 1), (11, 4), (12, 5), (15, 8), (16, 9)] {
        let mut engine = Engine::of(40, &[swa(1, 8)]);
        let mut request = engine.request("a", 0..20);
        engine.step(&mut request, 16);
        engine.manager.remove_skipped_blocks("a", None, computed, Some(20)).unwrap();
        let row = engine.row("a");
        assert_eq!(row.len() - live(&row), expected, "{computed} computed");
        assert!(row[expected..].iter().all(|block| *block != 0), "nulls, then blocks");
    }
}

/// Case C10: only whole blocks are released.
#[test]
fn skipped_blocks_are_whole() {
    for (computed, expected) in [(8, 0), (11, 1), (12, 1), (14, 1), (15, 2), (19, 3)] {
        let mut engine = Engine::of(40, &[swa(4, 8)]);
        let mut request = engine.request("a", 0..24);
        engine.step(&mut request, 20);
        engine.manager.remove_skipped_blocks("a", None, computed, Some(24)).unwrap();
        assert_eq!(engine.row("a").len() - live(&engine.row("a")), expected, "{computed}");
    }
}

// ------------------------------------------------------------------------------------------ lookup

/// The table of lookups: cached blocks, longest hit, a drafter, alignment, result.
#[test]
fn lookups() {
    let rows: [(&[usize], u32, bool, u32, &str); 12] = [
        (&[0, 1, 2, 3, 4, 5], 24, false, 4, "N N N N b4 b5"),
        (&[0, 1, 2, 3, 4, 5], 23, false, 4, "N N N b3 b4"),
        (&[2, 3, 5], 24, false, 4, "N N b2 b3"),
        (&[0], 24, false, 4, "b0"),
        (&[1], 24, false, 4, ""),
        (&[0, 1, 2, 3, 4, 5], 24, true, 4, "N N N b3 b4"),
        (&[4, 5], 24, true, 4, ""),
        (&[0, 1], 24, true, 4, "b0"),
        (&[0, 1, 2, 3, 4], 20, false, 8, "N N b2 b3"),
        (&[0, 1, 2, 3, 4], 20, true, 8, "N N b2 b3"),
        (&[0, 1, 2], 16, false, 8, "b0 b1"),
        (&[0], 16, false, 8, ""),
    ];
    for (cached, max_length, use_eagle, alignment, expected) in rows {
        for semantics in BOTH {
            let found = find_alone(semantics, cached, max_length, use_eagle, alignment);
            assert_eq!(found, expected, "{cached:?} {max_length} {use_eagle} {alignment}");
        }
    }
}

/// The hit of a window of 8 tokens in blocks of 4, asked alone.
fn find_alone(
    semantics: Semantics,
    cached: &[usize],
    max_length: u32,
    use_eagle: bool,
    alignment: u32,
) -> String {
    // The Mamba group's block size is the alignment, if it is not the window's.
    let groups = [swa(4, 8), mamba(alignment, ALL)];
    let groups = if alignment == 4 { &groups[..1] } else { &groups[..] };
    let base = config(20, groups);
    let mut engine = Engine::new(KVCacheManagerConfig { use_eagle, semantics, ..base });
    let request = engine.request("a", 0..28);
    let ids = engine.cache(0, &request, cached);
    let (hit, _) =
        engine.manager.find_longest_cache_hit_per_group(&request.call(false), max_length);
    logical(&rows_of(&hit)[0], &ids)
}

/// A window of one token: any cached block will do, but nothing is found where nothing is cached.
#[test]
fn a_window_of_one_token() {
    for (cached, expected) in [(&[1][..], "N b1"), (&[0, 2], "N N b2"), (&[], "")] {
        let mut engine = Engine::of(20, &[swa(4, 1)]);
        let request = engine.request("a", 0..17);
        let ids = engine.cache(0, &request, cached);
        assert_eq!(logical(&engine.find(&request, 16).1[0], &ids), expected);
    }
    let base = config(20, &[swa(4, 1)]);
    let mut engine = Engine::new(KVCacheManagerConfig { use_eagle: true, ..base });
    let request = engine.request("a", 0..17);
    let ids = engine.cache(0, &request, &[0, 2]);
    assert_eq!(logical(&engine.find(&request, 16).1[0], &ids), "N N", "b2 is the look-ahead");
}

/// From "Right in both versions" of the cases: how many blocks a hit needs.
#[test]
fn window_edge() {
    for (window, expected) in [(4, 1), (5, 1), (6, 2), (8, 2), (9, 2), (10, 3)] {
        let mut engine = Engine::of(40, &[swa(4, window)]);
        engine.run_and_free("a", 0..24);
        let again = engine.request("b", 0..25);
        let (num_tokens, rows) = engine.lookup(&again);
        assert_eq!((num_tokens, live(&rows[0])), (24, expected), "window {window}");
    }
}

/// Case C11, last line.
#[test]
fn a_drafter_voids_the_last_block() {
    for (use_eagle, expected) in [(false, (10, "N N N b3 b4")), (true, (8, "N N b2 b3"))] {
        let base = config(40, &[swa(2, 4)]);
        let mut engine = Engine::new(KVCacheManagerConfig { use_eagle, ..base });
        let request = engine.request("a", 0..11);
        let ids = engine.cache(0, &request, &[0, 1, 2, 3, 4]);
        let (num_tokens, rows) = engine.lookup(&request);
        assert_eq!((num_tokens, logical(&rows[0], &ids).as_str()), expected);
    }
}

/// Case C02 d: nulls of a hit cost nothing.
#[test]
fn a_hit_with_nulls() {
    for semantics in BOTH {
        let base = config(21, &[swa(4, 8)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        engine.run_and_free("a", 0..17);
        let mut request = engine.request("b", (0..16).chain([77, 78]));
        let hit = engine.manager.lookup(&request.call(false));
        assert_eq!((hit.num_tokens, rows_of(&hit.blocks)), (16, vec![vec![0, 0, 3, 4]]));
        let ask = Ask { hit: Some(&hit), ..new(2) };
        assert_eq!(engine.step_with(&mut request, &ask).0, 3, "1 new + 2 evictable");
        assert_eq!(engine.ref_cnt(0), 0);
    }
}

// ------------------------------------------------------------------------------------ what is cached

/// Masks: (alignment, retention, drafter, prompt, tokens) and the positions that get keys.
#[test]
fn blocks_worth_a_key() {
    type Row<'a> = (u32, Option<u32>, bool, u32, u32, &'a [usize]);
    let rows: [Row<'_>; 9] = [
        (32, None, false, 70, 70, &[6, 7, 14, 15]),
        (32, None, true, 70, 70, &[6, 7, 8, 14, 15, 16]),
        (8, None, false, 24, 24, &[0, 1, 2, 3, 4, 5]),
        (12, None, false, 36, 36, &[1, 2, 4, 5, 7, 8]),
        (8, Some(0), false, 70, 70, &[14, 15]),
        (8, Some(0), true, 70, 70, &[14, 15, 16]),
        (8, Some(32), false, 70, 70, &[6, 7, 14, 15]),
        (8, Some(0), false, 64, 64, &[12, 13]),
        // The prompt's end counts, not the request's.
        (8, Some(0), false, 41, 70, &[8, 9]),
    ];
    for (alignment, retention_interval, use_eagle, prompt, num_tokens, expected) in rows {
        let mut engine = Engine::new(KVCacheManagerConfig {
            retention_interval,
            use_eagle,
            semantics: VLLM,
            ..config(60, &[full(alignment), swa(4, 8)])
        });
        let mut request = engine.request("a", 0..prompt);
        request.append_output_tokens(&(prompt..num_tokens).collect::<Vec<_>>());
        engine.step(&mut request, num_tokens);
        let what = (alignment, retention_interval, use_eagle, prompt);
        assert_eq!(engine.keyed("a", 1), expected, "{what:?}");
        // Passed over all the same.
        let aligned = num_tokens / alignment * alignment / 4;
        assert_eq!(
            engine.num_cached("a", 1),
            Some(aligned + u32::from(use_eagle && aligned < num_tokens / 4))
        );
    }
}

/// The same positions whether a prompt comes at once or in chunks.
#[test]
fn chunks_cache_the_same_blocks() {
    for chunk in [4, 12, 20, 36] {
        let base = config(80, &[full(32), swa(4, 8)]);
        let mut engine = Engine::new(base);
        let mut request = engine.request("a", 0..72);
        while request.num_computed_tokens < 72 {
            let left = 72 - request.num_computed_tokens;
            engine.step(&mut request, chunk.min(left));
        }
        let prefix = engine.manager.pool().prefix_map();
        let hashes = request.block_hashes().iter().enumerate();
        let cached = hashes.filter(|(_, hash)| prefix.get(hash, GroupId(1)).is_some());
        let keyed: Vec<usize> = cached.map(|(at, _)| at).collect();
        assert_eq!(keyed, [6, 7, 14, 15], "chunks of {chunk}");
    }
}

/// Blocks without a key are used again first.
#[test]
fn masked_blocks_go_to_the_head_of_the_queue() {
    let mut engine = Engine::of(20, &[full(16), swa(4, 5)]);
    engine.run("a", 0..32);
    assert_eq!(engine.rows("a"), [vec![1, 2], (3..=10).collect()]);
    assert_eq!(engine.keyed("a", 1), [3, 7]);
    engine.free("a");
    let tail = [2, 1, 10, 6];
    assert_eq!(engine.order()[..6], [9, 8, 7, 5, 4, 3]);
    assert_eq!(engine.order()[15..], tail);
}

/// Clarification of §2.3: a dense mask of a window of one token is empty. 0.25.1 announces an empty
/// store for every block, we do not.
#[test]
fn a_window_of_one_token_caches_nothing() {
    for (semantics, expected) in [(VLLM, 2), (CORRECTED, 0)] {
        let mut engine = Engine::new(KVCacheManagerConfig {
            semantics,
            enable_kv_cache_events: true,
            ..config(20, &[swa(4, 1)])
        });
        let mut request = engine.request("a", 0..8);
        engine.step(&mut request, 4);
        engine.step(&mut request, 4);
        let events = engine.events();
        assert_eq!(events.len(), expected);
        let is_empty =
            |event: &Event| matches!(event, Event::Stored { hashes, .. } if hashes.is_empty());
        assert!(events.iter().all(is_empty));
        assert!(engine.keyed("a", 0).is_empty());
    }
}

// ------------------------------------------------------------------------------------------- traces

/// A request that starts from the hit `[N, N, N, 4, 5]`, with caching delayed throughout.
fn with_a_hit() -> (Engine, Request) {
    let mut engine = Engine::of(20, &[swa(4, 8)]);
    engine.run_and_free("a", 0..24);
    let mut request = engine.request("b", 0..40);
    let hit = engine.manager.find_longest_cache_hit(&request.call(false), 23);
    assert_eq!(rows_of(&hit.blocks), [[0, 0, 0, 4, 5]]);
    let ask = Ask { hit: Some(&hit), delayed: true, ..new(4) };
    assert_eq!(engine.step_with(&mut request, &ask), (3, vec![vec![7]]));
    (engine, request)
}

#[test]
fn decode_behind_a_hit() {
    let (mut engine, mut request) = with_a_hit();
    assert_eq!(engine.row("b"), [0, 0, 0, 4, 5, 7]);
    for (computed, expected) in [
        (24, [0, 0, 0, 0, 5, 7, 8].as_slice()),
        (28, &[0, 0, 0, 0, 0, 7, 8, 9]),
        // Block 7 had no key: it is the first to be used again.
        (32, &[0, 0, 0, 0, 0, 0, 8, 9, 7]),
    ] {
        request.num_computed_tokens = computed;
        engine.step_with(&mut request, &Ask { delayed: true, ..new(1) });
        assert_eq!(engine.row("b"), expected, "{computed} computed");
    }
}

/// External tokens beyond the window get no storage, and a hit before it is not even touched.
#[test]
fn external_tokens_push_the_window_past_the_hit() {
    let mut engine = Engine::of(20, &[swa(4, 8)]);
    engine.run_and_free("a", 0..4);
    let mut request = engine.request("b", 0..44);
    let hit = engine.manager.lookup(&request.call(false));
    assert_eq!((hit.num_tokens, rows_of(&hit.blocks)), (4, vec![vec![1]]));
    let ask = Ask { hit: Some(&hit), external: 36, ..new(4) };
    assert_eq!(engine.step_with(&mut request, &ask), (3, vec![vec![4]]));
    assert_eq!(engine.row("b"), [0, 0, 0, 0, 0, 0, 0, 0, 2, 3, 4]);
    assert_eq!(engine.ref_cnt(1), 0);
    assert_eq!(engine.order().last(), Some(&1), "block 1 is still cached and free");
}

/// `manager.md` §2.3 E3 and case C02 c: the order of release, and a null block that nobody counts.
#[test]
fn released_blocks_go_last_first() {
    for semantics in BOTH {
        let base = config(12, &[swa(4, 6)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let mut request = engine.request("a", 0..24);
        let rows = [vec![1, 2], vec![1, 2, 3, 4], vec![0, 0, 3, 4, 5, 6]];
        for expected in rows {
            engine.step(&mut request, 8);
            assert_eq!(engine.row("a"), expected);
        }
        assert_eq!(engine.order(), [7, 8, 9, 10, 11, 2, 1]);
        engine.free("a");
        assert_eq!(engine.order(), [7, 8, 9, 10, 11, 2, 1, 6, 5, 4, 3]);
        assert_eq!(engine.ref_cnt(0), 0, "0.25.1: -2");

        let base = config(21, &[swa(4, 8)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let mut request = engine.request("a", 0..40);
        for chunk in [20, 12, 8] {
            engine.step(&mut request, chunk);
        }
        assert_eq!(engine.row("a"), [0, 0, 0, 0, 0, 0, 7, 8, 9, 10]);
        engine.free("a");
        assert_eq!((engine.ref_cnt(0), engine.num_free()), (0, 20), "0.25.1: -6");
        assert!(engine.manager.usage() <= 0.0);
    }
}

/// `manager.md` §2.3 E5: what a refusal leaves behind.
#[test]
fn a_refusal_still_releases_what_is_over() {
    for semantics in BOTH {
        let base = config(5, &[swa(4, 6)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let mut request = engine.request("a", 0..24);
        engine.step(&mut request, 12);
        assert_eq!((engine.row("a"), engine.order()), (vec![1, 2, 3], vec![4]));
        assert_eq!(engine.allocate(&request, &new(12)), None);
        assert_eq!((engine.row("a"), engine.order()), (vec![0, 2, 3], vec![4, 1]));
        // Nothing else: asking again changes nothing any more.
        let before = engine.manager.state_digest();
        assert_eq!(engine.allocate(&request, &new(12)), None);
        assert_eq!(engine.manager.state_digest(), before);
    }
}

// ----------------------------------------------------------------------------------------- admission

#[test]
fn a_prefill_in_chunks_stays_below_the_cap() {
    let limits = |num_blocks| KVCacheManagerConfig {
        max_num_batched_tokens: 16,
        max_model_len: 64,
        ..config(num_blocks, &[swa(4, 8)])
    };
    let mut engine = Engine::new(limits(40));
    let mut request = engine.request("a", 0..64);
    let mut peak = 0;
    while request.num_computed_tokens < 64 {
        engine.step(&mut request, 16);
        peak = peak.max(live(&engine.row("a")));
    }
    assert_eq!(peak, 6);
    for (num_blocks, fits) in [(7, false), (8, true)] {
        let mut engine = Engine::new(limits(num_blocks));
        let request = engine.request("a", 0..64);
        let ask = Ask { full_sequence_must_fit: true, ..new(16) };
        assert_eq!(engine.allocate(&request, &ask).is_some(), fits, "a cap of 7");
    }
}

/// The known gap of §2.3: look-ahead slots are beyond 0.25.1's cap. `gate_counts_lookahead` counts
/// them, and gives them up for a request that is alone: cdiv(min(7 + 16 + 3, 64), 4) + 1 = 8.
#[test]
fn the_cap_counts_look_ahead_slots() {
    for (semantics, is_alone, needed) in
        [(VLLM, false, 7), (CORRECTED, false, 8), (VLLM, true, 7), (CORRECTED, true, 7)]
    {
        for free in [needed - 1, needed] {
            let others = u32::from(!is_alone);
            let mut engine = Engine::new(KVCacheManagerConfig {
                max_num_batched_tokens: 16,
                max_model_len: 64,
                semantics,
                ..config(1 + others + free, &[swa(4, 8)])
            });
            if !is_alone {
                engine.run("other", 100..104);
            }
            let request = engine.request("a", 0..64);
            let ask = Ask { full_sequence_must_fit: true, lookahead: 3, ..new(16) };
            let fits = engine.allocate(&request, &ask).is_some();
            assert_eq!(fits, free == needed, "{is_alone} {free} of {needed} free");
        }
    }
}

/// The cap's worked examples (`groups.md` §1.4), chunked local attention's with them.
#[test]
fn caps_of_large_models() {
    for (group, batch, length, cap) in [
        (swa(16, 1024), 2048, 4096, 193),
        (swa(16, 1024), 8192, 131_072, 577),
        (swa(4, 4), 1, 100, 2),
        (chunked(16, 8192), 8192, 1 << 20, 1024),
        (chunked(16, 8192), 8192, 10_000, 625),
    ] {
        for free in [cap - 1, cap] {
            let mut engine = Engine::new(KVCacheManagerConfig {
                max_num_batched_tokens: batch,
                max_model_len: length,
                enable_caching: false,
                ..config(1 + free, &[group])
            });
            let request = engine.request("a", 0..length);
            let ask = Ask { full_sequence_must_fit: true, ..new(1) };
            let fits = engine.allocate(&request, &ask).is_some();
            assert_eq!(fits, free == cap, "{group:?}, {free} free");
        }
    }
}
