//! Batches of events as bytes: from the log without Python objects, and from and to the objects of
//! `kvyard.events`.

use std::time::{SystemTime, UNIX_EPOCH};

use kvyard_core::GroupId;
use kvyard_core::event_log::EventFilter;
use kvyard_core::prefix_map::MAX_GROUP;
use kvyard_core::spec::AttentionKind;
use kvyard_events::event::{BlockHashes, ExtraKeyValue, ExtraKeys, TokenIds};
use kvyard_events::{
    BlockRemoved, BlockStored, DecodeError, Event, ExternalBlockHash, WireFormat, encode_events,
    read_batch,
};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{
    PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyMemoryView, PyString, PyTuple,
};

use crate::batch_writer::BatchWriter;
use crate::config::config_count;
use crate::convert::{count, token_ids};
use crate::error::{EventDecodeError, config_error, invalid_argument};
use crate::events::{EventClasses, event_classes};
use crate::shared::Shared;

/// Log entries and token ids above which encoding lets other threads run Python: it takes a few
/// microseconds then, more than handing the interpreter over does.
const LARGE: usize = 1024;

/// An encoded batch as callers have it: bytes, or a bytearray or memoryview, which are copied, since
/// others can write to them.
pub(crate) struct Payload<'py>(Bound<'py, PyBytes>);

impl Payload<'_> {
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl<'py> FromPyObject<'_, 'py> for Payload<'py> {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = value.cast::<PyBytes>() {
            return Ok(Self(bytes.to_owned()));
        }
        if value.is_instance_of::<PyByteArray>() || value.is_instance_of::<PyMemoryView>() {
            let bytes = value.py().get_type::<PyBytes>().call1((value,))?;
            return Ok(Self(bytes.cast_into()?));
        }
        let reason = format!("bytes are expected, not {}", value.get_type().name()?);
        Err(PyTypeError::new_err(reason))
    }
}

/// The name of a wire format.
pub(crate) fn wire_format(name: &str) -> PyResult<WireFormat> {
    name.parse().map_err(|error: kvyard_events::wire_format::UnknownWireFormat| {
        invalid_argument("wire_format", error.to_string())
    })
}

/// `EventDecodeError`.
pub(crate) fn decode_error(error: &DecodeError) -> PyErr {
    EventDecodeError::new_err(error.to_string())
}

/// Which changes are recorded: the arguments of the constructors. `num_groups` where it is known.
pub(crate) fn event_filter(
    event_groups: Option<Vec<i64>>,
    min_event_block_tokens: i64,
    num_groups: Option<usize>,
) -> PyResult<EventFilter> {
    let most = num_groups.map_or(MAX_GROUP as usize + 1, |groups| groups);
    let group = |group: i64| {
        let known = u32::try_from(group).ok().filter(|group| (*group as usize) < most);
        known.map(GroupId).ok_or_else(|| {
            config_error("event_groups", &format!("{group} is no group; there are {most}"))
        })
    };
    let groups = event_groups.map(|groups| groups.into_iter().map(group).collect());
    Ok(EventFilter {
        groups: groups.transpose()?,
        min_block_tokens: config_count("min_event_block_tokens", min_event_block_tokens)?,
    })
}

/// What a batch says besides its events.
pub(crate) struct BatchHeader {
    pub(crate) format: WireFormat,
    pub(crate) data_parallel_rank: Option<u32>,
    /// Seconds since the epoch; None: now.
    timestamp: Option<f64>,
}

impl BatchHeader {
    pub(crate) fn new(
        format: &str,
        data_parallel_rank: Option<i64>,
        timestamp: Option<f64>,
    ) -> PyResult<Self> {
        let format = wire_format(format)?;
        let data_parallel_rank =
            data_parallel_rank.map(|rank| count("data_parallel_rank", rank)).transpose()?;
        if format.needs_rank() && data_parallel_rank.is_none() {
            let reason = "must be an int: routers drop batches without a rank";
            return Err(invalid_argument("data_parallel_rank", reason));
        }
        Ok(Self { format, data_parallel_rank, timestamp })
    }

