//! One core behind one lock. A panic inside poisons it for good: its state may be half changed, and
//! every later call says so instead of deciding on it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::Instant;

use kvyard_core::event_log::EventLog;
use kvyard_core::{BlockPool, KVCacheError, KVCacheManager, Semantics};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::error::{OrPython, PoisonedError};
use crate::event_batch::BatchWriter;

/// A manager, or a pool on its own.
#[derive(Debug)]
pub(crate) enum Core {
    Pool(Box<BlockPool>),
    Manager(Box<KVCacheManager>),
}

impl Core {
    pub(crate) fn pool(&self) -> &BlockPool {
        match self {
            Self::Pool(pool) => pool,
            Self::Manager(manager) => manager.pool(),
        }
    }

    pub(crate) fn pool_mut(&mut self) -> &mut BlockPool {
        match self {
            Self::Pool(pool) => pool,
            Self::Manager(manager) => manager.pool_mut(),
        }
    }

    /// An ownership error with the names of the requests that hold the block.
    pub(crate) fn with_owners(&self, error: KVCacheError) -> KVCacheError {
        match self {
            Self::Pool(_) => error,
            Self::Manager(manager) => manager.with_owners(error),
        }
    }

    pub(crate) fn manager(&mut self) -> &mut KVCacheManager {
        match self {
            Self::Manager(manager) => manager,
            Self::Pool(_) => unreachable!("a KVCacheManager is made with a manager core"),
        }
    }
}

/// What all Python objects of one pool share.
#[derive(Debug)]
pub(crate) struct Shared {
    core: Mutex<Core>,
    /// An event log to swap in while the full one is read.
    pub(crate) spare_events: Mutex<EventLog>,
    /// What the next batch of events is written with and into.
    pub(crate) spare_writer: Mutex<BatchWriter>,
    pub(crate) pool_id: u64,
    pub(crate) num_blocks: u32,
    pub(crate) enable_caching: bool,
    pub(crate) hash_block_size: u32,
    pub(crate) enable_kv_cache_events: bool,
    /// Width of the hashes seen so far, 0 before the first.
    hash_width: AtomicUsize,
    pub(crate) semantics: Semantics,
    has_residency: bool,
    started: Instant,
}

/// Digest bytes shown where no hash function was seen yet.
const DEFAULT_HASH_WIDTH: usize = 32;

impl Shared {
    pub(crate) fn new(core: Core, has_residency: bool) -> Self {
        let config = *core.pool().config();
        Self {
            pool_id: core.pool().id(),
            num_blocks: config.num_blocks,
            enable_caching: config.enable_caching,
            hash_block_size: config.hash_block_size,
            enable_kv_cache_events: config.enable_kv_cache_events,
            core: Mutex::new(core),
            spare_events: Mutex::default(),
            spare_writer: Mutex::default(),
            hash_width: AtomicUsize::new(0),
            semantics: config.semantics,
            has_residency,
            started: Instant::now(),
        }
    }

    /// Runs `work` on the core, alone. `work` must not run Python.
    #[inline]
    pub(crate) fn with<R>(&self, py: Python<'_>, work: impl FnOnce(&mut Core) -> R) -> PyResult<R> {
        self.run(py, work).map_err(PoisonedError::new_err)
    }

    /// As `with`; the panic's text comes back instead of an exception.
    pub(crate) fn run<R>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Core) -> R,
    ) -> Result<R, String> {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut core = match self.core.try_lock() {
                Ok(core) => core,
                Err(TryLockError::Poisoned(_)) => return None,
                // Wait without the interpreter lock, so that the holder can finish.
                Err(TryLockError::WouldBlock) => self.core.lock_py_attached(py).ok()?,
            };
            if self.has_residency {
                let now = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
                if let Some(residency) = core.pool_mut().residency_mut() {
                    residency.set_now(now);
                }
            }
            Some(work(&mut core))
        }));
        match outcome {
            Ok(Some(result)) => Ok(result),
            Ok(None) => Err("an earlier call broke an invariant; this manager is unusable".into()),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied());
                Err(text.unwrap_or("the core panicked").to_owned())
            }
        }
    }

    /// As `with`, for work that can be refused.
    #[inline]
    pub(crate) fn try_with<R>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Core) -> kvyard_core::Result<R>,
    ) -> PyResult<R> {
        self.with(py, work)?.or_python()
    }

    /// Digest bytes that count.
    #[inline]
    pub(crate) fn hash_width(&self) -> usize {
        match self.hash_width.load(Ordering::Relaxed) {
            0 => DEFAULT_HASH_WIDTH,
            width => width,
        }
    }

    /// Notes the width of a request's hashes; refuses a second one.
    #[inline]
    pub(crate) fn bind_hash_width(&self, py: Python<'_>, width: usize) -> PyResult<()> {
        if width == 0 || self.hash_width.load(Ordering::Relaxed) == width {
            return Ok(());
        }
        self.try_with(py, |core| core.pool_mut().bind_hash_width(width))?;
        self.hash_width.store(width, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvyard_core::BlockPoolConfig;

    #[test]
    fn a_panic_poisons_for_good() {
        let config = BlockPoolConfig {
            num_blocks: 4,
            enable_caching: true,
            hash_block_size: 4,
            enable_kv_cache_events: false,
            semantics: Semantics::default(),
        };
        let pool = BlockPool::new(config, None).unwrap();
        let shared = Shared::new(Core::Pool(Box::new(pool)), false);
        Python::initialize();
        Python::attach(|py| {
            assert_eq!(shared.run(py, |core| core.pool().num_blocks()), Ok(4));
            let broken = shared.run(py, |_| panic!("I4: made up"));
            assert_eq!(broken, Err::<(), _>("I4: made up".to_owned()));
            assert!(
                shared.run(py, |core| core.pool().num_blocks()).unwrap_err().contains("unusable")
            );
        });
    }
}
