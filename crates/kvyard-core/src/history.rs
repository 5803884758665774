//! The last operations that changed something, and what each did to which block, for the report on a
//! broken invariant: a ring of [`Op`]s beside a ring of effects. Both have a fixed size, so recording
//! allocates nothing.

use crate::error::CHECKED;
use crate::id::{BlockId, NULL_BLOCK, RequestRow};
use crate::op::Op;

/// Operations kept.
pub const KEPT_OPERATIONS: usize = 256;

/// Effects kept, of all operations together; 64 KiB.
const KEPT_EFFECTS: usize = 8192;

/// Effects kept of one operation; later ones are only counted.
const MOST_EFFECTS: usize = 1024;

/// Bytes kept of the name of a request that is gone.
const NAME_BYTES: usize = 64;

/// Names kept: an operation names one at most, and its row passes on at most once.
const KEPT_NAMES: usize = 2 * KEPT_OPERATIONS;

/// What happened to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It left the free queue for a new owner, and lost the keys it had.
    Taken,
    /// A row or a caller took a reference to it, for what it caches or because it is in use.
    Referenced,
    /// It got a key.
    Keyed,
    /// It lost its keys, and stays where it is.
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
    /// Effects noted, and of those the ones kept, before it began.
    noted_before: u64,
    kept_before: u64,
}

/// What a request was called. Rows tell whose an operation is; so a name is written when its row gets
/// another one, and for operations on blocks that are somebody's without having a row.
#[derive(Clone, Debug)]
struct Name {
    /// The operation that is named, or with which the row gets another name.
    number: u64,
    row: Option<RequestRow>,
    bytes: [u8; NAME_BYTES],
    length: usize,
}

/// See the module.
#[derive(Debug)]
pub struct History {
    records: Vec<Record>,
    num_operations: u64,
    effects: Box<[(Effect, BlockId); KEPT_EFFECTS]>,
    num_noted: u64,
    num_kept: u64,
    /// Effects that the current operation may still keep.
    room: usize,
    names: Vec<Name>,
    num_names: u64,
}

impl Default for History {
    fn default() -> Self {
        Self {
            records: Vec::with_capacity(KEPT_OPERATIONS),
            num_operations: 0,
            effects: vec![(Effect::Taken, NULL_BLOCK); KEPT_EFFECTS]
                .try_into()
                .expect("as many as that"),
            num_noted: 0,
            num_kept: 0,
            room: 0,
            names: Vec::with_capacity(KEPT_NAMES),
            num_names: 0,
        }
    }
}

/// A number's place in a ring; the size is a power of two.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "below the size of the ring")]
fn place(number: u64, size: usize) -> usize {
    (number % size as u64) as usize
}

/// Writes over the oldest element of a ring that has room for `size` of them.
#[inline]
fn put<T>(ring: &mut Vec<T>, number: u64, size: usize, element: T) {
    match ring.get_mut(place(number, size)) {
        Some(old) => *old = element,
        None => ring.push(element),
    }
}

impl History {
    /// A new operation begins; effects that follow are its own.
    #[inline]
    pub(crate) fn begin(&mut self, op: Op) {
        if CHECKED {
            let (noted_before, kept_before) = (self.num_noted, self.num_kept);
            let record = Record { op, noted_before, kept_before };
            put(&mut self.records, self.num_operations, KEPT_OPERATIONS, record);
            self.num_operations += 1;
            self.room = MOST_EFFECTS;
        }
    }

    /// As `begin`, for an operation without a row of which it is known whose it is.
    pub(crate) fn begin_of(&mut self, op: Op, request: &str) {
        self.keep_name(None, request);
        self.begin(op);
    }

    /// With the next operation a row passes to another request; `name` is the old one's.
    pub(crate) fn row_passes_on(&mut self, row: RequestRow, name: &str) {
        self.keep_name(Some(row), name);
    }

    fn keep_name(&mut self, row: Option<RequestRow>, name: &str) {
        if CHECKED {
            let length = name.floor_char_boundary(NAME_BYTES);
            let mut bytes = [0; NAME_BYTES];
            bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
            let name = Name { number: self.num_operations, row, bytes, length };
            put(&mut self.names, self.num_names, KEPT_NAMES, name);
            self.num_names += 1;
        }
    }

    /// Notes an effect of the operation that began last.
    #[inline]
    pub(crate) fn note(&mut self, effect: Effect, block: BlockId) {
        self.note_all(effect, std::iter::once(block));
    }

    /// Notes the same effect on several blocks.
    #[inline]
    pub(crate) fn note_all(
        &mut self,
        effect: Effect,
        blocks: impl ExactSizeIterator<Item = BlockId>,
    ) {
        if CHECKED {
            let kept = blocks.len().min(self.room);
            self.num_noted += blocks.len() as u64;
            self.room -= kept;
            for block in blocks.take(kept) {
                self.effects[place(self.num_kept, KEPT_EFFECTS)] = (effect, block);
                self.num_kept += 1;
            }
        }
    }

