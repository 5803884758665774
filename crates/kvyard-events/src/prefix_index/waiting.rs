//! Blocks whose place is not known yet, since nobody has told what they follow. They are found from
//! the hash of the parent; what is found out about a block says where its parent is, too.

use super::fingerprint::Span;
use crate::uniform::{UniformMap, map_bytes};

/// No block.
const NONE: u32 = u32::MAX;

/// A block that waits: what it adds to the prefix before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingBlock {
    pub(super) parent: u64,
    pub(super) hash: u64,
    pub(super) group: usize,
    pub(super) span: Span,
    /// Tokens.
    pub(super) length: u32,
}

/// A block, and its neighbours in the list of those that wait for the same parent.
#[derive(Debug)]
struct Slot {
    block: WaitingBlock,
    before: u32,
    behind: u32,
}

/// See the module. Each block that waits has a number while it does.
#[derive(Debug, Default)]
pub(super) struct WaitingBlocks {
    slots: Vec<Slot>,
    vacant: Vec<u32>,
    /// The first that waits for each parent.
    first: UniformMap<u64, u32>,
}

impl WaitingBlocks {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// Lets a block wait; its number.
    pub(super) fn add(&mut self, block: WaitingBlock) -> u32 {
        let behind = self.first.get(&block.parent).copied().unwrap_or(NONE);
        let slot = Slot { block, before: NONE, behind };
        let number = if let Some(number) = self.vacant.pop() {
            self.slots[number as usize] = slot;
            number
        } else {
            self.slots.push(slot);
            u32::try_from(self.slots.len() - 1).expect("there are fewer than 2^32 blocks")
        };
        if let Some(next) = self.slots.get_mut(behind as usize) {
            next.before = number;
        }
        self.first.insert(block.parent, number);
        number
    }

    /// Takes a block out by its number.
    pub(super) fn remove(&mut self, number: u32) -> WaitingBlock {
        let Slot { block, before, behind } = self.slots[number as usize];
        if let Some(next) = self.slots.get_mut(behind as usize) {
            next.before = before;
        }
        if let Some(previous) = self.slots.get_mut(before as usize) {
            previous.behind = behind;
        } else if behind == NONE {
            self.first.remove(&block.parent);
        } else {
            self.first.insert(block.parent, behind);
        }
        self.vacant.push(number);
        block
    }

    /// Takes out one of the blocks that wait for a parent.
    pub(super) fn remove_child(&mut self, parent: u64) -> Option<WaitingBlock> {
        let number = self.first.get(&parent).copied()?;
        Some(self.remove(number))
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
            + self.vacant.capacity() * size_of::<u32>()
            + map_bytes(&self.first)
    }
}
