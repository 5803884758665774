//! `kvyard.events.PrefixIndex`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvyard_core::semantics::RemovalEvent;
use kvyard_events::{PrefixIndex as CoreIndex, Prompt, WorkerId, read_batch};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;

use crate::convert::token_ids;
use crate::error::invalid_argument;
use crate::event_batch::{Payload, decode_error, with_events};
use crate::live_set::removal_event;

#[derive(Debug)]
struct Index {
    core: CoreIndex,
    /// The caller's names of workers, by their numbers.
    names: Vec<Option<(WorkerId, Py<PyAny>)>>,
}

/// How many leading tokens each worker holds.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    index: Mutex<Index>,
    /// The numbers of workers, by the caller's names. Not behind the lock: to compare names may run
    /// Python.
    numbers: Py<PyDict>,
    removal_event: RemovalEvent,
}

impl PrefixIndex {
    fn lock<'a>(&'a self, py: Python<'_>) -> MutexGuard<'a, Index> {
        self.index.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }

    fn id(&self, worker: &Bound<'_, PyAny>) -> PyResult<Option<WorkerId>> {
        let py = worker.py();
        let Some(number) = self.numbers.bind(py).get_item(worker)? else {
            return Ok(None);
        };
        let number: usize = number.extract()?;
        let index = self.lock(py);
        Ok(index.names.get(number).and_then(Option::as_ref).map(|(id, _)| *id))
    }

    fn add(&self, worker: &Bound<'_, PyAny>, rule: RemovalEvent) -> PyResult<WorkerId> {
        let py = worker.py();
        let id = {
            let mut index = self.lock(py);
            let id = index.core.add_worker(rule);
            if index.names.len() <= id.index() {
                index.names.resize_with(id.index() + 1, || None);
            }
            index.names[id.index()] = Some((id, worker.clone().unbind()));
            id
        };
        // Another thread may have been faster: then its worker is the one.
        let arguments = (worker, id.index());
        let kept = self.numbers.bind(py).call_method1("setdefault", arguments);
        let kept = kept.and_then(|kept| kept.extract::<usize>());
        if kept.as_ref().is_ok_and(|kept| *kept == id.index()) {
            return Ok(id);
        }
        let forgotten = {
            let mut index = self.lock(py);
            index.core.remove_worker(id);
            index.names[id.index()].take()
        };
        drop(forgotten);
        kept?;
        self.id(worker)?.ok_or_else(|| invalid_argument("worker", "was removed meanwhile"))
    }

    fn id_or_add(&self, worker: &Bound<'_, PyAny>) -> PyResult<WorkerId> {
        match self.id(worker)? {
            Some(id) => Ok(id),
            None => self.add(worker, self.removal_event),
        }
    }
}

#[pymethods]
impl PrefixIndex {
    #[new]
    #[pyo3(signature = (removal_event = "last_copy"))]
    fn new(py: Python<'_>, removal_event: &str) -> PyResult<Self> {
        Ok(Self {
            index: Mutex::new(Index { core: CoreIndex::new(), names: Vec::new() }),
            numbers: PyDict::new(py).unbind(),
            removal_event: self::removal_event(removal_event)?,
        })
    }

    /// A worker that tells removals in its own way.
    #[pyo3(signature = (worker, removal_event = None))]
    fn add_worker(&self, worker: &Bound<'_, PyAny>, removal_event: Option<&str>) -> PyResult<()> {
        let rule = removal_event.map_or(Ok(self.removal_event), self::removal_event)?;
        if self.id(worker)?.is_some() {
            let reason = format!("{worker} is known already; remove it first");
            return Err(invalid_argument("worker", reason));
        }
        self.add(worker, rule).map(drop)
    }

    /// Forgets a worker.
    fn remove_worker(&self, worker: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = worker.py();
        if let Some(id) = self.id(worker)? {
            self.numbers.bind(py).del_item(worker)?;
            let forgotten = {
                let mut index = self.lock(py);
                index.core.remove_worker(id);
                index.names[id.index()].take()
            };
            drop(forgotten);
        }
        Ok(())
    }

    /// Takes in a batch of a worker: a payload, or a `KVEventBatch`.
    fn apply(&self, worker: &Bound<'_, PyAny>, batch: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = worker.py();
        if let Ok(payload) = batch.extract::<Payload<'_>>() {
            // Read before an unknown worker becomes known.
            let batch = read_batch(payload.as_bytes()).map_err(|error| decode_error(&error))?;
            let id = self.id_or_add(worker)?;
            self.lock(py).core.apply(id, &batch.events);
            return Ok(());
        }
        let Some(events) = batch.getattr_opt("events")? else {
            let kind = batch.get_type().name()?;
            let reason = format!("must be bytes or a KVEventBatch, not {kind}");
            return Err(invalid_argument("batch", reason));
        };
        with_events(&events, |events| {
            let id = self.id_or_add(worker)?;
            self.lock(py).core.apply(id, events);
            Ok(())
        })?
    }

    /// For each worker how many leading tokens it holds.
    #[pyo3(signature = (token_ids, *, lora_name = None, cache_salt = None, extra_keys = None))]
    fn matched_tokens<'py>(
        &self,
        token_ids: &Bound<'py, PyAny>,
        lora_name: Option<PyBackedStr>,
        cache_salt: Option<PyBackedStr>,
        extra_keys: Option<Vec<(PyBackedStr, u32)>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let py = token_ids.py();
        let tokens = self::token_ids(token_ids)?;
        let media = extra_keys.unwrap_or_default();
        if media.windows(2).any(|pair| pair[0].1 > pair[1].1) {
            let reason = "must be sorted by position";
            return Err(invalid_argument("extra_keys", reason));
        }
        let media: Vec<(&str, u32)> = media.iter().map(|(text, at)| (&**text, *at)).collect();
        let prompt = Prompt {
            token_ids: &tokens,
            lora_name: lora_name.as_deref(),
            cache_salt: cache_salt.as_deref(),
            media: &media,
        };
        let found: Vec<(Py<PyAny>, u32)> = {
            let index = self.lock(py);
            let named = |(id, tokens): (WorkerId, u32)| {
                let (_, name) = index.names[id.index()].as_ref()?;
                Some((name.clone_ref(py), tokens))
            };
            index.core.matched_tokens(&prompt).into_iter().filter_map(named).collect()
        };
        let matched = PyDict::new(py);
        for (name, tokens) in found {
            matched.set_item(name, tokens)?;
        }
        Ok(matched)
    }

    /// Blocks that a worker holds, all groups together; 0 for an unknown one.
    fn num_blocks(&self, worker: &Bound<'_, PyAny>) -> PyResult<usize> {
        let id = self.id(worker)?;
        let index = self.lock(worker.py());
        Ok(id.map_or(0, |id| index.core.num_blocks(id)))
    }

    /// Bytes that the index takes.
    #[getter]
    fn num_bytes(&self, py: Python<'_>) -> usize {
        self.lock(py).core.num_bytes()
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.lock(py).core.workers().count()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("PrefixIndex({} workers)", self.__len__(py))
    }
}
