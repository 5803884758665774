//! `kvyard.BlockPool` and the views that others reach into.

use std::sync::Arc;

use kvyard_core::caching::{BlockMask, CacheFullBlocks};
use kvyard_core::{BlockHash, BlockId, BlockPoolConfig, GroupId, NULL_BLOCK};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::blocks::{BlockObjects, KVCacheBlock, index_blocks, slice_bounds};
use crate::convert::{block_hash, count};
use crate::error::{InvariantError, OrPython, invalid_argument, to_python};
use crate::event_batch::{BatchHeader, event_filter, take_event_batch};
use crate::events::use_int_block_hashes;
use crate::lease::{BlockLease, BlockLeaseIterator};
use crate::metrics::KVCacheMetricsCollector;
use crate::request::RequestArgument;
use crate::semantics::Semantics;
use crate::shared::{Core, Shared};

/// The blocks of a cache: reference counts, free queue, prefix cache.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct BlockPool {
    pub(crate) shared: Arc<Shared>,
    pub(crate) objects: Arc<BlockObjects>,
    #[pyo3(get)]
    metrics_collector: Option<Py<KVCacheMetricsCollector>>,
}

impl BlockPool {
    pub(crate) fn over(
        shared: Arc<Shared>,
        metrics_collector: Option<Py<KVCacheMetricsCollector>>,
    ) -> Self {
        if let Some(collector) = &metrics_collector {
            collector.get().attach(&shared);
        }
        Self { objects: Arc::new(BlockObjects::new(shared.clone())), shared, metrics_collector }
    }
}

/// The hash and the group id of a key: four bytes at its end.
fn split_key(key: &[u8]) -> PyResult<(BlockHash, GroupId)> {
    let Some((hash, group)) = key.split_last_chunk::<4>() else {
        return Err(invalid_argument("key", "must be a block hash and a group id of 4 bytes"));
    };
    let group = group_id(i64::from(u32::from_be_bytes(*group)))?;
    Ok((block_hash("key", hash)?, group))
}

fn group_id(group: i64) -> PyResult<GroupId> {
    use kvyard_core::prefix_map::MAX_GROUP;
    u32::try_from(group).ok().filter(|group| *group <= MAX_GROUP).map(GroupId).ok_or_else(|| {
        invalid_argument("kv_cache_group_id", format!("must be from 0 to {MAX_GROUP}, not {group}"))
    })
}

