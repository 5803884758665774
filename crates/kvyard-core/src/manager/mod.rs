//! The manager: what a scheduler talks to. It owns the pool, the rows and one manager a group, and
//! makes them agree. vLLM's `KVCacheManager` (`v1/core/kv_cache_manager.py`) and its coordinators.
//!
//! Every mutating call is planned without changing anything, then given its memory, then applied,
//! which cannot fail. So an error or a refusal leaves the state as it was, save for the documented
//! release of blocks that no later token will read.
//!
//! Invariants, cited by `validate()`:
//! * I4: a block's row references are its occurrences in rows.
//! * I10: positions offered to the prefix cache lie within the row.
//! * I18: every tracked request has one row, and every row one name or none.
//! * I19: no block occurs twice in a row or in rows of two groups; its key names its group.

mod allocate;
mod arguments;
mod audit;
mod cache_blocks;
mod plan;
mod report;
mod requests;
mod validate;

pub use crate::coordinator::CacheHit;
pub use plan::{AllocatePlan, AllocateSlots};

use std::ops::Range;

use smallvec::SmallVec;

use crate::block_pool::{BlockPool, BlockPoolConfig};
use crate::block_table::{BlockTables, RowEditLog};
use crate::blocks::{BlockLease, GroupEnds, KVCacheBlocks};
use crate::coordinator::{KVCacheCoordinator, PrefixLookup};
use crate::error::{KVCacheError, Result};
use crate::history::Effect;
use crate::id::{BlockId, GroupId, RequestRow, length};
use crate::memory::Grow;
use crate::op::Op;
use crate::request_view::RequestCall;
use crate::semantics::{DeferredFreeOrder, StatsOn};
use crate::single_type::{GroupState, SingleTypeKVCacheManager};
use crate::spec::KVCacheManagerConfig;
use crate::stats::{PrefixCacheStats, ResidencyMetrics};
use requests::TrackedRequests;

/// See the module.
#[derive(Debug)]
pub struct KVCacheManager {
    config: KVCacheManagerConfig,
    coordinator: KVCacheCoordinator,
    watermark_blocks: u32,
    pool: BlockPool,
    tables: BlockTables,
    requests: TrackedRequests,
    managers: Vec<SingleTypeKVCacheManager>,
    prefix_cache_stats: PrefixCacheStats,
    num_uncached_common_prefix_tokens: u32,
    audit: audit::Audit,
}

