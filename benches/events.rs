//! The KV event stream: what recording and msgpack add to a prefill and to a decoded token, and what
//! readers of the stream take. Limits are checked by `cargo run --release -p kvyard-bench --bin events`.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvyard_bench::events::{Producer, remove, store, token_ids};
use kvyard_bench::{Engine, PROMPT_BLOCKS, PROMPT_TOKENS};
use kvyard_core::event_log::EventLog;
use kvyard_core::semantics::RemovalEvent;
use kvyard_events::{LiveSet, PrefixIndex, Prompt, read_batch};

const NUM_BLOCKS: u32 = 64 << 10;

fn production(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("events/prefill");
    group.throughput(Throughput::Elements(u64::from(PROMPT_BLOCKS)));
    let mut engine = Engine::new(NUM_BLOCKS);
    group.bench_function("off", |bencher| bencher.iter(|| engine.prefill()));
    let (mut engine, mut log) = (Engine::with_events(NUM_BLOCKS, true), EventLog::default());
    group.bench_function("recorded", |bencher| {
        bencher.iter(|| {
            engine.prefill();
            engine.take_events(&mut log);
        });
    });
    let mut producer = Producer::default();
    group.bench_function("msgpack", |bencher| {
        bencher.iter(|| {
            engine.prefill();
            producer.drain(&mut engine);
        });
    });
    group.finish();
}

fn consumption(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("events/reading");
    let blocks = u64::from(PROMPT_BLOCKS);
    group.throughput(Throughput::Elements(blocks));
    let tokens = token_ids(PROMPT_TOKENS as usize);
    let (stored, removed) = (store(1, blocks, &tokens), remove(1, blocks));
    group.bench_function("read_batch", |bencher| bencher.iter(|| read_batch(&stored).is_ok()));
    let mut set = LiveSet::new(RemovalEvent::LastCopy);
    group.bench_function("LiveSet", |bencher| {
        bencher.iter(|| set.apply(&stored).and_then(|()| set.apply(&removed)).is_ok());
    });
    for workers in [1, 16] {
        let mut index = PrefixIndex::new();
        let ids: Vec<_> = (0..workers).map(|_| index.add_worker(RemovalEvent::LastCopy)).collect();
        for id in &ids {
            assert!(index.apply_payload(*id, &stored).is_ok());
        }
        let prompt = Prompt { token_ids: &tokens, ..Prompt::default() };
        let name = BenchmarkId::new("matched_tokens, workers", workers);
        group.bench_function(name, |bencher| bencher.iter(|| index.matched_tokens(&prompt)));
    }
    group.finish();
}

criterion_group!(benches, production, consumption);
criterion_main!(benches);
