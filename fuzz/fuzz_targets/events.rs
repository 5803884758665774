//! Bytes from the network: reading them never panics, and a batch that was read is the same batch
//! after it was written again, in whatever format. What keeps their content bears them too: a full
//! state can be read, and an index answers. How to run it stands in `../Cargo.toml`.

#![no_main]

use kvyard_core::semantics::RemovalEvent;
use kvyard_events::event::{BlockHashes, ExtraKeyValue, ExtraKeys, TokenIds};
use kvyard_events::{
    BlockRemoved, BlockStored, Event, ExternalBlockHash, LiveSet, PrefixIndex, Prompt, WireFormat,
    encode_events, read_batch,
};
use libfuzzer_sys::fuzz_target;

/// A batch with most of what there is: bytes alone would seldom spell the names of events.
fn sample() -> Vec<u8> {
    let (mut first, mut second, mut tokens, mut keys) = <(Vec<u8>, Vec<u8>, _, _)>::default();
    let media = ExtraKeyValue::Tuple(vec![
        ExtraKeyValue::Text("image".into()),
        ExtraKeyValue::Negative(-2),
    ]);
    let entry = ExtraKeyValue::Tuple(vec![ExtraKeyValue::Text("salt".into()), media]);
    let stored = BlockStored {
        block_hashes: BlockHashes::new(&[1, 2].map(ExternalBlockHash::Integer), &mut first),
        token_ids: TokenIds::new(&[0, 1, 2, 3], &mut tokens),
        block_size: 2,
        extra_keys: Some(ExtraKeys::new(&[entry, ExtraKeyValue::Nil], &mut keys)),
        group_idx: Some(0),
        kv_cache_spec_kind: Some("sliding_window"),
        kv_cache_spec_sliding_window: Some(3),
        ..BlockStored::default()
    };
    let child = BlockStored {
        block_hashes: BlockHashes::new(&[3, 4].map(ExternalBlockHash::Integer), &mut second),
        parent_block_hash: Some(ExternalBlockHash::Integer(2)),
        ..stored
    };
    let removed = BlockRemoved {
        block_hashes: stored.block_hashes,
        group_idx: Some(0),
        ..BlockRemoved::default()
    };
    let events = [
        Event::BlockStored(stored),
        Event::BlockStored(child),
        Event::BlockRemoved(removed),
        Event::AllBlocksCleared,
        Event::BlockStored(stored),
    ];
    let mut payload = Vec::new();
    encode_events(&events, 0.0, Some(0), WireFormat::Router, &mut payload);
    payload
}

fuzz_target!(|data: &[u8]| {
    check(data);
    let mut edited = sample();
    for edit in data.chunks_exact(3) {
        let at = usize::from(u16::from_be_bytes([edit[0], edit[1]])) % edited.len();
        edited[at] = edit[2];
    }
    check(&edited);
});

fn check(payload: &[u8]) {
    let Ok(batch) = read_batch(payload) else {
        return;
    };
    for event in &batch.events {
        if let Event::BlockStored(stored) = event {
            assert_eq!(stored.token_ids.iter().count(), stored.token_ids.len());
            assert_eq!(stored.block_hashes.iter().count(), stored.block_hashes.len());
            stored.extra_keys.iter().flat_map(ExtraKeys::iter).for_each(drop);
        }
    }
    for format in WireFormat::ALL {
        let (mut once, mut again) = (Vec::new(), Vec::new());
        encode_events(&batch.events, batch.timestamp, batch.data_parallel_rank, format, &mut once);
        let read = read_batch(&once).expect("what was written can be read");
        assert_eq!(read.data_parallel_rank, batch.data_parallel_rank);
        encode_events(&read.events, read.timestamp, read.data_parallel_rank, format, &mut again);
        assert!(once == again, "{format:?}");
    }
    for removal_event in [RemovalEvent::EveryCopy, RemovalEvent::LastCopy] {
        let (mut set, mut index) = (LiveSet::new(removal_event), PrefixIndex::new());
        let worker = index.add_worker(removal_event);
        for _ in 0..2 {
            set.apply(payload).expect("it was read before");
            index.apply_payload(worker, payload).expect("it was read before");
        }
        let stores: usize = set
            .dump(0.0, Some(0), WireFormat::Router)
            .iter()
            .map(|batch| read_batch(batch).expect("a dump can be read").events.len())
            .sum();
        assert!(stores >= set.len());
        let prompt = Prompt { token_ids: &[0, 1, 2, 3], ..Prompt::default() };
        assert!(index.matched_tokens(&prompt).iter().all(|(_, tokens)| *tokens <= 4));
    }
}
