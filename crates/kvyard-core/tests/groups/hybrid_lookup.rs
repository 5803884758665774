//! One hit for several groups (`manager.md` §7.3, `groups.md` §2.11): worked examples, the defects
//! that are mended, and what golden data leave open.

use kvyard_core::{BlockId, KVCacheGroupSpec, KVCacheManagerConfig, Request, Semantics};

use crate::fixture::{
    ALIGN, ALL, Ask, BOTH, CORRECTED, Engine, VLLM, chunked, config, eagle, full, full_of_layout,
    logical, mamba, mla, new, rows_of, swa,
};

/// Cached blocks of each group and what is found of them.
struct Example<'a> {
    groups: &'a [KVCacheGroupSpec],
    use_eagle: bool,
    cached: &'a [&'a [usize]],
    max_length: u32,
    num_tokens: u32,
    rows: &'a [&'a str],
    num_uncached: u32,
}

impl Example<'_> {
    fn engine(&self, semantics: Semantics) -> (Engine, Request, Vec<Vec<u32>>) {
        let mut engine = Engine::new(KVCacheManagerConfig {
            use_eagle: self.use_eagle,
            semantics,
            ..config(100, self.groups)
        });
        let request = engine.request("a", 0..96);
        let caches = self.cached.iter().enumerate();
        let ids = caches.map(|(group, blocks)| engine.cache(group, &request, blocks)).collect();
        (engine, request, ids)
    }

    fn check(&self) {
        for semantics in BOTH {
            let (engine, request, ids) = self.engine(semantics);
            let call = request.call(false);
            let hit = engine.manager.find_longest_cache_hit(&call, self.max_length);
            engine.check_hit(&hit, self.max_length);
            assert_eq!(hit.num_tokens, self.num_tokens);
            assert_eq!(hit.num_uncached_common_prefix_tokens, self.num_uncached);
            let rows = rows_of(&hit.blocks);
            let found: Vec<String> =
                rows.iter().zip(&ids).map(|(row, ids)| logical(row, ids)).collect();
            assert_eq!(found, self.rows);
        }
    }
}

const UP_TO_5: &[usize] = &[0, 1, 2, 3, 4, 5];

#[test]
fn full_and_a_window() {
    let groups = [full(4), swa(4, 8)];
    Example {
        groups: &groups,
        use_eagle: false,
        cached: &[UP_TO_5, &[2, 3, 5]],
        max_length: 30,
        num_tokens: 16,
        rows: &["b0 b1 b2 b3", "N N b2 b3"],
        num_uncached: 8,
    }
    .check();
    for groups in [[full(4), swa(4, 8)], [eagle(full(4)), swa(4, 8)]] {
        Example {
            groups: &groups,
            use_eagle: true,
            cached: &[UP_TO_5, UP_TO_5],
            max_length: 30,
            num_tokens: 20,
            rows: &["b0 b1 b2 b3 b4", "N N N b3 b4"],
            num_uncached: 0,
        }
        .check();
    }
}

#[test]
fn block_sizes_differ() {
    let groups = [full(16), swa(4, 8)];
    for (window, num_tokens, rows, num_uncached) in [
        (&[2, 3, 6, 7][..], 32, ["b0 b1", "N N N N N N b6 b7"], 0),
        (&[2, 3], 16, ["b0", "N N b2 b3"], 16),
    ] {
        Example {
            groups: &groups,
            use_eagle: false,
            cached: &[&[0, 1], window],
            max_length: 40,
            num_tokens,
            rows: &rows,
            num_uncached,
        }
        .check();
    }
}

/// The second line is not in the table: states tell who was looked up first. Full attention finds 64
/// tokens, the states 32, so 32 tokens are common and not cached. Were Mamba asked first, as it
/// stands first, full attention would never be asked beyond 32.
#[test]
fn full_attention_comes_first_wherever_it_stands() {
    let groups = [mamba(16, ALIGN), full(16)];
    for (states, max_length, num_tokens, rows, num_uncached) in [
        (&[1, 3][..], 79, 64, ["N N N b3", "b0 b1 b2 b3"], 0),
        (&[1], 64, 32, ["N b1", "b0 b1"], 32),
    ] {
        Example {
            groups: &groups,
            use_eagle: false,
            cached: &[states, &[0, 1, 2, 3, 4][..]],
            max_length,
            num_tokens,
            rows: &rows,
            num_uncached,
        }
        .check();
    }
}

