//! Carries the operations of a schedule out on a manager, remembers what the manager may not know (who
//! holds what outside it), and checks after each operation what must hold.

mod audit;
mod misuse;
mod pool;
mod presets;

pub use presets::presets;

use std::sync::Arc;

use audit::Audit;
use misuse::Foreign;

use crate::blocks::BlockLease;
use crate::caching::MergedBlockHashes;
use crate::error::{KVCacheError, Result};
use crate::hashing::{BlockHasher, ExtraKeySource, HashAlgorithm, Lora, MediaItem, Texts};
use crate::id::{BlockId, GroupId, length};
use crate::manager::{AllocateSlots, CacheHit, KVCacheManager};
use crate::memory::faults;
use crate::op::{AllocateOp, BlockChoice, HitUse, Identity, Op, Outcome};
use crate::request::Request;
use crate::request_view::RequestStatus;
use crate::semantics::CommonPrefix;
use crate::spec::{AttentionKind, KVCacheManagerConfig};

/// What a world is made of.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// The manager's arguments.
    pub manager: KVCacheManagerConfig,
    /// Only the pool is used, with blocks of several hash blocks in two groups.
    pub drives_pool: bool,
}

/// A request of the schedule and its last lookup.
#[derive(Debug)]
pub(super) struct Actor {
    request: Request,
    hit: Option<CacheHit>,
}

/// See the module.
#[derive(Debug)]
pub struct World {
    manager: KVCacheManager,
    drives_pool: bool,
    hasher: Arc<BlockHasher>,
    actors: Vec<Actor>,
    leases: Vec<BlockLease>,
    audit: Audit,
    num_created: u32,
    foreign: Foreign,
}

/// Hash blocks in a block of a world that drives the pool.
const POOL_BLOCK: u32 = 3;

/// Requests at a time.
const MAX_ACTORS: usize = 10;

/// Slice of the audit after each operation: passes begin and end anywhere in a schedule.
const AUDIT_BUDGET: usize = 37;

/// Blocks in an operation that names blocks.
const MAX_CHOICES: usize = 6;

impl World {
    /// A manager of free blocks and no requests.
    ///
    /// # Panics
    /// If the configuration is refused.
    pub fn new(config: &WorldConfig) -> Self {
        let mut manager =
            KVCacheManager::new(config.manager.clone(), None).expect("a valid preset");
        manager.audit(0).expect("memory");
        let algorithm = HashAlgorithm::XxHashCbor;
        let root = algorithm.hash_text("0");
        let hash_block_size = config.manager.hash_block_size;
        let hasher = BlockHasher::new(algorithm, root, hash_block_size, config.manager.semantics)
            .expect("a valid preset");
        Self {
            audit: Audit::new(&manager),
            foreign: Foreign::new(&hasher),
            manager,
            drives_pool: config.drives_pool,
            hasher: Arc::new(hasher),
            actors: Vec::new(),
            leases: Vec::new(),
            num_created: 0,
        }
    }

    /// The manager.
    pub fn manager(&self) -> &KVCacheManager {
        &self.manager
    }

    /// The request that an operand means.
    pub fn request(&self, request: u32) -> Option<&Request> {
        self.actor(request).map(|at| &self.actors[at].request)
    }

    /// The blocks that operands mean.
    pub fn resolve(&self, choices: &[BlockChoice]) -> Vec<BlockId> {
        let choices = &choices[..choices.len().min(MAX_CHOICES)];
        choices.iter().map(|choice| self.block(*choice)).collect()
    }

    /// The block of a lease that an operand means.
    pub fn lease(&self, lease: u32) -> Option<&BlockLease> {
        self.leases.get(lease as usize % self.leases.len().max(1))
    }

    /// Tokens per block in calls of the pool, and the group that an operand means.
    pub fn pool_block(&self, group: u32) -> (u32, GroupId) {
        let size = self.manager.config().hash_block_size;
        if self.drives_pool { (POOL_BLOCK * size, GroupId(group % 2)) } else { (size, GroupId(0)) }
    }

    /// Carries an operation out and checks everything that must hold then.
    ///
    /// # Panics
    /// If something does not.
    pub fn execute(&mut self, op: &Op) -> Outcome {
        let before = self.manager.state_digest();
        let outcome = self.perform(op);
        // An allocation may look up first; it compares by itself.
        if matches!(outcome, Outcome::Error(_)) && !matches!(op, Op::Allocate(_)) {
            let after = self.manager.state_digest();
            assert_eq!(before, after, "I14: {op:?} changed the state: {outcome:?}");
        }
        self.check();
        outcome
    }

