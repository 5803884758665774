//! `cache_blocks`: giving keys to blocks whose caching `allocate_slots` delayed.

use std::ops::Range;

use smallvec::SmallVec;

use super::KVCacheManager;
use crate::caching::CacheFullBlocks;
use crate::error::{KVCacheError, Result};
use crate::event_log::EventReserve;
use crate::id::{BlockId, RequestRow};
use crate::memory::Grow;
use crate::op::Op;
use crate::request_view::RequestCall;
use crate::single_type::SingleTypeKVCacheManager;

impl KVCacheManager {
    /// Offers the blocks that the first `num_computed_tokens` tokens of a request fill to the prefix
    /// cache, where `allocate_slots` delayed it. Repeats and smaller numbers do nothing.
    ///
    /// # Errors
    /// `UnknownRequest` if it has no row; `InvalidArgument` for tokens beyond its row or its hashes.
    /// Nothing is cached then.
    pub fn cache_blocks(
        &mut self,
        request: &RequestCall<'_>,
        hint: Option<RequestRow>,
        num_computed_tokens: u32,
    ) -> Result<()> {
        if !self.config.enable_caching {
            return Ok(());
        }
        let Some(row) = self.requests.find(request.request_id, hint) else {
            return Err(KVCacheError::UnknownRequest { request: request.request_id.into() });
        };
        Self::check_token_count("num_computed_tokens", num_computed_tokens)?;
        let mut spans: SmallVec<[(u32, u32); 4]> = SmallVec::new();
        spans.make_room(self.managers.len())?;
        for manager in &self.managers {
            let blocks = self.tables.row(row, manager.group());
            let cacheable = self.coordinator.num_cacheable_tokens(manager, num_computed_tokens);
            let stop = cacheable / manager.block_size();
            if stop as usize > blocks.len() {
                return Err(KVCacheError::argument(
                    "num_computed_tokens",
                    format!(
                        "{num_computed_tokens} tokens fill {stop} blocks, request {:?} has {}",
                        request.request_id,
                        blocks.len()
                    ),
                ));
            }
            let start = manager.num_cached_block(row).unwrap_or(0);
            if start < stop {
                let call = span(request, blocks, manager, start..stop);
                self.pool.plan_cache_full_blocks(&call, blocks.len())?;
            }
            spans.push((start, stop));
        }
        let (mut new_keys, mut events) = (0, EventReserve::default());
        for (manager, (start, stop)) in self.managers.iter_mut().zip(&spans) {
            let blocks = stop.saturating_sub(*start) as usize;
            manager.reserve_row(row, 0, blocks)?;
            self.pool.events.reserve_group(manager.group())?;
            new_keys += blocks;
            events += self.pool.events_of_stores(request, blocks, manager.block_size());
        }
        if new_keys == 0 {
            return Ok(());
        }
        self.pool.reserve(0, new_keys, events)?;
        let op = Op::CacheBlocks { request: row.0, num_tokens: num_computed_tokens };
        self.pool.history.begin(op);
        self.pool.begin_change();
        for (manager, (start, stop)) in self.managers.iter_mut().zip(&spans) {
            if start < stop {
                let blocks = self.tables.row(row, manager.group());
                let call = span(request, blocks, manager, *start..*stop);
                self.pool.apply_cache_full_blocks(&call);
                manager.set_num_cached_block(row, *stop);
                manager.note_cached(&self.pool, &blocks[*start as usize..*stop as usize]);
            }
        }
        Ok(())
    }
}

/// A span of a request's row in one group, to be cached.
pub(super) fn span<'a>(
    request: &'a RequestCall<'a>,
    row: &'a [BlockId],
    manager: &SingleTypeKVCacheManager,
    positions: Range<u32>,
) -> CacheFullBlocks<'a> {
    CacheFullBlocks {
        request,
        row,
        start: positions.start as usize,
        stop: positions.end as usize,
        block_size: manager.block_size(),
        group: manager.group(),
        mask: manager.reachable_blocks(request.view.num_prompt_tokens),
    }
}
