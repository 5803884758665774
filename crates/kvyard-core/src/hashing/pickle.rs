//! Python's pickle, protocol 5, as `CPython`'s C pickler writes it (`Modules/_pickle.c`; the opcodes
//! are documented in `Lib/pickletools.py`): only what a block's triple can hold.
//!
//! Three of its habits decide the bytes. Every text, bytes object and non-empty tuple gets a number
//! when it has been written, and the second use of the *same object* is a reference to that number:
//! hence [`Object`]. The payload is cut into frames, before the first object that starts when the
//! open frame holds [`FRAME_BYTES`] or more. And texts and bytes that are that long by themselves
//! stand outside of any frame.

use super::{
    Encoder, INTEGER_BYTES_MAX, Object, PLAIN_OVERHEAD, STORE_BYTES, Serialisation, write_hash,
};
use crate::block_hash::BlockHash;
use smallvec::SmallVec;
use std::hint::select_unpredictable;

const PROTOCOL: [u8; 2] = [0x80, 5];
const FRAME: u8 = 0x95;
const STOP: u8 = b'.';
const MEMOIZE: u8 = 0x94;
const NONE: u8 = b'N';
const BININT1: u8 = b'K';
const BININT2: u8 = b'M';
const BININT: u8 = b'J';
const LONG1: u8 = 0x8a;
const SHORT_BINBYTES: u8 = b'C';
const BINBYTES: u8 = b'B';
const BINBYTES8: u8 = 0x8e;
const SHORT_BINUNICODE: u8 = 0x8c;
const BINUNICODE: u8 = b'X';
const BINUNICODE8: u8 = 0x8d;
const BINGET: u8 = b'h';
const LONG_BINGET: u8 = b'j';
const MARK: u8 = b'(';
const EMPTY_TUPLE: u8 = b')';
const TUPLE1: u8 = 0x85;
const TUPLE2: u8 = 0x86;
const TUPLE3: u8 = 0x87;
const TUPLE: u8 = b't';

/// A frame that holds this much is closed before the next object.
const FRAME_BYTES: usize = 64 * 1024;
/// A shorter payload stands without a frame header.
const FRAME_BYTES_MIN: usize = 4;
/// Opcode and length.
const FRAME_HEADER_BYTES: usize = 9;
/// Tokens that are written without looking at the frame.
const BULK: usize = 1024;

/// Pickle, protocol 5.
pub(super) struct Pickle;

/// Opcode of a tuple by its length, 1 to 3; longer ones are marked.
#[inline]
fn tuple_opcode(len: usize) -> u8 {
    match len {
        1 => TUPLE1,
        2 => TUPLE2,
        3 => TUPLE3,
        _ => TUPLE,
    }
}

/// What an int of `len` bytes looks like, as one number: in its low byte the opcode, in its top byte,
/// past the bytes that count, the length.
#[inline]
fn form(opcode: u8, len: u64) -> u64 {
    len << 56 | u64::from(opcode)
}

/// Writes an int at `at` and returns where it ends.
#[inline]
fn write_integer(buffer: &mut [u8], at: usize, value: i64) -> usize {
    let Ok(small @ 0..=0x7fff_ffff) = u32::try_from(value) else {
        return write_long_integer(buffer, at, value);
    };
    // Lengths of token ids vary at random, which a branch predictor cannot follow: they are selected.
    let selected = select_unpredictable(small > 0xff, form(BININT2, 3), form(BININT1, 2));
    let selected = select_unpredictable(small > 0xffff, form(BININT, 5), selected);
    let word = u64::from(small) << 8 | selected;
    buffer[at..at + STORE_BYTES].copy_from_slice(&word.to_le_bytes());
    at + (selected >> 56) as usize
}

