//! Random streams of several workers against the definition of what a worker holds.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use proptest::prelude::*;

use super::*;

const ROOTS: [Root; 4] =
    [(None, None), (Some("sql"), None), (None, Some("sql")), (Some("sql"), Some("salt"))];

const SHAPES: [&[GroupShape]; 6] = [
    &[GroupShape::new("full_attention", None, 2)],
    &[GroupShape::new("mla_attention", None, 4), GroupShape::new("mamba", None, 8)],
    &[
        GroupShape::new("full_attention", None, 4),
        GroupShape::new("sliding_window", Some(4), 2),
        GroupShape::new("cross_attention", None, 2),
    ],
    &[
        GroupShape::new("sliding_window_mla", Some(7), 2),
        GroupShape::new("full_attention", None, 2),
    ],
    &[GroupShape::new("chunked_local_attention", None, 2), GroupShape::new("mamba", None, 4)],
    // Runs that only their ends tell the place of.
    &[GroupShape::new("sliding_window", Some(6), 2), GroupShape::new("full_attention", None, 8)],
];

#[derive(Clone, Debug)]
enum Change {
    Store { worker: usize, group: usize, prompt: u32, root: usize, first: u32, blocks: u32 },
    Remove { worker: usize, group: usize, prompt: u32, root: usize, block: u32 },
    Clear { worker: usize },
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let root = || prop_oneof![3 => Just(0), 1 => 0_usize..ROOTS.len()];
    let place = || (0_usize..SHAPES.len(), 0_usize..3, 0_u32..3, root(), 0_u32..6);
    let change = prop_oneof![
        12 => (place(), 1_u32..6).prop_map(|((worker, group, prompt, root, first), blocks)| {
            // Often from the start, as prompts come.
            let first = first.saturating_sub(2);
            Change::Store { worker, group, prompt, root, first, blocks }
        }),
        8 => place().prop_map(|(worker, group, prompt, root, block)| {
            Change::Remove { worker, group, prompt, root, block }
        }),
        1 => (0_usize..SHAPES.len()).prop_map(|worker| Change::Clear { worker }),
    ];
    proptest::collection::vec(change, 1..120)
}

/// Prompts branch at every fourth token, by the bits of their numbers.
fn tokens(prompt: u32, length: u32) -> Vec<u32> {
    (0..length).map(|at| 70_000 * (prompt >> (at / 4).min(2) & 1) + at).collect()
}

/// As an engine hashes: nobody else can know how.
fn engine_hash(worker: usize, root: Root, prefix: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (worker, root, prefix).hash(&mut hasher);
    hasher.finish()
}

type Prefix = (Root, Vec<u32>);

/// Copies, whether its place is known, and the prefix whose place it waits for.
#[derive(Default)]
struct Held {
    copies: u32,
    is_placed: bool,
    waits_for: Option<Prefix>,
}

#[derive(Default)]
struct Account(BTreeMap<(usize, Prefix), Held>);

impl Account {
    fn store(&mut self, group: usize, prefix: Prefix, parent: Option<&Prefix>, counts: bool) {
        let is_parent_known = parent.is_none_or(|parent| self.knows(parent));
        let is_known = is_parent_known || self.knows(&prefix);
        let held = self.0.entry((group, prefix.clone())).or_default();
        held.copies = if counts { held.copies + 1 } else { 1 };
        if is_known {
            // What it follows is known from it, too.
            let found = parent.filter(|_| !is_parent_known).cloned();
            self.settle([prefix].into_iter().chain(found).collect());
        } else if held.waits_for.is_none() {
            held.waits_for = parent.cloned();
        }
    }

    fn knows(&self, prefix: &Prefix) -> bool {
        self.0.iter().any(|((_, other), held)| held.is_placed && other == prefix)
    }

    /// Places become known from parents, from children, and from the same prefix in another group.
    fn settle(&mut self, mut known: Vec<Prefix>) {
        while let Some(prefix) = known.pop() {
            for ((_, other), held) in &mut self.0 {
                if held.is_placed {
                    continue;
                }
                if *other == prefix {
                    held.is_placed = true;
                    known.extend(held.waits_for.take());
                } else if held.waits_for.as_ref() == Some(&prefix) {
                    held.waits_for = None;
                    known.push(other.clone());
                }
            }
        }
    }

    fn remove(&mut self, group: usize, prefix: &Prefix, counts: bool) {
        let key = (group, prefix.clone());
        if let Some(held) = self.0.get_mut(&key) {
            held.copies = if counts { held.copies - 1 } else { 0 };
            if held.copies == 0 {
                self.0.remove(&key);
            }
        }
    }

