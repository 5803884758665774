//! The operations on a manager as data: one language for property tests, the fuzzer, benches and the
//! history of a manager.
//!
//! In a history, operands are what they say: a request is its row. In a schedule they are small numbers
//! that a `world::World` (feature `testing`) maps onto what it has (the third of its requests, a block that
//! somebody holds), so that any list of operations means something.

use crate::error::KVCacheError;
use crate::id::{BlockId, RequestRow};

/// A block as an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "testing", derive(arbitrary::Arbitrary))]
pub enum BlockChoice {
    /// One of the references handed out, if there are any.
    HandedOut(u8),
    /// Any id up to the first that does not exist, the null block among them.
    Any(u8),
}

/// What beside its tokens enters a request's hashes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "testing", derive(arbitrary::Arbitrary))]
pub enum Identity {
    /// Nothing.
    #[default]
    Plain,
    /// An adapter.
    Lora,
    /// A cache salt.
    Salt,
    /// Two media items, the second after the first.
    Media,
}

/// Which lookup result an allocation uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "testing", derive(arbitrary::Arbitrary))]
pub enum HitUse {
    /// None.
    #[default]
    Nothing,
    /// That of a lookup made just now: the contract.
    Fresh,
    /// That of the request's last lookup, which may be stale by now.
    Last,
}

/// Arguments of an `allocate_slots`, as operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "testing", derive(arbitrary::Arbitrary))]
pub struct AllocateOp {
    /// Which request.
    #[cfg_attr(feature = "testing", arbitrary(with = small))]
    pub request: u32,
    /// New tokens, at most those that the request still has to compute; a few drafts on top.
    #[cfg_attr(feature = "testing", arbitrary(with = small))]
    pub num_new_tokens: u32,
    /// Drafts.
    #[cfg_attr(feature = "testing", arbitrary(with = small))]
    pub num_draft_tokens: u32,
    /// The hit.
    pub hit: HitUse,
    /// Extra slots for a drafter.
    #[cfg_attr(feature = "testing", arbitrary(with = small))]
    pub num_lookahead_tokens: u32,
    /// Tokens from a connector.
    #[cfg_attr(feature = "testing", arbitrary(with = small))]
    pub num_external_computed_tokens: u32,
    /// Tokens of steps in flight.
    #[cfg_attr(feature = "testing", arbitrary(with = small))]
    pub num_in_flight_tokens: u32,
    /// Blocks promised to others.
    #[cfg_attr(feature = "testing", arbitrary(with = small))]
    pub reserved_blocks: u32,
    /// One bit each: delay caching, gate on the whole sequence, others are scheduled, plan and apply
    /// in two calls.
    pub flags: u8,
}

impl AllocateOp {
    /// Bit of `flags`: cache the blocks later.
    pub const DELAY_CACHE_BLOCKS: u8 = 1;
    /// Bit of `flags`: refuse a request whose whole sequence cannot fit.
    pub const FULL_SEQUENCE_MUST_FIT: u8 = 2;
    /// Bit of `flags`: no other request is scheduled.
    pub const NOTHING_SCHEDULED: u8 = 4;
    /// Bit of `flags`: plan, reserve and apply are separate calls.
    pub const SPLIT: u8 = 8;
    /// Bit of `flags`, in a history: the blocks did not fit.
    pub const REFUSED: u8 = 16;

