//! Calls that break the contract whatever the state, and what must come of them (the *Strict* column
//! of `manager.md` §10).

use super::{World, allocate};
use crate::blocks::KVCacheBlocks;
use crate::caching::{BlockMask, CacheFullBlocks};
use crate::error::KVCacheError;
use crate::hashing::{BlockHasher, ExtraKeySource};
use crate::id::{BlockId, GroupId, length};
use crate::manager::{AllocateSlots, KVCacheManager};
use crate::op::{Misuse, Outcome};
use crate::prefix_map::MAX_GROUP;
use crate::request::Request;
use crate::spec::KVCacheManagerConfig;

use std::sync::Arc;

/// Another manager with a cached prefix.
#[derive(Debug)]
pub(super) struct Foreign {
    manager: KVCacheManager,
    hit: KVCacheBlocks,
}

impl Foreign {
    pub(super) fn new(hasher: &BlockHasher) -> Self {
        let size = length(hasher.hash_block_size());
        let config = KVCacheManagerConfig::new(9, size, 16 * size);
        let mut manager = KVCacheManager::new(config, None).expect("a valid configuration");
        let keys = Arc::new(ExtraKeySource::default());
        let prompt = (0..=2 * size).collect();
        let request = Request::new("foreign", prompt, keys, Some(Arc::new(hasher.clone())));
        let call = request.call(false);
        let fresh = manager.allocate_slots(&AllocateSlots::new(&call, 2 * size + 1));
        assert!(fresh.is_ok_and(|fresh| fresh.is_some()));
        let hit = manager.lookup(&call).blocks;
        Self { manager, hit }
    }
}

impl World {
    pub(super) fn misuse(&mut self, kind: Misuse, request: u32) -> Outcome {
        use KVCacheError as Error;
        let outcome = match kind {
            Misuse::ForeignLease => self.free_foreign_lease(),
            Misuse::NoSuchBlock => self.name_no_block(),
            Misuse::TooManyBlocks => {
                let free = self.manager.pool().num_free_blocks();
                let result = self.manager.pool_mut().get_new_blocks(free + 1);
                result.map(drop).into()
            }
            Misuse::NoSuchGroup | Misuse::MaskLength => self.cache_wrongly(kind, request),
            Misuse::CacheUnknownRequest | Misuse::CacheBeyondRow => {
                self.cache_beyond(kind, request)
            }
            _ => self.allocate_wrongly(kind, request),
        };
        let expected = match (kind, &outcome) {
            (_, Outcome::Nothing | Outcome::Error(Error::OutOfMemory(_))) => true,
            (Misuse::ForeignLease, Outcome::Error(error)) => {
                matches!(error, Error::ForeignBlock { .. })
            }
            (Misuse::ForeignHit, Outcome::Error(error)) => matches!(
                error,
                Error::ForeignBlock { .. }
                    | Error::AlreadyTracked { .. }
                    | Error::InvalidArgument { .. }
            ),
            (Misuse::TooManyBlocks, Outcome::Error(error)) => {
                matches!(error, Error::OutOfBlocks { .. })
            }
            (Misuse::CacheUnknownRequest, Outcome::Error(error)) => {
                matches!(error, Error::UnknownRequest { .. })
            }
            (Misuse::HitMismatch, Outcome::Error(error)) => matches!(
                error,
                Error::InvalidArgument { .. }
                    | Error::AlreadyTracked { .. }
                    | Error::StaleBlock { .. }
            ),
            (_, Outcome::Error(error)) => matches!(error, Error::InvalidArgument { .. }),
            _ => false,
        };
        assert!(expected, "{kind:?} gave {outcome:?}");
        outcome
    }

    fn free_foreign_lease(&mut self) -> Outcome {
        let pool = self.foreign.manager.pool_mut();
        let lease = pool.get_new_blocks(1).expect("some are free");
        let mine = self.manager.pool_mut().free(lease);
        let Err((error, lease)) = mine else {
            return Outcome::Done;
        };
        let theirs = self.foreign.manager.pool_mut().free(lease);
        assert!(theirs.is_ok(), "the lease came back whole");
        Outcome::Error(error)
    }

    fn name_no_block(&mut self) -> Outcome {
        let pool = self.manager.pool_mut();
        let beyond = [BlockId(pool.num_blocks())];
        let results =
            [pool.evict_blocks(&beyond), pool.free_counted(&beyond), pool.touch(&beyond).map(drop)];
        let refused = |result: &Result<(), KVCacheError>| result.is_err();
        assert!(results.iter().all(refused), "{results:?}");
        let [first, ..] = results;
        first.into()
    }

    fn cache_wrongly(&mut self, kind: Misuse, request: u32) -> Outcome {
        let Some(at) = self.actor(request) else {
            return Outcome::Nothing;
        };
        let (block_size, group) = self.pool_block(0);
        let call = self.actors[at].request.call(true);
        let span = CacheFullBlocks {
            request: &call,
            row: &[BlockId(0)],
            start: 0,
            stop: 1,
            block_size,
            group: if kind == Misuse::NoSuchGroup { GroupId(MAX_GROUP + 1) } else { group },
            mask: if kind == Misuse::MaskLength {
                BlockMask::Flags(&[true, true])
            } else {
                BlockMask::All
            },
        };
        self.manager.pool_mut().cache_full_blocks(&span).into()
    }

    fn cache_beyond(&mut self, kind: Misuse, request: u32) -> Outcome {
        let Some(at) = self.actor(request).filter(|_| !self.drives_pool) else {
            return Outcome::Nothing;
        };
        let request = &self.actors[at].request;
        let id = request.request_id();
        let tracked = self.manager.request_row(id).is_some();
        let grouped = !self.manager.single_type_managers().is_empty();
        if !(self.manager.config().enable_caching && grouped)
            || tracked == (kind == Misuse::CacheUnknownRequest)
        {
            return Outcome::Nothing;
        }
        let size = self.manager.config().block_size(0);
        let beyond = length(self.manager.get_blocks(id, None).ids().len() + 1) * size;
        let call = request.call(true);
        self.manager.cache_blocks(&call, None, beyond).into()
    }

    fn allocate_wrongly(&mut self, kind: Misuse, request: u32) -> Outcome {
        let Some(at) = self.actor(request).filter(|_| !self.drives_pool) else {
            return Outcome::Nothing;
        };
        let actor = &self.actors[at];
        let call = actor.request.call(true);
        let longest = self.manager.config().max_model_len;
        let mut arguments = AllocateSlots::new(&call, 1);
        match kind {
            Misuse::ExternalBeyondMaxModelLen => {
                arguments.num_external_computed_tokens = longest + 1;
            }
            Misuse::HugeCounts => arguments.num_new_tokens = u32::MAX,
            Misuse::HitWithoutBlocks => arguments.num_new_computed_tokens = 4,
            Misuse::HitMismatch => {
                let Some(hit) = actor.hit.as_ref().filter(|hit| !hit.blocks.is_empty()) else {
                    return Outcome::Nothing;
                };
                arguments.new_computed_blocks = Some(&hit.blocks);
                arguments.num_new_computed_tokens = hit.num_tokens + 1;
            }
            Misuse::ForeignHit => {
                arguments.new_computed_blocks = Some(&self.foreign.hit);
                arguments.num_new_computed_tokens = 2 * self.manager.config().hash_block_size;
            }
            _ => arguments.num_new_tokens = 0,
        }
        allocate(&mut self.manager, &arguments, false)
    }
}
