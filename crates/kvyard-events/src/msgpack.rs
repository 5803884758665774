//! The part of msgpack that events need: writing in the shortest form, as msgspec does, and reading
//! whatever form another encoder chose.

use crate::error::{DecodeError, Problem};

pub(crate) const NIL: u8 = 0xc0;

// ------------------------------------------------------------------------------------------ writing

pub(crate) fn write_nil(out: &mut Vec<u8>) {
    out.push(NIL);
}

pub(crate) fn write_float(out: &mut Vec<u8>, value: f64) {
    out.push(0xcb);
    out.extend_from_slice(&value.to_be_bytes());
}

#[inline]
pub(crate) fn write_unsigned(out: &mut Vec<u8>, value: u64) {
    if let Ok(value) = u32::try_from(value) {
        let (word, length) = short_form(value);
        out.extend_from_slice(&word.to_be_bytes()[..length]);
    } else {
        let mut bytes = [0xcf; 9];
        bytes[1..].copy_from_slice(&value.to_be_bytes());
        out.extend_from_slice(&bytes);
    }
}

pub(crate) fn write_signed(out: &mut Vec<u8>, value: i64) {
    if let Ok(value) = u64::try_from(value) {
        return write_unsigned(out, value);
    }
    // The low bytes of a negative number, in the shortest form whose sign bit stays set.
    let bytes = value.to_be_bytes();
    let (marker, length) = match value {
        -32.. => (None, 1),
        -0x80.. => (Some(0xd0), 1),
        -0x8000.. => (Some(0xd1), 2),
        -0x8000_0000.. => (Some(0xd2), 4),
        _ => (Some(0xd3), 8),
    };
    out.extend(marker);
    out.extend_from_slice(&bytes[8 - length..]);
}

/// An unsigned number's bytes, left-aligned in a word, and how many they are.
#[inline]
fn short_form(value: u32) -> (u64, usize) {
    /// The marker in its place, shift, bytes.
    const FORMS: [(u64, u8, u8); 4] =
        [(0, 56, 1), (0xcc << 56, 48, 2), (0xcd << 56, 40, 3), (0xce << 56, 24, 5)];
    // Comparisons added up: no branch, and cheaper than to count leading zeros on older processors.
    let form = usize::from(value > 0x7f) + usize::from(value > 0xff) + usize::from(value > 0xffff);
    let (marker, shift, length) = FORMS[form];
    (marker | u64::from(value) << (shift & 63), usize::from(length))
}

/// Token ids, without the header of their array. Most of a batch is this, so no token branches.
pub(crate) fn write_token_ids(out: &mut Vec<u8>, token_ids: &[u32]) {
    /// Tokens that are written in one go: their longest forms end below `PLACES`.
    const CHUNK: usize = 50;
    /// A power of two, so that a place needs no check.
    const PLACES: usize = 256;
    for chunk in token_ids.chunks(CHUNK) {
        let start = out.len();
        // Behind the last place there is room for a whole word.
        out.resize(start + PLACES + 8, 0);
        let Some(room) = out[start..].first_chunk_mut::<{ PLACES + 8 }>() else { return };
        let mut end = 0;
        for token in chunk {
            let (word, length) = short_form(*token);
            let place = end % PLACES;
            room[place..place + 8].copy_from_slice(&word.to_be_bytes());
            end = place + length;
        }
        out.truncate(start + end);
    }
}

#[inline]
fn write_length(out: &mut Vec<u8>, length: usize, markers: [u8; 3]) {
    let length = u32::try_from(length).expect("msgpack lengths have 32 bits");
    if let (Ok(length), true) = (u8::try_from(length), markers[0] != 0) {
        out.extend_from_slice(&[markers[0], length]);
    } else if let Ok(length) = u16::try_from(length) {
        out.push(markers[1]);
        out.extend_from_slice(&length.to_be_bytes());
    } else {
        out.push(markers[2]);
        out.extend_from_slice(&length.to_be_bytes());
    }
}

