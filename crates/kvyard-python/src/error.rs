//! From the core's errors to the exception tree of `kvyard.errors`.

use kvyard_core::KVCacheError;
use pyo3::prelude::*;

pyo3::import_exception!(kvyard.errors, ConfigError);
pyo3::import_exception!(kvyard.errors, InvalidArgumentError);
pyo3::import_exception!(kvyard.errors, OutOfBlocksError);
pyo3::import_exception!(kvyard.errors, UnknownRequestError);
pyo3::import_exception!(kvyard.errors, DoubleFreeError);
pyo3::import_exception!(kvyard.errors, StaleBlockError);
pyo3::import_exception!(kvyard.errors, EventDecodeError);
pyo3::import_exception!(kvyard.errors, ForeignBlockError);
pyo3::import_exception!(kvyard.errors, NotOwnedError);
pyo3::import_exception!(kvyard.errors, AlreadyTrackedError);
pyo3::import_exception!(kvyard.errors, HashConflictError);
pyo3::import_exception!(kvyard.errors, PoisonedError);
pyo3::import_exception!(kvyard.errors, InvariantError);

/// The Python exception of a core error.
pub(crate) fn to_python(error: &KVCacheError) -> PyErr {
    let message = error.to_string();
    match error {
        KVCacheError::Config { .. } => ConfigError::new_err(message),
        KVCacheError::OutOfBlocks { .. } => OutOfBlocksError::new_err(message),
        KVCacheError::UnknownRequest { .. } => UnknownRequestError::new_err(message),
        KVCacheError::DoubleFree { .. } => DoubleFreeError::new_err(message),
        KVCacheError::StaleBlock { .. } => StaleBlockError::new_err(message),
        KVCacheError::ForeignBlock { .. } => ForeignBlockError::new_err(message),
        KVCacheError::NotOwned { .. } => NotOwnedError::new_err(message),
        KVCacheError::AlreadyTracked { .. } => AlreadyTrackedError::new_err(message),
        KVCacheError::HashConflict { .. } => HashConflictError::new_err(message),
        KVCacheError::OutOfMemory(_) => pyo3::exceptions::PyMemoryError::new_err(message),
        // `InvalidArgument`, and whatever a later core adds before this match knows it.
        _ => InvalidArgumentError::new_err(message),
    }
}

/// An `InvalidArgumentError`.
pub(crate) fn invalid_argument(argument: &'static str, reason: impl Into<String>) -> PyErr {
    to_python(&KVCacheError::argument(argument, reason))
}

/// A constructor's `ConfigError`.
pub(crate) fn config_error(field: &str, reason: &str) -> PyErr {
    ConfigError::new_err(format!("{field}: {reason}"))
}

/// `result?` with the error translated.
pub(crate) trait OrPython<T> {
    /// The value, or the Python exception.
    fn or_python(self) -> PyResult<T>;
}

impl<T> OrPython<T> for Result<T, KVCacheError> {
    fn or_python(self) -> PyResult<T> {
        self.map_err(|error| to_python(&error))
    }
}
