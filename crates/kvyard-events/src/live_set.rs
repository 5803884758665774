//! What a router that comes late must be told: the store of each live (hash, group), kept as it was
//! encoded, and written again parent before child.
//!
//! Blocks whose parent is gone continue the nearest ancestor that is still live. To know it, a block
//! that is removed stays as a bare node while at least two others continue it; with one it is spliced
//! out, so that bare nodes are fewer than live ones and memory follows the pool's size, however long
//! the stream runs.

mod template;

#[cfg(test)]
mod tests;

use kvyard_core::semantics::RemovalEvent;

use crate::decode::read_batch;
use crate::encode::{begin_batch, end_batch, write_stored_parts};
use crate::error::DecodeError;
use crate::event::{BlockRemoved, BlockStored, Event, ExternalBlockHash, write_hash};
use crate::msgpack::{Reader, write_array_header};
use crate::uniform::{UniformMap, map_bytes};
use crate::wire_format::WireFormat;
use template::{Templates, Widths};

/// No node.
const NONE: u32 = u32::MAX;

/// Stores of one batch of a dump; a reader has one batch in memory at a time.
const STORES_PER_BATCH: usize = 256;

/// A block's name: the low 64 bits of its hash, and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    hash: u64,
    shelf: u32,
}

/// A live block, or a removed one that still joins others to their ancestors.
#[derive(Debug)]
struct Node {
    key: Key,
    /// Stores minus removals; 0: no longer live.
    copies: u32,
    /// As announced, live or not. 0, which is no real hash: none.
    announced_parent: u64,
    /// The nearest ancestor that is a node.
    parent: u32,
    /// Nodes whose `parent` this is: how many, and their numbers joined by exclusive or, which names
    /// the last one.
    children: u32,
    children_joined: u32,
    template: u32,
    /// The digests of the block and of its announced parent where hashes are bytes, the encoded tokens,
    /// the encoded extra keys.
    body: Box<[u8]>,
}

/// See the module.
#[derive(Debug)]
pub struct LiveSet {
    removal_event: RemovalEvent,
    nodes: Vec<Node>,
    /// Numbers of nodes that are free.
    vacant: Vec<u32>,
    numbers: UniformMap<Key, u32>,
    /// Groups and media seen; a shelf is a position here.
    shelves: Vec<(Option<u32>, Option<Box<str>>)>,
    templates: Templates,
    num_live: usize,
    body_bytes: usize,
    latest_timestamp: f64,
}

impl LiveSet {
    /// An empty set. `removal_event` is what the pool's semantics say: whether a removal is told for
    /// each copy of a hash, or for the last one only (rule 12).
    pub fn new(removal_event: RemovalEvent) -> Self {
        Self {
            removal_event,
            nodes: Vec::new(),
            vacant: Vec::new(),
            numbers: UniformMap::default(),
            shelves: Vec::new(),
            templates: Templates::default(),
            num_live: 0,
            body_bytes: 0,
            latest_timestamp: 0.0,
        }
    }

    /// Live (hash, group) pairs.
    pub fn len(&self) -> usize {
        self.num_live
    }

    /// Whether nothing is live.
    pub fn is_empty(&self) -> bool {
        self.num_live == 0
    }

    /// Bytes that it takes, the allocator's own use estimated.
    pub fn num_bytes(&self) -> usize {
        /// What a small allocation takes besides its content, on average.
        const OVERHEAD: usize = 16;
        self.nodes.capacity() * size_of::<Node>()
            + self.vacant.capacity() * size_of::<u32>()
            + map_bytes(&self.numbers)
            + self.body_bytes
            + self.num_live * OVERHEAD
            + self.templates.num_bytes()
    }

    /// Takes in a payload; the batches must be those of one publisher, in order, none missing.
    ///
    /// # Errors
    /// If it is no batch of events; nothing was taken in then.
    pub fn apply(&mut self, payload: &[u8]) -> Result<(), DecodeError> {
        let batch = read_batch(payload)?;
        if batch.timestamp.is_finite() {
            self.latest_timestamp = self.latest_timestamp.max(batch.timestamp);
        }
        for event in batch.events {
            match event {
                Event::BlockStored(stored) => self.store(&stored),
                Event::BlockRemoved(removed) => self.remove(&removed),
                Event::AllBlocksCleared => self.clear(),
                Event::Unknown { .. } => {}
            }
        }
        Ok(())
    }

