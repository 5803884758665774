//! How a prefix is looked up across the groups, and how far a request's blocks are offered to the
//! cache. vLLM's `kv_cache_coordinator.py`; `manager.md` §7.

use crate::block_pool::BlockPool;
use crate::blocks::{BlockIds, KVCacheBlocks};
use crate::id::{GroupId, length};
use crate::request_view::RequestCall;
use crate::single_type::{Lookup, PrefixHit, SingleTypeKVCacheManager};
use crate::spec::KVCacheManagerConfig;

/// What a lookup found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheHit {
    /// The blocks, one list a group. Not pinned: any allocation may make them stale.
    pub blocks: KVCacheBlocks,
    /// Tokens that need not be computed.
    pub num_tokens: u32,
    /// By how much the deepest group's hit exceeded the agreed one, in tokens.
    pub num_uncached_common_prefix_tokens: u32,
}

impl CacheHit {
    /// The pool's epoch at the lookup.
    pub fn epoch(&self) -> u64 {
        self.blocks.epoch()
    }
}

/// Groups of one specification; they are looked up together.
#[derive(Clone, Debug)]
struct Bucket {
    groups: Vec<GroupId>,
    is_full_attention: bool,
    /// A drafter reads one of them, so a hit must be one block longer than what is used of it.
    peeks: bool,
}

/// Whose hits are sought, and how.
#[derive(Debug)]
pub(crate) enum KVCacheCoordinator {
    /// Caching is off: nothing is ever found.
    NoPrefixCache,
    /// One group.
    Unitary,
    /// Several groups, or none: a length is sought on which all agree.
    Hybrid(Hybrid),
}

/// See `KVCacheCoordinator::Hybrid`.
#[derive(Debug)]
pub(crate) struct Hybrid {
    /// Full attention first, else in group order.
    buckets: Vec<Bucket>,
    scheduler_block_size: u32,
    eagle_credit: bool,
}

/// One lookup: the request, the cap on the hit, and where to look.
pub(crate) struct PrefixLookup<'a> {
    pub(crate) pool: &'a BlockPool,
    pub(crate) managers: &'a [SingleTypeKVCacheManager],
    pub(crate) request: &'a RequestCall<'a>,
    /// The hit may not be longer, in tokens.
    pub(crate) max_length: u32,
}

impl PrefixLookup<'_> {
    fn ask(&self, groups: &[GroupId], max_length: u32, drop_last: bool, align: u32) -> PrefixHit {
        let manager = &self.managers[groups[0].index()];
        let block_size = manager.block_size();
        let hashes = self.pool.merged_hashes(self.request, block_size);
        let lookup = Lookup { groups, max_length, block_size, alignment: align, drop_last };
        manager.find_longest_cache_hit(self.pool, hashes, &lookup)
    }

    fn empty(&self) -> CacheHit {
        let groups = self.managers.len();
        CacheHit {
            blocks: KVCacheBlocks::empty(groups, self.pool.id(), self.pool.epoch()),
            num_tokens: 0,
            num_uncached_common_prefix_tokens: 0,
        }
    }
}

impl KVCacheCoordinator {
    /// Chooses by the configuration. Returns which groups a drafter reads.
    pub(crate) fn new(config: &KVCacheManagerConfig) -> (Self, Vec<bool>) {
        // A drafter reads the flagged groups; all of them, if there is one and none is flagged.
        let any_flagged = config.groups.iter().any(|group| group.is_eagle_group);
        let all = config.use_eagle && !any_flagged;
        let mut eagle: Vec<bool> =
            config.groups.iter().map(|group| group.is_eagle_group || all).collect();
        if !config.enable_caching {
            return (Self::NoPrefixCache, eagle);
        }
        if config.groups.len() == 1 {
            return (Self::Unitary, eagle);
        }
        let buckets = Hybrid::buckets(config, &mut eagle);
        let hybrid = Hybrid {
            // Groups of one spec are found as one group is, which gets no credit.
            eagle_credit: config.semantics.eagle_credit && buckets.len() > 1,
            buckets,
            scheduler_block_size: config.scheduler_block_size,
        };
        (Self::Hybrid(hybrid), eagle)
    }

    /// The longest hit on which all groups agree.
    pub(crate) fn find_longest_cache_hit(&self, lookup: &PrefixLookup<'_>) -> CacheHit {
        match self {
            Self::NoPrefixCache => lookup.empty(),
            Self::Unitary => {
                let manager = &lookup.managers[0];
                let size = manager.block_size();
                let drop_last = manager.use_eagle() && manager.kind().honours_eagle_drop();
                let hit = lookup.ask(&[manager.group()], lookup.max_length, drop_last, size);
                let num_tokens = length(hit.num_blocks()) * size;
                let ids: BlockIds = hit.group(0).collect();
                let (pool, epoch) = (lookup.pool.id(), lookup.pool.epoch());
                let blocks = KVCacheBlocks::from_groups([ids.as_slice()], pool, epoch);
                CacheHit { blocks, num_tokens, num_uncached_common_prefix_tokens: 0 }
            }
            Self::Hybrid(hybrid) if hybrid.buckets.is_empty() => lookup.empty(),
            Self::Hybrid(hybrid) => hybrid.find_longest_cache_hit(lookup),
        }
    }

