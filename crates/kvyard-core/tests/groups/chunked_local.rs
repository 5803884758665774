//! Chunked local attention (`groups.md` §2.5).

use kvyard_core::KVCacheManagerConfig;

use crate::fixture::{
    ALL, Ask, BOTH, Engine, chunked, config, full, live, logical, mamba, new, rows_of,
};

#[test]
fn skipped_tokens() {
    for (computed, expected) in [(7, 0), (8, 8), (13, 8), (16, 16)] {
        let mut engine = Engine::of(40, &[chunked(1, 8)]);
        let mut request = engine.request("a", 0..20);
        engine.step(&mut request, 17);
        engine.manager.remove_skipped_blocks("a", None, computed, Some(20)).unwrap();
        let row = engine.row("a");
        assert_eq!(row.len() - live(&row), expected, "{computed} computed");
    }
}

/// A chunk that is no multiple of the block size keeps the block that straddles its start.
#[test]
fn a_straddling_block_is_kept() {
    let mut engine = Engine::of(40, &[chunked(4, 6)]);
    let mut request = engine.request("a", 0..12);
    engine.step(&mut request, 8);
    engine.manager.remove_skipped_blocks("a", None, 7, Some(12)).unwrap();
    assert_eq!(engine.row("a"), [0, 2], "6 / 4 = 1");
}

#[test]
fn lookups() {
    let rows: [(&[usize], u32, &str); 6] = [
        (&[2], 15, "N N b2"),
        (&[], 15, "N N"),
        (&[], 16, "N N N N"),
        (&[2, 3], 15, "N N b2"),
        (&[0], 7, "b0"),
        (&[0], 0, ""),
    ];
    for (cached, max_length, expected) in rows {
        // 0.25.1 raises in the lookup with a drafter: nothing is dropped here (`manager.md` §7.3).
        for use_eagle in [false, true] {
            for semantics in BOTH {
                let base = config(20, &[chunked(4, 8)]);
                let arguments = KVCacheManagerConfig { use_eagle, semantics, ..base };
                let mut engine = Engine::new(arguments);
                let request = engine.request("a", 0..20);
                let ids = engine.cache(0, &request, cached);
                let (num_tokens, rows) = engine.find(&request, max_length);
                assert_eq!(logical(&rows[0], &ids), expected, "{cached:?} {max_length}");
                assert_eq!(num_tokens as usize, 4 * rows[0].len());
            }
        }
    }
}

/// From "Right in both versions" of the cases.
#[test]
fn lookups_of_cached_prompts() {
    for (num_tokens, expected) in [(15, 12), (16, 12), (17, 16), (20, 16)] {
        let mut engine = Engine::of(40, &[chunked(4, 8)]);
        engine.run_and_free("a", 0..num_tokens);
        let again = engine.request("b", 0..num_tokens);
        let (hit, rows) = engine.lookup(&again);
        assert_eq!(hit, expected, "{num_tokens} tokens");
        assert_eq!(live(&rows[0]), usize::from(hit == 12), "an all-null row at 16");
    }
}

/// The trace, without keys, so that released blocks are used again at once.
#[test]
fn chunks_of_six_tokens() {
    let mut engine = Engine::new(KVCacheManagerConfig {
        max_num_batched_tokens: 6,
        enable_caching: false,
        ..config(20, &[chunked(4, 8)])
    });
    let mut request = engine.request("a", 0..40);
    for (predicted, row) in
        [(2, vec![1, 2]), (1, vec![1, 2, 3]), (2, vec![0, 0, 3, 2, 1]), (1, vec![0, 0, 0, 0, 1, 2])]
    {
        let (found, _) = engine.step(&mut request, 6);
        assert_eq!((found, engine.row("a")), (predicted, row));
    }
}

/// The admission cap, cdiv(min(chunk + batch, length), block): golden data leave it open. The second
/// line is case C22 b.
#[test]
fn admission_cap() {
    for (group, batch, length, num_tokens, needed) in [
        (chunked(4, 8), 6, 64, 40, 4),
        (chunked(16, 128), 64, 512, 256, 12),
        // A request below the cap needs what it needs.
        (chunked(16, 128), 64, 512, 176, 11),
        (chunked(16, 128), 64, 512, 192, 12),
        // The block size need not divide the chunk: cdiv(6 + 5, 4).
        (chunked(4, 6), 5, 64, 40, 3),
    ] {
        for free in [needed - 1, needed] {
            let mut engine = Engine::new(KVCacheManagerConfig {
                max_num_batched_tokens: batch,
                max_model_len: length,
                ..config(1 + free, &[group])
            });
            let request = engine.request("a", 0..num_tokens);
            let ask = Ask { full_sequence_must_fit: true, ..new(batch) };
            let fits = engine.allocate(&request, &ask).is_some();
            assert_eq!(fits, free == needed, "{free} of {needed} free");
        }
    }
}

