//! Giving keys to blocks: full blocks and boundaries inside a block. Checked first, then applied.
//!
//! Rules: `manager.md` §4.3, §4.4 and §8.2; vLLM's `cache_full_blocks` and `cache_partial_block`
//! (`v1/core/block_pool.py`).

use std::ops::Range;

use crate::block_hash::BlockHash;
use crate::block_pool::BlockPool;
use crate::error::{CHECKED, KVCacheError, Result};
use crate::event_log::EventReserve;
use crate::hashing::Fingerprint;
use crate::history::Effect;
use crate::id::{BlockId, GroupId, length};
use crate::op::{BlockChoice, Op};
use crate::prefix_map::{MAX_GROUP, PrefixKey, SoughtBlock};
use crate::request_view::{BlockContent, RequestCall};
use crate::semantics::SparseStoreEvent;

/// The hashes of a request at the granularity of one group: the hash of a coarse block is the one of
/// the last fine block in it. vLLM's `BlockHashListWithBlockSize`, as a view.
#[derive(Clone, Copy, Debug)]
pub struct MergedBlockHashes<'a> {
    fine: &'a [BlockHash],
    /// None where hits are not verified.
    fingerprints: Option<&'a [Fingerprint]>,
    factor: usize,
}

impl<'a> MergedBlockHashes<'a> {
    /// `block_size` must be a multiple of `hash_block_size`; the configuration checks it.
    pub fn new(fine: &'a [BlockHash], block_size: u32, hash_block_size: u32) -> Self {
        let factor = (block_size / hash_block_size).max(1) as usize;
        Self { fine, fingerprints: None, factor }
    }

    /// The same with the fingerprints that hits must have. Blocks without one count as incomplete.
    #[must_use]
    pub fn verified_by(self, fingerprints: &'a [Fingerprint]) -> Self {
        let fine = &self.fine[..self.fine.len().min(fingerprints.len())];
        Self { fine, fingerprints: Some(fingerprints), ..self }
    }

    /// Complete coarse blocks.
    #[inline]
    pub fn len(&self) -> usize {
        self.fine.len() / self.factor
    }

    /// Whether no coarse block is complete.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The hash of a coarse block.
    ///
    /// # Panics
    /// If that block is not complete.
    #[inline]
    pub fn get(&self, block: usize) -> &'a BlockHash {
        &self.fine[(block + 1) * self.factor - 1]
    }

    /// What a lookup of a coarse block asks for.
    ///
    /// # Panics
    /// If that block is not complete.
    #[inline]
    pub fn sought(&self, block: usize) -> SoughtBlock<'a> {
        let at = (block + 1) * self.factor - 1;
        let fingerprint = self.fingerprints.map(|fingerprints| fingerprints[at]);
        SoughtBlock { hash: &self.fine[at], fingerprint }
    }
}

/// A span of a row whose blocks get their full keys.
#[derive(Clone, Copy, Debug)]
pub struct CacheFullBlocks<'a> {
    /// The request.
    pub request: &'a RequestCall<'a>,
    /// Its whole row in the group.
    pub row: &'a [BlockId],
    /// First position.
    pub start: usize,
    /// Behind the last position.
    pub stop: usize,
    /// Tokens per block of the group.
    pub block_size: u32,
    /// The group.
    pub group: GroupId,
    /// Which positions are worth a key.
    pub mask: BlockMask<'a>,
}

/// Which positions of a row are worth a key.
#[derive(Clone, Copy, Debug)]
pub enum BlockMask<'a> {
    /// All of them.
    All,
    /// One flag for each position of the span.
    Flags(&'a [bool]),
    /// Those that a lookup can reach.
    Reachable(ReachableBlocks),
}

/// The positions that an aligned lookup can use in a group which needs only its last few blocks: the
/// last `need` of every `period`, and those before certain boundaries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReachableBlocks {
    /// Blocks between periodic boundaries; 0: there are none.
    pub period: u32,
    /// How many blocks before a boundary are used.
    pub need: u32,
    /// How many blocks behind it, because a drafter makes the last one void.
    pub shift: u32,
    /// Further boundaries, in blocks, shift included; 0: none.
    pub edges: [u32; 2],
}

