//! The drop of a drafter (`groups.md` §2.11): case C11, what caching does for it, and which groups
//! count as drafters'.

use kvyard_core::single_type::SingleTypeKVCacheManager;
use kvyard_core::{KVCacheGroupSpec, KVCacheManagerConfig, Semantics};

use crate::fixture::{
    ALL, BOTH, CORRECTED, Engine, VLLM, chunked, config, eagle, full, mamba, swa,
};

/// The hits of a cached prompt of so many tokens: the same again, and 9 tokens longer.
pub(crate) fn resend_and_extension(
    config: &KVCacheManagerConfig,
    num_tokens: u32,
    extension: u32,
) -> (u32, u32) {
    let mut engine = Engine::new(config.clone());
    engine.run_and_free("a", 0..num_tokens);
    engine.manager.new_step_starts();
    let resend = engine.request("b", 0..num_tokens);
    let longer = engine.request("c", (0..num_tokens).chain(9000..9000 + extension));
    (engine.lookup(&resend).0, engine.lookup(&longer).0)
}

fn with_drafter(groups: &[KVCacheGroupSpec], semantics: Semantics) -> KVCacheManagerConfig {
    KVCacheManagerConfig { use_eagle: true, semantics, ..config(121, groups) }
}

#[test]
fn c11_three_kinds() {
    let groups = [full(4), swa(4, 8), swa(4, 16)];
    for (semantics, expected) in [(VLLM, 40), (CORRECTED, 44)] {
        let none = KVCacheManagerConfig { semantics, ..config(121, &groups) };
        assert_eq!(resend_and_extension(&none, 48, 9).0, 44, "without a drafter");
        for flagged in [&[0, 1, 2][..], &[1], &[0], &[]] {
            let mut groups = groups;
            for group in flagged {
                groups[*group] = eagle(groups[*group]);
            }
            let hit = resend_and_extension(&with_drafter(&groups, semantics), 48, 9).0;
            assert_eq!(hit, expected, "flags {flagged:?}");
        }
    }
}

#[test]
fn c11_two_kinds() {
    for (num_tokens, v251, right) in
        [(47, (40, 40), (40, 40)), (48, (40, 44), (44, 44)), (49, (44, 44), (44, 44))]
    {
        for (semantics, expected) in [(VLLM, v251), (CORRECTED, right)] {
            for groups in [[full(4), swa(4, 8)], [swa(4, 8), full(4)]] {
                let found = resend_and_extension(&with_drafter(&groups, semantics), num_tokens, 9);
                assert_eq!(found, expected, "{num_tokens} tokens");
            }
        }
    }
}

/// No credit for one group, under either name.
#[test]
fn c11_one_group() {
    for semantics in BOTH {
        for (num_tokens, expected) in [(47, 40), (48, 40), (49, 44)] {
            let found = resend_and_extension(&with_drafter(&[full(4)], semantics), num_tokens, 9).0;
            assert_eq!(found, expected, "{num_tokens} tokens");
        }
    }
}

/// Nor for several groups of one spec: "the same loop with one bucket is unitary coordination"
/// (`groups.md`, clarifications). Splitting a group in two changes no hit.
#[test]
fn one_bucket_decides_as_one_group() {
    for semantics in BOTH {
        for group in [full(4), swa(4, 8), chunked(4, 8), mamba(4, ALL)] {
            for num_tokens in [15, 16, 17, 47, 48, 49] {
                let one = with_drafter(&[group], semantics);
                let two = with_drafter(&[group, group], semantics);
                assert_eq!(
                    resend_and_extension(&one, num_tokens, 9),
                    resend_and_extension(&two, num_tokens, 9),
                    "{num_tokens} tokens, {group:?}"
                );
            }
        }
    }
}

