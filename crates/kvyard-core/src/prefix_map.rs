//! The prefix cache: from (block hash, group) to the blocks that carry it.
//!
//! Identical content computed twice in one step leaves two copies, and both stay, because a row may
//! not be re-pointed once a worker knows it. A lookup answers with the earliest inserted surviving
//! copy; the copies of a key form a doubly linked chain in that order, whose first one is in the
//! table. Lookup, insertion and removal are O(1).
//!
//! A block has at most one *primary* key; further keys are *aliases* (shorter boundaries inside the
//! block). An entry is the primary key of a block (its number is the block's) or an alias (numbers
//! from `num_blocks` on). Entry 0 would be the null block, which is never keyed: 0 means "none".
//!
//! Invariants, cited by `validate()`:
//! * I5: every entry of a chain carries the chain's key and belongs to the block it names.
//! * I6: every keyed entry is in the chain of its key; aliases only beside a primary.
//! * I7: the null block has no key.

use hashbrown::{HashMap, HashTable};

use crate::block_hash::BlockHash;
use crate::error::Result;
use crate::hashing::Fingerprint;
use crate::id::{BlockId, GroupId, NULL_BLOCK};
use crate::memory::{Grow, grow_table};

/// A key of the map and how many tokens of the prefix it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixKey {
    /// The fingerprint of the prefix.
    pub hash: BlockHash,
    /// The group whose keys and values the block holds.
    pub group: GroupId,
    /// Tokens from the start of the request to the end of what the key covers.
    pub covered_tokens: u32,
}

/// What a lookup asks for.
#[derive(Clone, Copy, Debug)]
pub struct SoughtBlock<'a> {
    /// The fingerprint of the prefix that the engine uses.
    pub hash: &'a BlockHash,
    /// The second one that a copy must have; none: any copy will do.
    pub fingerprint: Option<Fingerprint>,
}

impl<'a> From<&'a BlockHash> for SoughtBlock<'a> {
    fn from(hash: &'a BlockHash) -> Self {
        Self { hash, fingerprint: None }
    }
}

/// See the module.
#[derive(Debug)]
pub struct PrefixMap {
    /// The first copy of each key.
    first_copy: HashTable<u32>,
    num_blocks: u32,
    // One element an entry. Arrays of integers, so that a fresh map costs no page until it is used.
    hash: Vec<Words>,
    /// Group + 1; 0: the entry has no key.
    group_tag: Vec<u16>,
    covered_tokens: Vec<u32>,
    /// Second fingerprints; empty where hits are not verified.
    fingerprint: Vec<Fingerprint>,
    /// The next younger copy, 0 at the end of the chain.
    younger: Vec<u32>,
    /// The next older copy; at the first copy the *last* one, 0 if it is alone.
    older: Vec<u32>,
    /// The block of each alias entry.
    alias_block: Vec<BlockId>,
    /// The next alias entry of the same block, 0 behind the last.
    next_alias: Vec<u32>,
    vacant_aliases: Vec<u32>,
    /// The first alias entry of each block that has any.
    first_alias: HashMap<BlockId, u32>,
}

/// The largest group id that can be keyed.
pub const MAX_GROUP: u32 = u16::MAX as u32 - 1;

/// A block hash as the map keeps it. Not as bytes: the standard library asks the system for zeroed
/// pages only for arrays of up to 16 elements, and writes longer ones itself.
type Words = [u64; 4];

#[inline]
fn words(hash: &BlockHash) -> Words {
    let (chunks, _) = hash.0.as_chunks();
    [chunks[0], chunks[1], chunks[2], chunks[3]].map(u64::from_ne_bytes)
}

#[inline]
fn block_hash(words: &Words) -> BlockHash {
    let mut hash = BlockHash([0; 32]);
    let (chunks, _) = hash.0.as_chunks_mut();
    for (chunk, word) in chunks.iter_mut().zip(words) {
        *chunk = word.to_ne_bytes();
    }
    hash
}

