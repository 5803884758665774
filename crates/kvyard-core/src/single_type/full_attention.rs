//! Full attention, also over latent keys and values (MLA): every token reads every earlier one, so
//! nothing is ever skipped and a hit is a prefix. `groups.md` §2.2, §2.9.

use crate::block_pool::BlockPool;
use crate::caching::MergedBlockHashes;
use crate::id::{BlockId, GroupId};
use crate::semantics::CommonPrefix;

/// From left to right up to the first block that is missing in any of the groups; column by column.
/// With `drop_last` the last block found is given up, because a drafter needs its hidden states.
pub(crate) fn find_longest_cache_hit(
    pool: &BlockPool,
    hashes: MergedBlockHashes<'_>,
    max_blocks: u32,
    groups: &[GroupId],
    drop_last: bool,
    hit: &mut Vec<BlockId>,
) {
    let found = (0..hashes.len().min(max_blocks as usize))
        .take_while(|block| pool.get_cached_block(hashes.get(*block), groups, hit))
        .count();
    if drop_last && found > 0 {
        hit.truncate(hit.len() - groups.len());
    }
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