    /// The operations that are kept, oldest first. `name_of` knows who has a row now.
    pub fn operations<'a>(
        &'a self,
        name_of: impl Fn(RequestRow) -> Option<&'a str>,
    ) -> impl Iterator<Item = PastOperation<'a>> {
        let first = self.num_operations.saturating_sub(KEPT_OPERATIONS as u64);
        (first..self.num_operations).map(move |number| self.operation(number, &name_of))
    }

    fn operation<'a>(
        &'a self,
        number: u64,
        name_of: &impl Fn(RequestRow) -> Option<&'a str>,
    ) -> PastOperation<'a> {
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
        let own = self.names().find(|name| name.number == number && name.row.is_none()).map(text);
        let request = own.or_else(|| {
            let row = record.op.row()?;
            self.name_at(number, row).or_else(|| name_of(row))
        });
        PastOperation {
            number,
            op: &record.op,
            request: request.unwrap_or(""),
            num_forgotten: noted - record.noted_before - effects.len() as u64,
            effects,
        }
    }

    /// Oldest first.
    fn names(&self) -> impl Iterator<Item = &Name> {
        let first = self.num_names.saturating_sub(KEPT_NAMES as u64);
        (first..self.num_names).map(|number| &self.names[place(number, KEPT_NAMES)])
    }

    /// Whose a row was at an operation, if it has passed on since.
    fn name_at(&self, number: u64, row: RequestRow) -> Option<&str> {
        self.names().find(|name| name.row == Some(row) && name.number > number).map(text)
    }
}

fn text(name: &Name) -> &str {
    std::str::from_utf8(&name.bytes[..name.length]).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: RequestRow = RequestRow(0);

    fn free() -> Op {
        Op::Free { request: ROW.0 }
    }

    /// Of each kept operation: its number, whose it is, effects that are known, and that are forgotten.
    fn told(history: &History) -> Vec<(u64, String, usize, u64)> {
        let operations = history.operations(|_| Some("now"));
        let tell = |past: PastOperation<'_>| {
            (past.number, past.request.to_owned(), past.effects.len(), past.num_forgotten)
        };
        operations.map(tell).collect()
    }

    fn note(history: &mut History, count: u32) {
        let blocks: Vec<BlockId> = (1..=count).map(BlockId).collect();
        history.note_all(Effect::Released, blocks.into_iter());
    }

    #[test]
    fn effects_beyond_the_most_of_one_operation_are_counted() {
        let mut history = History::default();
        for count in [1020, 4, 1500] {
            history.begin(free());
            note(&mut history, count);
        }
        note(&mut history, 6);
        let expected = [(0, 1020, 0), (1, 4, 0), (2, 1024, 1506 - 1024)];
        let expected = expected.map(|(n, known, gone)| (n, "now".to_owned(), known, gone));
        assert_eq!(told(&history), expected);
        let last = history.operations(|_| None).last().unwrap();
        assert_eq!(last.effects[..2], [1, 2].map(|block| (Effect::Released, BlockId(block))));
    }

    /// 300 operations of 100 effects: 256 operations are kept, and 8192 effects, which are those of the
    /// last 81 and 92 of the one before.
    #[test]
    fn the_oldest_is_written_over() {
        let mut history = History::default();
        for _ in 0..300 {
            history.begin(free());
            note(&mut history, 100);
        }
        let told = told(&history);
        assert_eq!((told.len(), told[0].0, told[255].0), (256, 44, 299));
        let known = |number: u64| (told[usize::try_from(number).unwrap() - 44].2, told[0].3);
        assert_eq!([217, 218, 219].map(|number| known(number).0), [0, 92, 100]);
        assert_eq!(known(44), (0, 100));
        assert_eq!(told[218 - 44].3, 8);
    }

    /// A row passes on with operation 2, and again with 4; who has it now is the caller's to know.
    #[test]
    fn an_operation_is_of_who_had_the_row_then() {
        let mut history = History::default();
        for number in 0..6 {
            match number {
                2 => history.row_passes_on(ROW, "first"),
                4 => history.row_passes_on(ROW, "second"),
                _ => {}
            }
            match number {
                5 => history.begin_of(Op::Reset, "nobody's row"),
                _ => history.begin(free()),
            }
        }
        let names: Vec<String> = told(&history).into_iter().map(|told| told.1).collect();
        assert_eq!(names, ["first", "first", "second", "second", "now", "nobody's row"]);
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        let mut history = History::default();
        history.begin_of(Op::Reset, &format!("x{}", "\u{e9}".repeat(40)));
        assert_eq!(told(&history)[0].1, format!("x{}", "\u{e9}".repeat(31)), "63 of 64 bytes");
    }
}
