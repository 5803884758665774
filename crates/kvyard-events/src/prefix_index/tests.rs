//! Streams by hand.

mod random;

use super::*;
use crate::event::{
    BlockHashes, BlockRemoved, BlockStored, ExternalBlockHash, ExtraKeyValue, ExtraKeys, TokenIds,
};

/// A prompt's identity besides its tokens.
type Root = (Option<&'static str>, Option<&'static str>);

/// What a group needs before a boundary, in tokens: all, or the last few.
#[derive(Clone, Copy, Debug)]
struct GroupShape {
    kind: &'static str,
    window: Option<u32>,
    block_size: u32,
}

impl GroupShape {
    const fn new(kind: &'static str, window: Option<u32>, block_size: u32) -> Self {
        Self { kind, window, block_size }
    }
}

fn send(index: &mut PrefixIndex, worker: WorkerId, event: Event<'_>) {
    let mut payload = Vec::new();
    let format = crate::WireFormat::Router;
    crate::encode_events(&[event], 0.0, Some(0), format, &mut payload);
    index.apply_payload(worker, &payload).unwrap();
}

fn remove(index: &mut PrefixIndex, worker: WorkerId, group: usize, hash: u64) {
    let mut room = Vec::new();
    send(
        index,
        worker,
        Event::BlockRemoved(BlockRemoved {
            block_hashes: BlockHashes::new(&[ExternalBlockHash::Integer(hash)], &mut room),
            medium: Some("GPU"),
            group_idx: u32::try_from(group).ok(),
        }),
    );
}

fn store(
    index: &mut PrefixIndex,
    worker: WorkerId,
    (group, shape): (usize, GroupShape),
    root: Root,
    (parent, hashes, tokens): (Option<u64>, &[u64], &[u32]),
) {
    let (mut hash_room, mut token_room, mut key_room) = (Vec::new(), Vec::new(), Vec::new());
    let hashes: Vec<_> = hashes.iter().copied().map(ExternalBlockHash::Integer).collect();
    // As vLLM: the adapter in each block, the salt in the first one.
    let entry = |block: usize| {
        let salt = root.1.filter(|_| block == 0 && parent.is_none());
        let names = root.0.into_iter().chain(salt);
        let names: Vec<_> = names.map(|name| ExtraKeyValue::Text(name.into())).collect();
        if names.is_empty() { ExtraKeyValue::Nil } else { ExtraKeyValue::Tuple(names) }
    };
    let entries: Vec<_> = (0..hashes.len()).map(entry).collect();
    send(
        index,
        worker,
        Event::BlockStored(BlockStored {
            block_hashes: BlockHashes::new(&hashes, &mut hash_room),
            parent_block_hash: parent.map(ExternalBlockHash::Integer),
            token_ids: TokenIds::new(tokens, &mut token_room),
            block_size: shape.block_size,
            lora_id: root.0.map(|_| 3),
            lora_name: root.0,
            medium: Some("GPU"),
            extra_keys: Some(ExtraKeys::new(&entries, &mut key_room)),
            group_idx: u32::try_from(group).ok(),
            kv_cache_spec_kind: Some(shape.kind),
            kv_cache_spec_sliding_window: shape.window,
            ..BlockStored::default()
        }),
    );
}

fn matched(index: &PrefixIndex, prompt: Prompt<'_>) -> Vec<u32> {
    index.matched_tokens(&prompt).into_iter().map(|(_, matched)| matched).collect()
}

