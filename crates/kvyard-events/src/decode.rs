//! Reading batches: maps or arrays, hashes as numbers of either sign or as bytes, fields in any
//! order, unknown fields and unknown events passed over. What vLLM 0.25 and 0.33, `SGLang` and kvyard
//! send is read; what lies on another machine (vLLM 0.33's `locality`) is passed over too, as Dynamo
//! does: it is no content of the worker that tells it. What lacks a field without which an event says nothing is refused as a whole.

use crate::error::{DecodeError, Problem};
use crate::event::{
    BlockHashes, BlockRemoved, BlockStored, Event, ExternalBlockHash, ExtraKeys, List, TokenIds,
};
use crate::msgpack::{Reader, Value};

/// The events of one engine step.
#[derive(Clone, Debug)]
pub struct Batch<'a> {
    /// Seconds since the epoch, by the sender's clock.
    pub timestamp: f64,
    /// The events, oldest first.
    pub events: Vec<Event<'a>>,
    /// Rank of the engine that sent them; none where it is nil or left out.
    pub data_parallel_rank: Option<u32>,
}

/// Reads a payload. The whole payload is checked before anything is answered.
///
/// # Errors
/// `DecodeError` with the byte at which it is no batch of events.
pub fn read_batch(payload: &[u8]) -> Result<Batch<'_>, DecodeError> {
    let mut reader = Reader::new(payload);
    let length = array(&mut reader, "an array of a timestamp, events and a rank")?;
    if length < 2 {
        return Err(reader.error(Problem::MissingField { field: "events" }));
    }
    let start = reader;
    let timestamp = match reader.value()? {
        Value::Float(timestamp) => timestamp,
        #[expect(clippy::cast_precision_loss, reason = "seconds are far below 2^53")]
        Value::Unsigned(seconds) => seconds as f64,
        _ => return Err(start.unexpected("a timestamp")),
    };
    let count = array(&mut reader, "an array of events")?;
    // An event takes a byte at least: a claim is no reason to reserve more.
    let mut events = Vec::with_capacity((count as usize).min(payload.len()));
    for _ in 0..count {
        events.push(event(&mut reader)?);
    }
    let mut data_parallel_rank = None;
    if length > 2 {
        data_parallel_rank = optional_count(&mut reader, "a rank from 0 to 2^32 - 1, or nil")?;
    }
    for _ in 3..length {
        reader.skip()?;
    }
    if !reader.is_at_end() {
        return Err(reader.error(Problem::TrailingBytes));
    }
    Ok(Batch { timestamp, events, data_parallel_rank })
}

/// Fields of any event, as far as they are read.
#[derive(Default)]
struct Fields<'a> {
    tag: Option<&'a str>,
    block_hashes: Option<BlockHashes<'a>>,
    token_ids: Option<TokenIds<'a>>,
    block_size: Option<u32>,
    is_remote: bool,
    stored: BlockStored<'a>,
}

/// The `locality` of blocks on another machine.
const REMOTE: &str = "REMOTE";

/// A field's name, in the order in which an array has them (rule 2).
const POSITIONS: [&str; 12] = [
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];

const REMOVED_POSITIONS: [&str; 4] = ["type", "block_hashes", "medium", "group_idx"];

fn event<'a>(reader: &mut Reader<'a>) -> Result<Event<'a>, DecodeError> {
    let start = *reader;
    let mut fields = Fields::default();
    match reader.value()? {
        Value::Map(length) => {
            for _ in 0..length {
                let name = text(reader, "the name of a field")?;
                fields.read(name, reader)?;
            }
        }
        Value::Array(length) => {
            for position in 0..length as usize {
                let names: &[&str] = match fields.tag {
                    Some("BlockRemoved") => &REMOVED_POSITIONS,
                    _ => &POSITIONS,
                };
                match names.get(position) {
                    Some(name) => fields.read(name, reader)?,
                    None => reader.skip()?,
                }
            }
        }
        _ => return Err(start.unexpected("an event")),
    }
    fields.finish(&start)
}

