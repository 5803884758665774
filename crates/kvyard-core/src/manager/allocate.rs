//! `allocate_slots`: planned, given its memory, applied. The steps are those of `manager.md` §6.3.
//!
//! Token axis: `[computed | local hit | external | new | look-ahead]`.

use std::ops::Range;

use smallvec::SmallVec;

use super::KVCacheManager;
use super::cache_blocks::span;
use super::plan::{AllocatePlan, AllocateSlots, GroupPlan};
use crate::blocks::KVCacheBlocks;
use crate::error::{CHECKED, KVCacheError, Result};
use crate::event_log::EventReserve;
use crate::id::{GroupId, NULL_BLOCK, RequestRow, length};
use crate::memory::Grow;
use crate::request_view::RequestStatus;
use crate::semantics::StatsOn;
use crate::single_type::{Demand, GroupState, SingleTypeKVCacheManager, num_evictable};

/// Token counts of one call, derived once.
struct Tokens {
    /// Computed, local and external, clamped to the longest request.
    total: u32,
    /// With the new ones.
    main: u32,
    /// With look-ahead, clamped.
    slots: u32,
    local: u32,
    external: u32,
}

impl KVCacheManager {
    /// Blocks for a request's next tokens: the newly allocated ones (hits and external blocks not
    /// among them), or none if they do not fit.
    ///
    /// # Errors
    /// See `plan_allocate_slots`. After an error nothing has changed; after a refusal only blocks that
    /// no later token reads are released.
    pub fn allocate_slots(&mut self, call: &AllocateSlots<'_>) -> Result<Option<KVCacheBlocks>> {
        let mut plan = AllocatePlan::new(self, call);
        self.plan(&mut plan)?;
        self.reserve_allocate_slots(&mut plan)?;
        Ok(self.apply_allocate_slots(plan))
    }

