//! Hashes a request's blocks as they fill up.

use super::digest::{Digest, Sha256, Xxh3};
use super::{
    Cbor, ExtraKeySource, HashAlgorithm, Pickle, Serialisation, hash_block, hash_plain_block,
    plain_capacity,
};
use crate::block_hash::BlockHash;
use crate::error::{KVCacheError, Result};
use crate::semantics::Semantics;

/// The block size of most engines, which has a loop of its own.
const USUAL_SIZE: usize = 16;

/// Blocks of up to this many tokens are serialised on the stack.
const STACK_SIZE_MAX: usize = 64;

/// What is needed to hash the blocks of any request of one engine: vLLM's
/// `get_request_block_hasher` (`v1/core/kv_cache_utils.py`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockHasher {
    algorithm: HashAlgorithm,
    none_hash: BlockHash,
    hash_block_size: usize,
    semantics: Semantics,
}

impl BlockHasher {
    /// A hasher whose chains start at `none_hash` and whose blocks have `hash_block_size` tokens.
    ///
    /// # Errors
    /// `Config` if the block size is 0.
    pub fn new(
        algorithm: HashAlgorithm,
        none_hash: BlockHash,
        hash_block_size: u32,
        semantics: Semantics,
    ) -> Result<Self> {
        if hash_block_size == 0 {
            return Err(KVCacheError::config("hash_block_size", "must be at least 1"));
        }
        let hash_block_size = hash_block_size as usize;
        Ok(Self { algorithm, none_hash, hash_block_size, semantics })
    }

    /// How hashes are computed.
    pub const fn algorithm(&self) -> HashAlgorithm {
        self.algorithm
    }

    /// The root of the chain.
    pub const fn none_hash(&self) -> &BlockHash {
        &self.none_hash
    }

    /// Tokens per hash.
    pub const fn hash_block_size(&self) -> usize {
        self.hash_block_size
    }

    /// Whose behaviour it follows.
    pub const fn semantics(&self) -> Semantics {
        self.semantics
    }

    /// Appends the hashes of all blocks that are complete and have none yet.
    ///
    /// `hashes` holds those of the first blocks of the same tokens, from an earlier call. Under
    /// [`MediaCursor::LastItem`](crate::semantics::MediaCursor::LastItem) the result depends on how the work was split over calls.
    pub fn extend(&self, tokens: &[u32], keys: &ExtraKeySource, hashes: &mut Vec<BlockHash>) {
        let complete = tokens.len() / self.hash_block_size;
        if complete <= hashes.len() {
            return;
        }
        hashes.reserve(complete - hashes.len());
        let tokens = &tokens[..complete * self.hash_block_size];
        match self.algorithm {
            HashAlgorithm::Sha256 => self.extend_as::<Pickle, Sha256>(tokens, keys, hashes),
            HashAlgorithm::Sha256Cbor => self.extend_as::<Cbor, Sha256>(tokens, keys, hashes),
            HashAlgorithm::XxHash => self.extend_as::<Pickle, Xxh3>(tokens, keys, hashes),
            HashAlgorithm::XxHashCbor => self.extend_as::<Cbor, Xxh3>(tokens, keys, hashes),
        }
    }

    fn extend_as<S: Serialisation, D: Digest>(
        &self,
        tokens: &[u32],
        keys: &ExtraKeySource,
        hashes: &mut Vec<BlockHash>,
    ) {
        let size = self.hash_block_size;
        if !keys.is_empty() || size > S::PLAIN_TOKENS_MAX {
            return self.extend_with_keys::<S, D>(tokens, keys, hashes);
        }
        let rest = &tokens[hashes.len() * size..];
        if size == USUAL_SIZE {
            // A constant length is worth a tenth of the time.
            let blocks = rest.as_chunks::<USUAL_SIZE>().0.iter().map(|block| &block[..]);
            self.extend_plain::<S, D>(blocks, hashes, &mut [0; plain_capacity(USUAL_SIZE)]);
        } else if size <= STACK_SIZE_MAX {
            let blocks = rest.chunks_exact(size);
            self.extend_plain::<S, D>(blocks, hashes, &mut [0; plain_capacity(STACK_SIZE_MAX)]);
        } else {
            let blocks = rest.chunks_exact(size);
            self.extend_plain::<S, D>(blocks, hashes, &mut vec![0; plain_capacity(size)]);
        }
    }

    /// The hot path: no extra keys.
    #[inline]
    fn extend_plain<'a, S: Serialisation, D: Digest>(
        &self,
        blocks: impl Iterator<Item = &'a [u32]>,
        hashes: &mut Vec<BlockHash>,
        buffer: &mut [u8],
    ) {
        let mut parent = hashes.last().copied().unwrap_or(self.none_hash);
        for block in blocks {
            parent = hash_plain_block::<S, D, u32>(&parent, block, buffer);
            hashes.push(parent);
        }
    }

    fn extend_with_keys<S: Serialisation, D: Digest>(
        &self,
        tokens: &[u32],
        source: &ExtraKeySource,
        hashes: &mut Vec<BlockHash>,
    ) {
        let size = self.hash_block_size;
        let mut start = hashes.len() * size;
        let mut cursor = source.media_cursor_at(start, self.semantics.media_cursor);
        let mut parent = hashes.last().copied().unwrap_or(self.none_hash);
        let mut keys = Vec::new();
        let mut scratch = Vec::new();
        while start < tokens.len() {
            let block = start..start + size;
            keys.clear();
            cursor = source.append_block_keys(block.clone(), cursor, &mut keys);
            parent = hash_block::<S, D, u32>(
                self.semantics.hash_domains,
                &parent,
                &tokens[block],
                &keys,
                &mut scratch,
            );
            hashes.push(parent);
            start += size;
        }
    }
}