/// [`write_integer`] for what hardly any token id is: negative, or past 31 bits.
#[cold]
fn write_long_integer(buffer: &mut [u8], at: usize, value: i64) -> usize {
    if let Ok(value) = i32::try_from(value) {
        buffer[at] = BININT;
        buffer[at + 1..at + 5].copy_from_slice(&value.to_le_bytes());
        return at + 5;
    }
    // Two's complement in as few bytes as keep the sign.
    let magnitude = if value < 0 { !value } else { value };
    let bits = 64 - magnitude.leading_zeros() as usize + 1;
    let len = bits.div_ceil(8);
    buffer[at] = LONG1;
    buffer[at + 1] = u8::try_from(len).expect("an i64 has eight bytes");
    buffer[at + 2..at + 2 + len].copy_from_slice(&value.to_le_bytes()[..len]);
    at + 2 + len
}

impl Serialisation for Pickle {
    type Encoder<'a> = PickleEncoder<'a>;

    /// Everything in one frame.
    const PLAIN_TOKENS_MAX: usize = (FRAME_BYTES - PLAIN_OVERHEAD) / INTEGER_BYTES_MAX;

    fn encoder(out: &mut Vec<u8>) -> PickleEncoder<'_> {
        out.extend_from_slice(&PROTOCOL);
        PickleEncoder { out, frame: None, num_memoised: 0, objects: SmallVec::new() }
    }

    #[inline(always)]
    fn write_plain_tokens<T: Copy + Into<i64>>(
        buffer: &mut [u8],
        parent_len: usize,
        tokens: &[T],
    ) -> usize {
        let len = tokens.len();
        // After the headers: opcode, length, bytes and memo mark of the parent.
        let mut at = PROTOCOL.len() + FRAME_HEADER_BYTES + 2 + parent_len + 1;
        if len > 3 {
            buffer[at] = MARK;
            at += 1;
        }
        for &token in tokens {
            at = write_integer(buffer, at, token.into());
        }
        let closing = [tuple_opcode(len), MEMOIZE, NONE, TUPLE3, MEMOIZE, STOP];
        buffer[at..at + closing.len()].copy_from_slice(&closing);
        at + closing.len()
    }

    #[inline(always)]
    fn write_plain_parent(buffer: &mut [u8], parent: &BlockHash, parent_len: usize, end: usize) {
        let payload = end - PROTOCOL.len() - FRAME_HEADER_BYTES;
        buffer[..2].copy_from_slice(&PROTOCOL);
        buffer[2] = FRAME;
        buffer[3..11].copy_from_slice(&(payload as u64).to_le_bytes());
        buffer[11] = SHORT_BINBYTES;
        buffer[12] = if parent_len == 32 { 32 } else { 16 };
        write_hash(&mut buffer[13..], parent, parent_len);
        buffer[13 + parent_len] = MEMOIZE;
    }
}

/// The writer for arbitrary values.
pub(super) struct PickleEncoder<'a> {
    out: &'a mut Vec<u8>,
    /// Where the header of the open frame stands.
    frame: Option<usize>,
    /// How many objects have a number.
    num_memoised: u32,
    /// The numbers of the objects that may come again.
    objects: SmallVec<[(Object, u32); 16]>,
}

