//! One core behind one lock. A panic inside poisons it for good: its state may be half changed, and
//! every later call says so instead of deciding on it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use kvyard_core::event_log::EventLog;
use kvyard_core::hashing::FingerprintKey;
use kvyard_core::{BlockPool, KVCacheError, KVCacheManager, Semantics};
use pyo3::prelude::*;
use pyo3::sync::{MutexExt, PyOnceLock};

use crate::batch_writer::BatchWriter;
use crate::error::{OrPython, PoisonedError};
use crate::open_leases::OpenLeases;

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

/// Locks without keeping the interpreter from whoever holds the lock: the holder may need it to go on.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => {
            Python::attach(|py| mutex.lock_py_attached(py)).unwrap_or_else(PoisonError::into_inner)
        }
    }
}

/// Blocks from which on work counts as long: some 100 microseconds. To give the interpreter lock away
/// and to get it back costs more than a short call, and may cost a switch interval of 5 milliseconds.
pub(crate) const LONG: usize = 1024;

/// What all Python objects of one pool share.
#[derive(Debug)]
pub(crate) struct Shared {
    core: Mutex<Core>,
    spare_events: Mutex<EventLog>,
    spare_writer: Mutex<BatchWriter>,
    open_leases: Mutex<OpenLeases>,
    pub(crate) pool_id: u64,
    pub(crate) num_blocks: u32,
    pub(crate) enable_caching: bool,
    pub(crate) hash_block_size: u32,
    pub(crate) enable_kv_cache_events: bool,
    /// Width of the hashes seen so far, 0 before the first.
    hash_width: AtomicUsize,
    pub(crate) semantics: Semantics,
    /// Where hits are verified: the process's secret.
    pub(crate) fingerprint_key: Option<FingerprintKey>,
    has_residency: bool,
    started: Instant,
}

/// Digest bytes shown where no hash function was seen yet.
const DEFAULT_HASH_WIDTH: usize = 32;

impl Shared {
    pub(crate) fn new(
        core: Core,
        has_residency: bool,
        fingerprint_key: Option<FingerprintKey>,
    ) -> Self {
        let config = *core.pool().config();
        Self {
            fingerprint_key,
            pool_id: core.pool().id(),
            num_blocks: config.num_blocks,
            enable_caching: config.enable_caching,
            hash_block_size: config.hash_block_size,
            enable_kv_cache_events: config.enable_kv_cache_events,
            core: Mutex::new(core),
            spare_events: Mutex::default(),
            spare_writer: Mutex::default(),
            open_leases: Mutex::default(),
            hash_width: AtomicUsize::new(0),
            semantics: config.semantics,
            has_residency,
            started: Instant::now(),
        }
    }

    /// An event log to swap in while the full one is read.
    pub(crate) fn spare_events(&self) -> MutexGuard<'_, EventLog> {
        lock(&self.spare_events)
    }

    /// What the next batch of events is written with and into.
    pub(crate) fn spare_writer(&self) -> MutexGuard<'_, BatchWriter> {
        lock(&self.spare_writer)
    }

    /// The leases that were not given back yet.
    pub(crate) fn open_leases(&self) -> MutexGuard<'_, OpenLeases> {
        lock(&self.open_leases)
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
        // Wait without the interpreter lock, so that the holder can finish.
        let core = match self.core.try_lock() {
            Err(TryLockError::WouldBlock) => self.core.lock_py_attached(py).ok(),
            tried => tried.ok(),
        };
        self.run_locked(core, work)
    }

    /// As `run`, for work that takes long if `size` is large: then other threads run Python meanwhile.
    #[inline]
    pub(crate) fn run_sized<R: Send>(
        &self,
        py: Python<'_>,
        size: usize,
        work: impl FnOnce(&mut Core) -> R + Send,
    ) -> Result<R, String> {
        if size < LONG {
            return self.run(py, work);
        }
        py.detach(|| self.run_locked(self.core.lock().ok(), work))
    }

    fn run_locked<R>(
        &self,
        core: Option<MutexGuard<'_, Core>>,
        work: impl FnOnce(&mut Core) -> R,
    ) -> Result<R, String> {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut core = core?;
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
            Ok(None) => Err(String::from(
                "an earlier call broke an invariant; this manager is unusable, its report() tells the \
                 last operations",
            )),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied());
                Err(text.unwrap_or("the core panicked").to_owned())
            }
        }
    }

    /// As `with`, see `run_sized`.
    #[inline]
    pub(crate) fn with_sized<R: Send>(
        &self,
        py: Python<'_>,
        size: usize,
        work: impl FnOnce(&mut Core) -> R + Send,
    ) -> PyResult<R> {
        self.run_sized(py, size, work).map_err(PoisonedError::new_err)
    }

    /// The report on a broken invariant; also of a core that is poisoned. None for a pool by itself.
    pub(crate) fn report(&self, violation: &str) -> Option<String> {
        let core = lock(&self.core);
        match &*core {
            Core::Pool(_) => None,
            // The state is not to be trusted: a report that fails is none.
            Core::Manager(manager) => {
                catch_unwind(AssertUnwindSafe(|| manager.report(violation))).ok()
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

/// The process's secret for second fingerprints, from the system's generator.
pub(crate) fn fingerprint_key(py: Python<'_>) -> PyResult<FingerprintKey> {
    static KEY: PyOnceLock<FingerprintKey> = PyOnceLock::new();
    KEY.get_or_try_init(py, || {
        let secret = py.import("os")?.call_method1("urandom", (16,))?.extract()?;
        Ok(FingerprintKey::new(secret))
    })
    .copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvyard_core::BlockPoolConfig;

    /// Whoever finds the manager poisoned still gets the report, with what came before the end.
    #[test]
    fn a_poisoned_manager_still_reports() {
        let config = kvyard_core::KVCacheManagerConfig::new(6, 4, 64);
        let mut manager = KVCacheManager::new(config, None).unwrap();
        let lease = manager.pool_mut().get_new_blocks(2).unwrap();
        let shared = Shared::new(Core::Manager(Box::new(manager)), false, None);
        Python::initialize();
        Python::attach(|py| {
            let freed = shared.run(py, |core| core.pool_mut().free(lease));
            assert!(freed.is_ok_and(|freed| freed.is_ok()));
            let broken = shared.run(py, |core| {
                core.manager().break_invariant(kvyard_core::BlockId(2));
                core.manager().audit(1000)
            });
            let violation = broken.unwrap_err();
            assert!(violation.contains("I2: block 2"), "{violation}");
            assert!(shared.run(py, |core| core.pool().num_blocks()).is_err());
            let report = shared.report(&violation).unwrap();
            assert!(report.contains("I2: block 2 in the free queue"), "{report}");
            assert!(report.contains("\"op\":\"get_new_blocks(2)\""), "{report}");
        });
    }

    #[test]
    fn a_panic_poisons_for_good() {
        let config = BlockPoolConfig {
            num_blocks: 4,
            enable_caching: true,
            hash_block_size: 4,
            enable_kv_cache_events: false,
            verify_tokens: false,
            semantics: Semantics::default(),
        };
        let pool = BlockPool::new(config, None).unwrap();
        let shared = Shared::new(Core::Pool(Box::new(pool)), false, None);
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
