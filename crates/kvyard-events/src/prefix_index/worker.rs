//! What one worker holds, group by group.

use kvyard_core::semantics::RemovalEvent;

use super::fingerprint::{Coefficients, Fingerprint, Span, root};
use super::waiting::{WaitingBlock, WaitingBlocks};
use crate::event::{BlockRemoved, BlockStored, ExtraKeyValue, ExtraKeys};
use crate::uniform::{UniformMap, map_bytes};

/// Which blocks a group needs so that a prefix can be continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    /// All of them.
    Prefix,
    /// Those that hold one of the last tokens.
    Last(u32),
    /// None: it depends on no prefix.
    Nothing,
}

impl Reach {
    fn new(kind: Option<&str>, sliding_window: Option<u32>) -> Self {
        match (kind, sliding_window) {
            // A token sees itself and the rest of the window before it.
            (Some("sliding_window" | "sliding_window_mla"), Some(window)) => {
                Self::Last(window.saturating_sub(1))
            }
            // A state, or a chunk whose size events do not tell: the last block is what is known.
            (Some("mamba" | "chunked_local_attention"), _) => Self::Last(1),
            (Some("cross_attention" | "encoder_only_attention"), _) => Self::Nothing,
            _ => Self::Prefix,
        }
    }
}

/// A block by its engine's hash.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Of the tokens up to its end. While `position` is 0, its number among those that wait, plus 1; 0:
    /// it is not known how it continues its parent.
    fingerprint: Fingerprint,
    /// Tokens up to its end; 0: what comes before it is not known yet.
    position: u32,
    copies: u32,
}

impl Entry {
    /// While its place is not known: its number among those that wait.
    fn waiting(&self) -> Option<u32> {
        let number = if self.position == 0 { self.fingerprint } else { 0 };
        let number = number.checked_sub(1)?;
        Some(u32::try_from(number).expect("numbers of those that wait have 32 bits"))
    }
}

#[derive(Debug)]
struct Group {
    /// As events name it.
    index: Option<u32>,
    reach: Reach,
    /// Tokens per block; 0 before the first store.
    block_size: u32,
    is_size_told: bool,
    /// While it is not: how many tokens were stored in blocks of each size.
    sizes: Vec<(u32, u64)>,
    entries: UniformMap<u64, Entry>,
    /// How many entries have this fingerprint.
    held: UniformMap<Fingerprint, u32>,
}

#[derive(Debug)]
pub(super) struct Worker {
    removal_event: RemovalEvent,
    groups: Vec<Group>,
    waiting: WaitingBlocks,
    /// Entries whose place is not known; as many wait, or fewer.
    num_unplaced: usize,
}

/// Where a chain of blocks is.
#[derive(Clone, Copy)]
struct Place {
    fingerprint: Fingerprint,
    position: u32,
}

impl Place {
    fn after(self, span: Span, length: u32) -> Option<Self> {
        let position = self.position.checked_add(length)?;
        Some(Self { fingerprint: span.append_to(self.fingerprint), position })
    }

    /// None at the start of a prompt, which is no block's end.
    fn before(self, span: Span, length: u32) -> Option<Self> {
        let position = self.position.checked_sub(length).filter(|position| *position > 0)?;
        Some(Self { fingerprint: span.take_from(self.fingerprint, length), position })
    }
}

impl Group {
    fn new(index: Option<u32>) -> Self {
        Self {
            index,
            reach: Reach::Prefix,
            block_size: 0,
            is_size_told: false,
            sizes: Vec::new(),
            entries: UniformMap::default(),
            held: UniformMap::default(),
        }
    }

    /// Boundaries inside a block are stored too (case C17). Who sends them says so, or else the size
    /// in which most tokens came is the group's: that of boundaries is smaller.
    fn learn_block_size(&mut self, stored: &BlockStored<'_>) {
        if let Some(size) = stored.group_block_size {
            (self.block_size, self.is_size_told) = (size, true);
        }
        if self.is_size_told {
            return;
        }
        let size = stored.block_size;
        let at = self.sizes.iter().position(|(known, _)| *known == size).unwrap_or_else(|| {
            self.sizes.push((size, 0));
            self.sizes.len() - 1
        });
        self.sizes[at].1 += stored.block_hashes.len() as u64 * u64::from(size);
        let most = self.sizes.iter().max_by_key(|(_, tokens)| *tokens);
        self.block_size = most.map_or(0, |(size, _)| *size);
    }

