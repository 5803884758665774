//! Canonical CBOR (RFC 7049 §3.9), as cbor2's `dumps(value, canonical=True)` writes it: shortest
//! heads, definite lengths, no sharing. It knows no object identity.

use super::{Encoder, INTEGER_BYTES_MAX, Object, STORE_BYTES, Serialisation, write_hash};
use crate::block_hash::BlockHash;
use std::hint::select_unpredictable;

/// Major types, in the high three bits of a head.
const UNSIGNED: u8 = 0x00;
const NEGATIVE: u8 = 0x20;
const BYTES: u8 = 0x40;
const TEXT: u8 = 0x60;
const ARRAY: u8 = 0x80;
/// The simple value `null`.
const NULL: u8 = 0xf6;

/// Canonical CBOR.
pub(super) struct Cbor;

/// The writer for arbitrary values.
pub(super) struct CborEncoder<'a> {
    out: &'a mut Vec<u8>,
}

/// What a head of `len` bytes looks like, as one number: in its top byte the first byte (0 where the
/// argument is part of it); in its low bytes, where they do no harm to a head of at most five, the
/// length and the shift that brings the argument to the end of the head.
const fn form(first_byte: u64, len: u64) -> u64 {
    first_byte << 56 | len << 8 | (64 - 8 * len)
}

/// Writes a head (major type, and argument in the shortest form) at `at`; returns where it ends.
#[inline]
fn write_head(buffer: &mut [u8], at: usize, major: u8, argument: u64) -> usize {
    let Ok(small) = u32::try_from(argument) else {
        buffer[at] = major | 0x1b;
        buffer[at + 1..at + 9].copy_from_slice(&argument.to_be_bytes());
        return at + 9;
    };
    // Lengths of token ids vary at random, which a branch predictor cannot follow: they are selected.
    let selected = select_unpredictable(small > 23, form(0x18, 2), form(0, 1));
    let selected = select_unpredictable(small > 0xff, form(0x19, 3), selected);
    let selected = select_unpredictable(small > 0xffff, form(0x1a, 5), selected);
    let word = u64::from(major) << 56 | selected | u64::from(small) << (selected & 63);
    buffer[at..at + STORE_BYTES].copy_from_slice(&word.to_be_bytes());
    at + (selected >> 8 & 0xff) as usize
}

/// Writes an int at `at` and returns where it ends.
#[inline]
fn write_integer(buffer: &mut [u8], at: usize, value: i64) -> usize {
    match u64::try_from(value) {
        Ok(value) => write_head(buffer, at, UNSIGNED, value),
        Err(_) => write_head(buffer, at, NEGATIVE, (!value).cast_unsigned()),
    }
}

/// Where the bytes of a parent of 16 or 32 bytes start: after the heads of triple and parent.
#[inline]
fn parent_start(parent_len: usize) -> usize {
    if parent_len == 32 { 3 } else { 2 }
}

impl Serialisation for Cbor {
    type Encoder<'a> = CborEncoder<'a>;

    /// Only so that the buffer's length can be computed.
    const PLAIN_TOKENS_MAX: usize = usize::MAX / (2 * INTEGER_BYTES_MAX);

    fn encoder(out: &mut Vec<u8>) -> CborEncoder<'_> {
        CborEncoder { out }
    }

    #[inline(always)]
    fn write_plain_tokens<T: Copy + Into<i64>>(
        buffer: &mut [u8],
        parent_len: usize,
        tokens: &[T],
    ) -> usize {
        let tokens_start = parent_start(parent_len) + parent_len;
        let mut at = write_head(buffer, tokens_start, ARRAY, tokens.len() as u64);
        for &token in tokens {
            at = write_integer(buffer, at, token.into());
        }
        buffer[at] = NULL;
        at + 1
    }

    #[inline(always)]
    fn write_plain_parent(buffer: &mut [u8], parent: &BlockHash, parent_len: usize, _end: usize) {
        let head = if parent_len == 32 {
            [ARRAY | 3, BYTES | 0x18, 32]
        } else {
            [ARRAY | 3, BYTES | 16, 0]
        };
        buffer[..3].copy_from_slice(&head);
        write_hash(&mut buffer[parent_start(parent_len)..], parent, parent_len);
    }
}

impl CborEncoder<'_> {
    /// The members of an array of ints.
    fn integers_alone<T: Copy + Into<i64>>(&mut self, values: &[T]) {
        let mut at = self.out.len();
        self.out.resize(at + values.len() * INTEGER_BYTES_MAX + STORE_BYTES, 0);
        for &value in values {
            at = write_integer(self.out, at, value.into());
        }
        self.out.truncate(at);
    }

    fn head(&mut self, major: u8, argument: u64) {
        let at = self.out.len();
        self.out.resize(at + INTEGER_BYTES_MAX, 0);
        let end = write_head(self.out, at, major, argument);
        self.out.truncate(end);
    }
}

impl Encoder for CborEncoder<'_> {
    fn text(&mut self, text: &str, _object: Object) {
        self.head(TEXT, text.len() as u64);
        self.out.extend_from_slice(text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8], _object: Object) {
        self.head(BYTES, bytes.len() as u64);
        self.out.extend_from_slice(bytes);
    }

    fn integer(&mut self, value: i64) {
        self.integers_alone(&[value]);
    }

    fn integers<T: Copy + Into<i64>>(&mut self, values: &[T]) {
        self.head(ARRAY, values.len() as u64);
        self.integers_alone(values);
    }

    fn none(&mut self) {
        self.out.push(NULL);
    }

    fn begin_tuple(&mut self, len: usize) {
        self.head(ARRAY, len as u64);
    }

    fn end_tuple(&mut self, _len: usize) {}

    fn finish(self) {}
}
