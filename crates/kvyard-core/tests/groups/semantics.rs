//! Each field of `Semantics` that several groups can tell, flipped alone from both constructors: it
//! changes its own scenario and no other.

use kvyard_core::semantics::{
    AlignPrediction, CommonPrefix, DeferredFreeOrder, RemovalEvent, SparseStoreEvent, StatsOn,
};
use kvyard_core::{KVCacheGroupSpec, KVCacheManagerConfig, Semantics};

use crate::eagle::resend_and_extension;
use crate::fixture::{ALIGN, Ask, CORRECTED, Engine, Event, VLLM, config, full, mamba, new, swa};

/// A fault: how to take over its value, and a scenario that shows it.
struct Field {
    name: &'static str,
    take_over: fn(&mut Semantics, &Semantics),
    scenario: fn(Semantics) -> Vec<u64>,
    v251: &'static [u64],
    right: &'static [u64],
}

fn manager(num_blocks: u32, groups: &[KVCacheGroupSpec], semantics: Semantics) -> Engine {
    Engine::new(KVCacheManagerConfig {
        semantics,
        enable_kv_cache_events: true,
        log_stats: true,
        max_num_batched_tokens: 16,
        ..config(num_blocks, groups)
    })
}

fn with_drafter(groups: &[KVCacheGroupSpec], semantics: Semantics) -> KVCacheManagerConfig {
    KVCacheManagerConfig { use_eagle: true, semantics, ..config(200, groups) }
}

/// C11: a cached prompt of 48 tokens, sent again.
fn credit(semantics: Semantics) -> Vec<u64> {
    let arguments = with_drafter(&[full(4), swa(4, 8)], semantics);
    vec![resend_and_extension(&arguments, 48, 9).0.into()]
}

/// C12: 127 tokens at retention 0, where no credit can help.
fn retention(semantics: Semantics) -> Vec<u64> {
    let arguments = with_drafter(&[full(32), swa(8, 8)], semantics);
    let arguments = KVCacheManagerConfig { retention_interval: Some(0), ..arguments };
    let (resend, longer) = resend_and_extension(&arguments, 127, 64);
    vec![resend.into(), longer.into()]
}

/// C07: two requests share 8 tokens, a third shares nothing; one of the two is popped.
fn common_prefix(semantics: Semantics) -> Vec<u64> {
    let mut engine = manager(40, &[full(4), swa(4, 8)], semantics);
    engine.run("a1", (0..8).chain([50]));
    engine.run("a2", (0..8).chain([60]));
    engine.run("b1", 100..109);
    let count = |engine: &Engine| {
        let counts = engine.manager.get_num_common_prefix_blocks("a1");
        assert_eq!(counts[1], 0, "of no window");
        counts[0] as u64
    };
    let before = count(&engine);
    let lease = engine.manager.pop_blocks_for_free("a2", None).unwrap();
    let popped = count(&engine);
    engine.manager.free_popped(lease).unwrap();
    vec![before, popped, count(&engine)]
}

/// C14: two requests of the same two blocks; one copy of the second is evicted in either group.
fn removals(semantics: Semantics) -> Vec<u64> {
    let mut engine = manager(9, &[full(4), swa(4, 8)], semantics);
    engine.run("a", 0..8);
    engine.run("b", 0..8);
    engine.free("a");
    engine.free("b");
    engine.events();
    engine.run("c", 100..107);
    let events = engine.events();
    vec![events.iter().filter(|event| matches!(event, Event::Removed { .. })).count() as u64]
}

/// C15: tokens of each store of 64 tokens.
fn stores(semantics: Semantics) -> Vec<u64> {
    let mut engine = manager(40, &[full(32), swa(8, 8)], semantics);
    engine.run("a", 0..64);
    let tokens = |event: &Event| match event {
        Event::Stored { tokens, .. } => tokens.len() as u64,
        _ => panic!("{event:?}"),
    };
    engine.events().iter().map(tokens).collect()
}

/// E4: the order of a deferred free of two groups.
fn deferred(semantics: Semantics) -> Vec<u64> {
    let mut engine = manager(12, &[full(4), swa(4, 20)], semantics);
    engine.run("a", 0..10);
    let lease = engine.manager.pop_blocks_for_free("a", None).unwrap();
    engine.manager.free_popped(lease).unwrap();
    engine.order().into_iter().map(u64::from).collect()
}

/// C21: three lookups of a request that does not fit; then it does.
fn stats(semantics: Semantics) -> Vec<u64> {
    let mut engine = manager(26, &[full(4), swa(4, 8)], semantics);
    let request = engine.request("a", 0..60);
    let rest = engine.manager.pool_mut().get_new_blocks(16).unwrap();
    let mut found = Vec::new();
    let attempt = |engine: &mut Engine| {
        let hit = engine.manager.lookup(&request.call(false));
        let ask = Ask { hit: Some(&hit), full_sequence_must_fit: true, ..new(16) };
        engine.allocate(&request, &ask).is_some()
    };
    for _ in 0..3 {
        assert!(!attempt(&mut engine));
    }
    let record = |engine: &Engine, found: &mut Vec<u64>| {
        let stats = engine.manager.prefix_cache_stats().unwrap();
        found.extend([stats.requests, stats.queries, stats.hits]);
    };
    record(&engine, &mut found);
    engine.manager.pool_mut().free(rest).unwrap();
    assert!(attempt(&mut engine));
    record(&engine, &mut found);
    found
}

