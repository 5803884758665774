//! `kvyard._kvyard`: the core under vLLM's names. Arguments are converted before the manager's lock
//! is taken and results after it is released, so nothing that can run Python happens inside.
#![expect(clippy::trivially_copy_pass_by_ref, reason = "PyO3 methods take &self")]
#![expect(clippy::needless_pass_by_value, reason = "PyO3 hands owned values to constructors")]
#![expect(clippy::doc_markdown, reason = "these texts are Python docstrings")]

mod batch_writer;
mod block_hasher;
mod blocks;
mod config;
mod convert;
mod error;
mod event_batch;
mod events;
mod hashing;
mod lease;
mod live_set;
mod manager;
mod metrics;
mod open_leases;
#[cfg(test)]
mod poisoned_tests;
mod pool;
mod prefix_index;
mod request;
mod results;
mod semantics;
mod shared;

/// The compiled part of kvyard.
#[pyo3::pymodule(gil_used = false)]
mod _kvyard {
    #[pymodule_export]
    use crate::blocks::{KVCacheBlock, KVCacheBlocks};
    #[pymodule_export]
    use crate::event_batch::{decode_batch, encode_batch, inspect_batch};
    #[pymodule_export]
    use crate::hashing::{BlockHasher, HashFunction, hash_block_tokens};
    #[pymodule_export]
    use crate::lease::{BlockLease, BlockLeaseIterator, LostLease};
    #[pymodule_export]
    use crate::live_set::LiveSet;
    #[pymodule_export]
    use crate::manager::KVCacheManager;
    #[pymodule_export]
    use crate::metrics::{KVCacheEvictionEvent, KVCacheMetricsCollector};
    #[pymodule_export]
    use crate::pool::{BlockPool, CachedBlocks, FreeBlockQueue, PoolBlocks};
    #[pymodule_export]
    use crate::prefix_index::PrefixIndex;
    #[pymodule_export]
    use crate::request::Request;
    #[pymodule_export]
    use crate::results::{CacheHit, PrefixCacheStats};
    #[pymodule_export]
    use crate::semantics::Semantics;
}
