//! One group's rules: how many blocks a request needs, which it may let go, what is a hit. What all
//! kinds share stands here; each kind's own rules stand in its module, and the `match` of this file
//! is the only place that chooses among them.
//!
//! Rules: `groups.md` §2; vLLM's `single_type_kv_cache_manager.py`.

pub(crate) mod full_attention;
pub(crate) mod rswa;

use std::ops::Range;

use crate::block_pool::BlockPool;
use crate::caching::MergedBlockHashes;
use crate::id::{BlockId, GroupId, RequestRow, length};
use crate::semantics::CommonPrefix;
use crate::spec::{AttentionKind, KVCacheSpec};

/// Marks a row of which no block was offered to the prefix cache yet: the request is not "running"
/// for this group.
const NOT_CACHED: u32 = u32::MAX;

/// What one allocation asks of a group, in tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    /// Tokens that need a slot, look-ahead included.
    pub(crate) num_tokens: u32,
    /// Computed tokens, local and external.
    pub(crate) total_computed: u32,
}

/// The request as one group sees it before the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupState<'a> {
    /// Its blocks.
    pub(crate) row: &'a [BlockId],
    /// How many of them were offered to the prefix cache; none before the first.
    pub(crate) num_cached: Option<u32>,
}

/// See the module. vLLM's `SingleTypeKVCacheManager`.
#[derive(Debug)]
pub struct SingleTypeKVCacheManager {
    group: GroupId,
    kind: AttentionKind,
    /// Tokens per block across all context-parallel ranks.
    block_size: u32,
    /// Tokens per block on one rank.
    rank_block_size: u32,
    pub(crate) use_eagle: bool,
    /// Leading positions of each row already offered to the prefix cache.
    num_cached_block: Vec<u32>,
    track_new_blocks: bool,
    new_block_ids: Vec<BlockId>,
}

impl SingleTypeKVCacheManager {
    pub(crate) fn new(
        group: GroupId,
        spec: &KVCacheSpec,
        context_parallel_size: u32,
        track_new_blocks: bool,
    ) -> Self {
        // vLLM records new ids for exactly these kinds, because only they may need zeroing.
        let is_zeroed = match spec.kind {
            AttentionKind::FullAttention | AttentionKind::MLAAttention => true,
            AttentionKind::RSWA { .. } => false,
        };
        Self {
            group,
            kind: spec.kind,
            block_size: spec.block_size * context_parallel_size,
            rank_block_size: spec.block_size,
            use_eagle: false,
            num_cached_block: Vec::new(),
            track_new_blocks: track_new_blocks && is_zeroed,
            new_block_ids: Vec::new(),
        }
    }

    /// The group's id.
    #[inline]
    pub fn group(&self) -> GroupId {
        self.group
    }

    /// The group's kind.
    pub fn kind(&self) -> AttentionKind {
        self.kind
    }

    /// Tokens per block across all context-parallel ranks.
    #[inline]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// How many leading blocks of a row were offered to the prefix cache; none before the first.
    #[inline]
    pub fn num_cached_block(&self, row: RequestRow) -> Option<u32> {
        self.num_cached_block.get(row.index()).copied().filter(|cached| *cached != NOT_CACHED)
    }

    // ------------------------------------------------------------------------- rules of each kind

    /// Which positions of a row no later token will read, with `total_computed` tokens computed.
    pub(crate) fn skipped_range(
        &self,
        row: &[BlockId],
        total_computed: u32,
        num_prompt_tokens: Option<u32>,
    ) -> Range<u32> {
        let (low, high) = match self.kind {
            AttentionKind::FullAttention | AttentionKind::MLAAttention => (0, 0),
            AttentionKind::RSWA { rswa_window } => num_prompt_tokens.map_or((0, 0), |prompt| {
                rswa::gap(prompt, total_computed, rswa_window, self.block_size)
            }),
        };
        let high = high.min(length(row.len()));
        // What lies before a null was released by an earlier call: stop there.
        let live = (low..high).rev().take_while(|at| !row[*at as usize].is_null()).last();
        live.map_or(high..high, |first| first..high)
    }

    /// The longest usable hit of at most `max_length` tokens, appended to `hit`.
    pub(crate) fn find_longest_cache_hit(
        &self,
        pool: &BlockPool,
        hashes: MergedBlockHashes<'_>,
        max_length: u32,
        hit: &mut Vec<BlockId>,
    ) {
        match self.kind {
            AttentionKind::FullAttention
            | AttentionKind::MLAAttention
            | AttentionKind::RSWA { .. } => full_attention::find_longest_cache_hit(
                pool,
                hashes,
                max_length / self.block_size,
                &[self.group],
                self.use_eagle,
                hit,
            ),
        }
    }

