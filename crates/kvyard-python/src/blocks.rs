//! Blocks as Python sees them: one object a block and pool, and snapshots of many.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use kvyard_core::{BlockId, KVCacheBlocks as CoreBlocks};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PySlice, PyTuple};

use crate::error::{ForeignBlockError, OrPython, invalid_argument};
use crate::shared::{Shared, lock};

/// One block. Its fields are read from the pool at each access; there is one object a block.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct KVCacheBlock {
    pub(crate) shared: Arc<Shared>,
    pub(crate) block: BlockId,
}

#[pymethods]
impl KVCacheBlock {
    /// Its position in the pool.
    #[getter]
    fn block_id(&self) -> u32 {
        self.block.0
    }

    /// References to it now; 0 for the null block.
    #[getter]
    fn ref_cnt(&self, py: Python<'_>) -> PyResult<u32> {
        self.shared.with(py, |core| core.pool().ref_cnt(self.block))
    }

    /// Its primary key now: the hash and the group id in four bytes; None while it has none.
    #[getter]
    fn block_hash<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let key = self.shared.with(py, |core| core.pool().block_key(self.block))?;
        Ok(key.map(|key| {
            let width = self.shared.hash_width();
            PyBytes::new(py, &[&key.hash.0[..width], &key.group.0.to_be_bytes()[..]].concat())
        }))
    }

    /// Prefix tokens that its primary key covers; None while it has none.
    #[getter]
    fn num_hash_tokens(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        let key = self.shared.with(py, |core| core.pool().block_key(self.block))?;
        Ok(key.map(|key| key.covered_tokens))
    }

    /// Whether it is the null block.
    #[getter]
    fn is_null(&self) -> bool {
        self.block.is_null()
    }

    fn __repr__(&self) -> String {
        format!("KVCacheBlock(block_id={})", self.block)
    }
}

/// The block objects of one pool, made when they are first asked for: one object a block.
#[derive(Debug)]
pub(crate) struct BlockObjects {
    pub(crate) shared: Arc<Shared>,
    objects: Mutex<HashMap<BlockId, Py<KVCacheBlock>>>,
}

impl BlockObjects {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, objects: Mutex::default() }
    }

    /// The object of a block.
    pub(crate) fn block(&self, py: Python<'_>, block: BlockId) -> PyResult<Py<KVCacheBlock>> {
        let mut objects = lock(&self.objects);
        if let Some(object) = objects.get(&block) {
            return Ok(object.clone_ref(py));
        }
        let object = Py::new(py, KVCacheBlock { shared: self.shared.clone(), block })?;
        objects.insert(block, object.clone_ref(py));
        Ok(object)
    }

    /// The objects of several blocks.
    pub(crate) fn list<'py>(
        &self,
        py: Python<'py>,
        ids: &[BlockId],
    ) -> PyResult<Bound<'py, PyList>> {
        let objects: Vec<_> =
            ids.iter().map(|block| self.block(py, *block)).collect::<PyResult<_>>()?;
        PyList::new(py, objects)
    }

    /// The id of a block object of this pool.
    pub(crate) fn id(&self, object: &Bound<'_, PyAny>) -> PyResult<BlockId> {
        let block = object.cast::<KVCacheBlock>()?.get();
        if block.shared.pool_id != self.shared.pool_id {
            return Err(ForeignBlockError::new_err(format!(
                "block {} belongs to another pool (pool {}, this is pool {})",
                block.block, block.shared.pool_id, self.shared.pool_id
            )));
        }
        Ok(block.block)
    }

    /// The ids of several block objects of this pool.
    pub(crate) fn ids(&self, objects: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
        objects.try_iter()?.map(|object| self.id(&object?)).collect()
    }
}

/// Blocks per group at one moment; never changes. What lookups and allocations return.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct KVCacheBlocks {
    pub(crate) core: CoreBlocks,
    pub(crate) objects: Arc<BlockObjects>,
}

impl KVCacheBlocks {
    fn group_ids(&self) -> impl Iterator<Item = &[BlockId]> {
        (0..self.core.num_groups()).map(|group| self.core.blocks(group))
    }
}

