//! One token of a running request; every sixteenth takes a block and gives one its key.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kvyard_bench::{Engine, SIZES};

fn decode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode");
    for size in SIZES {
        let mut engine = Engine::new(size);
        group.bench_function(BenchmarkId::from_parameter(size), |bencher| {
            bencher.iter(|| engine.decode());
        });
    }
    group.finish();
}

criterion_group!(benches, decode);
criterion_main!(benches);
