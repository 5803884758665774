//! The lease as Python sees it. Rust refuses a second release when it compiles; here the lease object
//! remembers, and a lease that is garbage-collected unreleased is kept and reported.

use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvyard_core::blocks::GroupEnds;
use kvyard_core::{BlockLease as CoreLease, KVCacheError};
use pyo3::exceptions::{PyResourceWarning, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::blocks::{BlockObjects, index_blocks, slice_bounds};
use crate::error::{DoubleFreeError, ForeignBlockError, to_python};
use crate::open_leases::Leased;
use crate::shared::{Core, Shared, lock};

/// Where the references of a lease object are.
#[derive(Debug)]
enum State {
    /// Here.
    Held(CoreLease),
    /// Only counted: a plain list was copied from the lease.
    Counted,
    /// Given back.
    Released,
}

/// References outside the manager: the blocks of a popped request, held until they are given back,
/// whole and once. A sequence of its blocks in table order, nulls included.
#[pyclass(frozen, sequence, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct BlockLease {
    number: u64,
    leased: Arc<Leased>,
    objects: Arc<BlockObjects>,
    state: Mutex<State>,
}

impl BlockLease {
    pub(crate) fn new(lease: CoreLease, objects: Arc<BlockObjects>, request_id: String) -> Self {
        let ends = GroupEnds::from_slice(lease.group_ends());
        let leased = Arc::new(Leased { request_id, ids: lease.ids().to_vec(), ends });
        let number = {
            let mut open = objects.shared.open_leases();
            let number = open.next_number;
            open.next_number += 1;
            open.held.insert(number, leased.clone());
            number
        };
        Self { number, leased, objects, state: Mutex::new(State::Held(lease)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes the references out, for `work` to give back to the pool `to`; they return here if that is
    /// refused.
    pub(crate) fn release(
        &self,
        py: Python<'_>,
        to: &Shared,
        work: impl FnOnce(&mut Core, CoreLease) -> Result<(), (KVCacheError, CoreLease)> + Send,
    ) -> PyResult<()> {
        let mut state = self.state();
        let Leased { request_id, ids, ends } = &*self.leased;
        if to.pool_id != self.objects.shared.pool_id {
            return Err(ForeignBlockError::new_err(format!(
                "the lease of request {request_id:?} belongs to another pool (pool {}, this is pool {}); \
                 give it back to its own manager",
                self.objects.shared.pool_id, to.pool_id
            )));
        }
        // Whatever goes wrong, the lease stays what it was: what `work` refuses comes back, and a
        // core that is poisoned gives nothing back any more.
        match std::mem::replace(&mut *state, State::Released) {
            State::Held(lease) => match to.with_sized(py, ids.len(), |core| work(core, lease)) {
                Ok(Ok(())) => {}
                Ok(Err((error, lease))) => {
                    *state = State::Held(lease);
                    return Err(to_python(&error));
                }
                Err(poisoned) => {
                    *state = State::Counted;
                    return Err(poisoned);
                }
            },
            State::Counted => {
                let freed = to.with_sized(py, ids.len(), |core| {
                    let request = Some(request_id.clone());
                    let lease =
                        core.pool_mut().lease_counted(ids.clone(), ends.clone(), request)?;
                    work(core, lease).map_err(|(error, _)| error)
                });
                if let Err(error) = freed.and_then(|freed| freed.map_err(|e| to_python(&e))) {
                    *state = State::Counted;
                    return Err(error);
                }
            }
            State::Released => {
                return Err(DoubleFreeError::new_err(format!(
                    "the blocks popped from request {request_id:?} were given back already; nothing \
                     was freed"
                )));
            }
        }
        self.objects.shared.open_leases().held.remove(&self.number);
        Ok(())
    }

    /// A plain list was copied from the lease, which may go back by itself: its references are only
    /// counted from now on.
    fn dissolve(&self, py: Python<'_>) -> PyResult<()> {
        let mut state = self.state();
        let lease = match std::mem::replace(&mut *state, State::Counted) {
            State::Held(lease) => lease,
            other => {
                *state = other;
                return Ok(());
            }
        };
        let shared = &self.objects.shared;
        let dissolve = |core: &mut Core| core.pool_mut().dissolve(lease);
        let dissolved = shared.with_sized(py, self.leased.ids.len(), dissolve)?;
        if let Err((error, lease)) = dissolved {
            *state = State::Held(lease);
            return Err(to_python(&error));
        }
        shared.open_leases().held.remove(&self.number);
        Ok(())
    }
}

impl Drop for BlockLease {
    /// A step in flight may still read the blocks: they stay held, and whoever runs this is told.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let State::Held(lease) = std::mem::replace(state, State::Released) else {
            return;
        };
        let mut open = self.objects.shared.open_leases();
        if lease.ids().iter().all(|block| block.is_null()) {
            open.held.remove(&self.number);
            return;
        }
        open.lost.insert(self.number, lease);
        drop(open);
        let ids: Vec<u32> =
            self.leased.ids.iter().filter(|block| !block.is_null()).map(|block| block.0).collect();
        let text = format!(
            "the lease of request {:?} was dropped unreleased; its blocks {ids:?} stay held: see \
             KVCacheManager.lost_leases() and reclaim()",
            self.leased.request_id
        );
        // None while the interpreter ends: then nobody is there to tell.
        Python::try_attach(|py| {
            // Objects die also while an exception is on its way; that one goes on.
            let pending = PyErr::take(py);
            let category = py.get_type::<PyResourceWarning>();
            let text = CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default();
            if let Err(raised) = PyErr::warn(py, &category, &text, 1) {
                raised.write_unraisable(py, None);
            }
            if let Some(pending) = pending {
                pending.restore(py);
            }
        });
    }
}

#[pymethods]
impl BlockLease {
    /// The request the blocks were popped from.
    #[getter]
    fn request_id(&self) -> &str {
        &self.leased.request_id
    }

