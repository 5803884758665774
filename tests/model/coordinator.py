"""The lookup on which all groups agree, and how far blocks are offered to the cache (manager 7)."""

from __future__ import annotations

from tests.model.groups import (
    CrossAttentionManager,
    Demand,
    FullAttentionManager,
    GroupManager,
    GroupSpec,
    RSWAManager,
)
from tests.model.hashing import Request, floor_to, require
from tests.model.mamba import MambaAlignManager, MambaManager
from tests.model.pool import Column, Row
from tests.model.sparse_groups import ChunkedLocalManager, SlidingWindowManager

Hits = list[Row]  # one list of block ids a group


def manager_class(spec: GroupSpec) -> type[GroupManager]:
    """groups 1.6."""
    if spec.kind == "mamba":
        return MambaAlignManager if spec.mamba_cache_mode == "align" else MambaManager
    kinds: dict[str, type[GroupManager]] = {
        "full_attention": FullAttentionManager,
        "mla_attention": FullAttentionManager,
        "sink_full_attention": FullAttentionManager,
        "rswa": RSWAManager,
        "sliding_window": SlidingWindowManager,
        "sliding_window_mla": SlidingWindowManager,
        "chunked_local_attention": ChunkedLocalManager,
        "cross_attention": CrossAttentionManager,
    }
    return kinds[spec.kind]


class Coordinator:
    """Fan-out over the groups; on its own, the one without prefix caching (manager 7.1, 7.2)."""

    def __init__(self, managers: list[GroupManager], scheduler_block_size: int) -> None:
        self.managers = managers
        self.scheduler_block_size = scheduler_block_size

    def find_longest_hit(self, request: Request, cap: int) -> tuple[Hits, int, int]:
        """Blocks, tokens, and by how much the deepest group exceeded them."""
        return [[] for _ in self.managers], 0, 0

    def find_hit_per_group(self, request: Request, cap: int) -> tuple[Hits, list[int]]:
        """Each group's own hit, and its length in tokens."""
        hits, _, _ = self.find_longest_hit(request, cap)
        pairs = zip(self.managers, hits, strict=True)
        return hits, [len(blocks) * manager.block_size for manager, blocks in pairs]

    def num_blocks_needed(self, demand: Demand, hits: Hits) -> int:
        """The sum of the predictions."""
        pairs = zip(self.managers, hits, strict=True)
        return sum(manager.num_blocks_needed(demand, blocks) for manager, blocks in pairs)

    def num_blocks_taken(self, demand: Demand, hits: Hits) -> int:
        """What the allocation will really take."""
        pairs = zip(self.managers, hits, strict=True)
        return sum(manager.num_blocks_taken(demand, blocks) for manager, blocks in pairs)

    def is_running(self, request_id: str) -> bool:
        """Whether any group tracks the request: hits and external blocks come before that."""
        return any(request_id in manager.num_cached for manager in self.managers)

    def add_computed(self, demand: Demand, hits: Hits) -> None:
        """Two phases: no group may evict another group's hits before they are touched."""
        if not demand.attaches:
            require(not any(hits), "hits for a running request")
            return
        for manager, blocks in zip(self.managers, hits, strict=True):
            manager.add_hits(demand.request_id, blocks, demand.total_computed)
        if demand.external > 0:
            for manager in self.managers:
                manager.add_external(demand.request_id, demand.total_computed, demand.external)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """manager 7.2."""
        for manager in self.managers:
            manager.cache_blocks(request, num_tokens)


class UnitaryCoordinator(Coordinator):
    """Exactly one group (manager 7.2); no look-ahead credit there (case C11)."""

    def find_longest_hit(self, request: Request, cap: int) -> tuple[Hits, int, int]:
        """One lookup, aligned to the group's own blocks."""
        [manager] = self.managers
        size = manager.block_size
        drop = manager.use_eagle and manager.spec.honours_eagle_drop
        hit = manager.find_hit(request.hashes_for(size), cap, [0], drop, size)
        return [[column[0] for column in hit]], len(hit) * size, 0


