//! What lookups and statistics answer, as values.

use kvyard_core::stats::PrefixCacheStats as CoreStats;
use pyo3::prelude::*;

use crate::blocks::KVCacheBlocks;

/// Prefix-cache statistics since they were last taken, in tokens.
#[pyclass(frozen, get_all, eq, module = "kvyard._kvyard")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixCacheStats {
    /// The cache was reset in between.
    reset: bool,
    /// Lookups of requests that were never preempted.
    requests: u64,
    /// Tokens of those requests.
    queries: u64,
    /// How many of those tokens were found.
    hits: u64,
    /// Lookups of requests that were preempted before.
    preempted_requests: u64,
    /// Tokens of those requests.
    preempted_queries: u64,
    /// How many of those tokens were found.
    preempted_hits: u64,
}

impl From<&CoreStats> for PrefixCacheStats {
    fn from(stats: &CoreStats) -> Self {
        Self {
            reset: stats.reset,
            requests: stats.requests,
            queries: stats.queries,
            hits: stats.hits,
            preempted_requests: stats.preempted_requests,
            preempted_queries: stats.preempted_queries,
            preempted_hits: stats.preempted_hits,
        }
    }
}

#[pymethods]
impl PrefixCacheStats {
    fn __repr__(&self) -> String {
        format!("{self:?}").replace(": ", "=").replace(" { ", "(").replace(" }", ")")
    }
}

/// What a lookup found.
#[pyclass(frozen, get_all, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct CacheHit {
    /// The blocks, one list a group; not pinned.
    pub(crate) blocks: Py<KVCacheBlocks>,
    /// Tokens that need not be computed.
    pub(crate) num_tokens: u32,
    /// By how much the deepest group's hit exceeded the agreed one, in tokens.
    pub(crate) num_uncached_common_prefix_tokens: u32,
    /// The pool's epoch at the lookup.
    pub(crate) epoch: u64,
}

#[pymethods]
impl CacheHit {
    fn __repr__(&self) -> String {
        format!("CacheHit(num_tokens={}, epoch={})", self.num_tokens, self.epoch)
    }
}