/// The same for latent attention, which is full attention to the lookup, behind two others.
#[test]
fn latent_attention_comes_first_too() {
    Example {
        groups: &[swa(4, 8), mamba(4, ALL), mla(4)],
        use_eagle: false,
        cached: &[&[1, 2], &[2], &[0, 1, 2, 3, 4, 5]],
        max_length: 30,
        num_tokens: 12,
        rows: &["N b1 b2", "N N b2", "b0 b1 b2"],
        num_uncached: 12,
    }
    .check();
}

#[test]
fn three_kinds_meet_at_a_fixed_point() {
    Example {
        groups: &[full(4), swa(4, 8), swa(4, 16)],
        use_eagle: false,
        cached: &[&[0, 1, 2, 3, 4, 5, 6, 7], &[1, 2, 5, 6], UP_TO_5],
        max_length: 36,
        num_tokens: 12,
        rows: &["b0 b1 b2", "N b1 b2", "b0 b1 b2"],
        num_uncached: 20,
    }
    .check();
}

/// What is cached of 40 tokens, and how much is passed over.
#[test]
fn what_a_hybrid_caches() {
    for (use_eagle, keyed, cached) in
        [(false, &[2, 3, 6, 7][..], 8), (true, &[2, 3, 4, 6, 7, 8], 9)]
    {
        let base = config(40, &[full(16), swa(4, 8)]);
        let mut engine = Engine::new(KVCacheManagerConfig { use_eagle, ..base });
        engine.run("a", 0..40);
        assert_eq!((engine.keyed("a", 0), engine.keyed("a", 1)), (vec![0, 1], keyed.to_vec()));
        assert_eq!(engine.num_cached("a", 1), Some(cached));
    }
}

// -------------------------------------------------------------------------- examples of manager.md

/// 32 tokens in blocks 1 to 8 and 9 to 16.
fn with_32_tokens(use_eagle: bool, semantics: Semantics) -> Engine {
    let base = config(40, &[full(4), swa(4, 9)]);
    let mut engine = Engine::new(KVCacheManagerConfig { use_eagle, semantics, ..base });
    engine.run("a", 0..32);
    assert_eq!(engine.rows("a"), [(1..=8).collect(), (9..=16).collect::<Vec<_>>()]);
    engine.free("a");
    engine
}

#[test]
fn a_window_with_a_hole() {
    for semantics in BOTH {
        let mut engine = with_32_tokens(false, semantics);
        engine.manager.pool_mut().evict_blocks(&[BlockId(14), BlockId(15)]).unwrap();
        let request = engine.request("b", 0..34);
        let expected = vec![vec![1, 2, 3, 4, 5], vec![0, 0, 0, 12, 13]];
        assert_eq!(engine.lookup(&request), (20, expected));
        assert_eq!(engine.manager.num_uncached_common_prefix_tokens(), 12);
        // W10: a request that skips the lookup leaves nothing of the last one behind.
        let mut other = engine.request("c", 0..34);
        other.skip_reading_prefix_cache = true;
        assert_eq!(engine.lookup(&other).0, 0);
        assert_eq!(engine.manager.num_uncached_common_prefix_tokens(), 0);
    }
}

#[test]
fn a_window_and_a_drafter() {
    for (semantics, identical) in [(VLLM, 24), (CORRECTED, 28)] {
        let mut engine = with_32_tokens(true, semantics);
        let longer = engine.request("b", 0..34);
        let expected = vec![(1..=7).collect(), vec![0, 0, 0, 0, 0, 14, 15]];
        assert_eq!(engine.lookup(&longer), (28, expected));
        // Block 28 .. 32 proves the drop at 28 (`eagle_credit`).
        let same = engine.request("c", 0..32);
        assert_eq!(engine.lookup(&same).0, identical);
    }
}

