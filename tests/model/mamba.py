"""Groups of recurrent layers: a state, of which only the last one is needed (groups 2.6)."""

from __future__ import annotations

from dataclasses import replace

from tests.model.groups import Demand, GroupManager, GroupSpec, Mask, Sizes
from tests.model.hashing import Request, ceil_div
from tests.model.pool import NULL, BlockPool, Column, Row


class MambaManager(GroupManager):
    """Modes "none" and "all"."""

    def __init__(self, spec: GroupSpec, group_id: int, pool: BlockPool, sizes: Sizes) -> None:
        super().__init__(spec, group_id, pool, sizes)
        self.drafts = spec.num_speculative_blocks
        self.step_keys: set[bytes] = set()  # keys given since the last new_step_starts

    def num_skipped_tokens(self, n: int) -> int:
        """All but the last state."""
        return n - 1

    def new_step_starts(self) -> None:
        """The states of the step before are written now."""
        self.step_keys.clear()

    def find_hit(
        self, hashes: list[bytes], max_length: int, group_ids: list[int], drop: bool, align: int
    ) -> list[Column]:
        """The last cached state at an aligned length; `drop` is accepted and ignored."""
        size = self.block_size
        for i in reversed(range(min(max_length // size, len(hashes)))):
            found = self.pool.lookup_column(hashes[i], group_ids)
            if found is not None and (size == align or (i + 1) * size % align == 0):
                return [(NULL,) * len(group_ids)] * i + [found]
        return []

    def num_blocks_needed(self, demand: Demand, hits: Row) -> int:
        """The state of this step's keys is only written by this step: nobody can start from it."""
        if hits and hits[-1] != NULL and self.pool.blocks[hits[-1]].key in self.step_keys:
            return self.pool.num_blocks + 1  # "does not fit"
        return self.predict(demand, hits)

    def predict(self, demand: Demand, hits: Row) -> int:
        """The prediction, but for the guard."""
        return super().num_blocks_needed(self._with_drafts(demand), hits)

    def num_blocks_taken(self, demand: Demand, hits: Row) -> int:
        """P1."""
        return self.predict(demand, hits)

    def add_new(self, demand: Demand) -> Row:
        """A state more for each draft."""
        return super().add_new(self._with_drafts(demand))

    def _with_drafts(self, demand: Demand) -> Demand:
        return replace(demand, num_tokens=demand.num_tokens + self.drafts * self.block_size)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Notes the keys of this step besides."""
        start = self.num_cached.get(request.id, 0)
        super().cache_blocks(request, num_tokens)
        for block_id in self.row(request.id)[start : self.num_cached.get(request.id, 0)]:
            key = self.pool.blocks[block_id].key  # the null block has none
            if key is not None:
                self.step_keys.add(key)

    def reachable_mask(self, start: int, stop: int, num_prompt_tokens: int) -> Mask:
        """With a retention interval only states at its multiples and at the prompt's end."""
        retention = self.sizes.retention_interval
        if retention is None:
            return None
        boundaries = self.replay_boundaries(num_prompt_tokens)
        reachable = {boundary // self.block_size - 1 for boundary in boundaries}
        if retention > 0:
            period = retention // self.block_size
            if period <= 1:
                return None
            reachable |= {i for i in range(start, stop) if (i + 1) % period == 0}
        return [i in reachable for i in range(start, stop)]

    def remove_skipped(
        self, request_id: str, total_computed: int, num_prompt_tokens: int | None
    ) -> None:
        """As if every draft in flight were rejected."""
        kept = max(0, total_computed - self.drafts)
        super().remove_skipped(request_id, kept, num_prompt_tokens)

    def ids_for_computed_tokens(self, request_id: str, n: int) -> Row:
        """manager 6.4: not cut."""
        return list(self.row(request_id))


class MambaAlignManager(MambaManager):
    """Mode "align": the running state, its draft slots, and at most one earlier state."""

    def __init__(self, spec: GroupSpec, group_id: int, pool: BlockPool, sizes: Sizes) -> None:
        super().__init__(spec, group_id, pool, sizes)
        self.allocated: set[str] = set()
        self.last_state: dict[str, int] = {}  # position of the state that this step starts from

    def predict(self, demand: Demand, hits: Row) -> int:
        """0.25.1's own estimate knows no external tokens, and may be negative."""
        if self.pool.semantics.align_prediction == "true_need":
            return self.num_blocks_taken(demand, hits)
        row = self.row(demand.request_id)
        fresh = self._need(demand) - len(hits) - len(row)
        if fresh > 0:
            fresh = 1 if demand.request_id in self.allocated else 1 + self.drafts
        return fresh + self.pool.evictable(hits)

    def num_blocks_taken(self, demand: Demand, hits: Row) -> int:
        """Counted on a row whose new blocks are not taken from anywhere."""
        length, taken = len(self.row(demand.request_id)), 0
        if demand.attaches:
            skipped = self.num_skipped_blocks(demand.total_computed)
            length = skipped + len(hits[skipped:])
            taken = self.pool.evictable(hits[skipped:])
            # The last of the computed tokens is always within reach, so external ones are stored.
            external = ceil_div(demand.total_computed, self.block_size) - length
            if demand.external > 0 and external > 0:
                length, taken = length + external, taken + external
        need = self._need(demand)
        if need > length:
            running = need - self.drafts - 1
            known = demand.request_id in self.allocated
            moved = len(range(length - self.drafts, min(length, running))) if known else 0
            taken += need - max(length, running) - moved
        return taken

    def _need(self, demand: Demand) -> int:
        """Look-ahead needs no states (groups 2.11b)."""
        return ceil_div(demand.num_tokens_main, self.block_size) + self.drafts

    def add_new(self, demand: Demand) -> Row:
        """What it returns is the row from the old length on: nulls and moved blocks are in it."""
        row = self.rows.setdefault(demand.request_id, [])
        before, need = len(row), self._need(demand)
        if need <= before:
            return []
        known = demand.request_id in self.allocated
        if known:
            self.last_state[demand.request_id] = before - 1 - self.drafts
        elif before > 0:
            self.last_state[demand.request_id] = before - 1  # the state of the prefix hit
        running = need - self.drafts - 1  # position of the running state after this step
        row += [NULL] * (running - before)
        if known:  # draft slots left of the running state move to the end
            for j in range(before - self.drafts, min(before, running)):
                row.append(row[j])
                row[j] = NULL
        self._extend(demand.request_id, need - len(row))
        self.allocated.add(demand.request_id)
        return row[before:]

    def remove_skipped(
        self, request_id: str, total_computed: int, num_prompt_tokens: int | None
    ) -> None:
        """The state before can be cut off from the range above by nulls."""
        super().remove_skipped(request_id, total_computed, num_prompt_tokens)
        last = self.last_state.get(request_id)
        kept = max(0, total_computed - self.drafts)
        if last is not None and last < ceil_div(kept, self.block_size) - 1:
            self._release_range(request_id, last, last + 1)

    def pop(self, request_id: str) -> Row:
        """Forgets the states besides."""
        self.allocated.discard(request_id)
        self.last_state.pop(request_id, None)
        return super().pop(request_id)
