//! On release: how many tokens were really written (`manager.md` W1). Keys of blocks beyond them go.

use kvyard_core::KVCacheManagerConfig;

use crate::fixture::{ALIGN, BOTH, Engine, Event, config, full, mamba, swa};

#[test]
fn keys_of_unwritten_blocks_go() {
    for semantics in BOTH {
        let mut engine = Engine::new(KVCacheManagerConfig {
            semantics,
            enable_kv_cache_events: true,
            ..config(20, &[full(4), swa(4, 8)])
        });
        let request = engine.run("a", 0..24);
        let h = request.block_hashes().to_vec();
        assert_eq!(engine.rows("a"), [(1..=6).collect(), (7..=12).collect::<Vec<_>>()]);
        engine.events();
        // 10 tokens are written: two whole blocks in each group.
        engine.manager.free_written("a", None, 10).unwrap();
        engine.manager.validate();
        let removed = |group| h[2..].iter().map(move |hash| Event::Removed { group, hash: *hash });
        let expected: Vec<Event> = removed(0).chain(removed(1)).collect();
        assert_eq!(engine.events(), expected);
        // Without keys they are used again first.
        assert_eq!(engine.order()[..8], [12, 11, 10, 9, 6, 5, 4, 3]);
        assert_eq!(engine.order()[15..], [2, 1, 8, 7]);
        let again = engine.request("b", 0..25);
        assert_eq!(engine.lookup(&again), (8, vec![vec![1, 2], vec![7, 8]]));
    }
}

#[test]
fn each_group_counts_in_its_own_blocks() {
    for semantics in BOTH {
        let base = config(60, &[full(16), swa(4, 8)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        engine.run("a", 0..64);
        let rows = engine.rows("a");
        assert_eq!(engine.keyed("a", 1), [2, 3, 6, 7, 10, 11, 14, 15]);
        engine.manager.free_written("a", None, 44).unwrap();
        engine.manager.validate();
        let pool = engine.manager.pool();
        let keyed = |row: &[u32]| -> Vec<usize> {
            let has_key = |at: &usize| pool.block_key(kvyard_core::BlockId(row[*at])).is_some();
            (0..row.len()).filter(has_key).collect()
        };
        assert_eq!(keyed(&rows[0]), [0, 1], "two blocks of 16");
        assert_eq!(keyed(&rows[1]), [2, 3, 6, 7, 10], "eleven of 4");
        let again = engine.request("b", 0..65);
        assert_eq!(engine.lookup(&again).0, 32);
    }
}

/// A state is written when all tokens before it are.
#[test]
fn states_beyond_what_was_written_go() {
    for semantics in BOTH {
        let base = config(20, &[full(16), mamba(16, ALIGN)]);
        let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
        let mut request = engine.request("a", 0..64);
        engine.step(&mut request, 32);
        engine.manager.new_step_starts();
        // Scheduled, then preempted in the same step.
        engine.step(&mut request, 32);
        engine.manager.free_written("a", None, 32).unwrap();
        engine.manager.validate();
        engine.manager.new_step_starts();
        let again = engine.request("b", 0..65);
        let (num_tokens, rows) = engine.lookup(&again);
        assert_eq!(num_tokens, 32);
        assert_eq!((rows[0].len(), rows[1].len(), rows[1][0]), (2, 2, 0));
    }
}

#[test]
fn everything_written_is_an_ordinary_free() {
    for semantics in BOTH {
        for written in [24, 27, 1000] {
            let engine = || {
                let base = config(30, &[full(4), swa(4, 8)]);
                let mut engine = Engine::new(KVCacheManagerConfig { semantics, ..base });
                engine.run("a", 0..27);
                engine
            };
            let (mut plain, mut told) = (engine(), engine());
            plain.free("a");
            told.manager.free_written("a", None, written).unwrap();
            assert_eq!(told.order(), plain.order());
            let again = told.request("b", 0..30);
            assert_eq!(told.lookup(&again), plain.lookup(&again));
        }
    }
}

#[test]
fn an_unknown_request_is_none() {
    let mut engine = Engine::of(20, &[full(4), swa(4, 8)]);
    engine.run("a", 0..8);
    let before = engine.manager.state_digest();
    engine.manager.free_written("nobody", None, 4).unwrap();
    assert_eq!(engine.manager.state_digest(), before);
}
