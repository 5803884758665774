//! The leases of a pool that were not given back yet: whose they are, and which were lost.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvyard_core::blocks::GroupEnds;
use kvyard_core::{BlockId, BlockLease as CoreLease, KVCacheError};

/// What a lease is about, for messages and for reading.
#[derive(Debug)]
pub(crate) struct Leased {
    pub(crate) request_id: String,
    pub(crate) ids: Vec<BlockId>,
    pub(crate) ends: GroupEnds,
}

impl Leased {
    fn holds(&self, block: BlockId) -> bool {
        self.ids.contains(&block)
    }
}

/// The leases of one pool that were not given back yet, by number.
#[derive(Debug, Default)]
pub(crate) struct OpenLeases {
    pub(crate) next_number: u64,
    pub(crate) held: BTreeMap<u64, Arc<Leased>>,
    /// Those of them that were garbage-collected.
    pub(crate) lost: BTreeMap<u64, CoreLease>,
}

impl OpenLeases {
    /// The error, with the requests named whose leases hold its block.
    pub(crate) fn with_owners(&self, error: KVCacheError) -> KVCacheError {
        let named = |block: BlockId, text: String| {
            let holders = self.held.values().filter(|lease| lease.holds(block));
            let names: Vec<String> = holders
                .map(|lease| format!("the lease of request {:?}", lease.request_id))
                .collect();
            if names.is_empty() { text } else { format!("{text} ({})", names.join(", ")) }
        };
        match error {
            KVCacheError::NotOwned { block, reason } => {
                KVCacheError::NotOwned { block, reason: named(block, reason) }
            }
            KVCacheError::DoubleFree { block, times, handed_out, owner } => {
                let owner = named(block, owner);
                KVCacheError::DoubleFree { block, times, handed_out, owner }
            }
            other => other,
        }
    }
}
