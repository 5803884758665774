//! Carries one operation out so often, on a pool of so many blocks: `instructions OPERATION BLOCKS
//! TIMES`. `benches/instructions.sh` counts the instructions of two such runs and takes the
//! difference, so that building the pool does not count. Prints nanoseconds per operation.

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

use kvyard_bench::{Engine, block_pool};
use kvyard_core::free_queue::FreeKVCacheBlockQueue;

/// Blocks of one allocation from the pool.
const POOL_BATCH: usize = 8;

fn time(times: u32, mut operation: impl FnMut(usize)) -> f64 {
    let started = Instant::now();
    for number in 0..times as usize {
        operation(number);
    }
    started.elapsed().as_secs_f64() * 1e9 / f64::from(times.max(1))
}

fn measure(operation: &str, num_blocks: u32, times: u32) -> Option<f64> {
    Some(match operation {
        "free_queue" => {
            let mut queue = FreeKVCacheBlockQueue::new(num_blocks);
            time(times, |_| {
                let block = queue.pop_front().expect("blocks are free");
                queue.push_back(black_box(block));
            })
        }
        "block_pool" => {
            let mut pool = block_pool(num_blocks);
            time(times, |_| {
                let lease = pool.get_new_blocks(POOL_BATCH).expect("blocks are free");
                pool.free(black_box(lease)).expect("the lease is whole");
            })
        }
        "lookup_hit" => {
            let mut engine = Engine::new(num_blocks);
            time(times, |number| {
                black_box(engine.lookup_hit(number));
            })
        }
        "lookup_miss" => {
            let mut engine = Engine::new(num_blocks);
            time(times, |number| {
                black_box(engine.lookup_miss(number));
            })
        }
        "prefill" => {
            let mut engine = Engine::new(num_blocks);
            time(times, |_| engine.prefill())
        }
        "decode" => {
            let mut engine = Engine::new(num_blocks);
            time(times, |_| engine.decode())
        }
        _ => return None,
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [operation, num_blocks, times] = arguments.as_slice() else {
        eprintln!("usage: instructions OPERATION BLOCKS TIMES");
        return ExitCode::FAILURE;
    };
    let (Ok(num_blocks), Ok(times)) = (num_blocks.parse(), times.parse()) else {
        eprintln!("{num_blocks:?} and {times:?} must be numbers");
        return ExitCode::FAILURE;
    };
    let Some(nanoseconds) = measure(operation, num_blocks, times) else {
        eprintln!("no operation {operation:?}");
        return ExitCode::FAILURE;
    };
    println!("{nanoseconds:.1}");
    ExitCode::SUCCESS
}
