//! What a steady engine must not do: allocate heap memory.

use allocation_counter::measure;
use kvyard_bench::{BLOCK_SIZE, Engine, digest};
use kvyard_core::hashing::ExtraKeySource;
use kvyard_core::request_view::BlockContent;
use kvyard_core::{
    AllocateSlots, BlockHash, KVCacheManager, KVCacheManagerConfig, RequestCall, RequestStatus,
    RequestView,
};

/// Blocks get keys, others are evicted for them, and a row as long as the one before grows.
#[test]
fn a_decode_step_allocates_nothing() {
    let mut engine = Engine::new(4096);
    let steps = engine.max_decoded();
    for _ in 0..steps {
        engine.decode();
    }
    let first = measure(|| engine.decode());
    assert!(first.count_total <= 1, "only the request's name: {first:?}");
    let steady = measure(|| {
        for _ in 0..steps - 2 {
            engine.decode();
        }
    });
    assert_eq!(steady.count_total, 0, "{steady:?}");
}

#[test]
fn a_lookup_allocates_no_more_than_its_result() {
    let mut engine = Engine::new(4096);
    let miss = measure(|| assert_eq!(engine.lookup_miss(0), 0));
    assert_eq!(miss.count_total, 0, "{miss:?}");
    let hit = measure(|| assert!(engine.lookup_hit(0) > 0));
    // It doubles as it grows.
    assert!(hit.count_total <= 8, "{hit:?}");
}

fn call<'a>(
    request_id: &'a str,
    hashes: &'a [BlockHash],
    content: &'a BlockContent<'a>,
    computed: u32,
) -> RequestCall<'a> {
    let num_tokens = u32::try_from(content.token_ids.len()).unwrap();
    RequestCall {
        request_id,
        view: RequestView {
            num_tokens,
            num_prompt_tokens: BLOCK_SIZE,
            num_computed_tokens: computed,
            status: RequestStatus::Running,
            ..RequestView::default()
        },
        block_hashes: hashes,
        fingerprints: &[],
        content: Some(*content),
    }
}

/// Plan and reserve grow what is needed, also for events that tell of evictions and stores at once
/// and for row edits; then nothing may grow any more.
#[test]
fn applying_a_plan_grows_nothing() {
    let (num_blocks, num_tokens) = (65, 32 * BLOCK_SIZE);
    let mut manager = KVCacheManager::new(
        KVCacheManagerConfig {
            enable_kv_cache_events: true,
            track_row_edits: true,
            ..KVCacheManagerConfig::new(num_blocks, BLOCK_SIZE, num_tokens)
        },
        None,
    )
    .unwrap();
    let tokens: Vec<u32> = (0..num_tokens).collect();
    let keys = ExtraKeySource::default();
    let content = BlockContent { token_ids: &tokens, first_token: 0, keys: &keys };
    for round in 0..6 {
        let hashes: Vec<_> = (0..32).map(|block| digest(round * 32 + block)).collect();
        for (computed, new) in [(0, 24), (24, 1), (25, 3)] {
            let call = call("request", &hashes, &content, computed * BLOCK_SIZE);
            let arguments = AllocateSlots::new(&call, new * BLOCK_SIZE);
            let mut plan = manager.plan_allocate_slots(&arguments).unwrap();
            manager.reserve_allocate_slots(&mut plan).unwrap();
            let mut fresh = None;
            let applied = measure(|| fresh = manager.apply_allocate_slots(plan));
            assert_eq!(fresh.unwrap().ids().len(), new as usize);
            assert_eq!(applied.count_total, 0, "round {round}: {applied:?}");
        }
        manager.free("request", None);
    }
}