    /// Carries an operation out with its `k`-th request for memory refused. None if it made so many:
    /// then it has failed and changed nothing. Else it is done.
    ///
    /// # Panics
    /// If something does not hold.
    pub fn execute_with_fault(&mut self, op: &Op, k: u64) -> Option<Outcome> {
        faults::fail_at(k);
        let outcome = self.execute(op);
        if faults::is_pending() {
            faults::fail_at(0);
            return Some(outcome);
        }
        let refused = matches!(outcome, Outcome::Error(KVCacheError::OutOfMemory(_)));
        assert!(refused, "{op:?}, request {k} for memory: {outcome:?}");
        None
    }

    /// Checks what must hold between operations.
    ///
    /// # Panics
    /// If something does not.
    pub fn check(&mut self) {
        self.manager.validate();
        let audited = self.manager.audit(AUDIT_BUDGET);
        assert!(audited.is_ok(), "{audited:?}");
        self.audit.check(&mut self.manager, &self.actors);
    }

    fn perform(&mut self, op: &Op) -> Outcome {
        match op {
            Op::NewRequest { prefix, shared, own, identity } => {
                self.new_request(*prefix, *shared, *own, *identity)
            }
            Op::Misuse { kind, request } => self.misuse(*kind, *request),
            Op::FreeLease { .. }
            | Op::DissolveLease { .. }
            | Op::LeaseCounted { .. }
            | Op::FreeCounted { .. }
            | Op::GetNewBlocks { .. }
            | Op::Touch { .. }
            | Op::CacheFull { .. }
            | Op::CachePartial { .. }
            | Op::Evict { .. }
            | Op::Reset
            | Op::TakeEvents => self.perform_on_pool(op),
            _ if self.drives_pool => Outcome::Nothing,
            Op::TakeNewBlockIds => {
                let expected = std::mem::take(&mut self.audit.new_block_ids);
                assert_eq!(self.manager.take_new_block_ids(), expected, "new block ids");
                Outcome::Done
            }
            _ => self.perform_on_request(op),
        }
    }

    fn perform_on_request(&mut self, op: &Op) -> Outcome {
        let (Op::Append { request, .. }
        | Op::SetComputed { request, .. }
        | Op::Preempt { request }
        | Op::Lookup { request }
        | Op::Allocate(AllocateOp { request, .. })
        | Op::CacheBlocks { request, .. }
        | Op::Free { request }
        | Op::FreeWritten { request, .. }
        | Op::Pop { request }
        | Op::Read { request }
        | Op::RemoveSkipped { request, .. }) = op
        else {
            unreachable!("{op:?} is no operation on a request");
        };
        let Some(at) = self.actor(*request) else {
            return Outcome::Nothing;
        };
        let request = &mut self.actors[at].request;
        let id = request.request_id().clone();
        match op {
            Op::Append { count, .. } => self.append(at, count % 8),
            Op::SetComputed { num_tokens, .. } => {
                let all = length(request.num_tokens());
                request.num_computed_tokens = (*num_tokens).min(all);
                Outcome::Done
            }
            Op::Preempt { .. } => {
                request.num_computed_tokens = 0;
                request.num_preemptions += 1;
                request.status = RequestStatus::Preempted;
                self.manager.free(&id, None);
                Outcome::Done
            }
            Op::Lookup { .. } => self.lookup(at),
            Op::Allocate(op) => self.allocate(at, op),
            Op::CacheBlocks { num_tokens, .. } => {
                let end = (*num_tokens).min(request.num_computed_tokens);
                let call = self.actors[at].request.call(true);
                self.manager.cache_blocks(&call, None, end).into()
            }
            Op::Free { .. } => {
                self.manager.free(&id, None);
                self.actors.swap_remove(at);
                Outcome::Done
            }
            Op::FreeWritten { num_tokens, .. } => {
                let written = (*num_tokens).min(request.num_computed_tokens);
                let freed = self.manager.free_written(&id, None, written);
                freed.map_or_else(Outcome::Error, |()| {
                    self.actors.swap_remove(at);
                    Outcome::Done
                })
            }
            Op::Pop { .. } => {
                let lease = self.manager.pop_blocks_for_free(&id, None);
                lease.map_or_else(Outcome::Error, |lease| {
                    self.actors.swap_remove(at);
                    self.keep(lease)
                })
            }
            Op::RemoveSkipped { num_tokens, .. } => {
                let end = (*num_tokens).min(request.num_computed_tokens);
                let prompt = Some(request.view().num_prompt_tokens);
                self.manager.remove_skipped_blocks(&id, None, end, prompt).into()
            }
            _ => self.read(at),
        }
    }