    /// Whether a bit of `flags` is set.
    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// A call that breaks the contract, whatever the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "testing", derive(arbitrary::Arbitrary))]
pub enum Misuse {
    /// `allocate_slots` for no tokens.
    NothingToAllocate,
    /// Computed tokens beyond the longest request.
    ExternalBeyondMaxModelLen,
    /// Token counts that would overflow.
    HugeCounts,
    /// Hit tokens without blocks.
    HitWithoutBlocks,
    /// A hit that does not match its tokens.
    HitMismatch,
    /// The hit of another manager.
    ForeignHit,
    /// The lease of another pool.
    ForeignLease,
    /// `cache_blocks` of a request that holds nothing.
    CacheUnknownRequest,
    /// `cache_blocks` beyond the row.
    CacheBeyondRow,
    /// Block ids that do not exist.
    NoSuchBlock,
    /// A mask of the wrong length.
    MaskLength,
    /// A group id that no key can hold.
    NoSuchGroup,
    /// More blocks than there are.
    TooManyBlocks,
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "testing", derive(arbitrary::Arbitrary))]
pub enum Op {
    /// A request of `shared` tokens of one of a few prefixes and `own` tokens of its own.
    NewRequest {
        /// Which prefix.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        prefix: u32,
        /// How much of it.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        shared: u32,
        /// Own tokens.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        own: u32,
        /// What else enters its hashes.
        identity: Identity,
    },
    /// Outputs arrive.
    Append {
        /// Which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
        /// How many.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        count: u32,
    },
    /// The scheduler sets the computed tokens.
    SetComputed {
        /// Which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
        /// To what, at most its tokens.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        num_tokens: u32,
    },
    /// The request loses its blocks and waits again.
    Preempt {
        /// Which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
    },
    /// `get_computed_blocks`.
    Lookup {
        /// Which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
    },
    /// `allocate_slots`.
    Allocate(AllocateOp),
    /// `cache_blocks`.
    CacheBlocks {
        /// Which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
        /// Up to which token; at most those computed.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        num_tokens: u32,
    },
    /// `free`; the request is done.
    Free {
        /// Which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
    },
    /// `pop_blocks_for_free`; the request is done.
    Pop {
        /// Which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
    },
    /// A lease goes back.
    FreeLease {
        /// Which lease.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        lease: u32,
        /// Through `KVCacheManager::free_popped`, else `BlockPool::free`.
        through_manager: bool,
    },
    /// A lease's references are only counted from now on.
    DissolveLease {
        /// Which lease.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        lease: u32,
    },
    /// `lease_counted`.
    LeaseCounted {
        /// Which blocks.
        blocks: Vec<BlockChoice>,
    },
    /// `free_counted`.
    FreeCounted {
        /// Which blocks.
        blocks: Vec<BlockChoice>,
    },
    /// `get_new_blocks`.
    GetNewBlocks {
        /// How many.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        count: u32,
    },
    /// `touch`.
    Touch {
        /// Which blocks.
        blocks: Vec<BlockChoice>,
    },
    /// The pool's `cache_full_blocks`, for blocks that stand in no row.
    CacheFull {
        /// Whose hashes.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
        /// Position of the first block.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        start: u32,
        /// Which blocks.
        blocks: Vec<BlockChoice>,
        /// Which are worth a key, one bit each; none: all.
        mask: Option<u8>,
        /// The group, where there are several.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        group: u32,
    },
    /// The pool's `cache_partial_block`.
    CachePartial {
        /// Whose hashes.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
        /// Which block.
        block: BlockChoice,
        /// The boundary, in hash blocks.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        boundary: u32,
        /// The group, where there are several.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        group: u32,
    },
    /// `evict_blocks`.
    Evict {
        /// Which blocks.
        blocks: Vec<BlockChoice>,
    },
    /// `reset_prefix_cache`.
    Reset,
    /// Events are taken.
    TakeEvents,
    /// `take_new_block_ids`.
    TakeNewBlockIds,
    /// Everything that only reads.
    Read {
        /// Which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
    },
    /// `free` with `num_written_tokens`; the request is done.
    FreeWritten {
        /// Which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
        /// How many tokens were written.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        num_tokens: u32,
    },
    /// `remove_skipped_blocks`.
    RemoveSkipped {
        /// Which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
        /// Computed tokens, at most its tokens.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        num_tokens: u32,
    },
    /// A breach of contract.
    Misuse {
        /// Which.
        kind: Misuse,
        /// Of which request.
        #[cfg_attr(feature = "testing", arbitrary(with = small))]
        request: u32,
    },
}