    pub(crate) fn timestamp(&self) -> f64 {
        self.timestamp.unwrap_or_else(|| {
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64())
        })
    }
}

/// Takes the waiting events of a pool as one payload, None if there are none.
pub(crate) fn take_event_batch<'py>(
    py: Python<'py>,
    shared: &Shared,
    kinds: &[AttentionKind],
    use_int_hashes: bool,
    header: &BatchHeader,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    if !shared.enable_kv_cache_events {
        return Ok(None);
    }
    // Taken out, not locked: whoever waits for a lock while it holds the interpreter would wait for
    // ever for one that needs the interpreter.
    let mut log = std::mem::take(&mut *shared.spare_events());
    shared.with(py, |core| core.pool_mut().take_events(&mut log))?;
    let mut payload = None;
    if !log.is_empty() {
        let mut writer = std::mem::take(&mut *shared.spare_writer());
        writer.prepare(kinds, use_int_hashes, shared.hash_width(), header.format);
        writer.payload.clear();
        let mut write = || {
            let BatchWriter { encoder: Some((encoder, _)), payload } = &mut writer else {
                return;
            };
            encoder.encode(&log, header.timestamp(), header.data_parallel_rank, payload);
        };
        if log.len() + log.num_token_ids() > LARGE {
            py.detach(write);
        } else {
            write();
        }
        payload = Some(PyBytes::new(py, &writer.payload));
        *shared.spare_writer() = writer;
    }
    log.clear();
    *shared.spare_events() = log;
    Ok(payload)
}

// --------------------------------------------------------------------------------- objects to bytes

#[derive(Debug)]
enum OwnedHash {
    Integer(u64),
    Bytes(Vec<u8>),
}

impl OwnedHash {
    fn new(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = value.cast::<PyBytes>() {
            return Ok(Self::Bytes(bytes.as_bytes().to_vec()));
        }
        value.extract().map(Self::Integer).map_err(|_| {
            let reason = format!("must be bytes or an int from 0 to 2^64 - 1, not {value}");
            invalid_argument("block_hashes", reason)
        })
    }

    fn borrow(&self) -> ExternalBlockHash<'_> {
        match self {
            Self::Integer(bits) => ExternalBlockHash::Integer(*bits),
            Self::Bytes(digest) => ExternalBlockHash::Bytes(digest),
        }
    }
}

fn borrowed(hashes: &[OwnedHash]) -> Vec<ExternalBlockHash<'_>> {
    hashes.iter().map(OwnedHash::borrow).collect()
}

/// An event object, read.
#[derive(Debug)]
enum OwnedEvent {
    Stored(Box<OwnedStored>),
    Removed { block_hashes: Vec<OwnedHash>, medium: Option<String>, group_idx: Option<u32> },
    Cleared,
}

#[derive(Debug)]
struct OwnedStored {
    block_hashes: Vec<OwnedHash>,
    parent_block_hash: Option<OwnedHash>,
    token_ids: Vec<u32>,
    block_size: u32,
    lora_id: Option<i64>,
    medium: Option<String>,
    lora_name: Option<String>,
    extra_keys: Option<Vec<ExtraKeyValue<'static>>>,
    group_idx: Option<u32>,
    kv_cache_spec_kind: Option<String>,
    kv_cache_spec_sliding_window: Option<u32>,
    cache_salt: Option<String>,
    group_block_size: Option<u32>,
    announced_parent_block_hash: Option<OwnedHash>,
}

/// Where the lists of an event lie encoded.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    block_hashes: Vec<u8>,
    token_ids: Vec<u8>,
    extra_keys: Vec<u8>,
}