    // ------------------------------------------------------------------------------------- requests

    fn new_request(&mut self, prefix: u32, shared: u32, own: u32, identity: Identity) -> Outcome {
        if self.actors.len() == MAX_ACTORS {
            return Outcome::Nothing;
        }
        let prefix = (prefix % 3) * 1000;
        let shared = (0..shared % 33).map(|at| prefix + at);
        let first_own = 100_000 + self.num_created * 100;
        let own = (0..own % 9).map(|at| first_own + at);
        let mut prompt: Vec<u32> = shared.chain(own).collect();
        if prompt.is_empty() {
            prompt.push(first_own);
        }
        let keys = Arc::new(extra_keys(identity));
        let id = format!("r{}", self.num_created);
        let request = Request::new(id, prompt, keys, Some(self.hasher.clone()));
        self.num_created += 1;
        self.actors.push(Actor { request, hit: None });
        Outcome::Done
    }

    /// Outputs depend on their position only, so that requests of one prefix go on alike.
    fn append(&mut self, at: usize, count: u32) -> Outcome {
        let request = &mut self.actors[at].request;
        let room = self.manager.config().max_model_len;
        let first = length(request.num_tokens());
        let end = (first + count).min(room);
        let tokens: Vec<u32> = (first..end).map(|token| token + 500).collect();
        request.append_output_tokens(&tokens);
        Outcome::Done
    }

    fn lookup(&mut self, at: usize) -> Outcome {
        let Actor { request, hit } = &mut self.actors[at];
        let found = self.manager.lookup(&request.call(false));
        let pool = self.manager.pool();
        for (index, manager) in self.manager.single_type_managers().iter().enumerate() {
            let blocks = found.blocks.blocks(index);
            assert_eq!(
                length(blocks.len()) * manager.block_size(),
                found.num_tokens,
                "I16: every group has the whole hit"
            );
            let size = self.manager.config().hash_block_size;
            let hashes = MergedBlockHashes::new(request.block_hashes(), manager.block_size(), size);
            for (at, block) in blocks.iter().enumerate().filter(|(_, block)| !block.is_null()) {
                let keyed = pool.prefix_map().contains(hashes.get(at), manager.group(), *block);
                assert!(keyed, "I17: block {block} of a hit is not cached");
            }
        }
        assert!(found.num_tokens < length(request.num_tokens()), "the last token is never a hit");
        let num_tokens = found.num_tokens;
        *hit = Some(found);
        Outcome::Hit(num_tokens)
    }

    fn allocate(&mut self, at: usize, op: &AllocateOp) -> Outcome {
        let computed = self.actors[at].request.num_computed_tokens;
        if op.hit == HitUse::Fresh && computed == 0 {
            self.lookup(at);
        }
        let Actor { request, hit } = &mut self.actors[at];
        let hit = hit.as_ref().filter(|_| match op.hit {
            HitUse::Nothing => false,
            HitUse::Fresh => computed == 0,
            HitUse::Last => true,
        });
        request.num_in_flight_tokens = (op.num_in_flight_tokens % 4).min(computed);
        let local = computed + hit.map_or(0, |hit| hit.num_tokens);
        let left = length(request.num_tokens()).saturating_sub(local);
        let row = self.manager.get_blocks(request.request_id(), None);
        let external =
            if row.is_empty() { (op.num_external_computed_tokens % 16).min(left) } else { 0 };
        let new = (op.num_new_tokens % 24).min(left - external);
        let drafts = op.num_draft_tokens % 4;
        if new + drafts + external == 0 {
            return Outcome::Nothing;
        }
        let call = request.call(true);
        let arguments = AllocateSlots {
            num_new_computed_tokens: hit.map_or(0, |hit| hit.num_tokens),
            new_computed_blocks: hit.map(|hit| &hit.blocks),
            num_encoder_tokens: if computed == 0 { 6 } else { 0 },
            num_lookahead_tokens: op.num_lookahead_tokens % 5,
            num_external_computed_tokens: external,
            delay_cache_blocks: op.has(AllocateOp::DELAY_CACHE_BLOCKS),
            full_sequence_must_fit: op.has(AllocateOp::FULL_SEQUENCE_MUST_FIT),
            reserved_blocks: op.reserved_blocks % 4,
            has_scheduled_reqs: !op.has(AllocateOp::NOTHING_SCHEDULED),
            ..AllocateSlots::new(&call, new + drafts)
        };
        let outcome = allocate(&mut self.manager, &arguments, op.has(AllocateOp::SPLIT));
        if let Outcome::Blocks(_) = outcome {
            self.audit.admitted(&self.manager, &arguments, &row);
            request.num_computed_tokens = local + external + new;
            request.status = RequestStatus::Running;
        }
        outcome
    }

