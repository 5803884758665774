//! Events of masked groups (`manager.md` §8.2, cases C14, C15, C17).

use std::collections::HashMap;

use kvyard_core::{BlockHash, BlockId, GroupId, KVCacheGroupSpec, KVCacheManagerConfig, Semantics};

use crate::fixture::{
    ALIGN, ALL, Ask, BOTH, CORRECTED, Engine, Event, VLLM, chunked, config, cross, eagle, full,
    mamba, mla, new, rswa, sink, swa, swa_mla,
};

fn with_events(
    num_blocks: u32,
    groups: &[KVCacheGroupSpec],
    semantics: Semantics,
) -> KVCacheManagerConfig {
    let base = config(num_blocks, groups);
    KVCacheManagerConfig { enable_kv_cache_events: true, semantics, ..base }
}

fn stored(
    group: u32,
    hashes: &[BlockHash],
    parent: Option<BlockHash>,
    tokens: std::ops::Range<u32>,
    block_size: u32,
) -> Event {
    Event::Stored { group, hashes: hashes.to_vec(), parent, tokens: tokens.collect(), block_size }
}

/// Case C15.
#[test]
fn c15_a_masked_group() {
    let groups = [full(32), swa(8, 8)];
    for semantics in BOTH {
        let mut engine = Engine::new(with_events(20, &groups, semantics));
        let request = engine.run("a", 0..64);
        let h = request.block_hashes();
        let attention = stored(0, &[h[3], h[7]], None, 0..64, 32);
        let expected = if semantics == VLLM {
            vec![attention, stored(1, &[h[3], h[7]], None, 0..64, 8)]
        } else {
            // H2 and H6 are announced in no event of group 1 (C17): H3 has no announced ancestor, H7
            // has H3.
            vec![
                attention,
                stored(1, &[h[3]], None, 24..32, 8),
                stored(1, &[h[7]], Some(h[3]), 56..64, 8),
            ]
        };
        assert_eq!(engine.events(), expected);
    }
}

/// The same over several calls, with a drafter: runs of two blocks, and one that a call cuts in two.
#[test]
fn c15_runs_across_calls() {
    let groups = [full(32), swa(8, 8)];
    let base = with_events(40, &groups, CORRECTED);
    let mut engine = Engine::new(KVCacheManagerConfig { use_eagle: true, ..base });
    let mut request = engine.request("a", 0..80);
    // Aligned 32: the window offers 36 tokens' blocks, 0 to 3, because the fourth is not full.
    engine.step(&mut request, 36);
    let h = request.block_hashes().to_vec();
    let attention = |start: usize, parent| {
        let tokens = u32::try_from(start * 32).unwrap();
        stored(0, &[h[start * 4 + 3]], parent, tokens..tokens + 32, 32)
    };
    assert_eq!(engine.events(), [attention(0, None), stored(1, &[h[3]], None, 24..32, 8)]);
    engine.step(&mut request, 44);
    // Aligned 64, and block 8 behind it; full attention has two of its blocks.
    assert_eq!(
        engine.events(),
        [
            attention(1, Some(h[3])),
            stored(1, &[h[4]], Some(h[3]), 32..40, 8),
            stored(1, &[h[7], h[8]], Some(h[4]), 56..72, 8),
        ]
    );
}

/// Retention 0: 0.25.1 announces an empty store with 64 tokens, we nothing.
#[test]
fn c15_no_empty_events() {
    for (semantics, expected) in [(VLLM, 2), (CORRECTED, 1)] {
        let base = with_events(40, &[full(32), swa(8, 8)], semantics);
        let arguments = KVCacheManagerConfig { retention_interval: Some(0), ..base };
        let mut engine = Engine::new(arguments);
        // A prompt of 200 tokens is kept at 192 only.
        let mut request = engine.request("a", 0..200);
        engine.step(&mut request, 64);
        let events = engine.events();
        assert_eq!(events.len(), expected);
        if semantics == VLLM {
            assert_eq!(events[1], stored(1, &[], None, 0..64, 8));
        }
    }
}

