//! Schedules of requests and of users of the pool: after each operation every invariant must hold,
//! misuse must be refused, and what is refused must have changed nothing. How to run it stands in
//! `../Cargo.toml`.

#![no_main]

use arbitrary::Arbitrary;
use kvyard_core::op::Op;
use kvyard_core::world::{World, presets};
use libfuzzer_sys::fuzz_target;

/// Long enough for blocks to be evicted and rows to be used again.
const MAX_OPS: usize = 200;

#[derive(Arbitrary, Debug)]
struct Schedule {
    preset: u8,
    ops: Vec<Op>,
}

fuzz_target!(|schedule: Schedule| {
    let presets = presets();
    let config = &presets[usize::from(schedule.preset) % presets.len()];
    let mut world = World::new(config);
    for op in schedule.ops.iter().take(MAX_OPS) {
        world.execute(op);
    }
    world.give_back_everything();
});
