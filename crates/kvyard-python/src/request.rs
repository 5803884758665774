//! `kvyard.Request`, and how any request (ours or vLLM's) becomes a call on the core.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use kvyard_core::hashing::{BlockHasher as CoreHasher, ExtraKeySource, Fingerprint};
use kvyard_core::request_view::BlockContent;
use kvyard_core::{
    BlockHash, Request as CoreRequest, RequestCall, RequestRow, RequestStatus, RequestView,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::convert::{self, KeyParts, count, token_ids};
use crate::error::{ConfigError, OrPython, invalid_argument};
use crate::hashing::BlockHasher;
use crate::shared::{LONG, Shared, lock};

/// No row was seen yet.
const NO_ROW: u32 = u32::MAX;

/// A request: its tokens and block hashes in Rust, its counters for the scheduler that owns it.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
#[expect(clippy::struct_field_names, reason = "vLLM's names")]
pub(crate) struct Request {
    core: Mutex<CoreRequest>,
    /// The row at the manager that allocated last; checked by name before it is used.
    row: AtomicU32,
    hasher: Option<Arc<CoreHasher>>,
    #[pyo3(get)]
    sampling_params: Option<Py<PyAny>>,
    #[pyo3(get)]
    pooling_params: Option<Py<PyAny>>,
    #[pyo3(get)]
    mm_features: Option<Py<PyAny>>,
    #[pyo3(get)]
    lora_request: Option<Py<PyAny>>,
    #[pyo3(get)]
    cache_salt: Option<Py<PyAny>>,
    #[pyo3(get)]
    prompt_embeds: Option<Py<PyAny>>,
    #[pyo3(get)]
    trace_headers: Option<Py<PyAny>>,
    #[pyo3(get)]
    arrival_time: Option<f64>,
    #[pyo3(get)]
    client_index: i64,
    #[pyo3(get)]
    priority: i64,
    #[pyo3(get)]
    resumable: bool,
}

impl Request {
    fn core(&self) -> MutexGuard<'_, CoreRequest> {
        // A request's own fields are valid after any panic: each method sets them last.
        lock(&self.core)
    }

    pub(crate) fn row_hint(&self) -> Option<RequestRow> {
        match self.row.load(Ordering::Relaxed) {
            NO_ROW => None,
            row => Some(RequestRow(row)),
        }
    }

    pub(crate) fn set_row_hint(&self, row: RequestRow) {
        self.row.store(row.0, Ordering::Relaxed);
    }

    /// Refuses a request whose hashes this pool cannot share.
    fn check_hasher(&self, py: Python<'_>, shared: &Shared) -> PyResult<()> {
        let Some(hasher) = &self.hasher else {
            return Ok(());
        };
        if hasher.hash_block_size() != shared.hash_block_size as usize {
            return Err(ConfigError::new_err(format!(
                "request {:?} hashes blocks of {} tokens, the manager's hash_block_size is {}",
                self.core().request_id(),
                hasher.hash_block_size(),
                shared.hash_block_size
            )));
        }
        let (ours, theirs) = (shared.semantics, hasher.semantics());
        if (ours.hash_domains, ours.media_cursor) != (theirs.hash_domains, theirs.media_cursor) {
            return Err(ConfigError::new_err(format!(
                "request {:?} is hashed under other semantics than the manager's: \
                 hash_domains and media_cursor must be the same",
                self.core().request_id()
            )));
        }
        shared.bind_hash_width(py, hasher.algorithm().width())
    }
}

