//! Memory and time of a pool of 1,000,000 blocks: resident bytes a block once all are hashed, and
//! how long building takes. Fails above 80 bytes a block. Linux only (`/proc/self/statm`).

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Instant;

use kvyard_bench::{BLOCK_SIZE, block_pool, digest};
use kvyard_core::caching::{BlockMask, CacheFullBlocks};
use kvyard_core::{BlockId, GroupId, RequestCall, RequestView};

const NUM_BLOCKS: u32 = 1_000_001;

const MOST_BYTES: f64 = 80.0;

/// Blocks that get their keys in one call; small, so that working memory does not count.
const BATCH: u32 = 1000;

/// Builds of which the fastest counts.
const BUILDS: u32 = 20;

fn resident_pages() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("this needs Linux");
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u32>().ok());
    f64::from(pages.expect("statm has the resident pages second"))
}

fn hash_all(pool: &mut kvyard_core::BlockPool) {
    let mut hashes = Vec::with_capacity(BATCH as usize);
    for batch in 0..(NUM_BLOCKS - 1) / BATCH {
        hashes.clear();
        hashes.extend((0..BATCH).map(|block| digest(u64::from(batch * BATCH + block))));
        let call = RequestCall {
            request_id: "memory",
            view: RequestView::default(),
            block_hashes: &hashes,
            fingerprints: &[],
            content: None,
        };
        let lease = pool.get_new_blocks(BATCH as usize).expect("blocks are free");
        let cached = pool.cache_full_blocks(&CacheFullBlocks {
            request: &call,
            row: lease.ids(),
            start: 0,
            stop: BATCH as usize,
            block_size: BLOCK_SIZE,
            group: GroupId(0),
            mask: BlockMask::All,
        });
        assert!(cached.is_ok(), "{cached:?}");
        pool.free(lease).expect("the lease is whole");
    }
    let key = pool.block_key(BlockId(NUM_BLOCKS - 1));
    assert!(key.is_some(), "every block has its key");
}

fn main() -> ExitCode {
    const PAGE_BYTES: f64 = 4096.0;
    let before = resident_pages();
    let mut pool = block_pool(NUM_BLOCKS);
    let built = resident_pages();
    hash_all(&mut pool);
    let hashed = resident_pages();
    black_box(&pool);
    let blocks = f64::from(NUM_BLOCKS - 1);
    let bytes = (hashed - before) * PAGE_BYTES / blocks;
    println!("resident bytes a block: {:.1} built", (built - before) * PAGE_BYTES / blocks);
    println!("resident bytes a block: {bytes:.1} all hashed (at most {MOST_BYTES})");
    let mut fastest = f64::INFINITY;
    for _ in 0..BUILDS {
        let started = Instant::now();
        black_box(block_pool(NUM_BLOCKS));
        fastest = fastest.min(started.elapsed().as_secs_f64());
    }
    println!("milliseconds to build: {:.2}", fastest * 1e3);
    if bytes > MOST_BYTES {
        eprintln!("a hashed block takes more than {MOST_BYTES} bytes");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