    fn place_of(&self, hash: u64) -> Option<Place> {
        let entry = self.entries.get(&hash).filter(|entry| entry.position > 0)?;
        Some(Place { fingerprint: entry.fingerprint, position: entry.position })
    }

    fn holds(&self, position: u32, fingerprints: &[Fingerprint], step: u32) -> bool {
        let at = (position / step) as usize - 1;
        fingerprints.get(at).is_some_and(|fingerprint| self.held.contains_key(fingerprint))
    }

    /// The end of the last block that a prefix of this length lacks.
    fn missing(&self, length: u32, last: u32, found: &[Fingerprint], step: u32) -> Option<u32> {
        let first = length.saturating_sub(last);
        let mut end = length;
        while end > first {
            if !self.holds(end, found, step) {
                return Some(end);
            }
            end -= self.block_size;
        }
        None
    }
}

impl Worker {
    pub(super) fn new(removal_event: RemovalEvent) -> Self {
        Self {
            removal_event,
            groups: Vec::new(),
            waiting: WaitingBlocks::default(),
            num_unplaced: 0,
        }
    }

    /// Forgets the groups, too: perhaps an engine started again, with others.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.removal_event);
    }

    pub(super) fn num_blocks(&self) -> usize {
        self.groups.iter().map(|group| group.entries.len()).sum()
    }

    /// Blocks without a place, and those of them that wait for one.
    #[cfg(test)]
    pub(super) fn num_unplaced(&self) -> [usize; 2] {
        [self.num_unplaced, self.waiting.len()]
    }

    pub(super) fn num_bytes(&self) -> usize {
        let group = |group: &Group| map_bytes(&group.entries) + map_bytes(&group.held);
        self.waiting.num_bytes() + self.groups.iter().map(group).sum::<usize>()
    }

    fn group(&mut self, group_idx: Option<u32>) -> usize {
        let known = self.groups.iter().position(|group| group.index == group_idx);
        known.unwrap_or_else(|| {
            self.groups.push(Group::new(group_idx));
            self.groups.len() - 1
        })
    }

    // -------------------------------------------------------------------------------- the stream

    pub(super) fn store(&mut self, stored: &BlockStored<'_>) {
        let group = self.group(stored.group_idx);
        let num_hashes = stored.block_hashes.len();
        let reach = Reach::new(stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window);
        self.groups[group].reach = reach;
        if stored.block_size == 0 {
            return;
        }
        self.groups[group].learn_block_size(stored);
        if stored.token_ids.len() == num_hashes * stored.block_size as usize {
            self.store_blocks(group, stored);
        } else {
            // A masked span of vLLM's (case C15): which tokens are whose is not told. The same hash
            // in another group is the same prefix.
            for hash in stored.block_hashes.iter() {
                let place = self.place_in_any_group(hash.low_bits());
                self.insert(group, hash.low_bits(), place);
            }
        }
    }

    fn store_blocks(&mut self, group: usize, stored: &BlockStored<'_>) {
        let size = stored.block_size;
        let entries = stored.extra_keys.filter(|keys| keys.len() == stored.block_hashes.len());
        let mut extra_keys = entries.iter().flat_map(ExtraKeys::iter);
        let mut tokens = stored.token_ids.iter();
        let mut coefficients = Coefficients::default();
        let parent = stored.announced_parent_block_hash.or(stored.parent_block_hash);
        let mut parent = parent.map(|hash| hash.low_bits());
        let mut place = match parent {
            Some(parent) => {
                self.groups[group].place_of(parent).or_else(|| self.place_in_any_group(parent))
            }
            None => Some(Place { fingerprint: root_of(stored), position: 0 }),
        };
        for hash in stored.block_hashes.iter().map(|hash| hash.low_bits()) {
            coefficients.clear();
            coefficients.extend(tokens.by_ref().take(size as usize));
            if let Some(ExtraKeyValue::Tuple(members)) = extra_keys.next() {
                add_keys(&mut coefficients, &members);
            }
            let span = coefficients.span();
            let before = place;
            place = place
                .and_then(|place| place.after(span, size))
                .or_else(|| self.place_in_any_group(hash));
            self.insert(group, hash, place);
            if let (None, Some(parent)) = (before, parent) {
                match place.and_then(|place| place.before(span, size)) {
                    Some(place) => self.settle(parent, place),
                    None => self.wait(WaitingBlock { parent, hash, group, span, length: size }),
                }
            }
            parent = Some(hash);
        }
    }

    fn place_in_any_group(&self, hash: u64) -> Option<Place> {
        self.groups.iter().find_map(|group| group.place_of(hash))
    }

    fn insert(&mut self, group: usize, hash: u64, place: Option<Place>) {
        let removal_event = self.removal_event;
        let unplaced = &mut self.num_unplaced;
        let entry = self.groups[group].entries.entry(hash).or_insert_with(|| {
            *unplaced += 1;
            Entry { fingerprint: 0, position: 0, copies: 0 }
        });
        entry.copies = match removal_event {
            RemovalEvent::EveryCopy => entry.copies.saturating_add(1),
            RemovalEvent::LastCopy => 1,
        };
        if let Some(place) = place.filter(|_| entry.position == 0) {
            if *unplaced == 1 && entry.waiting().is_none() {
                self.place(group, hash, place);
            } else {
                self.settle(hash, place);
            }
        }
    }

    /// Lets a block without a place wait for its parent's, unless it does already.
    fn wait(&mut self, block: WaitingBlock) {
        let entry = self.groups[block.group].entries.get_mut(&block.hash);
        if let Some(entry) = entry.filter(|entry| entry.position == 0 && entry.fingerprint == 0) {
            entry.fingerprint = u64::from(self.waiting.add(block)) + 1;
        }
    }

    /// Gives an entry its place, if it has none; what it waited for.
    fn place(&mut self, group: usize, hash: u64, place: Place) -> Option<WaitingBlock> {
        let Group { entries, held, .. } = &mut self.groups[group];
        let entry = entries.get_mut(&hash).filter(|entry| entry.position == 0)?;
        let waiting = entry.waiting();
        (entry.fingerprint, entry.position) = (place.fingerprint, place.position);
        *held.entry(place.fingerprint).or_default() += 1;
        self.num_unplaced -= 1;
        waiting.map(|number| self.waiting.remove(number))
    }

    /// The place of a hash has become known: that of its entries in all groups, of the parents that
    /// these wait for, and of those that wait for it, and so on.
    fn settle(&mut self, hash: u64, place: Place) {
        let mut found = vec![(hash, place)];
        while let Some((hash, place)) = found.pop() {
            for group in 0..self.groups.len() {
                let waited = self.place(group, hash, place);
                found.extend(waited.and_then(|block| {
                    Some((block.parent, place.before(block.span, block.length)?))
                }));
            }
            while let Some(block) = self.waiting.remove_child(hash) {
                if let Some(entry) = self.groups[block.group].entries.get_mut(&block.hash) {
                    entry.fingerprint = 0;
                }
                found
                    .extend(place.after(block.span, block.length).map(|place| (block.hash, place)));
            }
        }
    }

    pub(super) fn remove(&mut self, removed: &BlockRemoved<'_>) {
        let group = self.group(removed.group_idx);
        let Group { entries, held, .. } = &mut self.groups[group];
        for hash in removed.block_hashes.iter().map(|hash| hash.low_bits()) {
            let Some(entry) = entries.get_mut(&hash) else {
                continue;
            };
            entry.copies = match self.removal_event {
                RemovalEvent::EveryCopy => entry.copies - 1,
                RemovalEvent::LastCopy => 0,
            };
            if entry.copies > 0 {
                continue;
            }
            if entry.position == 0 {
                self.num_unplaced -= 1;
                if let Some(number) = entry.waiting() {
                    self.waiting.remove(number);
                }
            } else if let Some(count) = held.get_mut(&entry.fingerprint) {
                *count -= 1;
                if *count == 0 {
                    held.remove(&entry.fingerprint);
                }
            }
            entries.remove(&hash);
        }
    }

    // --------------------------------------------------------------------------------- the question

    /// The block sizes of its groups.
    pub(super) fn block_sizes(&self) -> impl Iterator<Item = u32> {
        self.groups.iter().map(|group| group.block_size).filter(|size| *size > 0)
    }

    /// The longest prefix on which all groups agree. `found` are the prompt's fingerprints, one each
    /// `step` tokens.
    pub(super) fn matched_tokens(&self, found: &[Fingerprint], step: u32) -> u32 {
        // A group of which only removals came says nothing.
        let counts = |group: &&Group| group.reach != Reach::Nothing && group.block_size > 0;
        let groups = || self.groups.iter().filter(counts);
        // Groups agree at common ends of blocks only.
        let aligned = groups().try_fold(1_u32, |aligned, group| lcm(aligned, group.block_size));
        let Some(aligned) = aligned.filter(|_| groups().next().is_some()) else {
            return 0;
        };
        let num_tokens = u32::try_from(found.len()).unwrap_or(u32::MAX).saturating_mul(step);
        let mut length = num_tokens / aligned * aligned;
        for group in groups().filter(|group| group.reach == Reach::Prefix) {
            let mut held = 0;
            while held < length {
                let next = held.saturating_add(group.block_size);
                if !group.holds(next, found, step) {
                    break;
                }
                held = next;
            }
            length = held.min(length) / aligned * aligned;
        }
        // A block that is missing rules out all lengths whose window holds it.
        while length > 0 {
            let missing = groups().find_map(|group| match group.reach {
                Reach::Last(last) => group
                    .missing(length, last, found, step)
                    .map(|end| end.saturating_sub(group.block_size)),
                Reach::Prefix | Reach::Nothing => None,
            });
            match missing {
                Some(before) => length = before / aligned * aligned,
                None => return length,
            }
        }
        0
    }
}