#[pymethods]
impl Request {
    #[new]
    #[pyo3(signature = (
        request_id, prompt_token_ids, sampling_params = None, pooling_params = None,
        client_index = 0, arrival_time = None, prompt_embeds = None, prompt_embeds_mask = None,
        mm_features = None, lora_request = None, cache_salt = None, priority = 0,
        trace_headers = None, block_hasher = None, resumable = false, lora_path = None,
        skip_reading_prefix_cache = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature of vLLM's Request")]
    fn new(
        py: Python<'_>,
        request_id: &str,
        prompt_token_ids: Option<&Bound<'_, PyAny>>,
        sampling_params: Option<Bound<'_, PyAny>>,
        pooling_params: Option<Bound<'_, PyAny>>,
        client_index: i64,
        arrival_time: Option<f64>,
        prompt_embeds: Option<Bound<'_, PyAny>>,
        prompt_embeds_mask: Option<Bound<'_, PyAny>>,
        mm_features: Option<Bound<'_, PyAny>>,
        lora_request: Option<Bound<'_, PyAny>>,
        cache_salt: Option<Bound<'_, PyAny>>,
        priority: i64,
        trace_headers: Option<Py<PyAny>>,
        block_hasher: Option<&Bound<'_, BlockHasher>>,
        resumable: bool,
        lora_path: Option<Bound<'_, PyAny>>,
        skip_reading_prefix_cache: Option<bool>,
    ) -> PyResult<Self> {
        let parts = KeyParts {
            lora_request: lora_request.as_ref(),
            lora_path: lora_path.as_ref(),
            mm_features: mm_features.as_ref(),
            cache_salt: cache_salt.as_ref(),
            prompt_embeds: prompt_embeds.as_ref(),
            prompt_embeds_mask: prompt_embeds_mask.as_ref(),
        };
        let prompt = match (prompt_token_ids, &prompt_embeds) {
            (Some(tokens), _) => token_ids(tokens)?,
            // A prompt of embeddings alone has token id 0 everywhere, as in vLLM.
            (None, Some(embeds)) => vec![0; embeds.len()?],
            (None, None) => {
                return Err(invalid_argument(
                    "prompt_token_ids",
                    "a request needs prompt_token_ids or prompt_embeds",
                ));
            }
        };
        let skip = match skip_reading_prefix_cache {
            Some(skip) => skip,
            None => skips_prefix_cache(sampling_params.as_ref(), pooling_params.as_ref())?,
        };
        let keys = Arc::new(parts.source()?);
        let hasher = block_hasher.map(|hasher| hasher.get().0.clone());
        let mut core = hash_detached(py, prompt.len(), || {
            CoreRequest::new(request_id, prompt, keys, hasher.clone())
        });
        core.skip_reading_prefix_cache = skip;
        Ok(Self {
            hasher,
            core: Mutex::new(core),
            row: AtomicU32::new(NO_ROW),
            sampling_params: sampling_params.map(Bound::unbind),
            pooling_params: pooling_params.map(Bound::unbind),
            mm_features: mm_features.map(Bound::unbind),
            lora_request: lora_request.map(Bound::unbind),
            cache_salt: cache_salt.map(Bound::unbind),
            prompt_embeds: prompt_embeds.map(Bound::unbind),
            trace_headers,
            arrival_time,
            client_index,
            priority,
            resumable,
        })
    }

