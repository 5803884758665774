//! Prefix lookups of a prompt of 128 blocks in a full cache.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvyard_bench::{Engine, PROMPT_BLOCKS, SIZES};

fn lookup(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("lookup");
    for size in SIZES {
        let mut engine = Engine::new(size);
        let mut number = 0;
        group.throughput(Throughput::Elements(u64::from(PROMPT_BLOCKS - 1)));
        group.bench_function(BenchmarkId::new("hit", size), |bencher| {
            bencher.iter(|| {
                number += 1;
                engine.lookup_hit(number)
            });
        });
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("miss", size), |bencher| {
            bencher.iter(|| {
                number += 1;
                engine.lookup_miss(number)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, lookup);
criterion_main!(benches);