#[inline]
fn table_hash(hash: &Words, group_tag: u16) -> u64 {
    // Digests are uniform, but hashes may come from elsewhere: fold all of it.
    let folded = hash[0]
        ^ hash[1].rotate_left(16)
        ^ hash[2].rotate_left(32)
        ^ hash[3].rotate_left(48)
        ^ u64::from(group_tag).rotate_left(24);
    let product = u128::from(folded) * 0x9e37_79b9_7f4a_7c15;
    #[expect(clippy::cast_possible_truncation, reason = "folding the product is the point")]
    let mixed = (product as u64) ^ ((product >> 64) as u64);
    mixed
}

impl PrefixMap {
    /// Room for one key a block, and with `verify_tokens` for its second fingerprint.
    pub fn new(num_blocks: u32, verify_tokens: bool) -> Self {
        let entries = num_blocks as usize;
        Self {
            first_copy: HashTable::new(),
            num_blocks,
            hash: vec![[0; 4]; entries],
            group_tag: vec![0; entries],
            covered_tokens: vec![0; entries],
            fingerprint: vec![Fingerprint(0); if verify_tokens { entries } else { 0 }],
            younger: vec![0; entries],
            older: vec![0; entries],
            alias_block: Vec::new(),
            next_alias: Vec::new(),
            vacant_aliases: Vec::new(),
            first_alias: HashMap::new(),
        }
    }

