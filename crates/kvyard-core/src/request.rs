//! A request for those who have none of their own: its tokens, its block hashes, its counters.
//! An engine that has request objects fills [`RequestView`]s instead.

use crate::block_hash::BlockHash;
use crate::error::{KVCacheError, Result};
use crate::hashing::{BlockHasher, ExtraKeySource, Fingerprint, FingerprintKey, MediaItem};
use crate::request_view::{BlockContent, RequestCall, RequestStatus, RequestView};
use std::sync::Arc;

/// A request as the KV-cache manager knows it (vLLM: `Request`, `v1/request.py`).
///
/// The counters are plain fields, which the scheduler that owns the request keeps; tokens and hashes
/// belong together and change only through methods.
#[derive(Clone, Debug)]
pub struct Request {
    id: Arc<str>,
    token_ids: Vec<u32>,
    num_prompt_tokens: usize,
    keys: Arc<ExtraKeySource>,
    hasher: Option<Arc<BlockHasher>>,
    block_hashes: Vec<BlockHash>,
    fingerprints: Fingerprints,
    /// Where the request stands.
    pub status: RequestStatus,
    /// Tokens whose keys and values are computed or scheduled.
    pub num_computed_tokens: u32,
    /// How many of the computed tokens belong to steps that are still running.
    pub num_in_flight_tokens: u32,
    /// How often the request was preempted.
    pub num_preemptions: u32,
    /// The request never reads the prefix cache.
    pub skip_reading_prefix_cache: bool,
}

impl Request {
    /// A waiting request. Without a hasher it has no block hashes and is never cached.
    pub fn new(
        request_id: impl Into<Arc<str>>,
        prompt: Vec<u32>,
        keys: Arc<ExtraKeySource>,
        hasher: Option<Arc<BlockHasher>>,
    ) -> Self {
        let mut request = Self {
            id: request_id.into(),
            num_prompt_tokens: prompt.len(),
            token_ids: prompt,
            keys,
            hasher,
            block_hashes: Vec::new(),
            fingerprints: Fingerprints::default(),
            status: RequestStatus::Waiting,
            num_computed_tokens: 0,
            num_in_flight_tokens: 0,
            num_preemptions: 0,
            skip_reading_prefix_cache: false,
        };
        request.hash_complete_blocks();
        request
    }

    /// Its name.
    pub fn request_id(&self) -> &Arc<str> {
        &self.id
    }

    /// All known tokens: prompt, then outputs.
    pub fn token_ids(&self) -> &[u32] {
        &self.token_ids
    }

    /// How many tokens are known.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// How many of them are the prompt.
    pub fn num_prompt_tokens(&self) -> usize {
        self.num_prompt_tokens
    }

    /// How many of them are outputs.
    pub fn num_output_tokens(&self) -> usize {
        self.token_ids.len() - self.num_prompt_tokens
    }

    /// Adapter, media, salt, embeddings.
    pub fn keys(&self) -> &Arc<ExtraKeySource> {
        &self.keys
    }

    /// What hashes its blocks.
    pub fn hasher(&self) -> Option<&Arc<BlockHasher>> {
        self.hasher.as_ref()
    }

    /// The hashes of its complete blocks, at the hasher's granularity. They cover all known tokens,
    /// computed or not.
    pub fn block_hashes(&self) -> &[BlockHash] {
        &self.block_hashes
    }

    /// Takes over hashes that were made elsewhere; hashing goes on behind them.
    pub fn set_block_hashes(&mut self, block_hashes: Vec<BlockHash>) {
        self.block_hashes = block_hashes;
    }

    /// Appends sampled tokens; returns how many block hashes came with them.
    ///
    /// Hashes as if the tokens had come one by one, as they do while decoding. (vLLM hashes once a
    /// call, which makes a difference under `MediaCursor::LastItem` when several blocks fill up.)
    pub fn append_output_tokens(&mut self, tokens: &[u32]) -> usize {
        let before = self.block_hashes.len();
        let Some(hasher) = &self.hasher else {
            self.token_ids.extend_from_slice(tokens);
            return 0;
        };
        // As many tokens complete at most one block.
        for tokens in tokens.chunks(hasher.hash_block_size()) {
            self.token_ids.extend_from_slice(tokens);
            hasher.extend(&self.token_ids, &self.keys, &mut self.block_hashes);
        }
        self.block_hashes.len() - before
    }