    /// Forgets all blocks.
    pub fn clear(&mut self) {
        let latest_timestamp = self.latest_timestamp;
        *self = Self { latest_timestamp, ..Self::new(self.removal_event) };
    }

    /// The latest time of a batch that was taken in, by the sender's clock; 0 before the first.
    pub fn latest_timestamp(&self) -> f64 {
        self.latest_timestamp
    }

    fn shelf(&mut self, group_idx: Option<u32>, medium: Option<&str>) -> u32 {
        let known = |shelf: &(Option<u32>, Option<Box<str>>)| {
            shelf.0 == group_idx && shelf.1.as_deref() == medium
        };
        let shelf = self.shelves.iter().position(known).unwrap_or_else(|| {
            self.shelves.push((group_idx, medium.map(Box::from)));
            self.shelves.len() - 1
        });
        u32::try_from(shelf).expect("there are fewer groups than blocks")
    }

    fn store(&mut self, stored: &BlockStored<'_>) {
        let num_hashes = stored.block_hashes.len();
        let shelf = self.shelf(stored.group_idx, stored.medium);
        // Which tokens belong to which hash cannot be told where vLLM announces a masked span
        // (case C15): such blocks are kept without tokens, and with the event's parent.
        let is_whole = stored.token_ids.len() == num_hashes * stored.block_size as usize;
        let keys = stored.extra_keys.filter(|keys| keys.len() == num_hashes);
        let mut tokens = Reader::new(stored.token_ids.0.elements);
        let mut extra = Reader::new(keys.map_or(&[][..], |keys| keys.0.elements));
        let low_bits = |hash: Option<ExternalBlockHash<'_>>| hash.map_or(0, |hash| hash.low_bits());
        // They differ where the block before the first one has no key, or is gone.
        let mut ancestor = low_bits(stored.parent_block_hash);
        let mut announced = stored.announced_parent_block_hash.or(stored.parent_block_hash);
        let mut body = Vec::new();
        for hash in stored.block_hashes.iter() {
            body.clear();
            let digest_width = append_digest(Some(hash), &mut body);
            let parent_width = append_digest(announced, &mut body);
            if is_whole {
                body.extend_from_slice(tokens.take_numbers(stored.block_size));
            }
            if keys.is_some() {
                body.extend_from_slice(extra.take(1));
            }
            let widths = Widths {
                digest: digest_width,
                parent_digest: parent_width,
                num_tokens: if is_whole { stored.block_size } else { 0 },
                has_extra_keys: keys.is_some(),
            };
            let template = self.templates.hold(stored, widths);
            let key = Key { hash: hash.low_bits(), shelf };
            self.insert(key, [low_bits(announced), ancestor], template, &body);
            if is_whole {
                (announced, ancestor) = (Some(hash), key.hash);
            }
        }
    }

    /// `parents`: as announced, and an ancestor in case that one is gone.
    fn insert(&mut self, key: Key, parents: [u64; 2], template: u32, body: &[u8]) {
        let number = match self.numbers.get(&key) {
            Some(number) => *number,
            None => self.add_node(key),
        };
        let at = number as usize;
        if self.nodes[at].copies == 0 {
            self.num_live += 1;
        } else {
            self.templates.release(self.nodes[at].template);
            self.body_bytes -= self.nodes[at].body.len();
        }
        let node = &mut self.nodes[at];
        node.copies = match self.removal_event {
            RemovalEvent::EveryCopy => node.copies.saturating_add(1),
            RemovalEvent::LastCopy => 1,
        };
        node.template = template;
        // The same hash mostly has the same content.
        if *node.body != *body {
            node.body = body.into();
        }
        self.body_bytes += body.len();
        if node.announced_parent != parents[0] || node.parent == NONE {
            node.announced_parent = parents[0];
            let before = self.unlink(number);
            let number_of = |hash| self.numbers.get(&Key { hash, shelf: key.shelf }).copied();
            // No block continues itself, whatever a payload says.
            let parent = parents.into_iter().find_map(number_of).filter(|parent| *parent != number);
            if let Some(parent) = parent {
                self.link(number, parent);
            }
            self.settle(before);
        }
    }