    /// Its name.
    #[getter]
    fn request_id<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        PyString::new(py, self.core().request_id())
    }

    /// All known tokens: prompt and outputs.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.core().num_tokens()
    }

    /// Tokens of the prompt.
    #[getter]
    fn num_prompt_tokens(&self) -> usize {
        self.core().num_prompt_tokens()
    }

    /// Tokens of the output.
    #[getter]
    fn num_output_tokens(&self) -> usize {
        self.core().num_output_tokens()
    }

    /// All token ids, as a fresh list.
    #[getter]
    fn all_token_ids(&self) -> Vec<u32> {
        self.core().token_ids().to_vec()
    }

    /// The prompt's token ids, as a fresh list.
    #[getter]
    fn prompt_token_ids(&self) -> Vec<u32> {
        let core = self.core();
        core.token_ids()[..core.num_prompt_tokens()].to_vec()
    }

    /// The output's token ids, as a fresh list.
    #[getter]
    fn output_token_ids(&self) -> Vec<u32> {
        let core = self.core();
        core.token_ids()[core.num_prompt_tokens()..].to_vec()
    }

    /// The hashes of its complete blocks, as a fresh list of bytes.
    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        let core = self.core();
        let width = core.hasher().map_or(32, |hasher| hasher.algorithm().width());
        core.block_hashes().iter().map(|hash| PyBytes::new(py, &hash.0[..width])).collect()
    }

    #[setter]
    fn set_block_hashes(&self, block_hashes: &Bound<'_, PyAny>) -> PyResult<()> {
        let (hashes, _) = convert::block_hashes(block_hashes)?;
        self.core().set_block_hashes(hashes);
        Ok(())
    }

    /// Tokens whose keys and values are computed or scheduled.
    #[getter]
    fn num_computed_tokens(&self) -> u32 {
        self.core().num_computed_tokens
    }

    #[setter]
    fn set_num_computed_tokens(&self, num_computed_tokens: i64) -> PyResult<()> {
        self.core().num_computed_tokens = count("num_computed_tokens", num_computed_tokens)?;
        Ok(())
    }

    /// How many of the computed tokens belong to steps that are still running.
    #[getter]
    fn num_in_flight_tokens(&self) -> u32 {
        self.core().num_in_flight_tokens
    }

    #[setter]
    fn set_num_in_flight_tokens(&self, num_in_flight_tokens: i64) -> PyResult<()> {
        self.core().num_in_flight_tokens = count("num_in_flight_tokens", num_in_flight_tokens)?;
        Ok(())
    }

    /// How often it was preempted.
    #[getter]
    fn num_preemptions(&self) -> u32 {
        self.core().num_preemptions
    }

    #[setter]
    fn set_num_preemptions(&self, num_preemptions: i64) -> PyResult<()> {
        self.core().num_preemptions = count("num_preemptions", num_preemptions)?;
        Ok(())
    }

    /// "WAITING", "RUNNING", "PREEMPTED", ...: the names of vLLM's RequestStatus.
    #[getter]
    fn status(&self) -> &'static str {
        status_name(self.core().status)
    }

    #[setter]
    fn set_status(&self, status: &Bound<'_, PyAny>) -> PyResult<()> {
        self.core().status = request_status(status)?;
        Ok(())
    }

    /// Whether it never reads the prefix cache.
    #[getter]
    fn skip_reading_prefix_cache(&self) -> bool {
        self.core().skip_reading_prefix_cache
    }

    /// Appends sampled tokens and hashes the blocks they complete.
    fn append_output_token_ids(&self, token_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Ok(token) = token_ids.extract::<u32>() {
            self.core().append_output_tokens(&[token]);
            return Ok(());
        }
        let tokens = convert::token_ids(token_ids)?;
        hash_detached(token_ids.py(), tokens.len(), || {
            self.core().append_output_tokens(&tokens);
        });
        Ok(())
    }

    /// Drops all tokens behind the first `num_tokens`, and the hashes that covered them.
    fn truncate(&self, num_tokens: i64) -> PyResult<()> {
        let kept = count("num_tokens", num_tokens)?;
        self.core().truncate(kept as usize).or_python()
    }

    /// Continues a streaming session: outputs so far become prompt, `token_ids` follow, and media
    /// items whose offsets count from the first of them.
    #[pyo3(signature = (token_ids, mm_features = None))]
    fn extend_prompt(
        &self,
        token_ids: &Bound<'_, PyAny>,
        mm_features: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let tokens = convert::token_ids(token_ids)?;
        let parts = KeyParts {
            lora_request: None,
            lora_path: None,
            mm_features,
            cache_salt: None,
            prompt_embeds: None,
            prompt_embeds_mask: None,
        };
        let media = parts.source()?.media().to_vec();
        let extend = || self.core().extend_prompt(&tokens, media);
        hash_detached(token_ids.py(), tokens.len(), extend).or_python()?;
        Ok(())
    }

    fn __repr__(&self) -> String {
        let core = self.core();
        format!(
            "Request({:?}, num_tokens={}, num_computed_tokens={}, status={})",
            core.request_id(),
            core.num_tokens(),
            core.num_computed_tokens,
            status_name(core.status)
        )
    }
}

/// Hashes without the interpreter lock if there is much to hash.
fn hash_detached<R: Send>(py: Python<'_>, num_tokens: usize, work: impl FnOnce() -> R + Send) -> R {
    if num_tokens < 16 * LONG { work() } else { py.detach(work) }
}

fn skips_prefix_cache(
    sampling_params: Option<&Bound<'_, PyAny>>,
    pooling_params: Option<&Bound<'_, PyAny>>,
) -> PyResult<bool> {
    for params in [sampling_params, pooling_params].into_iter().flatten() {
        if let Some(skip) = params.getattr_opt("skip_reading_prefix_cache")?
            && !skip.is_none()
        {
            return skip.is_truthy();
        }
    }
    Ok(false)
}