/// A drafter's window of one token needs the block behind the hit and no other. Of 12 blocks a retention
/// interval of two keeps the even ones and those before the prompt's end (positions 10 and 11); a resent
/// prompt may reuse 47 tokens, 11 blocks, so position 10 is found and voided: 10 blocks.
#[test]
fn one_bucket_is_not_asked_again_without_its_drop() {
    for semantics in BOTH {
        for groups in [vec![swa(4, 1)], vec![swa(4, 1); 2], vec![swa(4, 1); 3]] {
            let config = with_drafter(&groups, semantics);
            let config = KVCacheManagerConfig { retention_interval: Some(8), ..config };
            assert_eq!(resend_and_extension(&config, 48, 9).0, 40, "{} groups", groups.len());
        }
    }
}

/// Flagged groups, or all with `use_eagle` and no flag (§7.1); one of a spec flags the others of it.
#[test]
fn which_groups_are_the_drafters() {
    let flagged = |groups: &[KVCacheGroupSpec], use_eagle| -> Vec<bool> {
        let base = config(20, groups);
        let engine = Engine::new(KVCacheManagerConfig { use_eagle, ..base });
        engine
            .manager
            .single_type_managers()
            .iter()
            .map(SingleTypeKVCacheManager::use_eagle)
            .collect()
    };
    assert_eq!(flagged(&[full(4), swa(4, 8)], true), [true, true], "none flagged: all");
    assert_eq!(flagged(&[full(4), eagle(swa(4, 8))], true), [false, true]);
    assert_eq!(flagged(&[eagle(full(4)), swa(4, 8)], false), [true, false]);
    assert_eq!(flagged(&[full(4), swa(4, 8)], false), [false, false]);
    let groups = [full(4), swa(4, 8), eagle(swa(4, 8)), swa(4, 12)];
    assert_eq!(flagged(&groups, true), [false, true, true, false]);
    // The flag reaches what the other group caches: alignment 16, a window of two blocks and the one
    // behind it.
    let base = config(40, &[full(16), swa(4, 8), eagle(swa(4, 8))]);
    let mut engine = Engine::new(KVCacheManagerConfig { use_eagle: true, ..base });
    engine.run("a", 0..24);
    assert_eq!((engine.keyed("a", 1), engine.keyed("a", 2)), (vec![2, 3, 4], vec![2, 3, 4]));
}

/// A drafter reads full attention only: the window is not asked for a block more, and caches none.
#[test]
fn a_flag_on_one_group_stays_there() {
    for semantics in BOTH {
        let groups = [eagle(full(16)), swa(4, 8)];
        let arguments = with_drafter(&groups, semantics);
        let mut engine = Engine::new(arguments);
        engine.run("a", 0..40);
        assert_eq!((engine.keyed("a", 0), engine.keyed("a", 1)), (vec![0, 1], vec![2, 3, 6, 7]));
        engine.free("a");
        let longer = engine.request("b", 0..40);
        assert_eq!(engine.lookup(&longer).0, 16, "32 less a block of 16");
    }
}

/// The credit never makes a hit longer than the cap, and never shorter than without it.
#[test]
fn the_credit_only_adds() {
    let mixtures = [
        vec![full(4), swa(4, 8)],
        vec![eagle(full(4)), swa(8, 16)],
        vec![full(8), eagle(swa(4, 8)), swa(4, 16)],
        vec![full(4), mamba(8, ALL)],
        vec![full(4), chunked(4, 8)],
        vec![swa(4, 8), eagle(swa(4, 12))],
    ];
    for groups in mixtures {
        for num_tokens in 1..50 {
            let v251 = resend_and_extension(&with_drafter(&groups, VLLM), num_tokens, 20);
            let right = resend_and_extension(&with_drafter(&groups, CORRECTED), num_tokens, 20);
            assert!(right.0 >= v251.0 && right.0 < num_tokens, "{num_tokens}: {v251:?} {right:?}");
            assert_eq!(right.1, v251.1, "beyond the cap nothing is to be credited");
        }
    }
}
