//! Recurrent layers: a state instead of keys and values, of which only the last one is needed.
//! `groups.md` §2.6.
//!
//! In mode `align` a row holds the running state, behind it the slots of drafts, and before it at most
//! the state that the step started from; all else is null.

use std::ops::Range;

use hashbrown::HashSet;

use crate::block_hash::BlockHash;
use crate::block_pool::BlockPool;
use crate::caching::{MergedBlockHashes, ReachableBlocks};
use crate::error::Result;
use crate::id::{BlockId, RequestRow, length};
use crate::memory::Grow;
use crate::single_type::{Boundaries, Lookup, NewBlocks, PrefixHit, num_evictable};

/// No state is known.
const NO_STATE: u32 = u32::MAX;

/// What a Mamba group remembers of its rows and of this step.
#[derive(Debug, Default)]
pub(crate) struct MambaStates {
    /// Keys given in this step: their states are only written by its forward pass, so that nobody
    /// can start from them yet.
    step_hashes: HashSet<BlockHash>,
    /// Mode `align`: for each row the position of the state that its step started from.
    last_state: Vec<u32>,
    /// Mode `align`: rows that have their running state and draft slots.
    allocated: Vec<bool>,
}

impl MambaStates {
    /// A step begins: the states of the one before are written.
    pub(crate) fn new_step_starts(&mut self) {
        self.step_hashes.clear();
    }

    pub(crate) fn step_hashes(&self) -> impl Iterator<Item = &BlockHash> {
        self.step_hashes.iter()
    }

    pub(crate) fn last_state(&self, row: RequestRow) -> Option<u32> {
        self.last_state.get(row.index()).copied().filter(|state| *state != NO_STATE)
    }

    pub(crate) fn is_allocated(&self, row: RequestRow) -> bool {
        self.allocated.get(row.index()).copied().unwrap_or(false)
    }

    pub(crate) fn reserve(&mut self, row: RequestRow, new_keys: usize) -> Result<()> {
        if let Some(missing) = (row.index() + 1).checked_sub(self.last_state.len()) {
            self.last_state.make_room(missing)?;
            self.last_state.resize(row.index() + 1, NO_STATE);
            self.allocated.make_room(missing)?;
            self.allocated.resize(row.index() + 1, false);
        }
        self.step_hashes.make_room(new_keys)
    }

    /// Notes the keys that blocks got in this step.
    pub(crate) fn note_cached(&mut self, pool: &BlockPool, blocks: &[BlockId]) {
        let keys = blocks.iter().filter_map(|block| pool.block_key(*block));
        self.step_hashes.extend(keys.map(|key| key.hash));
    }

    /// Notes what an allocation did in mode `align`.
    pub(crate) fn note_allocated(&mut self, row: RequestRow, new: &NewBlocks) {
        if let Some(state) = new.last_state {
            self.last_state[row.index()] = state;
        }
        self.allocated[row.index()] |= new.sets_allocated;
    }

    pub(crate) fn forget(&mut self, row: RequestRow) {
        if let Some(state) = self.last_state.get_mut(row.index()) {
            *state = NO_STATE;
            self.allocated[row.index()] = false;
        }
    }

    /// Whether a hit ends in a state that this step has yet to write.
    pub(crate) fn ends_in_this_step(&self, pool: &BlockPool, hits: &[BlockId]) -> bool {
        hits.last()
            .and_then(|block| pool.block_key(*block))
            .is_some_and(|key| self.step_hashes.contains(&key.hash))
    }
}

/// The last cached state at an aligned length; everything before it is null. One probe a block at an
/// aligned length, from the end, up to the first that is cached.
pub(crate) fn find_longest_cache_hit(
    pool: &BlockPool,
    hashes: MergedBlockHashes<'_>,
    lookup: &Lookup<'_>,
) -> PrefixHit {
    let mut hit = PrefixHit::new(lookup.groups.len());
    let end = hashes.len().min(lookup.max_blocks());
    for last in (0..end).rev().filter(|last| lookup.is_aligned(last + 1)) {
        hit.restart(last);
        if hit.extend(pool, hashes, last..last + 1, lookup.groups) > 0 {
            return hit;
        }
    }
    hit.restart(0);
    hit
}

/// Blocks whose states are worth a key; all without a retention interval.
pub(crate) fn reachable_blocks(
    boundaries: &Boundaries,
    retention_interval: Option<u32>,
    block_size: u32,
) -> Option<ReachableBlocks> {
    let period = retention_interval? / block_size;
    if boundaries.segment > 0 && period <= 1 {
        return None;
    }
    let edge = |tokens: u32| {
        if tokens == u32::MAX { 0 } else { tokens / block_size }
    };
    Some(ReachableBlocks { period, need: 1, shift: 0, edges: boundaries.replays.map(edge) })
}

/// The state that mode `align` may release besides the skipped range, from which nulls can cut it off:
/// the one that the last step started from, once it is not the last one.
pub(crate) fn released_state(
    last_state: Option<u32>,
    row: &[BlockId],
    skipped: &Range<u32>,
    total_computed: u32,
    block_size: u32,
) -> Range<u32> {
    match last_state {
        Some(state)
            if state + 1 < total_computed.div_ceil(block_size)
                && !skipped.contains(&state)
                && row.get(state as usize).is_some_and(|block| !block.is_null()) =>
        {
            state..state + 1
        }
        _ => 0..0,
    }
}

/// What mode `align` does to a row of `before` blocks, for `num_tokens` tokens without look-ahead.
pub(crate) fn plan_aligned(
    before: u32,
    is_allocated: bool,
    num_tokens: u32,
    num_speculative_blocks: u32,
    block_size: u32,
) -> NewBlocks {
    let drafts = num_speculative_blocks;
    let need = num_tokens.div_ceil(block_size) + drafts;
    if need <= before {
        return NewBlocks::default();
    }
    // The state that this step starts from: the running one of the last step, or a prefix hit's.
    let last_state = match (is_allocated, before) {
        (true, _) => Some(before - 1 - drafts),
        (false, 0) => None,
        (false, _) => Some(before - 1),
    };
    let running = need - drafts - 1;
    let nulls = running.saturating_sub(before);
    // Draft slots left of the running state move behind it.
    let moved = if is_allocated { before - drafts..before.min(running) } else { 0..0 };
    let moved = if moved.is_empty() { 0..0 } else { moved };
    let length = before + nulls + (moved.end - moved.start);
    NewBlocks { nulls, moved, fresh: need - length, last_state, sets_allocated: true }
}

/// 0.25.1's own estimate of what `plan_aligned` takes: blind to external tokens, and negative after
/// rejected drafts.
pub(crate) fn estimate_aligned(
    pool: &BlockPool,
    row: &[BlockId],
    hits: &[BlockId],
    is_allocated: bool,
    num_tokens: u32,
    (num_speculative_blocks, block_size): (u32, u32),
) -> i64 {
    let need = i64::from(num_tokens.div_ceil(block_size) + num_speculative_blocks);
    let missing = need - i64::from(length(hits.len())) - i64::from(length(row.len()));
    let fresh = match (missing > 0, is_allocated) {
        (false, _) => missing,
        (true, true) => 1,
        (true, false) => 1 + i64::from(num_speculative_blocks),
    };
    fresh + i64::from(num_evictable(pool, hits))
}