/// Names of the states that decide; every other name of vLLM's is a finished one.
const STATUSES: [(RequestStatus, &str); 6] = [
    (RequestStatus::Waiting, "WAITING"),
    (RequestStatus::WaitingForStructuredOutputGrammar, "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"),
    (RequestStatus::WaitingForRemoteKvs, "WAITING_FOR_REMOTE_KVS"),
    (RequestStatus::WaitingForStreamingReq, "WAITING_FOR_STREAMING_REQ"),
    (RequestStatus::Running, "RUNNING"),
    (RequestStatus::Preempted, "PREEMPTED"),
];

fn status_name(status: RequestStatus) -> &'static str {
    STATUSES.iter().find(|(known, _)| *known == status).map_or("FINISHED", |(_, name)| name)
}

fn request_status(status: &Bound<'_, PyAny>) -> PyResult<RequestStatus> {
    let name = match status.cast::<PyString>() {
        Ok(name) => name.clone(),
        Err(_) => status.getattr("name")?.cast_into()?,
    };
    let name = name.to_cow()?;
    if let Some((status, _)) = STATUSES.iter().find(|(_, known)| *known == name) {
        return Ok(*status);
    }
    if name.starts_with("FINISHED") {
        return Ok(RequestStatus::Finished);
    }
    Err(invalid_argument("status", format!("{name:?} is none of vLLM's request states")))
}

/// A request as an argument of a call: kvyard's own, or anything with the attributes of vLLM's.
pub(crate) enum RequestArgument<'a, 'py> {
    Native(&'a Bound<'py, Request>),
    Foreign(Box<ForeignRequest>),
}

/// A copy of what one call needs of a request that is not ours.
pub(crate) struct ForeignRequest {
    request_id: String,
    view: RequestView,
    block_hashes: Vec<BlockHash>,
    fingerprints: Vec<Fingerprint>,
    token_ids: Vec<u32>,
    keys: Option<ExtraKeySource>,
}

impl<'a, 'py> RequestArgument<'a, 'py> {
    /// For a call on `shared`: with hashes if it caches, with tokens and keys if it tells events.
    #[inline]
    pub(crate) fn new(request: &'a Bound<'py, PyAny>, shared: &Shared) -> PyResult<Self> {
        if let Ok(native) = request.cast::<Request>() {
            native.get().check_hasher(request.py(), shared)?;
            if let Some(key) = &shared.fingerprint_key {
                let native_request = native.get();
                let missing = {
                    let core = native_request.core();
                    core.num_tokens().saturating_sub(core.num_fingerprinted_tokens())
                };
                hash_detached(request.py(), missing, || {
                    native_request.core().make_fingerprints(key, shared.hash_block_size as usize);
                });
            }
            return Ok(Self::Native(native));
        }
        let with_content = shared.enable_kv_cache_events || shared.fingerprint_key.is_some();
        let (mut foreign, width) =
            ForeignRequest::read(request, shared.enable_caching, with_content)?;
        shared.bind_hash_width(request.py(), width)?;
        if let (Some(key), Some(keys)) = (&shared.fingerprint_key, &foreign.keys) {
            let size = shared.hash_block_size as usize;
            let (tokens, made) = (&foreign.token_ids, &mut foreign.fingerprints);
            hash_detached(request.py(), tokens.len(), || key.extend(tokens, keys, size, made));
        }
        Ok(Self::Foreign(Box::new(foreign)))
    }

    /// With everything, for hashing.
    pub(crate) fn with_content(request: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(native) = request.cast::<Request>() {
            return Ok(Self::Native(native));
        }
        let (foreign, _) = ForeignRequest::read(request, true, true)?;
        Ok(Self::Foreign(Box::new(foreign)))
    }

    /// For a call that needs a request's name only.
    pub(crate) fn name(request: &'a Bound<'py, PyAny>) -> PyResult<RequestName<'a, 'py>> {
        match request.cast::<Request>() {
            Ok(native) => Ok(RequestName::Native(native)),
            Err(_) => Ok(RequestName::Foreign(request.getattr("request_id")?.extract()?)),
        }
    }