    fn read(&self, at: usize) -> Outcome {
        let request = &self.actors[at].request;
        let id = request.request_id();
        let computed = request.num_computed_tokens;
        let filled = self.manager.get_blocks_for_computed_tokens(id, None, computed);
        let row = self.manager.get_blocks(id, None);
        let common = self.manager.get_num_common_prefix_blocks(id);
        let rows: Vec<_> = self
            .actors
            .iter()
            .filter(|actor| self.manager.request_row(actor.request.request_id()).is_some())
            .map(|actor| self.manager.get_blocks(actor.request.request_id(), None))
            .collect();
        for (group, common) in common.iter().enumerate() {
            let row = row.blocks(group);
            assert!(row.starts_with(filled.blocks(group)));
            assert!(*common <= row.len());
            let semantics = self.manager.config().semantics;
            let exact = semantics.common_prefix == CommonPrefix::RowMembership;
            let kind = self.manager.single_type_managers()[group].kind();
            if exact && kind.is_full_attention() && self.manager.config().enable_caching {
                let is_shared = |block: &&BlockId| {
                    !block.is_null() && rows.iter().all(|row| row.blocks(group).contains(block))
                };
                assert_eq!(*common, row.iter().take_while(is_shared).count(), "C07");
            }
        }
        Outcome::Done
    }

    // ------------------------------------------------------------------------------------- operands

    pub(super) fn actor(&self, request: u32) -> Option<usize> {
        (request as usize).checked_rem(self.actors.len())
    }

    pub(super) fn block(&self, choice: BlockChoice) -> BlockId {
        let held = self.audit.counted();
        match choice {
            BlockChoice::HandedOut(index) if !held.is_empty() => {
                held[usize::from(index) % held.len()]
            }
            BlockChoice::HandedOut(index) | BlockChoice::Any(index) => {
                BlockId(u32::from(index) % (self.manager.pool().num_blocks() + 1))
            }
        }
    }
}

/// `allocate_slots`, whole or in its three parts, with the digest compared where nothing may change.
pub(super) fn allocate(
    manager: &mut KVCacheManager,
    arguments: &AllocateSlots<'_>,
    split: bool,
) -> Outcome {
    let id = arguments.request.request_id;
    let before = (manager.state_digest(), manager.get_blocks(id, None));
    let result = if split {
        allocate_in_parts(manager, arguments)
    } else {
        manager.allocate_slots(arguments)
    };
    let unchanged = manager.state_digest() == before.0;
    match result {
        Ok(Some(fresh)) => Outcome::Blocks(fresh.ids().to_vec()),
        Ok(None) => {
            let released = manager.get_blocks(id, None).ids() != before.1.ids();
            assert!(unchanged || released, "I14: a refusal changed the state");
            Outcome::Refused
        }
        Err(error) => {
            assert!(unchanged, "I14: an error changed the state: {error}");
            Outcome::Error(error)
        }
    }
}

fn allocate_in_parts(
    manager: &mut KVCacheManager,
    arguments: &AllocateSlots<'_>,
) -> Result<Option<crate::blocks::KVCacheBlocks>> {
    let before = manager.state_digest();
    let mut plan = manager.plan_allocate_slots(arguments)?;
    manager.reserve_allocate_slots(&mut plan)?;
    assert_eq!(before, manager.state_digest(), "reserving grows capacity only");
    let admitted = plan.is_admitted();
    let fresh = manager.apply_allocate_slots(plan);
    assert_eq!(fresh.is_some(), admitted, "a plan knows its outcome");
    Ok(fresh)
}

/// Whether vLLM records newly allocated ids of this kind.
pub(super) fn records_new_blocks(kind: AttentionKind) -> bool {
    matches!(kind, AttentionKind::FullAttention | AttentionKind::MLAAttention)
}

fn extra_keys(identity: Identity) -> ExtraKeySource {
    let mut texts = Texts::default();
    let (mut lora, mut media, mut salt) = (None, Vec::new(), None);
    match identity {
        Identity::Plain => {}
        Identity::Lora => {
            let name = texts.distinct("adapter");
            lora = Some(Lora { name, path: None, id: 1 });
        }
        Identity::Salt => salt = Some(texts.distinct("salt")),
        Identity::Media => {
            media = [(1, 4), (6, 9)]
                .map(|(offset, length)| MediaItem {
                    identifier: texts.distinct(format!("image {offset}")),
                    offset,
                    length,
                })
                .to_vec();
        }
    }
    ExtraKeySource::new(lora, media, salt, None).expect("items are in order")
}