impl ReachableBlocks {
    fn contains(&self, position: u32) -> bool {
        let periodic = self.period > 0
            && position >= self.shift
            && (position - self.shift) % self.period >= self.period - self.need;
        let before_edge = |edge: &u32| position < *edge && position + self.need >= *edge;
        periodic || self.edges.iter().any(before_edge)
    }
}

impl CacheFullBlocks<'_> {
    fn is_wanted(&self, position: usize, block: BlockId) -> bool {
        let is_worth_it = match &self.mask {
            BlockMask::All => true,
            BlockMask::Flags(flags) => flags[position - self.start],
            BlockMask::Reachable(reachable) => reachable.contains(length(position)),
        };
        is_worth_it && !block.is_null()
    }

    /// A manager's rows never name a block twice; a caller's list may, and the second key would undo
    /// the first.
    fn check_distinct(&self) -> Result<()> {
        let positions = self.start..self.stop;
        let mut blocks: Vec<BlockId> = positions
            .filter(|position| self.is_wanted(*position, self.row[*position]))
            .map(|position| self.row[position])
            .collect();
        blocks.sort_unstable();
        match blocks.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(KVCacheError::argument(
                "blocks",
                format!("block {} is listed twice, one block has one key", pair[0]),
            )),
            None => Ok(()),
        }
    }

    fn covered_tokens(&self, position: usize) -> u32 {
        length(position + 1) * self.block_size
    }

    fn tokens(&self, positions: Range<usize>) -> Range<usize> {
        let size = self.block_size as usize;
        positions.start * size..positions.end * size
    }
}

/// What the rules of a store event need to know.
struct StoreEvents<'a> {
    call: &'a CacheFullBlocks<'a>,
    hashes: MergedBlockHashes<'a>,
    content: BlockContent<'a>,
}

impl BlockPool {
    /// Gives the blocks of a span their full keys. A block with a shorter key loses that first.
    ///
    /// # Errors
    /// `InvalidArgument` for a mask, block size, group, hash list or row that does not fit; `NotOwned`
    /// for a block that nobody holds, or a request; `HashConflict` for one that has a full key already. Nothing is
    /// cached then.
    pub fn cache_full_blocks(&mut self, call: &CacheFullBlocks<'_>) -> Result<()> {
        if call.start >= call.stop {
            return Ok(());
        }
        self.plan_cache_full_blocks(call, call.stop)?;
        call.check_distinct()?;
        self.check_in_no_row(&call.row[call.start..call.stop])?;
        let blocks = call.stop - call.start;
        self.events.reserve_group(call.group)?;
        self.reserve(0, blocks, self.events_of_stores(call.request, blocks, call.block_size))?;
        let op = Op::CacheFull {
            request: 0,
            start: length(call.start),
            blocks: Vec::new(),
            mask: None,
            group: call.group.0,
        };
        self.history.begin_of(op, call.request.request_id);
        self.begin_change();
        self.apply_cache_full_blocks(call);
        Ok(())
    }

    /// Checks a span. Positions from `num_known` on are not in the row yet: they will be fresh blocks.
    pub(crate) fn plan_cache_full_blocks(
        &self,
        call: &CacheFullBlocks<'_>,
        num_known: usize,
    ) -> Result<()> {
        if !CHECKED {
            return Ok(());
        }
        self.check_group_and_size(call.group, call.block_size)?;
        if let BlockMask::Flags(flags) = call.mask
            && flags.len() != call.stop - call.start
        {
            return Err(KVCacheError::argument(
                "block_mask",
                format!("must have {} elements, one a block", call.stop - call.start),
            ));
        }
        let hash_block_size = self.config().hash_block_size;
        let hashes =
            MergedBlockHashes::new(call.request.block_hashes, call.block_size, hash_block_size);
        if hashes.len() < call.stop {
            return Err(KVCacheError::argument(
                "block_hashes",
                format!(
                    "request {:?} has hashes of {} blocks of {} tokens, {} are needed",
                    call.request.request_id,
                    hashes.len(),
                    call.block_size,
                    call.stop
                ),
            ));
        }
        self.check_fingerprints(
            call.request,
            call.stop * (call.block_size / hash_block_size) as usize,
        )?;
        self.check_content(call.request, call.tokens(call.start..call.stop))?;
        for position in call.start..call.stop.min(num_known) {
            let Some(block) = call.row.get(position).copied() else {
                return Err(KVCacheError::argument(
                    "num_full_blocks",
                    format!("{} is beyond the row of {} blocks", call.stop, call.row.len()),
                ));
            };
            self.check_block("blocks", block)?;
            if call.is_wanted(position, block) {
                self.check_keyable(block, call.group, call.covered_tokens(position))?;
            }
        }
        Ok(())
    }