/// As a call, for people; what a history does not keep is left out.
impl std::fmt::Display for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NewRequest { .. } => f.write_str("Request()"),
            Self::Append { count, .. } => write!(f, "append_output_token_ids({count} tokens)"),
            Self::SetComputed { num_tokens, .. } => write!(f, "num_computed_tokens = {num_tokens}"),
            Self::Preempt { .. } => f.write_str("preempt()"),
            Self::Lookup { .. } => f.write_str("get_computed_blocks()"),
            Self::Allocate(op) => op.fmt(f),
            Self::CacheBlocks { num_tokens, .. } => {
                write!(f, "cache_blocks(num_computed_tokens={num_tokens})")
            }
            Self::Free { .. } => f.write_str("free()"),
            Self::FreeWritten { num_tokens, .. } => {
                write!(f, "free(num_written_tokens={num_tokens})")
            }
            Self::Pop { .. } => f.write_str("pop_blocks_for_free()"),
            Self::FreeLease { through_manager: true, .. } => f.write_str("free_popped()"),
            Self::FreeLease { through_manager: false, .. } => f.write_str("free_blocks(lease)"),
            Self::DissolveLease { .. } => f.write_str("dissolve(lease)"),
            Self::LeaseCounted { .. } => f.write_str("lease_counted()"),
            Self::FreeCounted { .. } => f.write_str("free_blocks(list)"),
            Self::GetNewBlocks { count } => write!(f, "get_new_blocks({count})"),
            Self::Touch { .. } => f.write_str("touch()"),
            Self::CacheFull { start, group, .. } => {
                write!(f, "cache_full_blocks(num_cached_blocks={start}, kv_cache_group_id={group})")
            }
            Self::CachePartial { boundary, group, .. } => {
                write!(f, "cache_partial_block(num_tokens={boundary}, kv_cache_group_id={group})")
            }
            Self::Evict { .. } => f.write_str("evict_blocks()"),
            Self::Reset => f.write_str("reset_prefix_cache()"),
            Self::TakeEvents => f.write_str("take_events()"),
            Self::TakeNewBlockIds => f.write_str("take_new_block_ids()"),
            Self::Read { .. } => f.write_str("get_blocks()"),
            Self::RemoveSkipped { num_tokens, .. } => {
                write!(f, "remove_skipped_blocks(total_computed_tokens={num_tokens})")
            }
            Self::Misuse { kind, .. } => write!(f, "misuse: {kind:?}"),
        }
    }
}

impl std::fmt::Display for AllocateOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "allocate_slots({} new tokens", self.num_new_tokens)?;
        if self.hit != HitUse::Nothing {
            f.write_str(", with a hit")?;
        }
        for (name, value) in [
            ("num_lookahead_tokens", self.num_lookahead_tokens),
            ("num_external_computed_tokens", self.num_external_computed_tokens),
            ("num_in_flight_tokens", self.num_in_flight_tokens),
            ("reserved_blocks", self.reserved_blocks),
        ] {
            if value > 0 {
                write!(f, ", {name}={value}")?;
            }
        }
        for (bit, text) in [
            (Self::DELAY_CACHE_BLOCKS, ", delay_cache_blocks"),
            (Self::FULL_SEQUENCE_MUST_FIT, ", full_sequence_must_fit"),
            (Self::NOTHING_SCHEDULED, ", nothing else scheduled"),
        ] {
            if self.has(bit) {
                f.write_str(text)?;
            }
        }
        f.write_str(if self.has(Self::REFUSED) { "): refused, too few blocks" } else { ")" })
    }
}

/// An operand of a schedule: few different numbers, so that operations meet.
#[cfg(feature = "testing")]
fn small(bytes: &mut arbitrary::Unstructured<'_>) -> arbitrary::Result<u32> {
    bytes.arbitrary::<u8>().map(u32::from)
}

/// What an operation did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// There was nothing to do it with.
    Nothing,
    /// It was done.
    Done,
    /// It was refused, as it may be.
    Refused,
    /// A lookup found this many tokens.
    Hit(u32),
    /// Blocks that were handed out, or newly allocated.
    Blocks(Vec<BlockId>),
    /// Whether the cache was reset.
    Reset(bool),
    /// It was misuse.
    Error(KVCacheError),
}

impl Op {
    /// In a history, the row of the request that it is about.
    pub fn row(&self) -> Option<RequestRow> {
        match self {
            Self::Append { request, .. }
            | Self::SetComputed { request, .. }
            | Self::Preempt { request }
            | Self::Lookup { request }
            | Self::Allocate(AllocateOp { request, .. })
            | Self::CacheBlocks { request, .. }
            | Self::Free { request }
            | Self::FreeWritten { request, .. }
            | Self::Pop { request }
            | Self::Read { request }
            | Self::RemoveSkipped { request, .. } => Some(RequestRow(*request)),
            _ => None,
        }
    }
}

impl From<Result<(), KVCacheError>> for Outcome {
    fn from(result: Result<(), KVCacheError>) -> Self {
        result.map_or_else(Self::Error, |()| Self::Done)
    }
}
