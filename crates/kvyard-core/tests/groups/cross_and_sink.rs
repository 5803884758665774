//! Blocks for an encoder's tokens (`groups.md` §2.7) and for attention sinks (§2.8, `manager.md` §10
//! rows 8, 42 and 55).

use kvyard_core::{BlockId, KVCacheError, KVCacheManager, KVCacheManagerConfig};

use crate::fixture::{Ask, Engine, config, cross, full, new, sink, swa};

/// Cross attention works with caching off only.
fn encoder_decoder(num_blocks: u32) -> KVCacheManagerConfig {
    KVCacheManagerConfig { enable_caching: false, ..config(num_blocks, &[full(16), cross(16)]) }
}

#[test]
fn encoder_tokens_decide_the_number_of_blocks() {
    for (encoder, expected) in [(0, 0), (1, 1), (16, 1), (17, 2), (1500, 94)] {
        let mut engine = Engine::new(encoder_decoder(200));
        let mut request = engine.request("a", 0..5);
        let (predicted, fresh) =
            engine.step_with(&mut request, &Ask { encoder, lookahead: 3, ..new(5) });
        assert_eq!((predicted, fresh[1].len()), (1 + expected, expected as usize));
    }
}

#[test]
fn a_row_for_the_encoder_is_allocated_once() {
    let mut engine = Engine::new(encoder_decoder(200));
    let mut request = engine.request("a", 0..5);
    engine.step_with(&mut request, &Ask { encoder: 1500, ..new(5) });
    let encoder = engine.rows("a")[1].clone();
    for _ in 0..20 {
        request.append_output_tokens(&[1]);
        let (_, fresh) = engine.step(&mut request, 1);
        assert!(fresh[1].is_empty());
    }
    assert_eq!(engine.rows("a")[1], encoder);
    assert_eq!(engine.num_cached("a", 1), None);
    let computed = engine.manager.get_blocks_for_computed_tokens("a", None, 20);
    assert_eq!((computed.blocks(0).len(), computed.blocks(1).len()), (2, 94), "§6.4: all of it");
    // A second request of the same encoder input has blocks of its own.
    let mut second = engine.request("b", 0..5);
    let (predicted, fresh) = engine.step_with(&mut second, &Ask { encoder: 1500, ..new(5) });
    assert_eq!((predicted, fresh[1].len()), (95, 94));
    assert!(!encoder.iter().any(|block| fresh[1].contains(block)));
    engine.free("a");
    engine.free("b");
    assert_eq!(engine.num_free(), 199);
}

/// External tokens are the decoder's: the encoder's row is none of their business.
#[test]
fn external_tokens_do_not_reach_the_encoder_row() {
    let mut engine = Engine::new(encoder_decoder(20));
    let mut request = engine.request("a", 0..40);
    let ask = Ask { external: 32, encoder: 17, ..new(8) };
    assert_eq!(engine.step_with(&mut request, &ask).0, 5);
    assert_eq!(engine.rows("a"), [vec![1, 2, 3], vec![4, 5]]);
    assert_eq!(engine.num_cached("a", 1), None);
}

#[test]
fn the_full_sequence_gate_counts_encoder_tokens() {
    for (num_blocks, fits) in [(7, false), (8, true)] {
        let mut engine = Engine::new(encoder_decoder(num_blocks));
        let request = engine.request("a", 0..64);
        let ask = Ask { encoder: 40, full_sequence_must_fit: true, ..new(16) };
        assert_eq!(engine.allocate(&request, &ask).is_some(), fits, "4 + 3 blocks");
    }
}

#[test]
fn cross_attention_cannot_be_cached() {
    let cached = KVCacheManagerConfig { enable_caching: true, ..encoder_decoder(20) };
    let error = KVCacheManager::new(cached, None).unwrap_err();
    assert!(matches!(error, KVCacheError::Config { field: "enable_caching", .. }), "{error}");
}

// ---------------------------------------------------------------------------------- sinks (§2.8)

#[test]
fn the_first_blocks_belong_to_the_sinks() {
    let mut engine = Engine::of(10, &[sink(16, 32)]);
    assert_eq!(engine.order(), (3..10).collect::<Vec<_>>());
    let request = engine.run("a", 0..16);
    assert_eq!(engine.row("a"), [3], "the worker puts [1, 2] before it");
    engine.free(request.request_id());
    // Requests behave as in full attention: a cached prefix is found.
    let again = engine.request("b", 0..20);
    assert_eq!(engine.lookup(&again), (16, vec![vec![3]]));
    assert_eq!(Engine::of(10, &[sink(16, 16)]).num_free(), 8, "8 blocks can be allocated");
}

#[test]
fn sinks_come_in_whole_blocks() {
    for sink_len in [24, 0, 8] {
        let error = KVCacheManager::new(config(10, &[sink(16, sink_len)]), None).unwrap_err();
        assert!(matches!(error, KVCacheError::Config { field: "sink_len", .. }), "{error}");
    }
    // And only one group can have the first blocks.
    let twice = config(10, &[sink(16, 16), sink(16, 32)]);
    let error = KVCacheManager::new(twice, None).unwrap_err();
    assert!(matches!(error, KVCacheError::Config { field: "kv_cache_groups", .. }), "{error}");
}

/// More sinks than the pool has blocks: a matter of the configuration.
#[test]
fn sinks_need_a_pool_that_holds_them() {
    assert!(KVCacheManager::new(config(3, &[sink(16, 32)]), None).is_ok());
    let error = KVCacheManager::new(config(2, &[sink(16, 32)]), None).unwrap_err();
    assert!(matches!(error, KVCacheError::Config { field: "num_blocks", .. }), "{error}");
}

/// Row 42: withdrawn blocks are nobody's use of the cache. By the formula of §5 they would count as
/// used; here usage is of what requests can have, so that an idle engine is at 0.
#[test]
fn sinks_are_accounted_for() {
    for groups in [vec![sink(16, 32)], vec![sink(16, 32), swa(16, 32)]] {
        let mut engine = Engine::of(10, &groups);
        assert!(engine.manager.usage() <= 0.0);
        assert!(engine.manager.reset_prefix_cache().unwrap(), "nothing is held");
        let tokens = if groups.len() == 1 { 0..112 } else { 0..48 };
        let mut request = engine.request("a", tokens.clone());
        engine.step(&mut request, tokens.end);
        let held = 7 - engine.num_free();
        assert!((engine.manager.usage() - f64::from(held) / 7.0).abs() < 1e-9);
        assert!(!engine.manager.reset_prefix_cache().unwrap(), "a request holds blocks");
        engine.free("a");
        assert_eq!(engine.num_free(), 7, "P10");
        assert!(engine.manager.reset_prefix_cache().unwrap());
        assert_eq!(engine.lookup(&request).0, 0);
    }
}

#[test]
fn nobody_gets_a_sink_block() {
    let mut engine = Engine::of(10, &[sink(16, 32)]);
    let pool = engine.manager.pool_mut();
    let lease = pool.get_new_blocks(7).unwrap();
    assert!(lease.ids().iter().all(|block| block.0 > 2));
    assert!(pool.get_new_blocks(1).is_err());
    pool.free(lease).unwrap();
    let before = pool.state_digest();
    assert!(matches!(pool.touch(&[BlockId(1)]), Err(KVCacheError::StaleBlock { .. })));
    assert!(matches!(pool.free_counted(&[BlockId(1)]), Err(KVCacheError::NotOwned { .. })));
    assert_eq!(pool.state_digest(), before);
    engine.manager.validate();
}
