//! Sparse retention (`manager.md` §7.1, `groups.md` §2.3 and §2.6) and case C12: with a drafter both
//! replay boundaries, of a resend and of a longer sibling, must survive the drop.

use kvyard_core::{KVCacheGroupSpec, KVCacheManagerConfig, Semantics};

use crate::eagle::resend_and_extension;
use crate::fixture::{
    ALIGN, ALL, BOTH, CORRECTED, Engine, VLLM, chunked, config, eagle, full, live, mamba, swa,
};

fn sparse(
    groups: &[KVCacheGroupSpec],
    retention_interval: Option<u32>,
    semantics: Semantics,
) -> KVCacheManagerConfig {
    KVCacheManagerConfig { use_eagle: true, retention_interval, semantics, ..config(400, groups) }
}

#[test]
fn c12_a_window_and_a_drafter() {
    type Row = (Option<u32>, u32, (u32, u32), (u32, u32));
    let rows: [Row; 8] = [
        (None, 127, (64, 64), (64, 64)),
        (None, 128, (64, 96), (96, 96)),
        (None, 129, (96, 96), (96, 96)),
        (None, 160, (96, 128), (128, 128)),
        (Some(0), 127, (0, 0), (64, 64)),
        (Some(0), 128, (0, 96), (96, 96)),
        (Some(0), 129, (0, 0), (96, 96)),
        (Some(0), 160, (0, 128), (128, 128)),
    ];
    for (retention, num_tokens, v251, right) in rows {
        for (semantics, expected) in [(VLLM, v251), (CORRECTED, right)] {
            let arguments = sparse(&[full(32), swa(8, 8)], retention, semantics);
            let found = resend_and_extension(&arguments, num_tokens, 64);
            assert_eq!(found, expected, "retention {retention:?}, {num_tokens} tokens");
        }
    }
}

/// The hits of a prompt that was computed in steps of `chunk` tokens, so that there is a state at the
/// end of each.
fn in_steps(arguments: &KVCacheManagerConfig, num_tokens: u32, chunk: u32) -> (u32, u32) {
    let mut engine = Engine::new(arguments.clone());
    let mut request = engine.request("a", 0..num_tokens);
    while request.num_computed_tokens < num_tokens {
        let left = num_tokens - request.num_computed_tokens;
        engine.step(&mut request, chunk.min(left));
        engine.manager.new_step_starts();
    }
    engine.free("a");
    let resend = engine.request("b", 0..num_tokens);
    let longer = engine.request("c", (0..num_tokens).chain(9000..9064));
    (engine.lookup(&resend).0, engine.lookup(&longer).0)
}

/// C12's kind of fault in Mamba groups. Full attention of 16 tokens drops a block; the state must be
/// at what is left.
#[test]
fn c12_states_and_a_drafter() {
    type Row = (Option<u32>, u32, (u32, u32), (u32, u32));
    let rows: [Row; 8] = [
        (None, 63, (32, 32), (32, 32)),
        (None, 64, (32, 48), (48, 48)),
        (None, 65, (48, 48), (48, 48)),
        (None, 80, (48, 64), (64, 64)),
        (Some(0), 63, (0, 0), (32, 32)),
        (Some(0), 64, (0, 48), (48, 48)),
        (Some(0), 65, (0, 0), (48, 48)),
        (Some(0), 80, (0, 64), (64, 64)),
    ];
    for (retention, num_tokens, v251, right) in rows {
        for (semantics, expected) in [(VLLM, v251), (CORRECTED, right)] {
            for groups in [
                [full(16), mamba(16, ALIGN)],
                [mamba(16, ALIGN), full(16)],
                [eagle(full(16)), mamba(16, ALIGN)],
                [full(16), mamba(16, ALL)],
            ] {
                let arguments = sparse(&groups, retention, semantics);
                let found = in_steps(&arguments, num_tokens, 16);
                assert_eq!(found, expected, "retention {retention:?}, {num_tokens} tokens");
            }
        }
    }
}

/// The same where states are every second block: what is left of the drop is aligned to 32.
#[test]
fn c12_states_of_larger_blocks() {
    let rows = [
        (96, (64, 64), (64, 64)),
        (100, (0, 0), (64, 64)),
        (112, (0, 96), (96, 96)),
        (128, (96, 96), (96, 96)),
    ];
    for (num_tokens, v251, right) in rows {
        for (semantics, expected) in [(VLLM, v251), (CORRECTED, right)] {
            let arguments = sparse(&[full(16), mamba(32, ALIGN)], Some(0), semantics);
            assert_eq!(in_steps(&arguments, num_tokens, 32), expected, "{num_tokens} tokens");
        }
    }
}

/// A group that no drafter reads loses the same boundary when another group drops.
#[test]
fn c12_a_window_that_no_drafter_reads() {
    for (num_tokens, v251, right) in [(127, (0, 0), (64, 64)), (128, (0, 96), (96, 96))] {
        for (semantics, expected) in [(VLLM, v251), (CORRECTED, right)] {
            let arguments = sparse(&[eagle(full(32)), swa(8, 8)], Some(0), semantics);
            let found = resend_and_extension(&arguments, num_tokens, 64);
            assert_eq!(found, expected, "{num_tokens} tokens");
        }
    }
}

