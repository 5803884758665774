//! What Python calls on a `kvyard.BlockHasher`. It stands apart from the class, since requests are made
//! with hashers and hashers are called with requests.

use std::sync::Arc;

use kvyard_core::BlockHash;
use kvyard_core::hashing::{BlockHasher as CoreHasher, HashAlgorithm};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert::block_hash;
use crate::error::OrPython;
use crate::hashing::{BlockHasher, HashFunction};
use crate::request::RequestArgument;
use crate::semantics::Semantics;

#[derive(FromPyObject)]
enum FunctionOrName {
    Function(HashFunction),
    Name(String),
}

#[pymethods]
impl BlockHasher {
    #[new]
    #[pyo3(signature = (hash_function, none_hash, hash_block_size, semantics = Semantics(kvyard_core::Semantics::corrected())))]
    fn new(
        hash_function: FunctionOrName,
        none_hash: &[u8],
        hash_block_size: i64,
        semantics: Semantics,
    ) -> PyResult<Self> {
        let algorithm = match hash_function {
            FunctionOrName::Function(function) => function.0,
            FunctionOrName::Name(name) => HashAlgorithm::from_name(&name).or_python()?,
        };
        let size = crate::convert::count("hash_block_size", hash_block_size)?;
        let none_hash = block_hash("none_hash", none_hash)?;
        let hasher = CoreHasher::new(algorithm, none_hash, size, semantics.0).or_python()?;
        Ok(Self(Arc::new(hasher)))
    }

    /// Its hash function.
    #[getter]
    fn hash_function(&self) -> HashFunction {
        HashFunction(self.0.algorithm())
    }

    /// The root of the chain.
    #[getter]
    fn none_hash<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let BlockHash(bytes) = self.0.none_hash();
        let is_digest = bytes[self.0.algorithm().width()..].iter().all(|byte| *byte == 0);
        let width = if is_digest { self.0.algorithm().width() } else { bytes.len() };
        PyBytes::new(py, &bytes[..width])
    }

    /// Tokens per hash.
    #[getter]
    fn hash_block_size(&self) -> usize {
        self.0.hash_block_size()
    }

    /// Whose decisions it follows.
    #[getter]
    fn semantics(&self) -> Semantics {
        Semantics(self.0.semantics())
    }

    /// The hashes of the blocks that a request completed since its last hash. The request is not
    /// changed. This is the contract of vLLM's block hashers.
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let request = RequestArgument::with_content(request)?;
        let hashes = request.with(|call, _| {
            let mut hashes = call.block_hashes.to_vec();
            let before = hashes.len();
            if let Some(content) = call.content {
                self.0.extend(content.token_ids, content.keys, &mut hashes);
            }
            hashes.split_off(before)
        });
        let width = self.0.algorithm().width();
        Ok(hashes.iter().map(|hash| PyBytes::new(py, &hash.0[..width])).collect())
    }

    fn __repr__(&self) -> String {
        format!(
            "BlockHasher({:?}, hash_block_size={})",
            self.0.algorithm().name(),
            self.0.hash_block_size()
        )
    }
}