class Bucket:
    """The groups of one spec; they are looked up together (manager 7.3)."""

    def __init__(self, members: list[GroupManager]) -> None:
        self.first = members[0]
        self.block_size = self.first.block_size
        self.is_full_attention = self.first.spec.is_full_attention
        self.group_ids = [manager.group_id for manager in members]
        eagle = any(manager.use_eagle for manager in members)
        for manager in members:
            manager.use_eagle = eagle
        # A bucket that cannot express the drop is asked for the present length (clarifications).
        self.peeks = eagle and self.first.spec.honours_eagle_drop

    def find_hit(self, request: Request, reach: int, drop: bool, align: int) -> list[Column]:
        """The hit of all members."""
        hashes = request.hashes_for(self.block_size)
        return self.first.find_hit(hashes, reach, self.group_ids, drop, align)


class HybridCoordinator(Coordinator):
    """Several groups, also of one spec (manager 7.3 and 10, row 5).

    With one bucket it is unitary coordination (groups, clarifications): one lookup, no credit.
    """

    def __init__(
        self, managers: list[GroupManager], scheduler_block_size: int, eagle_credit: bool
    ) -> None:
        super().__init__(managers, scheduler_block_size)
        specs = dict.fromkeys(manager.spec for manager in managers)  # distinct, in group order
        buckets = [Bucket([m for m in managers if m.spec == spec]) for spec in specs]
        # Full attention first, else stable.
        self.buckets = sorted(buckets, key=lambda bucket: not bucket.is_full_attention)
        self.eagle_credit = eagle_credit and len(buckets) > 1

    def find_longest_hit(self, request: Request, cap: int) -> tuple[Hits, int, int]:
        """Shorten a candidate length until all buckets agree on it."""
        hits: Hits = [[] for _ in self.managers]
        settled: set[Bucket] = set()  # full attention, looked up: a prefix of a hit is a hit
        dropped: set[Bucket] = set()  # those that gave up their last block for this candidate
        limit, longest = cap, 0
        simple = len(self.buckets) == 1
        simple = simple or (len(self.buckets) == 2 and self.buckets[0].is_full_attention)
        while True:
            length = limit
            for bucket in self.buckets:
                if bucket in settled:
                    length = floor_to(length, bucket.block_size)
                    continue
                # A drafter's bucket looks one block further and gives it up, once a candidate.
                peek = bucket.peeks and bucket not in dropped
                reach = length + bucket.block_size if peek else length
                if not self.eagle_credit:  # case C11: a block past the cap is no proof for 0.25.1
                    reach = min(reach, cap)
                hit = bucket.find_hit(request, reach, peek, self.scheduler_block_size)
                got = len(hit) * bucket.block_size
                if peek:
                    dropped.add(bucket)
                elif got < length:
                    dropped.clear()
                if bucket.is_full_attention:
                    settled.add(bucket)
                length, longest = got, max(longest, got)
                self._spread(bucket, hit, hits)
            if length >= limit:
                break
            limit = length
            if simple:
                break
        # Every group is cut, not only the first bucket's (case C01).
        pairs = zip(self.managers, hits, strict=True)
        cut = [blocks[: limit // manager.block_size] for manager, blocks in pairs]
        return cut, limit, max(0, longest - limit)

    def find_hit_per_group(self, request: Request, cap: int) -> tuple[Hits, list[int]]:
        """Each bucket on its own, with its own drop (manager 7.3)."""
        hits: Hits = [[] for _ in self.managers]
        for bucket in self.buckets:
            hit = bucket.find_hit(request, cap, bucket.peeks, self.scheduler_block_size)
            self._spread(bucket, hit, hits)
        pairs = zip(self.managers, hits, strict=True)
        return hits, [len(blocks) * manager.block_size for manager, blocks in pairs]

    @staticmethod
    def _spread(bucket: Bucket, hit: list[Column], hits: Hits) -> None:
        for k, group_id in enumerate(bucket.group_ids):
            hits[group_id] = [column[k] for column in hit]

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Whole scheduler blocks, and the block that the drafter's drop consumes (manager 7.2)."""
        aligned = floor_to(num_tokens, self.scheduler_block_size)
        for manager in self.managers:
            extra = manager.block_size if manager.use_eagle and aligned > 0 else 0
            manager.cache_blocks(request, min(num_tokens, aligned + extra))
