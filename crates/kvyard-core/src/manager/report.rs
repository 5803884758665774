//! The report on a manager whose invariant broke: what it is, who holds what, and its last operations,
//! as JSON. `kvyard explain` tells from it the story of a block or a request.

use std::fmt::Write;

use super::KVCacheManager;
use crate::history::PastOperation;
use crate::id::{BlockId, GroupId};

impl KVCacheManager {
    /// The report, as one JSON object; `violation` is the message of the broken assertion. Reads what
    /// can be read of a state that is not to be trusted, and never panics on it.
    ///
    /// * `format`: "kvyard-report-1"
    /// * `num_blocks`, `num_free_blocks`, `groups`: kind and block size in tokens of each
    /// * `requests`: name, row and block ids (a list a group) of each tracked request
    /// * `blocks`: of each block that the operations name: references of rows, handed out and leased,
    ///   whether it is queued, and tokens that its key covers
    /// * `operations`: oldest first: number, what it was, request, effects as pairs of a name and a
    ///   block id, and how many effects are forgotten
    pub fn report(&self, violation: &str) -> String {
        let mut json = String::from("{\"format\":\"kvyard-report-1\",\"violation\":");
        text(&mut json, violation);
        let (pool, free) = (&self.pool, self.pool.num_free_blocks());
        number(&mut json, "num_blocks", u64::from(pool.num_blocks()));
        number(&mut json, "num_free_blocks", free as u64);
        json.push_str(",\"groups\":");
        list(&mut json, self.managers.iter(), |json, manager| {
            json.push_str("{\"kind\":");
            text(json, manager.kind().event_kind());
            number(json, "block_size", u64::from(manager.block_size()));
            json.push('}');
        });
        json.push_str(",\"requests\":");
        list(&mut json, self.requests.iter(), |json, (row, name)| {
            json.push_str("{\"name\":");
            text(json, name);
            number(json, "row", u64::from(row.0));
            json.push_str(",\"blocks\":");
            list(json, 0..self.managers.len(), |json, group| {
                let blocks = self.tables.row(row, GroupId::from_index(group));
                list(json, blocks.iter(), push);
            });
            json.push('}');
        });
        let operations: Vec<_> =
            pool.history.operations(|row| self.requests.last_name(row)).collect();
        json.push_str(",\"blocks\":");
        list(&mut json, named_blocks(&operations), |json, block| self.report_block(json, block));
        json.push_str(",\"operations\":");
        list(&mut json, operations.iter(), |json, operation| report_operation(json, operation));
        json.push('}');
        json
    }

    /// Who holds blocks, in one line: why a reset was refused.
    pub fn describe_holders(&self) -> String {
        /// Requests named at most.
        const NAMED: usize = 8;
        let held = |row| {
            let groups = (0..self.managers.len()).map(GroupId::from_index);
            let blocks = groups.flat_map(|group| self.tables.row(row, group));
            blocks.filter(|block| !block.is_null()).count()
        };
        let mut requests = self.requests.iter();
        let named = requests.by_ref().take(NAMED);
        let mut holders: Vec<_> =
            named.map(|(row, name)| format!("request {name:?} holds {}", held(row))).collect();
        match requests.count() {
            0 => {}
            more => holders.push(format!("{more} more requests")),
        }
        let outside = self.pool.handed_out.iter().filter(|count| **count > 0).count();
        if outside > 0 {
            holders.push(format!("{outside} are handed out"));
        }
        let in_use = self.pool.num_usable_blocks() as usize - self.pool.num_free_blocks();
        format!("{in_use} blocks are in use: {}", holders.join(", "))
    }

    fn report_block(&self, json: &mut String, block: BlockId) {
        let (pool, at) = (&self.pool, block.index());
        json.push_str("{\"block\":");
        push(json, block);
        number(json, "row_references", u64::from(pool.row_references[at]));
        number(json, "handed_out", u64::from(pool.handed_out[at]));
        number(json, "leased", u64::from(pool.leased[at]));
        number(json, "queued", u64::from(pool.queue.contains(block)));
        let covered = pool.block_key(block).map_or(0, |key| key.covered_tokens);
        number(json, "covered_tokens", u64::from(covered));
        json.push('}');
    }
}

/// The blocks that operations name, each once, in ascending order.
fn named_blocks(operations: &[PastOperation<'_>]) -> impl Iterator<Item = BlockId> + use<> {
    let effects = operations.iter().flat_map(|operation| &operation.effects);
    let blocks = effects.map(|(_, block)| *block).filter(|block| !block.is_null());
    let mut blocks: Vec<BlockId> = blocks.collect();
    blocks.sort_unstable();
    blocks.dedup();
    blocks.into_iter()
}

fn report_operation(json: &mut String, operation: &PastOperation<'_>) {
    json.push_str("{\"number\":");
    push(json, operation.number);
    json.push_str(",\"request\":");
    text(json, operation.request);
    json.push_str(",\"op\":");
    text(json, &operation.op.to_string());
    number(json, "num_forgotten", operation.num_forgotten);
    json.push_str(",\"effects\":");
    let effects = operation.effects.iter().filter(|(_, block)| !block.is_null());
    list(json, effects, |json, (effect, block)| {
        json.push('[');
        text(json, effect.name());
        json.push(',');
        push(json, block);
        json.push(']');
    });
    json.push('}');
}

fn push(json: &mut String, value: impl std::fmt::Display) {
    // Writing to a string cannot fail.
    let _ = write!(json, "{value}");
}

/// `,"name":value`
fn number(json: &mut String, name: &str, value: u64) {
    let _ = write!(json, ",\"{name}\":{value}");
}

fn list<T>(
    json: &mut String,
    items: impl IntoIterator<Item = T>,
    mut write: impl FnMut(&mut String, T),
) {
    json.push('[');
    for (at, item) in items.into_iter().enumerate() {
        if at > 0 {
            json.push(',');
        }
        write(json, item);
    }
    json.push(']');
}

fn text(json: &mut String, text: &str) {
    json.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => json.extend(['\\', character]),
            ' '.. => json.push(character),
            _ => {
                let _ = write!(json, "\\u{:04x}", u32::from(character));
            }
        }
    }
    json.push('"');
}