/// All three kinds at once: the states and the window meet at the boundaries that are kept.
#[test]
fn c12_three_kinds() {
    for (num_tokens, expected) in [(127, (64, 64)), (128, (96, 96)), (129, (96, 96))] {
        let groups = [full(32), swa(8, 8), mamba(32, ALIGN)];
        let arguments = sparse(&groups, Some(0), CORRECTED);
        assert_eq!(in_steps(&arguments, num_tokens, 32), expected, "{num_tokens} tokens");
    }
}

/// What C12 asks of every mixture: sparse retention costs neither the resend nor the longer sibling a
/// token, whatever the lengths, block sizes and drafters' groups.
#[test]
fn c12_sparse_is_as_good_as_dense() {
    let mixtures = [
        vec![full(8), swa(4, 6)],
        vec![full(4), swa(8, 9)],
        vec![eagle(full(8)), swa(4, 6)],
        vec![full(8), eagle(swa(4, 12))],
        vec![full(4), swa(4, 8), swa(8, 16)],
        vec![full(8), mamba(4, ALIGN)],
        vec![full(4), mamba(8, ALIGN)],
        vec![mamba(16, ALIGN), full(8), swa(4, 10)],
        vec![swa(4, 6), eagle(full(12))],
        // One group, and groups of one spec: without the credit.
        vec![swa(4, 8)],
        vec![swa(4, 8), swa(4, 8)],
    ];
    for groups in mixtures {
        let chunk = config(1, &groups).scheduler_block_size;
        for num_tokens in 1..70 {
            let hits = |retention| {
                let arguments = sparse(&groups, retention, CORRECTED);
                in_steps(&arguments, num_tokens, chunk)
            };
            let dense = hits(None);
            for interval in [0, chunk, 2 * chunk] {
                assert_eq!(hits(Some(interval)), dense, "{num_tokens}: {interval}, {groups:?}");
            }
        }
    }
}

/// Without a drafter there is one boundary, under both names: the resend's.
#[test]
fn without_a_drafter_the_last_boundary_is_kept() {
    for semantics in BOTH {
        for (num_tokens, expected) in [(127, (96, 96)), (128, (96, 96)), (129, (128, 128))] {
            let base = sparse(&[full(32), swa(8, 8)], Some(0), semantics);
            let arguments = KVCacheManagerConfig { use_eagle: false, ..base };
            let found = resend_and_extension(&arguments, num_tokens, 64);
            assert_eq!(found, expected, "{num_tokens} tokens");
        }
    }
}

/// An interval keeps boundaries on the way as well: a sibling that shares 100 tokens finds the one at
/// 64 behind the drop (3 blocks of full attention less one).
#[test]
fn an_interval_keeps_boundaries_on_the_way() {
    for semantics in BOTH {
        for (retention, expected) in [(0, 0), (64, 64), (32, 64), (128, 0)] {
            let arguments = sparse(&[full(32), swa(8, 8)], Some(retention), semantics);
            let mut engine = Engine::new(arguments);
            engine.run_and_free("a", 0..300);
            let sibling = engine.request("b", (0..100).chain(9000..9100));
            assert_eq!(engine.lookup(&sibling).0, expected, "retention {retention}");
        }
    }
}

/// How much is spared: a window of one block keeps two boundaries of 38 blocks, not ten.
#[test]
fn sparse_retention_is_sparse() {
    for (retention, use_eagle, semantics, expected) in [
        // 300 tokens: aligned boundaries 32 .. 288, block 7 of each eight ... and so on.
        (None, false, CORRECTED, vec![3, 7, 11, 15, 19, 23, 27, 31, 35]),
        (Some(0), false, CORRECTED, vec![35]),
        (Some(128), false, CORRECTED, vec![15, 31, 35]),
        // With a drafter the block behind each boundary too, and the boundary before the last.
        (Some(0), true, VLLM, vec![35, 36]),
        (Some(0), true, CORRECTED, vec![31, 32, 35, 36]),
    ] {
        let base = sparse(&[full(32), swa(8, 8)], retention, semantics);
        let mut engine = Engine::new(KVCacheManagerConfig { use_eagle, ..base });
        engine.run("a", 0..300);
        assert_eq!(engine.keyed("a", 1), expected, "{retention:?} {use_eagle}");
        assert_eq!(live(&engine.rows("a")[1]), 38);
        assert_eq!(engine.keyed("a", 0).len(), 9, "full attention keeps everything");
    }
}

/// Full attention and chunks keep everything, whatever the interval.
#[test]
fn retention_is_of_windows_and_states() {
    let groups = [full(4), chunked(4, 8), swa(4, 5), mamba(4, ALL)];
    let base = config(60, &groups);
    let mut engine = Engine::new(KVCacheManagerConfig { retention_interval: Some(0), ..base });
    engine.run("a", 0..30);
    let all: Vec<usize> = (0..7).collect();
    assert_eq!((engine.keyed("a", 0), engine.keyed("a", 1)), (all.clone(), all));
    assert_eq!((engine.keyed("a", 2), engine.keyed("a", 3)), (vec![6], vec![6]));
}

/// Every second block of six, the last of each period; and the one before the place where the prompt
/// would be resent, 20 of its 24 tokens.
#[test]
fn states_of_every_second_block() {
    let base = config(40, &[mamba(4, ALL)]);
    let mut engine = Engine::new(KVCacheManagerConfig { retention_interval: Some(8), ..base });
    engine.run("a", 0..24);
    assert_eq!(engine.keyed("a", 0), [1, 3, 4, 5]);
}
