//! Whose decisions: vLLM 0.25.1's, fault for fault, or the mended ones. Each field is one fault; it
//! is read at exactly one place in the code. Every other rule has one value under all names.

/// Which of two behaviours the hasher and the manager follow, fault by fault.
///
/// `vllm_0_25_1()` decides as vLLM 0.25.1 does on every call history on which 0.25.1 itself keeps
/// its invariants; `corrected()`, the default, differs only in the fields below. Other mixtures are
/// allowed. A hasher and a manager of different semantics are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "one switch a fault, each flipped alone")]
pub struct Semantics {
    /// How extra keys (adapter, media, salt, embeddings) enter a block's hash.
    pub hash_domains: HashDomains,
    /// From which media item incremental hashing goes on.
    pub media_cursor: MediaCursor,
    /// Whether a cached block past the cap on hits proves an EAGLE group's look-ahead block, so that
    /// the hit keeps what 0.25.1 gives up. Case C11.
    pub eagle_credit: bool,
    /// Whether sparse retention keeps the boundaries that are left after the EAGLE drop. Case C12.
    pub eagle_retention: bool,
    /// What counts as a prefix common to all running requests.
    pub common_prefix: CommonPrefix,
    /// When a `BlockRemoved` event is due.
    pub removal_event: RemovalEvent,
    /// How a stored span with gaps is announced.
    pub sparse_store_event: SparseStoreEvent,
    /// In which order blocks popped for a deferred free go back.
    pub deferred_free_order: DeferredFreeOrder,
    /// When a lookup enters the prefix-cache statistics.
    pub stats_on: StatsOn,
    /// Whether the full-sequence gate counts look-ahead slots.
    pub gate_counts_lookahead: bool,
    /// Whether the planner's memory check reserves the null block. Case C22 a.
    pub planner_reserves_null: bool,
    /// How the planner merges the specifications of a group.
    pub group_merge: GroupMerge,
    /// What admission predicts for Mamba groups in `align` mode. Case C08.
    pub align_prediction: AlignPrediction,
    /// Whether `get_block_ids_for_computed_tokens` counts tokens per block across all
    /// context-parallel ranks (0.25.1 uses the per-rank block size and keeps too many).
    pub computed_ids_under_cp: bool,
}

/// See [`Semantics::hash_domains`]. Case C05.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HashDomains {
    /// Bare values: an adapter name and a salt of the same text collide.
    Bare,
    /// Members tagged with their domain, in the same order.
    Tagged,
}

/// See [`Semantics::media_cursor`]. Case C03.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MediaCursor {
    /// Past the first block only the last item is looked at, so that earlier ones are missing from
    /// the keys of blocks that decoding completes.
    LastItem,
    /// The first item that overlaps the block: incremental hashing equals one-shot hashing.
    FirstOverlap,
}

/// See [`Semantics::common_prefix`]. Case C07.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommonPrefix {
    /// Blocks whose reference count equals the number of requests: deferred releases and third
    /// parties make it lie.
    References,
    /// Blocks that stand in the row of every tracked request.
    RowMembership,
}

/// See [`Semantics::removal_event`]. Case C14.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RemovalEvent {
    /// One event a copy, though other copies still serve the hash.
    EveryCopy,
    /// Only when the last copy of (hash, group) goes.
    LastCopy,
}

/// See [`Semantics::sparse_store_event`]. Cases C15 and C17.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SparseStoreEvent {
    /// One event a call, with the tokens of the whole span, even if nothing was stored.
    OnePerCall,
    /// One event a contiguous run, tokens = hashes x block size; the parent is the nearest announced
    /// ancestor.
    OnePerRun,
}

/// See [`Semantics::deferred_free_order`]. `manager.md` §2.3 E4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeferredFreeOrder {
    /// The concatenation of all groups, reversed: the last group's tail goes first.
    AcrossGroups,
    /// As an immediate free: group by group, each from its tail.
    GroupByGroup,
}

/// See [`Semantics::stats_on`]. Case C21.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StatsOn {
    /// Every lookup counts, also those of requests that are then refused.
    Lookup,
    /// Once per admitted request, at its first successful allocation.
    Admission,
}

/// See [`Semantics::group_merge`]. `groups.md` §1.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupMerge {
    /// The class of the first layer decides, so that the order of layers changes the groups.
    LayerOrder,
    /// The same groups for every order of layers.
    OrderIndependent,
}

/// See [`Semantics::align_prediction`]. `groups.md` §2.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AlignPrediction {
    /// 0.25.1's own number, wrong with external tokens and negative after rejected drafts.
    Estimate,
    /// What the allocation will take.
    TrueNeed,
}

impl Semantics {
    /// Decision for decision what vLLM 0.25.1 does.
    pub const fn vllm_0_25_1() -> Self {
        Self {
            hash_domains: HashDomains::Bare,
            media_cursor: MediaCursor::LastItem,
            eagle_credit: false,
            eagle_retention: false,
            common_prefix: CommonPrefix::References,
            removal_event: RemovalEvent::EveryCopy,
            sparse_store_event: SparseStoreEvent::OnePerCall,
            deferred_free_order: DeferredFreeOrder::AcrossGroups,
            stats_on: StatsOn::Lookup,
            gate_counts_lookahead: false,
            planner_reserves_null: false,
            group_merge: GroupMerge::LayerOrder,
            align_prediction: AlignPrediction::Estimate,
            computed_ids_under_cp: false,
        }
    }

    /// The same with its faults mended.
    pub const fn corrected() -> Self {
        Self {
            hash_domains: HashDomains::Tagged,
            media_cursor: MediaCursor::FirstOverlap,
            eagle_credit: true,
            eagle_retention: true,
            common_prefix: CommonPrefix::RowMembership,
            removal_event: RemovalEvent::LastCopy,
            sparse_store_event: SparseStoreEvent::OnePerRun,
            deferred_free_order: DeferredFreeOrder::GroupByGroup,
            stats_on: StatsOn::Admission,
            gate_counts_lookahead: true,
            planner_reserves_null: true,
            group_merge: GroupMerge::OrderIndependent,
            align_prediction: AlignPrediction::TrueNeed,
            computed_ids_under_cp: true,
        }
    }
}

impl Default for Semantics {
    fn default() -> Self {
        Self::corrected()
    }
}
