//! Bytes from the network: reading them never panics, and a batch that was read is the same batch
//! after it was written again, in whatever format. How to run it stands in `../Cargo.toml`.

#![no_main]

use kvyard_events::event::ExtraKeys;
use kvyard_events::{Event, WireFormat, encode_events, read_batch};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|payload: &[u8]| {
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
});