    fn add_node(&mut self, key: Key) -> u32 {
        let node = Node {
            key,
            copies: 0,
            announced_parent: 0,
            parent: NONE,
            children: 0,
            children_joined: 0,
            template: 0,
            body: Box::default(),
        };
        let number = if let Some(number) = self.vacant.pop() {
            self.nodes[number as usize] = node;
            number
        } else {
            self.nodes.push(node);
            u32::try_from(self.nodes.len() - 1).expect("there are fewer than 2^32 blocks")
        };
        self.numbers.insert(key, number);
        number
    }

    fn link(&mut self, child: u32, parent: u32) {
        self.nodes[child as usize].parent = parent;
        let parent = &mut self.nodes[parent as usize];
        parent.children += 1;
        parent.children_joined ^= child;
    }

    /// Takes a node from its parent, which is answered. A removed parent is not settled by this.
    fn unlink(&mut self, child: u32) -> u32 {
        let number = std::mem::replace(&mut self.nodes[child as usize].parent, NONE);
        if number != NONE {
            let parent = &mut self.nodes[number as usize];
            parent.children -= 1;
            parent.children_joined ^= child;
        }
        number
    }

    fn remove(&mut self, removed: &BlockRemoved<'_>) {
        let shelf = self.shelf(removed.group_idx, removed.medium);
        for hash in removed.block_hashes.iter() {
            let number = self.numbers.get(&Key { hash: hash.low_bits(), shelf }).copied();
            let Some(number) = number.filter(|number| self.nodes[*number as usize].copies > 0)
            else {
                continue;
            };
            let node = &mut self.nodes[number as usize];
            node.copies = match self.removal_event {
                RemovalEvent::EveryCopy => node.copies - 1,
                RemovalEvent::LastCopy => 0,
            };
            if node.copies == 0 {
                let body = std::mem::take(&mut node.body);
                let template = node.template;
                self.body_bytes -= body.len();
                self.num_live -= 1;
                self.templates.release(template);
                self.settle(number);
            }
        }
    }

    /// Lets go of a node that is no longer live, and of those above that stood for it only.
    fn settle(&mut self, mut number: u32) {
        while number != NONE {
            let node = &self.nodes[number as usize];
            if node.copies > 0 || node.children > 1 {
                return;
            }
            let (key, child) = (node.key, (node.children == 1).then_some(node.children_joined));
            let parent = self.unlink(number);
            if let Some(child) = child {
                self.unlink(child);
                if parent != NONE && parent != child {
                    self.link(child, parent);
                }
            }
            self.numbers.remove(&key);
            self.vacant.push(number);
            number = parent;
        }
    }

    // ------------------------------------------------------------------------------------- the dump

    /// The nearest live ancestor: the announced parent, or one further up.
    fn live_ancestor(&self, node: &Node) -> Option<u32> {
        let announced = Key { hash: node.announced_parent, shelf: node.key.shelf };
        let is_live = |number: &u32| self.nodes[*number as usize].copies > 0;
        if let Some(parent) = self.numbers.get(&announced).copied().filter(is_live) {
            return Some(parent);
        }
        let mut number = node.parent;
        // A payload could have made a ring; it has fewer nodes than there are.
        for _ in 0..self.nodes.len() {
            match self.nodes.get(number as usize) {
                Some(ancestor) if ancestor.copies == 0 => number = ancestor.parent,
                Some(_) => return Some(number),
                None => return None,
            }
        }
        None
    }

    /// Live nodes, ancestors first, each with the one that it continues.
    fn in_order(&self) -> Vec<(u32, Option<u32>)> {
        #[derive(Clone, Copy, PartialEq)]
        enum Place {
            Nowhere,
            Waiting,
            Written,
        }
        let mut places = vec![Place::Nowhere; self.nodes.len()];
        let mut ordered = Vec::with_capacity(self.num_live);
        let mut waiting = Vec::new();
        for start in 0..self.nodes.len() {
            if self.nodes[start].copies == 0 || places[start] != Place::Nowhere {
                continue;
            }
            places[start] = Place::Waiting;
            waiting.push(u32::try_from(start).expect("nodes have 32-bit numbers"));
            while let Some(&number) = waiting.last() {
                let ancestor = self.live_ancestor(&self.nodes[number as usize]);
                let place = ancestor.map(|ancestor| places[ancestor as usize]);
                if let (Some(ancestor), Some(Place::Nowhere)) = (ancestor, place) {
                    places[ancestor as usize] = Place::Waiting;
                    waiting.push(ancestor);
                    continue;
                }
                // An ancestor that waits for this one is none: there is a ring.
                let parent = ancestor.filter(|_| place == Some(Place::Written));
                ordered.push((number, parent));
                places[number as usize] = Place::Written;
                waiting.pop();
            }
        }
        ordered
    }