/// The same image elsewhere, another image, and none; whatever the block size.
#[test]
fn media_belong_to_their_positions() {
    let mut index = PrefixIndex::new();
    let tokens: Vec<u32> = (0..12).collect();
    for block_size in [2_u32, 4] {
        let worker = index.add_worker(RemovalEvent::LastCopy);
        let (mut hash_room, mut token_room, mut key_room) = (Vec::new(), Vec::new(), Vec::new());
        let num_blocks = i64::from(12 / block_size);
        let hashes: Vec<_> =
            (1..=num_blocks.unsigned_abs()).map(ExternalBlockHash::Integer).collect();
        // An image at tokens 3 to 8: in each block that it overlaps, by its offset in the block.
        let entry = |block: i64| {
            let start = block * i64::from(block_size);
            let offset = match 3 - start {
                offset if offset < 0 => ExtraKeyValue::Negative(offset),
                offset => ExtraKeyValue::Unsigned(offset.unsigned_abs()),
            };
            let overlaps = start < 9 && start + i64::from(block_size) > 3;
            let media = ExtraKeyValue::Tuple(vec![ExtraKeyValue::Text("image".into()), offset]);
            if overlaps { ExtraKeyValue::Tuple(vec![media]) } else { ExtraKeyValue::Nil }
        };
        let entries: Vec<_> = (0..num_blocks).map(entry).collect();
        send(
            &mut index,
            worker,
            Event::BlockStored(BlockStored {
                block_hashes: BlockHashes::new(&hashes, &mut hash_room),
                token_ids: TokenIds::new(&tokens, &mut token_room),
                block_size,
                extra_keys: Some(ExtraKeys::new(&entries, &mut key_room)),
                ..BlockStored::default()
            }),
        );
    }
    let asked = |media| matched(&index, Prompt { token_ids: &tokens, media, ..Prompt::default() });
    assert_eq!(asked(&[("image", 3)]), [12, 12]);
    assert_eq!(asked(&[]), [2, 0]);
    assert_eq!(asked(&[("other", 3)]), [2, 0]);
    assert_eq!(asked(&[("image", 5)]), [2, 0]);
    assert_eq!(asked(&[("image", 3), ("image", 9)]), [8, 8]);
}

/// vLLM's masked span: 64 tokens, two hashes (case C15). The other group knows them.
#[test]
fn masked_spans_are_placed_by_the_other_group() {
    let tokens: Vec<u32> = (0..64).collect();
    let (full, window) =
        (GroupShape::new("full_attention", None, 8), GroupShape::new("sliding_window", Some(8), 8));
    let hashes: Vec<u64> = (1..=8).collect();
    for window_first in [false, true] {
        let mut index = PrefixIndex::new();
        let worker = index.add_worker(RemovalEvent::EveryCopy);
        let masked = |index: &mut PrefixIndex| {
            store(index, worker, (1, window), (None, None), (None, &[4, 8], &tokens));
        };
        if window_first {
            masked(&mut index);
        }
        store(&mut index, worker, (0, full), (None, None), (None, &hashes, &tokens));
        if !window_first {
            masked(&mut index);
        }
        let asked = |length: usize| {
            matched(&index, Prompt { token_ids: &tokens[..length], ..Prompt::default() })
        };
        assert_eq!([asked(64), asked(63), asked(31)], [[64], [32], [0]]);
    }
}

#[test]
fn workers_come_and_go() {
    let mut index = PrefixIndex::new();
    let shape = GroupShape::new("full_attention", None, 2);
    let (first, second) =
        (index.add_worker(RemovalEvent::LastCopy), index.add_worker(RemovalEvent::LastCopy));
    for worker in [first, second] {
        store(&mut index, worker, (0, shape), (None, None), (None, &[1], &[5, 6]));
    }
    let prompt = Prompt { token_ids: &[5, 6, 7], ..Prompt::default() };
    assert_eq!(index.matched_tokens(&prompt), [(first, 2), (second, 2)]);
    index.remove_worker(first);
    assert_eq!(index.matched_tokens(&prompt), [(second, 2)]);
    store(&mut index, first, (0, shape), (None, None), (None, &[1], &[5, 6]));
    assert_eq!(index.matched_tokens(&prompt), [(second, 2)]);
    index.clear_worker(second);
    assert_eq!(index.matched_tokens(&prompt), [(second, 0)]);
    assert_eq!(index.add_worker(RemovalEvent::EveryCopy), first);
    // What lies elsewhere does not count.
    let mut room = Vec::new();
    let mut tokens = Vec::new();
    send(
        &mut index,
        second,
        Event::BlockStored(BlockStored {
            block_hashes: BlockHashes::new(&[ExternalBlockHash::Integer(1)], &mut room),
            token_ids: TokenIds::new(&[5, 6], &mut tokens),
            block_size: 2,
            medium: Some("CPU"),
            ..BlockStored::default()
        }),
    );
    assert_eq!(index.matched_tokens(&prompt), [(first, 0), (second, 0)]);
}

