//! Streams of events for benches: one full-attention group, as a pool of 16-token blocks tells it.

use kvyard_core::AttentionKind;
use kvyard_core::event_log::EventLog;
use kvyard_events::event::{BlockHashes, TokenIds};
use kvyard_events::{
    BatchEncoder, BlockRemoved, BlockStored, Event, ExternalBlockHash, GroupDescription, HashForm,
    WireFormat, encode_events,
};

use crate::{BLOCK_SIZE, digest};

/// Token ids as a tokenizer of 128,000 entries gives them, uniform.
///
/// # Panics
/// Never.
pub fn token_ids(count: usize) -> Vec<u32> {
    let low = |number: u64| digest(number).external(32) % 128_000;
    (0..count as u64).map(|at| u32::try_from(low(at)).expect("below 128,000")).collect()
}

/// Writes a log as the router format has it.
#[derive(Debug)]
pub struct Producer {
    encoder: BatchEncoder,
    log: EventLog,
    /// The last batch.
    pub payload: Vec<u8>,
}

impl Default for Producer {
    fn default() -> Self {
        let groups = vec![GroupDescription::from(&AttentionKind::FullAttention)];
        Self {
            encoder: BatchEncoder::new(WireFormat::Router, HashForm::Integer, 32, groups),
            log: EventLog::default(),
            payload: Vec::new(),
        }
    }
}

impl Producer {
    /// Takes an engine's changes and writes them.
    pub fn drain(&mut self, engine: &mut crate::Engine) {
        engine.take_events(&mut self.log);
        self.write();
    }

    /// Writes the changes that were taken last, once more.
    pub fn write(&mut self) {
        self.payload.clear();
        self.encoder.encode(&self.log, 0.0, Some(0), &mut self.payload);
    }
}

fn hash(prompt: u64, block: u64) -> u64 {
    digest(prompt << 20 | block).external(32)
}

/// A batch that stores a prompt of so many blocks. The tokens are those of the prompt.
pub fn store(prompt: u64, blocks: u64, token_ids: &[u32]) -> Vec<u8> {
    let (mut hash_room, mut token_room, mut payload) = (Vec::new(), Vec::new(), Vec::new());
    let hashes: Vec<_> =
        (0..blocks).map(|block| ExternalBlockHash::Integer(hash(prompt, block))).collect();
    let event = Event::BlockStored(BlockStored {
        block_hashes: BlockHashes::new(&hashes, &mut hash_room),
        token_ids: TokenIds::new(token_ids, &mut token_room),
        block_size: BLOCK_SIZE,
        medium: Some("GPU"),
        group_idx: Some(0),
        kv_cache_spec_kind: Some("full_attention"),
        ..BlockStored::default()
    });
    encode_events(&[event], 0.0, Some(0), WireFormat::Router, &mut payload);
    payload
}

/// A batch that removes that prompt, last block first, one event a block as a pool does.
pub fn remove(prompt: u64, blocks: u64) -> Vec<u8> {
    let mut rooms: Vec<Vec<u8>> = (0..blocks).map(|_| Vec::new()).collect();
    let events: Vec<_> = (0..blocks)
        .rev()
        .zip(&mut rooms)
        .map(|(block, room)| {
            let hash = ExternalBlockHash::Integer(hash(prompt, block));
            Event::BlockRemoved(BlockRemoved {
                block_hashes: BlockHashes::new(&[hash], room),
                medium: Some("GPU"),
                group_idx: Some(0),
            })
        })
        .collect();
    let mut payload = Vec::new();
    encode_events(&events, 0.0, Some(0), WireFormat::Router, &mut payload);
    payload
}