    /// What caching a span of `blocks` blocks may add to the log.
    pub(crate) fn events_of_stores(
        &self,
        request: &RequestCall<'_>,
        blocks: usize,
        block_size: u32,
    ) -> EventReserve {
        let removals = blocks + self.prefix.num_aliases();
        EventReserve {
            records: blocks + removals,
            hashes: blocks + removals,
            tokens: blocks * block_size as usize,
            extra_keys: request.content.map_or(0, |content| content.keys.most_block_keys(blocks)),
        }
    }

    pub(crate) fn apply_cache_full_blocks(&mut self, call: &CacheFullBlocks<'_>) {
        let hashes = self.merged_hashes(call.request, call.block_size);
        let now = self.relative_epoch();
        for position in call.start..call.stop {
            let block = call.row[position];
            if call.is_wanted(position, block) {
                if self.prefix.is_cached(block) {
                    self.mark_lost(block, now);
                    self.history.note(Effect::Unkeyed, block);
                    self.drop_keys(block);
                }
                let SoughtBlock { hash, fingerprint } = hashes.sought(position);
                let covered_tokens = call.covered_tokens(position);
                self.history.note(Effect::Keyed, block);
                let key = PrefixKey { hash: *hash, group: call.group, covered_tokens };
                self.insert_key(block, key, fingerprint);
            }
        }
        let is_wanted = self.events.wants_store(call.group, call.block_size, call.block_size);
        if let Some(content) = call.request.content.filter(|_| is_wanted) {
            self.record_full_blocks(&StoreEvents { call, hashes, content });
        }
    }

    fn record_full_blocks(&mut self, events: &StoreEvents<'_>) {
        let call = events.call;
        let wanted = |position: &usize| call.is_wanted(*position, call.row[*position]);
        match self.config().semantics.sparse_store_event {
            SparseStoreEvent::OnePerCall => {
                let parent = call.start.checked_sub(1).map(|before| *events.hashes.get(before));
                let stored = (call.start..call.stop).filter(wanted);
                self.record_stored(events, stored, call.start..call.stop, parent);
            }
            SparseStoreEvent::OnePerRun => {
                let mut position = call.start;
                while let Some(start) = (position..call.stop).find(wanted) {
                    let stop = (start..call.stop).find(|at| !wanted(at)).unwrap_or(call.stop);
                    let parent = (0..start)
                        .rev()
                        .map(|before| *events.hashes.get(before))
                        .find(|hash| self.prefix.get(hash, call.group).is_some());
                    self.record_stored(events, start..stop, start..stop, parent);
                    let before = start.checked_sub(1).map(|before| *events.hashes.get(before));
                    if let Some(before) = before.filter(|hash| Some(*hash) != parent) {
                        self.events.set_predecessor(before);
                    }
                    position = stop;
                }
            }
        }
    }

    fn record_stored(
        &mut self,
        events: &StoreEvents<'_>,
        stored: impl Iterator<Item = usize>,
        span: Range<usize>,
        parent: Option<BlockHash>,
    ) {
        let (call, content) = (events.call, &events.content);
        let mut media_cursor = 0;
        for position in stored {
            let tokens = call.tokens(position..position + 1);
            let hash = *events.hashes.get(position);
            media_cursor = self.events.add_stored(hash, content.keys, tokens, media_cursor);
        }
        let tokens = call.tokens(span);
        self.events.end_stored(content, tokens, parent, call.block_size, call.group);
    }

