//! One group's rules: how many blocks a request needs, which it may let go, what is a hit. What all
//! kinds share stands here; each kind's own rules stand in its module, and the `match`es of this file
//! are the only place that chooses among them.
//!
//! Rules: `groups.md` §2; vLLM's `single_type_kv_cache_manager.py`.

mod chunked_local;
mod full_attention;
mod lookup;
mod mamba;
mod rswa;
mod sliding_window;

use std::ops::Range;

use crate::block_pool::BlockPool;
use crate::caching::{BlockMask, MergedBlockHashes};
use crate::id::{BlockId, GroupId, RequestRow, length};
use crate::memory::Grow;
use crate::semantics::{AlignPrediction, CommonPrefix};
use crate::spec::{AttentionKind, KVCacheManagerConfig, MambaCacheMode};
pub(crate) use lookup::{Lookup, PrefixHit};

/// Marks a row of which no block was offered to the prefix cache yet: the request is not "running"
/// for this group.
const NOT_CACHED: u32 = u32::MAX;

/// What one allocation asks of a group, in tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    /// Tokens that need a slot, look-ahead included.
    pub(crate) num_tokens: u32,
    /// The same without look-ahead.
    pub(crate) num_tokens_main: u32,
    /// Computed tokens, local and external.
    pub(crate) total_computed: u32,
    /// How many of them come from elsewhere.
    pub(crate) external: u32,
    /// Tokens of an encoder.
    pub(crate) num_encoder_tokens: u32,
    /// Hits and external blocks are attached first.
    pub(crate) attaches_hits: bool,
    /// For a whole sequence: blocks that the group will have given back by then do not count. Look-ahead
    /// tokens of a step.
    pub(crate) capped_with_lookahead: Option<u32>,
}

/// The request as one group sees it before the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupState<'a> {
    /// Its row number, if it has one.
    pub(crate) number: Option<RequestRow>,
    /// Its blocks.
    pub(crate) row: &'a [BlockId],
    /// How many of them were offered to the prefix cache; none before the first.
    pub(crate) num_cached: Option<u32>,
}

/// How a row begins: nulls, blocks of a hit, blocks for external tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attachment {
    /// Leading nulls.
    pub(crate) padding: u32,
    /// Hits from here on are attached.
    pub(crate) hits_from: usize,
    /// Blocks for external tokens.
    pub(crate) external: u32,
}

/// How a row grows: nulls, blocks that move from earlier positions, blocks of the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NewBlocks {
    /// Nulls appended first.
    pub(crate) nulls: u32,
    /// Positions whose blocks move to the end and become null.
    pub(crate) moved: Range<u32>,
    /// Blocks taken from the pool.
    pub(crate) fresh: u32,
    /// Mamba, mode `align`: the position of the state that the step starts from.
    pub(crate) last_state: Option<u32>,
    /// Mamba, mode `align`: the row has its running state from now on.
    pub(crate) sets_allocated: bool,
}

/// Lengths at which a lookup may end, in tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Boundaries {
    /// Every so many tokens; 0: nowhere.
    pub(crate) segment: u32,
    /// Besides, for the end of the prompt; `u32::MAX`: none.
    pub(crate) replays: [u32; 2],
}

/// What the groups share of the configuration.
#[derive(Clone, Copy, Debug)]
struct Common {
    scheduler_block_size: u32,
    retention_interval: Option<u32>,
    max_num_batched_tokens: u32,
    max_model_len: u32,
    /// Hits lose their last block in some group.
    any_eagle: bool,
    eagle_retention: bool,
    align_prediction: AlignPrediction,
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
    use_eagle: bool,
    common: Common,
    /// Leading positions of each row already offered to the prefix cache.
    num_cached_block: Vec<u32>,
    track_new_blocks: bool,
    new_block_ids: Vec<BlockId>,
    mamba: mamba::MambaStates,
}

