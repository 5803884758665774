//! A prompt of 128 blocks that is not cached comes and goes: every block it takes is evicted, gets a
//! new key and goes back.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvyard_bench::{Engine, PROMPT_BLOCKS, SIZES};

fn prefill(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefill");
    group.throughput(Throughput::Elements(u64::from(PROMPT_BLOCKS)));
    for size in SIZES {
        let mut engine = Engine::new(size);
        group.bench_function(BenchmarkId::from_parameter(size), |bencher| {
            bencher.iter(|| engine.prefill());
        });
    }
    group.finish();
}

criterion_group!(benches, prefill);
criterion_main!(benches);
