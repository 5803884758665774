//! Random streams against a plain account of them.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::encode::encode_events;
use crate::event::{BlockHashes, ExtraKeyValue, ExtraKeys, TokenIds};

const BLOCK_SIZE: u32 = 2;

/// A tree of prefixes: the block before this one.
fn parent_of(block: u64) -> Option<u64> {
    (block >= 3).then_some(block / 3)
}

fn tokens_of(block: u64) -> [u32; 2] {
    [u32::try_from(block).unwrap(), 70_000]
}

fn is_below(block: u64, ancestor: u64) -> bool {
    let mut above = parent_of(block);
    while let Some(at) = above {
        if at == ancestor {
            return true;
        }
        above = parent_of(at);
    }
    false
}

#[derive(Clone, Debug)]
enum Change {
    /// The block, and as many behind it as there are first children.
    Store {
        block: u64,
        length: usize,
        group: u32,
    },
    Remove {
        block: u64,
        group: u32,
    },
    Clear,
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        10 => (1_u64..80, 1_usize..4, 0_u32..2)
            .prop_map(|(block, length, group)| Change::Store { block, length, group }),
        10 => (1_u64..240, 0_u32..2).prop_map(|(block, group)| Change::Remove { block, group }),
        1 => Just(Change::Clear),
    ];
    proptest::collection::vec(change, 1..200)
}

