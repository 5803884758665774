//! What a call of `allocate_slots` must keep to (`manager.md` §10). Checked before anything is planned.

use super::{AllocateSlots, KVCacheManager};
use crate::error::{KVCacheError, Result};
use crate::id::{BlockId, RequestRow};
use crate::single_type::SingleTypeKVCacheManager;

impl KVCacheManager {
    pub(super) fn check_call(
        &self,
        call: &AllocateSlots<'_>,
        row: Option<RequestRow>,
        tracked: bool,
        attaches_hits: bool,
    ) -> Result<()> {
        if call.num_new_tokens == 0 && call.num_external_computed_tokens == 0 {
            return Err(KVCacheError::argument(
                "num_new_tokens",
                format!(
                    "request {:?} has no new and no external tokens to allocate",
                    call.request.request_id
                ),
            ));
        }
        let computed = u64::from(call.request.view.num_computed_tokens)
            + u64::from(call.num_new_computed_tokens)
            + u64::from(call.num_external_computed_tokens);
        let new = u64::from(call.num_new_tokens) + u64::from(call.num_lookahead_tokens);
        if computed + new > u64::from(u32::MAX / 2) {
            return Err(KVCacheError::argument("num_new_tokens", "the token counts are too large"));
        }
        if call.num_external_computed_tokens > 0 && computed > self.config.max_model_len.into() {
            return Err(KVCacheError::argument(
                "num_external_computed_tokens",
                format!(
                    "{computed} computed tokens exceed max_model_len {}",
                    self.config.max_model_len
                ),
            ));
        }
        self.check_hits(call, tracked)?;
        let has_blocks = |row| {
            self.managers.iter().any(|manager| !self.tables.row(row, manager.group()).is_empty())
        };
        if attaches_hits && row.is_some_and(has_blocks) {
            return Err(KVCacheError::AlreadyTracked { request: call.request.request_id.into() });
        }
        Ok(())
    }

    fn check_hits(&self, call: &AllocateSlots<'_>, tracked: bool) -> Result<()> {
        let mismatch = |reason: String| Err(KVCacheError::argument("new_computed_blocks", reason));
        let Some(blocks) = call.new_computed_blocks.filter(|blocks| !blocks.is_empty()) else {
            return match call.num_new_computed_tokens {
                0 => Ok(()),
                tokens => mismatch(format!("no blocks for num_new_computed_tokens={tokens}")),
            };
        };
        if tracked {
            return Err(KVCacheError::AlreadyTracked { request: call.request.request_id.into() });
        }
        if !self.config.enable_caching {
            return mismatch("caching is off, there are no hits".into());
        }
        if blocks.pool() != self.pool.id() {
            return Err(KVCacheError::ForeignBlock {
                what: "the hit".into(),
                found: blocks.pool(),
                expected: self.pool.id(),
            });
        }
        if blocks.num_groups() != self.managers.len() {
            return mismatch(format!(
                "blocks of {} groups, the manager has {}",
                blocks.num_groups(),
                self.managers.len()
            ));
        }
        for (index, manager) in self.managers.iter().enumerate() {
            let hits = blocks.blocks(index);
            let tokens = hits.len() as u64 * u64::from(manager.block_size());
            let wanted = u64::from(call.num_new_computed_tokens);
            if tokens > wanted || (tokens != wanted && !blocks.has_own_lengths()) {
                return mismatch(format!(
                    "group {index} has blocks of {tokens} tokens, num_new_computed_tokens is {}",
                    call.num_new_computed_tokens
                ));
            }
            for block in hits {
                self.check_hit(call, manager, *block, blocks.epoch())?;
            }
        }
        Ok(())
    }

    fn check_hit(
        &self,
        call: &AllocateSlots<'_>,
        manager: &SingleTypeKVCacheManager,
        block: BlockId,
        epoch: u64,
    ) -> Result<()> {
        if block.is_null() {
            return Ok(());
        }
        let key = self.pool.block_key(block);
        if key.is_none() || self.pool.changed_since(block, epoch) {
            let what = match (key, self.pool.ref_cnt(block)) {
                (None, 0) => "evicted",
                _ => "re-allocated",
            };
            let request = call.request.request_id.into();
            return Err(KVCacheError::StaleBlock { block, request, what });
        }
        match key {
            Some(key) if key.group != manager.group() => Err(KVCacheError::argument(
                "new_computed_blocks",
                format!("block {block} caches group {}, not group {}", key.group, manager.group()),
            )),
            _ => Ok(()),
        }
    }
}