    /// Decides without changing anything.
    ///
    /// # Errors
    /// `InvalidArgument` for nothing to do, external tokens beyond the longest request, hits that do
    /// not match `num_new_computed_tokens` or the groups, or too few hashes; `AlreadyTracked` for
    /// hits of a request that has blocks; `ForeignBlock` or `StaleBlock` for hits of another pool or
    /// of earlier days.
    pub fn plan_allocate_slots<'a>(&self, call: &AllocateSlots<'a>) -> Result<AllocatePlan<'a>> {
        let mut plan = AllocatePlan::new(self, call);
        self.plan(&mut plan)?;
        Ok(plan)
    }

    fn plan(&self, plan: &mut AllocatePlan<'_>) -> Result<()> {
        let call = &plan.call;
        let tracked = self.is_running(plan.row);
        plan.attaches_hits = !tracked
            && (call.num_external_computed_tokens > 0
                || call.new_computed_blocks.is_some_and(|blocks| !blocks.is_empty()));
        if CHECKED && !self.is_plain_step(call) {
            self.check_call(call, plan.row, tracked, plan.attaches_hits)?;
        }
        plan.groups.make_room(self.managers.len())?;
        self.plan_slots(plan)?;
        if !plan.admitted && self.gives_up_lookahead(plan) {
            plan.call.num_lookahead_tokens = 0;
            plan.groups.clear();
            self.plan_slots(plan)?;
        }
        Ok(())
    }

    /// Steps 3 to 12 of a call that keeps its contract.
    fn plan_slots(&self, plan: &mut AllocatePlan<'_>) -> Result<()> {
        let (call, row) = (&plan.call, plan.row);
        let waiting =
            matches!(call.request.view.status, RequestStatus::Waiting | RequestStatus::Preempted);
        let watermark = if call.has_scheduled_reqs && waiting { self.watermark_blocks } else { 0 };
        let tokens = self.tokens(call);
        if call.full_sequence_must_fit {
            let whole = self.whole_sequence(call, &tokens, plan.attaches_hits);
            let wanted = self.num_blocks_to_allocate(call, row, &whole) + i64::from(watermark);
            if wanted > self.num_free_blocks() {
                plan.groups.resize_with(self.managers.len(), GroupPlan::default);
                return Ok(());
            }
        }
        let freed = self.plan_release(call, row, &tokens, &mut plan.groups);
        let free = self.pool.num_free_blocks() as u64 + freed;
        let demand = Self::demand(call, &tokens, plan.attaches_hits);
        let predicted = self.num_blocks_to_allocate(call, row, &demand);
        let available = i128::from(free) - i128::from(call.reserved_blocks);
        if i128::from(predicted) + i128::from(watermark) > available {
            return Ok(());
        }
        let taken = self.plan_groups(call, row, &demand, &mut plan.groups)?;
        plan.admitted = taken <= free;
        Ok(())
    }

    /// Grows what the plan will fill: rows, logs, tables, the result.
    ///
    /// # Errors
    /// `InvalidArgument` for a plan of another state or another manager; `OutOfMemory`. Nothing but
    /// capacity has changed.
    pub fn reserve_allocate_slots(&mut self, plan: &mut AllocatePlan<'_>) -> Result<()> {
        if CHECKED && !self.is_current(plan) {
            return Err(KVCacheError::argument(
                "plan",
                "the manager has changed since this was planned, or another one planned it: plan again",
            ));
        }
        self.reserve(plan)?;
        plan.is_reserved = true;
        Ok(())
    }

    fn reserve(&mut self, plan: &mut AllocatePlan<'_>) -> Result<()> {
        if !plan.admitted {
            return self.tables.reserve_edits(0, self.requests.len());
        }
        let row = if let Some(row) = plan.row {
            row
        } else {
            self.requests.reserve(plan.call.request.request_id)?;
            self.requests.next_row()
        };
        if plan.is_idle() {
            return plan.fresh.reserve(self.managers.len(), 0);
        }
        let (mut appended, mut taken) = (0, 0);
        let (mut new_keys, mut events) = (0, EventReserve::default());
        let mut returned = 0;
        for (index, group) in plan.groups.iter().enumerate() {
            let hits = plan.call.hits(index).len() - group.attachment.hits_from;
            let new_blocks = group.num_new_blocks() as usize;
            let nulls = (group.attachment.padding + group.new.nulls) as usize;
            let row_blocks = nulls + hits + group.new.moved.len() + new_blocks;
            let manager = &mut self.managers[index];
            self.tables.reserve(row, manager.group(), row_blocks)?;
            manager.reserve_row(row, new_blocks, group.cached.len())?;
            self.pool.events.reserve_group(manager.group())?;
            appended += row_blocks;
            returned +=
                row_blocks - hits - (group.attachment.padding + group.attachment.external) as usize;
            taken += new_blocks;
            new_keys += group.cached.len();
            let (request, size) = (plan.call.request, manager.block_size());
            events += self.pool.events_of_stores(request, group.cached.len(), size);
        }
        events += self.pool.events_of_evictions(taken);
        plan.fresh.reserve(self.managers.len(), returned)?;
        self.tables.reserve_edits(appended, self.requests.len() + 1)?;
        self.pool.reserve(taken, new_keys, events)
    }

    fn is_current(&self, plan: &AllocatePlan<'_>) -> bool {
        plan.revision == self.pool.revision() && plan.fresh.pool() == self.pool.id()
    }

    /// Carries the plan out, for which memory was reserved.
    ///
    /// # Panics
    /// If the manager has changed since it was planned, or no memory was reserved.
    pub fn apply_allocate_slots(&mut self, plan: AllocatePlan<'_>) -> Option<KVCacheBlocks> {
        assert!(!CHECKED || self.is_current(&plan), "a plan is good for the state it was made for");
        assert!(!CHECKED || plan.is_reserved, "reserve_allocate_slots comes before");
        let is_idle = plan.is_idle();
        let AllocatePlan { call, row, admitted, attaches_hits, groups, mut fresh, .. } = plan;
        if is_idle {
            self.pool.begin_change();
            groups.iter().for_each(|_| fresh.push_group(&[]));
            return Some(fresh);
        }
        self.begin_allocate(&call, row, admitted);
        if let Some(row) = row {
            for (index, group) in groups.iter().enumerate() {
                self.release_ranges(row, GroupId::from_index(index), group.released.clone());
            }
        }
        if !admitted {
            return None;
        }
        self.pool.begin_change();
        let row = row.unwrap_or_else(|| {
            self.record_admission(&call);
            self.requests.insert(call.request.request_id)
        });
        if attaches_hits {
            self.attach_hits(row, &call, &groups);
        }
        let fresh = self.take_new_blocks(row, &groups, fresh);
        for (manager, group) in self.managers.iter_mut().zip(groups) {
            if !group.cached.is_empty() {
                let blocks = self.tables.row(row, manager.group());
                let call = span(call.request, blocks, manager, group.cached.clone());
                self.pool.apply_cache_full_blocks(&call);
                manager.set_num_cached_block(row, group.cached.end);
                let positions = group.cached.start as usize..group.cached.end as usize;
                manager.note_cached(&self.pool, &blocks[positions]);
            }
        }
        Some(fresh)
    }

    /// What the history tells of the call.
    fn begin_allocate(
        &mut self,
        call: &AllocateSlots<'_>,
        row: Option<RequestRow>,
        admitted: bool,
    ) {
        let history = &mut self.pool.history;
        if let Some(row) = row {
            return history.begin(call.as_op(row, admitted));
        }
        let row = self.requests.next_row();
        let op = call.as_op(row, admitted);
        if !admitted {
            return history.begin_of(op, call.request.request_id);
        }
        if let Some(name) = self.requests.last_name(row) {
            history.row_passes_on(row, name);
        }
        history.begin(op);
    }

    // ------------------------------------------------------------------------------- plan: counting

    /// Whether any group has offered blocks of the request to the cache: its hits were attached or
    /// its first block filled.
    fn is_running(&self, row: Option<RequestRow>) -> bool {
        row.is_some_and(|row| {
            self.managers.iter().any(|manager| manager.num_cached_block(row).is_some())
        })
    }

    fn tokens(&self, call: &AllocateSlots<'_>) -> Tokens {
        let local = call.request.view.num_computed_tokens + call.num_new_computed_tokens;
        let external = call.num_external_computed_tokens;
        let total = (local + external).min(self.config.max_model_len);
        let main = total + call.num_new_tokens;
        let slots = (main + call.num_lookahead_tokens).min(self.config.max_model_len);
        Tokens { total, main, slots, local, external }
    }

    /// Whether a call that was refused goes on without its look-ahead, because no other request holds
    /// a block: to refuse it would be to refuse it for ever. A fault of 0.25.1 that
    /// `gate_counts_lookahead` mends.
    fn gives_up_lookahead(&self, plan: &AllocatePlan<'_>) -> bool {
        if !self.config.semantics.gate_counts_lookahead || plan.call.num_lookahead_tokens == 0 {
            return false;
        }
        let own = self.managers.iter().map(|manager| {
            let state = self.group_state(manager, plan.row);
            state.row.iter().filter(|block| !block.is_null()).count()
        });
        self.pool.num_free_blocks() + own.sum::<usize>() == self.pool.num_usable_blocks() as usize
    }

    fn num_free_blocks(&self) -> i64 {
        i64::from(length(self.pool.num_free_blocks()))
    }

    /// Step 7's demand: this step.
    fn demand(call: &AllocateSlots<'_>, tokens: &Tokens, attaches_hits: bool) -> Demand {
        Demand {
            num_tokens: tokens.slots,
            num_tokens_main: tokens.main,
            total_computed: tokens.local + tokens.external,
            external: tokens.external,
            num_encoder_tokens: call.num_encoder_tokens,
            attaches_hits,
            capped_with_lookahead: None,
        }
    }

    /// Step 5's demand: the whole sequence. Look-ahead is counted where the semantics say so.
    fn whole_sequence(
        &self,
        call: &AllocateSlots<'_>,
        tokens: &Tokens,
        attaches_hits: bool,
    ) -> Demand {
        let longest = self.config.max_model_len;
        let lookahead = if self.config.semantics.gate_counts_lookahead {
            tokens.slots.saturating_sub(tokens.main)
        } else {
            0
        };
        let main = call.request.view.num_tokens.min(longest);
        Demand {
            num_tokens: main.saturating_add(lookahead).min(longest),
            num_tokens_main: main,
            total_computed: tokens.total,
            external: tokens.external,
            num_encoder_tokens: call.num_encoder_tokens,
            attaches_hits,
            capped_with_lookahead: Some(lookahead),
        }
    }

    fn num_blocks_to_allocate(
        &self,
        call: &AllocateSlots<'_>,
        row: Option<RequestRow>,
        demand: &Demand,
    ) -> i64 {
        let group = |(index, manager): (usize, &SingleTypeKVCacheManager)| {
            let state = self.group_state(manager, row);
            manager.num_blocks_to_allocate(&self.pool, &state, call.hits(index), demand)
        };
        self.managers.iter().enumerate().map(group).sum()
    }

    // ---------------------------------------------------------------------------- plan: what to do

    /// Step 6: what no later token reads. Tokens of steps still in flight are not over yet. Returns
    /// how many blocks that frees.
    fn plan_release(
        &self,
        call: &AllocateSlots<'_>,
        row: Option<RequestRow>,
        tokens: &Tokens,
        groups: &mut SmallVec<[GroupPlan; 2]>,
    ) -> u64 {
        let view = &call.request.view;
        let processed = tokens.total.saturating_sub(view.num_in_flight_tokens);
        let mut freed = 0;
        for manager in &self.managers {
            let state = self.group_state(manager, row);
            let released = manager.skipped_ranges(&state, processed, Some(view.num_prompt_tokens));
            let unused = released
                .iter()
                .flat_map(|span| &state.row[span.start.min(span.end) as usize..span.end as usize]);
            let unused = unused.filter(|block| self.pool.ref_cnt(**block) == 1);
            freed += unused.count() as u64;
            groups.push(GroupPlan { released, ..GroupPlan::default() });
        }
        freed
    }

    /// Steps 9 to 12, for each group. Returns how many free blocks they take.
    fn plan_groups(
        &self,
        call: &AllocateSlots<'_>,
        row: Option<RequestRow>,
        demand: &Demand,
        groups: &mut SmallVec<[GroupPlan; 2]>,
    ) -> Result<u64> {
        let mut taken = 0;
        for (index, (manager, plan)) in self.managers.iter().zip(groups).enumerate() {
            let state = self.group_state(manager, row);
            let hits = call.hits(index);
            let (mut len, mut offered) = (length(state.row.len()), state.num_cached);
            if demand.attaches_hits {
                plan.attachment = manager.plan_attachment(hits, demand);
                let attached = &hits[plan.attachment.hits_from..];
                len += plan.attachment.padding + length(attached.len());
                offered = manager.offers_attached_blocks().then_some(len);
                len += plan.attachment.external;
                taken += u64::from(num_evictable(&self.pool, attached));
            }
            plan.new = manager.plan_new_blocks(&state, len, demand);
            len += plan.new.nulls + (plan.new.moved.end - plan.new.moved.start) + plan.new.fresh;
            taken += u64::from(plan.num_new_blocks());
            if self.config.enable_caching && !call.delay_cache_blocks {
                plan.cached = self.plan_caching(call, manager, &state, (offered, len), demand)?;
            }
        }
        Ok(taken)
    }

    /// Step 12: full blocks whose tokens are final, drafts excluded.
    fn plan_caching(
        &self,
        call: &AllocateSlots<'_>,
        manager: &SingleTypeKVCacheManager,
        state: &GroupState<'_>,
        (offered, len): (Option<u32>, u32),
        demand: &Demand,
    ) -> Result<Range<u32>> {
        let commit = demand.num_tokens_main.min(call.request.view.num_tokens);
        let commit = self.coordinator.num_cacheable_tokens(manager, commit);
        let start = offered.unwrap_or(0);
        let stop = (commit / manager.block_size()).min(len);
        if start >= stop {
            return Ok(0..0);
        }
        let spanned = span(call.request, state.row, manager, start..stop);
        self.pool.plan_cache_full_blocks(&spanned, state.row.len())?;
        Ok(start..stop)
    }

    // ---------------------------------------------------------------------------------------- apply

    /// Under `stats_on` admission a request counts when it gets its row, not at each lookup.
    fn record_admission(&mut self, call: &AllocateSlots<'_>) {
        let view = &call.request.view;
        if self.config.log_stats
            && self.config.enable_caching
            && self.config.semantics.stats_on == StatsOn::Admission
            && !view.skip_reading_prefix_cache
        {
            self.prefix_cache_stats.record(view, call.num_new_computed_tokens);
        }
    }

    /// Step 9, in two phases over all groups: no group's external blocks may evict another's hits.
    fn attach_hits(&mut self, row: RequestRow, call: &AllocateSlots<'_>, groups: &[GroupPlan]) {
        let pool = &mut self.pool;
        for (index, (manager, group)) in self.managers.iter_mut().zip(groups).enumerate() {
            let hits = &call.hits(index)[group.attachment.hits_from..];
            let padding = group.attachment.padding as usize;
            self.tables.append_with(row, manager.group(), |blocks| {
                blocks.resize(blocks.len() + padding, NULL_BLOCK);
                for block in hits {
                    pool.attach_to_row(*block);
                }
                blocks.extend_from_slice(hits);
            });
            if manager.offers_attached_blocks() {
                manager.set_num_cached_block(row, length(padding + hits.len()));
            }
        }
        for (manager, group) in self.managers.iter_mut().zip(groups) {
            let external = group.attachment.external;
            self.tables.append_with(row, manager.group(), |blocks| {
                let start = blocks.len();
                pool.take_for_row(external, blocks);
                manager.record_new_blocks(&blocks[start..]);
            });
        }
    }

    /// Step 10, and what the call returns: what was appended, nulls and moved blocks included.
    fn take_new_blocks(
        &mut self,
        row: RequestRow,
        groups: &[GroupPlan],
        mut appended: KVCacheBlocks,
    ) -> KVCacheBlocks {
        let pool = &mut self.pool;
        for (manager, plan) in self.managers.iter_mut().zip(groups) {
            let (group, new) = (manager.group(), &plan.new);
            let before = self.tables.row(row, group).len();
            if new.nulls > 0 || !new.moved.is_empty() {
                self.tables.append_with(row, group, |blocks| {
                    blocks.resize(blocks.len() + new.nulls as usize, NULL_BLOCK);
                    blocks.extend_from_within(new.moved.start as usize..new.moved.end as usize);
                });
                // The moved blocks keep their references: only their old places are given up.
                self.tables.null_range(row, group, new.moved.clone()).for_each(drop);
            }
            self.tables.append_with(row, group, |blocks| {
                let start = blocks.len();
                pool.take_for_row(new.fresh, blocks);
                manager.record_new_blocks(&blocks[start..]);
            });
            manager.note_allocated(row, new);
            appended.push_group(&self.tables.row(row, group)[before..]);
        }
        appended
    }
}