/// The hashes of blocks, as numbers or as digests.
fn with_hash_forms(blocks: &[u64], as_bytes: bool, work: impl FnOnce(&[ExternalBlockHash<'_>])) {
    let digest = |block: &u64| {
        let mut digest = [0xee; 16];
        digest[8..].copy_from_slice(&block.to_be_bytes());
        digest
    };
    let digests: Vec<[u8; 16]> = blocks.iter().map(digest).collect();
    let hashes: Vec<_> = if as_bytes {
        digests.iter().map(|digest| ExternalBlockHash::Bytes(digest)).collect()
    } else {
        blocks.iter().copied().map(ExternalBlockHash::Integer).collect()
    };
    work(&hashes);
}

fn payload(change: &Change, as_bytes: bool) -> Vec<u8> {
    let mut out = Vec::new();
    let mut send =
        |event: Event<'_>| encode_events(&[event], 0.0, Some(0), WireFormat::Router, &mut out);
    let (mut hashes_room, mut tokens_room, mut keys_room) = (Vec::new(), Vec::new(), Vec::new());
    match change {
        Change::Clear => send(Event::AllBlocksCleared),
        Change::Remove { block, group } => with_hash_forms(&[*block], as_bytes, |hashes| {
            send(Event::BlockRemoved(BlockRemoved {
                block_hashes: BlockHashes::new(hashes, &mut hashes_room),
                medium: Some("GPU"),
                group_idx: Some(*group),
            }));
        }),
        Change::Store { block, length, group } => {
            let blocks: Vec<u64> =
                std::iter::successors(Some(*block), |at| Some(at * 3)).take(*length).collect();
            let tokens: Vec<u32> = blocks.iter().flat_map(|block| tokens_of(*block)).collect();
            let salt = ExtraKeyValue::Tuple(vec![ExtraKeyValue::Text("salt".into())]);
            let keys = vec![salt; *length];
            let parent: Vec<u64> = parent_of(*block).into_iter().collect();
            with_hash_forms(&blocks, as_bytes, |hashes| {
                with_hash_forms(&parent, as_bytes, |parent| {
                    send(Event::BlockStored(BlockStored {
                        block_hashes: BlockHashes::new(hashes, &mut hashes_room),
                        parent_block_hash: parent.first().copied(),
                        token_ids: TokenIds::new(&tokens, &mut tokens_room),
                        block_size: BLOCK_SIZE,
                        lora_id: Some(3),
                        medium: Some("GPU"),
                        lora_name: Some("sql"),
                        extra_keys: Some(ExtraKeys::new(&keys, &mut keys_room)),
                        group_idx: Some(*group),
                        kv_cache_spec_kind: Some("sliding_window"),
                        kv_cache_spec_sliding_window: Some(128),
                        cache_salt: (*group == 1).then_some("salt"),
                        ..BlockStored::default()
                    }));
                });
            });
        }
    }
    out
}

type Account = BTreeMap<(u64, u32), u32>;

fn account(changes: &mut Account, change: &Change, counts: bool) {
    match change {
        Change::Clear => changes.clear(),
        Change::Remove { block, group } => {
            if let Some(copies) = changes.get_mut(&(*block, *group)) {
                *copies -= 1;
                if *copies == 0 {
                    changes.remove(&(*block, *group));
                }
            }
        }
        Change::Store { block, length, group } => {
            for at in std::iter::successors(Some(*block), |at| Some(at * 3)).take(*length) {
                let copies = changes.entry((at, *group)).or_default();
                *copies = if counts { *copies + 1 } else { 1 };
            }
        }
    }
}

/// What a reader who knew nothing holds after a dump; parents, tokens and fields are checked.
fn read(dump: &[Vec<u8>], live: &Account, as_bytes: bool) -> Account {
    let mut held = Account::new();
    for payload in dump {
        for event in read_batch(payload).unwrap().events {
            let Event::BlockStored(stored) = event else { panic!("{event:?}") };
            let [hash] = stored.block_hashes.iter().collect::<Vec<_>>()[..] else { panic!() };
            assert_eq!(matches!(hash, ExternalBlockHash::Bytes(_)), as_bytes);
            let (block, group) = (hash.low_bits(), stored.group_idx.unwrap());
            assert!(stored.token_ids.iter().eq(tokens_of(block)));
            assert_eq!((stored.lora_name, stored.block_size), (Some("sql"), BLOCK_SIZE));
            assert_eq!(stored.cache_salt, (group == 1).then_some("salt"));
            assert_eq!(stored.kv_cache_spec_sliding_window, Some(128));
            assert_eq!(stored.extra_keys.map(|keys| keys.len()), Some(1));
            let parent = stored.parent_block_hash.map(|parent| parent.low_bits());
            if let Some(parent) = parent {
                assert!(held.contains_key(&(parent, group)), "{parent} before {block}");
                assert!(is_below(block, parent), "{parent} above {block}");
            }
            // What it continued is told, live or not.
            let told = stored.announced_parent_block_hash.map(|parent| parent.low_bits());
            assert_eq!(told.or(parent), parent_of(block));
            let announced = parent_of(block).filter(|above| live.contains_key(&(*above, group)));
            assert!(announced.is_none() || announced == parent, "{block} continues {announced:?}");
            *held.entry((block, group)).or_default() += 1;
        }
    }
    held
}

proptest! {
    #[test]
    fn a_dump_tells_what_is_live(changes in changes(), counts: bool, as_bytes: bool) {
        let removal_event = if counts { RemovalEvent::EveryCopy } else { RemovalEvent::LastCopy };
        let (mut set, mut live) = (LiveSet::new(removal_event), Account::new());
        for change in &changes {
            set.apply(&payload(change, as_bytes)).unwrap();
            account(&mut live, change, counts);
            prop_assert_eq!(set.len(), live.len());
            let dump = set.dump(1.0, Some(0), WireFormat::Router);
            prop_assert_eq!(&read(&dump, &live, as_bytes), &live);
            // Bare nodes join two branches at least.
            let bare = set.numbers.len() - live.len();
            prop_assert!(bare == 0 || bare < live.len(), "{} bare, {} live", bare, live.len());
            // A set that is fed with the dump is the same set.
            let mut again = LiveSet::new(removal_event);
            for batch in &dump {
                again.apply(batch).unwrap();
            }
            prop_assert_eq!(&read(&again.dump(1.0, Some(0), WireFormat::Router), &live, as_bytes), &live);
        }
        // Whatever was kept is given back.
        for (block, group) in live.keys().copied().collect::<BTreeSet<_>>() {
            for _ in 0..live[&(block, group)] {
                set.apply(&payload(&Change::Remove { block, group }, as_bytes)).unwrap();
            }
        }
        prop_assert_eq!((set.len(), set.numbers.len(), set.body_bytes), (0, 0, 0));
        prop_assert_eq!(set.vacant.len(), set.nodes.len());
        prop_assert!(set.dump(1.0, Some(0), WireFormat::Router).is_empty());
    }
}

/// 1 <- 3 <- 9 <- 27: what remains continues the nearest that remains.
#[test]
fn removed_parents_are_passed_over() {
    let mut set = LiveSet::new(RemovalEvent::LastCopy);
    let chain = Change::Store { block: 4, length: 4, group: 0 };
    set.apply(&payload(&Change::Store { block: 1, length: 1, group: 0 }, false)).unwrap();
    set.apply(&payload(&chain, false)).unwrap();
    let parents = |set: &LiveSet| -> Vec<(u64, Option<u64>)> {
        let dump = set.dump(0.0, Some(0), WireFormat::Vllm025);
        let events = read_batch(&dump[0]).unwrap().events;
        let parent = |event: &Event<'_>| match event {
            Event::BlockStored(stored) => (
                stored.block_hashes.iter().next().unwrap().low_bits(),
                stored.parent_block_hash.map(|parent| parent.low_bits()),
            ),
            _ => panic!("{event:?}"),
        };
        let mut parents: Vec<_> = events.iter().map(parent).collect();
        parents.sort_unstable();
        parents
    };
    let all = [(1, None), (4, Some(1)), (12, Some(4)), (36, Some(12)), (108, Some(36))];
    assert_eq!(parents(&set), all);
    for block in [12, 4] {
        set.apply(&payload(&Change::Remove { block, group: 0 }, false)).unwrap();
    }
    assert_eq!(parents(&set), [(1, None), (36, Some(1)), (108, Some(36))]);
    set.apply(&payload(&Change::Remove { block: 1, group: 0 }, false)).unwrap();
    assert_eq!(parents(&set), [(36, None), (108, Some(36))]);
    // Stored again: its child's announced parent is there again.
    set.apply(&payload(&chain, false)).unwrap();
    assert_eq!(parents(&set), [(4, None), (12, Some(4)), (36, Some(12)), (108, Some(36))]);
}

fn store_one(set: &mut LiveSet, hash: u64, parent: Option<u64>) {
    let (mut room, mut out) = (Vec::new(), Vec::new());
    let event = Event::BlockStored(BlockStored {
        block_hashes: BlockHashes::new(&[ExternalBlockHash::Integer(hash)], &mut room),
        parent_block_hash: parent.map(ExternalBlockHash::Integer),
        ..BlockStored::default()
    });
    encode_events(&[event], 0.0, Some(0), WireFormat::Router, &mut out);
    set.apply(&out).unwrap();
}

fn remove_one(set: &mut LiveSet, hash: u64) {
    let (mut room, mut out) = (Vec::new(), Vec::new());
    let event = Event::BlockRemoved(BlockRemoved {
        block_hashes: BlockHashes::new(&[ExternalBlockHash::Integer(hash)], &mut room),
        ..BlockRemoved::default()
    });
    encode_events(&[event], 0.0, Some(0), WireFormat::Router, &mut out);
    set.apply(&out).unwrap();
}

/// A block may be announced again behind another ancestor (case C17).
#[test]
fn bare_nodes_go_when_a_child_leaves_them() {
    let mut set = LiveSet::new(RemovalEvent::LastCopy);
    for (hash, parent) in [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(2))] {
        store_one(&mut set, hash, parent);
    }
    remove_one(&mut set, 2);
    assert_eq!((set.len(), set.numbers.len()), (3, 4));
    store_one(&mut set, 3, Some(1));
    assert_eq!((set.len(), set.numbers.len()), (3, 3));
    let dump = set.dump(0.0, Some(0), WireFormat::Router);
    let parents = |event: &Event<'_>| match event {
        Event::BlockStored(stored) => {
            stored.parent_block_hash.map_or(0, |parent| parent.low_bits())
        }
        _ => panic!("{event:?}"),
    };
    assert!(read_batch(&dump[0]).unwrap().events.iter().map(parents).eq([0, 1, 1]));
}