    fn matched(&self, shapes: &[GroupShape], seen: &[bool], root: Root, prompt: &[u32]) -> u32 {
        let length = u32::try_from(prompt.len()).unwrap();
        let holds = |group: usize, end: u32| {
            let key = (group, (root, prompt[..end as usize].to_vec()));
            self.0.get(&key).is_some_and(|held| held.is_placed)
        };
        let groups: Vec<(usize, &GroupShape)> = shapes
            .iter()
            .enumerate()
            .filter(|(group, shape)| seen[*group] && shape.kind != "cross_attention")
            .collect();
        let agrees = |length: u32| {
            groups.iter().all(|(group, shape)| {
                let needs = match (shape.kind, shape.window) {
                    (_, Some(window)) => window - 1,
                    ("mamba" | "chunked_local_attention", None) => 1,
                    _ => length,
                };
                let size = shape.block_size;
                length.is_multiple_of(size)
                    && (1..=length / size)
                        .filter(|block| block * size > length.saturating_sub(needs))
                        .all(|block| holds(*group, block * size))
            })
        };
        if groups.is_empty() { 0 } else { (1..=length).rev().find(|at| agrees(*at)).unwrap_or(0) }
    }
}

proptest! {
    #[test]
    fn a_worker_holds_what_its_groups_agree_on(changes in changes(), counts: bool) {
        let removal_event = if counts { RemovalEvent::EveryCopy } else { RemovalEvent::LastCopy };
        let mut index = PrefixIndex::new();
        let ids: Vec<WorkerId> = SHAPES.iter().map(|_| index.add_worker(removal_event)).collect();
        let mut accounts: Vec<Account> = SHAPES.iter().map(|_| Account::default()).collect();
        let mut seen = [[false; 3]; SHAPES.len()];
        for change in &changes {
            match *change {
                Change::Clear { worker } => {
                    send(&mut index, ids[worker], Event::AllBlocksCleared);
                    accounts[worker] = Account::default();
                    seen[worker] = [false; 3];
                }
                Change::Remove { worker, group, prompt, root, block } => {
                    let group = group % SHAPES[worker].len();
                    let end = (block + 1) * SHAPES[worker][group].block_size;
                    let prefix = (ROOTS[root], tokens(prompt, end));
                    let hash = engine_hash(worker, prefix.0, &prefix.1);
                    remove(&mut index, ids[worker], group, hash);
                    accounts[worker].remove(group, &prefix, counts);
                }
                Change::Store { worker, group, prompt, root, first, blocks } => {
                    let group = group % SHAPES[worker].len();
                    let (shape, root) = (SHAPES[worker][group], ROOTS[root]);
                    let all = tokens(prompt, (first + blocks) * shape.block_size);
                    let prefix = |block: u32| (root, all[..(block * shape.block_size) as usize].to_vec());
                    let hash = |block: u32| engine_hash(worker, root, &prefix(block).1);
                    let hashes: Vec<u64> = (first..first + blocks).map(|block| hash(block + 1)).collect();
                    let parent = (first > 0).then(|| hash(first));
                    let span = &all[(first * shape.block_size) as usize..];
                    store(&mut index, ids[worker], (group, shape), root, (parent, &hashes, span));
                    seen[worker][group] = true;
                    for block in first..first + blocks {
                        let parent = (block > 0).then(|| prefix(block));
                        accounts[worker].store(group, prefix(block + 1), parent.as_ref(), counts);
                    }
                }
            }
        }
        for (prompt, root) in (0..8).flat_map(|prompt| ROOTS.map(|root| (prompt, root))) {
            let token_ids = tokens(prompt, 50);
            let asked =
                Prompt { token_ids: &token_ids, lora_name: root.0, cache_salt: root.1, media: &[] };
            for (worker, matched) in index.matched_tokens(&asked) {
                let at = worker.index();
                let expected = accounts[at].matched(SHAPES[at], &seen[at], root, &token_ids);
                prop_assert_eq!(matched, expected, "worker {} prompt {} {:?}", at, prompt, root);
            }
        }
        for (id, account) in ids.iter().zip(&accounts) {
            prop_assert_eq!(index.num_blocks(*id), account.0.len());
            let unplaced = account.0.values().filter(|held| !held.is_placed).count();
            let waiting = account.0.values().filter(|held| held.waits_for.is_some()).count();
            let worker = index.workers[id.index()].as_ref().unwrap();
            prop_assert_eq!(worker.num_unplaced(), [unplaced, waiting]);
        }
    }
}
