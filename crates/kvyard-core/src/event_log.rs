//! What happened to the prefix cache, in order, for routers: one flat log that is written in place
//! and reused. Python objects and wire bytes are two readers of it.
//!
//! Only what a caller may see of a change is kept: its kind, its group, the hashes, and one copy of
//! the token ids. With events off, recording costs one branch.

use std::sync::Arc;

use crate::block_hash::BlockHash;
use crate::error::Result;
use crate::hashing::{ExtraKey, ExtraKeySource};
use crate::id::GroupId;
use crate::memory::Grow;
use crate::prefix_map::PrefixKey;
use crate::request_view::BlockContent;

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Stored,
    Removed,
    Cleared,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    kind: Kind,
    group: GroupId,
    /// Ends in the flat arrays (of extra keys: in `extras_ends`); a record starts where the one before
    /// it ends.
    hashes_end: usize,
    tokens_end: usize,
    extras_end: usize,
    parent: Option<BlockHash>,
    /// Position in `predecessors` + 1; 0: the parent is what comes before.
    predecessor: u32,
    block_size: u32,
    /// Where it is another one: that of the group; else 0.
    group_block_size: u32,
    /// Position in `origins` + 1; 0: none.
    origin: u32,
}

/// What a whole request adds to its tokens.
#[derive(Clone, Debug)]
struct Origin {
    adapter: Option<EventAdapter>,
    cache_salt: Option<Arc<str>>,
}

/// The adapter that a store belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventAdapter {
    /// vLLM's `lora_int_id`.
    pub id: i64,
    /// vLLM's `lora_name`.
    pub name: Arc<str>,
}

/// For each of several blocks its extra keys, in order; empty if no block has any.
#[derive(Clone, Copy, Debug)]
pub struct BlockExtraKeys<'a> {
    keys: &'a [ExtraKey],
    ends: &'a [usize],
    start: usize,
}

impl<'a> BlockExtraKeys<'a> {
    /// Whether no block has any.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Block by block; a block may have none.
    pub fn iter(&self) -> impl Iterator<Item = &'a [ExtraKey]> + use<'a> {
        let keys = self.keys;
        let starts = std::iter::once(self.start).chain(self.ends.iter().copied());
        starts.zip(self.ends).map(|(start, end)| &keys[start..*end])
    }
}

/// One change, as a reader sees it. Field names are vLLM's (`distributed/kv_events.py`).
#[derive(Clone, Copy, Debug)]
pub enum KVCacheEvent<'a> {
    /// Blocks became available for reuse.
    BlockStored {
        /// One for each stored block, in order.
        block_hashes: &'a [BlockHash],
        /// The prefix that the first of them continues.
        parent_block_hash: Option<&'a BlockHash>,
        /// What the first of them really follows, where the parent is only the nearest ancestor that
        /// is cached: tokens between the two are not told.
        predecessor_block_hash: Option<&'a BlockHash>,
        /// Tokens of the announced span.
        token_ids: &'a [u32],
        /// Tokens per block; of a boundary inside a block, the tokens that the event covers.
        block_size: u32,
        /// Of a boundary inside a block (case C17): tokens per block of the group.
        group_block_size: Option<u32>,
        /// The adapter, if any.
        adapter: Option<&'a EventAdapter>,
        /// The request's salt, if any, also where the span does not hold the first block.
        cache_salt: Option<&'a str>,
        /// For each hash the extra keys of its block; empty if no block has any.
        extra_keys: BlockExtraKeys<'a>,
        /// The group.
        group: GroupId,
    },
    /// Blocks are no longer available.
    BlockRemoved {
        /// Always one in what the pool records.
        block_hashes: &'a [BlockHash],
        /// The group.
        group: GroupId,
    },
    /// The whole cache was reset.
    AllBlocksCleared,
}

/// Which changes anybody wants to know; a reset is always told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventFilter {
    /// Groups to tell of; none: all.
    pub groups: Option<Vec<GroupId>>,
    /// Fewest tokens of a block that a key must cover to be told: leaves out groups of small blocks,
    /// and boundaries near the start of a block.
    pub min_block_tokens: u32,
}

/// The filter, as it is asked.
#[derive(Debug)]
struct Filter {
    wanted: EventFilter,
    /// Tokens per block of each group, from its stores: removals come after them.
    block_sizes: Vec<u32>,
}

