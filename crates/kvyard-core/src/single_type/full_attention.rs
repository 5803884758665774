//! Full attention, also over latent keys and values (MLA): every token reads every earlier one, so
//! nothing is ever skipped and a hit is a prefix. `groups.md` §2.2, §2.9.

use crate::block_pool::BlockPool;
use crate::caching::MergedBlockHashes;
use crate::id::BlockId;
use crate::semantics::CommonPrefix;
use crate::single_type::{Lookup, PrefixHit};

/// From left to right up to the first block that is missing in any of the groups: one probe a block
/// of the hit. A drafter voids the last block found, because it needs that block's hidden states.
pub(crate) fn find_longest_cache_hit(
    pool: &BlockPool,
    hashes: MergedBlockHashes<'_>,
    lookup: &Lookup<'_>,
) -> PrefixHit {
    let mut hit = PrefixHit::new(lookup.groups.len());
    hit.extend(pool, hashes, 0..hashes.len().min(lookup.max_blocks()), lookup.groups);
    hit.pop_until(|blocks| lookup.is_aligned(blocks), usize::from(lookup.drop_last));
    hit
}

/// Leading blocks that every tracked request has, by the rule chosen.
pub(crate) fn num_common_prefix_blocks(
    pool: &BlockPool,
    row: &[BlockId],
    num_requests: u32,
    rule: CommonPrefix,
) -> usize {
    let references = |block: BlockId| match rule {
        CommonPrefix::References => pool.ref_cnt(block),
        CommonPrefix::RowMembership => pool.row_references[block.index()],
    };
    row.iter().take_while(|block| !block.is_null() && references(**block) == num_requests).count()
}
