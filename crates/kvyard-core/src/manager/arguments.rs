//! What a call of `allocate_slots` must keep to (`manager.md` §10). Checked before anything is planned.

use super::{AllocateSlots, KVCacheManager};
use crate::error::{KVCacheError, Result};
use crate::id::{BlockId, RequestRow};
use crate::prefix_map::SoughtBlock;
use crate::single_type::SingleTypeKVCacheManager;

/// Token counts above this are no counts of a request: sums of two of them still fit 32 bits.
const MOST_TOKENS: u32 = u32::MAX / 4;

/// New tokens beyond the longest request that a call may ask for: drafts of a last step.
const MOST_BEYOND: u64 = 1 << 16;

impl KVCacheManager {
    /// Refuses a token count that no request can have.
    pub(super) fn check_token_count(argument: &'static str, num_tokens: u32) -> Result<()> {
        if num_tokens <= MOST_TOKENS {
            return Ok(());
        }
        Err(KVCacheError::argument(argument, format!("{num_tokens} is more than {MOST_TOKENS}")))
    }

    /// Whether a call is a step of decoding or prefill that cannot be wrong: some tokens, not too many,
    /// and nothing found or loaded elsewhere. Most calls are.
    #[inline]
    pub(super) fn is_plain_step(&self, call: &AllocateSlots<'_>) -> bool {
        let most = self.config.max_model_len;
        call.new_computed_blocks.is_none()
            && call.num_new_computed_tokens | call.num_external_computed_tokens == 0
            && call.request.view.num_computed_tokens <= MOST_TOKENS
            && call.num_new_tokens.wrapping_sub(1) < most
            && call.num_lookahead_tokens <= 1 << 15
    }

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
        let longest = u64::from(self.config.max_model_len);
        if computed > u64::from(MOST_TOKENS) || new > longest + MOST_BEYOND {
            return Err(KVCacheError::argument(
                "num_new_tokens",
                format!(
                    "{computed} computed and {new} new tokens are far beyond max_model_len {longest}"
                ),
            ));
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
                what: format!("the hit for request {:?}", call.request.request_id),
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
            let hashes = self.pool.merged_hashes(call.request, manager.block_size());
            if hashes.len() < hits.len() {
                return mismatch(format!(
                    "group {index} has {} blocks, request {:?} has hashes of {}",
                    hits.len(),
                    call.request.request_id,
                    hashes.len()
                ));
            }
            for (position, block) in hits.iter().enumerate() {
                self.check_hit(call, manager, *block, hashes.sought(position), blocks.epoch())?;
            }
        }
        Ok(())
    }

    fn check_hit(
        &self,
        call: &AllocateSlots<'_>,
        manager: &SingleTypeKVCacheManager,
        block: BlockId,
        sought: SoughtBlock<'_>,
        epoch: u64,
    ) -> Result<()> {
        if block.is_null() {
            if !manager.kind().is_full_attention() {
                return Ok(());
            }
            return Err(KVCacheError::argument(
                "new_computed_blocks",
                format!(
                    "group {} reads all blocks, the null block cannot be a hit",
                    manager.group()
                ),
            ));
        }
        let key = self.pool.block_key(block);
        if key.is_none() || self.pool.changed_since(block, epoch) {
            let what = match (key, self.pool.ref_cnt(block)) {
                (None, 0) => "evicted",
                _ => "re-allocated",
            };
            let request = Some(call.request.request_id.into());
            return Err(KVCacheError::StaleBlock { block, request, what });
        }
        match key {
            Some(key) if key.group != manager.group() => Err(KVCacheError::argument(
                "new_computed_blocks",
                format!("block {block} caches group {}, not group {}", key.group, manager.group()),
            )),
            _ if !self.pool.prefix.carries(block, sought, manager.group()) => {
                Err(KVCacheError::argument(
                    "new_computed_blocks",
                    format!(
                        "block {block} caches other tokens than request {:?} has there; look up again",
                        call.request.request_id
                    ),
                ))
            }
            _ => Ok(()),
        }
    }
}
