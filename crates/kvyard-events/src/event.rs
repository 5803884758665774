//! Events as they lie in a payload: lists and texts are borrowed from it.
//!
//! Lists stay encoded until they are iterated. They were checked when the event was read, so that
//! iterating cannot fail.

use std::borrow::Cow;

use crate::msgpack::{
    Reader, Value, write_array_header, write_bytes, write_float, write_nil, write_signed,
    write_text, write_token_ids, write_unsigned,
};

/// A block's hash as events carry it. Signed numbers, `SGLang`'s, are read as the unsigned number of
/// the same bits (rule 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExternalBlockHash<'a> {
    /// The low 64 bits of the digest.
    Integer(u64),
    /// The digest.
    Bytes(&'a [u8]),
}

impl ExternalBlockHash<'_> {
    /// The low 64 bits, in either form: the last eight bytes of a digest, big-endian.
    pub fn low_bits(&self) -> u64 {
        match self {
            Self::Integer(bits) => *bits,
            Self::Bytes(digest) => {
                let mut low = [0; 8];
                let start = digest.len().saturating_sub(8);
                low[8 - (digest.len() - start)..].copy_from_slice(&digest[start..]);
                u64::from_be_bytes(low)
            }
        }
    }

    pub(crate) fn from_value(value: Value<'_>) -> Option<ExternalBlockHash<'_>> {
        match value {
            Value::Unsigned(bits) => Some(ExternalBlockHash::Integer(bits)),
            Value::Negative(bits) => Some(ExternalBlockHash::Integer(bits.cast_unsigned())),
            Value::Bytes(digest) => Some(ExternalBlockHash::Bytes(digest)),
            _ => None,
        }
    }
}

pub(crate) fn write_hash(out: &mut Vec<u8>, hash: &ExternalBlockHash<'_>) {
    match hash {
        ExternalBlockHash::Integer(bits) => write_unsigned(out, *bits),
        ExternalBlockHash::Bytes(digest) => write_bytes(out, digest),
    }
}

fn length<T>(elements: &[T]) -> u32 {
    u32::try_from(elements.len()).expect("msgpack lengths have 32 bits")
}

const CHECKED: &str = "lists of events are checked when they are read";

fn checked<T>(value: Option<T>) -> T {
    value.expect(CHECKED)
}

fn next<'a>(reader: &mut Reader<'a>) -> Value<'a> {
    checked(reader.value().ok())
}

/// Elements of a msgpack array, one after the other, without its header.
#[derive(Clone, Copy, Debug, Default)]
pub struct List<'a> {
    pub(crate) length: u32,
    pub(crate) elements: &'a [u8],
}

impl List<'_> {
    /// How many elements.
    pub const fn len(&self) -> usize {
        self.length as usize
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }
}

/// The hashes of an event.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockHashes<'a>(pub(crate) List<'a>);

impl<'a> BlockHashes<'a> {
    /// Of hashes, for an event to be sent; `scratch` keeps them.
    ///
    /// # Panics
    /// For 2^32 hashes or more.
    pub fn new(hashes: &[ExternalBlockHash<'_>], scratch: &'a mut Vec<u8>) -> Self {
        scratch.clear();
        for hash in hashes {
            write_hash(scratch, hash);
        }
        Self(List { length: length(hashes), elements: scratch })
    }

    /// How many hashes.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The hashes, in order.
    pub fn iter(&self) -> impl Iterator<Item = ExternalBlockHash<'a>> + use<'a> {
        let mut reader = Reader::new(self.0.elements);
        (0..self.0.length).map(move |_| checked(ExternalBlockHash::from_value(next(&mut reader))))
    }
}

/// The tokens of an event.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenIds<'a>(pub(crate) List<'a>);

impl<'a> TokenIds<'a> {
    /// Of token ids, for an event to be sent; `scratch` keeps them.
    ///
    /// # Panics
    /// For 2^32 tokens or more.
    pub fn new(token_ids: &[u32], scratch: &'a mut Vec<u8>) -> Self {
        scratch.clear();
        write_token_ids(scratch, token_ids);
        Self(List { length: length(token_ids), elements: scratch })
    }

    /// How many tokens.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The token ids, in order.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = u32> + use<'a> {
        let mut reader = Reader::new(self.0.elements);
        (0..self.0.length).map(move |_| {
            if let Some(token) = reader.small_unsigned() {
                return token;
            }
            match next(&mut reader) {
                Value::Unsigned(token) => checked(u32::try_from(token).ok()),
                _ => unreachable!("{CHECKED}"),
            }
        })
    }
}