    /// Lends the request to `work`, with the row where it was seen last.
    #[inline]
    pub(crate) fn with<R>(
        &self,
        work: impl FnOnce(&RequestCall<'_>, Option<RequestRow>) -> R,
    ) -> R {
        match self {
            Self::Native(request) => {
                let core = request.get().core();
                work(&core.call(true), request.get().row_hint())
            }
            Self::Foreign(request) => work(&request.call(), None),
        }
    }

    /// Remembers the row, to find it faster next time.
    pub(crate) fn set_row_hint(&self, row: Option<RequestRow>) {
        if let (Self::Native(request), Some(row)) = (self, row) {
            request.get().set_row_hint(row);
        }
    }
}

/// A request of which only the name matters.
pub(crate) enum RequestName<'a, 'py> {
    Native(&'a Bound<'py, Request>),
    Foreign(String),
}

/// What is lent of such a request.
pub(crate) struct NamedRequest<'a> {
    pub(crate) name: &'a str,
    /// The row where it was seen last.
    pub(crate) row_hint: Option<RequestRow>,
    /// Its tokens, if it is ours.
    pub(crate) num_tokens: Option<usize>,
}

impl RequestName<'_, '_> {
    /// Lends the request to `work`.
    #[inline]
    pub(crate) fn with<R>(&self, work: impl FnOnce(NamedRequest<'_>) -> R) -> R {
        match self {
            Self::Native(request) => {
                let core = request.get().core();
                work(NamedRequest {
                    name: core.request_id(),
                    row_hint: request.get().row_hint(),
                    num_tokens: Some(core.num_tokens()),
                })
            }
            Self::Foreign(name) => work(NamedRequest { name, row_hint: None, num_tokens: None }),
        }
    }
}

impl ForeignRequest {
    fn read(
        request: &Bound<'_, PyAny>,
        with_hashes: bool,
        with_content: bool,
    ) -> PyResult<(Self, usize)> {
        let number = |name: &'static str| -> PyResult<u32> {
            count(name, request.getattr(name)?.extract()?)
        };
        let view = RequestView {
            num_tokens: number("num_tokens")?,
            num_prompt_tokens: number("num_prompt_tokens")?,
            num_computed_tokens: number("num_computed_tokens")?,
            // vLLM 0.25.1 does not have it; the call's argument does.
            num_in_flight_tokens: 0,
            num_preemptions: number("num_preemptions")?,
            status: request_status(&request.getattr("status")?)?,
            skip_reading_prefix_cache: request.getattr("skip_reading_prefix_cache")?.is_truthy()?,
        };
        let (block_hashes, width) = if with_hashes {
            convert::block_hashes(&request.getattr("block_hashes")?)?
        } else {
            (Vec::new(), 0)
        };
        let (token_ids, keys) = if with_content {
            let tokens = token_ids(&request.getattr("all_token_ids")?)?;
            (tokens, Some(foreign_keys(request)?))
        } else {
            (Vec::new(), None)
        };
        let request_id = request.getattr("request_id")?.extract()?;
        let fingerprints = Vec::new();
        Ok((Self { request_id, view, block_hashes, fingerprints, token_ids, keys }, width))
    }

    fn call(&self) -> RequestCall<'_> {
        RequestCall {
            request_id: &self.request_id,
            view: self.view,
            block_hashes: &self.block_hashes,
            fingerprints: &self.fingerprints,
            content: self.keys.as_ref().map(|keys| BlockContent {
                token_ids: &self.token_ids,
                first_token: 0,
                keys,
            }),
        }
    }
}

fn foreign_keys(request: &Bound<'_, PyAny>) -> PyResult<ExtraKeySource> {
    let attribute = |name: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
        Ok(request.getattr_opt(name)?.filter(|value| !value.is_none()))
    };
    KeyParts {
        lora_request: attribute("lora_request")?.as_ref(),
        lora_path: None,
        mm_features: attribute("mm_features")?.as_ref(),
        cache_salt: attribute("cache_salt")?.as_ref(),
        prompt_embeds: attribute("prompt_embeds")?.as_ref(),
        prompt_embeds_mask: None,
    }
    .source()
}
