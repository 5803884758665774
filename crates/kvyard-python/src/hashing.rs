//! Hash functions, and what a hasher is. What it does to requests is in `block_hasher`.

use std::sync::Arc;

use kvyard_core::hashing::{BlockHasher as CoreHasher, ExtraKey, HashAlgorithm};
use kvyard_core::semantics::HashDomains;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyString, PyTuple};

use crate::convert::Identities;
use crate::error::{OrPython, invalid_argument};

/// A block-hash function by vLLM's name: "sha256", "sha256_cbor", "xxhash" or "xxhash_cbor".
#[pyclass(frozen, eq, hash, from_py_object, module = "kvyard._kvyard")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HashFunction(pub(crate) HashAlgorithm);

#[pymethods]
impl HashFunction {
    #[new]
    fn new(name: &str) -> PyResult<Self> {
        HashAlgorithm::from_name(name).map(Self).or_python()
    }

    /// Its name.
    #[getter]
    fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Bytes of a digest.
    #[getter]
    fn width(&self) -> usize {
        self.0.width()
    }

    /// The digest of a str, or of a triple (parent hash, token ids, extra keys or None).
    fn __call__<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let py = value.py();
        if let Ok(text) = value.cast::<PyString>() {
            let hash = self.0.hash_text(&text.to_cow()?);
            return Ok(PyBytes::new(py, &hash.0[..self.0.width()]));
        }
        let (parent, tokens, extra_keys): (Bound<'py, PyBytes>, _, Option<Bound<'py, PyTuple>>) =
            value.extract().map_err(|_| {
                invalid_argument("value", "must be a str or a triple (bytes, token ids, extras)")
            })?;
        self.digest(&parent, &tokens, extra_keys.as_ref())
    }

    fn __repr__(&self) -> String {
        format!("HashFunction({:?})", self.0.name())
    }
}

impl HashFunction {
    fn digest<'py>(
        self,
        parent: &Bound<'py, PyBytes>,
        tokens: &Bound<'py, PyAny>,
        extra_keys: Option<&Bound<'py, PyTuple>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let tokens = tokens
            .try_iter()?
            .map(|token| token?.extract())
            .collect::<PyResult<Vec<i64>>>()
            .map_err(|_| invalid_argument("token_ids", "must be ints of 64 bits"))?;
        let keys = extra_keys.map(|keys| extra_key_members(parent, keys)).transpose()?;
        let keys = keys.unwrap_or_default();
        let message =
            self.0.encode_block_tokens(HashDomains::Bare, parent.as_bytes(), &tokens, &keys);
        let hash = self.0.digest(message);
        Ok(PyBytes::new(parent.py(), &hash.0[..self.0.width()]))
    }
}

/// Extra keys as somebody else made them: texts, bytes, (identifier, offset) pairs.
fn extra_key_members(
    parent: &Bound<'_, PyBytes>,
    members: &Bound<'_, PyTuple>,
) -> PyResult<Vec<ExtraKey>> {
    let mut identities = Identities::default();
    // The parent comes first, so it gets the number that the core knows it by.
    identities.bytes(parent)?;
    members
        .iter()
        .map(|member| {
            if let Ok(text) = member.cast::<PyString>() {
                return Ok(ExtraKey::CacheSalt(identities.text(text)?));
            }
            if let Ok(bytes) = member.cast::<PyBytes>() {
                let identity = identities.bytes(bytes)?;
                return Ok(ExtraKey::Bytes { bytes: Arc::from(bytes.as_bytes()), identity });
            }
            let pair: Result<(Bound<'_, PyString>, Bound<'_, PyInt>), _> = member.extract();
            let (identifier, offset) = pair.map_err(|_| {
                invalid_argument(
                    "extra_keys",
                    format!("members must be str, bytes or (str, int), not {member}"),
                )
            })?;
            let (identifier, offset) = (identities.text(&identifier)?, offset.extract()?);
            Ok(ExtraKey::Media { identifier, offset })
        })
        .collect()
}

/// The hash of one block, from its parent's hash (or the root), its tokens and its extra keys.
#[pyfunction]
#[pyo3(signature = (hash_function, parent_block_hash, curr_block_token_ids, extra_keys = None, none_hash = None))]
pub(crate) fn hash_block_tokens<'py>(
    hash_function: HashFunction,
    parent_block_hash: Option<Bound<'py, PyBytes>>,
    curr_block_token_ids: &Bound<'py, PyAny>,
    extra_keys: Option<&Bound<'py, PyTuple>>,
    none_hash: Option<Bound<'py, PyBytes>>,
) -> PyResult<Bound<'py, PyBytes>> {
    // An empty parent counts as none, as in vLLM.
    let parent = parent_block_hash.filter(|parent| !parent.as_bytes().is_empty()).or(none_hash);
    let parent = parent.ok_or_else(|| {
        invalid_argument("parent_block_hash", "is missing, and no none_hash was given")
    })?;
    hash_function.digest(&parent, curr_block_token_ids, extra_keys)
}

/// What hashes the blocks of requests: a function, the root of the chain, tokens per block.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct BlockHasher(pub(crate) Arc<CoreHasher>);
