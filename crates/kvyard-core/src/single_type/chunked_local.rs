//! Chunked local attention: a token reads its own chunk up to itself, so whole earlier chunks are
//! released, and are no part of what a hit must find. `groups.md` §2.5.

use crate::block_pool::BlockPool;
use crate::caching::MergedBlockHashes;
use crate::id::length;
use crate::single_type::{Lookup, PrefixHit};

/// Tokens of the chunks before the one of the next token.
pub(crate) fn num_skipped_tokens(total_computed: u32, attention_chunk_size: u32) -> u32 {
    total_computed - total_computed % attention_chunk_size
}

/// Blocks that one request holds at most while it is prefilled in steps of `max_step_tokens`.
pub(crate) fn admission_cap(
    attention_chunk_size: u32,
    max_step_tokens: u32,
    max_model_len: u32,
    block_size: u32,
) -> u32 {
    attention_chunk_size.saturating_add(max_step_tokens).min(max_model_len).div_ceil(block_size)
}

/// Everything left of the current chunk is granted unseen; from there on a prefix of the chunk. At
/// most one probe a block of a chunk; where the alignment cuts the hit back into an earlier chunk,
/// that chunk is looked at instead, because the next token then reads it.
pub(crate) fn find_longest_cache_hit(
    pool: &BlockPool,
    hashes: MergedBlockHashes<'_>,
    lookup: &Lookup<'_>,
    attention_chunk_size: u32,
) -> PrefixHit {
    let chunk_start =
        |tokens: u32| num_skipped_tokens(tokens, attention_chunk_size) / lookup.block_size;
    let mut hit = PrefixHit::new(lookup.groups.len());
    let mut max_length = lookup.max_length;
    loop {
        let first = chunk_start(max_length);
        hit.restart(first as usize);
        let end = hashes.len().min((max_length / lookup.block_size) as usize);
        hit.extend(pool, hashes, first as usize..end, lookup.groups);
        hit.pop_until(|blocks| lookup.is_aligned(blocks), 0);
        let aligned = length(hit.num_blocks()) * lookup.block_size;
        // The only alignment that 0.25.1 knows is the block size, which cuts nothing back.
        if lookup.block_size == lookup.alignment || chunk_start(aligned) >= first {
            return hit;
        }
        max_length = aligned;
    }
}
