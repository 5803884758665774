//! What lookups cost, in positions looked up (`groups.md` §6.3): hits of a long prompt, and misses.

use kvyard_core::{KVCacheGroupSpec, KVCacheManagerConfig, Request};

use crate::fixture::{ALIGN, Engine, chunked, config, full, mamba, new, swa};

/// 128k tokens.
const NUM_TOKENS: u32 = 1 << 17;

/// Blocks of 16 tokens.
const NUM_BLOCKS: u64 = (NUM_TOKENS / 16) as u64;

/// A window of 1024 tokens, in blocks.
const WINDOW: u64 = 1024 / 16;

fn long(groups: &[KVCacheGroupSpec]) -> (Engine, Request) {
    let engine = Engine::new(KVCacheManagerConfig {
        max_model_len: 2 * NUM_TOKENS,
        ..config(40_000, groups)
    });
    let request = engine.request("a", 0..NUM_TOKENS);
    (engine, request)
}

/// Positions looked up for each group by itself.
fn probes(engine: &Engine, request: &Request) -> u64 {
    let before = engine.manager.pool().num_probes();
    let call = request.call(false);
    engine.manager.find_longest_cache_hit_per_group(&call, NUM_TOKENS - 1);
    engine.manager.pool().num_probes() - before
}

/// One probe a window, and one for the prefix at the end.
#[test]
fn a_miss_in_a_window() {
    let (engine, request) = long(&[swa(16, 1024)]);
    let found = probes(&engine, &request);
    assert!(found <= NUM_BLOCKS / WINDOW + 2, "{found} probes of {NUM_BLOCKS} blocks");
}

/// Holes in every window make it look at most at all blocks, once each.
#[test]
fn a_window_full_of_holes() {
    let (mut engine, request) = long(&[swa(16, 1024)]);
    let blocks: Vec<usize> = (0..8192).filter(|at| at % 64 != 63).collect();
    engine.cache(0, &request, &blocks);
    let found = probes(&engine, &request);
    assert!(found <= NUM_BLOCKS + 2, "{found} probes of {NUM_BLOCKS} blocks");
}

#[test]
fn a_miss_in_states_and_chunks() {
    // A state can only be where the lengths are aligned: every 256 tokens.
    let (engine, request) = long(&[mamba(16, ALIGN), full(256)]);
    let found = probes(&engine, &request);
    assert!(found <= NUM_BLOCKS / 16 + 1, "{found} probes");
    // Only the blocks of one chunk decide.
    let (mut engine, request) = long(&[chunked(16, 1024)]);
    let blocks: Vec<usize> = (0..8192).collect();
    engine.cache(0, &request, &blocks);
    let found = probes(&engine, &request);
    assert!(found <= 1024 / 16, "{found} probes");
}

/// The lookup of a cached prompt in a full and a window group: at most 1.3 times that of full
/// attention alone. A miss costs one probe.
#[test]
fn a_hit_in_full_attention_and_a_window() {
    let (mut engine, request) = long(&[full(16), swa(16, 1024)]);
    let lookup = |engine: &mut Engine| {
        let before = engine.manager.pool().num_probes();
        let (num_tokens, _) = engine.lookup(&request);
        (num_tokens, engine.manager.pool().num_probes() - before)
    };
    assert_eq!(lookup(&mut engine), (0, 1));
    assert!(engine.allocate(&request, &new(NUM_TOKENS)).is_some());
    let (num_tokens, found) = lookup(&mut engine);
    assert_eq!(num_tokens, NUM_TOKENS - 16);
    assert!(found <= NUM_BLOCKS + WINDOW, "{found} probes");
    assert!(found * 10 <= NUM_BLOCKS * 13);
}