#[inline]
pub(crate) fn write_array_header(out: &mut Vec<u8>, length: usize) {
    match u8::try_from(length) {
        Ok(short @ 0..=15) => out.push(0x90 | short),
        _ => write_length(out, length, [0, 0xdc, 0xdd]),
    }
}

/// A map of at most 15 entries.
pub(crate) fn write_small_map_header(out: &mut Vec<u8>, length: u8) {
    debug_assert!(length <= 15, "events have fewer fields");
    out.push(0x80 | length);
}

pub(crate) fn write_text(out: &mut Vec<u8>, text: &str) {
    match u8::try_from(text.len()) {
        Ok(short @ 0..=31) => out.push(0xa0 | short),
        _ => write_length(out, text.len(), [0xd9, 0xda, 0xdb]),
    }
    out.extend_from_slice(text.as_bytes());
}

pub(crate) fn write_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    write_length(out, bytes.len(), [0xc4, 0xc5, 0xc6]);
    out.extend_from_slice(bytes);
}

// ------------------------------------------------------------------------------------------ reading

/// One msgpack value, as far as events care.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Nil,
    Unsigned(u64),
    /// Below zero.
    Negative(i64),
    Float(f64),
    Text(&'a str),
    Bytes(&'a [u8]),
    /// The header of an array; its elements follow.
    Array(u32),
    /// The header of a map; its keys and values follow, in turn.
    Map(u32),
    /// A boolean, or an extension: nothing that an event needs.
    Other,
}

/// A place in a payload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    payload: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(payload: &'a [u8]) -> Self {
        Self { payload, at: 0 }
    }

    pub(crate) const fn offset(&self) -> usize {
        self.at
    }

    pub(crate) const fn is_at_end(&self) -> bool {
        self.at == self.payload.len()
    }

    pub(crate) fn since(&self, start: usize) -> &'a [u8] {
        &self.payload[start..self.at]
    }

    pub(crate) const fn error(&self, problem: Problem) -> DecodeError {
        DecodeError { offset: self.at, problem }
    }

    /// A value of the wrong type stands here.
    pub(crate) fn unexpected(&self, expected: &'static str) -> DecodeError {
        match self.payload.get(self.at) {
            Some(&marker) => self.error(Problem::Unexpected { expected, marker }),
            None => self.error(Problem::Truncated),
        }
    }

    #[inline]
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let rest = &self.payload[self.at..];
        let bytes = rest.get(..count).ok_or_else(|| self.error(Problem::Truncated))?;
        self.at += count;
        Ok(bytes)
    }

    #[inline]
    fn number<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (bytes, _) = self.payload[self.at..]
            .split_first_chunk()
            .ok_or_else(|| self.error(Problem::Truncated))?;
        self.at += N;
        Ok(*bytes)
    }

    fn unsigned(&mut self, bytes: usize) -> Result<u64, DecodeError> {
        Ok(match bytes {
            1 => u64::from(self.number::<1>()?[0]),
            2 => u64::from(u16::from_be_bytes(self.number()?)),
            4 => u64::from(u32::from_be_bytes(self.number()?)),
            _ => u64::from_be_bytes(self.number()?),
        })
    }

    fn length(&mut self, bytes: usize) -> Result<u32, DecodeError> {
        let length = self.unsigned(bytes)?;
        u32::try_from(length).map_err(|_| self.error(Problem::Truncated))
    }

    fn text(&mut self, length: u32) -> Result<Value<'a>, DecodeError> {
        let start = self.at;
        let bytes = self.bytes(length as usize)?;
        let not_text = |_| DecodeError { offset: start, problem: Problem::NotText };
        std::str::from_utf8(bytes).map(Value::Text).map_err(not_text)
    }

    /// The next value; of an array or a map only the header.
    #[inline]
    pub(crate) fn value(&mut self) -> Result<Value<'a>, DecodeError> {
        let marker = self.number::<1>()?[0];
        let signed = |value: i64| match u64::try_from(value) {
            Ok(value) => Value::Unsigned(value),
            Err(_) => Value::Negative(value),
        };
        Ok(match marker {
            0..=0x7f => Value::Unsigned(u64::from(marker)),
            0x80..=0x8f => Value::Map(u32::from(marker & 0xf)),
            0x90..=0x9f => Value::Array(u32::from(marker & 0xf)),
            0xa0..=0xbf => self.text(u32::from(marker & 0x1f))?,
            NIL => Value::Nil,
            // 0xc1 is never used.
            0xc1..=0xc3 => Value::Other,
            0xc4..=0xc6 => {
                let length = self.length(1 << (marker - 0xc4))?;
                Value::Bytes(self.bytes(length as usize)?)
            }
            0xc7..=0xc9 => {
                let length = self.length(1 << (marker - 0xc7))?;
                self.bytes(length as usize + 1)?;
                Value::Other
            }
            0xca => Value::Float(f64::from(f32::from_be_bytes(self.number()?))),
            0xcb => Value::Float(f64::from_be_bytes(self.number()?)),
            0xcc..=0xcf => Value::Unsigned(self.unsigned(1 << (marker - 0xcc))?),
            0xd0 => signed(i64::from(i8::from_be_bytes(self.number()?))),
            0xd1 => signed(i64::from(i16::from_be_bytes(self.number()?))),
            0xd2 => signed(i64::from(i32::from_be_bytes(self.number()?))),
            0xd3 => signed(i64::from_be_bytes(self.number()?)),
            0xd4..=0xd8 => {
                self.bytes((1 << (marker - 0xd4)) + 1)?;
                Value::Other
            }
            0xd9..=0xdb => {
                let length = self.length(1 << (marker - 0xd9))?;
                self.text(length)?
            }
            0xdc..=0xdd => Value::Array(self.length(2 << (marker - 0xdc))?),
            0xde..=0xdf => Value::Map(self.length(2 << (marker - 0xde))?),
            0xe0..=0xff => Value::Negative(i64::from(marker.cast_signed())),
        })
    }

    /// The next number of 32 bits, in the forms that encoders choose; none where another value stands,
    /// and nothing is read then. Most of a batch is token ids.
    #[inline]
    pub(crate) fn small_unsigned(&mut self) -> Option<u32> {
        let (&marker, rest) = self.payload[self.at..].split_first()?;
        let (value, length) = match marker {
            0..=0x7f => (u32::from(marker), 1),
            0xcc => (u32::from(*rest.first()?), 2),
            0xcd => (u32::from(u16::from_be_bytes(*rest.first_chunk()?)), 3),
            0xce => (u32::from_be_bytes(*rest.first_chunk()?), 5),
            _ => return None,
        };
        self.at += length;
        Some(value)
    }

    /// The next numbers of 32 bits as they are encoded; other values are passed over as they are.
    pub(crate) fn take_numbers(&mut self, count: u32) -> &'a [u8] {
        let start = self.at;
        for _ in 0..count {
            if self.small_unsigned().is_none() && self.skip().is_err() {
                break;
            }
        }
        self.since(start)
    }

    /// The next values as they are encoded; fewer where the payload ends.
    pub(crate) fn take(&mut self, count: u32) -> &'a [u8] {
        let start = self.at;
        for _ in 0..count {
            if self.skip().is_err() {
                break;
            }
        }
        self.since(start)
    }

    /// Passes over the next value, whatever it is. Not recursive, so that no nesting is too deep.
    pub(crate) fn skip(&mut self) -> Result<(), DecodeError> {
        let mut waiting = 1_u64;
        while waiting > 0 {
            waiting -= 1;
            match self.value()? {
                Value::Array(length) => waiting += u64::from(length),
                Value::Map(length) => waiting += 2 * u64::from(length),
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first and the last number of each form of the msgpack specification.
    #[test]
    fn numbers_have_their_shortest_form() {
        let written = |value: i128| {
            let mut out = Vec::new();
            match (u64::try_from(value), i64::try_from(value)) {
                (Ok(value), _) => write_unsigned(&mut out, value),
                (_, Ok(value)) => write_signed(&mut out, value),
                _ => unreachable!(),
            }
            out
        };
        let cases: [(i128, &[u8]); 21] = [
            (0, &[0]),
            (127, &[0x7f]),
            (128, &[0xcc, 0x80]),
            (255, &[0xcc, 0xff]),
            (256, &[0xcd, 1, 0]),
            (65_535, &[0xcd, 0xff, 0xff]),
            (65_536, &[0xce, 0, 1, 0, 0]),
            (0xffff_ffff, &[0xce, 0xff, 0xff, 0xff, 0xff]),
            (1 << 32, &[0xcf, 0, 0, 0, 1, 0, 0, 0, 0]),
            (u64::MAX.into(), &[0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
            (-1, &[0xff]),
            (-32, &[0xe0]),
            (-33, &[0xd0, 0xdf]),
            (-128, &[0xd0, 0x80]),
            (-129, &[0xd1, 0xff, 0x7f]),
            (-32_768, &[0xd1, 0x80, 0]),
            (-32_769, &[0xd2, 0xff, 0xff, 0x7f, 0xff]),
            (i32::MIN.into(), &[0xd2, 0x80, 0, 0, 0]),
            (i128::from(i32::MIN) - 1, &[0xd3, 0xff, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff]),
            (i64::MIN.into(), &[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0]),
            (70_000, &[0xce, 0, 1, 0x11, 0x70]),
        ];
        for (value, bytes) in cases {
            assert_eq!(written(value), bytes, "{value}");
            let expected = match u64::try_from(value) {
                Ok(value) => Value::Unsigned(value),
                Err(_) => Value::Negative(i64::try_from(value).unwrap()),
            };
            assert_eq!(Reader::new(bytes).value(), Ok(expected));
        }
    }

    #[test]
    fn token_ids_are_numbers() {
        let mut token_ids: Vec<u32> = vec![0, 127, 128, 255, 256, 65_535, 65_536, u32::MAX];
        token_ids.extend(0..100);
        let mut expected = Vec::new();
        for token in &token_ids {
            write_unsigned(&mut expected, u64::from(*token));
        }
        let mut out = Vec::new();
        write_token_ids(&mut out, &token_ids);
        assert_eq!(out, expected);
    }

    #[test]
    fn lengths_have_their_shortest_form() {
        let header = |length, write: fn(&mut Vec<u8>, usize)| {
            let mut out = Vec::new();
            write(&mut out, length);
            out.truncate(5);
            out
        };
        let array = |length| header(length, write_array_header);
        assert_eq!(array(15), [0x9f]);
        assert_eq!(array(16), [0xdc, 0, 16]);
        assert_eq!(array(65_536), [0xdd, 0, 1, 0, 0]);
        let text = |length| header(length, |out, length| write_text(out, &"x".repeat(length)));
        assert_eq!(text(31)[0], 0xbf);
        assert_eq!(text(32)[..2], [0xd9, 32]);
        assert_eq!(text(256)[..3], [0xda, 1, 0]);
        assert_eq!(text(65_536)[..5], [0xdb, 0, 1, 0, 0]);
        let bytes = |length| header(length, |out, length| write_bytes(out, &vec![7; length]));
        assert_eq!(bytes(1), [0xc4, 1, 7]);
        assert_eq!(bytes(256)[..3], [0xc5, 1, 0]);
    }

    #[test]
    fn deep_and_huge_claims_are_refused_without_harm() {
        assert!(Reader::new(&vec![0x91; 100_000]).skip().is_err());
        assert!(Reader::new(&[0xdd, 0xff, 0xff, 0xff, 0xff]).skip().is_err());
        assert!(Reader::new(&[0xdf, 0xff, 0xff, 0xff, 0xff]).skip().is_err());
        assert!(Reader::new(&[0xc6, 0xff, 0xff, 0xff, 0xff, 1]).skip().is_err());
        assert!(Reader::new(&[]).skip().is_err());
    }
}