    /// Each specification's own longest hit, and its length in tokens for each group: they need not
    /// agree. For connectors that fill the difference.
    pub(crate) fn find_longest_cache_hit_per_group(
        &self,
        lookup: &PrefixLookup<'_>,
    ) -> (KVCacheBlocks, Vec<u32>) {
        match self {
            Self::NoPrefixCache | Self::Unitary => {
                let hit = self.find_longest_cache_hit(lookup);
                (hit.blocks, vec![hit.num_tokens; lookup.managers.len()])
            }
            Self::Hybrid(hybrid) => {
                let hits: Vec<PrefixHit> = hybrid
                    .buckets
                    .iter()
                    .map(|bucket| {
                        let align = hybrid.scheduler_block_size;
                        lookup.ask(&bucket.groups, lookup.max_length, bucket.peeks, align)
                    })
                    .collect();
                let blocks = hybrid.assemble(lookup, &hits).with_own_lengths();
                let lengths = lookup.managers.iter().enumerate().map(|(group, manager)| {
                    length(blocks.blocks(group).len()) * manager.block_size()
                });
                let lengths = lengths.collect();
                (blocks, lengths)
            }
        }
    }

    /// How many of a request's first `num_tokens` tokens a group may offer to the cache. Several groups
    /// wait for a boundary that suits all; a drafter's group offers the block behind it too, which
    /// its lookups look at.
    pub(crate) fn num_cacheable_tokens(
        &self,
        manager: &SingleTypeKVCacheManager,
        num_tokens: u32,
    ) -> u32 {
        match self {
            Self::NoPrefixCache | Self::Unitary => num_tokens,
            Self::Hybrid(hybrid) => {
                let aligned = num_tokens - num_tokens % hybrid.scheduler_block_size;
                let peeked =
                    if manager.use_eagle() && aligned > 0 { manager.block_size() } else { 0 };
                num_tokens.min(aligned + peeked)
            }
        }
    }
}

impl Hybrid {
    /// Groups of equal specs together; one drafter's group makes all of them drafters' groups.
    fn buckets(config: &KVCacheManagerConfig, eagle: &mut [bool]) -> Vec<Bucket> {
        let mut buckets: Vec<(usize, Bucket)> = Vec::new();
        for (index, group) in config.groups.iter().enumerate() {
            let id = GroupId::from_index(index);
            let same = |(first, _): &&mut (usize, Bucket)| config.groups[*first].spec == group.spec;
            match buckets.iter_mut().find(same) {
                Some((_, bucket)) => bucket.groups.push(id),
                None => buckets.push((
                    index,
                    Bucket {
                        groups: vec![id],
                        is_full_attention: group.spec.kind.is_full_attention(),
                        peeks: false,
                    },
                )),
            }
        }
        let mut buckets: Vec<Bucket> = buckets.into_iter().map(|(_, bucket)| bucket).collect();
        for bucket in &mut buckets {
            let any = bucket.groups.iter().any(|group| eagle[group.index()]);
            bucket.groups.iter().for_each(|group| eagle[group.index()] = any);
            let kind = &config.groups[bucket.groups[0].index()].spec.kind;
            bucket.peeks = any && kind.honours_eagle_drop();
        }
        buckets.sort_by_key(|bucket| !bucket.is_full_attention);
        buckets
    }

    /// Shortens a candidate length until all buckets agree on it (`manager.md` §7.3).
    fn find_longest_cache_hit(&self, lookup: &PrefixLookup<'_>) -> CacheHit {
        let mut hits: Vec<Option<PrefixHit>> = vec![None; self.buckets.len()];
        // Buckets that dropped their last block for the present candidate.
        let mut confirmed = vec![false; self.buckets.len()];
        let (mut limit, mut longest) = (lookup.max_length, 0);
        // One bucket has nobody to agree with: to ask it again, without its drop, could only lose the hit.
        let is_simple = self.buckets.len() == 1
            || (self.buckets.len() == 2 && self.buckets[0].is_full_attention);
        loop {
            let mut current = limit;
            for (index, bucket) in self.buckets.iter().enumerate() {
                let size = lookup.managers[bucket.groups[0].index()].block_size();
                if bucket.is_full_attention && hits[index].is_some() {
                    // A prefix of its hit is a hit: it is never looked up again.
                    current -= current % size;
                    continue;
                }
                let peeks = bucket.peeks && !confirmed[index];
                let reach = match (peeks, self.eagle_credit) {
                    (false, _) => current,
                    (true, false) => current.saturating_add(size).min(lookup.max_length),
                    (true, true) => current.saturating_add(size),
                };
                let hit = lookup.ask(&bucket.groups, reach, peeks, self.scheduler_block_size);
                let found = length(hit.num_blocks()) * size;
                if peeks {
                    confirmed[index] = true;
                } else if found < current {
                    confirmed.fill(false);
                }
                current = found;
                longest = longest.max(current);
                hits[index] = Some(hit);
            }
            if current >= limit {
                break;
            }
            limit = current;
            if is_simple {
                break;
            }
        }
        let mut hits: Vec<PrefixHit> = hits.into_iter().flatten().collect();
        // Every group's hit is cut to the agreed length, not only the first one's.
        for (bucket, hit) in self.buckets.iter().zip(&mut hits) {
            let size = lookup.managers[bucket.groups[0].index()].block_size();
            hit.truncate((limit / size) as usize);
        }
        CacheHit {
            blocks: self.assemble(lookup, &hits),
            num_tokens: limit,
            num_uncached_common_prefix_tokens: longest.saturating_sub(limit),
        }
    }

    /// From hits in bucket order to blocks in group order.
    fn assemble(&self, lookup: &PrefixLookup<'_>, hits: &[PrefixHit]) -> KVCacheBlocks {
        let mut blocks = KVCacheBlocks::builder(lookup.pool.id(), lookup.pool.epoch());
        let mut ids = Vec::new();
        for group in (0..lookup.managers.len()).map(GroupId::from_index) {
            for (bucket, hit) in self.buckets.iter().zip(hits) {
                if let Some(k) = bucket.groups.iter().position(|member| *member == group) {
                    ids.clear();
                    ids.extend(hit.group(k));
                    blocks.push_group(&ids);
                }
            }
        }
        blocks
    }
}
