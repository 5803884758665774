//! `kvyard.events.LiveSet`.

use std::sync::{Mutex, PoisonError};

use kvyard_core::semantics::RemovalEvent;
use kvyard_events::LiveSet as CoreLiveSet;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::invalid_argument;
use crate::event_batch::{BatchHeader, Payload, decode_error};

/// A rule about removals by its name in `Semantics`.
pub(crate) fn removal_event(name: &str) -> PyResult<RemovalEvent> {
    match name {
        "every_copy" => Ok(RemovalEvent::EveryCopy),
        "last_copy" => Ok(RemovalEvent::LastCopy),
        _ => {
            let reason = format!("must be \"every_copy\" or \"last_copy\", not {name:?}");
            Err(invalid_argument("removal_event", reason))
        }
    }
}

/// The encoded store of each live block, for consumers that come late.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct LiveSet {
    core: Mutex<CoreLiveSet>,
}

impl LiveSet {
    /// Runs `work`, which does not run Python, on the set, while other threads run Python: a dump of
    /// a large pool takes long, and the engine must go on. Its state is whole after a panic too: what
    /// can panic is memory that runs out.
    fn with<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut CoreLiveSet) -> R + Send) -> R {
        py.detach(|| work(&mut self.core.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

#[pymethods]
impl LiveSet {
    #[new]
    #[pyo3(signature = (removal_event = "last_copy"))]
    fn new(removal_event: &str) -> PyResult<Self> {
        let core = CoreLiveSet::new(self::removal_event(removal_event)?);
        Ok(Self { core: Mutex::new(core) })
    }

    /// Takes in a payload of the publisher, in order.
    fn apply(&self, py: Python<'_>, payload: Payload<'_>) -> PyResult<()> {
        let payload = payload.as_bytes();
        self.with(py, |core| core.apply(payload)).map_err(|error| decode_error(&error))
    }

    /// Forgets everything.
    fn clear(&self, py: Python<'_>) {
        self.with(py, CoreLiveSet::clear);
    }

    /// Batches that tell an empty consumer all that is live.
    #[pyo3(
        signature = (ts, data_parallel_rank = Some(0), wire_format = "router"),
        text_signature = "($self, ts, data_parallel_rank=0, wire_format='router')"
    )]
    fn dump<'py>(
        &self,
        py: Python<'py>,
        ts: f64,
        data_parallel_rank: Option<i64>,
        wire_format: &str,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let header = BatchHeader::new(wire_format, data_parallel_rank, Some(ts))?;
        let batches = self.with(py, |core| core.dump(ts, header.data_parallel_rank, header.format));
        Ok(batches.iter().map(|batch| PyBytes::new(py, batch)).collect())
    }

    /// The latest time of a batch that was taken in.
    #[getter]
    fn latest_ts(&self, py: Python<'_>) -> f64 {
        self.with(py, |core| core.latest_timestamp())
    }

    /// Bytes that the set takes.
    #[getter]
    fn num_bytes(&self, py: Python<'_>) -> usize {
        self.with(py, |core| core.num_bytes())
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.with(py, |core| core.len())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("LiveSet({} blocks)", self.__len__(py))
    }
}