impl KVCacheManager {
    /// A manager over a pool of free blocks.
    ///
    /// # Errors
    /// `Config`, naming the argument; `OutOfMemory`.
    pub fn new(config: KVCacheManagerConfig, residency: Option<ResidencyMetrics>) -> Result<Self> {
        config.check()?;
        let mut pool = BlockPool::new(
            BlockPoolConfig {
                num_blocks: config.num_blocks,
                enable_caching: config.enable_caching,
                hash_block_size: config.hash_block_size,
                enable_kv_cache_events: config.enable_kv_cache_events,
                verify_tokens: config.verify_tokens,
                semantics: config.semantics,
            },
            residency,
        )?;
        if let Some((sink_len, block_size)) = config.sink_len() {
            pool.withdraw(sink_len / block_size)?;
        }
        let (coordinator, eagle) = KVCacheCoordinator::new(&config);
        let any_eagle = eagle.contains(&true);
        let managers = eagle
            .into_iter()
            .enumerate()
            .map(|(group, eagle)| {
                let group = GroupId::from_index(group);
                SingleTypeKVCacheManager::new(group, &config, eagle, any_eagle)
            })
            .collect();
        // Truncated, of all blocks, as vLLM's `int(watermark * num_blocks)`.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a float becomes the nearest u32 below, and saturates"
        )]
        let watermark_blocks = (config.watermark * f64::from(config.num_blocks)) as u32;
        Ok(Self {
            coordinator,
            watermark_blocks,
            tables: BlockTables::new(config.groups.len(), config.track_row_edits),
            config,
            pool,
            requests: TrackedRequests::default(),
            managers,
            prefix_cache_stats: PrefixCacheStats::default(),
            num_uncached_common_prefix_tokens: 0,
            audit: audit::Audit::default(),
        })
    }

    /// The arguments it was made with.
    pub fn config(&self) -> &KVCacheManagerConfig {
        &self.config
    }

    /// The block pool.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The block pool, for references outside the manager.
    pub fn pool_mut(&mut self) -> &mut BlockPool {
        &mut self.pool
    }

    /// The groups' managers, in group order.
    pub fn single_type_managers(&self) -> &[SingleTypeKVCacheManager] {
        &self.managers
    }

    /// Number of groups.
    pub fn num_kv_cache_groups(&self) -> usize {
        self.managers.len()
    }

    /// Blocks that admission leaves free while others run.
    pub fn watermark_blocks(&self) -> u32 {
        self.watermark_blocks
    }

    /// Share of the blocks in use, 0 to 1.
    pub fn usage(&self) -> f64 {
        self.pool.usage()
    }

    /// No blocks, in each group.
    pub fn empty_kv_cache_blocks(&self) -> KVCacheBlocks {
        KVCacheBlocks::empty(self.managers.len(), self.pool.id(), self.pool.epoch())
    }

    /// The row of a tracked request.
    pub fn request_row(&self, request_id: &str) -> Option<RequestRow> {
        self.requests.find(request_id, None)
    }

    /// The name of the request in a row.
    pub fn request_name(&self, row: RequestRow) -> Option<&str> {
        self.requests.name(row)
    }

    /// Tracked requests: those that hold a row.
    pub fn num_tracked_requests(&self) -> usize {
        self.requests.len()
    }

    /// The log of row edits since it was last cleared; needs `track_row_edits`.
    pub fn row_edits_mut(&mut self) -> &mut RowEditLog {
        self.tables.edits_mut()
    }

    // ------------------------------------------------------------------------------------- lookup

    /// The longest cached prefix of a request, on which all groups agree. Nothing is pinned. The last
    /// token is never part of it: something must be computed. vLLM's `get_computed_blocks` gives the
    /// first two fields.
    ///
    /// Costs one probe a block of the hit for full attention and one window of probes for a sliding
    /// window; the groups' modules tell what a miss costs.
    pub fn lookup(&mut self, request: &RequestCall<'_>) -> CacheHit {
        let view = &request.view;
        if view.skip_reading_prefix_cache || !self.config.enable_caching {
            self.num_uncached_common_prefix_tokens = 0;
            return CacheHit {
                blocks: self.empty_kv_cache_blocks(),
                num_tokens: 0,
                num_uncached_common_prefix_tokens: 0,
            };
        }
        let hit = self.find_longest_cache_hit(request, view.num_tokens.saturating_sub(1));
        self.num_uncached_common_prefix_tokens = hit.num_uncached_common_prefix_tokens;
        if self.config.log_stats && self.config.semantics.stats_on == StatsOn::Lookup {
            self.prefix_cache_stats.record(view, hit.num_tokens);
        }
        hit
    }

    /// The longest hit of at most `max_length` tokens, without a trace in statistics.
    pub fn find_longest_cache_hit(&self, request: &RequestCall<'_>, max_length: u32) -> CacheHit {
        let max_length = max_length.min(request.view.num_tokens);
        self.coordinator.find_longest_cache_hit(&self.prefix_lookup(request, max_length))
    }

    /// Each group's own longest hit of at most `max_length` tokens, and its length in tokens; the
    /// lengths need not agree. For connectors that fill the difference.
    pub fn find_longest_cache_hit_per_group(
        &self,
        request: &RequestCall<'_>,
        max_length: u32,
    ) -> (KVCacheBlocks, Vec<u32>) {
        let max_length = max_length.min(request.view.num_tokens);
        self.coordinator.find_longest_cache_hit_per_group(&self.prefix_lookup(request, max_length))
    }

    /// By how much the deepest group's hit exceeded the agreed one at the last lookup, in tokens.
    pub fn num_uncached_common_prefix_tokens(&self) -> u32 {
        self.num_uncached_common_prefix_tokens
    }

    fn prefix_lookup<'a>(
        &'a self,
        request: &'a RequestCall<'a>,
        max_length: u32,
    ) -> PrefixLookup<'a> {
        PrefixLookup { pool: &self.pool, managers: &self.managers, request, max_length }
    }

    /// A scheduling step begins: what the last one wrote can be built on.
    pub fn new_step_starts(&mut self) {
        for manager in &mut self.managers {
            manager.new_step_starts();
        }
    }

    // ------------------------------------------------------------------------------------ release

    /// Gives up a request: its blocks go back, each group's from its tail, which is the eviction
    /// order. An unknown request is none.
    pub fn free(&mut self, request_id: &str, hint: Option<RequestRow>) {
        if let Some(row) = self.requests.find(request_id, hint) {
            self.pool.history.begin(Op::Free { request: row.0 });
            self.release_row(row);
        }
    }

    /// As `free`, for a request whose last step did not run to its end: keys of blocks whose tokens,
    /// beyond the first `num_written_tokens`, were never written are forgotten.
    ///
    /// # Errors
    /// `OutOfMemory`; the request is not freed then.
    pub fn free_written(
        &mut self,
        request_id: &str,
        hint: Option<RequestRow>,
        num_written_tokens: u32,
    ) -> Result<()> {
        let Some(row) = self.requests.find(request_id, hint) else {
            return Ok(());
        };
        let unwritten = self.managers.iter().flat_map(|manager| {
            let written = (num_written_tokens / manager.block_size()) as usize;
            self.tables.row(row, manager.group()).get(written..).unwrap_or(&[])
        });
        let op = Op::FreeWritten { request: row.0, num_tokens: num_written_tokens };
        self.pool.forget_keys(op, unwritten)?;
        self.release_row(row);
        Ok(())
    }

    fn release_row(&mut self, row: RequestRow) {
        for manager in &self.managers {
            let blocks = self.tables.row(row, manager.group());
            let blocks = blocks.iter().rev().copied();
            self.pool.history.note_all(Effect::Released, blocks.clone());
            self.pool.release_from_row(blocks);
        }
        self.forget(row);
    }

    /// Gives up a request and keeps its blocks held: their references pass to the lease, for
    /// `free_popped` once no step in flight reads them. An unknown request gives an empty lease.
    ///
    /// # Errors
    /// `OutOfMemory`; the request keeps its blocks then.
    pub fn pop_blocks_for_free(
        &mut self,
        request_id: &str,
        hint: Option<RequestRow>,
    ) -> Result<BlockLease> {
        let row = self.requests.find(request_id, hint);
        let blocks = row.map_or(0, |row| self.row_length(row));
        let (mut ids, mut ends, mut name) = (Vec::new(), GroupEnds::new(), String::new());
        ids.make_room(blocks)?;
        ends.make_room(self.managers.len())?;
        name.make_room(request_id.len())?;
        name.push_str(request_id);
        for manager in &self.managers {
            if let Some(row) = row {
                ids.extend_from_slice(self.tables.row(row, manager.group()));
            }
            ends.push(length(ids.len()));
        }
        if let Some(row) = row {
            self.pool.history.begin(Op::Pop { request: row.0 });
            self.forget(row);
        }
        Ok(self.pool.hand_out(ids, ends, Some(name)))
    }

    /// Returns popped blocks, in the order of an immediate free or across groups, as the semantics
    /// say.
    ///
    /// # Errors
    /// As `BlockPool::free`; the lease comes back with the error.
    pub fn free_popped(&mut self, lease: BlockLease) -> Result<(), (KVCacheError, BlockLease)> {
        let lease = self.pool.end_lease(lease)?;
        self.pool.begin_free_lease(&lease, true);
        match self.config.semantics.deferred_free_order {
            DeferredFreeOrder::AcrossGroups => {
                self.pool.release_counted(lease.ids.iter().rev().copied());
            }
            DeferredFreeOrder::GroupByGroup => {
                let mut start = 0;
                for end in lease.ends.iter().map(|end| *end as usize) {
                    self.pool.release_counted(lease.ids[start..end].iter().rev().copied());
                    start = end;
                }
            }
        }
        Ok(())
    }

    /// Names the requests that hold the block of an ownership error, which the pool does not know.
    #[must_use]
    pub fn with_owners(&self, error: KVCacheError) -> KVCacheError {
        let owners = |block: BlockId| {
            let holds = |row| {
                self.managers
                    .iter()
                    .any(|group| self.tables.row(row, group.group()).contains(&block))
            };
            let names = self.requests.iter().filter(|(row, _)| holds(*row));
            names.map(|(_, name)| format!("{name:?}")).collect::<Vec<_>>().join(", ")
        };
        match error {
            KVCacheError::NotOwned { block, reason } => {
                let reason = match &*owners(block) {
                    "" => reason,
                    names => format!("{reason} (request {names})"),
                };
                KVCacheError::NotOwned { block, reason }
            }
            KVCacheError::DoubleFree { block, times, handed_out, owner } => {
                let owner = match &*owners(block) {
                    "" => owner,
                    names => format!(" (request {names} holds it too)"),
                };
                KVCacheError::DoubleFree { block, times, handed_out, owner }
            }
            other => other,
        }
    }

    fn forget(&mut self, row: RequestRow) {
        self.tables.clear(row);
        for manager in &mut self.managers {
            manager.forget(row);
        }
        self.requests.remove(row);
        self.pool.note_change();
    }

    /// Releases the blocks that no later token of a request will read, `total_computed_tokens` being
    /// computed. An unknown request is none.
    ///
    /// # Errors
    /// `OutOfMemory`; nothing is released then.
    pub fn remove_skipped_blocks(
        &mut self,
        request_id: &str,
        hint: Option<RequestRow>,
        total_computed_tokens: u32,
        num_prompt_tokens: Option<u32>,
    ) -> Result<()> {
        let Some(row) = self.requests.find(request_id, hint) else {
            return Ok(());
        };
        Self::check_token_count("total_computed_tokens", total_computed_tokens)?;
        Self::check_token_count("num_prompt_tokens", num_prompt_tokens.unwrap_or(0))?;
        self.tables.reserve_edits(0, self.requests.len())?;
        let op = Op::RemoveSkipped { request: row.0, num_tokens: total_computed_tokens };
        self.pool.history.begin(op);
        for index in 0..self.managers.len() {
            let manager = &self.managers[index];
            let state = self.group_state(manager, Some(row));
            let spans = manager.skipped_ranges(&state, total_computed_tokens, num_prompt_tokens);
            self.release_ranges(row, GroupId::from_index(index), spans);
        }
        Ok(())
    }

    /// Positions become null and their blocks go back.
    fn release_ranges(&mut self, row: RequestRow, group: GroupId, spans: [Range<u32>; 2]) {
        for span in spans {
            if !span.is_empty() {
                let blocks = &self.tables.row(row, group)[span.start as usize..span.end as usize];
                let blocks = blocks.iter().rev().copied();
                self.pool.history.note_all(Effect::Released, blocks);
                self.pool.release_from_row(self.tables.null_range(row, group, span));
            }
        }
    }

    /// Forgets the prefix cache, if nothing is held. Whether it did.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn reset_prefix_cache(&mut self) -> Result<bool> {
        let done = self.pool.reset_prefix_cache()?;
        if done && self.config.log_stats {
            self.prefix_cache_stats.reset = true;
        }
        Ok(done)
    }

    // ------------------------------------------------------------------------------------ reading

    /// A snapshot of a request's blocks; empty groups for an unknown request.
    pub fn get_blocks(&self, request_id: &str, hint: Option<RequestRow>) -> KVCacheBlocks {
        let Some(row) = self.requests.find(request_id, hint) else {
            return self.empty_kv_cache_blocks();
        };
        let groups = self.managers.iter().map(|manager| self.tables.row(row, manager.group()));
        KVCacheBlocks::from_groups(groups, self.pool.id(), self.pool.epoch())
    }

    /// How many blocks a request has in all groups together, null blocks included; 0 for an unknown
    /// request. That is what it costs to give the request up.
    pub fn num_blocks_held(&self, request_id: &str) -> usize {
        self.requests.find(request_id, None).map_or(0, |row| self.row_length(row))
    }

    fn row_length(&self, row: RequestRow) -> usize {
        self.managers.iter().map(|manager| self.tables.row(row, manager.group()).len()).sum()
    }

    /// The blocks that a request's first `num_computed_tokens` tokens fill.
    pub fn get_blocks_for_computed_tokens(
        &self,
        request_id: &str,
        hint: Option<RequestRow>,
        num_computed_tokens: u32,
    ) -> KVCacheBlocks {
        let Some(row) = self.requests.find(request_id, hint) else {
            return self.empty_kv_cache_blocks();
        };
        let across_ranks = self.config.semantics.computed_ids_under_cp;
        let groups = self.managers.iter().map(|manager| {
            let blocks = self.tables.row(row, manager.group());
            let filled =
                manager.num_blocks_for_computed_tokens(blocks, num_computed_tokens, across_ranks);
            &blocks[..filled]
        });
        KVCacheBlocks::from_groups(groups, self.pool.id(), self.pool.epoch())
    }

    /// For each group, how many leading blocks of a request all tracked requests share; 0 for an
    /// unknown request and while caching is off.
    pub fn get_num_common_prefix_blocks(&self, request_id: &str) -> SmallVec<[usize; 4]> {
        let row = match self.coordinator {
            KVCacheCoordinator::NoPrefixCache => None,
            KVCacheCoordinator::Unitary | KVCacheCoordinator::Hybrid(_) => {
                self.requests.find(request_id, None)
            }
        };
        let rule = self.config.semantics.common_prefix;
        let tracked = length(self.requests.len());
        self.managers
            .iter()
            .map(|manager| {
                row.map_or(0, |row| {
                    let blocks = self.tables.row(row, manager.group());
                    manager.num_common_prefix_blocks(&self.pool, blocks, tracked, rule)
                })
            })
            .collect()
    }

    /// Ids newly allocated since the last call, in group order, for engines that zero new blocks;
    /// ids may repeat or be free again. Needs `track_new_blocks`.
    pub fn take_new_block_ids(&mut self) -> Vec<BlockId> {
        let mut ids = Vec::new();
        for manager in &mut self.managers {
            ids.extend_from_slice(manager.new_block_ids());
            manager.clear_new_block_ids();
        }
        ids
    }

    /// Statistics since the last call; none unless they are kept.
    pub fn make_prefix_cache_stats(&mut self) -> Option<PrefixCacheStats> {
        self.config.log_stats.then(|| std::mem::take(&mut self.prefix_cache_stats))
    }

    /// Statistics so far.
    pub fn prefix_cache_stats(&self) -> Option<&PrefixCacheStats> {
        self.config.log_stats.then_some(&self.prefix_cache_stats)
    }
}

impl KVCacheManager {
    fn group_state(
        &self,
        manager: &SingleTypeKVCacheManager,
        row: Option<RequestRow>,
    ) -> GroupState<'_> {
        match row {
            None => GroupState { number: None, row: &[], num_cached: None },
            Some(row) => GroupState {
                number: Some(row),
                row: self.tables.row(row, manager.group()),
                num_cached: manager.num_cached_block(row),
            },
        }
    }
}