    /// Everything live as batches of stores, one block each, parent before child; with
    /// `RemovalEvent::EveryCopy` a block is stored as often as it has copies. None for an empty set.
    /// Who applies them to nothing holds what the set holds.
    pub fn dump(
        &self,
        timestamp: f64,
        data_parallel_rank: Option<u32>,
        format: WireFormat,
    ) -> Vec<Vec<u8>> {
        let mut stores = Vec::with_capacity(self.num_live);
        for (number, parent) in self.in_order() {
            let copies = self.nodes[number as usize].copies as usize;
            stores.extend(std::iter::repeat_n((number, parent), copies));
        }
        let batch = |stores: &[(u32, Option<u32>)]| {
            let mut out = Vec::new();
            begin_batch(&mut out, timestamp, stores.len());
            for (number, parent) in stores {
                let parent = parent.map(|parent| &self.nodes[parent as usize]);
                self.write(&self.nodes[*number as usize], parent, format, &mut out);
            }
            end_batch(&mut out, data_parallel_rank);
            out
        };
        stores.chunks(STORES_PER_BATCH).map(batch).collect()
    }

    /// A node's hash as it came, that of its announced parent, and the rest of its body.
    fn hashes<'a>(&self, node: &'a Node) -> [(ExternalBlockHash<'a>, &'a [u8]); 2] {
        let Widths { digest, parent_digest, .. } = self.templates.get(node.template).widths;
        let split = |body: &'a [u8], width: usize, low_bits: u64| {
            let (digest, rest) = body.split_at(width);
            let hash = match digest {
                [] => ExternalBlockHash::Integer(low_bits),
                digest => ExternalBlockHash::Bytes(digest),
            };
            (hash, rest)
        };
        let (hash, rest) = split(&node.body, digest, node.key.hash);
        [(hash, rest), split(rest, parent_digest, node.announced_parent)]
    }

    fn write(&self, node: &Node, parent: Option<&Node>, format: WireFormat, out: &mut Vec<u8>) {
        let template = self.templates.get(node.template);
        let Widths { num_tokens, has_extra_keys, .. } = template.widths;
        let [(hash, _), (announced_parent, rest)] = self.hashes(node);
        let mut rest = Reader::new(rest);
        let tokens = rest.take_numbers(num_tokens);
        let extra_keys = has_extra_keys.then(|| rest.take(1));
        let (group_idx, medium) = &self.shelves[node.key.shelf as usize];
        let is_announced = node.announced_parent == parent.map_or(0, |parent| parent.key.hash);
        let fields = BlockStored {
            parent_block_hash: parent.map(|parent| self.hashes(parent)[0].0),
            announced_parent_block_hash: (!is_announced).then_some(announced_parent),
            group_idx: *group_idx,
            medium: medium.as_deref(),
            ..template.fields()
        };
        write_stored_parts(
            out,
            format,
            &fields,
            |out| {
                write_array_header(out, 1);
                write_hash(out, &hash);
            },
            |out| {
                write_array_header(out, num_tokens as usize);
                out.extend_from_slice(tokens);
            },
            extra_keys.map(|keys| {
                move |out: &mut Vec<u8>| {
                    write_array_header(out, 1);
                    out.extend_from_slice(keys);
                }
            }),
        );
    }
}

/// Appends a hash that is a digest; how many bytes that took.
fn append_digest(hash: Option<ExternalBlockHash<'_>>, body: &mut Vec<u8>) -> usize {
    let Some(ExternalBlockHash::Bytes(digest)) = hash else {
        return 0;
    };
    body.extend_from_slice(digest);
    digest.len()
}
