//! What `allocate_slots` is asked, and what it will do.

use std::ops::Range;

use smallvec::SmallVec;

use super::KVCacheManager;
use crate::blocks::KVCacheBlocks;
use crate::id::{BlockId, RequestRow};
use crate::op::{AllocateOp, HitUse, Op};
use crate::request_view::RequestCall;
use crate::single_type::{Attachment, NewBlocks};

/// Arguments of `allocate_slots`; the names are vLLM's, the units tokens unless said.
#[derive(Clone, Copy, Debug)]
pub struct AllocateSlots<'a> {
    /// The request.
    pub request: &'a RequestCall<'a>,
    /// Where the caller saw the request's row last; may be wrong.
    pub row_hint: Option<RequestRow>,
    /// To compute in this step, drafts included.
    pub num_new_tokens: u32,
    /// Local hit just found.
    pub num_new_computed_tokens: u32,
    /// Blocks of that hit.
    pub new_computed_blocks: Option<&'a KVCacheBlocks>,
    /// Extra slots for a drafter.
    pub num_lookahead_tokens: u32,
    /// Supplied by a connector.
    pub num_external_computed_tokens: u32,
    /// Tokens of the encoder that cross attention stores; only with the first allocation.
    pub num_encoder_tokens: u32,
    /// The blocks will be cached later, by `cache_blocks`.
    pub delay_cache_blocks: bool,
    /// Refuse a request whose whole sequence cannot fit.
    pub full_sequence_must_fit: bool,
    /// Blocks promised to others.
    pub reserved_blocks: u32,
    /// Others are scheduled, so the watermark applies to new requests.
    pub has_scheduled_reqs: bool,
}

impl<'a> AllocateSlots<'a> {
    /// `num_new_tokens` for a request, with vLLM's defaults of everything else.
    pub fn new(request: &'a RequestCall<'a>, num_new_tokens: u32) -> Self {
        Self {
            request,
            row_hint: None,
            num_new_tokens,
            num_new_computed_tokens: 0,
            new_computed_blocks: None,
            num_lookahead_tokens: 0,
            num_external_computed_tokens: 0,
            num_encoder_tokens: 0,
            delay_cache_blocks: false,
            full_sequence_must_fit: false,
            reserved_blocks: 0,
            has_scheduled_reqs: true,
        }
    }

    /// What the history keeps of it.
    pub(super) fn as_op(&self, row: RequestRow, admitted: bool) -> Op {
        let flag = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
        let has_hits = self.new_computed_blocks.is_some_and(|blocks| !blocks.is_empty());
        Op::Allocate(AllocateOp {
            request: row.0,
            num_new_tokens: self.num_new_tokens,
            num_draft_tokens: 0,
            hit: if has_hits { HitUse::Fresh } else { HitUse::Nothing },
            num_lookahead_tokens: self.num_lookahead_tokens,
            num_external_computed_tokens: self.num_external_computed_tokens,
            num_in_flight_tokens: self.request.view.num_in_flight_tokens,
            reserved_blocks: self.reserved_blocks,
            flags: flag(self.delay_cache_blocks, AllocateOp::DELAY_CACHE_BLOCKS)
                | flag(self.full_sequence_must_fit, AllocateOp::FULL_SEQUENCE_MUST_FIT)
                | flag(!self.has_scheduled_reqs, AllocateOp::NOTHING_SCHEDULED)
                | flag(!admitted, AllocateOp::REFUSED),
        })
    }

    pub(super) fn hits(&self, group: usize) -> &'a [BlockId] {
        self.new_computed_blocks.map_or(&[], |blocks| blocks.blocks(group))
    }
}

/// What the call does to one group.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupPlan {
    /// Positions released because no later token reads them.
    pub(super) released: [Range<u32>; 2],
    /// How a new row begins.
    pub(super) attachment: Attachment,
    /// How the row grows.
    pub(super) new: NewBlocks,
    /// Positions that get keys.
    pub(super) cached: Range<u32>,
}

impl GroupPlan {
    /// Whether the row stays as it is: a step of decoding inside a block.
    pub(super) fn is_idle(&self) -> bool {
        let grown = self.new.nulls + self.num_new_blocks();
        let released = self.released.iter().all(Range::is_empty);
        grown + self.attachment.padding == 0
            && self.new.moved.is_empty()
            && !self.new.sets_allocated
            && self.cached.is_empty()
            && released
    }

    /// Blocks taken from the pool.
    pub(super) fn num_new_blocks(&self) -> u32 {
        self.attachment.external + self.new.fresh
    }
}

/// What an `allocate_slots` will do. A refusal is a plan too: it releases what no later token reads,
/// and nothing else. Good for the state it was planned on.
#[derive(Clone, Debug)]
#[must_use = "a plan changes nothing until it is applied"]
pub struct AllocatePlan<'a> {
    pub(super) call: AllocateSlots<'a>,
    pub(super) row: Option<RequestRow>,
    pub(super) admitted: bool,
    pub(super) attaches_hits: bool,
    pub(super) groups: SmallVec<[GroupPlan; 2]>,
    /// What the call returns, to be filled.
    pub(super) fresh: KVCacheBlocks,
    pub(super) revision: u64,
    /// Memory was asked for.
    pub(super) is_reserved: bool,
}

impl<'a> AllocatePlan<'a> {
    pub(super) fn new(manager: &KVCacheManager, call: &AllocateSlots<'a>) -> Self {
        let pool = &manager.pool;
        Self {
            call: *call,
            row: manager.requests.find(call.request.request_id, call.row_hint),
            admitted: false,
            attaches_hits: false,
            groups: SmallVec::new(),
            fresh: KVCacheBlocks::builder(pool.id(), pool.epoch() + 1),
            revision: pool.revision(),
            is_reserved: false,
        }
    }

    /// Whether no row changes.
    pub(super) fn is_idle(&self) -> bool {
        let has_row = self.row.is_some() && !self.attaches_hits;
        has_row && self.admitted && self.groups.iter().all(GroupPlan::is_idle)
    }

    /// Whether the blocks fit.
    pub fn is_admitted(&self) -> bool {
        self.admitted
    }
}
