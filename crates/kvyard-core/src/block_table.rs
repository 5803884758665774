//! Block tables: for each tracked request and group the ordered list of its blocks, and the log of
//! their edits. All edits of a row go through here, so that whoever mirrors the rows (a batched
//! result, an upload to the GPU) only follows the log.

use std::ops::Range;

use crate::error::Result;
use crate::id::{BlockId, GroupId, NULL_BLOCK, RequestRow, length};
use crate::memory::Grow;

/// One change of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowEdit<'a> {
    /// Blocks were appended.
    Append {
        /// The row.
        row: RequestRow,
        /// The group.
        group: GroupId,
        /// Position of the first of them.
        start: u32,
        /// The blocks.
        blocks: &'a [BlockId],
    },
    /// Positions became the null block.
    Null {
        /// The row.
        row: RequestRow,
        /// The group.
        group: GroupId,
        /// First position.
        start: u32,
        /// Behind the last position.
        stop: u32,
    },
    /// One position got another block.
    Replace {
        /// The row.
        row: RequestRow,
        /// The group.
        group: GroupId,
        /// The position.
        position: u32,
        /// Its new block.
        block: BlockId,
    },
    /// The row was given up, in all groups.
    Clear {
        /// The row.
        row: RequestRow,
    },
}

#[derive(Clone, Copy, Debug)]
enum EditKind {
    Append,
    Null,
    Replace,
    Clear,
}

#[derive(Clone, Copy, Debug)]
struct EditRecord {
    kind: EditKind,
    row: RequestRow,
    group: GroupId,
    start: u32,
    /// Behind the last position; for `Replace` the new block.
    stop: u32,
    blocks_end: usize,
}

/// The delta log. Off, it records nothing, so that an engine which never reads it pays nothing.
#[derive(Debug, Default)]
pub struct RowEditLog {
    enabled: bool,
    records: Vec<EditRecord>,
    blocks: Vec<BlockId>,
}

impl RowEditLog {
    /// The edits since the log was last cleared, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = RowEdit<'_>> {
        let starts = std::iter::once(0).chain(self.records.iter().map(|record| record.blocks_end));
        self.records.iter().zip(starts).map(|(record, blocks)| {
            let EditRecord { row, group, start, stop, .. } = *record;
            match record.kind {
                EditKind::Append => RowEdit::Append {
                    row,
                    group,
                    start,
                    blocks: &self.blocks[blocks..record.blocks_end],
                },
                EditKind::Null => RowEdit::Null { row, group, start, stop },
                EditKind::Replace => {
                    RowEdit::Replace { row, group, position: start, block: BlockId(stop) }
                }
                EditKind::Clear => RowEdit::Clear { row },
            }
        })
    }

    /// Forgets the edits and keeps the capacity.
    pub fn clear(&mut self) {
        self.records.clear();
        self.blocks.clear();
    }

    fn push(&mut self, kind: EditKind, row: RequestRow, group: GroupId, span: Range<u32>) {
        if self.enabled {
            let blocks_end = self.blocks.len();
            let Range { start, end: stop } = span;
            self.records.push(EditRecord { kind, row, group, start, stop, blocks_end });
        }
    }
}

/// See the module. Rows outlive requests, so that a steady engine allocates no memory.
#[derive(Debug)]
pub struct BlockTables {
    num_groups: usize,
    /// The table of row r in group g is at r * `num_groups` + g.
    tables: Vec<Vec<BlockId>>,
    edits: RowEditLog,
}

impl BlockTables {
    /// No rows yet.
    pub fn new(num_groups: usize, track_row_edits: bool) -> Self {
        let edits = RowEditLog { enabled: track_row_edits, ..RowEditLog::default() };
        Self { num_groups, tables: Vec::new(), edits }
    }

    /// The blocks of a row in one group; empty for a row that was never used.
    #[inline]
    pub fn row(&self, row: RequestRow, group: GroupId) -> &[BlockId] {
        self.tables.get(self.at(row, group)).map_or(&[], Vec::as_slice)
    }

    /// The delta log.
    pub fn edits_mut(&mut self) -> &mut RowEditLog {
        &mut self.edits
    }

    /// Makes room for `blocks` more in a row.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(crate) fn reserve(&mut self, row: RequestRow, group: GroupId, blocks: usize) -> Result<()> {
        let rows = (row.index() + 1) * self.num_groups;
        if self.tables.len() < rows {
            self.tables.make_room(rows - self.tables.len())?;
            self.tables.resize_with(rows, Vec::new);
        }
        let at = self.at(row, group);
        self.tables[at].make_room(blocks)
    }

    /// Makes room in the delta log for one call, which appends `blocks` in all groups together, and for
    /// the end of each of `num_tracked` rows, which can ask for no memory.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(crate) fn reserve_edits(&mut self, blocks: usize, num_tracked: usize) -> Result<()> {
        /// A call nulls up to three ranges and appends padding with hits, external, moved and new blocks.
        const EDITS_IN_A_GROUP: usize = 7;
        if self.edits.enabled {
            self.edits.records.make_room(EDITS_IN_A_GROUP * self.num_groups + num_tracked)?;
            self.edits.blocks.make_room(blocks)?;
        }
        Ok(())
    }

    /// Appends what `fill` pushes.
    pub(crate) fn append_with(
        &mut self,
        row: RequestRow,
        group: GroupId,
        fill: impl FnOnce(&mut Vec<BlockId>),
    ) {
        let at = self.at(row, group);
        let table = &mut self.tables[at];
        let start = table.len();
        fill(table);
        if table.len() > start {
            let span = length(start)..length(table.len());
            if self.edits.enabled {
                self.edits.blocks.extend_from_slice(&table[start..]);
            }
            self.edits.push(EditKind::Append, row, group, span);
        }
    }

    /// Makes a range null and tells each block that stood there, the last one first.
    pub(crate) fn null_range(
        &mut self,
        row: RequestRow,
        group: GroupId,
        span: Range<u32>,
    ) -> impl Iterator<Item = BlockId> + '_ {
        self.edits.push(EditKind::Null, row, group, span.clone());
        let at = self.at(row, group);
        self.tables[at][span.start as usize..span.end as usize]
            .iter_mut()
            .rev()
            .map(|block| std::mem::replace(block, NULL_BLOCK))
    }

    /// Gives one position another block; the one that stood there.
    ///
    /// # Panics
    /// If there is no such position.
    pub fn replace(
        &mut self,
        row: RequestRow,
        group: GroupId,
        position: u32,
        block: BlockId,
    ) -> BlockId {
        self.edits.push(EditKind::Replace, row, group, position..block.0);
        let at = self.at(row, group);
        std::mem::replace(&mut self.tables[at][position as usize], block)
    }

    /// Gives a row up, keeping its memory.
    pub(crate) fn clear(&mut self, row: RequestRow) {
        for group in 0..self.num_groups {
            let at = self.at(row, GroupId::from_index(group));
            if let Some(table) = self.tables.get_mut(at) {
                table.clear();
            }
        }
        self.edits.push(EditKind::Clear, row, GroupId(0), 0..0);
    }

    #[inline]
    fn at(&self, row: RequestRow, group: GroupId) -> usize {
        row.index() * self.num_groups + group.index()
    }
}
