//! The operations of a schedule as data: one language for property tests, the fuzzer and benches,
//! and the [`World`] that carries them out and checks after each what must hold.
//!
//! Operands are small numbers that the world maps onto what it has (the third of its requests, a
//! block that somebody holds), so that any list of operations means something. Most keep the
//! contract; what breaks it is expected to be refused, with nothing changed.

mod audit;
mod misuse;
mod pool;
mod presets;
mod world;

pub use presets::presets;
pub use world::{World, WorldConfig};

use arbitrary::Arbitrary;

use crate::error::KVCacheError;
use crate::id::BlockId;

/// A block as an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Arbitrary)]
pub enum BlockChoice {
    /// One of the references handed out, if there are any.
    HandedOut(u8),
    /// Any id up to the first that does not exist, the null block among them.
    Any(u8),
}

/// What beside its tokens enters a request's hashes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Arbitrary)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Arbitrary)]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Arbitrary)]
pub struct AllocateOp {
    /// Which request.
    pub request: u8,
    /// New tokens, at most those that the request still has to compute; a few drafts on top.
    pub num_new_tokens: u8,
    /// Drafts.
    pub num_draft_tokens: u8,
    /// The hit.
    pub hit: HitUse,
    /// Extra slots for a drafter.
    pub num_lookahead_tokens: u8,
    /// Tokens from a connector.
    pub num_external_computed_tokens: u8,
    /// Tokens of steps in flight.
    pub num_in_flight_tokens: u8,
    /// Blocks promised to others.
    pub reserved_blocks: u8,
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

    pub(crate) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// A call that breaks the contract, whatever the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Arbitrary)]
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
#[derive(Clone, Debug, PartialEq, Eq, Arbitrary)]
pub enum Op {
    /// A request of `shared` tokens of one of a few prefixes and `own` tokens of its own.
    NewRequest {
        /// Which prefix.
        prefix: u8,
        /// How much of it.
        shared: u8,
        /// Own tokens.
        own: u8,
        /// What else enters its hashes.
        identity: Identity,
    },
    /// Outputs arrive.
    Append {
        /// Which request.
        request: u8,
        /// How many.
        count: u8,
    },
    /// The scheduler sets the computed tokens.
    SetComputed {
        /// Which request.
        request: u8,
        /// To what, at most its tokens.
        num_tokens: u8,
    },
    /// The request loses its blocks and waits again.
    Preempt {
        /// Which request.
        request: u8,
    },
    /// `get_computed_blocks`.
    Lookup {
        /// Which request.
        request: u8,
    },
    /// `allocate_slots`.
    Allocate(AllocateOp),
    /// `cache_blocks`.
    CacheBlocks {
        /// Which request.
        request: u8,
        /// Up to which token; at most those computed.
        num_tokens: u8,
    },
    /// `free`; the request is done.
    Free {
        /// Which request.
        request: u8,
    },
    /// `pop_blocks_for_free`; the request is done.
    Pop {
        /// Which request.
        request: u8,
    },
    /// A lease goes back.
    FreeLease {
        /// Which lease.
        lease: u8,
        /// Through `KVCacheManager::free_popped`, else `BlockPool::free`.
        through_manager: bool,
    },
    /// A lease's references are only counted from now on.
    DissolveLease {
        /// Which lease.
        lease: u8,
    },
    /// `free_counted`.
    FreeCounted {
        /// Which blocks.
        blocks: Vec<BlockChoice>,
    },
    /// `get_new_blocks`.
    GetNewBlocks {
        /// How many.
        count: u8,
    },
    /// `touch`.
    Touch {
        /// Which blocks.
        blocks: Vec<BlockChoice>,
    },
    /// The pool's `cache_full_blocks`, for blocks that stand in no row.
    CacheFull {
        /// Whose hashes.
        request: u8,
        /// Position of the first block.
        start: u8,
        /// Which blocks.
        blocks: Vec<BlockChoice>,
        /// Which are worth a key, one bit each; none: all.
        mask: Option<u8>,
        /// The group, where there are several.
        group: u8,
    },
    /// The pool's `cache_partial_block`.
    CachePartial {
        /// Whose hashes.
        request: u8,
        /// Which block.
        block: BlockChoice,
        /// The boundary, in hash blocks.
        boundary: u8,
        /// The group, where there are several.
        group: u8,
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
        request: u8,
    },
    /// `remove_skipped_blocks`.
    RemoveSkipped {
        /// Which request.
        request: u8,
        /// Computed tokens, at most its tokens.
        num_tokens: u8,
    },
    /// A breach of contract.
    Misuse {
        /// Which.
        kind: Misuse,
        /// Of which request.
        request: u8,
    },
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

impl From<Result<(), KVCacheError>> for Outcome {
    fn from(result: Result<(), KVCacheError>) -> Self {
        result.map_or_else(Self::Error, |()| Self::Done)
    }
}