fn optional<'py, T>(
    event: &Bound<'py, PyAny>,
    field: &'static str,
    wanted: &str,
) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let Some(value) = event.getattr_opt(field)?.filter(|value| !value.is_none()) else {
        return Ok(None);
    };
    let wrong = || invalid_argument(field, format!("must be {wanted} or None, not {value}"));
    value.extract().map(Some).map_err(|_| wrong())
}

fn hashes(event: &Bound<'_, PyAny>) -> PyResult<Vec<OwnedHash>> {
    event.getattr("block_hashes")?.try_iter()?.map(|hash| OwnedHash::new(&hash?)).collect()
}

impl OwnedEvent {
    /// Of ours or of vLLM's, which have the same names and fields.
    fn new(event: &Bound<'_, PyAny>) -> PyResult<Self> {
        match &*event.get_type().name()?.to_cow()? {
            "BlockStored" => OwnedStored::new(event).map(Box::new).map(Self::Stored),
            "BlockRemoved" => Ok(Self::Removed {
                block_hashes: hashes(event)?,
                medium: optional(event, "medium", "a str")?,
                group_idx: optional(event, "group_idx", "an int of at least 0")?,
            }),
            "AllBlocksCleared" => Ok(Self::Cleared),
            _ => Err(invalid_argument(
                "events",
                format!("must be BlockStored, BlockRemoved or AllBlocksCleared, not {event}"),
            )),
        }
    }

    fn borrow<'a>(&'a self, scratch: &'a mut Scratch) -> Event<'a> {
        match self {
            Self::Cleared => Event::AllBlocksCleared,
            Self::Removed { block_hashes, medium, group_idx } => {
                Event::BlockRemoved(BlockRemoved {
                    block_hashes: BlockHashes::new(
                        &borrowed(block_hashes),
                        &mut scratch.block_hashes,
                    ),
                    medium: medium.as_deref(),
                    group_idx: *group_idx,
                })
            }
            Self::Stored(stored) => Event::BlockStored(BlockStored {
                block_hashes: BlockHashes::new(
                    &borrowed(&stored.block_hashes),
                    &mut scratch.block_hashes,
                ),
                parent_block_hash: stored.parent_block_hash.as_ref().map(OwnedHash::borrow),
                token_ids: TokenIds::new(&stored.token_ids, &mut scratch.token_ids),
                block_size: stored.block_size,
                lora_id: stored.lora_id,
                medium: stored.medium.as_deref(),
                lora_name: stored.lora_name.as_deref(),
                extra_keys: stored
                    .extra_keys
                    .as_ref()
                    .map(|keys| ExtraKeys::new(keys, &mut scratch.extra_keys)),
                group_idx: stored.group_idx,
                kv_cache_spec_kind: stored.kv_cache_spec_kind.as_deref(),
                kv_cache_spec_sliding_window: stored.kv_cache_spec_sliding_window,
                cache_salt: stored.cache_salt.as_deref(),
                group_block_size: stored.group_block_size,
                announced_parent_block_hash: stored
                    .announced_parent_block_hash
                    .as_ref()
                    .map(OwnedHash::borrow),
            }),
        }
    }
}

impl OwnedStored {
    fn new(event: &Bound<'_, PyAny>) -> PyResult<Self> {
        let optional_hash = |field: &str| -> PyResult<Option<OwnedHash>> {
            let value = event.getattr_opt(field)?.filter(|value| !value.is_none());
            value.map(|value| OwnedHash::new(&value)).transpose()
        };
        let extra_keys = event.getattr("extra_keys")?;
        let count_wanted = "an int of at least 0";
        Ok(Self {
            block_hashes: hashes(event)?,
            parent_block_hash: optional_hash("parent_block_hash")?,
            token_ids: token_ids(&event.getattr("token_ids")?)?,
            block_size: count("block_size", event.getattr("block_size")?.extract()?)?,
            lora_id: optional(event, "lora_id", "an int")?,
            medium: optional(event, "medium", "a str")?,
            lora_name: optional(event, "lora_name", "a str")?,
            extra_keys: if extra_keys.is_none() {
                None
            } else {
                let keys = extra_keys.try_iter()?;
                Some(keys.map(|entry| extra_key(&entry?)).collect::<PyResult<_>>()?)
            },
            group_idx: optional(event, "group_idx", count_wanted)?,
            kv_cache_spec_kind: optional(event, "kv_cache_spec_kind", "a str")?,
            kv_cache_spec_sliding_window: optional(
                event,
                "kv_cache_spec_sliding_window",
                count_wanted,
            )?,
            cache_salt: optional(event, "cache_salt", "a str")?,
            group_block_size: optional(event, "group_block_size", count_wanted)?,
            announced_parent_block_hash: optional_hash("announced_parent_block_hash")?,
        })
    }
}

