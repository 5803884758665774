"""The manager of the reference model, for at most one attention group."""

from __future__ import annotations

from dataclasses import dataclass

from tests.model.hashing import Request, Semantics, ceil_div, require
from tests.model.pool import NULL, BlockPool, Event, Row


@dataclass(frozen=True)
class GroupSpec:
    """The one group: "full_attention", "mla_attention" or "rswa"."""

    kind: str
    block_size: int
    rswa_window: int = 0
    is_eagle_group: bool = False


@dataclass(frozen=True)
class Demand:
    """What one allocate_slots asks for (manager 6.3)."""

    request_id: str
    num_tokens: int  # tokens that need a slot, look-ahead included


class GroupManager:
    """Full attention, MLA and R-SWA (groups 2.1, 2.2, 2.4)."""

    def __init__(self, spec: GroupSpec, pool: BlockPool, context_parallel: int) -> None:
        self.spec = spec
        self.pool = pool
        self.block_size = spec.block_size * context_parallel  # groups 2
        self.use_eagle = False
        self.rows: dict[str, Row] = {}
        self.num_cached: dict[str, int] = {}  # presence of the id means "already running"
        self.new_block_ids: list[int] = []

    def row(self, request_id: str) -> Row:
        """The row, without making an entry."""
        return self.rows.get(request_id, [])

    def num_blocks_needed(self, demand: Demand, hits: Row) -> int:
        """The prediction that admission rests on (groups 2.1.2)."""
        total = ceil_div(demand.num_tokens, self.block_size)
        have = len(self.row(demand.request_id))
        if demand.request_id in self.num_cached:
            require(not hits, "hits for a running request")
            return max(total - have, 0)
        return max(total - len(hits) - have, 0) + self.pool.evictable(hits)

    def add_computed(self, request_id: str, hits: Row, local: int, external: int) -> None:
        """Attach a hit, then storage for tokens that a connector supplies (groups 2.1.4, 2.1.5)."""
        if request_id in self.num_cached:
            require(not hits, "hits for a running request")
            return
        require(not self.row(request_id), "hits for a request that already has blocks")
        self.pool.touch(hits)
        self.rows[request_id] = list(hits)
        self.num_cached[request_id] = len(hits)
        if external > 0:
            self._extend(request_id, ceil_div(local + external, self.block_size) - len(hits))

    def add_new(self, demand: Demand) -> Row:
        """Blocks for the tokens of this step (groups 2.1.6)."""
        row = self.rows.setdefault(demand.request_id, [])
        needed = ceil_div(demand.num_tokens, self.block_size) - len(row)
        return self._extend(demand.request_id, max(0, needed))

    def _extend(self, request_id: str, n: int) -> Row:
        fresh = self.pool.get_new_blocks(n)
        self.rows[request_id] += fresh
        if self.spec.kind != "rswa":  # groups 2.1.6: the kinds whose new blocks are zeroed
            self.new_block_ids += fresh
        return fresh

    def find_hit(self, hashes: list[bytes], max_length: int) -> Row:
        """The longest usable hit of at most max_length tokens (groups 2.2)."""
        hit: Row = []
        for block_hash in hashes[: max_length // self.block_size]:
            found = self.pool.lookup(block_hash, 0)
            if found is None:
                break
            hit.append(found)
        return hit[:-1] if self.use_eagle else hit

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Hash the blocks that the first num_tokens tokens fill (groups 2.1.7)."""
        start, stop = self.num_cached.get(request.id, 0), num_tokens // self.block_size
        if start < stop:
            row = self.rows[request.id]
            self.pool.cache_full_blocks(request, row, start, stop, self.block_size, 0)
            self.num_cached[request.id] = stop

    def pop(self, request_id: str) -> Row:
        """Forget the request; its references pass to the caller (groups 2.1.8)."""
        self.num_cached.pop(request_id, None)
        return self.rows.pop(request_id, [])

    def remove_skipped(
        self, request_id: str, total_computed: int, num_prompt_tokens: int | None
    ) -> None:
        """Release the gap between prompt and window, up to the first null met (groups 2.4)."""
        if self.spec.kind != "rswa" or num_prompt_tokens is None:
            return
        low = ceil_div(num_prompt_tokens, self.block_size)
        window_start = total_computed - self.spec.rswa_window
        high = max(num_prompt_tokens, window_start) // self.block_size
        row, released = self.row(request_id), []
        for position in reversed(range(low, min(high, len(row)))):
            if row[position] == NULL:
                break
            released.append(row[position])
            row[position] = NULL
        self.pool.free_blocks(released)

    def num_common_prefix_blocks(self, request_id: str) -> int:
        """Leading blocks that all requests share (manager 6.4, case C07)."""
        count = 0
        for position, block_id in enumerate(self.row(request_id)):
            if self.pool.semantics.common_prefix == "references":
                common = self.pool.blocks[block_id].ref_cnt == len(self.rows)
            else:
                common = all(
                    row[position : position + 1] == [block_id] for row in self.rows.values()
                )
            if block_id == NULL or not common:
                break
            count += 1
        return count

    def ids_for_computed_tokens(self, request_id: str, n: int) -> Row:
        """manager 6.4: 0.25.1 divides by the block size of one rank (W11)."""
        scaled = self.pool.semantics.computed_ids_under_cp
        block_size = self.block_size if scaled else self.spec.block_size
        return self.row(request_id)[: ceil_div(n, block_size)]


class KVCacheManager:
    """manager 6, with no group (caching off) or one."""

    def __init__(
        self,
        num_blocks: int,
        groups: list[GroupSpec],
        max_model_len: int,
        hash_block_size: int,
        semantics: Semantics,
        enable_caching: bool = True,
        use_eagle: bool = False,
        enable_kv_cache_events: bool = False,
        context_parallel: int = 1,
        watermark: float = 0.0,
    ) -> None:
        require(len(groups) <= 1, "the model knows one group")
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.semantics = semantics
        self.watermark_blocks = int(watermark * num_blocks)  # manager 6.1
        self.pool = BlockPool(
            num_blocks, enable_caching, hash_block_size, enable_kv_cache_events, semantics
        )
        self.managers = [GroupManager(spec, self.pool, context_parallel) for spec in groups]
        for manager in self.managers:  # manager 7.1: none flagged means all
            manager.use_eagle = manager.spec.is_eagle_group or use_eagle

    def get_computed_blocks(self, request: Request) -> tuple[list[Row], int]:
        """The longest prefix hit; nothing is pinned (manager 6.4)."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return [[] for _ in self.managers], 0
        [manager] = self.managers
        cap = request.num_tokens - 1  # the last token is always computed
        hit = manager.find_hit(request.hashes_for(manager.block_size), cap)
        return [hit], len(hit) * manager.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: list[Row] | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        num_in_flight_tokens: int | None = None,
    ) -> list[Row] | None:
        """Ids of the new blocks, or None if they do not fit; steps as in manager 6.3."""
        external = num_external_computed_tokens
        require(num_new_tokens > 0 or external > 0, "nothing to allocate")  # 1
        hits = new_computed_blocks or [[] for _ in self.managers]  # 2
        local = request.num_computed_tokens + num_new_computed_tokens  # 3
        total = min(local + external, self.max_model_len)
        waiting = request.status in ("WAITING", "PREEMPTED")  # 4
        watermark = self.watermark_blocks if has_scheduled_reqs and waiting else 0
        main = total + num_new_tokens
        slots = min(main + num_lookahead_tokens, self.max_model_len)
        if self._gives_up_lookahead(request, hits, main, slots):
            slots = min(main, self.max_model_len)
        if full_sequence_must_fit:  # 5
            counted = slots - main if self.semantics.gate_counts_lookahead else 0
            full = min(request.num_tokens + max(counted, 0), self.max_model_len)
            if self._needed(Demand(request.id, full), hits) + watermark > len(self.pool.free):
                return None
        # 6
        in_flight = num_in_flight_tokens
        if in_flight is None:
            in_flight = request.num_in_flight_tokens
        landed = max(0, total - in_flight)  # case C10
        self.remove_skipped_blocks(request.id, landed, request.num_prompt_tokens)
        demand = Demand(request.id, slots)  # 7
        if self._needed(demand, hits) + watermark > len(self.pool.free) - reserved_blocks:
            return None
        if any(hits) or external > 0:  # 8, 9
            for manager, blocks in zip(self.managers, hits, strict=True):
                manager.add_computed(request.id, blocks, local, external)
        fresh = [manager.add_new(demand) for manager in self.managers]  # 10
        if not delay_cache_blocks:  # 11, 12: drafts that are not verified are not committed
            self.cache_blocks(request, min(main, request.num_tokens))
        return fresh  # 13

    def _needed(self, demand: Demand, hits: list[Row]) -> int:
        pairs = zip(self.managers, hits, strict=True)
        return sum(manager.num_blocks_needed(demand, blocks) for manager, blocks in pairs)

    def _gives_up_lookahead(self, request: Request, hits: list[Row], main: int, slots: int) -> bool:
        """Whether a lone request must do without look-ahead (`gate_counts_lookahead`).

        Where no other block is held, nothing will ever become free: to refuse it for its look-ahead
        would refuse it for ever.
        """
        if not self.semantics.gate_counts_lookahead or slots <= main:
            return False
        own = {b for manager in self.managers for b in manager.row(request.id)} - {NULL}
        alone = len(self.pool.free) + len(own) == self.pool.num_blocks - 1
        whole = min(max(request.num_tokens, main) + slots - main, self.max_model_len)
        return alone and self._needed(Demand(request.id, whole), hits) > len(self.pool.free)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """manager 6.4."""
        if self.enable_caching:
            for manager in self.managers:
                manager.cache_blocks(request, num_tokens)

    def free(self, request: Request) -> None:
        """manager 2.2: reversed, so that the tail is evicted before the head."""
        self.free_popped(self.pop_blocks_for_free(request))

    def pop_blocks_for_free(self, request: Request) -> Row:
        """The caller later gives them to `free_popped` (manager 1.3 T15, T16)."""
        return [block_id for manager in self.managers for block_id in manager.pop(request.id)]

    def free_popped(self, block_ids: Row) -> None:
        """With one group the order of an immediate free."""
        self.pool.free_blocks(block_ids[::-1])

    def remove_skipped_blocks(
        self, request_id: str, total_computed: int, num_prompt_tokens: int | None
    ) -> None:
        """manager 6.4."""
        for manager in self.managers:
            manager.remove_skipped(request_id, total_computed, num_prompt_tokens)

    def take_new_block_ids(self) -> Row:
        """manager 6.4."""
        ids = [block_id for manager in self.managers for block_id in manager.new_block_ids]
        for manager in self.managers:
            manager.new_block_ids = []
        return ids

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """manager 6.4: 0 without caching."""
        if not self.enable_caching:
            return [0 for _ in self.managers]
        return [manager.num_common_prefix_blocks(request_id) for manager in self.managers]

    def get_block_ids(self, request_id: str) -> list[Row]:
        """manager 6.4."""
        return [list(manager.row(request_id)) for manager in self.managers]

    def get_block_ids_for_computed_tokens(self, request_id: str, n: int) -> list[Row]:
        """manager 6.4."""
        return [manager.ids_for_computed_tokens(request_id, n) for manager in self.managers]

    def take_events(self) -> list[Event]:
        """manager 6.4: the kind is filled in here, not in the pool."""
        events = self.pool.take_events()
        for event in events:
            if event["type"] == "BlockStored":
                kind = self.managers[0].spec.kind
                event["kv_cache_spec_kind"] = "full_attention" if kind == "rswa" else kind
        return events
