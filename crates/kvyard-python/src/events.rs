//! The event log as the objects of `kvyard.events`.

use kvyard_core::BlockHash;
use kvyard_core::event_log::{BlockExtraKeys, KVCacheEvent};
use kvyard_core::hashing::ExtraKey;
use kvyard_core::spec::AttentionKind;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple, PyType};

use crate::shared::Shared;

/// Where the pool's blocks live, as consumers name it.
const MEDIUM: &str = "GPU";

pub(crate) struct EventClasses {
    pub(crate) stored: Py<PyType>,
    pub(crate) removed: Py<PyType>,
    pub(crate) cleared: Py<PyType>,
    pub(crate) batch: Py<PyType>,
}

pub(crate) fn event_classes(py: Python<'_>) -> PyResult<&EventClasses> {
    static CLASSES: PyOnceLock<EventClasses> = PyOnceLock::new();
    CLASSES.get_or_try_init(py, || {
        let module = py.import("kvyard.events")?;
        let class = |name: &str| -> PyResult<Py<PyType>> {
            Ok(module.getattr(name)?.cast_into::<PyType>()?.unbind())
        };
        Ok(EventClasses {
            stored: class("BlockStored")?,
            removed: class("BlockRemoved")?,
            cleared: class("AllBlocksCleared")?,
            batch: class("KVEventBatch")?,
        })
    })
}

/// How hashes are named: vLLM's `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`, on unless it is "0".
pub(crate) fn use_int_block_hashes() -> bool {
    std::env::var("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES").map_or(true, |value| value.trim() != "0")
}

/// Takes the waiting events of a pool. `kinds` are the kinds of its groups, if a manager knows them.
pub(crate) fn take_events(
    py: Python<'_>,
    shared: &Shared,
    kinds: &[AttentionKind],
    use_int_hashes: bool,
) -> PyResult<Vec<Py<PyAny>>> {
    if !shared.enable_kv_cache_events {
        return Ok(Vec::new());
    }
    let mut log = std::mem::take(&mut *shared.spare_events());
    shared.with(py, |core| core.pool_mut().take_events(&mut log))?;
    let reader = Reader {
        py,
        classes: event_classes(py)?,
        width: shared.hash_width(),
        kinds,
        use_int_hashes,
    };
    let events = log.iter().map(|event| reader.object(&event)).collect();
    log.clear();
    *shared.spare_events() = log;
    events
}

struct Reader<'a, 'py> {
    py: Python<'py>,
    classes: &'a EventClasses,
    width: usize,
    kinds: &'a [AttentionKind],
    use_int_hashes: bool,
}

impl<'py> Reader<'_, 'py> {
    fn hash(&self, hash: &BlockHash) -> PyResult<Bound<'py, PyAny>> {
        if self.use_int_hashes {
            hash.external(self.width).into_bound_py_any(self.py)
        } else {
            Ok(PyBytes::new(self.py, &hash.0[..self.width]).into_any())
        }
    }

    fn hashes(&self, hashes: &[BlockHash]) -> PyResult<Bound<'py, PyList>> {
        let hashes: Vec<_> = hashes.iter().map(|hash| self.hash(hash)).collect::<PyResult<_>>()?;
        PyList::new(self.py, hashes)
    }

    fn object(&self, event: &KVCacheEvent<'_>) -> PyResult<Py<PyAny>> {
        let py = self.py;
        match *event {
            KVCacheEvent::AllBlocksCleared => self.classes.cleared.call0(py),
            KVCacheEvent::BlockRemoved { block_hashes, group } => {
                self.classes.removed.call1(py, (self.hashes(block_hashes)?, MEDIUM, group.0))
            }
            KVCacheEvent::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                adapter,
                extra_keys,
                group,
                ..
            } => {
                let kind = self.kinds.get(group.index());
                let arguments = (
                    self.hashes(block_hashes)?,
                    parent_block_hash.map(|hash| self.hash(hash)).transpose()?,
                    PyList::new(py, token_ids)?,
                    block_size,
                    adapter.map(|adapter| adapter.id),
                    MEDIUM,
                    adapter.map(|adapter| PyString::new(py, &adapter.name)),
                    self.extra_keys(block_hashes.len(), extra_keys)?,
                    group.0,
                    kind.map(AttentionKind::event_kind),
                    kind.and_then(AttentionKind::event_sliding_window),
                );
                self.classes.stored.call1(py, arguments)
            }
        }
    }

    /// One entry for each hash, None where a block has no extra keys; None for no hashes.
    fn extra_keys(
        &self,
        num_hashes: usize,
        extra_keys: BlockExtraKeys<'_>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        if num_hashes == 0 {
            return Ok(None);
        }
        if extra_keys.is_empty() {
            let nothing = std::iter::repeat_n(None::<Bound<'py, PyTuple>>, num_hashes);
            return PyList::new(self.py, nothing.collect::<Vec<_>>()).map(Some);
        }
        let entries: Vec<Option<Bound<'py, PyTuple>>> = extra_keys
            .iter()
            .map(|members| {
                if members.is_empty() {
                    return Ok(None);
                }
                let members: Vec<Bound<'py, PyAny>> =
                    members.iter().map(|key| self.extra_key(key)).collect::<PyResult<_>>()?;
                PyTuple::new(self.py, members).map(Some)
            })
            .collect::<PyResult<_>>()?;
        PyList::new(self.py, entries).map(Some)
    }

    /// Untagged under all semantics: consumers know no other form.
    fn extra_key(&self, key: &ExtraKey) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        match key {
            ExtraKey::Lora { name: text, .. } | ExtraKey::CacheSalt(text) => {
                Ok(PyString::new(py, &text.text).into_any())
            }
            ExtraKey::Media { identifier, offset } => {
                (PyString::new(py, &identifier.text), *offset).into_bound_py_any(py)
            }
            ExtraKey::PromptEmbeds { digest, .. } => Ok(PyBytes::new(py, digest).into_any()),
            ExtraKey::Bytes { bytes, .. } => Ok(PyBytes::new(py, bytes).into_any()),
        }
    }
}

/// For a pool on its own, which does not know what its groups are.
pub(crate) fn take_pool_events(py: Python<'_>, shared: &Shared) -> PyResult<Vec<Py<PyAny>>> {
    take_events(py, shared, &[], use_int_block_hashes())
}
