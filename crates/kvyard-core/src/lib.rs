//! The KV-cache manager of an LLM inference engine: which block of GPU memory belongs to which
//! request, which may be reused for a shared prefix, and which is evicted next. Decision for
//! decision what vLLM 0.25.1's Python manager does ([`Semantics::vllm_0_25_1`]), or the same with its
//! faults mended (the default).
//!
//! Pure: no I/O, no clock, no threads of its own, no environment. Modules in dependency order; each
//! imports only from those before it.

#![forbid(unsafe_code)]

pub mod id;

pub mod error;

#[cfg(feature = "testing")]
pub mod memory;
#[cfg(not(feature = "testing"))]
mod memory;

pub mod semantics;

pub mod op;

pub mod history;

pub mod block_hash;

pub mod hashing;

pub mod request_view;

pub mod request;

pub mod spec;

pub mod free_queue;

pub mod prefix_map;

pub mod event_log;

pub mod stats;

pub mod blocks;

pub mod block_pool;

pub mod caching;

pub mod block_table;

pub mod single_type;

pub mod coordinator;

pub mod manager;

#[cfg(feature = "testing")]
pub mod world;

pub use block_hash::BlockHash;
pub use block_pool::{BlockPool, BlockPoolConfig};
pub use blocks::{BlockLease, KVCacheBlocks};
pub use error::{KVCacheError, Result};
pub use id::{BlockId, GroupId, NULL_BLOCK, RequestRow};
pub use manager::{AllocateSlots, CacheHit, KVCacheManager};
pub use request::Request;
pub use request_view::{RequestCall, RequestStatus, RequestView};
pub use semantics::Semantics;
pub use spec::{AttentionKind, KVCacheGroupSpec, KVCacheManagerConfig, KVCacheSpec};

/// The quick start of the project's README is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct ReadmeIsTested;