/// A removal of what is removed already says nothing, also where the block still joins others.
#[test]
fn a_bare_node_is_not_removed_again() {
    for rule in [RemovalEvent::EveryCopy, RemovalEvent::LastCopy] {
        let mut set = LiveSet::new(rule);
        for (hash, parent) in [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(2))] {
            store_one(&mut set, hash, parent);
        }
        for _ in 0..2 {
            remove_one(&mut set, 2);
            assert_eq!((set.len(), set.numbers.len()), (3, 4));
        }
    }
}

/// A store with one token a block, or as many as are given.
fn store_with(set: &mut LiveSet, hashes: &[u64], tokens: &[u32], keys: usize, salt: &str) {
    let (mut hash_room, mut token_room, mut key_room) = (Vec::new(), Vec::new(), Vec::new());
    let hashes: Vec<_> = hashes.iter().copied().map(ExternalBlockHash::Integer).collect();
    let keys = vec![ExtraKeyValue::Text("key".into()); keys];
    let event = Event::BlockStored(BlockStored {
        block_hashes: BlockHashes::new(&hashes, &mut hash_room),
        token_ids: TokenIds::new(tokens, &mut token_room),
        block_size: 1,
        extra_keys: Some(ExtraKeys::new(&keys, &mut key_room)),
        cache_salt: Some(salt),
        ..BlockStored::default()
    });
    let mut out = Vec::new();
    encode_events(&[event], 0.0, Some(0), WireFormat::Router, &mut out);
    set.apply(&out).unwrap();
}

