//! Writing batches: the core's log in one pass, or single events. The fields of an event have vLLM's
//! order, and a field that has a default is left out where it equals it; `manager.md` §8.1 and §8.4.

use kvyard_core::event_log::{BlockExtraKeys, EventLog, KVCacheEvent};
use kvyard_core::hashing::ExtraKey;
use kvyard_core::{AttentionKind, BlockHash, GroupId};

use crate::event::{BlockRemoved, BlockStored, Event, ExternalBlockHash, List, write_hash};
use crate::msgpack::{
    write_array_header, write_bytes, write_float, write_nil, write_signed, write_small_map_header,
    write_text, write_token_ids, write_unsigned,
};
use crate::wire_format::WireFormat;

/// Where a pool's blocks lie, as consumers name it.
const MEDIUM: &str = "GPU";

/// What an event takes besides its tokens, about: room for it is asked for at once.
const BYTES_PER_EVENT: usize = 128;

/// How block hashes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum HashForm {
    /// The low 64 bits of a digest, as an unsigned number (rule 4).
    #[default]
    Integer,
    /// The digest.
    Bytes,
}

/// What store events say of a group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupDescription {
    /// Kind of its spec, as vLLM's `get_kv_cache_spec_kind` names it.
    pub kind: &'static str,
    /// Its window in tokens, if it is a sliding one.
    pub sliding_window: Option<u32>,
}

impl From<&AttentionKind> for GroupDescription {
    fn from(kind: &AttentionKind) -> Self {
        Self { kind: kind.event_kind(), sliding_window: kind.event_sliding_window() }
    }
}

/// The start of a batch: an array of exactly three (rule 1), the time, the header of the events.
pub(crate) fn begin_batch(out: &mut Vec<u8>, timestamp: f64, num_events: usize) {
    write_array_header(out, 3);
    write_float(out, timestamp);
    write_array_header(out, num_events);
}

/// The end of a batch. `None` is nil, which vLLM's publisher never sends and routers refuse.
pub(crate) fn end_batch(out: &mut Vec<u8>, data_parallel_rank: Option<u32>) {
    match data_parallel_rank {
        Some(rank) => write_unsigned(out, u64::from(rank)),
        None => write_nil(out),
    }
}

