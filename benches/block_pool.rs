//! The pool: building one, and blocks without keys coming and going.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvyard_bench::{SIZES, block_pool};

fn build(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("block_pool/build");
    group.sample_size(20);
    for size in SIZES {
        group.bench_function(BenchmarkId::from_parameter(size), |bencher| {
            bencher.iter_with_large_drop(|| block_pool(black_box(size)));
        });
    }
    group.finish();
}

fn get_and_free(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("block_pool/get_new_blocks, free");
    for size in SIZES {
        let mut pool = block_pool(size);
        for count in [1, 8, 128] {
            group.throughput(Throughput::Elements(count));
            let name = BenchmarkId::new(format!("{count} blocks"), size);
            group.bench_function(name, |bencher| {
                bencher.iter(|| {
                    let count = usize::try_from(count).expect("a few blocks");
                    let lease = pool.get_new_blocks(count).expect("blocks are free");
                    pool.free(black_box(lease)).expect("the lease is whole");
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, build, get_and_free);
criterion_main!(benches);