    /// Whether the blocks were given back.
    #[getter]
    fn released(&self) -> bool {
        matches!(*self.state(), State::Released)
    }

    /// Where each group's blocks end.
    #[getter]
    fn group_bounds(&self) -> Vec<u32> {
        self.leased.ends.to_vec()
    }

    fn __len__(&self) -> usize {
        self.leased.ids.len()
    }

    /// One block, or a list of a slice's blocks: such a list dissolves the lease.
    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let found = index_blocks(&self.objects, &self.leased.ids, index)?;
        if index.is_instance_of::<pyo3::types::PySlice>() {
            self.dissolve(index.py())?;
        }
        Ok(found)
    }

    /// The first position of a block, from `start` on and before `stop`.
    #[pyo3(signature = (value, start = 0, stop = isize::MAX, /))]
    fn index(&self, value: &Bound<'_, PyAny>, start: isize, stop: isize) -> PyResult<usize> {
        let wanted = self.objects.id(value).ok();
        let ids = &self.leased.ids;
        let searched = slice_bounds(ids.len(), start, stop);
        let (first, found) = (searched.start, ids.get(searched).unwrap_or(&[]));
        let at = found.iter().position(|block| Some(*block) == wanted);
        at.map(|at| first + at)
            .ok_or_else(|| PyValueError::new_err(format!("{value} is not in the lease")))
    }

    /// How often a block occurs; only the null block can occur more than once.
    #[pyo3(signature = (value, /))]
    fn count(&self, value: &Bound<'_, PyAny>) -> usize {
        let wanted = self.objects.id(value).ok();
        self.leased.ids.iter().filter(|block| Some(**block) == wanted).count()
    }

    fn __contains__(&self, value: &Bound<'_, PyAny>) -> bool {
        self.count(value) > 0
    }

    fn __iter__(slf: &Bound<'_, Self>) -> BlockLeaseIterator {
        BlockLeaseIterator { lease: slf.clone().unbind(), reversed: false, next: Mutex::new(0) }
    }