    /// Makes a block of a row reachable from a boundary strictly inside it. Returns the key, also if
    /// the block had it already; none for the null block.
    ///
    /// # Errors
    /// `InvalidArgument` for a boundary that is not inside a block or beyond the hashes; `NotOwned` for
    /// a block that nobody holds.
    pub fn cache_partial_block(
        &mut self,
        request: &RequestCall<'_>,
        block: BlockId,
        num_tokens: u32,
        group: GroupId,
        block_size: u32,
    ) -> Result<Option<PrefixKey>> {
        if block.is_null() {
            return Ok(None);
        }
        let key = self.plan_partial_block(request, block, num_tokens, group, block_size)?;
        if self.prefix.contains(&key.hash, key.group, block) {
            return Ok(Some(key));
        }
        let is_promoted =
            self.prefix.primary(block).is_some_and(|old| old.covered_tokens < num_tokens);
        // What a promoted block announced before is withdrawn first, so it is no ancestor.
        let withdrawn = is_promoted.then_some(block);
        let (parent, start) = self.partial_parent(request, &key, block_size, withdrawn);
        self.check_content(request, start as usize..num_tokens as usize)?;
        self.prefix.reserve(1)?;
        self.prefix.reserve_alias()?;
        self.events.reserve_group(group)?;
        let keys = self.prefix.num_keys_of(block) + 1;
        let tokens = (num_tokens - start) as usize;
        let extra_keys = request.content.map_or(0, |content| content.keys.most_block_keys(1));
        self.events.reserve(EventReserve { records: keys, hashes: keys, tokens, extra_keys })?;
        let op = Op::CachePartial {
            request: 0,
            block: BlockChoice::Any(0),
            boundary: num_tokens,
            group: group.0,
        };
        self.history.begin_of(op, request.request_id);
        self.begin_change();
        if is_promoted {
            self.unkey(block);
        }
        self.history.note(Effect::Keyed, block);
        let boundary = (num_tokens / self.config().hash_block_size) as usize - 1;
        self.insert_key(block, key, request.fingerprints.get(boundary).copied());
        let is_wanted = self.events.wants_store(group, num_tokens, block_size);
        if let Some(content) = request.content.filter(|_| is_wanted) {
            let span = start as usize..num_tokens as usize;
            let rule = self.config().semantics.media_cursor;
            let cursor = content.keys.media_cursor_at(span.start, rule);
            self.events.add_stored(key.hash, content.keys, span.clone(), cursor);
            self.events.end_stored(&content, span, parent, num_tokens - start, group);
            self.events.set_group_block_size(block_size);
        }
        Ok(Some(key))
    }

    fn plan_partial_block(
        &self,
        request: &RequestCall<'_>,
        block: BlockId,
        num_tokens: u32,
        group: GroupId,
        block_size: u32,
    ) -> Result<PrefixKey> {
        self.check_group_and_size(group, block_size)?;
        self.check_block("block", block)?;
        let size = self.config().hash_block_size;
        if block_size == size
            || num_tokens.is_multiple_of(block_size)
            || !num_tokens.is_multiple_of(size)
        {
            return Err(KVCacheError::argument(
                "num_tokens",
                format!("{num_tokens} is no boundary of {size} inside a block of {block_size}"),
            ));
        }
        let Some(hash) = request.block_hashes.get((num_tokens / size) as usize - 1) else {
            return Err(KVCacheError::argument(
                "num_tokens",
                format!(
                    "{num_tokens} is beyond the {} hashes of {size} tokens",
                    request.block_hashes.len()
                ),
            ));
        };
        self.check_held(block)?;
        self.check_fingerprints(request, (num_tokens / size) as usize)?;
        Ok(PrefixKey { hash: *hash, group, covered_tokens: num_tokens })
    }