/// §6.3 and the known gap of the window's cap: how many free blocks the gate wants of 40 tokens and 5
/// slots of look-ahead, while another request holds a block in each group.
fn gate(semantics: Semantics) -> Vec<u64> {
    let needed = (1..40).find(|free| {
        let mut engine = manager(3 + free, &[full(4), swa(4, 8)], semantics);
        engine.run("other", 100..104);
        let request = engine.request("a", 0..40);
        let ask = Ask { lookahead: 5, full_sequence_must_fit: true, ..new(4) };
        engine.allocate(&request, &ask).is_some()
    });
    vec![needed.unwrap().into()]
}

/// C08: how many blocks 32 external and 16 new tokens are predicted to take.
fn prediction(semantics: Semantics) -> Vec<u64> {
    let mut engine = manager(20, &[full(16), mamba(16, ALIGN)], semantics);
    let request = engine.request("a", 0..64);
    vec![engine.predict(&request, &Ask { external: 32, ..new(16) }).unwrap().into()]
}

const FIELDS: [Field; 9] = [
    Field {
        name: "eagle_credit",
        take_over: |to, from| to.eagle_credit = from.eagle_credit,
        scenario: credit,
        v251: &[40],
        right: &[44],
    },
    Field {
        name: "eagle_retention",
        take_over: |to, from| to.eagle_retention = from.eagle_retention,
        scenario: retention,
        v251: &[0, 0],
        right: &[64, 64],
    },
    Field {
        name: "common_prefix",
        take_over: |to, from| to.common_prefix = from.common_prefix,
        scenario: common_prefix,
        v251: &[0, 2, 0],
        right: &[0, 0, 0],
    },
    Field {
        name: "removal_event",
        take_over: |to, from| to.removal_event = from.removal_event,
        scenario: removals,
        v251: &[2],
        right: &[0],
    },
    Field {
        name: "sparse_store_event",
        take_over: |to, from| to.sparse_store_event = from.sparse_store_event,
        scenario: stores,
        v251: &[64, 64],
        right: &[64, 8, 8],
    },
    Field {
        name: "deferred_free_order",
        take_over: |to, from| to.deferred_free_order = from.deferred_free_order,
        scenario: deferred,
        v251: &[6, 3, 7, 8, 9, 10, 11, 5, 4, 2, 1],
        right: &[6, 3, 7, 8, 9, 10, 11, 2, 1, 5, 4],
    },
    Field {
        name: "stats_on",
        take_over: |to, from| to.stats_on = from.stats_on,
        scenario: stats,
        v251: &[3, 180, 0, 4, 240, 0],
        right: &[0, 0, 0, 1, 60, 0],
    },
    Field {
        name: "gate_counts_lookahead",
        take_over: |to, from| to.gate_counts_lookahead = from.gate_counts_lookahead,
        scenario: gate,
        v251: &[17],
        right: &[20],
    },
    Field {
        name: "align_prediction",
        take_over: |to, from| to.align_prediction = from.align_prediction,
        scenario: prediction,
        v251: &[4],
        right: &[5],
    },
];

#[test]
fn a_field_flipped_alone_changes_its_own_scenario() {
    for flipped in FIELDS {
        for (base, other) in [(VLLM, CORRECTED), (CORRECTED, VLLM)] {
            let mut mixture = base;
            (flipped.take_over)(&mut mixture, &other);
            assert_ne!(mixture, base, "{}", flipped.name);
            for field in FIELDS {
                let is_right = (base == CORRECTED) != (field.name == flipped.name);
                let expected = if is_right { field.right } else { field.v251 };
                let found = (field.scenario)(mixture);
                assert_eq!(found, expected, "{} of {mixture:?}", field.name);
            }
        }
    }
}

#[test]
fn the_constructors_themselves() {
    for field in FIELDS {
        assert_eq!((field.scenario)(VLLM), field.v251, "{}", field.name);
        assert_eq!((field.scenario)(CORRECTED), field.right, "{}", field.name);
    }
}

/// The constructors differ in these fields and in no others: a new field wants a scenario here, or a
/// reason why several groups cannot tell it.
#[test]
fn every_field_is_accounted_for() {
    let mut all = VLLM;
    for field in FIELDS {
        (field.take_over)(&mut all, &CORRECTED);
    }
    let elsewhere = Semantics {
        // Of one group only: context parallelism.
        computed_ids_under_cp: true,
        // Read by hashers.
        hash_domains: CORRECTED.hash_domains,
        media_cursor: CORRECTED.media_cursor,
        // Read by the planner.
        planner_reserves_null: true,
        group_merge: CORRECTED.group_merge,
        ..all
    };
    assert_eq!(elsewhere, CORRECTED);
    assert_eq!(all.align_prediction, AlignPrediction::TrueNeed);
    assert_eq!(all.common_prefix, CommonPrefix::RowMembership);
    assert_eq!(all.deferred_free_order, DeferredFreeOrder::GroupByGroup);
    assert_eq!(all.removal_event, RemovalEvent::LastCopy);
    assert_eq!(all.sparse_store_event, SparseStoreEvent::OnePerRun);
    assert_eq!(all.stats_on, StatsOn::Admission);
}
