//! Misuse and bad configuration, as values. "Not enough blocks" is no error where a scheduler
//! expects it (`Ok(None)`); a broken invariant is a panic. Whatever returns one of these has changed
//! nothing.

use crate::id::{BlockId, GroupId};

/// What a caller did wrong. The Python exception of the same meaning is named in each variant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KVCacheError {
    /// `ConfigError`: a constructor argument.
    #[error("{field}: {reason}")]
    Config {
        /// Which argument.
        field: &'static str,
        /// What is wrong with it and what would be right.
        reason: String,
    },
    /// `InvalidArgumentError`: an argument of a call.
    #[error("{argument}: {reason}")]
    InvalidArgument {
        /// Which argument.
        argument: &'static str,
        /// What is wrong with it and what would be right.
        reason: String,
    },
    /// `OutOfBlocksError`: more blocks were demanded of the pool than it has.
    #[error("{wanted} blocks wanted, {free} of {total} are free")]
    OutOfBlocks {
        /// How many blocks the call needs.
        wanted: usize,
        /// How many are free.
        free: usize,
        /// How many the pool has, the null block not counted.
        total: usize,
    },
    /// `UnknownRequestError`: no such request holds blocks.
    #[error("request {request:?} holds no blocks in this manager")]
    UnknownRequest {
        /// The request's name, or its row.
        request: String,
    },
    /// `DoubleFreeError`: more references given back than were handed out.
    #[error(
        "block {block} is freed {times} time(s), but {handed_out} reference(s) to it are handed out\
         {owner}; nothing was freed, give each reference back once"
    )]
    DoubleFree {
        /// The block.
        block: BlockId,
        /// How often the call lists it.
        times: u32,
        /// References that may be given back.
        handed_out: u32,
        /// Who else holds it, as the end of a sentence; may be empty.
        owner: String,
    },
    /// `StaleBlockError`: the block was re-allocated, or lost its key, since the result that names
    /// it was made. Look up again.
    #[error("block {block} {}; look up again", stale(request.as_deref(), what))]
    StaleBlock {
        /// The block.
        block: BlockId,
        /// The request that the hit was for; none where `touch` names the block.
        request: Option<String>,
        /// What happened to it: "re-allocated" or "evicted"; where `touch` names it "evicted, or never
        /// cached" or "never allocated".
        what: &'static str,
    },
    /// `ForeignBlockError`: a block of another pool.
    #[error(
        "{what} belongs to another pool (pool {found}, this is pool {expected}); \
         use it with its own manager"
    )]
    ForeignBlock {
        /// What was passed.
        what: String,
        /// The pool it belongs to.
        found: u64,
        /// The pool it was given to.
        expected: u64,
    },
    /// `NotOwnedError`: the caller holds no reference of the kind that this call needs.
    #[error("block {block} is not held by the caller: {reason}")]
    NotOwned {
        /// The block.
        block: BlockId,
        /// Who does hold it, and what to do instead.
        reason: String,
    },
    /// `AlreadyTrackedError`: a hit for a request that has blocks already.
    #[error("request {request:?} already holds blocks; a prefix hit can only start a request")]
    AlreadyTracked {
        /// The request.
        request: String,
    },
    /// `HashConflictError`: a block that already carries a full key would get another.
    #[error(
        "block {block} of group {group} already has a key for {covered} tokens, \
         a key for {wanted} tokens cannot be set"
    )]
    HashConflict {
        /// The block.
        block: BlockId,
        /// The group of the new key.
        group: GroupId,
        /// Tokens that the present key covers.
        covered: u32,
        /// Tokens that the new key would cover.
        wanted: u32,
    },
    /// `OutOfMemory`: a container of the core could not grow. Nothing was changed.
    #[error("the core could not grow its tables: {0}")]
    OutOfMemory(String),
}

/// Whether misuse is looked for. Always, but in a build with `--cfg kvyard_unchecked`, which is never
/// shipped: `benches/checks.sh` measures with it what the checks cost.
pub(crate) const CHECKED: bool = !cfg!(kvyard_unchecked);

/// Why a block cannot be used any more, as the middle of a sentence.
fn stale(request: Option<&str>, what: &str) -> String {
    match request {
        Some(request) => format!("of the hit for request {request:?} was {what} since the lookup"),
        None => format!("cannot be touched: nobody holds it, and it was {what}"),
    }
}

impl KVCacheError {
    /// An `InvalidArgument`. Cold, so that what leads to it stays out of the way of right calls.
    #[cold]
    pub fn argument(argument: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidArgument { argument, reason: reason.into() }
    }

    /// A `Config`.
    pub fn config(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Config { field, reason: reason.into() }
    }
}

/// The core's result type.
pub type Result<T, E = KVCacheError> = std::result::Result<T, E>;
