//! Block hashes of a prompt under each function, and of one more block while decoding.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvyard_bench::{BLOCK_SIZE, PROMPT_TOKENS};
use kvyard_core::Semantics;
use kvyard_core::hashing::{BlockHasher, ExtraKeySource, HashAlgorithm};

fn hashing(criterion: &mut Criterion) {
    let tokens: Vec<u32> = (0..PROMPT_TOKENS).map(|token| token * 37 % 128_000).collect();
    let keys = ExtraKeySource::default();
    let mut group = criterion.benchmark_group("hashing");
    for algorithm in HashAlgorithm::ALL {
        let root = algorithm.hash_text("0");
        let hasher = BlockHasher::new(algorithm, root, BLOCK_SIZE, Semantics::corrected())
            .expect("a valid block size");
        group.throughput(Throughput::Elements(u64::from(PROMPT_TOKENS)));
        group.bench_function(format!("{}/{PROMPT_TOKENS} tokens", algorithm.name()), |bencher| {
            let mut hashes = Vec::new();
            bencher.iter(|| {
                hashes.clear();
                hasher.extend(black_box(&tokens), &keys, &mut hashes);
                black_box(hashes.last().copied())
            });
        });
        group.throughput(Throughput::Elements(u64::from(BLOCK_SIZE)));
        group.bench_function(format!("{}/one block", algorithm.name()), |bencher| {
            let mut hashes = Vec::new();
            hasher.extend(&tokens[..BLOCK_SIZE as usize], &keys, &mut hashes);
            let two_blocks = &tokens[..2 * BLOCK_SIZE as usize];
            bencher.iter(|| {
                hashes.truncate(1);
                hasher.extend(black_box(two_blocks), &keys, &mut hashes);
                black_box(hashes.last().copied())
            });
        });
    }
    group.finish();
}

criterion_group!(benches, hashing);
criterion_main!(benches);
