//! Blocks by name: the snapshot that lookups and allocations return, and the lease that carries
//! references outside the manager.

use smallvec::{SmallVec, smallvec};

use crate::error::{KVCacheError, Result};
use crate::id::{BlockId, length};
use crate::memory::Grow;

/// Block ids per group, flat. Inline for the few of a decode step.
pub type BlockIds = SmallVec<[BlockId; 4]>;

/// Ends of the groups in a flat list of ids.
pub type GroupEnds = SmallVec<[u32; 4]>;

/// An immutable snapshot of blocks, per group: `blocks(group)[position]`. vLLM's `KVCacheBlocks`.
///
/// It pins nothing. It remembers its pool and the pool's epoch, so that a hit used after one of its
/// blocks was re-allocated, or lost its key, is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KVCacheBlocks {
    ids: BlockIds,
    ends: GroupEnds,
    pool: u64,
    epoch: u64,
    /// The groups' lists need not agree on a length: made by hand, or looked up group by group.
    has_own_lengths: bool,
}

impl KVCacheBlocks {
    /// No blocks, for `num_groups` groups.
    pub fn empty(num_groups: usize, pool: u64, epoch: u64) -> Self {
        Self {
            ids: BlockIds::new(),
            ends: smallvec![0; num_groups],
            pool,
            epoch,
            has_own_lengths: false,
        }
    }

    /// From the ids of each group.
    pub fn from_groups<'a>(
        groups: impl IntoIterator<Item = &'a [BlockId]>,
        pool: u64,
        epoch: u64,
    ) -> Self {
        let mut blocks = Self {
            ids: BlockIds::new(),
            ends: GroupEnds::new(),
            pool,
            epoch,
            has_own_lengths: false,
        };
        for group in groups {
            blocks.push_group(group);
        }
        blocks
    }

    pub(crate) fn builder(pool: u64, epoch: u64) -> Self {
        Self { ids: BlockIds::new(), ends: GroupEnds::new(), pool, epoch, has_own_lengths: false }
    }

    /// Makes room, so that `push_group` allocates nothing.
    pub(crate) fn reserve(&mut self, groups: usize, blocks: usize) -> Result<()> {
        self.ends.make_room(groups)?;
        self.ids.make_room(blocks)
    }

    pub(crate) fn push_group(&mut self, group: &[BlockId]) {
        self.ids.extend_from_slice(group);
        self.ends.push(length(self.ids.len()));
    }

    /// The same, as blocks whose lists need not agree on a length.
    #[must_use]
    pub fn with_own_lengths(self) -> Self {
        Self { has_own_lengths: true, ..self }
    }

    /// Whether the groups' lists need not agree on a length.
    pub fn has_own_lengths(&self) -> bool {
        self.has_own_lengths
    }

    /// How many groups.
    pub fn num_groups(&self) -> usize {
        self.ends.len()
    }

    /// The ids of one group, by position.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn blocks(&self, group: usize) -> &[BlockId] {
        let start = if group == 0 { 0 } else { self.ends[group - 1] as usize };
        &self.ids[start..self.ends[group] as usize]
    }

    /// The ids of all groups, one after another.
    pub fn ids(&self) -> &[BlockId] {
        &self.ids
    }

    /// Whether every group is empty.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The pool these blocks belong to.
    pub fn pool(&self) -> u64 {
        self.pool
    }

    /// The pool's epoch at the time of the snapshot ("generation").
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Group by group, this snapshot's ids followed by the other's. As old as the older of the two.
    ///
    /// # Errors
    /// `InvalidArgument` if the numbers of groups differ, `ForeignBlock` if the pools do.
    pub fn concat(&self, other: &Self) -> Result<Self> {
        if self.num_groups() != other.num_groups() {
            return Err(KVCacheError::argument(
                "other",
                format!(
                    "blocks of {} groups cannot be added to blocks of {}",
                    other.num_groups(),
                    self.num_groups()
                ),
            ));
        }
        if self.pool != other.pool {
            return Err(KVCacheError::ForeignBlock {
                what: "the second operand".into(),
                found: other.pool,
                expected: self.pool,
            });
        }
        // Nothing is never stale.
        let epoch = match (self.is_empty(), other.is_empty()) {
            (true, false) => other.epoch,
            (false, true) => self.epoch,
            _ => self.epoch.min(other.epoch),
        };
        let mut sum = Self::builder(self.pool, epoch);
        for group in 0..self.num_groups() {
            let mut ids = BlockIds::from_slice(self.blocks(group));
            ids.extend_from_slice(other.blocks(group));
            sum.push_group(&ids);
        }
        Ok(sum)
    }
}

/// References outside the manager: blocks handed out by the pool or popped from a request. Neither
/// copied nor cloned; given back whole, once. Dropping it gives nothing back: a step in flight may
/// still read the blocks, and the order of release is the order of eviction. So a second release does
/// not compile:
///
/// ```compile_fail,E0382
/// # use kvyard_core::{KVCacheManager, KVCacheManagerConfig};
/// # let mut manager = KVCacheManager::new(KVCacheManagerConfig::new(8, 4, 64), None).unwrap();
/// let lease = manager.pool_mut().get_new_blocks(2).unwrap();
/// manager.pool_mut().free(lease).unwrap();
/// manager.pool_mut().free(lease).unwrap(); // use of moved value
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lease that is dropped keeps its blocks held for ever"]
pub struct BlockLease {
    pub(crate) ids: Vec<BlockId>,
    pub(crate) ends: GroupEnds,
    pub(crate) pool: u64,
    pub(crate) epoch: u64,
    pub(crate) request: Option<String>,
}

impl BlockLease {
    /// The blocks, nulls included, in table order, group after group.
    pub fn ids(&self) -> &[BlockId] {
        &self.ids
    }

    /// Where each group's blocks end in `ids()`.
    pub fn group_ends(&self) -> &[u32] {
        &self.ends
    }

    /// The pool the blocks belong to.
    pub fn pool(&self) -> u64 {
        self.pool
    }

    /// The pool's epoch when the lease was made.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The request the blocks were popped from; none for blocks that the pool handed out.
    pub fn request(&self) -> Option<&str> {
        self.request.as_deref()
    }
}