impl PickleEncoder<'_> {
    fn write(&mut self, bytes: &[u8]) {
        self.open_frame();
        self.out.extend_from_slice(bytes);
    }

    fn open_frame(&mut self) {
        if self.frame.is_none() {
            self.frame = Some(self.out.len());
            self.out.extend_from_slice(&[0; FRAME_HEADER_BYTES]);
        }
    }

    /// Fills in the length of the open frame; drops its header if it holds next to nothing.
    fn close_frame(&mut self) {
        let Some(start) = self.frame.take() else {
            return;
        };
        let payload = self.out.len() - start - FRAME_HEADER_BYTES;
        if payload < FRAME_BYTES_MIN {
            self.out.drain(start..start + FRAME_HEADER_BYTES);
            return;
        }
        self.out[start] = FRAME;
        self.out[start + 1..start + FRAME_HEADER_BYTES]
            .copy_from_slice(&(payload as u64).to_le_bytes());
    }

    /// Bytes in the open frame.
    fn payload(&self) -> usize {
        self.frame.map_or(0, |start| self.out.len() - start - FRAME_HEADER_BYTES)
    }

    /// Called before each object: the only place where a full frame is closed.
    fn object_starts(&mut self) {
        if self.payload() >= FRAME_BYTES {
            self.close_frame();
        }
    }

    /// Writes a text or bytes object, or a reference to it if it was written before.
    fn object(&mut self, object: Object, opcodes: [u8; 3], content: &[u8]) {
        self.object_starts();
        let known = self.objects.iter().find(|(known, _)| *known == object);
        if let Some(&(_, number)) = known.filter(|_| object != Object::Unshared) {
            if let Ok(number) = u8::try_from(number) {
                self.write(&[BINGET, number]);
            } else {
                self.write(&[LONG_BINGET]);
                self.write(&number.to_le_bytes());
            }
            return;
        }
        self.sized(opcodes, content);
        let number = self.memoise();
        self.objects.push((object, number));
    }

    /// Gives the object just written its number.
    fn memoise(&mut self) -> u32 {
        self.write(&[MEMOIZE]);
        self.num_memoised += 1;
        self.num_memoised - 1
    }

    /// Length-prefixed data with the opcode for its size; data as long as a frame stands outside.
    fn sized(&mut self, [short, long, very_long]: [u8; 3], data: &[u8]) {
        let alone = data.len() >= FRAME_BYTES;
        if alone {
            self.close_frame();
        } else {
            self.open_frame();
        }
        if let Ok(len) = u8::try_from(data.len()) {
            self.out.extend_from_slice(&[short, len]);
        } else if let Ok(len) = u32::try_from(data.len()) {
            self.out.push(long);
            self.out.extend_from_slice(&len.to_le_bytes());
        } else {
            self.out.push(very_long);
            self.out.extend_from_slice(&(data.len() as u64).to_le_bytes());
        }
        self.out.extend_from_slice(data);
    }
}

impl Encoder for PickleEncoder<'_> {
    fn text(&mut self, text: &str, object: Object) {
        self.object(object, [SHORT_BINUNICODE, BINUNICODE, BINUNICODE8], text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8], object: Object) {
        self.object(object, [SHORT_BINBYTES, BINBYTES, BINBYTES8], bytes);
    }

    fn integer(&mut self, value: i64) {
        self.object_starts();
        self.open_frame();
        let at = self.out.len();
        self.out.resize(at + INTEGER_BYTES_MAX, 0);
        let end = write_integer(self.out, at, value);
        self.out.truncate(end);
    }

    fn integers<T: Copy + Into<i64>>(&mut self, values: &[T]) {
        self.begin_tuple(values.len());
        for values in values.chunks(BULK) {
            if self.payload() + values.len() * INTEGER_BYTES_MAX >= FRAME_BYTES {
                for &value in values {
                    self.integer(value.into());
                }
                continue;
            }
            // No frame ends within these.
            self.open_frame();
            let mut at = self.out.len();
            self.out.resize(at + values.len() * INTEGER_BYTES_MAX + STORE_BYTES, 0);
            for &value in values {
                at = write_integer(self.out, at, value.into());
            }
            self.out.truncate(at);
        }
        self.end_tuple(values.len());
    }

    fn none(&mut self) {
        self.object_starts();
        self.write(&[NONE]);
    }

    fn begin_tuple(&mut self, len: usize) {
        self.object_starts();
        if len > 3 {
            self.write(&[MARK]);
        }
    }

    fn end_tuple(&mut self, len: usize) {
        if len == 0 {
            self.write(&[EMPTY_TUPLE]);
            return;
        }
        self.write(&[tuple_opcode(len)]);
        self.memoise();
    }

    fn finish(mut self) {
        self.write(&[STOP]);
        self.close_frame();
    }
}
