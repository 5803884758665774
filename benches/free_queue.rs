//! The free queue: taking the head, queueing at the tail, taking from the middle.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvyard_bench::SIZES;
use kvyard_core::BlockId;
use kvyard_core::free_queue::FreeKVCacheBlockQueue;

fn free_queue(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("free_queue");
    group.throughput(Throughput::Elements(1));
    for size in SIZES {
        let mut queue = FreeKVCacheBlockQueue::new(size);
        group.bench_function(BenchmarkId::new("pop_front, push_back", size), |bencher| {
            bencher.iter(|| {
                let block = queue.pop_front().expect("blocks are free");
                queue.push_back(black_box(block));
            });
        });
        let mut block = 1;
        group.bench_function(BenchmarkId::new("remove, push_back", size), |bencher| {
            bencher.iter(|| {
                // An odd stride visits every block in an order that caches do not like.
                block = 1 + (block + 611_953) % (size - 1);
                queue.remove(BlockId(block));
                queue.push_back(black_box(BlockId(block)));
            });
        });
    }
    group.finish();
}

criterion_group!(benches, free_queue);
criterion_main!(benches);
