"""What the state machines of managers share: one schedule, carried out by kvyard and by the model.

A machine builds both managers, and chooses when what is done here is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from tests.twins import Twin, pools_agree

if TYPE_CHECKING:
    import kvyard

    from tests.model.manager import Hits, KVCacheManager


class TwinMachine(RuleBasedStateMachine):
    """Two managers and the requests that both have."""

    ours: kvyard.KVCacheManager
    theirs: KVCacheManager

    def __init__(self) -> None:
        super().__init__()
        self.twins: list[Twin] = []
        self.leases: list[tuple[kvyard.BlockLease, Hits]] = []
        self.pins: list[int] = []

    # -- choosing

    def some(self, data: st.DataObject, *states: str) -> Twin | None:
        found = [twin for twin in self.twins if twin.state in states]
        return data.draw(st.sampled_from(found), label="request") if found else None

    def any_name(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from([*(twin.name for twin in self.twins), "unknown"]))

    # -- requests

    def allocate_slots(
        self,
        twin: Twin,
        hits: tuple[kvyard.KVCacheBlocks | None, Hits | None] = (None, None),
        **arguments: Any,
    ) -> bool:
        """Whether it fits; both give the same blocks."""
        ours = self.ours.allocate_slots(twin.shown, new_computed_blocks=hits[0], **arguments)
        theirs = self.theirs.allocate_slots(twin.theirs, new_computed_blocks=hits[1], **arguments)
        assert (None if ours is None else list(ours.get_block_ids())) == theirs
        return theirs is not None

    def free(self, twin: Twin, num_written_tokens: int | None = None) -> None:
        self.ours.free(twin.shown, num_written_tokens=num_written_tokens)
        self.theirs.free(twin.theirs, num_written_tokens)

    def replace_last_token(self, data: st.DataObject) -> None:
        """A streaming session drops what was sampled last, and goes on with new input."""
        twin = self.some(data, "running")
        if twin is None or twin.remaining != 1:
            return
        kept = twin.theirs.num_computed_tokens
        if kept < twin.theirs.num_prompt_tokens:
            return
        twin.ours.truncate(kept)
        twin.theirs.truncate(kept)
        assert twin.ours.block_hashes == twin.theirs.hashes
        twin.append([data.draw(st.integers(0, 3), label="token")])

    def preempt(self, data: st.DataObject) -> None:
        twin = self.some(data, "running")
        if twin is None:
            return
        if data.draw(st.integers(0, 2), label="deferred?"):
            lease = self.ours.pop_blocks_for_free(twin.shown)
            groups = self.theirs.pop_blocks_for_free(twin.theirs)
            # Not as a list, which would dissolve the lease.
            popped = [lease[at].block_id for at in range(len(lease))]
            assert popped == [i for row in groups for i in row]
            self.leases.append((lease, groups))
        else:
            self.free(twin)
        self.preempted(twin)

    def preempted(self, twin: Twin) -> None:
        """The request begins again."""
        twin.state = "waiting"
        twin.set(
            status="PREEMPTED",
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            num_preemptions=twin.theirs.num_preemptions + 1,
        )

    # -- others who hold blocks, and the rest of the surface

    def pin(self, data: st.DataObject) -> None:
        pool = self.theirs.pool
        usable = [i for i, b in enumerate(pool.blocks) if b.ref_cnt or b.key is not None]
        if usable:
            block_id = data.draw(st.sampled_from(usable))
            self.ours.block_pool.touch([self.ours.block_pool.blocks[block_id]])
            pool.touch([block_id])
            self.pins.append(block_id)

    def evict(self, data: st.DataObject) -> None:
        last = self.theirs.pool.num_blocks - 1
        ids = data.draw(st.lists(st.integers(0, last), max_size=6))
        self.ours.evict_blocks(ids)
        self.theirs.pool.evict_blocks(ids)

    def skip(self, data: st.DataObject) -> None:
        twin = self.some(data, "running")
        if twin is None:
            return
        computed = twin.theirs.num_computed_tokens
        prompt = data.draw(st.sampled_from([None, twin.theirs.num_prompt_tokens]))
        self.ours.remove_skipped_blocks(twin.name, computed, prompt)
        self.theirs.remove_skipped_blocks(twin.name, computed, prompt)

    def ask(self, data: st.DataObject) -> None:
        name, tokens = self.any_name(data), data.draw(st.integers(0, 40), label="tokens")
        common = self.ours.get_num_common_prefix_blocks(name)
        assert common == self.theirs.get_num_common_prefix_blocks(name)
        rows = self.theirs.get_block_ids(name)
        assert list(self.ours.get_block_ids(name)) == rows
        assert list(self.ours.get_blocks(name).get_block_ids()) == rows
        filled = self.ours.get_block_ids_for_computed_tokens(name, tokens)
        assert list(filled) == self.theirs.get_block_ids_for_computed_tokens(name, tokens)

    def begin_step(self, data: st.DataObject) -> None:
        self.ours.new_step_starts()
        self.theirs.new_step_starts()
        assert self.ours.take_new_block_ids() == self.theirs.take_new_block_ids()

    def compare(self) -> None:
        """Everything that both show is the same, and ours holds its invariants."""
        self.ours.validate()
        pools_agree(self.ours.block_pool, self.theirs.pool)
        for twin in self.twins:
            assert list(self.ours.get_block_ids(twin.name)) == self.theirs.get_block_ids(twin.name)