fn extra_key(value: &Bound<'_, PyAny>) -> PyResult<ExtraKeyValue<'static>> {
    let wrong = || {
        let reason = format!("must be made of str, bytes, int, float and tuples, not {value}");
        invalid_argument("extra_keys", reason)
    };
    if value.is_none() {
        return Ok(ExtraKeyValue::Nil);
    }
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(ExtraKeyValue::Text(text.to_cow()?.into_owned().into()));
    }
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(ExtraKeyValue::Bytes(bytes.as_bytes().to_vec().into()));
    }
    if value.is_instance_of::<PyInt>() {
        if let Ok(number) = value.extract() {
            return Ok(ExtraKeyValue::Unsigned(number));
        }
        return value.extract().map(ExtraKeyValue::Negative).map_err(|_| wrong());
    }
    if let Ok(number) = value.cast::<PyFloat>() {
        return Ok(ExtraKeyValue::Float(number.value()));
    }
    if value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyList>() {
        let members = value.try_iter()?.map(|member| extra_key(&member?));
        return members.collect::<PyResult<_>>().map(ExtraKeyValue::Tuple);
    }
    Err(wrong())
}

/// Reads event objects, and gives them to `work` as events.
pub(crate) fn with_events<R>(
    events: &Bound<'_, PyAny>,
    work: impl FnOnce(&[Event<'_>]) -> R,
) -> PyResult<R> {
    let owned: Vec<OwnedEvent> =
        events.try_iter()?.map(|event| OwnedEvent::new(&event?)).collect::<PyResult<_>>()?;
    let mut scratch: Vec<Scratch> = owned.iter().map(|_| Scratch::default()).collect();
    let events: Vec<Event<'_>> =
        owned.iter().zip(&mut scratch).map(|(event, scratch)| event.borrow(scratch)).collect();
    Ok(work(&events))
}

/// A batch of event objects as one payload.
#[pyfunction]
#[pyo3(
    signature = (events, ts, data_parallel_rank = Some(0), wire_format = "router"),
    text_signature = "(events, ts, data_parallel_rank=0, wire_format='router')"
)]
pub(crate) fn encode_batch<'py>(
    events: &Bound<'py, PyAny>,
    ts: f64,
    data_parallel_rank: Option<i64>,
    wire_format: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let header = BatchHeader::new(wire_format, data_parallel_rank, Some(ts))?;
    let mut payload = Vec::new();
    with_events(events, |events| {
        encode_events(events, ts, header.data_parallel_rank, header.format, &mut payload);
    })?;
    Ok(PyBytes::new(events.py(), &payload))
}

// --------------------------------------------------------------------------------- bytes to objects

/// The batch in a payload of vLLM, `SGLang` or kvyard. Events of unknown types are left out.
#[pyfunction]
pub(crate) fn decode_batch(py: Python<'_>, payload: Payload<'_>) -> PyResult<Py<PyAny>> {
    let batch = read_batch(payload.as_bytes()).map_err(|error| decode_error(&error))?;
    let classes = event_classes(py)?;
    let events = PyList::empty(py);
    for event in &batch.events {
        match event {
            Event::BlockStored(stored) => events.append(stored_object(py, classes, stored)?)?,
            Event::BlockRemoved(removed) => {
                let hashes = hash_objects(py, removed.block_hashes)?;
                let arguments = (hashes, removed.medium, removed.group_idx);
                events.append(classes.removed.call1(py, arguments)?)?;
            }
            Event::AllBlocksCleared => events.append(classes.cleared.call0(py)?)?,
            Event::Unknown { .. } => {}
        }
    }
    classes.batch.call1(py, (batch.timestamp, events, batch.data_parallel_rank))
}