/// A window of two blocks before each end of a block of the full group: nobody tells what the run
/// follows, but the full group tells where it ends. By hand: blocks of 16 and 4 tokens, window 7.
#[test]
fn a_run_is_placed_by_its_end() {
    let tokens: Vec<u32> = (0..32).collect();
    let (full, window) = (
        GroupShape::new("full_attention", None, 16),
        GroupShape::new("sliding_window", Some(7), 4),
    );
    for window_first in [false, true] {
        let mut index = PrefixIndex::new();
        let worker = index.add_worker(RemovalEvent::LastCopy);
        // Hashes are the numbers of tokens before their ends.
        let runs = |index: &mut PrefixIndex| {
            for (end, span) in [(16, &tokens[8..16]), (32, &tokens[24..])] {
                let run = (Some(end - 8), &[end - 4, end][..], span);
                store(index, worker, (1, window), (None, None), run);
            }
        };
        if window_first {
            runs(&mut index);
        }
        store(&mut index, worker, (0, full), (None, None), (None, &[16, 32], &tokens));
        if !window_first {
            runs(&mut index);
        }
        let asked = |index: &PrefixIndex, length: usize| {
            matched(index, Prompt { token_ids: &tokens[..length], ..Prompt::default() })
        };
        assert_eq!([32, 31, 15].map(|length| asked(&index, length)), [[32], [16], [0]]);
        remove(&mut index, worker, 1, 28);
        assert_eq!(asked(&index, 32), [16]);
        assert_eq!(index.workers[0].as_ref().unwrap().num_unplaced(), [0, 0]);
    }
}

/// Orphans whose parents never come, stored and removed for ever; and one that is stored again.
#[test]
fn orphans_do_not_pile_up() {
    let shape = GroupShape::new("full_attention", None, 2);
    for rule in [RemovalEvent::LastCopy, RemovalEvent::EveryCopy] {
        let mut index = PrefixIndex::new();
        let worker = index.add_worker(rule);
        let orphan = |index: &mut PrefixIndex, hash: u64, parent: u64| {
            store(index, worker, (0, shape), (None, None), (Some(parent), &[hash], &[1, 2]));
        };
        let mut largest = 0;
        for number in 0..20_000_u64 {
            let hash = 2 * number + 2;
            orphan(&mut index, hash, hash + 1);
            orphan(&mut index, 1, 0);
            if number >= 10 {
                remove(&mut index, worker, 0, hash - 20);
            }
            largest = largest.max(index.num_bytes());
        }
        assert_eq!(index.num_blocks(worker), 11);
        assert_eq!(index.workers[0].as_ref().unwrap().num_unplaced(), [11, 11]);
        assert!(largest < 10_000, "{largest} bytes for 11 blocks");
    }
}

/// Many wait for one parent; each leaves in no time that depends on the others.
#[test]
fn siblings_wait_and_leave() {
    let shape = GroupShape::new("full_attention", None, 2);
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    let one = |hash: u64, parent: Option<u64>, token: u32| (parent, [hash], [token, token]);
    let tell = |index: &mut PrefixIndex, (parent, hash, tokens): (_, [u64; 1], [u32; 2])| {
        store(index, worker, (0, shape), (None, None), (parent, &hash, &tokens));
    };
    for sibling in 0..5 {
        tell(&mut index, one(10 + u64::from(sibling), Some(1), sibling));
    }
    for gone in [12, 10, 14] {
        remove(&mut index, worker, 0, gone);
    }
    assert_eq!(index.workers[0].as_ref().unwrap().num_unplaced(), [2, 2]);
    tell(&mut index, one(1, None, 9));
    let asked = |token: u32| {
        matched(&index, Prompt { token_ids: &[9, 9, token, token], ..Prompt::default() })
    };
    assert_eq!([0, 1, 2, 3, 4].map(asked), [[2], [4], [2], [4], [2]]);
}