#[pymethods]
impl BlockPool {
    #[new]
    #[pyo3(signature = (
        num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events = false,
        metrics_collector = None, semantics = Semantics(kvyard_core::Semantics::corrected()),
        event_groups = None, min_event_block_tokens = 0
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "the signature of vLLM's BlockPool, and a filter"
    )]
    fn new(
        py: Python<'_>,
        num_gpu_blocks: &Bound<'_, PyAny>,
        enable_caching: bool,
        hash_block_size: i64,
        enable_kv_cache_events: bool,
        metrics_collector: Option<Py<KVCacheMetricsCollector>>,
        semantics: Semantics,
        event_groups: Option<Vec<i64>>,
        min_event_block_tokens: i64,
    ) -> PyResult<Self> {
        let config = BlockPoolConfig {
            num_blocks: crate::config::positive("num_gpu_blocks", num_gpu_blocks)?,
            enable_caching,
            hash_block_size: crate::config::positive_number("hash_block_size", hash_block_size)?,
            enable_kv_cache_events,
            verify_tokens: false,
            semantics: semantics.0,
        };
        let residency = metrics_collector.as_ref().map(|metrics| metrics.get().start());
        let residency = residency.transpose()?;
        let has_residency = residency.is_some();
        let filter = event_filter(event_groups, min_event_block_tokens, None)?;
        let mut core = py.detach(|| kvyard_core::BlockPool::new(config, residency)).or_python()?;
        core.set_event_filter(filter).or_python()?;
        let shared = Arc::new(Shared::new(Core::Pool(Box::new(core)), has_residency, None));
        Ok(Self::over(shared, metrics_collector))
    }

    /// All blocks, the null block included.
    #[getter]
    fn num_gpu_blocks(&self) -> u32 {
        self.shared.num_blocks
    }

    /// Whether blocks are cached for reuse.
    #[getter]
    fn enable_caching(&self) -> bool {
        self.shared.enable_caching
    }

    /// Tokens per block hash.
    #[getter]
    fn hash_block_size(&self) -> u32 {
        self.shared.hash_block_size
    }

    /// Whether changes of the prefix cache are recorded.
    #[getter]
    fn enable_kv_cache_events(&self) -> bool {
        self.shared.enable_kv_cache_events
    }

    /// The block that stands where there is no storage.
    #[getter]
    fn null_block(&self, py: Python<'_>) -> PyResult<Py<KVCacheBlock>> {
        self.objects.block(py, NULL_BLOCK)
    }

    /// All blocks, as a sequence; their objects are made on demand.
    #[getter]
    fn blocks(slf: Py<Self>) -> PoolBlocks {
        PoolBlocks { pool: slf }
    }

    /// The free queue, for reading.
    #[getter]
    fn free_block_queue(slf: Py<Self>) -> FreeBlockQueue {
        FreeBlockQueue { pool: slf }
    }

    /// The prefix cache, for reading.
    #[getter]
    fn cached_block_hash_to_block(slf: Py<Self>) -> CachedBlocks {
        CachedBlocks { pool: slf }
    }

    /// Blocks that got a primary key since the pool was made.
    #[getter]
    fn num_blocks_stored(&self, py: Python<'_>) -> PyResult<u64> {
        self.shared.with(py, |core| core.pool().num_blocks_stored())
    }

    /// Blocks that lost their keys since the pool was made, resets not counted.
    #[getter]
    fn num_blocks_removed(&self, py: Python<'_>) -> PyResult<u64> {
        self.shared.with(py, |core| core.pool().num_blocks_removed())
    }

    /// For each group the block that caches a hash; None if any group misses.
    fn get_cached_block<'py>(
        &self,
        py: Python<'py>,
        block_hash: &[u8],
        kv_cache_group_ids: Vec<i64>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let hash = crate::convert::block_hash("block_hash", block_hash)?;
        let groups: Vec<GroupId> =
            kv_cache_group_ids.into_iter().map(group_id).collect::<PyResult<_>>()?;
        let mut found = Vec::new();
        let complete = self
            .shared
            .with(py, |core| core.pool().get_cached_block((&hash).into(), &groups, &mut found))?;
        if complete { self.objects.list(py, &found).map(Some) } else { Ok(None) }
    }

    /// Gives the blocks at positions `num_cached_blocks` to `num_full_blocks` of a row their keys.
    #[pyo3(signature = (
        request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id,
        block_mask = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature of vLLM's BlockPool")]
    fn cache_full_blocks(
        &self,
        request: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        num_cached_blocks: i64,
        num_full_blocks: i64,
        block_size: i64,
        kv_cache_group_id: i64,
        block_mask: Option<Vec<bool>>,
    ) -> PyResult<()> {
        let py = request.py();
        let row = self.objects.ids(blocks)?;
        let (start, stop) = (
            count("num_cached_blocks", num_cached_blocks)?,
            count("num_full_blocks", num_full_blocks)?,
        );
        let (block_size, group) = (count("block_size", block_size)?, group_id(kv_cache_group_id)?);
        RequestArgument::new(request, &self.shared)?.with(|call, _| {
            self.shared.try_with(py, |core| {
                core.pool_mut().cache_full_blocks(&CacheFullBlocks {
                    request: call,
                    row: &row,
                    start: start as usize,
                    stop: stop as usize,
                    block_size,
                    group,
                    mask: block_mask.as_deref().map_or(BlockMask::All, BlockMask::Flags),
                })
            })
        })
    }

    /// Makes a block reachable from a boundary inside it. Returns the key; None for the null block.
    fn cache_partial_block<'py>(
        &self,
        request: &Bound<'py, PyAny>,
        block: &Bound<'py, PyAny>,
        num_tokens: i64,
        kv_cache_group_id: i64,
        block_size: i64,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let py = request.py();
        let block = self.objects.id(block)?;
        let num_tokens = count("num_tokens", num_tokens)?;
        let (block_size, group) = (count("block_size", block_size)?, group_id(kv_cache_group_id)?);
        let key = RequestArgument::new(request, &self.shared)?.with(|call, _| {
            self.shared.try_with(py, |core| {
                core.pool_mut().cache_partial_block(call, block, num_tokens, group, block_size)
            })
        })?;
        Ok(key.map(|key| {
            let hash = &key.hash.0[..self.shared.hash_width()];
            PyBytes::new(py, &[hash, &key.group.0.to_be_bytes()[..]].concat())
        }))
    }

    /// Takes blocks from the head of the free queue; cached ones are evicted.
    fn get_new_blocks<'py>(
        &self,
        py: Python<'py>,
        num_blocks: i64,
    ) -> PyResult<Bound<'py, PyList>> {
        let wanted = count("num_blocks", num_blocks)? as usize;
        let taken = self.shared.with_sized(py, wanted, |core| {
            let lease = core.pool_mut().get_new_blocks(wanted)?;
            core.pool_mut().dissolve(lease).map_err(|(error, _)| error)
        });
        let ids = taken?.or_python()?;
        self.objects.list(py, &ids)
    }

    /// Takes a reference to each block, so that it cannot be evicted.
    fn touch(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = self.objects.ids(blocks)?;
        let touched = self.shared.with_sized(blocks.py(), ids.len(), |core| {
            let lease = core.pool_mut().touch(&ids)?;
            core.pool_mut().dissolve(lease).map(drop).map_err(|(error, _)| error)
        })?;
        touched.or_python()
    }

    /// Gives handed-out references back, one for each time a block is listed; the order is the
    /// eviction order. A lease, or its iterator, is released whole.
    fn free_blocks(&self, ordered_blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = ordered_blocks.py();
        let leased = if let Ok(lease) = ordered_blocks.cast::<BlockLease>() {
            Some((lease.get(), false))
        } else if let Ok(walk) = ordered_blocks.cast::<BlockLeaseIterator>() {
            Some((walk.get().lease.get(), walk.get().reversed))
        } else {
            None
        };
        let Some((lease, reversed)) = leased else {
            let ids = self.objects.ids(ordered_blocks)?;
            let freed = self.shared.with_sized(py, ids.len(), |core| {
                core.pool_mut().free_counted(&ids).map_err(|error| core.with_owners(error))
            })?;
            return freed.map_err(|error| to_python(&self.shared.open_leases().with_owners(error)));
        };
        lease.release(py, &self.shared, |core, lease| {
            let pool = core.pool_mut();
            if reversed { pool.free_reversed(lease) } else { pool.free(lease) }
        })
    }

    /// Takes all keys from blocks, in the order of the ids; references stay.
    fn evict_blocks(&self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        evict_blocks(&self.shared, block_ids)
    }

    /// Forgets the prefix cache, if no block is held. Whether it did.
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<bool> {
        let size = self.shared.num_blocks as usize;
        self.shared.with_sized(py, size, |core| core.pool_mut().reset_prefix_cache())?.or_python()
    }

    /// Free blocks, cached ones included.
    fn get_num_free_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.with(py, |core| core.pool().num_free_blocks())
    }

    /// Share of the blocks in use, 0 to 1.
    fn get_usage(&self, py: Python<'_>) -> PyResult<f64> {
        self.shared.with(py, |core| core.pool().usage())
    }

    /// The changes since the last call, oldest first.
    fn take_events(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        crate::events::take_pool_events(py, &self.shared)
    }

    /// The same as one finished payload; None if nothing changed.
    #[pyo3(
        signature = (wire_format = "router", data_parallel_rank = Some(0), ts = None),
        text_signature = "($self, wire_format='router', data_parallel_rank=0, ts=None)"
    )]
    fn take_event_batch<'py>(
        &self,
        py: Python<'py>,
        wire_format: &str,
        data_parallel_rank: Option<i64>,
        ts: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let header = BatchHeader::new(wire_format, data_parallel_rank, ts)?;
        take_event_batch(py, &self.shared, &[], use_int_block_hashes(), &header)
    }

    /// Checks every invariant; AssertionError names the one that does not hold.
    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        validate(py, &self.shared)
    }

    /// A fingerprint of the whole state.
    fn state_digest(&self, py: Python<'_>) -> PyResult<String> {
        state_digest(py, &self.shared)
    }

    fn __repr__(&self) -> String {
        format!("BlockPool(num_gpu_blocks={})", self.shared.num_blocks)
    }
}