/// Of each store of a dump: its hash, its tokens, how many extra keys.
fn told(set: &LiveSet) -> Vec<(u64, Vec<u32>, Option<usize>)> {
    let dump = set.dump(0.0, Some(0), WireFormat::Router);
    let mut told = Vec::new();
    for payload in &dump {
        for event in read_batch(payload).unwrap().events {
            let Event::BlockStored(stored) = event else { panic!("{event:?}") };
            let hash = stored.block_hashes.iter().next().unwrap().low_bits();
            let keys = stored.extra_keys.map(|keys| keys.len());
            told.push((hash, stored.token_ids.iter().collect(), keys));
        }
    }
    told
}

/// The content that was told last; extra keys only where there is one a hash.
#[test]
fn a_dump_tells_the_last_content() {
    let mut set = LiveSet::new(RemovalEvent::LastCopy);
    store_with(&mut set, &[1, 2], &[10, 20], 2, "salt");
    assert_eq!(told(&set), [(1, vec![10], Some(1)), (2, vec![20], Some(1))]);
    store_with(&mut set, &[1, 2], &[11, 21], 1, "salt");
    assert_eq!(told(&set), [(1, vec![11], None), (2, vec![21], None)]);
}

/// A salt a tenant is kept no longer than its blocks, however often they are stored.
#[test]
fn memory_follows_what_is_live() {
    let mut set = LiveSet::new(RemovalEvent::LastCopy);
    let mut pass = |tenant: u32| {
        let salt = format!("tenant {tenant:06}");
        for _ in 0..3 {
            store_with(&mut set, &[1], &[10], 1, &salt);
        }
        let held = set.num_bytes();
        remove_one(&mut set, 1);
        assert!(set.is_empty());
        (held, set.num_bytes())
    };
    // The list of free numbers comes with the first removal.
    pass(0);
    let usual = pass(1);
    for tenant in 2..200 {
        assert_eq!(pass(tenant), usual, "tenant {tenant}");
    }
}

/// Hashes of a chain make no ring; bytes of an attacker may.
#[test]
fn rings_end() {
    let mut set = LiveSet::new(RemovalEvent::EveryCopy);
    for (hash, parent) in [(1, 1), (2, 1), (3, 2), (1, 3), (2, 3), (3, 1)] {
        store_one(&mut set, hash, Some(parent));
        let dump = set.dump(0.0, Some(0), WireFormat::Router);
        let mut before = Vec::new();
        for event in read_batch(&dump[0]).unwrap().events {
            let Event::BlockStored(stored) = event else { panic!("{event:?}") };
            let parent = stored.parent_block_hash.map(|parent| parent.low_bits());
            assert!(parent.is_none_or(|parent| before.contains(&parent)), "{parent:?} comes later");
            before.extend(stored.block_hashes.iter().map(|hash| hash.low_bits()));
        }
    }
    for block in [1, 2, 3, 1, 2, 3] {
        remove_one(&mut set, block);
        let _ = set.dump(0.0, Some(0), WireFormat::Router);
    }
    assert_eq!((set.len(), set.numbers.len()), (0, 0));
}

#[test]
fn a_malformed_batch_changes_nothing() {
    let mut set = LiveSet::new(RemovalEvent::LastCopy);
    let mut broken = payload(&Change::Store { block: 1, length: 3, group: 0 }, false);
    broken.pop();
    assert!(set.apply(&broken).is_err());
    assert!(set.is_empty());
}