#[pymethods]
impl KVCacheBlocks {
    /// The blocks, a list a group.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let groups = self.group_ids().map(|ids| self.objects.list(py, ids));
        PyTuple::new(py, groups.collect::<PyResult<Vec<_>>>()?)
    }

    /// The pool's epoch at that moment.
    #[getter]
    fn generation(&self) -> u64 {
        self.core.epoch()
    }

    /// The ids, a list a group; None instead of nothing but empty groups, if that is allowed.
    #[pyo3(signature = (allow_none = false))]
    fn get_block_ids<'py>(
        &self,
        py: Python<'py>,
        allow_none: bool,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        if allow_none && self.core.is_empty() {
            return Ok(None);
        }
        id_lists(py, &self.core).map(Some)
    }

    /// Ids of the blocks without a key, for exactly one group.
    fn get_unhashed_block_ids(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        if self.core.num_groups() != 1 {
            return Err(invalid_argument(
                "blocks",
                format!("get_unhashed_block_ids needs one group, not {}", self.core.num_groups()),
            ));
        }
        let ids = self.core.blocks(0);
        self.objects.shared.with(py, |core| {
            let prefix = core.pool().prefix_map();
            ids.iter().filter(|block| !prefix.is_cached(**block)).map(|block| block.0).collect()
        })
    }

    /// Ids of the blocks without a key, a list a group; null blocks are left out.
    fn get_unhashed_block_ids_all_groups(&self, py: Python<'_>) -> PyResult<Vec<Vec<u32>>> {
        self.objects.shared.with(py, |core| {
            let prefix = core.pool().prefix_map();
            let unhashed = |block: &&BlockId| !block.is_null() && !prefix.is_cached(**block);
            self.group_ids()
                .map(|ids| ids.iter().filter(unhashed).map(|block| block.0).collect())
                .collect()
        })
    }

    /// A new object without blocks, for as many groups.
    fn new_empty(&self) -> Self {
        let core = CoreBlocks::empty(self.core.num_groups(), self.core.pool(), self.core.epoch());
        Self { core, objects: self.objects.clone() }
    }

    fn __add__(&self, other: &Self) -> PyResult<Self> {
        let core = self.core.concat(&other.core).or_python()?;
        Ok(Self { core, objects: self.objects.clone() })
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| {
            let other = &other.get().core;
            self.core.pool() == other.pool()
                && self.core.num_groups() == other.num_groups()
                && self.group_ids().eq((0..other.num_groups()).map(|group| other.blocks(group)))
        })
    }

    fn __repr__(&self) -> String {
        let groups: Vec<Vec<u32>> =
            self.group_ids().map(|ids| ids.iter().map(|block| block.0).collect()).collect();
        format!("KVCacheBlocks({groups:?})")
    }
}

/// A tuple of id lists, one a group.
pub(crate) fn id_lists<'py>(py: Python<'py>, blocks: &CoreBlocks) -> PyResult<Bound<'py, PyTuple>> {
    let lists = (0..blocks.num_groups())
        .map(|group| PyList::new(py, blocks.blocks(group).iter().map(|block| block.0)));
    PyTuple::new(py, lists.collect::<PyResult<Vec<_>>>()?)
}

/// The positions that a Python slice from `start` to `stop` covers.
pub(crate) fn slice_bounds(length: usize, start: isize, stop: isize) -> Range<usize> {
    let bound = |at: isize| {
        let at = if at < 0 { at.saturating_add(length.cast_signed()).max(0) } else { at };
        at.cast_unsigned().min(length)
    };
    bound(start)..bound(stop)
}

/// `ids[index]` as a block, or as a list of blocks for a slice.
pub(crate) fn index_blocks<'py>(
    objects: &BlockObjects,
    ids: &[BlockId],
    index: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = index.py();
    if let Ok(slice) = index.cast::<PySlice>() {
        let span = slice.indices(ids.len().cast_signed())?;
        let picked: Vec<BlockId> = (0..span.slicelength)
            .map(|at| ids[(span.start + at.cast_signed() * span.step).cast_unsigned()])
            .collect();
        return Ok(objects.list(py, &picked)?.into_any());
    }
    let index: isize = index.extract()?;
    let at = if index < 0 { index + ids.len().cast_signed() } else { index };
    match usize::try_from(at).ok().and_then(|at| ids.get(at)) {
        Some(block) => Ok(objects.block(py, *block)?.into_bound(py).into_any()),
        None => Err(PyIndexError::new_err("block index out of range")),
    }
}