/// Takes all keys from blocks, in the order in which their ids come.
pub(crate) fn evict_blocks(shared: &Shared, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
    let id = |block: Bound<'_, PyAny>| Ok(BlockId(count("block_ids", block.extract()?)?));
    let ids: Vec<BlockId> =
        block_ids.try_iter()?.map(|block| id(block?)).collect::<PyResult<_>>()?;
    let work = |core: &mut Core| core.pool_mut().evict_blocks(&ids);
    shared.with_sized(block_ids.py(), ids.len(), work)?.or_python()
}

pub(crate) fn validate(py: Python<'_>, shared: &Shared) -> PyResult<()> {
    let check = |core: &mut Core| match core {
        Core::Pool(pool) => pool.validate(),
        Core::Manager(manager) => manager.validate(),
    };
    let size = shared.num_blocks as usize;
    shared.run_sized(py, size, check).map_err(|violation| invariant_error(py, shared, &violation))
}

/// The error for a broken invariant, with the report on it.
pub(crate) fn invariant_error(py: Python<'_>, shared: &Shared, violation: &str) -> PyErr {
    let error = InvariantError::new_err(violation.to_owned());
    match error.value(py).setattr("report", shared.report(violation)) {
        Ok(()) => error,
        Err(other) => other,
    }
}

