//! Random and exhaustive schedules. After each operation the world checks every invariant of
//! `manager.md` §1.4; here the pool is compared with a naive model besides, and schedules with
//! one another.

mod pool_model;
mod small_scope;
mod strategies;

use std::cell::Cell;
use std::sync::Arc;

use kvyard_core::hashing::{BlockHasher, HashAlgorithm};
use kvyard_core::op::{AllocateOp, Op, Outcome};
use kvyard_core::world::{World, WorldConfig, presets};
use kvyard_core::{
    AllocateSlots, KVCacheError, KVCacheManager, KVCacheManagerConfig, Request, Semantics,
};
use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};

use pool_model::PoolModel;

const BLOCK_SIZE: u32 = 4;

/// Tries `cases` inputs and names the smallest that fails; no file keeps it, paste it into a test.
fn try_all<S: Strategy>(
    cases: u32,
    strategy: &S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) where
    S::Value: Clone,
{
    let mut runner = TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    match runner.run(strategy, test) {
        Ok(()) => {}
        Err(TestError::Fail(reason, input)) => panic!("{reason}\nfor {input:?}"),
        Err(error) => panic!("{error}"),
    }
}

fn presets_with(drives_pool: bool) -> Vec<WorldConfig> {
    let mut presets = presets();
    presets.retain(|config| config.drives_pool == drives_pool);
    presets
}

#[test]
fn schedules_keep_every_invariant() {
    for config in presets_with(false) {
        try_all(60, &strategies::schedule(), |ops| {
            let mut world = World::new(&config);
            for op in &ops {
                world.execute(op);
            }
            Ok(())
        });
    }
}

#[test]
fn the_pool_does_what_the_naive_model_does() {
    for config in presets_with(true) {
        try_all(400, &strategies::pool_schedule(), |ops| {
            let mut world = World::new(&config);
            let mut model = PoolModel::new(&config.manager);
            for op in &ops {
                let expected = model.execute(op, &world);
                let outcome = world.execute(op);
                if let Some(expected) = expected {
                    let done = !matches!(outcome, Outcome::Error(_));
                    assert_eq!(done, expected, "{op:?}: {outcome:?}");
                }
                model.compare(&mut world);
            }
            Ok(())
        });
    }
}

/// Whichever request for memory of whichever call is refused: the call fails, the state is what it was,
/// and the same call works next.
#[test]
fn no_refused_memory_changes_the_state() {
    for config in presets() {
        let strategy = if config.drives_pool {
            strategies::pool_schedule().boxed()
        } else {
            strategies::schedule().boxed()
        };
        let num_refused = Cell::new(0);
        try_all(4, &strategy, |ops| {
            let mut world = World::new(&config);
            // What breaks the contract is refused before it asks for memory, or by another manager.
            for op in ops.iter().filter(|op| !matches!(op, Op::Misuse { .. })) {
                let refused = (1..).take_while(|k| world.execute_with_fault(op, *k).is_none());
                num_refused.set(num_refused.get() + refused.count());
            }
            Ok(())
        });
        assert!(num_refused.get() > 100 || config.manager.num_blocks == 1, "{config:?}");
    }
}

/// `allocate_slots` is plan, reserve and apply, with anything that only reads in between.
#[test]
fn a_plan_applied_later_is_allocate_slots() {
    for config in presets_with(false) {
        try_all(60, &strategies::schedule(), |ops| {
            let (mut whole, mut parts) = (World::new(&config), World::new(&config));
            for op in &ops {
                let outcome = whole.execute(&with_split(op, false));
                let other = parts.execute(&with_split(op, true));
                assert_eq!(nameless(other), nameless(outcome), "{op:?}");
                assert_eq!(
                    whole.manager().state_digest(),
                    parts.manager().state_digest(),
                    "{op:?}"
                );
            }
            Ok(())
        });
    }
}

/// The names of pools differ.
fn nameless(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Error(KVCacheError::ForeignBlock { what, .. }) => {
            Outcome::Error(KVCacheError::ForeignBlock { what, found: 0, expected: 1 })
        }
        other => other,
    }
}

fn with_split(op: &Op, split: bool) -> Op {
    let mut op = op.clone();
    if let Op::Allocate(allocate) = &mut op {
        allocate.flags &= !AllocateOp::SPLIT;
        allocate.flags |= if split { AllocateOp::SPLIT } else { 0 };
    }
    op
}

/// §1.4 I15, and P10 of `groups.md` §2.12.
#[test]
fn when_all_is_given_back_all_is_free() {
    for config in presets_with(false) {
        try_all(60, &strategies::schedule(), |ops| {
            let mut world = World::new(&config);
            for op in &ops {
                world.execute(op);
            }
            while world.request(0).is_some() {
                world.execute(&Op::Free { request: 0 });
            }
            world.give_back_everything();
            let pool = world.manager().pool();
            assert_eq!(pool.num_free_blocks(), pool.num_usable_blocks() as usize);
            assert_eq!(world.manager().num_tracked_requests(), 0);
            assert_eq!(world.execute(&Op::Reset), Outcome::Reset(true));
            Ok(())
        });
    }
}

/// A request that the pool can hold whole is never refused for ever (`gate_counts_lookahead`).
#[test]
fn a_lone_request_that_fits_always_makes_progress() {
    let arguments = (2..12u32, 1..40u32, 1..9u32, 0..9u32, any::<bool>());
    let run = |(num_blocks, num_tokens, chunk, lookahead, full_sequence_must_fit): (
        u32,
        u32,
        u32,
        u32,
        bool,
    )| {
        prop_assume!(num_tokens <= (num_blocks - 1) * BLOCK_SIZE);
        let config = KVCacheManagerConfig::new(num_blocks, BLOCK_SIZE, 48);
        let mut manager = KVCacheManager::new(config, None).unwrap();
        let mut request = request(num_tokens);
        while request.num_computed_tokens < num_tokens {
            let new = chunk.min(num_tokens - request.num_computed_tokens);
            let call = request.call(false);
            let call = AllocateSlots {
                num_lookahead_tokens: lookahead,
                full_sequence_must_fit,
                ..AllocateSlots::new(&call, new)
            };
            let fresh = manager.allocate_slots(&call).unwrap();
            prop_assert!(fresh.is_some(), "refused for ever");
            request.num_computed_tokens += new;
        }
        Ok(())
    };
    try_all(1000, &arguments, run);
}

fn request(num_tokens: u32) -> Request {
    let algorithm = HashAlgorithm::XxHashCbor;
    let root = algorithm.hash_text("0");
    let hasher = BlockHasher::new(algorithm, root, BLOCK_SIZE, Semantics::corrected()).unwrap();
    let prompt = (0..num_tokens).collect();
    Request::new("r", prompt, Arc::default(), Some(Arc::new(hasher)))
}
