//! How many leading tokens does each worker hold? A router's memory, fed by the events of any number
//! of workers.
//!
//! The hashes of engines cannot be computed again by others (seeds, algorithms and formats differ), so
//! a block is found by a fingerprint of the tokens up to its end, which the events tell. Fingerprints
//! do not depend on how tokens are cut into blocks: one pass over a prompt serves workers of every
//! block size.
//!
//! A prefix is held where all groups of a worker agree: full attention needs every block, a sliding
//! window those that it covers, recurrent and chunked local layers the last one. Only what lies on
//! the GPU counts.

mod fingerprint;
mod waiting;
mod worker;

#[cfg(test)]
mod tests;

use kvyard_core::semantics::RemovalEvent;

use crate::decode::read_batch;
use crate::error::DecodeError;
use crate::event::Event;
use fingerprint::{Coefficients, Fingerprint, root};
use worker::Worker;

/// A worker of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(u32);

impl WorkerId {
    /// Its number: from 0, that of a removed worker is given again.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A prompt to look for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prompt<'a> {
    /// Its tokens.
    pub token_ids: &'a [u32],
    /// The adapter's name, or its number as text for workers that know no names.
    pub lora_name: Option<&'a str>,
    /// The salt; an empty one is none.
    pub cache_salt: Option<&'a str>,
    /// Media items: identifier, and position of the first token, in the order of the positions.
    pub media: &'a [(&'a str, u32)],
}

/// See the module.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    workers: Vec<Option<Worker>>,
}

impl PrefixIndex {
    /// Of no workers.
    pub fn new() -> Self {
        Self::default()
    }

    /// A worker that holds nothing yet. `removal_event` says how it tells removals: vLLM one for each
    /// copy of a hash, `SGLang` and kvyard's corrected semantics when none is left (rule 12).
    ///
    /// # Panics
    /// For 2^32 workers.
    pub fn add_worker(&mut self, removal_event: RemovalEvent) -> WorkerId {
        let vacant = self.workers.iter().position(Option::is_none).unwrap_or_else(|| {
            self.workers.push(None);
            self.workers.len() - 1
        });
        self.workers[vacant] = Some(Worker::new(removal_event));
        WorkerId(u32::try_from(vacant).expect("there are fewer than 2^32 workers"))
    }

    /// Forgets a worker and what it holds; an unknown one is none.
    pub fn remove_worker(&mut self, worker: WorkerId) {
        if let Some(worker) = self.workers.get_mut(worker.index()) {
            *worker = None;
        }
    }

    /// Forgets what a worker holds, its groups included: it lost its cache, or started again.
    pub fn clear_worker(&mut self, worker: WorkerId) {
        if let Some(Some(worker)) = self.workers.get_mut(worker.index()) {
            worker.clear();
        }
    }

    /// Takes in a payload of a worker; those of an unknown one are passed over.
    ///
    /// # Errors
    /// If it is no batch of events; nothing was taken in then.
    pub fn apply_payload(&mut self, worker: WorkerId, payload: &[u8]) -> Result<(), DecodeError> {
        self.apply(worker, &read_batch(payload)?.events);
        Ok(())
    }

    /// Takes in events of a worker, oldest first; those of an unknown one are passed over.
    pub fn apply(&mut self, worker: WorkerId, events: &[Event<'_>]) {
        let Some(Some(worker)) = self.workers.get_mut(worker.index()) else {
            return;
        };
        for event in events {
            match event {
                Event::BlockStored(stored) if is_on_gpu(stored.medium) => worker.store(stored),
                Event::BlockRemoved(removed) if is_on_gpu(removed.medium) => worker.remove(removed),
                Event::AllBlocksCleared => worker.clear(),
                Event::BlockStored(_) | Event::BlockRemoved(_) | Event::Unknown { .. } => {}
            }
        }
    }

    /// For each worker how many leading tokens of the prompt it holds, 0 for none.
    pub fn matched_tokens(&self, prompt: &Prompt<'_>) -> Vec<(WorkerId, u32)> {
        // Divides every block size: where fingerprints of the prompt are wanted.
        let step = self.workers.iter().flatten().flat_map(Worker::block_sizes).fold(0, gcd);
        let fingerprints = fingerprints(prompt, step);
        let workers = (0..).zip(&self.workers);
        let matched = |(id, worker): (u32, &Option<Worker>)| {
            let matched = worker.as_ref()?.matched_tokens(&fingerprints, step);
            Some((WorkerId(id), matched))
        };
        workers.filter_map(matched).collect()
    }

    /// The workers, by their numbers.
    pub fn workers(&self) -> impl Iterator<Item = WorkerId> {
        let known = (0..).zip(&self.workers).filter(|(_, worker)| worker.is_some());
        known.map(|(id, _)| WorkerId(id))
    }

    /// Blocks that a worker holds, all groups together.
    pub fn num_blocks(&self, worker: WorkerId) -> usize {
        let worker = self.workers.get(worker.index()).and_then(Option::as_ref);
        worker.map_or(0, Worker::num_blocks)
    }

    /// Bytes that it takes, the allocator's own use not counted.
    pub fn num_bytes(&self) -> usize {
        self.workers.iter().flatten().map(Worker::num_bytes).sum()
    }
}

/// Fingerprints of the prompt's first `step` tokens, twice as many, and so on.
fn fingerprints(prompt: &Prompt<'_>, step: u32) -> Vec<Fingerprint> {
    if step == 0 {
        return Vec::new();
    }
    let mut fingerprint = root(prompt.lora_name, prompt.cache_salt);
    let mut media = prompt.media;
    let chunks = prompt.token_ids.chunks_exact(step as usize);
    let mut fingerprints = Vec::with_capacity(chunks.len());
    let mut start = 0;
    for chunk in chunks {
        let end = start + step;
        let inside = media.iter().take_while(|(_, position)| *position < end).count();
        let (here, later) = media.split_at(inside);
        let mut coefficients = Coefficients::default();
        coefficients.extend(chunk.iter().copied());
        for (identifier, position) in here.iter().filter(|(_, position)| *position >= start) {
            coefficients.add_media((position - start) as usize, identifier);
        }
        fingerprint = coefficients.append_to(fingerprint);
        fingerprints.push(fingerprint);
        (media, start) = (later, end);
    }
    fingerprints
}

fn is_on_gpu(medium: Option<&str>) -> bool {
    medium.is_none_or(|medium| medium == "GPU")
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