/// A parent that was evicted is announced no more.
#[test]
fn c15_an_evicted_parent_is_none() {
    let mut engine = Engine::new(with_events(20, &[full(32), swa(8, 8)], CORRECTED));
    let mut request = engine.request("a", 0..64);
    engine.step(&mut request, 32);
    let h = request.block_hashes().to_vec();
    let rows = engine.rows("a");
    engine.manager.pool_mut().evict_blocks(&[BlockId(rows[1][3])]).unwrap();
    engine.events();
    engine.step(&mut request, 32);
    assert_eq!(
        engine.events(),
        [stored(0, &[h[7]], Some(h[3]), 32..64, 32), stored(1, &[h[7]], None, 56..64, 8)]
    );
}

/// Case C17 in one of two groups: what another group announced is no ancestor.
#[test]
fn c17_the_parent_of_a_partial_entry_is_of_its_group() {
    for semantics in BOTH {
        for evicted in [false, true] {
            let mut engine = Engine::new(with_events(20, &[full(32), swa(8, 8)], semantics));
            let mut request = engine.request("a", 0..64);
            engine.step(&mut request, 63);
            let h = request.block_hashes().to_vec();
            let rows = engine.rows("a");
            if evicted {
                engine.manager.pool_mut().evict_blocks(&[BlockId(rows[0][0])]).unwrap();
            }
            engine.events();
            let call = request.call(true);
            let second = BlockId(rows[0][1]);
            let pool = engine.manager.pool_mut();
            pool.cache_partial_block(&call, second, 48, GroupId(0), 32).unwrap();
            let expected = match (semantics == VLLM, evicted) {
                // The hash before it, announced or not, and the last 8 tokens.
                (true, _) => stored(0, &[h[5]], Some(h[4]), 40..48, 8),
                (false, false) => stored(0, &[h[5]], Some(h[3]), 32..48, 16),
                // Group 1 still has H3, which is of no use to group 0.
                (false, true) => stored(0, &[h[5]], None, 0..48, 48),
            };
            assert_eq!(engine.events(), [expected]);
            engine.manager.validate();
        }
    }
}

/// Case C14 in two groups: a hash of one group is not a copy of the same hash of another.
#[test]
fn c14_the_last_copy_of_each_group() {
    for semantics in BOTH {
        let mut engine = Engine::new(with_events(9, &[full(4), swa(4, 8)], semantics));
        let first = engine.run("a", 0..8);
        let h = first.block_hashes().to_vec();
        assert_eq!(engine.rows("a"), [[1, 2], [3, 4]]);
        engine.run("b", 0..8);
        assert_eq!(engine.rows("b"), [[1, 5], [3, 6]]);
        engine.free("a");
        engine.free("b");
        assert_eq!(engine.order(), [7, 8, 2, 4, 5, 1, 6, 3]);
        engine.events();
        let removed = |group, hash| Event::Removed { group, hash };

        // Two blocks for each group: 7 and 8, and one copy of H1 in either group.
        engine.run("c", 100..107);
        let events = engine.events();
        let removals: Vec<&Event> =
            events.iter().filter(|event| matches!(event, Event::Removed { .. })).collect();
        let sibling = engine.request("d", (0..8).chain([55]));
        assert_eq!(engine.lookup(&sibling).0, 8, "the other copies serve it");
        if semantics == VLLM {
            assert_eq!(removals, [&removed(0, h[1]), &removed(1, h[1])]);
        } else {
            assert!(removals.is_empty());
        }
        engine.free("c");
        engine.events();

        // Everything. Free are: the plain tails of C, then 5, 1, 6, 3 and the heads of C.
        engine.run("e", 200..215);
        let events = engine.events();
        for (group, hash) in [(0, h[1]), (0, h[0]), (1, h[1]), (1, h[0])] {
            let count = events.iter().filter(|event| **event == removed(group, hash)).count();
            assert_eq!(count, 1, "group {group}: now the last copy is gone");
        }
    }
}

// ------------------------------------------------------------------------------ what a router knows

/// A router's index of what is cached: how often each hash of each group was announced; or, where only
/// the last removal tells, whether it was.
struct Index {
    counts_copies: bool,
    copies: HashMap<(u32, BlockHash), u32>,
}