    /// Forgets all tokens from `num_tokens` on, with everything that depends on them: the hashes of
    /// blocks that are no longer complete (0.25.1 keeps those, and publishes other tokens under
    /// them: `manager.md` W4), media items that start there, and the computed and in-flight counts
    /// that reach so far.
    ///
    /// # Errors
    /// `InvalidArgument` if the request does not have that many.
    pub fn truncate(&mut self, num_tokens: usize) -> Result<()> {
        if num_tokens > self.token_ids.len() {
            return Err(KVCacheError::argument(
                "num_tokens",
                format!("cannot keep {num_tokens} of {} tokens", self.token_ids.len()),
            ));
        }
        self.token_ids.truncate(num_tokens);
        if let Some(hasher) = &self.hasher {
            self.block_hashes.truncate(num_tokens / hasher.hash_block_size());
        }
        self.fingerprints.truncate(num_tokens);
        let kept = self.keys.media().partition_point(|item| (item.offset as usize) < num_tokens);
        if kept < self.keys.media().len() {
            self.keys = Arc::new(self.keys.with_media(self.keys.media()[..kept].to_vec())?);
        }
        self.num_prompt_tokens = self.num_prompt_tokens.min(num_tokens);
        self.num_computed_tokens = self.num_computed_tokens.min(count(num_tokens));
        self.num_in_flight_tokens = self.num_in_flight_tokens.min(self.num_computed_tokens);
        Ok(())
    }

    /// The next input of a streaming session (vLLM: `_update_request_as_session`,
    /// `v1/core/sched/scheduler.py`): outputs become part of the prompt, `tokens` follow them. The
    /// offsets of `media` count from the first of the new tokens, and the identities of its texts go
    /// on where those of the request end ([`ExtraKeySource::texts`]). Returns how many block hashes
    /// came with them.
    ///
    /// vLLM first drops the last sampled token, which has no keys and values yet: call
    /// [`truncate`](Self::truncate) with the number of computed tokens.
    ///
    /// # Errors
    /// `InvalidArgument` if the media items are not in the order of their offsets, or too far on.
    /// Nothing has changed then.
    pub fn extend_prompt(&mut self, tokens: &[u32], media: Vec<MediaItem>) -> Result<usize> {
        if !media.is_empty() {
            let first = count(self.token_ids.len());
            let mut all = self.keys.media().to_vec();
            for mut item in media {
                item.offset = item.offset.checked_add(first).ok_or_else(|| {
                    KVCacheError::argument("media", format!("offset {} is too large", item.offset))
                })?;
                all.push(item);
            }
            self.keys = Arc::new(self.keys.with_media(all)?);
        }
        self.token_ids.extend_from_slice(tokens);
        self.num_prompt_tokens = self.token_ids.len();
        Ok(self.hash_complete_blocks())
    }

    /// Tokens of the blocks that have second fingerprints.
    pub fn num_fingerprinted_tokens(&self) -> usize {
        self.fingerprints.complete.len() * self.fingerprints.block_size
    }

    /// Makes the second fingerprints of its complete blocks of `block_size` tokens, for managers with
    /// `verify_tokens` and that hash block size. Those that are there are kept.
    pub fn make_fingerprints(&mut self, key: &FingerprintKey, block_size: usize) {
        let Fingerprints { key: old, block_size: old_size, complete } = &mut self.fingerprints;
        if (*old, *old_size) != (Some(*key), block_size) {
            complete.clear();
            (*old, *old_size) = (Some(*key), block_size);
        }
        key.extend(&self.token_ids, &self.keys, block_size, complete);
    }

    /// Its counters.
    pub fn view(&self) -> RequestView {
        RequestView {
            num_tokens: count(self.token_ids.len()),
            num_prompt_tokens: count(self.num_prompt_tokens),
            num_computed_tokens: self.num_computed_tokens,
            num_in_flight_tokens: self.num_in_flight_tokens,
            num_preemptions: self.num_preemptions,
            status: self.status,
            skip_reading_prefix_cache: self.skip_reading_prefix_cache,
        }
    }

    /// The request as an argument of a manager's call; `with_content` while events are on.
    pub fn call(&self, with_content: bool) -> RequestCall<'_> {
        RequestCall {
            request_id: &self.id,
            view: self.view(),
            block_hashes: &self.block_hashes,
            fingerprints: &self.fingerprints.complete,
            content: with_content.then(|| BlockContent {
                token_ids: &self.token_ids,
                first_token: 0,
                keys: &self.keys,
            }),
        }
    }

    fn hash_complete_blocks(&mut self) -> usize {
        let before = self.block_hashes.len();
        if let Some(hasher) = &self.hasher {
            hasher.extend(&self.token_ids, &self.keys, &mut self.block_hashes);
        }
        self.block_hashes.len() - before
    }
}

/// Second fingerprints, of complete blocks.
#[derive(Clone, Debug, Default)]
struct Fingerprints {
    key: Option<FingerprintKey>,
    block_size: usize,
    complete: Vec<Fingerprint>,
}

impl Fingerprints {
    fn truncate(&mut self, num_tokens: usize) {
        self.complete.truncate(num_tokens / self.block_size.max(1));
    }
}

fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).expect("a request has fewer than 2^32 tokens")
}
