//! Which requests hold blocks, and their rows: dense, lowest free row first. Rows keep the memory of
//! their names, so that a steady engine allocates none.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::error::Result;
use crate::id::RequestRow;
use crate::memory::{Grow, grow_table};

/// Names and rows of the tracked requests.
#[derive(Debug, Default)]
pub(crate) struct TrackedRequests {
    rows: HashTable<RequestRow>,
    hasher: DefaultHashBuilder,
    /// The name of each row; what is left of an earlier request's in a vacant one.
    names: Vec<String>,
    is_vacant: Vec<bool>,
    vacant: BinaryHeap<Reverse<u32>>,
}

impl TrackedRequests {
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Rows ever used; some may be vacant.
    pub(crate) fn num_rows(&self) -> usize {
        self.names.len()
    }

    /// The row of a request. `hint` is where the caller saw it last; it may be wrong.
    #[inline]
    pub(crate) fn find(&self, name: &str, hint: Option<RequestRow>) -> Option<RequestRow> {
        hint.filter(|row| self.name(*row) == Some(name)).or_else(|| {
            let hash = self.hasher.hash_one(name);
            self.rows.find(hash, |row| self.names[row.index()] == name).copied()
        })
    }

    pub(crate) fn name(&self, row: RequestRow) -> Option<&str> {
        let name = self.names.get(row.index())?;
        (!self.is_vacant[row.index()]).then_some(name)
    }

    /// Who has a row, or had it last.
    pub(crate) fn last_name(&self, row: RequestRow) -> Option<&str> {
        self.names.get(row.index()).map(String::as_str)
    }

    /// The row that the next new request gets.
    pub(crate) fn next_row(&self) -> RequestRow {
        match self.vacant.peek() {
            Some(Reverse(row)) => RequestRow(*row),
            None => RequestRow::from_index(self.names.len()),
        }
    }

    /// Makes room for a request of this name, and for the end of every request.
    pub(crate) fn reserve(&mut self, name: &str) -> Result<()> {
        let row = self.next_row();
        if row.index() == self.names.len() {
            self.names.make_room(1)?;
            self.is_vacant.make_room(1)?;
            self.vacant.make_room(self.names.len() + 1 - self.vacant.len())?;
            let mut text = String::new();
            text.make_room(name.len())?;
            grow_table(&mut self.rows, 1, |row| self.hasher.hash_one(&self.names[row.index()]))?;
            self.names.push(text);
            self.is_vacant.push(true);
            self.vacant.push(Reverse(row.0));
            return Ok(());
        }
        let text = &mut self.names[row.index()];
        text.make_room(name.len().saturating_sub(text.len()))?;
        grow_table(&mut self.rows, 1, |row| self.hasher.hash_one(&self.names[row.index()]))
    }

    /// Gives `next_row` to a request, for which room was made.
    pub(crate) fn insert(&mut self, name: &str) -> RequestRow {
        let row = self.next_row();
        self.vacant.pop();
        self.is_vacant[row.index()] = false;
        let text = &mut self.names[row.index()];
        text.clear();
        text.push_str(name);
        let names = &self.names;
        self.rows.insert_unique(self.hasher.hash_one(name), row, |row| {
            self.hasher.hash_one(&names[row.index()])
        });
        row
    }

    pub(crate) fn remove(&mut self, row: RequestRow) {
        let hash = self.hasher.hash_one(&*self.names[row.index()]);
        if let Ok(entry) = self.rows.find_entry(hash, |other| *other == row) {
            entry.remove();
            self.is_vacant[row.index()] = true;
            self.vacant.push(Reverse(row.0));
        }
    }

    /// Tracked rows with their names, in row order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (RequestRow, &str)> {
        (0..self.names.len())
            .map(RequestRow::from_index)
            .filter_map(|row| Some((row, self.name(row)?)))
    }

    /// Breaks I18, for tests of who finds it.
    #[cfg(test)]
    pub(crate) fn rename(&mut self, row: RequestRow, name: &str) {
        name.clone_into(&mut self.names[row.index()]);
    }

    /// Checks that names and rows agree (invariant I18).
    ///
    /// # Panics
    /// If they do not.
    pub(crate) fn validate(&self) {
        assert_eq!(
            self.rows.len() + self.vacant.len(),
            self.names.len(),
            "I18: rows and vacancies"
        );
        for (row, name) in self.iter() {
            assert_eq!(self.find(name, None), Some(row), "I18: request {name:?}");
        }
        for Reverse(row) in &self.vacant {
            assert!(self.is_vacant[*row as usize], "I18: row {row} is vacant and in use");
        }
    }
}