impl<'a> Fields<'a> {
    /// Whether the fields of this event mean what they mean in known ones.
    fn is_known(&self) -> bool {
        matches!(self.tag, None | Some("BlockStored" | "BlockRemoved" | "AllBlocksCleared"))
    }

    fn read(&mut self, name: &str, reader: &mut Reader<'a>) -> Result<(), DecodeError> {
        if !self.is_known() {
            return reader.skip();
        }
        let stored = &mut self.stored;
        match name {
            "type" => self.tag = Some(text(reader, "the name of an event's type")?),
            "block_hashes" => self.block_hashes = Some(block_hashes(reader)?),
            "parent_block_hash" => stored.parent_block_hash = optional_hash(reader)?,
            "token_ids" => self.token_ids = Some(token_ids(reader)?),
            "block_size" => self.block_size = optional_count(reader, "a block size")?,
            "lora_id" => match optional_adapter(reader)? {
                // Some engines know adapters by name alone.
                Some(Adapter::Name(name)) => stored.lora_name = stored.lora_name.or(Some(name)),
                Some(Adapter::Id(id)) => stored.lora_id = Some(id),
                None => {}
            },
            "medium" => stored.medium = optional_text(reader, "a medium or nil")?,
            "lora_name" => {
                let name = optional_text(reader, "an adapter's name or nil")?;
                stored.lora_name = name.or(stored.lora_name);
            }
            "extra_keys" => stored.extra_keys = extra_keys(reader)?,
            "group_idx" => stored.group_idx = optional_count(reader, "a group or nil")?,
            "kv_cache_spec_kind" => {
                stored.kv_cache_spec_kind = optional_text(reader, "a spec's kind or nil")?;
            }
            "kv_cache_spec_sliding_window" => {
                stored.kv_cache_spec_sliding_window = optional_count(reader, "a window or nil")?;
            }
            "group_block_size" => {
                stored.group_block_size = optional_count(reader, "a block size or nil")?;
            }
            "announced_parent_block_hash" => {
                stored.announced_parent_block_hash = optional_hash(reader)?;
            }
            "locality" => {
                self.is_remote = optional_text(reader, "a locality or nil")? == Some(REMOTE);
            }
            "cache_salt" => stored.cache_salt = optional_text(reader, "a salt or nil")?,
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn finish(self, start: &Reader<'_>) -> Result<Event<'a>, DecodeError> {
        let missing = |field| start.error(Problem::MissingField { field });
        let hashes = self.block_hashes.ok_or_else(|| missing("block_hashes"));
        match self.tag.ok_or_else(|| missing("type"))? {
            tag if self.is_remote => Ok(Event::Unknown { tag }),
            "BlockStored" => Ok(Event::BlockStored(BlockStored {
                block_hashes: hashes?,
                token_ids: self.token_ids.ok_or_else(|| missing("token_ids"))?,
                block_size: self.block_size.ok_or_else(|| missing("block_size"))?,
                ..self.stored
            })),
            "BlockRemoved" => Ok(Event::BlockRemoved(BlockRemoved {
                block_hashes: hashes?,
                medium: self.stored.medium,
                group_idx: self.stored.group_idx,
            })),
            "AllBlocksCleared" => Ok(Event::AllBlocksCleared),
            tag => Ok(Event::Unknown { tag }),
        }
    }
}

fn array(reader: &mut Reader<'_>, expected: &'static str) -> Result<u32, DecodeError> {
    let start = *reader;
    match reader.value()? {
        Value::Array(length) => Ok(length),
        _ => Err(start.unexpected(expected)),
    }
}

fn text<'a>(reader: &mut Reader<'a>, expected: &'static str) -> Result<&'a str, DecodeError> {
    let start = *reader;
    optional_text(reader, expected)?.ok_or_else(|| start.unexpected(expected))
}

fn optional_text<'a>(
    reader: &mut Reader<'a>,
    expected: &'static str,
) -> Result<Option<&'a str>, DecodeError> {
    let start = *reader;
    match reader.value()? {
        Value::Text(text) => Ok(Some(text)),
        Value::Nil => Ok(None),
        _ => Err(start.unexpected(expected)),
    }
}

fn optional_count(
    reader: &mut Reader<'_>,
    expected: &'static str,
) -> Result<Option<u32>, DecodeError> {
    let start = *reader;
    match reader.value()? {
        Value::Nil => Ok(None),
        Value::Unsigned(value) => match u32::try_from(value) {
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(start.error(Problem::OutOfRange { expected })),
        },
        Value::Negative(_) => Err(start.error(Problem::OutOfRange { expected })),
        _ => Err(start.unexpected(expected)),
    }
}

enum Adapter<'a> {
    Id(i64),
    Name(&'a str),
}

fn optional_adapter<'a>(reader: &mut Reader<'a>) -> Result<Option<Adapter<'a>>, DecodeError> {
    let start = *reader;
    let expected = "an adapter's number of 64 bits, its name, or nil";
    match reader.value()? {
        Value::Nil => Ok(None),
        Value::Negative(id) => Ok(Some(Adapter::Id(id))),
        Value::Unsigned(id) => match i64::try_from(id) {
            Ok(id) => Ok(Some(Adapter::Id(id))),
            Err(_) => Err(start.error(Problem::OutOfRange { expected })),
        },
        Value::Text(name) => Ok(Some(Adapter::Name(name))),
        _ => Err(start.unexpected(expected)),
    }
}