    /// Makes room for `keys` more keys, so that insertion cannot fail.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn reserve(&mut self, keys: usize) -> Result<()> {
        let (hash, group_tag) = (&self.hash, &self.group_tag);
        grow_table(&mut self.first_copy, keys, |entry| {
            table_hash(&hash[*entry as usize], group_tag[*entry as usize])
        })
    }

    /// Makes room for one more alias, so that insertion and removal cannot fail.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn reserve_alias(&mut self) -> Result<()> {
        self.hash.make_room(1)?;
        self.group_tag.make_room(1)?;
        self.covered_tokens.make_room(1)?;
        if !self.fingerprint.is_empty() {
            self.fingerprint.make_room(1)?;
        }
        self.younger.make_room(1)?;
        self.older.make_room(1)?;
        self.alias_block.make_room(1)?;
        self.next_alias.make_room(1)?;
        self.vacant_aliases.make_room(self.alias_block.len() + 1 - self.vacant_aliases.len())?;
        self.first_alias.make_room(1)
    }

    /// The earliest inserted copy.
    #[inline]
    pub fn get(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        self.find(&words(hash), tag(group)).map(|entry| self.block_of(entry))
    }

    /// The entry that has a key, if any has it; 0 if surely none has. Hashes are not compared.
    ///
    /// Whoever looks for many keys guesses a few at a time: no guess waits for another, so that the
    /// processor fetches what lies in memory for all of them at once.
    #[inline]
    pub(crate) fn guess(&self, hash: &BlockHash, group: GroupId) -> u32 {
        let entry = self.first_copy.find(table_hash(&words(hash), tag(group)), |_| true);
        entry.copied().unwrap_or(0)
    }

    /// The earliest inserted copy that is what is sought: others with the same hash are passed over.
    /// `guess` comes from [`Self::guess`], if anybody made one.
    #[inline]
    pub(crate) fn find_block(
        &self,
        sought: SoughtBlock<'_>,
        group: GroupId,
        guess: Option<u32>,
    ) -> Option<BlockId> {
        let (hash, group_tag) = (words(sought.hash), tag(group));
        let mut entry = match guess {
            Some(0) => return None,
            Some(guess) if self.has_key(guess, &hash, group_tag) => guess,
            _ => self.find(&hash, group_tag)?,
        };
        if let Some(fingerprint) = sought.fingerprint {
            while self.fingerprint[entry as usize] != fingerprint {
                entry = Some(self.younger[entry as usize]).filter(|next| *next != 0)?;
            }
        }
        Some(self.block_of(entry))
    }

    /// Whether the block carries this key, as its primary or as an alias.
    pub fn contains(&self, hash: &BlockHash, group: GroupId, block: BlockId) -> bool {
        self.copies(hash, group).any(|copy| copy == block)
    }

    /// Whether the block carries what is sought, as its primary key or as an alias.
    pub fn carries(&self, block: BlockId, sought: SoughtBlock<'_>, group: GroupId) -> bool {
        let (hash, group_tag) = (words(sought.hash), tag(group));
        let is_sought = |entry: u32| {
            let fingerprint = || self.fingerprint[entry as usize];
            self.has_key(entry, &hash, group_tag)
                && sought.fingerprint.is_none_or(|wanted| fingerprint() == wanted)
        };
        is_sought(block.0) || self.alias_entries(block).any(is_sought)
    }

    /// The blocks that carry a key, earliest first.
    pub fn copies(&self, hash: &BlockHash, group: GroupId) -> impl Iterator<Item = BlockId> + '_ {
        std::iter::successors(self.find(&words(hash), tag(group)), |entry| {
            Some(self.younger[*entry as usize]).filter(|next| *next != 0)
        })
        .map(|entry| self.block_of(entry))
    }

    /// The primary key of a block.
    #[inline]
    pub fn primary(&self, block: BlockId) -> Option<PrefixKey> {
        self.key_of(block.0)
    }

    /// Whether the block has a key.
    #[inline]
    pub fn is_cached(&self, block: BlockId) -> bool {
        self.group_tag[block.index()] != 0
    }

    /// How many keys a block has.
    pub fn num_keys_of(&self, block: BlockId) -> usize {
        usize::from(self.is_cached(block)) + self.alias_entries(block).count()
    }

    /// How many different keys the map holds.
    pub fn num_keys(&self) -> usize {
        self.first_copy.len()
    }

    /// How many alias entries there are in all.
    pub fn num_aliases(&self) -> usize {
        self.alias_block.len() - self.vacant_aliases.len()
    }

    /// The aliases of a block, oldest first.
    pub fn aliases(&self, block: BlockId) -> impl Iterator<Item = PrefixKey> + '_ {
        self.alias_entries(block).filter_map(|entry| self.key_of(entry))
    }

    fn alias_entries(&self, block: BlockId) -> impl Iterator<Item = u32> + '_ {
        let first = self.first_alias.get(&block).copied();
        std::iter::successors(first, |entry| {
            Some(self.next_alias[self.alias_index(*entry)]).filter(|next| *next != 0)
        })
    }

    fn alias_index(&self, entry: u32) -> usize {
        (entry - self.num_blocks) as usize
    }

    /// Gives a block a key: its primary if it has none, else an alias. A key that the block carries
    /// already is left alone.
    pub fn insert(&mut self, block: BlockId, key: PrefixKey, fingerprint: Option<Fingerprint>) {
        debug_assert!(block != NULL_BLOCK, "I7: the null block cannot be keyed");
        if !self.is_cached(block) {
            self.write(block.0, key, fingerprint);
            self.link(block.0);
        } else if !self.contains(&key.hash, key.group, block) {
            let entry = self.new_alias(block);
            self.write(entry, key, fingerprint);
            self.link(entry);
        }
    }

    /// Takes all keys from a block, the primary first. `removed` is told each key and whether no
    /// other block carries it any more.
    pub fn remove_all(&mut self, block: BlockId, mut removed: impl FnMut(PrefixKey, bool)) {
        let Some(key) = self.primary(block) else {
            return;
        };
        removed(key, self.unlink(block.0));
        if self.first_alias.is_empty() {
            return;
        }
        let mut next = self.first_alias.remove(&block).unwrap_or(0);
        while next != 0 {
            let entry = next;
            next = self.next_alias[self.alias_index(entry)];
            if let Some(key) = self.key_of(entry) {
                removed(key, self.unlink(entry));
            }
            self.vacant_aliases.push(entry);
        }
    }

    /// Forgets every key.
    pub fn clear(&mut self) {
        self.first_copy.clear();
        self.group_tag.fill(0);
        self.younger.fill(0);
        self.older.fill(0);
        self.covered_tokens.fill(0);
        self.first_alias.clear();
        let entries = self.num_blocks as usize;
        self.hash.truncate(entries);
        self.group_tag.truncate(entries);
        self.covered_tokens.truncate(entries);
        self.fingerprint.truncate(entries);
        self.younger.truncate(entries);
        self.older.truncate(entries);
        self.alias_block.clear();
        self.next_alias.clear();
        self.vacant_aliases.clear();
    }

    #[inline]
    fn find(&self, hash: &Words, group_tag: u16) -> Option<u32> {
        self.first_copy
            .find(table_hash(hash, group_tag), |entry| self.has_key(*entry, hash, group_tag))
            .copied()
    }

    #[inline]
    fn has_key(&self, entry: u32, hash: &Words, group_tag: u16) -> bool {
        let entry = entry as usize;
        self.hash[entry] == *hash && self.group_tag[entry] == group_tag
    }

    #[inline]
    fn block_of(&self, entry: u32) -> BlockId {
        if entry < self.num_blocks {
            BlockId(entry)
        } else {
            self.alias_block[self.alias_index(entry)]
        }
    }

    #[inline]
    fn key_of(&self, entry: u32) -> Option<PrefixKey> {
        let at = entry as usize;
        let group = self.group_tag[at].checked_sub(1)?;
        Some(PrefixKey {
            hash: block_hash(&self.hash[at]),
            group: GroupId(u32::from(group)),
            covered_tokens: self.covered_tokens[at],
        })
    }

    fn new_alias(&mut self, block: BlockId) -> u32 {
        let last = self.alias_entries(block).last();
        let entry = if let Some(entry) = self.vacant_aliases.pop() {
            let at = self.alias_index(entry);
            self.alias_block[at] = block;
            self.next_alias[at] = 0;
            entry
        } else {
            let entry = u32::try_from(self.hash.len()).expect("aliases are bounded by u32");
            self.hash.push([0; 4]);
            self.group_tag.push(0);
            self.covered_tokens.push(0);
            if !self.fingerprint.is_empty() {
                self.fingerprint.push(Fingerprint(0));
            }
            self.younger.push(0);
            self.older.push(0);
            self.alias_block.push(block);
            self.next_alias.push(0);
            entry
        };
        match last {
            Some(last) => {
                let at = self.alias_index(last);
                self.next_alias[at] = entry;
            }
            None => {
                self.first_alias.insert(block, entry);
            }
        }
        entry
    }

    #[inline]
    fn write(&mut self, entry: u32, key: PrefixKey, fingerprint: Option<Fingerprint>) {
        let at = entry as usize;
        self.hash[at] = words(&key.hash);
        self.group_tag[at] = tag(key.group);
        self.covered_tokens[at] = key.covered_tokens;
        if let Some(place) = self.fingerprint.get_mut(at) {
            *place = fingerprint.unwrap_or_default();
        }
    }

    /// Puts an entry at the end of the chain of its key.
    fn link(&mut self, entry: u32) {
        let (hash, group_tag) = (self.hash[entry as usize], self.group_tag[entry as usize]);
        let Some(first) = self.find(&hash, group_tag) else {
            let (hashes, tags) = (&self.hash, &self.group_tag);
            self.first_copy.insert_unique(table_hash(&hash, group_tag), entry, |other| {
                table_hash(&hashes[*other as usize], tags[*other as usize])
            });
            return;
        };
        let last = match self.older[first as usize] {
            0 => first,
            last => last,
        };
        self.younger[last as usize] = entry;
        self.older[entry as usize] = last;
        self.older[first as usize] = entry;
    }

    /// Takes an entry out of its chain; whether it was the last copy of its key.
    fn unlink(&mut self, entry: u32) -> bool {
        let at = entry as usize;
        let (hash, group_tag) = (self.hash[at], self.group_tag[at]);
        let (younger, older) = (self.younger[at], self.older[at]);
        let slot = table_hash(&hash, group_tag);
        let was_last_copy = younger == 0 && older == 0;
        if was_last_copy {
            let found = self.first_copy.find_entry(slot, |other| *other == entry);
            found.expect("I6: a keyed entry is in the map").remove();
        } else {
            let first = self.find(&hash, group_tag).expect("I6: a keyed entry is in the map");
            if first == entry {
                let first = self.first_copy.find_mut(slot, |other| *other == entry);
                *first.expect("I6: a keyed entry is in the map") = younger;
                self.older[younger as usize] = if older == younger { 0 } else { older };
            } else {
                self.younger[older as usize] = younger;
                match younger {
                    0 => self.older[first as usize] = if older == first { 0 } else { older },
                    _ => self.older[younger as usize] = older,
                }
            }
        }
        self.younger[at] = 0;
        self.older[at] = 0;
        self.group_tag[at] = 0;
        self.covered_tokens[at] = 0;
        was_last_copy
    }

    /// Breaks I6, for tests of who finds it: the table forgets the block's key.
    #[cfg(test)]
    pub(crate) fn corrupt(&mut self, block: BlockId) {
        let hash = table_hash(&self.hash[block.index()], self.group_tag[block.index()]);
        if let Ok(entry) = self.first_copy.find_entry(hash, |entry| *entry == block.0) {
            entry.remove();
        }
    }

    /// Checks I5 to I7 where one block is concerned: a lookup of each of its keys finds it. Returns how
    /// many entries that touched.
    ///
    /// # Panics
    /// If one does not hold.
    pub(crate) fn audit(&self, block: BlockId) -> usize {
        assert!(!self.is_cached(NULL_BLOCK), "I7: the null block has a key");
        let mut touched = 1;
        for key in self.primary(block).into_iter().chain(self.aliases(block)) {
            let before =
                self.copies(&key.hash, key.group).take_while(|copy| *copy != block).count();
            touched += before + 1;
            assert!(
                self.contains(&key.hash, key.group, block),
                "I6: a key of block {block} is lost"
            );
        }
        touched
    }

    /// Checks I5, I6 and I7.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn validate(&self) {
        assert!(!self.is_cached(NULL_BLOCK), "I7: the null block has a key");
        let mut chained = 0;
        for first in &self.first_copy {
            let key = self.key_of(*first).expect("I5: an entry without a key is in the map");
            let (mut entry, mut last) = (*first, 0);
            while entry != 0 {
                let found = self.key_of(entry).expect("I5: a chained entry has no key");
                assert!(
                    (found.hash, found.group) == (key.hash, key.group),
                    "I5: entry {entry} is in the chain of another key"
                );
                assert!(entry == *first || self.older[entry as usize] == last, "I5: chain order");
                chained += 1;
                last = entry;
                entry = self.younger[entry as usize];
            }
            let expected = if last == *first { 0 } else { last };
            assert_eq!(self.older[*first as usize], expected, "I5: the end of a chain");
        }
        let keyed = self.group_tag.iter().filter(|tag| **tag != 0).count();
        assert_eq!(chained, keyed, "I6: keyed entries and chained entries differ");
        let mut aliases = 0;
        for block in self.first_alias.keys() {
            assert!(self.is_cached(*block), "I6: block {block} has aliases without a primary");
            for entry in self.alias_entries(*block) {
                aliases += 1;
                assert_eq!(self.block_of(entry), *block, "I5: alias of another block");
                assert!(self.key_of(entry).is_some(), "I6: alias without a key");
            }
        }
        assert_eq!(aliases, self.num_aliases(), "I6: alias count");
    }
}

#[inline]
fn tag(group: GroupId) -> u16 {
    u16::try_from(group.0 + 1).expect("group ids are checked against MAX_GROUP at the border")
}