impl Index {
    fn replay(&mut self, events: &[Event]) {
        for event in events {
            match event {
                Event::Stored { group, hashes, parent, tokens, block_size } => {
                    if !self.counts_copies {
                        assert!(!hashes.is_empty(), "an empty store");
                        assert_eq!(tokens.len(), hashes.len() * *block_size as usize);
                        let known =
                            parent.is_none_or(|hash| self.copies.contains_key(&(*group, hash)));
                        assert!(known, "the parent is announced: {event:?}");
                    }
                    for hash in hashes {
                        let copies = self.copies.entry((*group, *hash)).or_default();
                        *copies = if self.counts_copies { *copies + 1 } else { 1 };
                    }
                }
                Event::Removed { group, hash } => {
                    let copies = self.copies.get_mut(&(*group, *hash)).expect("it was announced");
                    *copies -= 1;
                    if *copies == 0 {
                        self.copies.remove(&(*group, *hash));
                    }
                }
                Event::Cleared => self.copies.clear(),
            }
        }
    }

    /// I12.
    fn check(&self, engine: &Engine) {
        let pool = engine.manager.pool();
        let mut cached: HashMap<(u32, BlockHash), u32> = HashMap::new();
        for key in (1..pool.num_blocks()).filter_map(|block| pool.block_key(BlockId(block))) {
            let copies = cached.entry((key.group.0, key.hash)).or_default();
            *copies = if self.counts_copies { *copies + 1 } else { 1 };
        }
        assert_eq!(self.copies, cached, "I12");
    }
}

/// Prompts that share prefixes, in chunks, in a pool that is too small for all of them.
#[test]
fn a_router_can_follow_every_mixture() {
    let mixtures: [(&[KVCacheGroupSpec], bool, Option<u32>); 6] = [
        (&[full(16), swa(4, 8)], false, None),
        (&[full(16), swa(4, 8)], true, None),
        (&[full(16), swa(4, 8)], true, Some(0)),
        (&[full(4), eagle(swa(8, 9)), mamba(4, ALL)], true, Some(16)),
        (&[full(4), mamba(8, ALIGN)], false, None),
        (&[mamba(8, ALIGN), swa(4, 6)], false, Some(0)),
    ];
    for (groups, use_eagle, retention_interval) in mixtures {
        for semantics in BOTH {
            let base = with_events(70, groups, semantics);
            let arguments = KVCacheManagerConfig { use_eagle, retention_interval, ..base };
            let mut engine = Engine::new(arguments);
            let counts_copies = semantics == VLLM;
            let mut index = Index { counts_copies, copies: HashMap::new() };
            for round in 0..24_u32 {
                engine.manager.new_step_starts();
                let shared = 8 * (round % 5);
                let tokens = (0..shared).chain(1000 * round..1000 * round + 60);
                let mut request = engine.request(&format!("r{round}"), tokens);
                let hit = engine.manager.lookup(&request.call(true));
                let mut hit = Some(&hit);
                while request.num_computed_tokens < request.view().num_tokens {
                    let found = hit.map_or(0, |hit| hit.num_tokens);
                    let left = request.view().num_tokens - request.num_computed_tokens - found;
                    let ask = Ask { hit, ..new(left.min(12)) };
                    engine.step_with(&mut request, &ask);
                    hit = None;
                    engine.manager.new_step_starts();
                    index.replay(&engine.events());
                    index.check(&engine);
                }
                engine.free(request.request_id());
            }
        }
    }
}

/// The names that store events carry (`groups.md` §1.1, `manager.md` §8.2): the most specific one, and a
/// window of sliding windows only.
#[test]
fn kinds_and_windows() {
    for (group, kind, window) in [
        (full(4), "full_attention", None),
        (rswa(4, 8), "full_attention", None),
        (mla(4), "mla_attention", None),
        (sink(4, 8), "sink_full_attention", None),
        (swa(4, 8), "sliding_window", Some(8)),
        (swa_mla(4, 8), "sliding_window_mla", Some(8)),
        (chunked(4, 8), "chunked_local_attention", None),
        (mamba(4, ALL), "mamba", None),
        (cross(4), "cross_attention", None),
    ] {
        let found = group.spec.kind;
        assert_eq!((found.event_kind(), found.event_sliding_window()), (kind, window));
    }
}
