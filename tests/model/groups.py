"""One manager a group: what all kinds share, full attention, and cross attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.model.hashing import Request, ceil_div, floor_to, require
from tests.model.pool import NULL, BlockPool, Column, Row

Mask = list[bool] | None  # None: every block that is not null is worth a key


@dataclass(frozen=True)
class GroupSpec:
    """The spec of a group's layers; which groups a drafter reads is no part of it."""

    kind: str
    block_size: int
    rswa_window: int = 0
    is_eagle_group: bool = field(default=False, compare=False)
    sliding_window: int = 0
    attention_chunk_size: int = 0
    mamba_cache_mode: str = ""
    num_speculative_blocks: int = 0
    sink_len: int = 0
    layout: int = 0  # stands for fields that only tell specs apart

    @property
    def is_full_attention(self) -> bool:
        """groups 1.1: the kinds that derive from full attention."""
        full = ("full_attention", "mla_attention", "rswa", "sink_full_attention")
        return self.kind in full

    @property
    def honours_eagle_drop(self) -> bool:
        """groups 2.11, manager 7.3: Mamba and chunked local attention cannot give up a block."""
        return self.kind not in ("mamba", "chunked_local_attention")


@dataclass(frozen=True)
class Sizes:
    """What the groups share of the configuration."""

    max_model_len: int
    scheduler_block_size: int
    max_num_batched_tokens: int
    context_parallel: int = 1
    retention_interval: int | None = None


@dataclass(frozen=True)
class Demand:
    """What one allocate_slots asks of every group (manager 6.3)."""

    request_id: str
    num_tokens: int  # tokens that need a slot, look-ahead included
    num_tokens_main: int  # the same without look-ahead
    total_computed: int  # local and external
    external: int = 0
    num_encoder_tokens: int = 0
    attaches: bool = False  # hits and external blocks come first
    capped_with_lookahead: int | None = (
        None  # the whole-sequence gate, and what look-ahead it counts
    )