/// The engine starts again with one group of two.
#[test]
fn a_reset_forgets_the_groups() {
    let full = GroupShape::new("full_attention", None, 2);
    let window = GroupShape::new("sliding_window", Some(3), 2);
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    let tokens = [1, 2, 3, 4];
    let asked =
        |index: &PrefixIndex| matched(index, Prompt { token_ids: &tokens, ..Prompt::default() });
    for (group, shape) in [(0, full), (1, window)] {
        store(&mut index, worker, (group, shape), (None, None), (None, &[1, 2], &tokens));
    }
    assert_eq!(asked(&index), [4]);
    send(&mut index, worker, Event::AllBlocksCleared);
    assert_eq!(asked(&index), [0]);
    store(&mut index, worker, (0, full), (None, None), (None, &[1, 2], &tokens));
    assert_eq!(asked(&index), [4]);
}

/// Case C17: stores of boundaries inside a block do not change the group's block size, whether the
/// sender says what they are or tells far less with them than with whole blocks.
#[test]
fn boundaries_inside_blocks_do_not_mislead() {
    let block = GroupShape::new("full_attention", None, 8);
    let tokens: Vec<u32> = (0..24).collect();
    let asked =
        |index: &PrefixIndex| matched(index, Prompt { token_ids: &tokens, ..Prompt::default() });
    for is_told in [false, true] {
        let mut index = PrefixIndex::new();
        let worker = index.add_worker(RemovalEvent::LastCopy);
        store(&mut index, worker, (0, block), (None, None), (None, &[1, 2], &tokens[..16]));
        let (mut hash_room, mut token_room) = (Vec::new(), Vec::new());
        let num_boundaries = if is_told { 100 } else { 7 };
        for boundary in 0..num_boundaries {
            let hash = [ExternalBlockHash::Integer(100 + boundary)];
            send(
                &mut index,
                worker,
                Event::BlockStored(BlockStored {
                    block_hashes: BlockHashes::new(&hash, &mut hash_room),
                    parent_block_hash: Some(ExternalBlockHash::Integer(2)),
                    token_ids: TokenIds::new(&tokens[16..18], &mut token_room),
                    block_size: 2,
                    group_block_size: is_told.then_some(8),
                    medium: Some("GPU"),
                    group_idx: Some(0),
                    kv_cache_spec_kind: Some("full_attention"),
                    ..BlockStored::default()
                }),
            );
        }
        assert_eq!(asked(&index), [16]);
        store(&mut index, worker, (0, block), (None, None), (Some(2), &[3], &tokens[16..]));
        assert_eq!(asked(&index), [24]);
    }
}

#[test]
fn a_restarted_engine_may_have_larger_blocks() {
    let tokens: Vec<u32> = (0..16).collect();
    let whole =
        |index: &PrefixIndex| matched(index, Prompt { token_ids: &tokens, ..Prompt::default() });
    let (small, large) =
        (GroupShape::new("full_attention", None, 2), GroupShape::new("full_attention", None, 8));
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    let hashes: Vec<u64> = (1..=8).collect();
    store(&mut index, worker, (0, small), (None, None), (None, &hashes, &tokens));
    assert_eq!(whole(&index), [16]);
    send(&mut index, worker, Event::AllBlocksCleared);
    store(&mut index, worker, (0, large), (None, None), (None, &[9], &tokens[..8]));
    assert_eq!(whole(&index), [8]);
}

/// The same where engines tell the size of a group's blocks: they told it of the engine that is gone.
#[test]
fn a_restarted_engine_may_tell_no_block_size() {
    let tokens: Vec<u32> = (0..8).collect();
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    let full = BlockStored { kv_cache_spec_kind: Some("full_attention"), ..BlockStored::default() };
    let told = BlockStored { block_size: 4, group_block_size: Some(8), ..full };
    store_fields(&mut index, worker, &told, &[1], &tokens[..4]);
    send(&mut index, worker, Event::AllBlocksCleared);
    let untold = BlockStored { block_size: 4, ..full };
    store_fields(&mut index, worker, &untold, &[1], &tokens[..4]);
    assert_eq!(matched(&index, Prompt { token_ids: &tokens, ..Prompt::default() }), [4]);
}

/// A store of these hashes and tokens; what else it says is in `fields`.
fn store_fields(
    index: &mut PrefixIndex,
    worker: WorkerId,
    fields: &BlockStored<'_>,
    hashes: &[u64],
    tokens: &[u32],
) {
    let (mut hash_room, mut token_room) = (Vec::new(), Vec::new());
    let hashes: Vec<_> = hashes.iter().copied().map(ExternalBlockHash::Integer).collect();
    let block_hashes = BlockHashes::new(&hashes, &mut hash_room);
    let token_ids = TokenIds::new(tokens, &mut token_room);
    send(index, worker, Event::BlockStored(BlockStored { block_hashes, token_ids, ..*fields }));
}

