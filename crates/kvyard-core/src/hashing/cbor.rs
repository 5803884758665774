//! Canonical CBOR (RFC 7049 §3.9), as cbor2's `dumps(value, canonical=True)` writes it: shortest
//! heads, definite lengths, no sharing. It knows no object identity.

use super::{Encoder, INTEGER_BYTES_MAX, Object, STORE_BYTES, Serialisation};

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

/// A head: major type and argument in the shortest form. Returns the bytes and how many count.
#[inline]
fn head(major: u8, argument: u64) -> ([u8; 9], usize) {
    let mut bytes = [0; 9];
    let value = argument.to_be_bytes();
    let width = match argument {
        0..24 => 0,
        24..0x100 => 1,
        0x100..0x1_0000 => 2,
        0x1_0000..0x1_0000_0000 => 4,
        _ => 8,
    };
    bytes[0] = match width {
        0 => major | value[7],
        1 => major | 0x18,
        2 => major | 0x19,
        4 => major | 0x1a,
        _ => major | 0x1b,
    };
    bytes[1..=width].copy_from_slice(&value[8 - width..]);
    (bytes, width + 1)
}

/// Writes an int at `at` and returns where it ends.
#[inline]
fn write_integer(buffer: &mut [u8], at: usize, value: i64) -> usize {
    let Ok(value) = u32::try_from(value) else {
        return write_long_integer(buffer, at, value);
    };
    // Lengths of token ids vary at random, so that branches on them would be mispredicted.
    let (over_5_bits, over_byte, over_word) = (value > 23, value > 0xff, value > 0xffff);
    let bytes = u32::from(over_5_bits) + u32::from(over_byte) + 2 * u32::from(over_word);
    let additional = if over_5_bits {
        0x18 + u32::from(over_byte) + u32::from(over_word)
    } else {
        value
    };
    let word = u64::from(additional) << 56 | u64::from(value) << (56 - 8 * bytes);
    buffer[at..at + STORE_BYTES].copy_from_slice(&word.to_be_bytes());
    at + 1 + bytes as usize
}

/// [`write_integer`] for what no token id is: outside of 32 bits, or negative.
#[cold]
fn write_long_integer(buffer: &mut [u8], at: usize, value: i64) -> usize {
    let (major, argument) = if value < 0 {
        (NEGATIVE, !value)
    } else {
        (UNSIGNED, value)
    };
    let (bytes, len) = head(major, argument.cast_unsigned());
    buffer[at..at + len].copy_from_slice(&bytes[..len]);
    at + len
}

impl Serialisation for Cbor {
    type Encoder<'a> = CborEncoder<'a>;

    const PLAIN_TOKENS_MAX: usize = usize::MAX / (2 * INTEGER_BYTES_MAX);

    fn encoder(out: &mut Vec<u8>) -> CborEncoder<'_> {
        CborEncoder { out }
    }

    #[inline]
    fn write_plain_tokens<T: Copy + Into<i64>>(
        buffer: &mut [u8],
        parent_len: usize,
        tokens: &[T],
    ) -> usize {
        // Head of the triple, head and bytes of the parent.
        let mut at = 1 + head(BYTES, parent_len as u64).1 + parent_len;
        let (bytes, len) = head(ARRAY, tokens.len() as u64);
        buffer[at..at + bytes.len()].copy_from_slice(&bytes);
        at += len;
        for &token in tokens {
            at = write_integer(buffer, at, token.into());
        }
        buffer[at] = NULL;
        at + 1
    }

    #[inline]
    fn write_plain_parent(buffer: &mut [u8], parent: &[u8], _end: usize) {
        buffer[0] = ARRAY | 3;
        let (bytes, len) = head(BYTES, parent.len() as u64);
        buffer[1..=len].copy_from_slice(&bytes[..len]);
        buffer[1 + len..][..parent.len()].copy_from_slice(parent);
    }
}

impl CborEncoder<'_> {
    fn head(&mut self, major: u8, argument: u64) {
        let (bytes, len) = head(major, argument);
        self.out.extend_from_slice(&bytes[..len]);
    }
}

impl Encoder for CborEncoder<'_> {
    fn text(&mut self, text: &str, _object: Object) {
        self.head(TEXT, text.len() as u64);
        self.out.extend_from_slice(text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.head(BYTES, bytes.len() as u64);
        self.out.extend_from_slice(bytes);
    }

    fn integer(&mut self, value: i64) {
        self.out.resize(self.out.len() + INTEGER_BYTES_MAX, 0);
        let at = self.out.len() - INTEGER_BYTES_MAX;
        let end = write_integer(self.out, at, value);
        self.out.truncate(end);
    }

    fn integers<T: Copy + Into<i64>>(&mut self, values: &[T]) {
        self.head(ARRAY, values.len() as u64);
        let mut at = self.out.len();
        self.out
            .resize(at + values.len() * INTEGER_BYTES_MAX + STORE_BYTES, 0);
        for &value in values {
            at = write_integer(self.out, at, value.into());
        }
        self.out.truncate(at);
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