/// None where it does not fit: no prompt is that long.
fn lcm(a: u32, b: u32) -> Option<u32> {
    (a / super::gcd(a, b)).checked_mul(b)
}

fn root_of(stored: &BlockStored<'_>) -> Fingerprint {
    let number = stored.lora_id.map(|id| id.to_string());
    let lora_name = stored.lora_name.or(number.as_deref());
    if stored.cache_salt.is_some() {
        return root(lora_name, stored.cache_salt);
    }
    let first = stored.extra_keys.and_then(|keys| keys.iter().next());
    let Some(ExtraKeyValue::Tuple(members)) = &first else {
        return root(lora_name, None);
    };
    // vLLM: the adapter's name, media, the salt. Bare, or tagged with what they are.
    let mut names = 0;
    let salt = members.iter().find_map(|member| match member {
        ExtraKeyValue::Text(name) if names == 0 && Some(&**name) == stored.lora_name => {
            names += 1;
            None
        }
        ExtraKeyValue::Text(salt) => Some(&**salt),
        ExtraKeyValue::Tuple(parts) => match &parts[..] {
            [ExtraKeyValue::Text(tag), ExtraKeyValue::Text(salt)] if tag == "cache_salt" => {
                Some(&**salt)
            }
            _ => None,
        },
        _ => None,
    });
    root(lora_name, salt)
}

/// What belongs to the tokens of a block. Media are named in each block that they overlap; the one
/// where they begin is enough.
fn add_keys(coefficients: &mut Coefficients, members: &[ExtraKeyValue<'_>]) {
    use ExtraKeyValue::{Bytes, Text, Tuple, Unsigned};
    for member in members {
        match member {
            Bytes(key) => coefficients.add_opaque(key),
            Tuple(parts) => match &parts[..] {
                [Text(identifier), Unsigned(offset)] | [_, Text(identifier), Unsigned(offset)] => {
                    let position = usize::try_from(*offset).unwrap_or(usize::MAX);
                    coefficients.add_media(position, identifier);
                }
                [Text(tag), Bytes(digest), ..] if tag == "prompt_embeds" => {
                    coefficients.add_opaque(digest);
                }
                _ => {}
            },
            _ => {}
        }
    }
}