/// What lies on a host's memory or a disk is not on the GPU, and its removal is none there.
#[test]
fn only_the_gpu_counts() {
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    let on = |medium| BlockStored { block_size: 2, medium, ..BlockStored::default() };
    store_fields(&mut index, worker, &on(Some("CPU")), &[1], &[1, 2]);
    assert_eq!(index.num_blocks(worker), 0);
    for medium in [None, Some("GPU")] {
        store_fields(&mut index, worker, &on(medium), &[1], &[1, 2]);
        assert_eq!(index.num_blocks(worker), 1);
    }
    let mut room = Vec::new();
    let block_hashes = BlockHashes::new(&[ExternalBlockHash::Integer(1)], &mut room);
    let removed = BlockRemoved { block_hashes, medium: Some("CPU"), group_idx: None };
    send(&mut index, worker, Event::BlockRemoved(removed));
    assert_eq!(index.num_blocks(worker), 1);
}

/// The third block continues the second, which was gone when it was told: the event's parent is the
/// first then. The tokens before it are those of both.
#[test]
fn a_block_is_placed_behind_its_announced_parent() {
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    let tokens = [1, 2, 3, 4, 5, 6];
    let size = BlockStored { block_size: 2, ..BlockStored::default() };
    store_fields(&mut index, worker, &size, &[1, 2], &tokens[..4]);
    let third = BlockStored {
        parent_block_hash: Some(ExternalBlockHash::Integer(1)),
        announced_parent_block_hash: Some(ExternalBlockHash::Integer(2)),
        ..size
    };
    store_fields(&mut index, worker, &third, &[3], &tokens[4..]);
    assert_eq!(matched(&index, Prompt { token_ids: &tokens, ..Prompt::default() }), [6]);
}

/// An adapter without a name is known by its number, and each number is another adapter.
#[test]
fn adapters_without_names_have_numbers() {
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    let numbered = BlockStored { block_size: 2, lora_id: Some(3), ..BlockStored::default() };
    store_fields(&mut index, worker, &numbered, &[1], &[1, 2]);
    let asked =
        |lora_name| matched(&index, Prompt { token_ids: &[1, 2], lora_name, ..Prompt::default() });
    assert_eq!([asked(Some("3")), asked(Some("4")), asked(None)], [[2], [0], [0]]);
}

/// vLLM names the adapter and then the salt: of two equal texts the second is the salt.
#[test]
fn a_salt_may_be_called_like_the_adapter() {
    let shape = GroupShape::new("full_attention", None, 2);
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    store(&mut index, worker, (0, shape), (Some("sql"), Some("sql")), (None, &[1], &[1, 2]));
    let asked = |cache_salt| {
        let lora_name = Some("sql");
        matched(&index, Prompt { token_ids: &[1, 2], lora_name, cache_salt, ..Prompt::default() })
    };
    assert_eq!([asked(Some("sql")), asked(None)], [[2], [0]]);
}

/// An image that begins where a block ends is the next block's.
#[test]
fn an_image_at_the_end_of_a_block_is_the_next_block_s() {
    let mut index = PrefixIndex::new();
    let worker = index.add_worker(RemovalEvent::LastCopy);
    let media =
        ExtraKeyValue::Tuple(vec![ExtraKeyValue::Text("image".into()), ExtraKeyValue::Unsigned(0)]);
    let mut key_room = Vec::new();
    let entries = [ExtraKeyValue::Nil, ExtraKeyValue::Tuple(vec![media])];
    let extra_keys = Some(ExtraKeys::new(&entries, &mut key_room));
    let fields = BlockStored { block_size: 2, extra_keys, ..BlockStored::default() };
    store_fields(&mut index, worker, &fields, &[1, 2], &[1, 2, 3, 4]);
    let asked =
        |media| matched(&index, Prompt { token_ids: &[1, 2, 3, 4], media, ..Prompt::default() });
    assert_eq!([asked(&[("image", 2)]), asked(&[("other", 2)]), asked(&[])], [[4], [2], [2]]);
}