/// The time of a batch, and whether its first event is `AllBlocksCleared`: what following a stream
/// takes, without objects.
#[pyfunction]
pub(crate) fn inspect_batch(payload: Payload<'_>) -> PyResult<(f64, bool)> {
    let batch = read_batch(payload.as_bytes()).map_err(|error| decode_error(&error))?;
    Ok((batch.timestamp, matches!(batch.events.first(), Some(Event::AllBlocksCleared))))
}

fn stored_object(
    py: Python<'_>,
    classes: &EventClasses,
    stored: &BlockStored<'_>,
) -> PyResult<Py<PyAny>> {
    let token_ids: Vec<u32> = stored.token_ids.iter().collect();
    let extra_keys = match stored.extra_keys {
        Some(keys) => {
            let entries: Vec<_> =
                keys.iter().map(|entry| key_object(py, &entry)).collect::<PyResult<_>>()?;
            Some(PyList::new(py, entries)?)
        }
        None => None,
    };
    let arguments = (
        hash_objects(py, stored.block_hashes)?,
        stored.parent_block_hash.map(|hash| hash_object(py, hash)).transpose()?,
        PyList::new(py, token_ids)?,
        stored.block_size,
        stored.lora_id,
        stored.medium,
        stored.lora_name,
        extra_keys,
        stored.group_idx,
        stored.kv_cache_spec_kind,
        stored.kv_cache_spec_sliding_window,
    );
    let further = PyDict::new(py);
    further.set_item("cache_salt", stored.cache_salt)?;
    further.set_item("group_block_size", stored.group_block_size)?;
    let announced = stored.announced_parent_block_hash.map(|hash| hash_object(py, hash));
    further.set_item("announced_parent_block_hash", announced.transpose()?)?;
    classes.stored.bind(py).call(arguments, Some(&further)).map(Bound::unbind)
}

fn hash_object<'py>(py: Python<'py>, hash: ExternalBlockHash<'_>) -> PyResult<Bound<'py, PyAny>> {
    match hash {
        ExternalBlockHash::Integer(bits) => bits.into_bound_py_any(py),
        ExternalBlockHash::Bytes(digest) => Ok(PyBytes::new(py, digest).into_any()),
    }
}

fn hash_objects<'py>(py: Python<'py>, hashes: BlockHashes<'_>) -> PyResult<Bound<'py, PyList>> {
    let hashes: Vec<_> =
        hashes.iter().map(|hash| hash_object(py, hash)).collect::<PyResult<_>>()?;
    PyList::new(py, hashes)
}

fn key_object<'py>(py: Python<'py>, key: &ExtraKeyValue<'_>) -> PyResult<Bound<'py, PyAny>> {
    Ok(match key {
        ExtraKeyValue::Nil | ExtraKeyValue::Other => py.None().into_bound(py),
        ExtraKeyValue::Unsigned(value) => value.into_bound_py_any(py)?,
        ExtraKeyValue::Negative(value) => value.into_bound_py_any(py)?,
        ExtraKeyValue::Float(value) => value.into_bound_py_any(py)?,
        ExtraKeyValue::Text(text) => PyString::new(py, text).into_any(),
        ExtraKeyValue::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
        ExtraKeyValue::Tuple(members) => {
            let members: Vec<_> =
                members.iter().map(|member| key_object(py, member)).collect::<PyResult<_>>()?;
            PyTuple::new(py, members)?.into_any()
        }
    })
}