fn optional_hash<'a>(
    reader: &mut Reader<'a>,
) -> Result<Option<ExternalBlockHash<'a>>, DecodeError> {
    let start = *reader;
    match reader.value()? {
        Value::Nil => Ok(None),
        value => match ExternalBlockHash::from_value(value) {
            Some(hash) => Ok(Some(hash)),
            None => Err(start.unexpected("a block hash or nil")),
        },
    }
}

fn block_hashes<'a>(reader: &mut Reader<'a>) -> Result<BlockHashes<'a>, DecodeError> {
    let length = array(reader, "an array of block hashes")?;
    let first = reader.offset();
    for _ in 0..length {
        let start = *reader;
        if ExternalBlockHash::from_value(reader.value()?).is_none() {
            return Err(start.unexpected("a block hash"));
        }
    }
    Ok(BlockHashes(List { length, elements: reader.since(first) }))
}

fn token_ids<'a>(reader: &mut Reader<'a>) -> Result<TokenIds<'a>, DecodeError> {
    let expected = "a token id from 0 to 2^32 - 1";
    let length = array(reader, "an array of token ids")?;
    let first = reader.offset();
    for _ in 0..length {
        if reader.small_unsigned().is_some() {
            continue;
        }
        let start = *reader;
        match reader.value()? {
            Value::Unsigned(token) if u32::try_from(token).is_ok() => {}
            Value::Unsigned(_) | Value::Negative(_) => {
                return Err(start.error(Problem::OutOfRange { expected }));
            }
            _ => return Err(start.unexpected(expected)),
        }
    }
    Ok(TokenIds(List { length, elements: reader.since(first) }))
}

fn extra_keys<'a>(reader: &mut Reader<'a>) -> Result<Option<ExtraKeys<'a>>, DecodeError> {
    let start = *reader;
    let length = match reader.value()? {
        Value::Nil => return Ok(None),
        Value::Array(length) => length,
        _ => return Err(start.unexpected("an array of extra keys or nil")),
    };
    let first = reader.offset();
    for _ in 0..length {
        reader.skip()?;
    }
    Ok(Some(ExtraKeys(List { length, elements: reader.since(first) })))
}
