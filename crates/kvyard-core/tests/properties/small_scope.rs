//! Every sequence of a few operations, up to six, over three usable blocks.

use kvyard_core::op::{AllocateOp, BlockChoice, HitUse, Identity, Op, Outcome};
use kvyard_core::world::{World, WorldConfig};
use kvyard_core::{KVCacheManagerConfig, Semantics};

const DEPTH: usize = 6;

/// Executes every sequence that starts with `done`; how many there are. What has nothing to do is
/// left out: the sequence without it is tried anyway.
fn explore(config: &WorldConfig, ops: &[Op], done: &mut Vec<Op>) -> usize {
    let mut sequences = 1;
    if done.len() == DEPTH {
        return sequences;
    }
    for op in ops {
        let mut world = World::new(config);
        for earlier in &*done {
            world.execute(earlier);
        }
        if world.execute(op) != Outcome::Nothing {
            done.push(op.clone());
            sequences += explore(config, ops, done);
            done.pop();
        }
    }
    sequences
}

fn config(drives_pool: bool, semantics: Semantics) -> WorldConfig {
    let manager = KVCacheManagerConfig {
        enable_kv_cache_events: true,
        track_row_edits: true,
        semantics,
        ..KVCacheManagerConfig::new(4, 1, 8)
    };
    WorldConfig { manager, drives_pool }
}

fn request() -> Op {
    Op::NewRequest { prefix: 0, shared: 3, own: 0, identity: Identity::Plain }
}

fn allocate(request: u32, num_new_tokens: u32) -> Op {
    Op::Allocate(AllocateOp {
        request,
        num_new_tokens,
        hit: HitUse::Fresh,
        ..AllocateOp::default()
    })
}

#[test]
fn all_short_schedules_of_two_requests() {
    let ops = [
        request(),
        allocate(0, 2),
        allocate(1, 1),
        Op::Append { request: 0, count: 1 },
        Op::Free { request: 0 },
        Op::Pop { request: 0 },
        Op::FreeLease { lease: 0, through_manager: true },
        Op::Evict { blocks: vec![BlockChoice::Any(1)] },
    ];
    for semantics in [Semantics::corrected(), Semantics::vllm_0_25_1()] {
        let sequences = explore(&config(false, semantics), &ops, &mut Vec::new());
        assert!(sequences > 1_000, "{sequences} sequences are too few");
    }
}

#[test]
fn all_short_uses_of_the_pool() {
    let held = vec![BlockChoice::HandedOut(0)];
    let ops = [
        request(),
        Op::GetNewBlocks { count: 2 },
        Op::Touch { blocks: vec![BlockChoice::Any(1)] },
        Op::FreeCounted { blocks: held.clone() },
        Op::FreeLease { lease: 0, through_manager: false },
        Op::CacheFull { request: 0, start: 0, blocks: held, mask: None, group: 0 },
        Op::CachePartial { request: 0, block: BlockChoice::HandedOut(0), boundary: 2, group: 0 },
        Op::Reset,
    ];
    for semantics in [Semantics::corrected(), Semantics::vllm_0_25_1()] {
        let sequences = explore(&config(true, semantics), &ops, &mut Vec::new());
        assert!(sequences > 1_000, "{sequences} sequences are too few");
    }
}
