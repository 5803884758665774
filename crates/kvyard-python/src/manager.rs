//! `kvyard.KVCacheManager`.

use std::sync::Arc;

use kvyard_core::{
    AllocateSlots, AttentionKind, BlockId, CacheHit as CoreHit, KVCacheBlocks as CoreBlocks,
    KVCacheGroupSpec, KVCacheManager as CoreManager, KVCacheManagerConfig,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};

use crate::blocks::{BlockObjects, KVCacheBlocks, id_lists};
use crate::config::{config_count, groups, positive, positive_number};
use crate::convert::count;
use crate::error::{OrPython, PoisonedError};
use crate::event_batch::{BatchHeader, event_filter, take_event_batch};
use crate::events::{take_events, use_int_block_hashes};
use crate::lease::{BlockLease, LostLease};
use crate::metrics::KVCacheMetricsCollector;
use crate::pool::{BlockPool, evict_blocks, invariant_error, state_digest, validate};
use crate::request::{NamedRequest, RequestArgument};
use crate::results::{CacheHit, PrefixCacheStats};
use crate::semantics::Semantics;
use crate::shared::{Core, Shared, fingerprint_key};

/// The block sizes that vLLM would choose: the least common multiple of the groups' for scheduling, the
/// greatest common divisor for hashing.
fn default_block_sizes(groups: &[KVCacheGroupSpec], ranks: u32) -> (u32, u32) {
    fn gcd(a: u32, b: u32) -> u32 {
        if b == 0 { a } else { gcd(b, a % b) }
    }
    let sizes = groups.iter().map(|group| group.spec.block_size.saturating_mul(ranks).max(1));
    let scheduler = sizes.clone().fold(1, |a, b| (a / gcd(a, b)).saturating_mul(b));
    (scheduler, sizes.reduce(gcd).unwrap_or(1))
}

/// The KV-cache manager that a scheduler talks to.
#[pyclass(frozen, module = "kvyard._kvyard")]
#[derive(Debug)]
pub(crate) struct KVCacheManager {
    shared: Arc<Shared>,
    objects: Arc<BlockObjects>,
    /// Its blocks.
    #[pyo3(get)]
    block_pool: Py<BlockPool>,
    /// The one object that stands for no blocks in every group.
    #[pyo3(get)]
    empty_kv_cache_blocks: Py<KVCacheBlocks>,
    /// The configuration it was made from.
    #[pyo3(get)]
    kv_cache_config: Py<PyAny>,
    #[pyo3(get)]
    enable_caching: bool,
    #[pyo3(get)]
    log_stats: bool,
    #[pyo3(get)]
    max_model_len: u32,
    #[pyo3(get)]
    num_kv_cache_groups: usize,
    #[pyo3(get)]
    watermark_blocks: u32,
    kinds: Vec<AttentionKind>,
    /// Tokens that a block of the group with the smallest blocks holds.
    smallest_block: u32,
    use_int_block_hashes: bool,
}

impl KVCacheManager {
    /// A snapshot as an object; nothing is always the same object.
    fn wrap(&self, py: Python<'_>, core: CoreBlocks) -> PyResult<Py<KVCacheBlocks>> {
        if core.is_empty() {
            return Ok(self.empty_kv_cache_blocks.clone_ref(py));
        }
        Py::new(py, KVCacheBlocks { core, objects: self.objects.clone() })
    }

    fn with<R>(&self, py: Python<'_>, work: impl FnOnce(&mut CoreManager) -> R) -> PyResult<R> {
        self.shared.with(py, |core| work(core.manager()))
    }

    /// About as many blocks as a request holds: what its tokens fill, or what the core says of a request
    /// that is not ours. Tells long work from short, no more.
    #[inline]
    fn num_blocks_of(&self, py: Python<'_>, request: &NamedRequest<'_>) -> usize {
        if let Some(tokens) = request.num_tokens {
            return tokens / self.smallest_block as usize * self.num_kv_cache_groups;
        }
        let held = self.shared.run(py, |core| core.manager().num_blocks_held(request.name));
        held.unwrap_or(0) // a poisoned core says so in the call that follows
    }