pub(crate) fn state_digest(py: Python<'_>, shared: &Shared) -> PyResult<String> {
    shared.with_sized(py, shared.num_blocks as usize, |core| {
        let digest = match core {
            Core::Pool(pool) => pool.state_digest(),
            Core::Manager(manager) => manager.state_digest(),
        };
        format!("{digest:032x}")
    })
}

/// All blocks of a pool as a sequence.
#[pyclass(frozen, sequence, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct PoolBlocks {
    pool: Py<BlockPool>,
}

#[pymethods]
impl PoolBlocks {
    fn __len__(&self) -> usize {
        self.pool.get().shared.num_blocks as usize
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let pool = self.pool.get();
        if let Ok(block) = index.extract::<u32>()
            && block < pool.shared.num_blocks
        {
            return Ok(pool
                .objects
                .block(index.py(), BlockId(block))?
                .into_bound(index.py())
                .into_any());
        }
        let ids: Vec<BlockId> = (0..pool.shared.num_blocks).map(BlockId).collect();
        index_blocks(&pool.objects, &ids, index)
    }

    /// The position of a block: its id, from `start` on and before `stop`.
    #[pyo3(signature = (value, start = 0, stop = isize::MAX, /))]
    fn index(&self, value: &Bound<'_, PyAny>, start: isize, stop: isize) -> PyResult<u32> {
        let found = self.pool.get().objects.id(value).ok();
        let searched = slice_bounds(self.__len__(), start, stop);
        found
            .filter(|block| searched.contains(&block.index()))
            .map(|block| block.0)
            .ok_or_else(|| PyValueError::new_err(format!("{value} is not a block of this pool")))
    }

    /// 1 for a block of this pool, else 0.
    #[pyo3(signature = (value, /))]
    fn count(&self, value: &Bound<'_, PyAny>) -> usize {
        usize::from(self.__contains__(value))
    }

    fn __contains__(&self, value: &Bound<'_, PyAny>) -> bool {
        self.pool.get().objects.id(value).is_ok()
    }
}

/// The free queue, for reading. Blocks leave and join it through the pool.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct FreeBlockQueue {
    pool: Py<BlockPool>,
}

#[pymethods]
impl FreeBlockQueue {
    /// How many blocks are free.
    #[getter]
    fn num_free_blocks(&self, py: Python<'_>) -> PyResult<usize> {
        self.pool.get().get_num_free_blocks(py)
    }

    /// The free blocks in eviction order, the next one first.
    fn get_all_free_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let pool = self.pool.get();
        let ids: Vec<BlockId> =
            pool.shared.with(py, |core| core.pool().free_blocks_in_order().collect())?;
        pool.objects.list(py, &ids)
    }
}

/// The prefix cache, for reading: from (hash, group) to blocks.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct CachedBlocks {
    pool: Py<BlockPool>,
}

#[pymethods]
impl CachedBlocks {
    /// The earliest cached block of a key (hash and group id in 4 bytes), or None.
    fn get_one_block(&self, py: Python<'_>, key: &[u8]) -> PyResult<Option<Py<KVCacheBlock>>> {
        let pool = self.pool.get();
        let (hash, group) = split_key(key)?;
        let found = pool.shared.with(py, |core| core.pool().prefix_map().get(&hash, group))?;
        found.map(|block| pool.objects.block(py, block)).transpose()
    }

    /// Whether a block carries a key.
    fn contain(&self, py: Python<'_>, key: &[u8], block_id: i64) -> PyResult<bool> {
        let pool = self.pool.get();
        let (hash, group) = split_key(key)?;
        let block = BlockId(count("block_id", block_id)?);
        pool.shared.with(py, |core| core.pool().prefix_map().contains(&hash, group, block))
    }

    /// How many different keys there are.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.pool.get().shared.with(py, |core| core.pool().prefix_map().num_keys())
    }
}