#[test]
fn two_full_groups_of_two_block_sizes() {
    for semantics in BOTH {
        let base = config(40, &[full(4), full(8)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        engine.run_and_free("a", 0..20);
        let request = engine.request("b", 0..20);
        assert_eq!(engine.lookup(&request), (16, vec![vec![1, 2, 3, 4], vec![6, 7]]));
    }
}

#[test]
fn a_small_window_in_small_blocks() {
    for semantics in BOTH {
        let base = config(40, &[full(16), swa(4, 5)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        engine.run("a", 0..40);
        assert_eq!(engine.keyed("a", 1), [3, 7], "only these are ever hashed");
        engine.free("a");
        let request = engine.request("b", 0..40);
        let expected = vec![vec![1, 2], vec![0, 0, 0, 0, 0, 0, 0, 11]];
        assert_eq!(engine.lookup(&request), (32, expected));
    }
}

// --------------------------------------------------------------------------------- defects mended

/// Defect a: 0.25.1 cuts only the first full-attention bucket, to lists of 5, 8 and 5 blocks.
#[test]
fn every_group_is_cut_to_the_agreed_length() {
    for semantics in BOTH {
        let groups = [full_of_layout(4, 1), full_of_layout(4, 2), swa(4, 9)];
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..config(60, &groups) });
        engine.run("a", 0..32);
        let window = engine.rows("a")[2].clone();
        engine.free("a");
        let holes = [BlockId(window[5]), BlockId(window[6])];
        engine.manager.pool_mut().evict_blocks(&holes).unwrap();
        let request = engine.request("b", 0..34);
        let (num_tokens, rows) = engine.lookup(&request);
        assert_eq!(num_tokens, 20);
        assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [5, 5, 5]);
    }
}

/// Case C01.
#[test]
fn c01_a_second_full_group_is_cut_to_nothing() {
    for semantics in BOTH {
        for (external, length, free) in [(8, 2, 34), (24, 6, 26)] {
            let groups = [full_of_layout(4, 1), full_of_layout(4, 2), swa(4, 8)];
            let base = config(41, &groups);
            let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
            engine.run("a", 0..32);
            let third: Vec<BlockId> = engine.rows("a")[2].iter().map(|id| BlockId(*id)).collect();
            engine.free("a");
            engine.manager.pool_mut().evict_blocks(&third).unwrap();
            let request = engine.request("b", (0..32).chain([77]));
            assert_eq!(engine.lookup(&request), (0, vec![vec![]; 3]));
            let ask = Ask { external, delayed: true, ..new(0) };
            assert_eq!(engine.allocate(&request, &ask), Some(vec![vec![]; 3]));
            let lengths: Vec<usize> = engine.rows("b").iter().map(Vec::len).collect();
            assert_eq!(lengths, [length; 3]);
            assert_eq!(engine.num_free(), free);
            assert_eq!(engine.order().len(), free as usize, "the counter is the list's length");
        }
    }
}

/// Defect b and W2: a lookup that ignores the drop is not asked further either. 0.25.1 finds 32 tokens
/// with 7 blocks of full attention, and publishes a block that nobody wrote.
#[test]
fn states_and_a_drafter() {
    for semantics in BOTH {
        for mode in [ALL, ALIGN] {
            for groups in [[full(4), mamba(4, mode)], [mamba(4, mode), full(4)]] {
                let attention = usize::from(groups[0] != full(4));
                let base = config(60, &groups);
                let arguments = KVCacheManagerConfig { use_eagle: true, semantics, ..base };
                let mut engine = Engine::new(arguments);
                let mut request = engine.request("a", 0..32);
                let mut states = Vec::new();
                for _ in 0..8 {
                    engine.step(&mut request, 4);
                    states.push(*engine.rows("a")[1 - attention].last().unwrap());
                }
                let blocks = engine.rows("a")[attention].clone();
                engine.free("a");
                engine.manager.new_step_starts();
                let mut longer = engine.request("b", 0..34);
                let (num_tokens, rows) = engine.lookup(&longer);
                assert_eq!((num_tokens, &rows[attention]), (28, &blocks[..7].to_vec()));
                assert_eq!(rows[1 - attention], [0, 0, 0, 0, 0, 0, states[6]]);
                assert_eq!(engine.admit(&mut longer), 28);
                // The block behind the hit is a new one; what it gets it is computed for.
                assert!(!blocks.contains(&engine.rows("b")[attention][7]));
            }
        }
    }
}

/// 0.25.1 raises in this lookup: chunked local attention with a drafter.
#[test]
fn chunks_and_a_drafter() {
    Example {
        groups: &[full(4), chunked(4, 8)],
        use_eagle: true,
        cached: &[UP_TO_5, &[4]],
        max_length: 30,
        num_tokens: 20,
        rows: &["b0 b1 b2 b3 b4", "N N N N b4"],
        num_uncached: 0,
    }
    .check();
}

/// Row 5 of `manager.md` §10: 0.25.1 cannot be made with several groups of one spec. They are one
/// bucket: a position counts if all have it.
#[test]
fn groups_of_one_spec() {
    for groups in [[full(4), full(4)], [mla(4), mla(4)]] {
        Example {
            groups: &groups,
            use_eagle: false,
            cached: &[UP_TO_5, &[0, 1, 2, 4]],
            max_length: 30,
            num_tokens: 12,
            rows: &["b0 b1 b2", "b0 b1 b2"],
            num_uncached: 0,
        }
        .check();
    }
    Example {
        groups: &[swa(4, 8), swa(4, 8)],
        use_eagle: false,
        cached: &[&[1, 2, 4, 5], &[1, 2, 3, 4]],
        max_length: 30,
        num_tokens: 12,
        rows: &["N b1 b2", "N b1 b2"],
        num_uncached: 0,
    }
    .check();
}

// ------------------------------------------------------------------------ the confirmation re-armed

/// A shrink by a group that does not peek lets every drafter's group look for its block again.
///
/// Full attention has 32 tokens, the drafter's window (one block, and the one behind it) finds 6 and 7
/// and drops to 28, the last group has only 16. At 16 the drafter's window must prove its drop anew:
/// block 4 is missing, 3 and 2 give 12. Without that the hit would be 16.
#[test]
fn a_shrink_re_arms_the_drafters_groups() {
    Example {
        groups: &[full(4), eagle(swa(4, 5)), swa(4, 6)],
        use_eagle: true,
        cached: &[&[0, 1, 2, 3, 4, 5, 6, 7], &[0, 1, 2, 3, 6, 7], &[0, 1, 2, 3]],
        max_length: 40,
        num_tokens: 12,
        rows: &["b0 b1 b2", "N N b2", "N b1 b2"],
        num_uncached: 20,
    }
    .check();
}

/// A shrink by another drafter's group does not: both have dropped for this candidate. The first
/// window drops from 8 blocks to 28 tokens, the second, asked up to 32, has 4 and 5 and drops to 20.
/// Asked again at 20, block 4 is enough for the first: block 5 is missing.
#[test]
fn a_drop_does_not_re_arm() {
    Example {
        groups: &[full(4), eagle(swa(4, 5)), eagle(swa(4, 4))],
        use_eagle: true,
        cached: &[&[0, 1, 2, 3, 4, 5, 6, 7], &[3, 4, 6, 7], &[4, 5]],
        max_length: 40,
        num_tokens: 20,
        rows: &["b0 b1 b2 b3 b4", "N N N N b4", "N N N N b4"],
        num_uncached: 12,
    }
    .check();
}

// -------------------------------------------------------------------------------- group by group

/// Each bucket's own hit: its own drop, no cut to the agreed length.
#[test]
fn lookups_per_group() {
    for semantics in BOTH {
        for (use_eagle, expected) in [
            (false, ([24, 16], ["b0 b1 b2 b3 b4 b5", "N N b2 b3"])),
            (true, ([20, 0], ["b0 b1 b2 b3 b4", ""])),
        ] {
            let groups = [full(4), swa(4, 8)];
            let base = config(40, &groups);
            let arguments = KVCacheManagerConfig { use_eagle, semantics, ..base };
            let mut engine = Engine::new(arguments);
            let request = engine.request("a", 0..31);
            let ids = [engine.cache(0, &request, UP_TO_5), engine.cache(1, &request, &[2, 3, 5])];
            engine.lookup(&request);
            let attribute = engine.manager.num_uncached_common_prefix_tokens();
            let call = request.call(false);
            let (hit, lengths) = engine.manager.find_longest_cache_hit_per_group(&call, 30);
            assert!(hit.has_own_lengths());
            let rows = rows_of(&hit);
            let found = [logical(&rows[0], &ids[0]), logical(&rows[1], &ids[1])];
            assert_eq!(
                (lengths.try_into().unwrap(), found.each_ref().map(String::as_str)),
                expected
            );
            assert_eq!(engine.manager.num_uncached_common_prefix_tokens(), attribute, "untouched");
        }
    }
}