impl Filter {
    fn lets_pass(&self, group: GroupId, covered_tokens: u32, block_size: u32) -> bool {
        let in_block = || (covered_tokens.max(1) - 1) % block_size.max(1) + 1;
        (self.wanted.min_block_tokens <= 1 || in_block() >= self.wanted.min_block_tokens)
            && self.wanted.groups.as_ref().is_none_or(|groups| groups.contains(&group))
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct EventLog {
    enabled: bool,
    filter: Option<Box<Filter>>,
    records: Vec<Record>,
    hashes: Vec<BlockHash>,
    tokens: Vec<u32>,
    extras: Vec<ExtraKey>,
    /// Ends of the blocks' keys in `extras`.
    extras_ends: Vec<usize>,
    origins: Vec<Origin>,
    predecessors: Vec<BlockHash>,
}

/// How much one call may add to the log. What a call does in several places is added up first: room
/// asked for twice is the same room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventReserve {
    /// Records.
    pub records: usize,
    /// Block hashes.
    pub hashes: usize,
    /// Token ids.
    pub tokens: usize,
    /// Extra keys of blocks.
    pub extra_keys: usize,
}

impl std::ops::AddAssign for EventReserve {
    fn add_assign(&mut self, other: Self) {
        self.records += other.records;
        self.hashes += other.hashes;
        self.tokens += other.tokens;
        self.extra_keys += other.extra_keys;
    }
}

impl EventLog {
    /// An empty log; with `enabled` false nothing is ever recorded.
    pub fn new(enabled: bool) -> Self {
        Self { enabled, ..Self::default() }
    }

    /// Whether changes are recorded.
    #[inline]
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// How many changes are waiting.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// How many token ids are waiting: most of what a reader of the log has to copy.
    pub fn num_token_ids(&self) -> usize {
        self.tokens.len()
    }

    /// Whether no change is waiting.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Makes room, so that recording cannot fail.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn reserve(&mut self, wanted: EventReserve) -> Result<()> {
        // Most decoded tokens fill no block.
        if self.enabled && wanted.records > 0 {
            self.records.make_room(wanted.records)?;
            self.hashes.make_room(wanted.hashes)?;
            self.tokens.make_room(wanted.tokens)?;
            self.extras.make_room(wanted.extra_keys)?;
            self.extras_ends.make_room(wanted.hashes)?;
            self.origins.make_room(wanted.records)?;
            self.predecessors.make_room(wanted.records)?;
        }
        Ok(())
    }

    /// Exchanges the log for an empty one (whose capacity is reused), so that it can be read while
    /// the pool goes on.
    pub fn take(&mut self, spare: &mut Self) {
        spare.clear();
        spare.enabled = self.enabled;
        spare.filter = self.filter.take();
        std::mem::swap(self, spare);
    }

    /// Forgets what is waiting and keeps the capacity.
    pub fn clear(&mut self) {
        self.records.clear();
        self.hashes.clear();
        self.tokens.clear();
        self.extras.clear();
        self.extras_ends.clear();
        self.origins.clear();
        self.predecessors.clear();
    }