impl SingleTypeKVCacheManager {
    /// The manager of one group; `use_eagle` and `any_eagle` tell of this group and of all.
    pub(crate) fn new(
        group: GroupId,
        config: &KVCacheManagerConfig,
        use_eagle: bool,
        any_eagle: bool,
    ) -> Self {
        let spec = &config.groups[group.index()].spec;
        // vLLM records new ids for exactly these kinds, because only they may need zeroing.
        let is_zeroed =
            matches!(spec.kind, AttentionKind::FullAttention | AttentionKind::MLAAttention);
        Self {
            group,
            kind: spec.kind,
            block_size: config.block_size(group.index()),
            rank_block_size: spec.block_size,
            use_eagle,
            common: Common {
                scheduler_block_size: config.scheduler_block_size,
                retention_interval: config.retention_interval,
                max_num_batched_tokens: config.max_num_batched_tokens,
                max_model_len: config.max_model_len,
                any_eagle,
                eagle_retention: config.semantics.eagle_retention,
                align_prediction: config.semantics.align_prediction,
            },
            num_cached_block: Vec::new(),
            track_new_blocks: config.track_new_blocks && is_zeroed,
            new_block_ids: Vec::new(),
            mamba: mamba::MambaStates::default(),
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

    /// Whether a drafter reads the group.
    pub fn use_eagle(&self) -> bool {
        self.use_eagle
    }

    /// How many leading blocks of a row were offered to the prefix cache; none before the first.
    #[inline]
    pub fn num_cached_block(&self, row: RequestRow) -> Option<u32> {
        self.num_cached_block.get(row.index()).copied().filter(|cached| *cached != NOT_CACHED)
    }

    // ------------------------------------------------------------------------- rules of each kind

    /// With `total_computed` tokens computed, how many from the start no later token will read.
    fn num_skipped_tokens(&self, total_computed: u32) -> u32 {
        match self.kind {
            AttentionKind::FullAttention
            | AttentionKind::MLAAttention
            | AttentionKind::RSWA { .. }
            | AttentionKind::SinkFullAttention { .. }
            | AttentionKind::CrossAttention => 0,
            AttentionKind::SlidingWindow { sliding_window }
            | AttentionKind::SlidingWindowMLA { sliding_window } => {
                sliding_window::num_skipped_tokens(total_computed, sliding_window)
            }
            AttentionKind::ChunkedLocalAttention { attention_chunk_size } => {
                chunked_local::num_skipped_tokens(total_computed, attention_chunk_size)
            }
            // Only the last state is needed.
            AttentionKind::Mamba { .. } => total_computed.saturating_sub(1),
        }
    }

    /// Which positions of a row no later token will read, with `total_computed` tokens computed: a
    /// range, and one more that nulls may separate from it.
    pub(crate) fn skipped_ranges(
        &self,
        state: &GroupState<'_>,
        total_computed: u32,
        num_prompt_tokens: Option<u32>,
    ) -> [Range<u32>; 2] {
        match self.kind {
            AttentionKind::RSWA { rswa_window } => {
                let gap = num_prompt_tokens.map_or((0, 0), |prompt| {
                    rswa::gap(prompt, total_computed, rswa_window, self.block_size)
                });
                [live_range(state.row, gap), 0..0]
            }
            AttentionKind::Mamba { mamba_cache_mode, num_speculative_blocks } => {
                // As if every draft in flight were rejected.
                let computed = total_computed.saturating_sub(num_speculative_blocks);
                let skipped = live_range(state.row, (0, self.num_skipped_blocks(computed)));
                let last_state = match mamba_cache_mode {
                    MambaCacheMode::Align => {
                        state.number.and_then(|number| self.mamba.last_state(number))
                    }
                    MambaCacheMode::None | MambaCacheMode::All => None,
                };
                let other = mamba::released_state(
                    last_state,
                    state.row,
                    &skipped,
                    computed,
                    self.block_size,
                );
                [skipped, other]
            }
            _ => [live_range(state.row, (0, self.num_skipped_blocks(total_computed))), 0..0],
        }
    }

    /// Tokens for which a row must have blocks.
    fn num_slots(&self, demand: &Demand) -> u32 {
        match self.kind {
            AttentionKind::Mamba { num_speculative_blocks, .. } => {
                demand.num_tokens + num_speculative_blocks * self.block_size
            }
            AttentionKind::CrossAttention => demand.num_encoder_tokens,
            _ => demand.num_tokens,
        }
    }

    /// The most blocks a whole sequence holds at once; none where it holds all of its blocks.
    fn admission_cap(&self, num_lookahead_tokens: u32) -> Option<u32> {
        let step = self.common.max_num_batched_tokens.saturating_add(num_lookahead_tokens);
        let longest = self.common.max_model_len;
        match self.kind {
            AttentionKind::SlidingWindow { sliding_window }
            | AttentionKind::SlidingWindowMLA { sliding_window } => {
                Some(sliding_window::admission_cap(sliding_window, step, longest, self.block_size))
            }
            AttentionKind::ChunkedLocalAttention { attention_chunk_size: chunk } => {
                Some(chunked_local::admission_cap(chunk, step, longest, self.block_size))
            }
            _ => None,
        }
    }

    /// What admission rests on: how many free blocks the call will take, hits that sit in the free
    /// queue included (`groups.md` §2.1.2). Negative only where 0.25.1's estimate is.
    pub(crate) fn num_blocks_to_allocate(
        &self,
        pool: &BlockPool,
        state: &GroupState<'_>,
        hits: &[BlockId],
        demand: &Demand,
    ) -> i64 {
        if let AttentionKind::Mamba { mamba_cache_mode, num_speculative_blocks } = self.kind {
            if self.mamba.ends_in_this_step(pool, hits) {
                // Does not fit: the state to start from is only written by this step.
                return i64::from(pool.num_blocks()) + 1;
            }
            if mamba_cache_mode == MambaCacheMode::Align {
                return match self.common.align_prediction {
                    AlignPrediction::TrueNeed => {
                        i64::from(self.num_taken(pool, state, hits, demand))
                    }
                    AlignPrediction::Estimate => mamba::estimate_aligned(
                        pool,
                        state.row,
                        hits,
                        self.is_allocated(state),
                        demand.num_tokens_main,
                        (num_speculative_blocks, self.block_size),
                    ),
                };
            }
        }
        let mut total = self.num_slots(demand).div_ceil(self.block_size);
        let cap = demand.capped_with_lookahead.and_then(|tokens| self.admission_cap(tokens));
        total = total.min(cap.unwrap_or(u32::MAX));
        let have = length(state.row.len());
        if state.num_cached.is_some() {
            return i64::from(total.saturating_sub(have));
        }
        let skipped = self.num_skipped_blocks(demand.total_computed);
        let fresh = total.saturating_sub(skipped.max(length(hits.len()) + have));
        let attached = &hits[hits.len().min(skipped.saturating_sub(have) as usize)..];
        i64::from(fresh + num_evictable(pool, attached))
    }

    /// How a row of `before` blocks grows.
    pub(crate) fn plan_new_blocks(
        &self,
        state: &GroupState<'_>,
        before: u32,
        demand: &Demand,
    ) -> NewBlocks {
        if let AttentionKind::Mamba {
            mamba_cache_mode: MambaCacheMode::Align,
            num_speculative_blocks,
        } = self.kind
        {
            return mamba::plan_aligned(
                before,
                self.is_allocated(state),
                demand.num_tokens_main,
                num_speculative_blocks,
                self.block_size,
            );
        }
        let total = self.num_slots(demand).div_ceil(self.block_size);
        NewBlocks { fresh: total.saturating_sub(before), ..NewBlocks::default() }
    }

    /// The longest usable hit. Groups of one specification are asked together, through any of them.
    pub(crate) fn find_longest_cache_hit(
        &self,
        pool: &BlockPool,
        hashes: MergedBlockHashes<'_>,
        lookup: &Lookup<'_>,
    ) -> PrefixHit {
        match self.kind {
            AttentionKind::FullAttention
            | AttentionKind::MLAAttention
            | AttentionKind::RSWA { .. }
            | AttentionKind::SinkFullAttention { .. } => {
                full_attention::find_longest_cache_hit(pool, hashes, lookup)
            }
            AttentionKind::SlidingWindow { sliding_window }
            | AttentionKind::SlidingWindowMLA { sliding_window } => {
                sliding_window::find_longest_cache_hit(pool, hashes, lookup, sliding_window)
            }
            AttentionKind::ChunkedLocalAttention { attention_chunk_size: chunk } => {
                chunked_local::find_longest_cache_hit(pool, hashes, lookup, chunk)
            }
            AttentionKind::Mamba { .. } => mamba::find_longest_cache_hit(pool, hashes, lookup),
            // Refused together with caching at construction.
            AttentionKind::CrossAttention => PrefixHit::new(lookup.groups.len()),
        }
    }

    /// Which positions are worth a key.
    pub(crate) fn reachable_blocks(&self, num_prompt_tokens: u32) -> BlockMask<'static> {
        let boundaries = self.boundaries(num_prompt_tokens);
        let reachable = match self.kind {
            AttentionKind::SlidingWindow { sliding_window }
            | AttentionKind::SlidingWindowMLA { sliding_window } => {
                sliding_window::reachable_blocks(
                    &boundaries,
                    sliding_window,
                    self.block_size,
                    self.use_eagle,
                )
            }
            AttentionKind::Mamba { .. } => mamba::reachable_blocks(
                &boundaries,
                self.common.retention_interval,
                self.block_size,
            ),
            _ => None,
        };
        reachable.map_or(BlockMask::All, BlockMask::Reachable)
    }

    /// How many leading blocks of a row all tracked requests share.
    pub(crate) fn num_common_prefix_blocks(
        &self,
        pool: &BlockPool,
        row: &[BlockId],
        num_requests: u32,
        rule: CommonPrefix,
    ) -> usize {
        if self.kind.is_full_attention() {
            full_attention::num_common_prefix_blocks(pool, row, num_requests, rule)
        } else {
            0
        }
    }

    /// How many leading blocks of a row `num_tokens` tokens fill; all where positions are no tokens.
    pub(crate) fn num_blocks_for_computed_tokens(
        &self,
        row: &[BlockId],
        num_tokens: u32,
        across_ranks: bool,
    ) -> usize {
        match self.kind {
            AttentionKind::Mamba { .. } | AttentionKind::CrossAttention => row.len(),
            _ => {
                let size = if across_ranks { self.block_size } else { self.rank_block_size };
                row.len().min(num_tokens.div_ceil(size) as usize)
            }
        }
    }

    // -------------------------------------------------------------------------- shared by all kinds

    fn num_skipped_blocks(&self, total_computed: u32) -> u32 {
        self.num_skipped_tokens(total_computed) / self.block_size
    }

    /// How a new row begins (`groups.md` §2.1.4, §2.1.5).
    pub(crate) fn plan_attachment(&self, hits: &[BlockId], demand: &Demand) -> Attachment {
        if self.kind == AttentionKind::CrossAttention {
            return Attachment::default();
        }
        let total = demand.total_computed;
        let padding = self.num_skipped_blocks(total);
        let hits_from = hits.len().min(padding as usize);
        let have = padding + length(hits.len() - hits_from);
        let is_stored = demand.external > 0 && self.num_skipped_tokens(total) < total;
        let external =
            if is_stored { total.div_ceil(self.block_size).saturating_sub(have) } else { 0 };
        Attachment { padding, hits_from, external }
    }

    /// Whether attaching sets the request running: cross attention never is.
    pub(crate) fn offers_attached_blocks(&self) -> bool {
        self.kind != AttentionKind::CrossAttention
    }

    /// How many free blocks an allocation really takes.
    fn num_taken(
        &self,
        pool: &BlockPool,
        state: &GroupState<'_>,
        hits: &[BlockId],
        demand: &Demand,
    ) -> u32 {
        let (mut before, mut taken) = (length(state.row.len()), 0);
        if demand.attaches_hits {
            let attachment = self.plan_attachment(hits, demand);
            let attached = &hits[attachment.hits_from..];
            before = attachment.padding + length(attached.len()) + attachment.external;
            taken = num_evictable(pool, attached) + attachment.external;
        }
        taken + self.plan_new_blocks(state, before, demand).fresh
    }

    /// At which lengths of this request a later lookup may end.
    fn boundaries(&self, num_prompt_tokens: u32) -> Boundaries {
        let Common { scheduler_block_size: alignment, retention_interval, .. } = self.common;
        let mut replays = [u32::MAX; 2];
        if retention_interval.is_some() {
            // The same prompt again: its last token is always computed.
            let last = num_prompt_tokens.saturating_sub(1);
            let resend = last - last % alignment;
            replays[0] = resend;
            if self.common.eagle_retention && self.common.any_eagle {
                // Where a drafter voids the last block, one aligned length less is left of it. What is
                // left of a longer prompt is one of the two.
                replays[1] = resend.checked_sub(alignment).unwrap_or(u32::MAX);
            }
        }
        Boundaries { segment: retention_interval.unwrap_or(alignment), replays }
    }

    fn is_allocated(&self, state: &GroupState<'_>) -> bool {
        state.number.is_some_and(|number| self.mamba.is_allocated(number))
    }

    // -------------------------------------------------------------------------------- bookkeeping

    pub(crate) fn reserve_row(
        &mut self,
        row: RequestRow,
        new_blocks: usize,
        new_keys: usize,
    ) -> crate::error::Result<()> {
        if let Some(missing) = (row.index() + 1).checked_sub(self.num_cached_block.len()) {
            self.num_cached_block.make_room(missing)?;
            self.num_cached_block.resize(row.index() + 1, NOT_CACHED);
        }
        if self.track_new_blocks {
            self.new_block_ids.make_room(new_blocks)?;
        }
        match self.kind {
            AttentionKind::Mamba { .. } => self.mamba.reserve(row, new_keys),
            _ => Ok(()),
        }
    }

    /// Positions before `cached` are offered to the prefix cache from now on.
    pub(crate) fn set_num_cached_block(&mut self, row: RequestRow, cached: u32) {
        self.num_cached_block[row.index()] = cached;
    }

    /// Notes blocks that just got their keys.
    pub(crate) fn note_cached(&mut self, pool: &BlockPool, blocks: &[BlockId]) {
        if let AttentionKind::Mamba { .. } = self.kind {
            self.mamba.note_cached(pool, blocks);
        }
    }

    pub(crate) fn note_allocated(&mut self, row: RequestRow, new: &NewBlocks) {
        if new.sets_allocated {
            self.mamba.note_allocated(row, new);
        }
    }

    pub(crate) fn new_step_starts(&mut self) {
        self.mamba.new_step_starts();
    }

    pub(crate) fn forget(&mut self, row: RequestRow) {
        self.num_cached_block[row.index()] = NOT_CACHED;
        self.mamba.forget(row);
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

    /// What the group remembers besides its rows, as numbers, for a digest.
    pub(crate) fn state_numbers(&self, row: RequestRow) -> [u64; 3] {
        [
            self.num_cached_block(row).map_or(u64::MAX, u64::from),
            self.mamba.last_state(row).map_or(u64::MAX, u64::from),
            u64::from(self.mamba.is_allocated(row)),
        ]
    }

    /// Keys that this step gave, in no order, for a digest.
    pub(crate) fn step_hashes(&self) -> impl Iterator<Item = &crate::block_hash::BlockHash> {
        self.mamba.step_hashes()
    }
}

/// What of a range of positions still has storage. What lies before a null was released by an earlier
/// call: the range stops there.
fn live_range(row: &[BlockId], (low, high): (u32, u32)) -> Range<u32> {
    let high = high.min(length(row.len()));
    let live = (low..high).rev().take_while(|at| !row[*at as usize].is_null()).last();
    live.map_or(high..high, |first| first..high)
}

/// How many of these blocks sit in the free queue and would leave it when touched.
pub(crate) fn num_evictable(pool: &BlockPool, blocks: &[BlockId]) -> u32 {
    let evictable = blocks.iter().filter(|block| !block.is_null() && pool.ref_cnt(**block) == 0);
    length(evictable.count())
}