class GroupManager:
    """What all kinds share (groups 2.1). Subclasses say what they do differently."""

    tracks_new_ids = False  # groups 2.1.6: the kinds whose new blocks are to be zeroed

    def __init__(self, spec: GroupSpec, group_id: int, pool: BlockPool, sizes: Sizes) -> None:
        self.spec = spec
        self.group_id = group_id
        self.pool = pool
        self.sizes = sizes
        self.block_size = spec.block_size * sizes.context_parallel  # groups 2
        self.use_eagle = False  # these two are set by the coordinator
        self.any_eagle = False
        self.rows: dict[str, Row] = {}
        self.num_cached: dict[str, int] = {}  # presence of the id means "already running"
        self.new_block_ids: Row = []

    def row(self, request_id: str) -> Row:
        """The row, without making an entry."""
        return self.rows.get(request_id, [])

    # -- what a kind decides

    def admission_cap(self, num_lookahead_tokens: int) -> int | None:
        """The most blocks that a whole sequence holds at once (groups 1.4, 2.1.3)."""
        return None

    def num_skipped_tokens(self, n: int) -> int:
        """With n tokens computed, how many from the start will never be read (groups 2.1.1)."""
        return 0

    def num_skipped_blocks(self, n: int) -> int:
        """The same in whole blocks; one rule everywhere (clarifications of groups)."""
        return max(0, self.num_skipped_tokens(n) // self.block_size)

    def find_hit(
        self, hashes: list[bytes], max_length: int, group_ids: list[int], drop: bool, align: int
    ) -> list[Column]:
        """The longest usable hit of at most max_length tokens.

        The groups share one spec, and each position needs a block in all of them. `drop`: a drafter
        voids the last block. The length of a hit is a multiple of `align`.
        """
        raise NotImplementedError

    def reachable_mask(self, start: int, stop: int, num_prompt_tokens: int) -> Mask:
        """Which positions are worth a key."""
        return None

    def is_readable(self, row: Row, length: int) -> bool:
        """Whether the row has a block wherever the token at `length` reads."""
        first = self.num_skipped_blocks(length)
        return all(block_id != NULL for block_id in row[first : length // self.block_size])

    # -- predictions

    def num_blocks_needed(self, demand: Demand, hits: Row) -> int:
        """The prediction that admission rests on (groups 2.1.2)."""
        total = ceil_div(demand.num_tokens, self.block_size)
        if demand.capped_with_lookahead is not None:
            cap = self.admission_cap(demand.capped_with_lookahead)
            total = total if cap is None else min(total, cap)
        have = len(self.row(demand.request_id))
        if demand.request_id in self.num_cached:
            require(not hits, "hits for a running request")
            return max(total - have, 0)
        skipped = self.num_skipped_blocks(demand.total_computed)
        fresh = max(total - max(skipped, len(hits) + have), 0)
        return fresh + self.pool.evictable(hits[max(0, skipped - have) :])

    def num_blocks_taken(self, demand: Demand, hits: Row) -> int:
        """How many free blocks the allocation will take (P1 of groups 2.12)."""
        return self.num_blocks_needed(demand, hits)

    # -- changes

    def add_hits(self, request_id: str, hits: Row, total_computed: int) -> None:
        """Attach the blocks of a prefix hit (groups 2.1.4)."""
        require(not self.row(request_id), "hits for a request that already has blocks")
        skipped = self.num_skipped_blocks(total_computed)
        self.pool.touch(hits[skipped:])
        self.rows[request_id] = [NULL] * skipped + hits[skipped:]
        self.num_cached[request_id] = len(self.rows[request_id])

    def add_external(self, request_id: str, total_computed: int, external: int) -> None:
        """Storage for tokens that a connector supplies (groups 2.1.5)."""
        left = total_computed - max(0, self.num_skipped_tokens(total_computed))
        if min(left, external) > 0:
            missing = ceil_div(total_computed, self.block_size) - len(self.row(request_id))
            self._extend(request_id, max(0, missing))

    def add_new(self, demand: Demand) -> Row:
        """Blocks for the tokens of this step; what the call returns (groups 2.1.6)."""
        row = self.rows.setdefault(demand.request_id, [])
        missing = ceil_div(demand.num_tokens, self.block_size) - len(row)
        return self._extend(demand.request_id, max(0, missing))

    def _extend(self, request_id: str, n: int) -> Row:
        fresh = self.pool.get_new_blocks(n)
        self.rows[request_id] += fresh
        if self.tracks_new_ids:
            self.new_block_ids += fresh
        return fresh

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Give the blocks that the first num_tokens tokens fill their keys (groups 2.1.7)."""
        start, stop = self.num_cached.get(request.id, 0), num_tokens // self.block_size
        if start < stop:
            mask = self.reachable_mask(start, stop, request.num_prompt_tokens)
            row = self.rows[request.id]
            self.pool.cache_full_blocks(
                request, row, start, stop, self.block_size, self.group_id, mask
            )
            self.num_cached[request.id] = stop

    def forget_unwritten(self, request_id: str, num_written_tokens: int) -> None:
        """Blocks that were scheduled but never filled lose their keys (manager W1)."""
        self.pool.evict_blocks(self.row(request_id)[num_written_tokens // self.block_size :])

    def pop(self, request_id: str) -> Row:
        """Forget the request; its references pass to the caller (groups 2.1.8)."""
        self.num_cached.pop(request_id, None)
        return self.rows.pop(request_id, [])

    def remove_skipped(
        self, request_id: str, total_computed: int, num_prompt_tokens: int | None
    ) -> None:
        """Release the blocks that no later token will read (groups 2.1.10)."""
        self._release_range(request_id, 0, self.num_skipped_blocks(total_computed))

    def _release_range(self, request_id: str, low: int, high: int) -> None:
        """Release [low, high) of the row, highest first, up to the first null (groups 2.1.9)."""
        row, released = self.row(request_id), []
        for position in reversed(range(low, min(high, len(row)))):
            if row[position] == NULL:
                break
            released.append(row[position])
            row[position] = NULL
        self.pool.free_blocks(released)

    def new_step_starts(self) -> None:
        """groups 2.1.11."""

    # -- questions

    def num_common_prefix_blocks(self, request_id: str) -> int:
        """groups 2.1.11."""
        return 0

    def ids_for_computed_tokens(self, request_id: str, n: int) -> Row:
        """manager 6.4: 0.25.1 divides by the block size of one rank (W11)."""
        scaled = self.pool.semantics.computed_ids_under_cp
        block_size = self.block_size if scaled else self.spec.block_size
        return self.row(request_id)[: ceil_div(n, block_size)]

    # -- shared by the kinds that keep only some blocks

    def replay_boundaries(self, num_prompt_tokens: int) -> list[int]:
        """Where lookups end that come back to the end of this prompt, with sparse retention.

        The same prompt again ends at its last aligned length, as its last token is always computed
        (groups 2.3). Where a drafter's group gives up a block, this lookup and that of a longer
        prompt end one scheduler block earlier (case C12; the rule is 0.33's, groups 5.5).
        """
        align = self.sizes.scheduler_block_size
        resend = floor_to(num_prompt_tokens - 1, align)
        boundaries = [resend]
        if self.pool.semantics.eagle_retention and self.any_eagle:
            extension = floor_to(num_prompt_tokens, align)
            boundaries += [resend - align, extension - align]
        return [boundary for boundary in boundaries if boundary >= 0]

    def aligned(self, hit: list[Column], align: int) -> list[Column]:
        """The longest beginning of the hit that ends at an aligned length."""
        while self.block_size != align and len(hit) * self.block_size % align != 0:
            hit = hit[:-1]
        return hit


class FullAttentionManager(GroupManager):
    """Full attention and MLA (groups 2.2), with or without sinks (groups 2.8)."""

    @property
    def tracks_new_ids(self) -> bool:  # type: ignore[override]
        """groups 2.1.6: exactly these kinds."""
        return self.spec.kind in ("full_attention", "mla_attention")

    def find_hit(
        self, hashes: list[bytes], max_length: int, group_ids: list[int], drop: bool, align: int
    ) -> list[Column]:
        """Left to right up to the first miss."""
        hit: list[Column] = []
        for block_hash in hashes[: max_length // self.block_size]:
            found = self.pool.lookup_column(block_hash, group_ids)
            if found is None:
                break
            hit.append(found)
        return self.aligned(hit[:-1] if drop else hit, align)

    def num_common_prefix_blocks(self, request_id: str) -> int:
        """Leading blocks that all requests share (manager 6.4, case C07)."""
        count = 0
        for position, block_id in enumerate(self.row(request_id)):
            if self.pool.semantics.common_prefix == "references":
                common = self.pool.blocks[block_id].ref_cnt == len(self.rows)
            else:
                rows = self.rows.values()
                common = all(row[position : position + 1] == [block_id] for row in rows)
            if block_id == NULL or not common:
                break
            count += 1
        return count


class RSWAManager(FullAttentionManager):
    """Full attention with a gap between the prompt and a window at the end (groups 2.4)."""

    def remove_skipped(
        self, request_id: str, total_computed: int, num_prompt_tokens: int | None
    ) -> None:
        """Release the gap."""
        if num_prompt_tokens is None:
            return
        low = ceil_div(num_prompt_tokens, self.block_size)
        window_start = total_computed - self.spec.rswa_window
        self._release_range(
            request_id, low, max(num_prompt_tokens, window_start) // self.block_size
        )


class CrossAttentionManager(GroupManager):
    """Blocks for the encoder's tokens, never cached (groups 2.7)."""

    def num_blocks_needed(self, demand: Demand, hits: Row) -> int:
        """Look-ahead and computed tokens are the decoder's."""
        return super().num_blocks_needed(_of_encoder(demand), [])

    def add_hits(self, request_id: str, hits: Row, total_computed: int) -> None:
        """There are none."""
        require(not hits, "cross attention has no hits")

    def add_external(self, request_id: str, total_computed: int, external: int) -> None:
        """A connector supplies the decoder's tokens only."""

    def add_new(self, demand: Demand) -> Row:
        """For all of the encoder's tokens, at the first allocation."""
        return super().add_new(_of_encoder(demand))

    def ids_for_computed_tokens(self, request_id: str, n: int) -> Row:
        """manager 6.4: not cut."""
        return list(self.row(request_id))


def _of_encoder(demand: Demand) -> Demand:
    return replace(demand, num_tokens=demand.num_encoder_tokens, total_computed=0)