/// Appends a batch of single events, such as a connector's own. An event of unknown type is left out:
/// it would spoil the batch for consumers (rule 8).
pub fn encode_events(
    events: &[Event<'_>],
    timestamp: f64,
    data_parallel_rank: Option<u32>,
    format: WireFormat,
    out: &mut Vec<u8>,
) {
    let known = events.iter().filter(|event| !matches!(event, Event::Unknown { .. }));
    begin_batch(out, timestamp, known.clone().count());
    for event in known {
        match event {
            Event::BlockStored(stored) => write_stored(out, format, stored),
            Event::BlockRemoved(removed) => write_removed(out, format, removed),
            Event::AllBlocksCleared => write_cleared(out, format),
            Event::Unknown { .. } => {}
        }
    }
    end_batch(out, data_parallel_rank);
}

// ------------------------------------------------------------------------------ events, by their parts

fn write_optional<T>(out: &mut Vec<u8>, value: Option<T>, write: impl FnOnce(&mut Vec<u8>, T)) {
    match value {
        Some(value) => write(out, value),
        None => write_nil(out),
    }
}

fn write_list(out: &mut Vec<u8>, list: List<'_>) {
    write_array_header(out, list.len());
    out.extend_from_slice(list.elements);
}

fn write_stored(out: &mut Vec<u8>, format: WireFormat, stored: &BlockStored<'_>) {
    let extra_keys = stored.extra_keys.map(|keys| move |out: &mut Vec<u8>| write_list(out, keys.0));
    write_stored_parts(
        out,
        format,
        stored,
        |out| write_list(out, stored.block_hashes.0),
        |out| write_list(out, stored.token_ids.0),
        extra_keys,
    );
}

/// A store event. `fields` says all but the lists, which are written where they belong.
#[inline]
pub(crate) fn write_stored_parts(
    out: &mut Vec<u8>,
    format: WireFormat,
    fields: &BlockStored<'_>,
    block_hashes: impl FnOnce(&mut Vec<u8>),
    token_ids: impl FnOnce(&mut Vec<u8>),
    extra_keys: Option<impl FnOnce(&mut Vec<u8>)>,
) {
    let cache_salt = fields.cache_salt.filter(|_| format.has_further_fields());
    let group_size = fields.group_block_size.filter(|_| format.has_further_fields());
    let announced = fields.announced_parent_block_hash.filter(|_| format.has_further_fields());
    let is_map = !format.is_array();
    let name = |out: &mut Vec<u8>, name: &str| {
        if is_map {
            write_text(out, name);
        }
    };
    if is_map {
        let set = [
            extra_keys.is_some(),
            fields.group_idx.is_some(),
            fields.kv_cache_spec_kind.is_some(),
            fields.kv_cache_spec_sliding_window.is_some(),
            cache_salt.is_some(),
            group_size.is_some(),
            announced.is_some(),
        ];
        write_small_map_header(out, 8 + set.map(u8::from).iter().sum::<u8>());
    } else {
        write_array_header(out, 12);
    }
    name(out, "type");
    write_text(out, "BlockStored");
    name(out, "block_hashes");
    block_hashes(out);
    name(out, "parent_block_hash");
    write_optional(out, fields.parent_block_hash, |out, hash| write_hash(out, &hash));
    name(out, "token_ids");
    token_ids(out);
    name(out, "block_size");
    write_unsigned(out, u64::from(fields.block_size));
    name(out, "lora_id");
    write_optional(out, fields.lora_id, write_signed);
    name(out, "medium");
    write_optional(out, fields.medium, write_text);
    name(out, "lora_name");
    write_optional(out, fields.lora_name, write_text);
    // From here on a map leaves out what is unset, and an array says nil.
    if is_map && let Some(keys) = extra_keys {
        write_text(out, "extra_keys");
        keys(out);
    } else if !is_map {
        write_optional(out, extra_keys, |out, keys| keys(out));
    }
    write_defaulted(out, is_map, "group_idx", fields.group_idx.map(u64::from), write_unsigned);
    write_defaulted(out, is_map, "kv_cache_spec_kind", fields.kv_cache_spec_kind, write_text);
    let window = fields.kv_cache_spec_sliding_window.map(u64::from);
    write_defaulted(out, is_map, "kv_cache_spec_sliding_window", window, write_unsigned);
    if is_map {
        write_defaulted(out, true, "cache_salt", cache_salt, write_text);
        let group_size = group_size.map(u64::from);
        write_defaulted(out, true, "group_block_size", group_size, write_unsigned);
        write_defaulted(out, true, "announced_parent_block_hash", announced, |out, hash| {
            write_hash(out, &hash);
        });
    }
}

/// A field with a default: left out of a map where it is unset.
fn write_defaulted<T>(
    out: &mut Vec<u8>,
    is_map: bool,
    name: &str,
    value: Option<T>,
    write: impl FnOnce(&mut Vec<u8>, T),
) {
    if !is_map {
        return write_optional(out, value, write);
    }
    if let Some(value) = value {
        write_text(out, name);
        write(out, value);
    }
}

fn write_removed(out: &mut Vec<u8>, format: WireFormat, removed: &BlockRemoved<'_>) {
    write_removed_head(out, format, removed.group_idx.is_some(), removed.block_hashes.len());
    out.extend_from_slice(removed.block_hashes.0.elements);
    write_removed_tail(out, format, removed.medium, removed.group_idx);
}

fn write_removed_head(out: &mut Vec<u8>, format: WireFormat, has_group: bool, num_hashes: usize) {
    if format.is_array() {
        write_array_header(out, 4);
    } else {
        write_small_map_header(out, 3 + u8::from(has_group));
        write_text(out, "type");
    }
    write_text(out, "BlockRemoved");
    if !format.is_array() {
        write_text(out, "block_hashes");
    }
    write_array_header(out, num_hashes);
}

fn write_removed_tail(
    out: &mut Vec<u8>,
    format: WireFormat,
    medium: Option<&str>,
    group_idx: Option<u32>,
) {
    let is_map = !format.is_array();
    if is_map {
        write_text(out, "medium");
    }
    write_optional(out, medium, write_text);
    write_defaulted(out, is_map, "group_idx", group_idx.map(u64::from), write_unsigned);
}

fn write_cleared(out: &mut Vec<u8>, format: WireFormat) {
    if format.is_array() {
        write_array_header(out, 1);
    } else {
        write_small_map_header(out, 1);
        write_text(out, "type");
    }
    write_text(out, "AllBlocksCleared");
}

// ------------------------------------------------------------------------------------- the core's log

/// Turns a pool's event log into batches.
#[derive(Debug)]
pub struct BatchEncoder {
    format: WireFormat,
    hash_form: HashForm,
    /// Bytes of a digest that count.
    hash_width: usize,
    groups: Vec<GroupDescription>,
    /// For each group a removal but for its hash: one is written for each block that is evicted.
    removals: Vec<Removal>,
}

/// A removal of a hash of nine bytes, which nearly all have as a number, and where they are.
#[derive(Debug)]
struct Removal {
    /// Longer than any: to copy a length that is known takes no call.
    bytes: [u8; 72],
    length: usize,
    hash_at: usize,
}

impl BatchEncoder {
    /// For digests of `hash_width` bytes, 1 to 32. `groups` describes the pool's groups, by their
    /// ids; events of a group beyond them say no kind, as those of a pool without a manager.
    pub fn new(
        format: WireFormat,
        hash_form: HashForm,
        hash_width: usize,
        groups: Vec<GroupDescription>,
    ) -> Self {
        let removals = (0..).zip(&groups).map(|(group, _)| Removal::new(format, group)).collect();
        Self { format, hash_form, hash_width: hash_width.clamp(1, 32), groups, removals }
    }

    /// The format that it writes.
    pub fn format(&self) -> WireFormat {
        self.format
    }

    /// Appends the whole log as one batch; `timestamp` in seconds since the epoch.
    pub fn encode(
        &self,
        log: &EventLog,
        timestamp: f64,
        data_parallel_rank: Option<u32>,
        out: &mut Vec<u8>,
    ) {
        out.reserve(log.num_token_ids() * 5 + log.len() * BYTES_PER_EVENT);
        begin_batch(out, timestamp, log.len());
        for event in log.iter() {
            self.event(out, &event);
        }
        end_batch(out, data_parallel_rank);
    }

    fn event(&self, out: &mut Vec<u8>, event: &KVCacheEvent<'_>) {
        match event {
            KVCacheEvent::AllBlocksCleared => write_cleared(out, self.format),
            KVCacheEvent::BlockRemoved { block_hashes: [hash], group } => {
                self.removed(out, hash, *group);
            }
            KVCacheEvent::BlockRemoved { block_hashes, group } => {
                write_removed_head(out, self.format, true, block_hashes.len());
                self.hashes(out, block_hashes);
                write_removed_tail(out, self.format, Some(MEDIUM), Some(group.0));
            }
            KVCacheEvent::BlockStored { .. } => self.stored(out, event),
        }
    }

    #[inline]
    fn removed(&self, out: &mut Vec<u8>, hash: &BlockHash, group: GroupId) {
        let hash = self.external(hash);
        if let (Some(removal), ExternalBlockHash::Integer(bits)) =
            (self.removals.get(group.index()), hash)
            && bits > u64::from(u32::MAX)
        {
            let at = out.len() + removal.hash_at;
            let end = out.len() + removal.length;
            out.extend_from_slice(&removal.bytes);
            out.truncate(end);
            out[at..at + 8].copy_from_slice(&bits.to_be_bytes());
            return;
        }
        write_removed_head(out, self.format, true, 1);
        write_hash(out, &hash);
        write_removed_tail(out, self.format, Some(MEDIUM), Some(group.0));
    }

    fn stored(&self, out: &mut Vec<u8>, event: &KVCacheEvent<'_>) {
        let KVCacheEvent::BlockStored {
            block_hashes,
            parent_block_hash,
            predecessor_block_hash,
            token_ids,
            block_size,
            group_block_size,
            adapter,
            cache_salt,
            extra_keys,
            group,
        } = *event
        else {
            return;
        };
        let description = self.groups.get(group.index());
        let fields = BlockStored {
            parent_block_hash: parent_block_hash.map(|hash| self.external(hash)),
            block_size,
            lora_id: adapter.map(|adapter| adapter.id),
            medium: Some(MEDIUM),
            lora_name: adapter.map(|adapter| &*adapter.name),
            group_idx: Some(group.0),
            kv_cache_spec_kind: description.map(|group| group.kind),
            kv_cache_spec_sliding_window: description.and_then(|group| group.sliding_window),
            cache_salt,
            group_block_size,
            // What lies between the parent and the first block is not told: say what it follows.
            announced_parent_block_hash: predecessor_block_hash.map(|hash| self.external(hash)),
            ..BlockStored::default()
        };
        // An event without hashes has no entries, which is the field's default.
        let keys = (!block_hashes.is_empty())
            .then_some(|out: &mut Vec<u8>| write_extra_keys(out, block_hashes.len(), extra_keys));
        write_stored_parts(
            out,
            self.format,
            &fields,
            |out| {
                write_array_header(out, block_hashes.len());
                self.hashes(out, block_hashes);
            },
            |out| {
                write_array_header(out, token_ids.len());
                write_token_ids(out, token_ids);
            },
            keys,
        );
    }

    fn external<'a>(&self, hash: &'a BlockHash) -> ExternalBlockHash<'a> {
        match self.hash_form {
            HashForm::Integer => ExternalBlockHash::Integer(hash.external(self.hash_width)),
            HashForm::Bytes => ExternalBlockHash::Bytes(&hash.0[..self.hash_width]),
        }
    }

    #[inline]
    fn hashes(&self, out: &mut Vec<u8>, hashes: &[BlockHash]) {
        for hash in hashes {
            write_hash(out, &self.external(hash));
        }
    }
}

