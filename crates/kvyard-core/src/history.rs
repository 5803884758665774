//! The last operations and what each did to which block, for the report on a broken invariant. A ring
//! of [`Op`]s beside a ring of effects, both of fixed size: recording allocates nothing.

use crate::id::{BlockId, NULL_BLOCK};
use crate::op::Op;

/// Operations kept.
pub const KEPT_OPERATIONS: usize = 256;

/// Effects kept, of all operations together; 64 KiB.
const KEPT_EFFECTS: usize = 8192;

/// Effects kept of one operation; later ones are only counted.
const MOST_EFFECTS: u32 = 1024;

/// Bytes kept of a request's name.
const NAME_BYTES: usize = 55;

/// What happened to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It left the free queue for a new owner.
    Taken,
    /// A row or a caller took a reference to it, for what it caches or because it is in use.
    Referenced,
    /// It got a key.
    Keyed,
    /// It lost its keys.
    Unkeyed,
    /// A row's reference became a lease's.
    Leased,
    /// A reference was given back.
    Released,
}

impl Effect {
    /// Its name in a report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Referenced => "referenced",
            Self::Keyed => "keyed",
            Self::Unkeyed => "unkeyed",
            Self::Leased => "leased",
            Self::Released => "released",
        }
    }
}

/// One operation of the past.
#[derive(Clone, Debug)]
pub struct PastOperation<'a> {
    /// Its number since the manager was made, from 0.
    pub number: u64,
    /// The operation; a request is named by its row.
    pub op: &'a Op,
    /// The request's name, or its beginning; empty for an operation on blocks.
    pub request: &'a str,
    /// Effects that are not known any more: they were too many, or are too old.
    pub num_forgotten: u64,
    /// What is known of its effects, in order.
    pub effects: Vec<(Effect, BlockId)>,
}

#[derive(Clone, Debug)]
struct Record {
    op: Op,
    name: [u8; NAME_BYTES],
    name_length: u8,
    /// Effects noted, and of those the ones kept, before it began.
    noted_before: u64,
    kept_before: u64,
}

/// See the module.
#[derive(Debug)]
pub struct History {
    records: Vec<Record>,
    num_operations: u64,
    effects: Vec<(Effect, BlockId)>,
    num_noted: u64,
    num_kept: u64,
    /// Effects that the current operation may still keep.
    room: u32,
}

impl Default for History {
    fn default() -> Self {
        Self {
            records: Vec::with_capacity(KEPT_OPERATIONS),
            num_operations: 0,
            effects: vec![(Effect::Taken, NULL_BLOCK); KEPT_EFFECTS],
            num_noted: 0,
            num_kept: 0,
            room: 0,
        }
    }
}

/// A number's place in a ring; the modulus is a power of two.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "below the size of the ring")]
fn place(number: u64, size: usize) -> usize {
    (number % size as u64) as usize
}

impl History {
    /// A new operation begins; effects that follow are its own. `request` is its request's name.
    #[inline]
    pub(crate) fn begin(&mut self, op: Op, request: &str) {
        if cfg!(kvyard_unchecked) {
            return;
        }
        let mut name = [0; NAME_BYTES];
        let kept = request.len().min(NAME_BYTES);
        name[..kept].copy_from_slice(&request.as_bytes()[..kept]);
        let record = Record {
            op,
            name,
            name_length: u8::try_from(kept).unwrap_or(0),
            noted_before: self.num_noted,
            kept_before: self.num_kept,
        };
        match self.records.get_mut(place(self.num_operations, KEPT_OPERATIONS)) {
            Some(old) => *old = record,
            None => self.records.push(record),
        }
        self.num_operations += 1;
        self.room = MOST_EFFECTS;
    }

    /// Notes an effect of the operation that began last.
    #[inline]
    pub(crate) fn note(&mut self, effect: Effect, block: BlockId) {
        if cfg!(kvyard_unchecked) || block.is_null() {
            return;
        }
        if self.room > 0 {
            self.room -= 1;
            self.effects[place(self.num_kept, KEPT_EFFECTS)] = (effect, block);
            self.num_kept += 1;
        }
        self.num_noted += 1;
    }

    /// The operations that are kept, oldest first.
    pub fn operations(&self) -> impl Iterator<Item = PastOperation<'_>> {
        let first = self.num_operations.saturating_sub(KEPT_OPERATIONS as u64);
        (first..self.num_operations).map(|number| self.operation(number))
    }

    fn operation(&self, number: u64) -> PastOperation<'_> {
        let record = &self.records[place(number, KEPT_OPERATIONS)];
        let is_last = number + 1 == self.num_operations;
        let (noted, kept) = if is_last {
            (self.num_noted, self.num_kept)
        } else {
            let next = &self.records[place(number + 1, KEPT_OPERATIONS)];
            (next.noted_before, next.kept_before)
        };
        let oldest = self.num_kept.saturating_sub(KEPT_EFFECTS as u64);
        let effects: Vec<_> = (record.kept_before.max(oldest)..kept)
            .map(|number| self.effects[place(number, KEPT_EFFECTS)])
            .collect();
        let name = &record.name[..usize::from(record.name_length)];
        let whole = match std::str::from_utf8(name) {
            Ok(name) => name,
            // Cut inside a character.
            Err(error) => std::str::from_utf8(&name[..error.valid_up_to()]).unwrap_or(""),
        };
        PastOperation {
            number,
            op: &record.op,
            request: whole,
            num_forgotten: noted - record.noted_before - effects.len() as u64,
            effects,
        }
    }
}