/// A member of extra keys, or what stands in its place.
#[derive(Clone, Debug, PartialEq)]
pub enum ExtraKeyValue<'a> {
    /// Nothing.
    Nil,
    /// A number of at least 0.
    Unsigned(u64),
    /// A number below 0.
    Negative(i64),
    /// A fraction.
    Float(f64),
    /// An adapter's name, a salt, an identifier.
    Text(Cow<'a, str>),
    /// A digest.
    Bytes(Cow<'a, [u8]>),
    /// A member with parts, such as a media item and its offset.
    Tuple(Vec<Self>),
    /// What no engine is known to send.
    Other,
}

impl<'a> ExtraKeyValue<'a> {
    /// Nesting is cut where no engine goes.
    const DEEPEST: usize = 8;

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Nil | Self::Other => write_nil(out),
            Self::Unsigned(value) => write_unsigned(out, *value),
            Self::Negative(value) => write_signed(out, *value),
            Self::Float(value) => write_float(out, *value),
            Self::Text(text) => write_text(out, text),
            Self::Bytes(bytes) => write_bytes(out, bytes),
            Self::Tuple(members) => {
                write_array_header(out, members.len());
                for member in members {
                    member.write(out);
                }
            }
        }
    }

    fn read(reader: &mut Reader<'a>, depth: usize) -> Self {
        let start = *reader;
        match next(reader) {
            Value::Nil => Self::Nil,
            Value::Unsigned(value) => Self::Unsigned(value),
            Value::Negative(value) => Self::Negative(value),
            Value::Float(value) => Self::Float(value),
            Value::Text(text) => Self::Text(text.into()),
            Value::Bytes(bytes) => Self::Bytes(bytes.into()),
            Value::Array(length) if depth < Self::DEEPEST => {
                Self::Tuple((0..length).map(|_| Self::read(reader, depth + 1)).collect())
            }
            Value::Array(_) | Value::Map(_) | Value::Other => {
                *reader = start;
                checked(reader.skip().ok());
                Self::Other
            }
        }
    }
}

/// The extra keys of an event: an entry for each hash, a tuple or nil.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExtraKeys<'a>(pub(crate) List<'a>);

impl<'a> ExtraKeys<'a> {
    /// Of an entry for each hash, for an event to be sent; `scratch` keeps them.
    ///
    /// # Panics
    /// For 2^32 entries or more.
    pub fn new(entries: &[ExtraKeyValue<'_>], scratch: &'a mut Vec<u8>) -> Self {
        scratch.clear();
        for entry in entries {
            entry.write(scratch);
        }
        Self(List { length: length(entries), elements: scratch })
    }

    /// How many entries.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The entries, in order.
    pub fn iter(&self) -> impl Iterator<Item = ExtraKeyValue<'a>> + use<'a> {
        let mut reader = Reader::new(self.0.elements);
        (0..self.0.length).map(move |_| ExtraKeyValue::read(&mut reader, 0))
    }
}

/// Blocks became reachable by their hashes. The names are vLLM's; `manager.md` §8.1.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockStored<'a> {
    /// One for each stored block, in order.
    pub block_hashes: BlockHashes<'a>,
    /// The prefix that the first of them continues; none at the start of a prompt.
    pub parent_block_hash: Option<ExternalBlockHash<'a>>,
    /// Tokens of the announced span.
    pub token_ids: TokenIds<'a>,
    /// Tokens per block.
    pub block_size: u32,
    /// The adapter's number.
    pub lora_id: Option<i64>,
    /// Where the blocks lie, "GPU" for a pool.
    pub medium: Option<&'a str>,
    /// The adapter's name.
    pub lora_name: Option<&'a str>,
    /// What besides the tokens decides about each block.
    pub extra_keys: Option<ExtraKeys<'a>>,
    /// The KV-cache group.
    pub group_idx: Option<u32>,
    /// Kind of the group's spec.
    pub kv_cache_spec_kind: Option<&'a str>,
    /// Window in tokens of a sliding-window spec.
    pub kv_cache_spec_sliding_window: Option<u32>,
    /// The request's salt (rule 9).
    pub cache_salt: Option<&'a str>,
    /// Of a boundary inside a block, whose `block_size` is what the event covers: tokens per block of
    /// the group (case C17).
    pub group_block_size: Option<u32>,
    /// Where the block before the first one has no key, or is gone, so that `parent_block_hash` names an
    /// earlier one: that block. The tokens are those that follow it.
    pub announced_parent_block_hash: Option<ExternalBlockHash<'a>>,
}

/// Hashes no longer lead to a block.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockRemoved<'a> {
    /// Exactly one in what a pool sends.
    pub block_hashes: BlockHashes<'a>,
    /// Where the blocks lay.
    pub medium: Option<&'a str>,
    /// The KV-cache group.
    pub group_idx: Option<u32>,
}

/// An event of a batch.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// Blocks became reachable.
    BlockStored(BlockStored<'a>),
    /// Hashes no longer lead to a block.
    BlockRemoved(BlockRemoved<'a>),
    /// The whole prefix cache was reset.
    AllBlocksCleared,
    /// An event of a type that is not known here, or of blocks on another machine.
    Unknown {
        /// The name of its type.
        tag: &'a str,
    },
}
