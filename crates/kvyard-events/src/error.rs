//! Why a payload cannot be read.

use std::fmt;

/// A payload is no batch of events. Nothing of it was taken in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeError {
    /// Byte of the payload at which reading stopped.
    pub offset: usize,
    /// What was wrong there.
    pub problem: Problem,
}

/// What was wrong with a payload.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// It ends inside a value.
    Truncated,
    /// A value is of another type than its place asks for.
    Unexpected {
        /// What belongs there.
        expected: &'static str,
        /// The first byte of what is there.
        marker: u8,
    },
    /// A number does not fit its field.
    OutOfRange {
        /// The field, and what fits.
        expected: &'static str,
    },
    /// A text is not UTF-8.
    NotText,
    /// An event lacks a field without which it says nothing.
    MissingField {
        /// The field.
        field: &'static str,
    },
    /// Bytes follow the batch.
    TrailingBytes,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no batch of KV events: at byte {}, ", self.offset)?;
        match &self.problem {
            Problem::Truncated => f.write_str("the payload ends inside a value"),
            Problem::Unexpected { expected, marker } => {
                write!(
                    f,
                    "{expected} is expected, not a msgpack value that starts with {marker:#04x}"
                )
            }
            Problem::OutOfRange { expected } => write!(f, "{expected} is expected"),
            Problem::NotText => f.write_str("a text is not UTF-8"),
            Problem::MissingField { field } => write!(f, "an event has no {field}"),
            Problem::TrailingBytes => f.write_str("bytes follow the batch"),
        }
    }
}

impl std::error::Error for DecodeError {}