    /// What a store of a partial entry continues, and from which token on it tells the content.
    fn partial_parent(
        &self,
        request: &RequestCall<'_>,
        key: &PrefixKey,
        block_size: u32,
        withdrawn: Option<BlockId>,
    ) -> (Option<BlockHash>, u32) {
        let PrefixKey { group, covered_tokens: num_tokens, .. } = *key;
        let size = self.config().hash_block_size;
        let is_told = |at: usize| {
            let boundary = length(at + 1) * size;
            self.events.tells(group, boundary, block_size)
        };
        let before = &request.block_hashes[..(num_tokens / size) as usize - 1];
        match self.config().semantics.sparse_store_event {
            SparseStoreEvent::OnePerCall => (before.last().copied(), num_tokens - size),
            SparseStoreEvent::OnePerRun => before
                .iter()
                .enumerate()
                .rev()
                .find(|(at, hash)| {
                    let mut copies = self.prefix.copies(hash, group);
                    is_told(*at) && copies.any(|copy| Some(copy) != withdrawn)
                })
                .map_or((None, 0), |(at, hash)| (Some(*hash), length(at + 1) * size)),
        }
    }

    fn check_group_and_size(&self, group: GroupId, block_size: u32) -> Result<()> {
        if group.0 > MAX_GROUP {
            return Err(KVCacheError::argument(
                "kv_cache_group_id",
                format!("{group} is above the largest group id, {MAX_GROUP}"),
            ));
        }
        let size = self.config().hash_block_size;
        if block_size == 0 || !block_size.is_multiple_of(size) {
            return Err(KVCacheError::argument(
                "block_size",
                format!("{block_size} is no multiple of the hash block size {size}"),
            ));
        }
        if !self.config().enable_caching {
            return Err(KVCacheError::argument(
                "enable_caching",
                "this pool does not cache blocks",
            ));
        }
        Ok(())
    }

    fn check_keyable(&self, block: BlockId, group: GroupId, wanted: u32) -> Result<()> {
        self.check_held(block)?;
        match self.prefix.primary(block) {
            Some(key) if key.covered_tokens >= wanted => Err(KVCacheError::HashConflict {
                block,
                group,
                covered: key.covered_tokens,
                wanted,
            }),
            _ => Ok(()),
        }
    }

    fn check_held(&self, block: BlockId) -> Result<()> {
        if self.ref_cnt(block) > 0 {
            return Ok(());
        }
        Err(KVCacheError::NotOwned {
            block,
            reason: "nobody holds it, so it cannot be cached".into(),
        })
    }

    /// A request's hashes in blocks of a group, with the fingerprints that hits must have.
    pub(crate) fn merged_hashes<'a>(
        &self,
        request: &RequestCall<'a>,
        block_size: u32,
    ) -> MergedBlockHashes<'a> {
        let hash_block_size = self.config().hash_block_size;
        let hashes = MergedBlockHashes::new(request.block_hashes, block_size, hash_block_size);
        if self.config().verify_tokens { hashes.verified_by(request.fingerprints) } else { hashes }
    }

    /// Where hits are verified, every key needs a fingerprint.
    fn check_fingerprints(&self, request: &RequestCall<'_>, hash_blocks: usize) -> Result<()> {
        let known = request.fingerprints.len();
        if !self.config().verify_tokens || known >= hash_blocks {
            return Ok(());
        }
        Err(KVCacheError::argument(
            "fingerprints",
            format!(
                "verify_tokens is on: request {:?} has fingerprints of {known} hash blocks, \
                 {hash_blocks} are needed",
                request.request_id
            ),
        ))
    }

    /// A row's keys are its manager's to give: it knows whose tokens the blocks hold.
    fn check_in_no_row(&self, blocks: &[BlockId]) -> Result<()> {
        match blocks.iter().find(|block| self.row_references[block.index()] > 0) {
            Some(block) => Err(KVCacheError::NotOwned {
                block: *block,
                reason: "a request holds it; cache_blocks of its manager gives it keys".into(),
            }),
            None => Ok(()),
        }
    }

    /// With events on, the tokens of a span must be there to tell.
    fn check_content(&self, request: &RequestCall<'_>, span: Range<usize>) -> Result<()> {
        if !self.events.is_enabled() {
            return Ok(());
        }
        let known = request.content.map_or(0..0, |content| {
            content.first_token..content.first_token + content.token_ids.len()
        });
        if known.start <= span.start && span.end <= known.end {
            return Ok(());
        }
        Err(KVCacheError::argument(
            "content",
            format!(
                "events are on: the tokens {span:?} of request {:?} are needed, {known:?} are given",
                request.request_id
            ),
        ))
    }
}