/// The cap belongs to the gate: a step takes what its tokens fill.
#[test]
fn a_step_is_not_capped() {
    let mut engine = Engine::new(KVCacheManagerConfig {
        max_num_batched_tokens: 6,
        ..config(20, &[chunked(4, 8)])
    });
    let mut request = engine.request("a", 0..40);
    assert_eq!(engine.step(&mut request, 24).0, 6);
}

/// Full attention bounds what chunks would grant unseen.
#[test]
fn full_attention_bounds_the_hit() {
    for semantics in BOTH {
        for use_eagle in [false, true] {
            let base = config(40, &[full(4), chunked(4, 8)]);
            let arguments = KVCacheManagerConfig { use_eagle, semantics, ..base };
            let mut engine = Engine::new(arguments);
            let request = engine.request("a", 0..40);
            assert_eq!(engine.lookup(&request), (0, vec![vec![], vec![]]));
            let ids = engine.cache(0, &request, &[0, 1, 2, 3]);
            // Whole chunks only: 16 tokens, or 12 behind the drop, whose chunk [8, 16) is not cached.
            let (hit, rows) = engine.lookup(&request);
            let expected =
                if use_eagle { (8, "b0 b1", "N N") } else { (16, "b0 b1 b2 b3", "N N N N") };
            assert_eq!((hit, logical(&rows[0], &ids).as_str()), (expected.0, expected.1));
            assert_eq!(logical(&rows[1], &ids), expected.2);
        }
    }
}

/// A hit may only end where everything from the start of its own chunk is cached. Where the alignment
/// cuts a hit back into an earlier chunk, that chunk counts. 0.25.1 cannot be asked: it raises unless
/// the block size is the alignment.
#[test]
fn a_hit_cut_back_into_an_earlier_chunk() {
    for semantics in BOTH {
        // Alignment 12 and chunks of 20: at 48 the chunk starts at 40, at 36 it starts at 20.
        let base = config(60, &[full(12), chunked(4, 20)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let request = engine.request("a", 0..60);
        engine.cache(0, &request, &[0, 1, 2, 3]);
        assert_eq!(engine.find(&request, 59).0, 0, "block 10, 5 or 0 is missing");
        let ids = engine.cache(1, &request, &[5, 6, 7]);
        let (hit, rows) = engine.find(&request, 59);
        assert_eq!((hit, logical(&rows[1], &ids).as_str()), (24, "N N N N N b5"));
        let more = engine.cache(1, &request, &[8]);
        let (hit, rows) = engine.find(&request, 59);
        assert_eq!(hit, 36, "20 to 36 are cached");
        assert_eq!(logical(&rows[1][..8], &ids), "N N N N N b5 b6 b7");
        assert_eq!(rows[1][8], more[8]);
    }
}

/// The same by itself: the group's own lookup under an alignment.
#[test]
fn the_groups_own_hit_cut_back() {
    let groups = [chunked(4, 20), mamba(12, ALL)];
    let mut engine = Engine::of(60, &groups);
    let request = engine.request("a", 0..60);
    let (hit, lengths) = engine.manager.find_longest_cache_hit_per_group(&request.call(false), 59);
    assert_eq!((rows_of(&hit), lengths), (vec![vec![], vec![]], vec![0, 0]));
    engine.cache(0, &request, &[0, 1, 2]);
    let (hit, lengths) = engine.manager.find_longest_cache_hit_per_group(&request.call(false), 59);
    assert_eq!((live(&rows_of(&hit)[0]), lengths), (3, vec![12, 0]));
}

#[test]
fn nothing_is_common() {
    let mut engine = Engine::of(20, &[chunked(4, 8)]);
    engine.run("a", 0..12);
    assert_eq!(engine.manager.get_num_common_prefix_blocks("a")[..], [0]);
}
