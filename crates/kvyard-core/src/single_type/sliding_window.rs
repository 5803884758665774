//! Sliding window, also over latent keys and values: a token reads the last few, so older blocks are
//! released and a hit needs only the blocks of one window. `groups.md` §2.3.

use crate::block_pool::BlockPool;
use crate::caching::{MergedBlockHashes, ReachableBlocks};
use crate::single_type::{Boundaries, Lookup, PrefixHit};

/// Tokens before the window of the next token.
pub(crate) fn num_skipped_tokens(total_computed: u32, sliding_window: u32) -> u32 {
    (total_computed + 1).saturating_sub(sliding_window)
}

/// Blocks that one request holds at most while it is prefilled in steps of `max_step_tokens`. One
/// more than the tokens fill, because a window may begin inside a block.
pub(crate) fn admission_cap(
    sliding_window: u32,
    max_step_tokens: u32,
    max_model_len: u32,
    block_size: u32,
) -> u32 {
    (sliding_window - 1).saturating_add(max_step_tokens).min(max_model_len).div_ceil(block_size) + 1
}

/// Blocks that must be cached in a row for a hit.
fn num_window_blocks(sliding_window: u32, block_size: u32, with_lookahead: bool) -> usize {
    (sliding_window - 1).div_ceil(block_size) as usize + usize::from(with_lookahead)
}

/// The longest hit: the last place, at an aligned length, where a whole window is cached; else a
/// prefix shorter than the window.
///
/// A window is probed from its first block on. One that misses rules out every window that contains
/// the missing block, so a miss skips a window at a time: n / window probes for a prompt of which
/// nothing is cached, one window of probes for a hit at the end.
pub(crate) fn find_longest_cache_hit(
    pool: &BlockPool,
    hashes: MergedBlockHashes<'_>,
    lookup: &Lookup<'_>,
    sliding_window: u32,
) -> PrefixHit {
    let need = num_window_blocks(sliding_window, lookup.block_size, lookup.drop_last);
    let mut hit = PrefixHit::new(lookup.groups.len());
    // The length of a hit whose last probed block is at a position; a drafter voids that block.
    let is_edge = |last: usize| {
        let blocks = last + usize::from(!lookup.drop_last);
        lookup.is_aligned(blocks)
    };
    let mut below = hashes.len().min(lookup.max_blocks());
    while let Some(last) = (0..below).rev().find(|last| is_edge(*last)) {
        let Some(first) = (last + 1).checked_sub(need.max(1)) else {
            break;
        };
        hit.restart(first);
        let missing = first + hit.extend(pool, hashes, first..last + 1, lookup.groups);
        if missing > last {
            if lookup.drop_last {
                hit.pop_until(|blocks| lookup.is_aligned(blocks), 1);
            }
            return hit;
        }
        below = missing;
    }
    prefix(pool, hashes, lookup, below, is_edge)
}

/// No window is cached whole below `below`: what is left is a prefix of the request.
fn prefix(
    pool: &BlockPool,
    hashes: MergedBlockHashes<'_>,
    lookup: &Lookup<'_>,
    below: usize,
    is_edge: impl Fn(usize) -> bool,
) -> PrefixHit {
    let mut hit = PrefixHit::new(lookup.groups.len());
    hit.restart(0);
    let cached = hit.extend(pool, hashes, 0..below, lookup.groups);
    let blocks = (0..cached).rev().find(|last| is_edge(*last)).map_or(0, |last| last + 1);
    hit.truncate(blocks);
    hit.pop_until(|blocks| lookup.is_aligned(blocks), 0);
    if lookup.drop_last {
        hit.pop_until(|blocks| lookup.is_aligned(blocks), 1);
    }
    hit
}

/// Blocks that an aligned lookup can use; all where a window spans every period.
pub(crate) fn reachable_blocks(
    boundaries: &Boundaries,
    sliding_window: u32,
    block_size: u32,
    use_eagle: bool,
) -> Option<ReachableBlocks> {
    let need = u32::try_from(num_window_blocks(sliding_window, block_size, use_eagle))
        .expect("a window is bounded by u32");
    let period = boundaries.segment / block_size;
    if boundaries.segment > 0 && need >= period {
        return None;
    }
    let shift = u32::from(use_eagle);
    let edge = |tokens: u32| {
        if tokens == u32::MAX { 0 } else { tokens / block_size + shift }
    };
    Some(ReachableBlocks { period, need, shift, edges: boundaries.replays.map(edge) })
}
