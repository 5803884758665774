"""The manager of the reference model: what a scheduler calls (manager 6)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from tests.model.coordinator import (
    Coordinator,
    Hits,
    HybridCoordinator,
    UnitaryCoordinator,
    manager_class,
)
from tests.model.groups import Demand, GroupSpec, Sizes
from tests.model.hashing import Request, Semantics, require
from tests.model.pool import NULL, BlockPool, Event, Row

__all__ = ["GroupSpec", "Hits", "KVCacheManager", "Sizes"]


@dataclass(frozen=True)
class Call:
    """The arguments of one allocate_slots (manager 6.3)."""

    num_new_tokens: int
    num_new_computed_tokens: int = 0
    new_computed_blocks: Hits | None = None
    num_lookahead_tokens: int = 0
    num_external_computed_tokens: int = 0
    delay_cache_blocks: bool = False
    num_encoder_tokens: int = 0
    full_sequence_must_fit: bool = False
    reserved_blocks: int = 0
    has_scheduled_reqs: bool = True
    num_in_flight_tokens: int = 0  # 0: the request's own


class KVCacheManager:
    """manager 6."""

    def __init__(
        self,
        num_blocks: int,
        groups: list[GroupSpec],
        sizes: Sizes,
        hash_block_size: int,
        semantics: Semantics,
        enable_caching: bool = True,
        use_eagle: bool = False,
        enable_kv_cache_events: bool = False,
        watermark: float = 0.0,
    ) -> None:
        self.max_model_len = sizes.max_model_len
        self.enable_caching = enable_caching
        self.semantics = semantics
        self.watermark_blocks = int(watermark * num_blocks)  # manager 6.1
        self.pool = BlockPool(
            num_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            semantics,
            num_withdrawn=sum(spec.sink_len // spec.block_size for spec in groups),
        )
        self.managers = [
            manager_class(spec)(spec, group_id, self.pool, sizes)
            for group_id, spec in enumerate(groups)
        ]
        # manager 7.1: the groups that are flagged; all of them if a drafter is on and none is.
        flagged = any(spec.is_eagle_group for spec in groups)
        for manager in self.managers:
            manager.use_eagle = manager.spec.is_eagle_group or (use_eagle and not flagged)
            manager.any_eagle = flagged or use_eagle
        self.coordinator = self._make_coordinator(sizes.scheduler_block_size)
        self.num_uncached_common_prefix_tokens = 0

    def _make_coordinator(self, scheduler_block_size: int) -> Coordinator:
        if not self.enable_caching or not self.managers:
            return Coordinator(self.managers, scheduler_block_size)
        if len(self.managers) == 1:
            return UnitaryCoordinator(self.managers, scheduler_block_size)
        credit = self.semantics.eagle_credit
        return HybridCoordinator(self.managers, scheduler_block_size, credit)

    # -- lookup

    def get_computed_blocks(self, request: Request) -> tuple[Hits, int]:
        """The longest prefix hit; nothing is pinned (manager 6.4)."""
        self.num_uncached_common_prefix_tokens = 0
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return [[] for _ in self.managers], 0
        cap = request.num_tokens - 1  # the last token is always computed
        hits, length, exceeded = self.coordinator.find_longest_hit(request, cap)
        self.num_uncached_common_prefix_tokens = exceeded
        return hits, length

    def find_longest_cache_hit_per_group(
        self, request: Request, cap: int
    ) -> tuple[Hits, list[int]]:
        """manager 7.3."""
        return self.coordinator.find_hit_per_group(request, cap)

    # -- allocation

    def allocate_slots(self, request: Request, **arguments: Any) -> Hits | None:
        """Ids of the new blocks, or None if they do not fit."""
        call = Call(**arguments)
        is_alone = self._is_alone(request)
        answer = self._try_to_allocate(request, call)
        # To refuse the only request that holds blocks for its look-ahead would refuse it for ever.
        if answer is None and is_alone and self.semantics.gate_counts_lookahead:
            answer = self._try_to_allocate(request, replace(call, num_lookahead_tokens=0))
        return answer

    def _try_to_allocate(self, request: Request, call: Call) -> Hits | None:
        """The steps of manager 6.3."""
        external = call.num_external_computed_tokens
        require(call.num_new_tokens > 0 or external > 0, "nothing to allocate")  # 1
        hits = call.new_computed_blocks or [[] for _ in self.managers]  # 2
        watermark = self._watermark(request, call)  # 4
        demand = self._demand(request, call, hits)  # 3
        if call.full_sequence_must_fit:  # 5
            needed = self.coordinator.num_blocks_needed(self._gate(request, demand), hits)
            if needed + watermark > len(self.pool.free):
                return None
        self._release_skipped(request, call, demand)  # 6
        if self._headroom(demand, hits) < watermark + call.reserved_blocks:  # 7
            return None
        # Where 0.25.1's estimate is too low, it raises half way (case C08).
        free, taken = len(self.pool.free), self.coordinator.num_blocks_taken(demand, hits)
        if taken > free:
            return None
        self.coordinator.add_computed(demand, hits)  # 8, 9
        fresh = [manager.add_new(demand) for manager in self.managers]  # 10
        assert free - len(self.pool.free) == taken, "P1"
        if not call.delay_cache_blocks:  # 11, 12: drafts that are not verified are not committed
            self.cache_blocks(request, min(demand.num_tokens_main, request.num_tokens))
        return fresh  # 13

    def _demand(self, request: Request, call: Call, hits: Hits) -> Demand:
        local = request.num_computed_tokens + call.num_new_computed_tokens
        external = call.num_external_computed_tokens
        main = min(local + external, self.max_model_len) + call.num_new_tokens
        return Demand(
            request.id,
            num_tokens=min(main + call.num_lookahead_tokens, self.max_model_len),
            num_tokens_main=main,
            total_computed=local + external,
            external=external,
            num_encoder_tokens=call.num_encoder_tokens,
            attaches=(any(hits) or external > 0) and not self.coordinator.is_running(request.id),
        )

    def _gate(self, request: Request, demand: Demand) -> Demand:
        """The demand of the whole sequence; 0.25.1 does not count look-ahead in it."""
        counts = self.semantics.gate_counts_lookahead
        lookahead = max(0, demand.num_tokens - demand.num_tokens_main) if counts else 0
        return replace(
            demand,
            num_tokens=min(request.num_tokens + lookahead, self.max_model_len),
            num_tokens_main=min(request.num_tokens, self.max_model_len),
            capped_with_lookahead=lookahead,
        )

    def _watermark(self, request: Request, call: Call) -> int:
        waiting = request.status in ("WAITING", "PREEMPTED")
        return self.watermark_blocks if call.has_scheduled_reqs and waiting else 0

    def _release_skipped(self, request: Request, call: Call, demand: Demand) -> None:
        in_flight = call.num_in_flight_tokens or request.num_in_flight_tokens
        landed = max(0, demand.total_computed - in_flight)  # case C10
        self.remove_skipped_blocks(request.id, landed, request.num_prompt_tokens)

    def _headroom(self, demand: Demand, hits: Hits) -> int:
        """How many free blocks are left by the prediction."""
        return len(self.pool.free) - self.coordinator.num_blocks_needed(demand, hits)

    def headroom(self, request: Request, **arguments: Any) -> int:
        """How many blocks may be reserved so that this call, without gate, is not yet refused."""
        call, trial = Call(**arguments), copy.deepcopy(self)
        hits = call.new_computed_blocks or [[] for _ in self.managers]
        demand = trial._demand(request, call, hits)
        trial._release_skipped(request, call, demand)
        return trial._headroom(demand, hits) - self._watermark(request, call)

    def _is_alone(self, request: Request) -> bool:
        own = {b for manager in self.managers for b in manager.row(request.id)} - {NULL}
        usable = self.pool.num_blocks - 1 - self.pool.num_withdrawn
        return len(self.pool.free) + len(own) == usable

    # -- the rest of manager 6.4

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Where allocate_slots delayed it."""
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_tokens)

    def free(self, request: Request, num_written_tokens: int | None = None) -> None:
        """One call a group, in group order, each from its tail (manager 2.2)."""
        if num_written_tokens is not None:
            for manager in self.managers:
                manager.forget_unwritten(request.id, num_written_tokens)
        for manager in self.managers:
            self.pool.free_blocks(manager.pop(request.id)[::-1])

    def pop_blocks_for_free(self, request: Request) -> Hits:
        """A list a group; the caller later gives them back (manager 1.3 T15, T16)."""
        return [manager.pop(request.id) for manager in self.managers]

    def free_popped(self, groups: Hits) -> None:
        """As the semantics say: each group from its tail, or all of them (manager 2.3 E4)."""
        if self.semantics.deferred_free_order == "group_by_group":
            for row in groups:
                self.pool.free_blocks(row[::-1])
        else:
            self.pool.free_blocks([block_id for row in groups for block_id in row][::-1])

    def remove_skipped_blocks(
        self, request_id: str, total_computed: int, num_prompt_tokens: int | None
    ) -> None:
        """Release what no later token reads."""
        for manager in self.managers:
            manager.remove_skipped(request_id, total_computed, num_prompt_tokens)

    def new_step_starts(self) -> None:
        """A scheduling step begins."""
        for manager in self.managers:
            manager.new_step_starts()

    def take_new_block_ids(self) -> Row:
        """In group order."""
        ids = [block_id for manager in self.managers for block_id in manager.new_block_ids]
        for manager in self.managers:
            manager.new_block_ids = []
        return ids

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """0 without caching."""
        if not self.enable_caching:
            return [0 for _ in self.managers]
        return [manager.num_common_prefix_blocks(request_id) for manager in self.managers]

    def get_block_ids(self, request_id: str) -> Hits:
        """Empty lists for an unknown request."""
        return [list(manager.row(request_id)) for manager in self.managers]

    def get_block_ids_for_computed_tokens(self, request_id: str, n: int) -> Hits:
        """The blocks that so many tokens fill."""
        return [manager.ids_for_computed_tokens(request_id, n) for manager in self.managers]

    def take_events(self) -> list[Event]:
        """Kind and window are filled in here, not in the pool."""
        events = self.pool.take_events()
        for event in events:
            if event["type"] == "BlockStored":
                spec = self.managers[event["group_idx"]].spec
                kind = "full_attention" if spec.kind == "rswa" else spec.kind  # groups 1.1
                event["kv_cache_spec_kind"] = kind
                event["kv_cache_spec_sliding_window"] = spec.sliding_window or None
        return events