    /// With `total_computed` tokens computed, how many from the start no later token will read.
    fn num_skipped_tokens(&self, _total_computed: u32) -> u32 {
        match self.kind {
            AttentionKind::FullAttention
            | AttentionKind::MLAAttention
            | AttentionKind::RSWA { .. } => 0,
        }
    }

    /// How many leading blocks of a row all tracked requests share.
    pub(crate) fn num_common_prefix_blocks(
        &self,
        pool: &BlockPool,
        row: &[BlockId],
        num_requests: u32,
        rule: CommonPrefix,
    ) -> usize {
        match self.kind {
            AttentionKind::FullAttention
            | AttentionKind::MLAAttention
            | AttentionKind::RSWA { .. } => {
                full_attention::num_common_prefix_blocks(pool, row, num_requests, rule)
            }
        }
    }

    /// How many leading blocks of a row `num_tokens` tokens fill.
    pub(crate) fn num_blocks_for_computed_tokens(
        &self,
        row: &[BlockId],
        num_tokens: u32,
        across_ranks: bool,
    ) -> usize {
        let size = if across_ranks { self.block_size } else { self.rank_block_size };
        row.len().min(num_tokens.div_ceil(size) as usize)
    }

    // -------------------------------------------------------------------------- shared by all kinds

    /// How many leading positions of a new row get no storage, because no token will read them.
    pub(crate) fn num_skipped_blocks(&self, total_computed: u32) -> u32 {
        self.num_skipped_tokens(total_computed) / self.block_size
    }

    /// What admission rests on: how many free blocks the call will take, hits that sit in the free
    /// queue included (`groups.md` §2.1.2).
    pub(crate) fn num_blocks_to_allocate(
        &self,
        pool: &BlockPool,
        state: &GroupState<'_>,
        hits: &[BlockId],
        demand: Demand,
    ) -> u32 {
        let total = demand.num_tokens.div_ceil(self.block_size);
        let have = length(state.row.len());
        if state.num_cached.is_some() {
            return total.saturating_sub(have);
        }
        let skipped = self.num_skipped_blocks(demand.total_computed);
        let local = length(hits.len()) + have;
        let fresh = total.saturating_sub(skipped.max(local));
        fresh + num_evictable(pool, &hits[hits.len().min(skipped.saturating_sub(have) as usize)..])
    }

    /// How many blocks tokens supplied from elsewhere take, for a row of `have` blocks
    /// (`groups.md` §2.1.5).
    pub(crate) fn num_external_blocks(&self, have: u32, local: u32, external: u32) -> u32 {
        let total = local + external;
        if external == 0 || self.num_skipped_tokens(total) >= total {
            return 0;
        }
        total.div_ceil(self.block_size).saturating_sub(have)
    }

    // -------------------------------------------------------------------------------- bookkeeping

    pub(crate) fn reserve_row(
        &mut self,
        row: RequestRow,
        new_blocks: usize,
    ) -> crate::error::Result<()> {
        if self.num_cached_block.len() <= row.index() {
            let missing = row.index() + 1 - self.num_cached_block.len();
            self.num_cached_block.try_reserve(missing)?;
            self.num_cached_block.resize(row.index() + 1, NOT_CACHED);
        }
        if self.track_new_blocks {
            self.new_block_ids.try_reserve(new_blocks)?;
        }
        Ok(())
    }

    pub(crate) fn set_num_cached_block(&mut self, row: RequestRow, cached: u32) {
        self.num_cached_block[row.index()] = cached;
    }

    pub(crate) fn forget(&mut self, row: RequestRow) {
        self.num_cached_block[row.index()] = NOT_CACHED;
    }

    pub(crate) fn record_new_blocks(&mut self, blocks: &[BlockId]) {
        if self.track_new_blocks {
            self.new_block_ids.extend_from_slice(blocks);
        }
    }

    /// Ids allocated since they were last taken, oldest first.
    pub(crate) fn new_block_ids(&self) -> &[BlockId] {
        &self.new_block_ids
    }

    pub(crate) fn clear_new_block_ids(&mut self) {
        self.new_block_ids.clear();
    }
}

/// How many of these blocks sit in the free queue and would leave it when touched.
pub(crate) fn num_evictable(pool: &BlockPool, blocks: &[BlockId]) -> u32 {
    let evictable = blocks.iter().filter(|block| !block.is_null() && pool.ref_cnt(**block) == 0);
    length(evictable.count())
}