impl Removal {
    fn new(format: WireFormat, group: u32) -> Self {
        let mut written = Vec::new();
        write_removed_head(&mut written, format, true, 1);
        write_unsigned(&mut written, u64::MAX);
        let hash_at = written.len() - 8;
        write_removed_tail(&mut written, format, Some(MEDIUM), Some(group));
        let mut bytes = [0; 72];
        bytes[..written.len()].copy_from_slice(&written);
        Self { bytes, length: written.len(), hash_at }
    }
}

/// An entry for each hash, nil for a block without extra keys.
fn write_extra_keys(out: &mut Vec<u8>, num_hashes: usize, extra_keys: BlockExtraKeys<'_>) {
    write_array_header(out, num_hashes);
    if extra_keys.is_empty() {
        out.resize(out.len() + num_hashes, crate::msgpack::NIL);
    }
    for members in extra_keys.iter() {
        if members.is_empty() {
            write_nil(out);
            continue;
        }
        write_array_header(out, members.len());
        for member in members {
            write_extra_key(out, member);
        }
    }
}

/// Untagged under all semantics: consumers know no other form.
fn write_extra_key(out: &mut Vec<u8>, key: &ExtraKey) {
    match key {
        ExtraKey::Lora { name: text, .. } | ExtraKey::CacheSalt(text) => {
            write_text(out, &text.text);
        }
        ExtraKey::Media { identifier, offset } => {
            write_array_header(out, 2);
            write_text(out, &identifier.text);
            write_signed(out, *offset);
        }
        ExtraKey::PromptEmbeds { digest, .. } => write_bytes(out, digest),
        ExtraKey::Bytes { bytes, .. } => write_bytes(out, bytes),
    }
}