    fn look_up(&self, request: &Bound<'_, PyAny>) -> PyResult<CoreHit> {
        let py = request.py();
        RequestArgument::new(request, &self.shared)?.with(|call, _| {
            let size = call.block_hashes.len();
            self.shared.with_sized(py, size, |core| core.manager().lookup(call))
        })
    }
}

#[pymethods]
impl KVCacheManager {
    #[new]
    #[pyo3(signature = (
        kv_cache_config, max_model_len, scheduler_block_size = None, hash_block_size = None,
        max_num_batched_tokens = None, enable_caching = true, use_eagle = false,
        log_stats = false, enable_kv_cache_events = false, dcp_world_size = 1,
        pcp_world_size = 1, metrics_collector = None, watermark = 0.0,
        semantics = Semantics(kvyard_core::Semantics::corrected()), track_new_blocks = true,
        retention_interval = None, event_groups = None, min_event_block_tokens = 0,
        verify_tokens = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature of vLLM's KVCacheManager")]
    #[expect(clippy::fn_params_excessive_bools, reason = "the signature of vLLM's KVCacheManager")]
    fn new(
        py: Python<'_>,
        kv_cache_config: Bound<'_, PyAny>,
        max_model_len: &Bound<'_, PyAny>,
        scheduler_block_size: Option<&Bound<'_, PyAny>>,
        hash_block_size: Option<&Bound<'_, PyAny>>,
        max_num_batched_tokens: Option<&Bound<'_, PyAny>>,
        enable_caching: bool,
        use_eagle: bool,
        log_stats: bool,
        enable_kv_cache_events: bool,
        dcp_world_size: i64,
        pcp_world_size: i64,
        metrics_collector: Option<Py<KVCacheMetricsCollector>>,
        watermark: f64,
        semantics: Semantics,
        track_new_blocks: bool,
        retention_interval: Option<i64>,
        event_groups: Option<Vec<i64>>,
        min_event_block_tokens: i64,
        verify_tokens: bool,
    ) -> PyResult<Self> {
        let groups = groups(&kv_cache_config)?;
        let dcp_world_size = positive_number("dcp_world_size", dcp_world_size)?;
        let pcp_world_size = positive_number("pcp_world_size", pcp_world_size)?;
        let max_model_len = positive("max_model_len", max_model_len)?;
        let ranks = dcp_world_size.saturating_mul(pcp_world_size);
        let sizes = default_block_sizes(&groups, ranks);
        let size = |field: &str, value: Option<&Bound<'_, PyAny>>, default: u32| match value {
            Some(value) => positive(field, value),
            None => Ok(default),
        };
        let smallest_block = groups
            .iter()
            .map(|group| group.spec.block_size)
            .min()
            .unwrap_or(1)
            .saturating_mul(ranks);
        let kinds: Vec<AttentionKind> = groups.iter().map(|group| group.spec.kind).collect();
        let config = KVCacheManagerConfig {
            num_blocks: positive("num_blocks", &kv_cache_config.getattr("num_blocks")?)?,
            groups,
            max_model_len,
            scheduler_block_size: size("scheduler_block_size", scheduler_block_size, sizes.0)?,
            hash_block_size: size("hash_block_size", hash_block_size, sizes.1)?,
            max_num_batched_tokens: match max_num_batched_tokens {
                Some(tokens) => positive("max_num_batched_tokens", tokens)?,
                None => max_model_len,
            },
            enable_caching,
            use_eagle,
            log_stats,
            enable_kv_cache_events,
            dcp_world_size,
            pcp_world_size,
            retention_interval: retention_interval
                .map(|tokens| config_count("retention_interval", tokens))
                .transpose()?,
            watermark,
            track_new_blocks,
            track_row_edits: false,
            verify_tokens,
            semantics: semantics.0,
        };
        let residency = metrics_collector.as_ref().map(|metrics| metrics.get().start());
        let residency = residency.transpose()?;
        let has_residency = residency.is_some();
        let filter = event_filter(event_groups, min_event_block_tokens, Some(kinds.len()))?;
        let fingerprint_key = verify_tokens.then(|| fingerprint_key(py)).transpose()?;
        let mut core = py.detach(|| CoreManager::new(config, residency)).or_python()?;
        core.pool_mut().set_event_filter(filter).or_python()?;
        let (empty, watermark_blocks) = (core.empty_kv_cache_blocks(), core.watermark_blocks());
        let shared =
            Arc::new(Shared::new(Core::Manager(Box::new(core)), has_residency, fingerprint_key));
        let pool = BlockPool::over(shared.clone(), metrics_collector);
        let objects = pool.objects.clone();
        let empty = KVCacheBlocks { core: empty, objects: objects.clone() };
        Ok(Self {
            shared,
            objects,
            block_pool: Py::new(py, pool)?,
            empty_kv_cache_blocks: Py::new(py, empty)?,
            kv_cache_config: kv_cache_config.unbind(),
            enable_caching,
            log_stats,
            max_model_len,
            num_kv_cache_groups: kinds.len(),
            watermark_blocks,
            kinds,
            smallest_block,
            use_int_block_hashes: use_int_block_hashes(),
        })
    }

    /// Share of the blocks in use, 0 to 1.
    #[getter]
    fn usage(&self, py: Python<'_>) -> PyResult<f64> {
        self.with(py, |manager| manager.usage())
    }

    /// Whose decisions it follows.
    #[getter]
    fn semantics(&self) -> Semantics {
        Semantics(self.shared.semantics)
    }

    /// Statistics so far; None unless they are kept.
    #[getter]
    fn prefix_cache_stats(&self, py: Python<'_>) -> PyResult<Option<PrefixCacheStats>> {
        self.with(py, |manager| manager.prefix_cache_stats().map(Into::into))
    }

    /// Statistics since the last call; None unless they are kept.
    fn make_prefix_cache_stats(&self, py: Python<'_>) -> PyResult<Option<PrefixCacheStats>> {
        self.with(py, |manager| manager.make_prefix_cache_stats().as_ref().map(Into::into))
    }

    /// The longest cached prefix of a request, and its length in tokens. Nothing is pinned.
    fn get_computed_blocks(
        &self,
        request: &Bound<'_, PyAny>,
    ) -> PyResult<(Py<KVCacheBlocks>, u32)> {
        let hit = self.look_up(request)?;
        Ok((self.wrap(request.py(), hit.blocks)?, hit.num_tokens))
    }

    /// As `get_computed_blocks`, with all that a lookup finds.
    fn lookup(&self, request: &Bound<'_, PyAny>) -> PyResult<CacheHit> {
        let hit = self.look_up(request)?;
        Ok(CacheHit {
            epoch: hit.epoch(),
            num_tokens: hit.num_tokens,
            num_uncached_common_prefix_tokens: hit.num_uncached_common_prefix_tokens,
            blocks: self.wrap(request.py(), hit.blocks)?,
        })
    }

    /// Each group's own longest hit, and its length in tokens for each group.
    fn find_longest_cache_hit_per_group(
        &self,
        request: &Bound<'_, PyAny>,
        max_cache_hit_length: i64,
    ) -> PyResult<(Py<KVCacheBlocks>, Vec<u32>)> {
        let py = request.py();
        let max_length = count("max_cache_hit_length", max_cache_hit_length)?;
        let (blocks, lengths) = RequestArgument::new(request, &self.shared)?.with(|call, _| {
            let size = call.block_hashes.len();
            self.shared.with_sized(py, size, |core| {
                core.manager().find_longest_cache_hit_per_group(call, max_length)
            })
        })?;
        Ok((self.wrap(py, blocks)?, lengths))
    }

    /// By how much the deepest group's hit exceeded the agreed one at the last lookup, in tokens.
    #[getter]
    fn num_uncached_common_prefix_tokens(&self, py: Python<'_>) -> PyResult<u32> {
        self.with(py, |manager| manager.num_uncached_common_prefix_tokens())
    }

    /// Blocks for a request's next tokens: the newly allocated ones, or None if they do not fit.
    #[pyo3(signature = (
        request, num_new_tokens, num_new_computed_tokens = 0, new_computed_blocks = None,
        num_lookahead_tokens = 0, num_external_computed_tokens = 0, delay_cache_blocks = false,
        num_encoder_tokens = 0, full_sequence_must_fit = false, reserved_blocks = 0,
        has_scheduled_reqs = true, num_in_flight_tokens = 0
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature of vLLM's allocate_slots")]
    fn allocate_slots(
        &self,
        request: &Bound<'_, PyAny>,
        num_new_tokens: i64,
        num_new_computed_tokens: i64,
        new_computed_blocks: Option<&Bound<'_, KVCacheBlocks>>,
        num_lookahead_tokens: i64,
        num_external_computed_tokens: i64,
        delay_cache_blocks: bool,
        num_encoder_tokens: i64,
        full_sequence_must_fit: bool,
        reserved_blocks: i64,
        has_scheduled_reqs: bool,
        num_in_flight_tokens: i64,
    ) -> PyResult<Option<Py<KVCacheBlocks>>> {
        let py = request.py();
        let num_new_tokens = count("num_new_tokens", num_new_tokens)?;
        let num_new_computed_tokens = count("num_new_computed_tokens", num_new_computed_tokens)?;
        let num_lookahead_tokens = count("num_lookahead_tokens", num_lookahead_tokens)?;
        let num_external_computed_tokens =
            count("num_external_computed_tokens", num_external_computed_tokens)?;
        let num_encoder_tokens = count("num_encoder_tokens", num_encoder_tokens)?;
        let reserved_blocks = count("reserved_blocks", reserved_blocks)?;
        let in_flight = count("num_in_flight_tokens", num_in_flight_tokens)?;
        let request = RequestArgument::new(request, &self.shared)?;
        let (blocks, row) = request.with(|call, row_hint| {
            let mut call = *call;
            // 0, the default, leaves it to the request's own field.
            if in_flight > 0 {
                call.view.num_in_flight_tokens = in_flight;
            }
            let slots = AllocateSlots {
                request: &call,
                row_hint,
                num_new_tokens,
                num_new_computed_tokens,
                new_computed_blocks: new_computed_blocks.map(|blocks| &blocks.get().core),
                num_lookahead_tokens,
                num_external_computed_tokens,
                num_encoder_tokens,
                delay_cache_blocks,
                full_sequence_must_fit,
                reserved_blocks,
                has_scheduled_reqs,
            };
            let tokens = num_new_tokens
                .saturating_add(num_new_computed_tokens)
                .saturating_add(num_external_computed_tokens);
            let size = (tokens / self.shared.hash_block_size) as usize;
            let allocated = self.shared.with_sized(py, size, |core| {
                let manager = core.manager();
                let blocks = manager.allocate_slots(&slots)?;
                let row = match row_hint {
                    Some(row) => Some(row),
                    None => manager.request_row(call.request_id),
                };
                Ok((blocks, row))
            })?;
            allocated.or_python()
        })?;
        request.set_row_hint(row);
        blocks.map(|blocks| self.wrap(py, blocks)).transpose()
    }

    /// Gives up a request: its blocks go back, tail first. An unknown request is none. With
    /// `num_written_tokens`, keys of blocks beyond those tokens are forgotten.
    #[pyo3(signature = (request, num_written_tokens = None))]
    fn free(&self, request: &Bound<'_, PyAny>, num_written_tokens: Option<i64>) -> PyResult<()> {
        let py = request.py();
        let written =
            num_written_tokens.map(|tokens| count("num_written_tokens", tokens)).transpose()?;
        RequestArgument::name(request)?.with(|request| {
            let size = self.num_blocks_of(py, &request);
            let freed = self.shared.with_sized(py, size, |core| {
                let manager = core.manager();
                if let Some(written) = written {
                    return manager.free_written(request.name, request.row_hint, written);
                }
                manager.free(request.name, request.row_hint);
                Ok(())
            })?;
            freed.or_python()
        })
    }

    /// Gives up a request and keeps its blocks held until the lease is given back.
    fn pop_blocks_for_free(&self, request: &Bound<'_, PyAny>) -> PyResult<BlockLease> {
        let py = request.py();
        let (lease, name) = RequestArgument::name(request)?.with(|request| {
            let size = self.num_blocks_of(py, &request);
            let lease = self.shared.with_sized(py, size, |core| {
                core.manager().pop_blocks_for_free(request.name, request.row_hint)
            })?;
            PyResult::Ok((lease.or_python()?, request.name.to_owned()))
        })?;
        Ok(BlockLease::new(lease, self.objects.clone(), name))
    }

    /// Gives popped blocks back, in the order that the semantics say.
    fn free_popped(&self, lease: &Bound<'_, BlockLease>) -> PyResult<()> {
        let py = lease.py();
        lease.get().release(py, &self.shared, |core, lease| core.manager().free_popped(lease))
    }

    /// Leases that were garbage-collected unreleased, oldest first. Their blocks stay held.
    fn lost_leases(&self) -> Vec<LostLease> {
        crate::lease::lost_leases(&self.objects)
    }

    /// Gives the blocks of a lost lease back, once no step in flight reads them.
    fn reclaim(&self, lease: &Bound<'_, LostLease>) -> PyResult<()> {
        crate::lease::reclaim(lease.py(), &self.objects, lease.get())
    }

    /// Releases the blocks that no later token of a request will read.
    #[pyo3(signature = (request_id, total_computed_tokens, num_prompt_tokens = None))]
    fn remove_skipped_blocks(
        &self,
        py: Python<'_>,
        request_id: &str,
        total_computed_tokens: i64,
        num_prompt_tokens: Option<i64>,
    ) -> PyResult<()> {
        let computed = count("total_computed_tokens", total_computed_tokens)?;
        let prompt =
            num_prompt_tokens.map(|tokens| count("num_prompt_tokens", tokens)).transpose()?;
        self.shared.try_with(py, |core| {
            core.manager().remove_skipped_blocks(request_id, None, computed, prompt)
        })
    }

    /// Takes all keys from blocks, in the order of the ids; references stay.
    fn evict_blocks(&self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        evict_blocks(&self.shared, block_ids)
    }

    /// Offers the blocks that a request's first tokens fill to the prefix cache.
    fn cache_blocks(&self, request: &Bound<'_, PyAny>, num_computed_tokens: i64) -> PyResult<()> {
        let py = request.py();
        let computed = count("num_computed_tokens", num_computed_tokens)?;
        let size = (computed / self.shared.hash_block_size) as usize;
        let cached = RequestArgument::new(request, &self.shared)?.with(|call, row| {
            let work = |core: &mut Core| core.manager().cache_blocks(call, row, computed);
            self.shared.with_sized(py, size, work)
        })?;
        cached.or_python()
    }

    /// Forgets the prefix cache, if no block is held. Whether it did; if not, a warning is logged that
    /// says who holds what.
    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<bool> {
        let size = self.shared.num_blocks as usize;
        let reset = self.shared.with_sized(py, size, |core| core.manager().reset_prefix_cache())?;
        let done = reset.or_python()?;
        if !done {
            let holders = self.with(py, |manager| manager.describe_holders())?;
            let logger = py.import("logging")?.call_method1("getLogger", ("kvyard",))?;
            let text = "the prefix cache was not reset: %s";
            logger.call_method1("warning", (text, holders))?;
        }
        Ok(done)
    }

    /// A list a group: how many leading blocks of a request all tracked requests share.
    fn get_num_common_prefix_blocks(
        &self,
        py: Python<'_>,
        running_request_id: &str,
    ) -> PyResult<Vec<usize>> {
        self.with(py, |manager| manager.get_num_common_prefix_blocks(running_request_id).to_vec())
    }

    /// The changes of the prefix cache since the last call, oldest first.
    fn take_events(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        take_events(py, &self.shared, &self.kinds, self.use_int_block_hashes)
    }

    /// The same as one finished payload; None if nothing changed.
    #[pyo3(
        signature = (wire_format = "router", data_parallel_rank = Some(0), ts = None),
        text_signature = "($self, wire_format='router', data_parallel_rank=0, ts=None)"
    )]
    fn take_event_batch<'py>(
        &self,
        py: Python<'py>,
        wire_format: &str,
        data_parallel_rank: Option<i64>,
        ts: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let header = BatchHeader::new(wire_format, data_parallel_rank, ts)?;
        take_event_batch(py, &self.shared, &self.kinds, self.use_int_block_hashes, &header)
    }

    /// A snapshot of a request's blocks.
    fn get_blocks(&self, py: Python<'_>, request_id: &str) -> PyResult<Py<KVCacheBlocks>> {
        let blocks = self.with(py, |manager| manager.get_blocks(request_id, None))?;
        self.wrap(py, blocks)
    }

    /// The ids of a request's blocks, a list a group.
    fn get_block_ids<'py>(
        &self,
        py: Python<'py>,
        request_id: &str,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let blocks = self.with(py, |manager| manager.get_blocks(request_id, None))?;
        id_lists(py, &blocks)
    }

    /// The ids of the blocks that a request's first tokens fill, a list a group.
    fn get_block_ids_for_computed_tokens<'py>(
        &self,
        py: Python<'py>,
        request_id: &str,
        num_computed_tokens: i64,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let computed = count("num_computed_tokens", num_computed_tokens)?;
        let blocks = self.with(py, |manager| {
            manager.get_blocks_for_computed_tokens(request_id, None, computed)
        })?;
        id_lists(py, &blocks)
    }

    /// Ids newly allocated since the last call, in group order.
    fn take_new_block_ids(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        let ids = self.with(py, CoreManager::take_new_block_ids)?;
        Ok(ids.into_iter().map(|block| block.0).collect())
    }

    /// A new step begins: what the last one wrote can be built on.
    fn new_step_starts(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, CoreManager::new_step_starts)
    }

    /// A snapshot of the given blocks, one iterable a group; the empty object for no blocks at all.
    fn create_kv_cache_blocks(&self, blocks: &Bound<'_, PyAny>) -> PyResult<Py<KVCacheBlocks>> {
        let py = blocks.py();
        let groups: Vec<Vec<BlockId>> =
            blocks.try_iter()?.map(|group| self.objects.ids(&group?)).collect::<PyResult<_>>()?;
        let epoch = self.with(py, |manager| manager.pool().epoch())?;
        let groups = groups.iter().map(Vec::as_slice);
        let blocks = CoreBlocks::from_groups(groups, self.shared.pool_id, epoch);
        self.wrap(py, blocks.with_own_lengths())
    }

    /// Checks every invariant; AssertionError names the one that does not hold.
    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        validate(py, &self.shared)
    }

    /// Checks a slice of the invariants, going on where the last call stopped.
    #[pyo3(signature = (budget = 1000))]
    fn audit(&self, py: Python<'_>, budget: i64) -> PyResult<u64> {
        let budget = count("budget", budget)? as usize;
        // A unit is a memory access, of which a block takes several.
        self.shared
            .run_sized(py, budget / 64, |core| core.manager().audit(budget))
            .map_err(|violation| invariant_error(py, &self.shared, &violation))?
            .or_python()
    }

    /// Who holds what and the last operations, as JSON. Works on a poisoned manager too.
    fn report(&self) -> PyResult<String> {
        self.shared
            .report("")
            .ok_or_else(|| PoisonedError::new_err("the state is too broken to report on"))
    }

    /// A fingerprint of the whole state.
    fn state_digest(&self, py: Python<'_>) -> PyResult<String> {
        state_digest(py, &self.shared)
    }

    fn __repr__<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        PyString::new(
            py,
            &format!(
                "KVCacheManager(num_blocks={}, groups={}, max_model_len={})",
                self.shared.num_blocks, self.num_kv_cache_groups, self.max_model_len
            ),
        )
    }
}