    fn __reversed__(slf: &Bound<'_, Self>) -> BlockLeaseIterator {
        BlockLeaseIterator { lease: slf.clone().unbind(), reversed: true, next: Mutex::new(0) }
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        if let Ok(other) = other.cast::<Self>() {
            let other = other.get();
            return Ok(self.leased.ids == other.leased.ids
                && self.objects.shared.pool_id == other.objects.shared.pool_id);
        }
        self.objects.list(py, &self.leased.ids)?.eq(other)
    }

    fn __repr__(&self) -> String {
        let ids: Vec<u32> = self.leased.ids.iter().map(|block| block.0).collect();
        format!("BlockLease({:?}, {ids:?})", self.leased.request_id)
    }
}

/// Walks a lease forwards or backwards, and still is the lease when it is given to `free_blocks`.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct BlockLeaseIterator {
    pub(crate) lease: Py<BlockLease>,
    pub(crate) reversed: bool,
    next: Mutex<usize>,
}

#[pymethods]
impl BlockLeaseIterator {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Whoever walks to the end may have made a plain list, which dissolves the lease.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let lease = self.lease.get();
        let at = {
            let mut next = lock(&self.next);
            let left = lease.leased.ids.len().checked_sub(*next + 1);
            let at = left.map(|left| if self.reversed { left } else { *next });
            *next += usize::from(at.is_some());
            at
        };
        let Some(at) = at else {
            lease.dissolve(py)?;
            return Ok(None);
        };
        let block = lease.objects.block(py, lease.leased.ids[at])?;
        Ok(Some(block.into_bound(py).into_any()))
    }

    fn __length_hint__(&self) -> usize {
        let next = *lock(&self.next);
        self.lease.get().leased.ids.len().saturating_sub(next)
    }
}

/// What is known of a lease that was garbage-collected unreleased. It carries no references itself.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct LostLease {
    number: u64,
    leased: Arc<Leased>,
    objects: Arc<BlockObjects>,
}

#[pymethods]
impl LostLease {
    /// The request the blocks were popped from.
    #[getter]
    fn request_id(&self) -> &str {
        &self.leased.request_id
    }

    /// Ids of the blocks that stay held, in table order.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let held = self.leased.ids.iter().filter(|block| !block.is_null());
        PyTuple::new(py, held.map(|block| block.0).collect::<Vec<_>>())
    }

    fn __repr__(&self) -> String {
        let held = self.leased.ids.iter().filter(|block| !block.is_null());
        let ids: Vec<u32> = held.map(|block| block.0).collect();
        format!("LostLease({:?}, {ids:?})", self.leased.request_id)
    }
}

/// The lost leases of a pool, oldest first.
pub(crate) fn lost_leases(objects: &Arc<BlockObjects>) -> Vec<LostLease> {
    let open = objects.shared.open_leases();
    let known = |number: &u64| open.held.get(number).map(|leased| (*number, leased.clone()));
    let lost = open.lost.keys().filter_map(known);
    lost.map(|(number, leased)| LostLease { number, leased, objects: objects.clone() }).collect()
}

/// Gives the blocks of a lost lease back.
pub(crate) fn reclaim(py: Python<'_>, objects: &BlockObjects, lost: &LostLease) -> PyResult<()> {
    let (shared, request_id) = (&objects.shared, &lost.leased.request_id);
    let theirs = lost.objects.shared.pool_id;
    if theirs != shared.pool_id {
        return Err(ForeignBlockError::new_err(format!(
            "the lost lease of request {request_id:?} belongs to another pool (pool {theirs}, this is \
             pool {})",
            shared.pool_id
        )));
    }
    let lease = {
        let mut open = shared.open_leases();
        open.held.remove(&lost.number);
        open.lost.remove(&lost.number)
    };
    let Some(lease) = lease else {
        return Err(DoubleFreeError::new_err(format!(
            "the lost lease of request {request_id:?} was reclaimed already; nothing was freed"
        )));
    };
    let freed =
        shared.with_sized(py, lost.leased.ids.len(), |core| core.manager().free_popped(lease))?;
    freed.map_err(|(error, _)| to_python(&error))
}