    /// The waiting changes, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = KVCacheEvent<'_>> {
        let starts = std::iter::once((0, 0, 0)).chain(
            self.records
                .iter()
                .map(|record| (record.hashes_end, record.tokens_end, record.extras_end)),
        );
        self.records.iter().zip(starts).map(|(record, (hashes, tokens, extras))| {
            let block_hashes = &self.hashes[hashes..record.hashes_end];
            let origin = (record.origin as usize).checked_sub(1).map(|at| &self.origins[at]);
            match record.kind {
                Kind::Cleared => KVCacheEvent::AllBlocksCleared,
                Kind::Removed => KVCacheEvent::BlockRemoved { block_hashes, group: record.group },
                Kind::Stored => KVCacheEvent::BlockStored {
                    block_hashes,
                    parent_block_hash: record.parent.as_ref(),
                    predecessor_block_hash: (record.predecessor as usize)
                        .checked_sub(1)
                        .map(|at| &self.predecessors[at]),
                    token_ids: &self.tokens[tokens..record.tokens_end],
                    block_size: record.block_size,
                    group_block_size: Some(record.group_block_size).filter(|size| *size > 0),
                    adapter: origin.and_then(|origin| origin.adapter.as_ref()),
                    cache_salt: origin.and_then(|origin| origin.cache_salt.as_deref()),
                    extra_keys: BlockExtraKeys {
                        start: extras.checked_sub(1).map_or(0, |last| self.extras_ends[last]),
                        ends: &self.extras_ends[extras..record.extras_end],
                        keys: &self.extras,
                    },
                    group: record.group,
                },
            }
        })
    }

    pub(crate) fn set_filter(&mut self, wanted: EventFilter) {
        let is_needed = wanted != EventFilter::default();
        self.filter = is_needed.then(|| Box::new(Filter { wanted, block_sizes: Vec::new() }));
    }

    /// Makes room to note a group's block size, which a filter needs.
    pub(crate) fn reserve_group(&mut self, group: GroupId) -> Result<()> {
        if let Some(filter) = &mut self.filter
            && let Some(missing) = (group.index() + 1).checked_sub(filter.block_sizes.len())
        {
            filter.block_sizes.make_room(missing)?;
            filter.block_sizes.resize(group.index() + 1, 0);
        }
        Ok(())
    }

    /// Whether a key of a group would be told.
    #[inline]
    pub(crate) fn tells(&self, group: GroupId, covered_tokens: u32, block_size: u32) -> bool {
        let filter = self.filter.as_ref();
        filter.is_none_or(|filter| filter.lets_pass(group, covered_tokens, block_size))
    }

    /// Whether a store is to be recorded; notes the group's block size.
    #[inline]
    pub(crate) fn wants_store(
        &mut self,
        group: GroupId,
        covered_tokens: u32,
        block_size: u32,
    ) -> bool {
        if let Some(filter) = &mut self.filter {
            filter.block_sizes[group.index()] = block_size;
        }
        self.enabled && self.tells(group, covered_tokens, block_size)
    }

    #[inline]
    pub(crate) fn record_removed(&mut self, key: &PrefixKey) {
        if !self.enabled {
            return;
        }
        if let Some(filter) = &self.filter {
            let size = filter.block_sizes.get(key.group.index()).copied().unwrap_or(0);
            if !filter.lets_pass(key.group, key.covered_tokens, size) {
                return;
            }
        }
        self.hashes.push(key.hash);
        self.push(Kind::Removed, key.group, None, 0, 0);
    }

    pub(crate) fn record_cleared(&mut self) {
        if self.enabled {
            self.push(Kind::Cleared, GroupId(0), None, 0, 0);
        }
    }

    /// Begins a store; `add_stored` and `end_stored` follow.
    pub(crate) fn add_stored(
        &mut self,
        hash: BlockHash,
        keys: &ExtraKeySource,
        span: std::ops::Range<usize>,
        media_cursor: isize,
    ) -> isize {
        self.hashes.push(hash);
        if keys.is_empty() {
            return media_cursor;
        }
        let cursor = keys.append_block_keys(span, media_cursor, &mut self.extras);
        self.extras_ends.push(self.extras.len());
        cursor
    }

    /// Ends a store: tokens of `span`, what was added since the record before.
    pub(crate) fn end_stored(
        &mut self,
        content: &BlockContent<'_>,
        span: std::ops::Range<usize>,
        parent: Option<BlockHash>,
        block_size: u32,
        group: GroupId,
    ) {
        let first = content.first_token;
        self.tokens.extend_from_slice(&content.token_ids[span.start - first..span.end - first]);
        let (lora, salt) = (content.keys.lora(), content.keys.cache_salt());
        let mut origin = 0;
        if lora.is_some() || salt.is_some() {
            self.origins.push(Origin {
                adapter: lora
                    .map(|lora| EventAdapter { id: lora.id, name: lora.name.text.clone() }),
                cache_salt: salt.map(|salt| salt.text.clone()),
            });
            origin = u32::try_from(self.origins.len()).expect("origins are bounded by records");
        }
        self.push(Kind::Stored, group, parent, block_size, origin);
    }

    fn push(
        &mut self,
        kind: Kind,
        group: GroupId,
        parent: Option<BlockHash>,
        block_size: u32,
        origin: u32,
    ) {
        self.records.push(Record {
            kind,
            group,
            hashes_end: self.hashes.len(),
            tokens_end: self.tokens.len(),
            extras_end: self.extras_ends.len(),
            parent,
            predecessor: 0,
            block_size,
            group_block_size: 0,
            origin,
        });
    }

    /// Tells that the store that ended last is of a boundary inside a block of so many tokens.
    pub(crate) fn set_group_block_size(&mut self, block_size: u32) {
        if let Some(record) = self.records.last_mut() {
            record.group_block_size = block_size;
        }
    }

    /// Tells what the store that ended last really follows, where its parent is not that.
    pub(crate) fn set_predecessor(&mut self, hash: BlockHash) {
        if let Some(record) = self.records.last_mut() {
            self.predecessors.push(hash);
            let number = u32::try_from(self.predecessors.len());
            record.predecessor = number.expect("predecessors are bounded by records");
        }
    }
}
