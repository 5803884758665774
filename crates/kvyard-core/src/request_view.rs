//! What the manager reads of a request. The core stores no request counters: whoever owns them
//! (kvyard's `Request`, vLLM's, a batch) fills a view for each call.

use crate::block_hash::BlockHash;
use crate::hashing::{ExtraKeySource, Fingerprint};

/// Where a request stands; the order is vLLM's (`RequestStatus`, `v1/request.py`), so that
/// "finished" is "greater than `Preempted`".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestStatus {
    /// In the waiting queue.
    #[default]
    Waiting,
    /// Waiting for the grammar of a structured output.
    WaitingForStructuredOutputGrammar,
    /// Its keys and values are being loaded from elsewhere.
    WaitingForRemoteKvs,
    /// A streaming session between two inputs.
    WaitingForStreamingReq,
    /// Scheduled.
    Running,
    /// Its blocks were taken away; it will be resumed.
    Preempted,
    /// Any of the finished states.
    Finished,
}

/// A request's counters, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestView {
    /// All known tokens: prompt and outputs.
    pub num_tokens: u32,
    /// Tokens of the prompt.
    pub num_prompt_tokens: u32,
    /// Tokens whose keys and values are computed or scheduled.
    pub num_computed_tokens: u32,
    /// How many of the computed tokens belong to steps that are still running.
    pub num_in_flight_tokens: u32,
    /// How often the request was preempted.
    pub num_preemptions: u32,
    /// Decides whether the watermark applies.
    pub status: RequestStatus,
    /// The request never reads the prefix cache (prompt logprobs, say).
    pub skip_reading_prefix_cache: bool,
}

/// What a store event tells of a request, borrowed for one call. Needed only while events are on.
#[derive(Clone, Copy, Debug)]
pub struct BlockContent<'a> {
    /// Token ids from position `first_token` on; at least to the end of the blocks stored.
    pub token_ids: &'a [u32],
    /// Position of `token_ids[0]` in the request.
    pub first_token: usize,
    /// Adapter, media, salt, embeddings.
    pub keys: &'a ExtraKeySource,
}

/// A request as one call sees it.
#[derive(Clone, Copy, Debug)]
pub struct RequestCall<'a> {
    /// Its name, for messages and for the first allocation.
    pub request_id: &'a str,
    /// Its counters.
    pub view: RequestView,
    /// Its block hashes at hash-block granularity; empty where caching is off.
    pub block_hashes: &'a [BlockHash],
    /// The second fingerprints of the same blocks; needed where `verify_tokens` is on, else empty.
    pub fingerprints: &'a [Fingerprint],
    /// Its tokens, while events are on.
    pub content: Option<BlockContent<'a>>,
}
