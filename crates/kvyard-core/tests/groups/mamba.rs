//! Recurrent states (`groups.md` §2.6), case C08, and admission under `align_prediction`.

use kvyard_core::spec::MambaCacheMode;
use kvyard_core::{GroupId, KVCacheManagerConfig, Request};

use crate::fixture::{
    ALIGN, ALL, Ask, BOTH, CORRECTED, Engine, VLLM, config, full, live, logical, mamba,
    mamba_with_drafts, new, rows_of,
};

#[test]
fn example_1_mode_none_holds_its_states_for_life() {
    for (drafts, expected) in [(0, 1), (2, 3)] {
        let mut engine = Engine::of(20, &[mamba_with_drafts(4096, MambaCacheMode::None, drafts)]);
        let mut request = engine.request("a", 0..100);
        let (predicted, fresh) = engine.step(&mut request, 100);
        assert_eq!((predicted as usize, fresh[0].len()), (expected, expected));
        for _ in 0..40 {
            request.append_output_tokens(&[1]);
            assert_eq!(engine.step(&mut request, 1), (0, vec![vec![]]));
        }
        assert_eq!(live(&engine.row("a")), expected, "nothing is ever skipped");
    }
}

#[test]
fn examples_2_mode_all() {
    for semantics in BOTH {
        let base = config(40, &[mamba(16, ALL)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let mut request = engine.request("a", 0..72);
        engine.step(&mut request, 40);
        assert_eq!((engine.row("a"), engine.num_cached("a", 0)), (vec![1, 2, 3], Some(2)));
        engine.manager.remove_skipped_blocks("a", None, 40, Some(72)).unwrap();
        assert_eq!(engine.row("a"), [0, 0, 3]);
        engine.step_with(&mut request, &Ask { delayed: true, ..new(32) });
        assert_eq!(engine.row("a"), [0, 0, 3, 4, 5]);

        let mut second = engine.request("b", (0..32).chain(100..168));
        let hit = engine.manager.find_longest_cache_hit(&second.call(false), 99);
        assert_eq!(rows_of(&hit.blocks), [[0, 2]]);
        let ask = Ask { hit: Some(&hit), ..new(28) };
        // This step's forward pass has yet to write the state: predicted is more than the pool has.
        assert_eq!(engine.predict(&second, &ask), None);
        let before = engine.manager.state_digest();
        assert_eq!(engine.allocate(&second, &ask), None);
        assert_eq!(engine.manager.state_digest(), before);
        engine.manager.new_step_starts();
        assert_eq!(engine.step_with(&mut second, &ask), (3, vec![vec![6, 7]]));
        assert_eq!(engine.row("b"), [0, 2, 6, 7]);
    }
}

#[test]
fn example_3_mode_all_with_drafts() {
    let mut engine = Engine::of(40, &[mamba_with_drafts(16, ALL, 2)]);
    let mut request = engine.request("a", 0..40);
    engine.step(&mut request, 40);
    assert_eq!(engine.row("a"), [1, 2, 3, 4, 5]);
    engine.manager.remove_skipped_blocks("a", None, 40, Some(40)).unwrap();
    assert_eq!(engine.row("a"), [0, 0, 3, 4, 5], "as if both drafts were rejected: 37 / 16 = 2");
}

/// The drafts taken as rejected: (computed - 2 - 1) / 16 blocks are over.
#[test]
fn drafts_keep_a_state_longer() {
    for mode in [MambaCacheMode::None, ALL] {
        for (computed, expected) in [(18, 0), (19, 1), (34, 1), (35, 2), (40, 2)] {
            let mut engine = Engine::of(40, &[mamba_with_drafts(16, mode, 2)]);
            let mut request = engine.request("a", 0..40);
            engine.step(&mut request, 40);
            engine.manager.remove_skipped_blocks("a", None, computed, Some(40)).unwrap();
            let row = engine.row("a");
            assert_eq!(row.len() - live(&row), expected, "{computed} computed");
        }
    }
}

// -------------------------------------------------------------------------------------- mode align

/// A prompt of 66 tokens in 48 + 16 + 2, then decode up to 82 computed tokens.
fn prefilled_and_decoded() -> (Engine, Request) {
    type Step<'a> = (u32, u32, u32, &'a [u32], &'a [u32]);
    let mut engine = Engine::of(20, &[mamba(16, ALIGN)]);
    let mut request = engine.request("a", 0..66);
    let rows: [Step<'_>; 6] = [
        (0, 48, 1, &[0, 0, 1], &[0, 0, 1]),
        (48, 16, 1, &[0, 0, 1, 2], &[2]),
        (64, 2, 1, &[0, 0, 0, 2, 3], &[3]),
        (66, 1, 0, &[0, 0, 0, 0, 3], &[]),
        (80, 1, 1, &[0, 0, 0, 0, 3, 4], &[4]),
        (81, 1, 0, &[0, 0, 0, 0, 0, 4], &[]),
    ];
    for (computed, num_new, predicted, row, returned) in rows {
        while request.num_computed_tokens < computed {
            request.append_output_tokens(&[request.view().num_tokens]);
            assert_eq!(engine.step(&mut request, 1), (0, vec![vec![]]));
        }
        if request.num_tokens() < (computed + num_new) as usize {
            request.append_output_tokens(&[request.view().num_tokens]);
        }
        assert_eq!(engine.step(&mut request, num_new), (predicted, vec![returned.to_vec()]));
        assert_eq!(engine.row("a"), row, "{computed} computed");
    }
    (engine, request)
}

#[test]
fn example_4_align() {
    let (mut engine, _) = prefilled_and_decoded();
    engine.free("a");
    assert_eq!(engine.num_free(), 19);
}

#[test]
fn example_5_align_behind_a_hit() {
    let (mut engine, _) = prefilled_and_decoded();
    engine.manager.new_step_starts();
    let mut request = engine.request("b", (0..80).chain(500..564));
    let hit = engine.manager.lookup(&request.call(false));
    assert_eq!((hit.num_tokens, rows_of(&hit.blocks)), (80, vec![vec![0, 0, 0, 0, 3]]));
    let ask = Ask { hit: Some(&hit), ..new(32) };
    assert_eq!(engine.step_with(&mut request, &ask), (2, vec![vec![0, 5]]));
    assert_eq!(engine.row("b"), [0, 0, 0, 0, 3, 0, 5]);
    // Behind the null at 5 the state at 4 would be out of reach: it is the last step's.
    assert_eq!(engine.step(&mut request, 16), (1, vec![vec![6]]));
    assert_eq!(engine.row("b"), [0, 0, 0, 0, 0, 0, 5, 6]);
}

#[test]
fn example_6_align_with_drafts() {
    let mut engine = Engine::of(20, &[mamba_with_drafts(16, ALIGN, 2)]);
    let mut request = engine.request("a", 0..32);
    let rows: [(u32, u32, u32, &[u32]); 7] = [
        (0, 32, 3, &[0, 1, 2, 3]),
        (32, 3, 1, &[0, 1, 2, 3, 4]),
        (35, 3, 0, &[0, 0, 2, 3, 4]),
        (38, 3, 0, &[0, 0, 2, 3, 4]),
        (41, 3, 0, &[0, 0, 2, 3, 4]),
        (44, 3, 0, &[0, 0, 2, 3, 4]),
        (47, 3, 1, &[0, 0, 2, 3, 4, 5]),
    ];
    for (computed, num_new, predicted, row) in rows {
        assert_eq!(request.num_computed_tokens, computed);
        if computed > 0 {
            request.append_output_tokens(&[1, 2, 3]);
        }
        let (found, _) = engine.step(&mut request, num_new);
        assert_eq!((found, engine.row("a").as_slice()), (predicted, row), "{computed} computed");
    }
}

/// A chunk of several blocks: the draft slots move behind the running state, and the state it started
/// from goes a step later, from behind nulls.
#[test]
fn align_moves_draft_slots() {
    let mut engine = Engine::of(20, &[mamba_with_drafts(16, ALIGN, 2)]);
    let mut request = engine.request("a", 0..96);
    assert_eq!(engine.step(&mut request, 32), (3, vec![vec![0, 1, 2, 3]]));
    // 80 / 16 + 2 = 7 entries, the running state in the fifth; 2 and 3 move, 4 is new.
    assert_eq!(engine.step(&mut request, 48), (1, vec![vec![2, 3, 4]]));
    assert_eq!(engine.row("a"), [0, 1, 0, 0, 2, 3, 4]);
    assert_eq!(engine.step(&mut request, 16), (1, vec![vec![5]]));
    assert_eq!(engine.row("a"), [0, 0, 0, 0, 2, 3, 4, 5]);
    engine.free("a");
    assert_eq!(engine.num_free(), 19);
}

/// From "Right in both versions" of the cases, and P8 of §2.12.
#[test]
fn align_holds_few_states() {
    for (drafts, most) in [(0, 2), (2, 4)] {
        let mut engine = Engine::of(20, &[mamba_with_drafts(16, ALIGN, drafts)]);
        let mut request = engine.request("a", 0..16);
        engine.step(&mut request, 16);
        while request.num_computed_tokens < 64 {
            request.append_output_tokens(&[1]);
            engine.step(&mut request, 1);
            let row = engine.row("a");
            let last = &row[row.len() - 1 - drafts as usize..];
            assert!(live(&row) <= most && live(last) == last.len(), "{row:?}");
        }
        if drafts == 0 {
            engine.manager.remove_skipped_blocks("a", None, 64, Some(16)).unwrap();
            assert_eq!(live(&engine.row("a")), 1, "only the last one is needed");
        }
        engine.free("a");
        assert_eq!(engine.num_free(), 19);
    }
}

/// From "Right in both versions" of the cases.
#[test]
fn a_state_of_this_step_is_no_start() {
    for semantics in BOTH {
        let base = config(20, &[full(16), mamba(16, ALIGN)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let mut request = engine.request("a", 0..40);
        engine.step(&mut request, 16);
        let mut second = engine.request("b", (0..16).chain(100..110));
        let hit = engine.manager.lookup(&second.call(false));
        assert_eq!((hit.num_tokens, rows_of(&hit.blocks)), (16, vec![vec![1], vec![2]]));
        let ask = Ask { hit: Some(&hit), ..new(10) };
        assert_eq!(engine.allocate(&second, &ask), None);
        assert_eq!(engine.manager.num_tracked_requests(), 1);
        engine.manager.new_step_starts();
        engine.step_with(&mut second, &ask);
        assert_eq!(engine.rows("b"), [vec![1, 3], vec![2, 4]]);
        // A hit that ends in an older state does not wait for the keys of this step.
        engine.step(&mut request, 16);
        let third = engine.request("c", (0..16).chain(200..210));
        let hit = engine.manager.lookup(&third.call(false));
        let ask = Ask { hit: Some(&hit), ..new(10) };
        assert!(engine.allocate(&third, &ask).is_some());
    }
}

/// The lookup itself: the last state at an aligned length, whatever else is cached.
#[test]
fn only_states_at_aligned_lengths_are_found() {
    let rows: [(&[usize], u32, u32, &str); 6] = [
        (&[0, 1, 2, 4], 23, 4, "N N N N b4"),
        (&[0, 1, 2, 4], 19, 4, "N N b2"),
        (&[0, 1, 2, 4], 23, 8, "N b1"),
        (&[0, 2, 4], 23, 8, ""),
        (&[2, 5], 24, 12, "N N N N N b5"),
        (&[2, 5], 23, 12, "N N b2"),
    ];
    for (cached, max_length, alignment, expected) in rows {
        for use_eagle in [false, true] {
            // A full group of larger blocks sets the alignment.
            let base = config(20, &[mamba(4, ALIGN), full(alignment)]);
            let mut engine = Engine::new(KVCacheManagerConfig { use_eagle, ..base });
            let request = engine.request("a", 0..28);
            let ids = engine.cache(0, &request, cached);
            let call = request.call(false);
            let (hit, _) = engine.manager.find_longest_cache_hit_per_group(&call, max_length);
            assert_eq!(logical(&rows_of(&hit)[0], &ids), expected, "{cached:?} {alignment}");
        }
    }
}

// ------------------------------------------------------------------------------------ what is cached

/// Masks at block size and alignment 16: retention, prompt, positions with keys.
#[test]
fn states_worth_a_key() {
    let everything: Vec<usize> = (0..12).collect();
    let rows: [(Option<u32>, u32, &[usize]); 5] = [
        (None, 100, &everything),
        (Some(0), 100, &[5]),
        (Some(64), 100, &[3, 5, 7, 11]),
        (Some(16), 100, &everything),
        (Some(0), 96, &[4]),
    ];
    for (retention_interval, prompt, expected) in rows {
        for first in [192, 48] {
            let base = config(40, &[mamba(16, ALL)]);
            let arguments = KVCacheManagerConfig { retention_interval, ..base };
            let mut engine = Engine::new(arguments);
            let mut request = engine.request("a", 0..prompt);
            request.append_output_tokens(&(prompt..192).collect::<Vec<_>>());
            engine.step(&mut request, first);
            // The same from the third block on, released states included.
            if first < 192 {
                engine.step(&mut request, 192 - first);
            }
            let prefix = engine.manager.pool().prefix_map();
            let cached = request.block_hashes().iter().map(|hash| prefix.get(hash, GroupId(0)));
            let keyed: Vec<usize> =
                cached.enumerate().filter_map(|(at, block)| block.map(|_| at)).collect();
            assert_eq!(keyed, expected, "{retention_interval:?}, prompt {prompt}, {first} first");
        }
    }
}

// --------------------------------------------------------------------------------------- prediction

/// Case C08. The true need is 3 blocks of full attention and 2 states: the external tokens' and the
/// running one. 0.25.1 predicts one state and raises half way.
#[test]
fn c08_synchronous_external_tokens() {
    for semantics in BOTH {
        for num_blocks in [5, 6] {
            let mut engine = Engine::new(KVCacheManagerConfig {
                max_model_len: 256,
                semantics,
                ..config(num_blocks, &[full(16), mamba(16, ALIGN)])
            });
            let request = engine.request("a", 0..64);
            let before = engine.manager.state_digest();
            let fresh = engine.allocate(&request, &Ask { external: 32, ..new(16) });
            if num_blocks == 5 {
                assert_eq!((fresh, engine.num_free()), (None, 4));
                assert_eq!(engine.rows("a"), [vec![], vec![]], "no rows");
                assert_eq!(engine.manager.state_digest(), before);
            } else {
                assert_eq!(fresh, Some(vec![vec![4], vec![5]]));
                assert_eq!(engine.rows("a"), [vec![1, 2, 4], vec![0, 3, 5]]);
                assert_eq!(engine.num_free(), 0);
            }
        }
    }
}

/// The same in the other direction: with new = 0 and an evictable hit inside the skipped range 0.25.1
/// predicts a state too many (`groups.md` §2.12, P1).
#[test]
fn c08_asynchronous_external_tokens_behind_a_hit() {
    // A hit of 16 tokens, then 32 external ones: full attention attaches its block and takes 2, Mamba
    // lets go of the hit's state and takes the one of token 48.
    for (semantics, reserved, fits) in
        [(VLLM, 5, true), (VLLM, 6, false), (CORRECTED, 6, true), (CORRECTED, 7, false)]
    {
        let mut engine = Engine::new(KVCacheManagerConfig {
            max_model_len: 256,
            semantics,
            ..config(11, &[full(16), mamba(16, ALIGN)])
        });
        engine.run_and_free("a", 0..16);
        engine.manager.new_step_starts();
        let request = engine.request("b", 0..64);
        let hit = engine.manager.lookup(&request.call(false));
        assert_eq!(hit.num_tokens, 16);
        let ask = Ask { hit: Some(&hit), external: 32, delayed: true, reserved, ..new(0) };
        let fresh = engine.allocate(&request, &ask);
        assert_eq!(fresh.is_some(), fits, "{reserved} reserved");
        if fits {
            assert_eq!(engine.rows("b"), [vec![1, 3, 4], vec![0, 0, 5]]);
            assert_eq!(engine.num_free(), 6);
        }
    }
}

/// After rejected drafts the row is longer than needed; 0.25.1's prediction is then negative, which
/// makes up for another group's need. The true need of this group is 0.
#[test]
fn a_longer_row_makes_up_for_nothing() {
    for (semantics, fits) in [(VLLM, true), (CORRECTED, false)] {
        let mut engine = Engine::new(KVCacheManagerConfig {
            semantics,
            ..config(20, &[full(16), mamba(64, ALIGN)])
        });
        engine.run("other", 100..104);
        let mut request = engine.request("a", 0..64);
        engine.step(&mut request, 64);
        request.append_output_tokens(&[1]);
        // 1 token and 3 drafts: the second state's block is there from now on.
        engine.step(&mut request, 4);
        assert_eq!(engine.rows("a")[1].len(), 2);
        // All of them are rejected, and the state is recomputed from token 60 on: one block of full
        // attention and no state for 65 - 128 tokens.
        request.num_computed_tokens = 60;
        let ask = Ask { reserved: engine.num_free(), lookahead: 20, ..new(4) };
        assert_eq!(engine.allocate(&request, &ask).is_some(), fits);
    }
}

/// `groups.md` §2.11b: which token count each kind allocates for.
#[test]
fn look_ahead_counts_for_modes_none_and_all_only() {
    for (group, expected) in [
        (mamba(4, ALL), 3),
        (mamba_with_drafts(4, ALL, 1), 4),
        (mamba(4, ALIGN), 2),
        (mamba_with_drafts(4, ALIGN, 1), 3),
    ] {
        let mut engine = Engine::of(20, &[group]);
        let mut request = engine.request("a", 0..6);
        engine.step_with(&mut request, &Ask { lookahead: 3, ..new(6) });
        assert_eq!(engine.row("a").len(), expected, "{group:?}");
    }
}

/// A row that another request had holds none of its states: no hit, no state to start from, and draft
/// slots of its own.
#[test]
fn a_row_that_is_used_again_starts_anew() {
    let mut engine = Engine::of(40, &[mamba_with_drafts(4, ALIGN, 2)]);
    let shape = |row: Vec<u32>| row.iter().map(|block| *block > 0).collect::<Vec<_>>();
    let mut shapes = Vec::new();
    for (name, first) in [("a", 0), ("b", 100)] {
        let request = engine.run(name, first..first + 10);
        // 10 tokens: two nulls, the running state, two slots for drafts.
        shapes.push(shape(engine.row(name)));
        assert_eq!(engine.manager.request_row(name).unwrap().0, 0);
        engine.free(request.request_id());
    }
    assert_eq!(shapes, [[false, false, true, true, true]; 2]);
}
