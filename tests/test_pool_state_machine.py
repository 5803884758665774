"""kvyard's pool and the reference model's, side by side: masks, partial entries, several groups."""

from __future__ import annotations

import kvyard
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests import helpers
from tests.model import pool as model_pool
from tests.twins import (
    ALGORITHMS,
    Extras,
    Requests,
    Twin,
    events_agree,
    extras,
    pools_agree,
    prompts,
    semantics_choices,
    semantics_of_model,
)


class PoolMachine(RuleBasedStateMachine):
    """A pool on its own, with masks and partial entries."""

    def __init__(self) -> None:
        super().__init__()
        self.twins: list[Twin] = []
        self.tables: list[list[int]] = []
        self.held: list[int] = []

    @initialize(
        num_blocks=st.integers(2, 16),
        hash_block_size=st.integers(1, 3),
        factor=st.integers(1, 3),
        caching=st.sampled_from([True, True, True, False]),
        semantics=semantics_choices,
        algorithm=st.sampled_from(ALGORITHMS),
    )
    def build(
        self,
        num_blocks: int,
        hash_block_size: int,
        factor: int,
        caching: bool,
        semantics: kvyard.Semantics,
        algorithm: str,
    ) -> None:
        self.hash_block_size, self.block_size = hash_block_size, hash_block_size * factor
        self.caching = caching
        self.requests = Requests(algorithm, hash_block_size, semantics)
        self.ours = kvyard.BlockPool(
            num_blocks,
            caching,
            hash_block_size,
            True,
            semantics=semantics,
        )
        self.theirs = model_pool.BlockPool(
            num_blocks, caching, hash_block_size, True, semantics_of_model(semantics)
        )

    @precondition(lambda self: len(self.twins) < 4)
    @rule(tokens=prompts(), extra=extras())
    def arrive(self, tokens: list[int], extra: Extras) -> None:
        """A request takes a table, perhaps with nulls in it."""
        count = -(-len(tokens) // self.block_size)
        if count > len(self.theirs.free):
            return
        blocks = self.ours.get_new_blocks(count)
        ids = self.theirs.get_new_blocks(count)
        assert helpers.ids_of(blocks) == ids
        self.held += ids
        self.twins.append(self.requests.make(tokens, extra))
        self.tables.append(ids)

    @precondition(lambda self: self.twins and self.caching)
    @rule(data=st.data())
    def cache_full(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.twins) - 1), label="request")
        twin, table = self.twins[index], list(self.tables[index])
        full = twin.theirs.num_tokens // self.block_size
        start = data.draw(st.integers(0, full), label="from")
        stop = data.draw(st.integers(start, full), label="to")
        for position in data.draw(st.sets(st.integers(0, max(full - 1, 0)), max_size=2)):
            if position < len(table):
                table[position] = 0
        mask = None
        if data.draw(st.booleans(), label="masked"):
            mask = [data.draw(st.booleans()) for _ in range(start, stop)]
        for position in range(start, stop):
            wanted = table[position] != 0 and (mask is None or mask[position - start])
            block = self.theirs.blocks[table[position]]
            covered = (position + 1) * self.block_size
            if wanted and (block.ref_cnt == 0 or block.key_tokens >= covered):
                return  # a misuse; not here
        blocks = [self.ours.blocks[i] for i in table]
        self.ours.cache_full_blocks(twin.ours, blocks, start, stop, self.block_size, 1, mask)
        self.theirs.cache_full_blocks(twin.theirs, table, start, stop, self.block_size, 1, mask)

    @precondition(lambda self: self.twins and self.caching)
    @rule(data=st.data())
    def cache_partial(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.twins) - 1), label="request")
        twin, table = self.twins[index], self.tables[index]
        boundaries = [
            boundary
            for boundary in range(
                self.hash_block_size, twin.theirs.num_tokens + 1, self.hash_block_size
            )
            if boundary % self.block_size
            and self.theirs.blocks[table[boundary // self.block_size]].ref_cnt
        ]
        if not boundaries:
            return
        boundary = data.draw(st.sampled_from(boundaries), label="boundary")
        block_id = table[boundary // self.block_size]
        if data.draw(st.integers(0, 9), label="null?") == 0:
            block_id = 0
        block = self.ours.blocks[block_id]
        key = self.ours.cache_partial_block(twin.ours, block, boundary, 1, self.block_size)
        assert key == self.theirs.cache_partial_block(
            twin.theirs, block_id, boundary, 1, self.block_size
        )

    @precondition(lambda self: self.twins)
    @rule(data=st.data(), group=st.integers(0, 1))
    def look_up(self, data: st.DataObject, group: int) -> None:
        twin = data.draw(st.sampled_from(self.twins))
        for block_hash in twin.theirs.hashes:
            found = self.ours.get_cached_block(block_hash, [group])
            expected = self.theirs.lookup(block_hash, group)
            assert (None if found is None else found[0].block_id) == expected
            if expected is not None:
                assert self.ours.get_cached_block(block_hash, [1 - group, group]) is None

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        usable = [
            i for i, b in enumerate(self.theirs.blocks) if i == 0 or b.ref_cnt or b.key is not None
        ]
        ids = data.draw(st.lists(st.sampled_from(usable), max_size=4))
        self.ours.touch([self.ours.blocks[i] for i in ids])
        self.theirs.touch(ids)
        self.held += [i for i in ids if i]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ids = data.draw(st.permutations(self.held))
        count = data.draw(st.integers(0, len(ids)))
        ids, self.held = list(ids[:count]), list(ids[count:])
        if data.draw(st.booleans(), label="null too"):
            ids.insert(0, 0)
        self.ours.free_blocks(self.ours.blocks[i] for i in ids)
        self.theirs.free_blocks(ids)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.theirs.free)))
        ids = self.theirs.get_new_blocks(count)
        assert helpers.ids_of(self.ours.get_new_blocks(count)) == ids
        self.held += ids

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, self.theirs.num_blocks - 1), max_size=4))
        self.ours.evict_blocks(ids)
        self.theirs.evict_blocks(ids)

    @rule()
    def reset(self) -> None:
        assert self.ours.reset_prefix_cache() == self.theirs.reset_prefix_cache()

    @rule()
    def take_events(self) -> None:
        events_agree(self.ours.take_events(), self.theirs.take_events())

    @invariant()
    def same_state(self) -> None:
        if hasattr(self, "ours"):
            self.ours.validate()
            pools_agree(self.ours, self.theirs)


TestPool = PoolMachine.TestCase
