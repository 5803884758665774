//! Blocks for several groups at once (`manager.md` §6.3, §7.2): order, two phases, admission, limits,
//! windows of steps in flight (cases C09, C10, C22 b).

use kvyard_core::{AllocateSlots, KVCacheManagerConfig};

use crate::fixture::{
    ALIGN, ALL, Ask, BOTH, CORRECTED, Engine, Event, VLLM, chunked, config, cross, full, live,
    mamba, new, swa,
};

/// The example of §6.3.1: external blocks of group 0, then of group 1, then new ones in group order.
#[test]
fn two_groups_load() {
    for semantics in BOTH {
        let base = config(20, &[full(4), swa(4, 6)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let mut request = engine.request("a", 0..24);
        let ask = Ask { external: 20, ..new(4) };
        assert_eq!(engine.step_with(&mut request, &ask).1, [vec![8], vec![9]]);
        assert_eq!(engine.rows("a"), [vec![1, 2, 3, 4, 5, 8], vec![0, 0, 0, 6, 7, 9]]);
    }
}

/// `manager.md` §2.3 E4: the order of an immediate and of a deferred free.
#[test]
fn e4_immediate_and_deferred_free() {
    let immediate = [6, 3, 7, 8, 9, 10, 11, 2, 1, 5, 4];
    let across = [6, 3, 7, 8, 9, 10, 11, 5, 4, 2, 1];
    for (semantics, deferred) in [(VLLM, across), (CORRECTED, immediate)] {
        for is_deferred in [false, true] {
            let base = config(12, &[full(4), swa(4, 20)]);
            let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
            engine.run("a", 0..10);
            assert_eq!(engine.rows("a"), [[1, 2, 3], [4, 5, 6]]);
            if is_deferred {
                let lease = engine.manager.pop_blocks_for_free("a", None).unwrap();
                assert_eq!(lease.ids().len(), 6);
                assert_eq!((engine.num_free(), engine.rows("a")), (5, vec![vec![], vec![]]));
                assert!(!engine.manager.reset_prefix_cache().unwrap(), "popped, not returned");
                engine.manager.free_popped(lease).unwrap();
                assert_eq!(engine.order(), deferred);
                assert!(engine.manager.reset_prefix_cache().unwrap());
            } else {
                engine.free("a");
                assert_eq!(engine.order(), immediate);
            }
        }
    }
}

// --------------------------------------------------------------------------------------- two phases

/// Case C09: all hits are attached before anybody takes a block for external tokens. In one phase the
/// first group would take block 6, a hit of the second. Whichever group stands first.
#[test]
fn c09_no_group_evicts_the_hits_of_another() {
    for semantics in BOTH {
        for groups in [[full(4), swa(4, 64)], [swa(4, 64), full(4)]] {
            let mut engine = Engine::new(KVCacheManagerConfig {
                semantics,
                enable_kv_cache_events: true,
                ..config(13, &groups)
            });
            engine.run_and_free("a", 0..12);
            let other = engine.run("z", 100..112).block_hashes().to_vec();
            engine.free("z");
            assert_eq!(engine.order(), [3, 2, 1, 6, 5, 4, 9, 8, 7, 12, 11, 10]);
            engine.events();
            let request = engine.request("b", (0..12).chain(200..204));
            let hit = engine.manager.lookup(&request.call(true));
            assert_eq!(hit.num_tokens, 12);
            let ask = Ask { hit: Some(&hit), external: 4, delayed: true, ..new(0) };
            assert_eq!(engine.allocate(&request, &ask), Some(vec![vec![], vec![]]));
            assert_eq!(engine.rows("b"), [[1, 2, 3, 9], [4, 5, 6, 8]]);
            assert!((1..=6).chain([8, 9]).all(|block| engine.ref_cnt(block) == 1));
            assert_eq!(engine.order(), [7, 12, 11, 10]);
            let removed = |hash| Event::Removed { group: 0, hash };
            assert_eq!(engine.events(), [removed(other[2]), removed(other[1])]);
            assert_eq!(engine.keyed("b", 1), [0, 1, 2], "the hash of block 2 is not lost");
        }
    }
}

/// A remote load that ends inside a block, for two groups: nothing is cached before `cache_blocks`.
#[test]
fn an_asynchronous_load_is_cached_later() {
    for semantics in BOTH {
        let base = config(40, &[full(4), swa(4, 64)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let mut request = engine.request("a", 0..30);
        engine.step_with(&mut request, &Ask { external: 10, delayed: true, ..new(0) });
        let again = engine.request("b", 0..30);
        assert_eq!(engine.lookup(&again).0, 0);
        engine.manager.cache_blocks(&request.call(false), None, 10).unwrap();
        engine.manager.validate();
        assert_eq!(engine.rows("a"), [[1, 2, 3], [4, 5, 6]]);
        assert_eq!((engine.keyed("a", 0), engine.keyed("a", 1)), (vec![0, 1], vec![0, 1]));
        assert_eq!(engine.lookup(&again).0, 8);
    }
}

/// `groups.md` §2.1.5: external tokens that nobody will read get no storage, after 6 tokens in chunks of
/// 6 and after any in a window of 1. A block that they share with the next token is a new one, and
/// returned as such.
#[test]
fn external_tokens_that_nobody_reads() {
    for (group, external, row) in [(chunked(4, 6), 6, vec![0, 1]), (swa(4, 1), 10, vec![0, 0, 1])] {
        let mut engine = Engine::of(20, &[group]);
        let mut request = engine.request("a", 0..20);
        let ask = Ask { external, delayed: true, ..new(0) };
        assert_eq!(engine.step_with(&mut request, &ask), (1, vec![vec![1]]), "{group:?}");
        assert_eq!(engine.row("a"), row);
    }
}

/// Hits of the lookup group by group, of which the window's is shorter: external tokens fill the
/// difference.
#[test]
fn hits_of_their_own_lengths() {
    for semantics in BOTH {
        let base = config(40, &[full(4), swa(4, 8)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let request = engine.request("b", 0..40);
        let blocks = engine.cache(0, &request, &[0, 1, 2, 3, 4, 5]);
        let window = engine.cache(1, &request, &[2, 3]);
        let call = request.call(false);
        let (hit, lengths) = engine.manager.find_longest_cache_hit_per_group(&call, 39);
        assert_eq!(lengths, [24, 16]);
        let call = AllocateSlots {
            num_new_computed_tokens: 24,
            new_computed_blocks: Some(&hit),
            num_external_computed_tokens: 2,
            ..AllocateSlots::new(&call, 4)
        };
        let free = engine.num_free();
        engine.manager.allocate_slots(&call).unwrap().unwrap();
        engine.manager.validate();
        // 26 computed tokens: the window begins in block 4, so the hit of 16 tokens is of no use.
        let rows = engine.rows("b");
        assert_eq!(rows[0][..6], blocks);
        assert_eq!((rows[0].len(), rows[1].len()), (8, 8));
        assert_eq!((rows[1][..4].to_vec(), live(&rows[1])), (vec![0; 4], 4));
        assert_eq!(engine.ref_cnt(window[3]), 0);
        assert_eq!(free - engine.num_free(), 8 + 4);
    }
}

// -------------------------------------------------------------------------------------- look-ahead

/// `groups.md` §2.11b: which token count each kind allocates for. Look-ahead is never hashed.
#[test]
fn look_ahead() {
    let groups = [full(4), swa(4, 64), chunked(4, 64), mamba(4, ALL), mamba(4, ALIGN), cross(4)];
    let base = config(40, &groups);
    let mut engine = Engine::new(KVCacheManagerConfig { enable_caching: false, ..base });
    let mut request = engine.request("a", 0..6);
    engine.step_with(&mut request, &Ask { lookahead: 3, encoder: 3, ..new(6) });
    let lengths: Vec<usize> = engine.rows("a").iter().map(Vec::len).collect();
    assert_eq!(lengths, [3, 3, 3, 3, 2, 1]);

    let mut engine = Engine::of(40, &[full(4), swa(4, 64)]);
    let mut request = engine.request("a", 0..6);
    engine.step(&mut request, 6);
    request.append_output_tokens(&[6]);
    // 1 token and 3 drafts: 13 slots, 7 tokens that are final.
    let (_, fresh) = engine.step_with(&mut request, &Ask { lookahead: 3, ..new(4) });
    assert_eq!(fresh, [[5, 6], [7, 8]]);
    assert_eq!((engine.keyed("a", 0), engine.keyed("a", 1)), (vec![0], vec![0]));
    // All drafts rejected: their blocks stay and are used.
    request.num_computed_tokens = 7;
    request.append_output_tokens(&[7]);
    assert_eq!(engine.step_with(&mut request, &Ask { lookahead: 3, ..new(4) }).0, 0);
    assert_eq!(engine.rows("a")[0].len(), 4);
}

/// The gate with look-ahead in two groups: 40 tokens and 5 slots are 12 blocks of full attention and a
/// window cap of cdiv(7 + 16 + 5, 4) + 1 = 8, against 10 and 7.
#[test]
fn the_gate_counts_look_ahead_in_every_group() {
    for (semantics, needed) in [(VLLM, 17), (CORRECTED, 20)] {
        for free in [needed - 1, needed] {
            let mut engine = Engine::new(KVCacheManagerConfig {
                semantics,
                max_num_batched_tokens: 16,
                ..config(3 + free, &[full(4), swa(4, 8)])
            });
            engine.run("other", 100..104);
            assert_eq!(engine.num_free(), free);
            let request = engine.request("a", 0..40);
            let ask = Ask { lookahead: 5, full_sequence_must_fit: true, ..new(16) };
            let fits = engine.allocate(&request, &ask).is_some();
            assert_eq!(fits, free == needed, "{free} of {needed} free");
        }
    }
}

/// A request that is alone gives its look-ahead up rather than wait for ever.
#[test]
fn a_lone_request_progresses() {
    // 40 tokens: 10 blocks of full attention, a window of 7 at most.
    for (semantics, progresses) in [(VLLM, false), (CORRECTED, true)] {
        let mut engine = Engine::new(KVCacheManagerConfig {
            semantics,
            max_num_batched_tokens: 16,
            ..config(15, &[full(4), swa(4, 8)])
        });
        let mut request = engine.request("a", 0..40);
        let mut steps = 0;
        while request.num_computed_tokens < 40 {
            let left = 40 - request.num_computed_tokens;
            let ask = Ask { lookahead: 12, ..new(left.min(16)) };
            if engine.allocate(&request, &ask).is_none() {
                break;
            }
            request.num_computed_tokens += left.min(16);
            steps += 1;
        }
        assert_eq!(request.num_computed_tokens == 40, progresses, "{steps} steps");
    }
}

// ------------------------------------------------------------------------------- admission (C22 b)

#[test]
fn c22b_the_gate_and_the_windows_cap() {
    for semantics in BOTH {
        for num_blocks in [23, 24] {
            let mut engine = Engine::new(KVCacheManagerConfig {
                max_model_len: 512,
                max_num_batched_tokens: 64,
                semantics,
                ..config(num_blocks, &[full(16), swa(16, 32)])
            });
            let mut request = engine.request("a", 0..256);
            let ask = Ask { full_sequence_must_fit: true, ..new(64) };
            if num_blocks == 23 {
                assert_eq!(engine.allocate(&request, &ask), None, "16 + 7 > 22");
                continue;
            }
            engine.step_with(&mut request, &ask);
            for _ in 0..3 {
                engine.step(&mut request, 64);
            }
            let lives: Vec<usize> = engine.rows("a").iter().map(|row| live(row)).collect();
            assert_eq!((lives, engine.num_free()), (vec![16, 6], 1));
        }
    }
}

/// The cap of chunked local attention: golden data leave it open.
#[test]
fn c22b_the_gate_and_the_chunks_cap() {
    for (num_blocks, fits) in [(28, false), (29, true)] {
        let mut engine = Engine::new(KVCacheManagerConfig {
            max_model_len: 512,
            max_num_batched_tokens: 64,
            ..config(num_blocks, &[full(16), chunked(16, 128)])
        });
        let request = engine.request("a", 0..256);
        let ask = Ask { full_sequence_must_fit: true, ..new(64) };
        assert_eq!(engine.allocate(&request, &ask).is_some(), fits, "16 + 12 blocks");
    }
}

// ---------------------------------------------------------------------- limits at `max_model_len`

/// Golden data leave these clamps open. Slots: 10 tokens and 5 of look-ahead are 10 slots.
#[test]
fn slots_end_at_the_longest_request() {
    for semantics in BOTH {
        let limits = KVCacheManagerConfig {
            max_model_len: 10,
            semantics,
            ..config(40, &[full(4), swa(4, 8)])
        };
        let mut engine = Engine::new(limits);
        let mut request = engine.request("a", 0..10);
        let (predicted, _) = engine.step_with(&mut request, &Ask { lookahead: 5, ..new(10) });
        assert_eq!(predicted, 6);
        let lengths: Vec<usize> = engine.rows("a").iter().map(Vec::len).collect();
        assert_eq!(lengths, [3, 3]);
    }
}

/// The count without look-ahead is not clamped; only Mamba in mode `align` reads it.
#[test]
fn the_main_count_is_not_clamped() {
    for semantics in BOTH {
        let mut engine = Engine::new(KVCacheManagerConfig {
            max_model_len: 10,
            semantics,
            ..config(40, &[full(4), mamba(4, ALIGN)])
        });
        let mut request = engine.request("a", 0..16);
        engine.step(&mut request, 8);
        engine.step(&mut request, 8);
        let lengths: Vec<usize> = engine.rows("a").iter().map(Vec::len).collect();
        assert_eq!(lengths, [3, 4], "10 slots, 16 tokens");
    }
}

/// The gate asks for no more than the longest request: 4 + 4 blocks of 30 tokens.
#[test]
fn the_gate_ends_at_the_longest_request() {
    for semantics in BOTH {
        for (num_blocks, lookahead, fits) in [(8, 0, false), (9, 0, true), (9, 5, true)] {
            let mut engine = Engine::new(KVCacheManagerConfig {
                max_model_len: 16,
                semantics,
                ..config(num_blocks, &[full(4), swa(4, 64)])
            });
            let request = engine.request("a", 0..30);
            let ask = Ask { full_sequence_must_fit: true, lookahead, ..new(8) };
            assert_eq!(engine.allocate(&request, &ask).is_some(), fits, "{num_blocks} blocks");
        }
    }
}

// ----------------------------------------------------------------------------- steps in flight (C10)

#[test]
fn c10_a_window_that_a_step_in_flight_still_reads() {
    for semantics in BOTH {
        for in_flight in [0, 1] {
            let mut engine = Engine::new(KVCacheManagerConfig {
                max_model_len: 512,
                semantics,
                ..config(41, &[swa(32, 128)])
            });
            let mut request = engine.request("a", 0..159);
            engine.step(&mut request, 158);
            engine.step(&mut request, 1);
            assert_eq!(request.num_computed_tokens, 159);
            request.num_in_flight_tokens = in_flight;
            request.append_output_tokens(&[7]);
            engine.step(&mut request, 1);
            let pruned = vec![0, 2, 3, 4, 5];
            if in_flight == 0 {
                assert_eq!(engine.row("a"), pruned);
            } else {
                assert_eq!(engine.row("a"), [1, 2, 3, 4, 5]);
                assert_eq!(engine.ref_cnt(1), 1);
                // The step lands.
                request.num_in_flight_tokens = 0;
                request.append_output_tokens(&[8]);
                engine.step(&mut request, 1);
                assert_eq!(engine.row("a")[..5], pruned);
            }
        }
    }
}

/// The same for each kind that lets go of blocks; full attention lets go of none.
#[test]
fn steps_in_flight_in_every_group() {
    // 24 computed tokens, the last 8 in flight: 16 are over. A window of 8 frees 9 / 4 = 2 blocks,
    // not 17 / 4 = 4; chunks of 8 free 4, not 6; states 15 / 4 = 3, not 23 / 4 = 5.
    let groups = [full(4), swa(4, 8), chunked(4, 8), mamba(4, ALL)];
    for (in_flight, nulls) in [(0, [0, 4, 6, 5]), (8, [0, 2, 4, 3])] {
        let mut engine = Engine::of(60, &groups);
        let mut request = engine.request("a", 0..28);
        engine.step(&mut request, 24);
        request.num_in_flight_tokens = in_flight;
        engine.step(&mut request, 4);
        let found: Vec<usize> = engine.rows("a").iter().map(|row| row.len() - live(row)).collect();
        assert_eq!(found, nulls, "{in_flight} in flight");
    }
}

/// A refusal frees no block that a step in flight reads.
#[test]
fn a_refusal_spares_what_is_in_flight() {
    let mut engine = Engine::of(5, &[swa(4, 6)]);
    let mut request = engine.request("a", 0..24);
    engine.step(&mut request, 12);
    request.num_in_flight_tokens = 4;
    // 8 tokens are over: (8 - 5) / 4 = 0.
    let before = engine.manager.state_digest();
    assert_eq!(engine.allocate(&request, &new(12)), None);
    assert_eq!(engine.manager.state_digest(), before);
    assert_eq!(engine.row("a"), [1, 2, 3]);
}

/// Two blocks' worth of the three that the window left: [-, 2, 3] and one free are all there are, so
/// nobody else can give one back, and look-ahead that does not fit is given up (`gate_counts_lookahead`).
/// The nulls of the row are no blocks of its own.
#[test]
fn a_request_that_is_alone_gives_up_look_ahead_behind_nulls() {
    let mut engine = Engine::of(4, &[swa(4, 4)]);
    let mut request = engine.request("a", 0..40);
    engine.step(&mut request, 8);
    engine.step(&mut request, 4);
    assert_eq!(live(&engine.row("a")), 2, "of three positions");
    // 4 new tokens fit the free block; with 8 more, three blocks were needed and two are to be had.
    let fresh = engine.allocate(&request, &Ask { lookahead: 8, ..new(4) }).expect("it is alone");
    assert_eq!(fresh[0].len(), 1);
}

/// C08: the estimate of 0.25.1 says 4 blocks (3 of full attention, 1 of states), 5 are taken: 3, a
/// state for the external tokens and the running one. With 4 free it does not fit, whatever was
/// estimated.
#[test]
fn an_estimate_that_is_too_low_is_a_refusal() {
    for (num_blocks, fits) in [(4, false), (5, false), (6, true)] {
        let base = config(num_blocks, &[full(16), mamba(16, ALIGN)]);
        let semantics = VLLM;
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let request = engine.request("a", 0..64);
        let admitted = engine.allocate(&request, &Ask { external: 32, ..new(16) });
        assert_eq!(admitted.is_some(), fits, "{num_blocks} blocks");
        assert_eq!(engine.num_free(), if fits { 0 } else { num_blocks - 1 });
    }
}
