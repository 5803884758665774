//! Growth of the core's containers. A call asks for all the memory that it may need before its first
//! change, through [`Grow`] and nowhere else: what follows can neither fail nor grow. So an error
//! leaves the state as it was, and tests can let any one request for memory fail.

use std::hash::{BuildHasher, Hash};

use hashbrown::{HashMap, HashSet, HashTable};
use smallvec::SmallVec;

use crate::error::{KVCacheError, Result};

/// Containers that grow only where that may fail.
pub(crate) trait Grow {
    /// Makes room for `additional` elements more.
    ///
    /// # Errors
    /// `OutOfMemory`; nothing has changed.
    fn make_room(&mut self, additional: usize) -> Result<()>;
}

fn refused(what: &str, additional: usize) -> KVCacheError {
    KVCacheError::OutOfMemory(format!("{additional} more {what}"))
}

impl<T> Grow for Vec<T> {
    #[inline]
    fn make_room(&mut self, additional: usize) -> Result<()> {
        faults::check()?;
        self.try_reserve(additional).map_err(|_| refused("elements of a list", additional))
    }
}

impl<A: smallvec::Array> Grow for SmallVec<A> {
    #[inline]
    fn make_room(&mut self, additional: usize) -> Result<()> {
        faults::check()?;
        self.try_reserve(additional).map_err(|_| refused("elements of a short list", additional))
    }
}

impl<T: Ord> Grow for std::collections::BinaryHeap<T> {
    #[inline]
    fn make_room(&mut self, additional: usize) -> Result<()> {
        faults::check()?;
        self.try_reserve(additional).map_err(|_| refused("elements of a heap", additional))
    }
}

impl Grow for String {
    #[inline]
    fn make_room(&mut self, additional: usize) -> Result<()> {
        faults::check()?;
        self.try_reserve(additional).map_err(|_| refused("bytes of a name", additional))
    }
}

impl<K: Eq + Hash, V, S: BuildHasher> Grow for HashMap<K, V, S> {
    #[inline]
    fn make_room(&mut self, additional: usize) -> Result<()> {
        faults::check()?;
        self.try_reserve(additional).map_err(|_| refused("entries of a map", additional))
    }
}

impl<K: Eq + Hash, S: BuildHasher> Grow for HashSet<K, S> {
    #[inline]
    fn make_room(&mut self, additional: usize) -> Result<()> {
        faults::check()?;
        self.try_reserve(additional).map_err(|_| refused("elements of a set", additional))
    }
}

/// As [`Grow::make_room`], for a table that keeps no hasher.
#[inline]
pub(crate) fn grow_table<T>(
    table: &mut HashTable<T>,
    additional: usize,
    hasher: impl Fn(&T) -> u64,
) -> Result<()> {
    faults::check()?;
    table.try_reserve(additional, hasher).map_err(|_| refused("keys", additional))
}

/// Requests for memory that fail on purpose; outside of tests there are none.
#[cfg(not(feature = "testing"))]
mod faults {
    #[expect(clippy::unnecessary_wraps, reason = "under `testing` it can fail")]
    #[inline]
    pub(super) fn check() -> crate::error::Result<()> {
        Ok(())
    }
}

/// Requests for memory that fail on purpose, in the thread that asks for them.
#[cfg(feature = "testing")]
pub mod faults {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<u64> = const { Cell::new(0) };
    }

    /// Lets the `k`-th request for memory from now on fail, the first being 1; 0: none.
    pub fn fail_at(k: u64) {
        LEFT.set(k);
    }

    /// Whether the request has still to come.
    pub fn is_pending() -> bool {
        LEFT.get() > 0
    }

    #[inline]
    pub(super) fn check() -> crate::error::Result<()> {
        let left = LEFT.get();
        LEFT.set(left.saturating_sub(1));
        if left == 1 {
            return Err(crate::error::KVCacheError::OutOfMemory("as a test wants it".into()));
        }
        Ok(())
    }
}
