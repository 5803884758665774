//! Which requests hold blocks, and their rows: dense, lowest free row first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::error::Result;
use crate::id::RequestRow;

/// Names and rows of the tracked requests.
#[derive(Debug, Default)]
pub(crate) struct TrackedRequests {
    rows: HashMap<Arc<str>, RequestRow>,
    names: Vec<Option<Arc<str>>>,
    vacant: BinaryHeap<Reverse<u32>>,
}

impl TrackedRequests {
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// The row of a request. `hint` is where the caller saw it last; it may be wrong.
    #[inline]
    pub(crate) fn find(&self, name: &str, hint: Option<RequestRow>) -> Option<RequestRow> {
        hint.filter(|row| self.name(*row) == Some(name)).or_else(|| self.rows.get(name).copied())
    }

    pub(crate) fn name(&self, row: RequestRow) -> Option<&str> {
        self.names.get(row.index())?.as_deref()
    }

    /// The row that the next new request gets.
    pub(crate) fn next_row(&self) -> RequestRow {
        match self.vacant.peek() {
            Some(Reverse(row)) => RequestRow(*row),
            None => RequestRow::from_index(self.names.len()),
        }
    }

    pub(crate) fn reserve(&mut self) -> Result<()> {
        self.names.try_reserve(1)?;
        self.vacant.try_reserve(self.names.len() + 1 - self.vacant.len())?;
        self.rows
            .try_reserve(1)
            .map_err(|_| crate::error::KVCacheError::OutOfMemory("request names".into()))
    }

    /// Gives `next_row` to a request.
    pub(crate) fn insert(&mut self, name: &str) -> RequestRow {
        let row = self.next_row();
        let name: Arc<str> = name.into();
        if self.vacant.pop().is_some() {
            self.names[row.index()] = Some(name.clone());
        } else {
            self.names.push(Some(name.clone()));
        }
        self.rows.insert(name, row);
        row
    }

    pub(crate) fn remove(&mut self, row: RequestRow) {
        if let Some(name) = self.names[row.index()].take() {
            self.rows.remove(&name);
            self.vacant.push(Reverse(row.0));
        }
    }

    /// Tracked rows with their names, in row order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (RequestRow, &str)> {
        self.names
            .iter()
            .enumerate()
            .filter_map(|(row, name)| Some((RequestRow::from_index(row), name.as_deref()?)))
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
        for (name, row) in &self.rows {
            assert_eq!(self.name(*row), Some(&**name), "I18: row {row}");
        }
    }
}
