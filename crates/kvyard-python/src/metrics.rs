//! How long blocks live: `KVCacheMetricsCollector`.

use std::sync::{Arc, Mutex};

use kvyard_core::stats::ResidencyMetrics;
use pyo3::prelude::*;

use crate::error::{OrPython, invalid_argument};
use crate::shared::{Shared, lock};

/// The life of one sampled block, from allocation to re-allocation or eviction; seconds.
#[pyclass(frozen, get_all, eq, module = "kvyard._kvyard")]
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_field_names, reason = "vLLM's names, with their unit")]
pub(crate) struct KVCacheEvictionEvent {
    /// From allocation to eviction.
    lifetime_seconds: f64,
    /// From the last access to eviction.
    idle_seconds: f64,
    /// Between successive accesses, of which the last four are kept.
    reuse_gaps_seconds: Vec<f64>,
}

#[pymethods]
impl KVCacheEvictionEvent {
    fn __repr__(&self) -> String {
        format!(
            "KVCacheEvictionEvent(lifetime_seconds={}, idle_seconds={}, reuse_gaps_seconds={:?})",
            self.lifetime_seconds, self.idle_seconds, self.reuse_gaps_seconds
        )
    }
}

/// Samples the lives of blocks. Give it to one manager or pool.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct KVCacheMetricsCollector {
    #[pyo3(get)]
    sample_rate: f64,
    seed: u64,
    attached: Mutex<Option<Arc<Shared>>>,
}

impl KVCacheMetricsCollector {
    /// Metrics for a new pool.
    pub(crate) fn start(&self) -> PyResult<ResidencyMetrics> {
        if lock(&self.attached).is_some() {
            return Err(invalid_argument(
                "metrics_collector",
                "it belongs to another manager already",
            ));
        }
        ResidencyMetrics::new(self.sample_rate, self.seed).or_python()
    }

    pub(crate) fn attach(&self, shared: &Arc<Shared>) {
        *lock(&self.attached) = Some(shared.clone());
    }

    fn attached(&self) -> Option<Arc<Shared>> {
        lock(&self.attached).clone()
    }
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of a process's life are below 2^53")]
fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

#[pymethods]
impl KVCacheMetricsCollector {
    #[new]
    #[pyo3(signature = (sample_rate = 0.01, seed = None))]
    fn new(sample_rate: f64, seed: Option<u64>) -> PyResult<Self> {
        ResidencyMetrics::new(sample_rate, 0).or_python()?;
        let seed = seed.unwrap_or_else(|| {
            use std::hash::{BuildHasher, RandomState};
            RandomState::new().hash_one(0)
        });
        Ok(Self { sample_rate, seed, attached: Mutex::new(None) })
    }

    /// The lives that ended since the last call.
    fn drain_events(&self, py: Python<'_>) -> PyResult<Vec<KVCacheEvictionEvent>> {
        let Some(shared) = self.attached() else {
            return Ok(Vec::new());
        };
        let samples = shared.with(py, |core| {
            core.pool_mut().residency_mut().map(ResidencyMetrics::drain).unwrap_or_default()
        })?;
        let event = |sample: kvyard_core::stats::ResidencySample| KVCacheEvictionEvent {
            lifetime_seconds: seconds(sample.lifetime_ns),
            idle_seconds: seconds(sample.idle_ns),
            reuse_gaps_seconds: sample.reuse_gaps_ns.into_iter().map(seconds).collect(),
        };
        Ok(samples.into_iter().map(event).collect())
    }

    /// Forgets everything.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(shared) = self.attached() {
            shared.with(py, |core| {
                if let Some(residency) = core.pool_mut().residency_mut() {
                    residency.reset();
                }
            })?;
        }
        Ok(())
    }
}
