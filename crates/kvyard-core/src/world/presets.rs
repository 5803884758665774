//! Configurations small enough that schedules meet every limit.

use super::WorldConfig;
use crate::semantics::Semantics;
use crate::spec::{AttentionKind, KVCacheGroupSpec, KVCacheManagerConfig, MambaCacheMode};

/// Tokens per block in most presets.
const BLOCK_SIZE: u32 = 4;

/// Longest request of the presets.
const MAX_MODEL_LEN: u32 = 48;

fn manager(num_blocks: u32, kind: AttentionKind, block_size: u32) -> KVCacheManagerConfig {
    KVCacheManagerConfig {
        groups: vec![KVCacheGroupSpec::new(kind, block_size)],
        enable_kv_cache_events: true,
        log_stats: true,
        track_row_edits: true,
        ..KVCacheManagerConfig::new(num_blocks, block_size, MAX_MODEL_LEN)
    }
}

/// Full attention in blocks of 8 beside a window in blocks of 4.
fn hybrid(semantics: Semantics) -> KVCacheManagerConfig {
    let window = AttentionKind::SlidingWindow { sliding_window: 6 };
    KVCacheManagerConfig {
        groups: vec![
            KVCacheGroupSpec::new(AttentionKind::FullAttention, 2 * BLOCK_SIZE),
            KVCacheGroupSpec::new(window, BLOCK_SIZE),
        ],
        scheduler_block_size: 2 * BLOCK_SIZE,
        hash_block_size: BLOCK_SIZE,
        semantics,
        ..manager(19, AttentionKind::FullAttention, BLOCK_SIZE)
    }
}

fn mamba(mamba_cache_mode: MambaCacheMode) -> AttentionKind {
    AttentionKind::Mamba { mamba_cache_mode, num_speculative_blocks: 1 }
}

/// A kind that models have beside full attention.
fn beside_full(num_blocks: u32, kind: AttentionKind) -> KVCacheManagerConfig {
    let groups = [AttentionKind::FullAttention, kind];
    KVCacheManagerConfig {
        groups: groups.map(|kind| KVCacheGroupSpec::new(kind, BLOCK_SIZE)).to_vec(),
        ..manager(num_blocks, kind, BLOCK_SIZE)
    }
}

/// One configuration of every kind that decides differently.
pub fn presets() -> Vec<WorldConfig> {
    let full = manager(13, AttentionKind::FullAttention, BLOCK_SIZE);
    let rswa = AttentionKind::RSWA { rswa_window: 6 };
    let managers = [
        full.clone(),
        KVCacheManagerConfig { semantics: Semantics::vllm_0_25_1(), ..full.clone() },
        KVCacheManagerConfig { watermark: 0.2, use_eagle: true, ..full.clone() },
        KVCacheManagerConfig {
            enable_caching: false,
            enable_kv_cache_events: false,
            ..full.clone()
        },
        manager(17, rswa, BLOCK_SIZE),
        manager(40, AttentionKind::FullAttention, 1),
        KVCacheManagerConfig {
            dcp_world_size: 2,
            scheduler_block_size: 2 * BLOCK_SIZE,
            hash_block_size: 2 * BLOCK_SIZE,
            ..manager(9, AttentionKind::MLAAttention, BLOCK_SIZE)
        },
        manager(15, AttentionKind::SlidingWindow { sliding_window: 6 }, BLOCK_SIZE),
        manager(15, AttentionKind::ChunkedLocalAttention { attention_chunk_size: 8 }, BLOCK_SIZE),
        manager(11, AttentionKind::SinkFullAttention { sink_len: 4 }, BLOCK_SIZE),
        manager(15, AttentionKind::SlidingWindowMLA { sliding_window: 6 }, BLOCK_SIZE),
        manager(11, mamba(MambaCacheMode::None), BLOCK_SIZE),
        beside_full(19, mamba(MambaCacheMode::Align)),
        beside_full(23, mamba(MambaCacheMode::All)),
        KVCacheManagerConfig {
            enable_caching: false,
            enable_kv_cache_events: false,
            ..beside_full(21, AttentionKind::CrossAttention)
        },
        hybrid(Semantics::corrected()),
        KVCacheManagerConfig { use_eagle: true, ..hybrid(Semantics::vllm_0_25_1()) },
        // No usable block at all.
        manager(1, AttentionKind::FullAttention, BLOCK_SIZE),
        KVCacheManagerConfig {
            groups: Vec::new(),
            enable_caching: false,
            enable_kv_cache_events: false,
            ..full.clone()
        },
    ];
    let pools = [Semantics::corrected(), Semantics::vllm_0_25_1()];
    let pools = pools.map(|semantics| KVCacheManagerConfig { semantics, ..full.clone() });
    let with = |drives_pool| move |manager| WorldConfig { manager, drives_pool };
    managers.map(with(false)).into_iter().chain(pools.map(with(true))).collect()
}
