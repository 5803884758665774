"""kvyard's manager and the reference model, driven side by side through random valid schedules.

Every answer is compared, and after each step the whole visible state: free order, reference counts,
keys, usage, events. The schedules keep the contract of a scheduler (what misuse does is the subject
of `test_misuse`).
"""

from __future__ import annotations

import kvyard
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from tests import helpers
from tests.model import manager as model_manager
from tests.twin_machine import TwinMachine
from tests.twins import (
    ALGORITHMS,
    Extras,
    Requests,
    events_agree,
    extras,
    prompts,
    semantics_choices,
    semantics_of_model,
)


class ManagerMachine(TwinMachine):
    """Schedules of a manager with one group, or none."""

    @initialize(
        kind=st.sampled_from(["full_attention", "full_attention", "mla_attention", "rswa", ""]),
        block_size=st.integers(1, 4),
        ranks=st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2)]),
        num_blocks=st.integers(2, 24),
        max_model_len=st.integers(12, 48),
        window=st.integers(1, 9),
        caching=st.sampled_from([True, True, True, False]),
        eagle=st.sampled_from(["", "", "all", "flagged", "only flagged"]),
        events=st.booleans(),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        semantics=semantics_choices,
        algorithm=st.sampled_from(ALGORITHMS),
        foreign=st.sampled_from([False, False, True]),
    )
    def build(
        self,
        kind: str,
        block_size: int,
        ranks: tuple[int, int],
        num_blocks: int,
        max_model_len: int,
        window: int,
        caching: bool,
        eagle: str,
        events: bool,
        watermark: float,
        semantics: kvyard.Semantics,
        algorithm: str,
        foreign: bool,
    ) -> None:
        caching = caching and kind != ""
        if kind == "rswa":
            ranks = (1, 1)
        width = ranks[0] * ranks[1]
        self.block_size = block_size * width
        self.max_model_len = max_model_len
        self.caching = caching
        specs: list[kvyard.KVCacheSpec] = []
        if kind == "full_attention":
            specs = [helpers.full(block_size)]
        elif kind == "mla_attention":
            specs = [kvyard.MLAAttentionSpec(block_size=block_size, **helpers.ATTENTION)]
        elif kind == "rswa":
            specs = [helpers.rswa(block_size, window)]
        flagged = "flagged" in eagle
        self.ours = kvyard.KVCacheManager(
            helpers.cache_config(num_blocks, *specs, is_eagle_group=flagged),
            max_model_len=max_model_len,
            scheduler_block_size=self.block_size,
            hash_block_size=self.block_size,
            enable_caching=caching,
            use_eagle=eagle in ("all", "flagged"),
            enable_kv_cache_events=events,
            dcp_world_size=ranks[0],
            pcp_world_size=ranks[1],
            watermark=watermark,
            semantics=semantics,
        )
        group = model_manager.GroupSpec(kind, block_size, window, flagged)
        sizes = model_manager.Sizes(max_model_len, self.block_size, max_model_len, width)
        self.theirs = model_manager.KVCacheManager(
            num_blocks,
            [group] if kind else [],
            sizes,
            self.block_size,
            semantics_of_model(semantics),
            caching,
            eagle == "all",
            events,
            watermark,
        )
        self.foreign = foreign
        self.requests = Requests(algorithm, self.block_size, semantics)

    # -- requests

    @precondition(lambda self: len(self.twins) < 6)
    @rule(tokens=prompts(), extra=extras(), skip_reading=st.sampled_from([False] * 5 + [True]))
    def arrive(self, tokens: list[int], extra: Extras, skip_reading: bool) -> None:
        tokens = tokens[: self.max_model_len]
        twin = self.requests.make(tokens, extra, skip_reading)
        twin.foreign = self.foreign
        self.twins.append(twin)

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        twin = self.some(data, "waiting")
        if twin is None:
            return
        hit, num_hit = self.ours.get_computed_blocks(twin.shown)
        expected, num_expected = self.theirs.get_computed_blocks(twin.theirs)
        assert (list(hit.get_block_ids()), num_hit) == (expected, num_expected)
        rest = min(twin.theirs.num_tokens, self.max_model_len) - num_hit
        loads = rest > 1 and data.draw(st.integers(0, 3), label="loads?") == 0
        external = data.draw(st.integers(1, rest), label="external") if loads else 0
        delayed = loads and (external == rest or data.draw(st.booleans(), label="delayed"))
        new = 0 if delayed else data.draw(st.integers(1, rest - external), label="new")
        gate = data.draw(st.booleans(), label="must fit")
        admitted = self.allocate_slots(
            twin,
            hits=(hit, expected),
            num_new_tokens=new,
            num_new_computed_tokens=num_hit,
            num_lookahead_tokens=0 if delayed else data.draw(st.sampled_from([0, 0, 3, 5])),
            num_external_computed_tokens=external,
            delay_cache_blocks=delayed,
            full_sequence_must_fit=gate,
            reserved_blocks=data.draw(st.sampled_from([0, 0, 0, 1, 4]), label="reserved"),
            has_scheduled_reqs=data.draw(st.booleans(), label="scheduled"),
        )
        if admitted:
            twin.state = "loading" if delayed else "running"
            twin.set(num_computed_tokens=num_hit + external + new)
            if not delayed:
                twin.set(status="RUNNING")

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """An asynchronous load ends; perhaps only its beginning is good."""
        twin = self.some(data, "loading")
        if twin is None:
            return
        good = twin.theirs.num_computed_tokens
        if data.draw(st.integers(0, 3), label="all good?") == 0:
            good = data.draw(st.integers(1, good), label="good")
        self.ours.cache_blocks(twin.shown, good)
        self.theirs.cache_blocks(twin.theirs, good)
        twin.state = "running"
        twin.set(
            num_computed_tokens=min(good, twin.theirs.num_tokens - 1),
            status="RUNNING" if good > 1 else "WAITING",
        )

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """A prefill chunk, or a decode step with drafts."""
        twin = self.some(data, "running")
        if twin is None or twin.remaining < 1:
            return
        computed = twin.theirs.num_computed_tokens
        new = data.draw(st.integers(1, twin.remaining), label="new")
        room = self.max_model_len - computed - new
        drafts = 0
        if new == twin.remaining and room > 0 and data.draw(st.booleans(), label="drafts?"):
            drafts = data.draw(st.integers(1, min(3, room)), label="drafts")
        lookahead = data.draw(st.sampled_from([0, 0, 1, 3]), label="lookahead")
        in_flight = data.draw(st.integers(0, min(4, computed)), label="in flight")
        by_argument = self.foreign or data.draw(st.booleans(), label="in flight by argument")
        twin.set(num_in_flight_tokens=0 if by_argument else in_flight)
        done = self.allocate_slots(
            twin,
            num_new_tokens=new + drafts,
            num_lookahead_tokens=lookahead,
            reserved_blocks=data.draw(st.sampled_from([0, 0, 0, 1, 4]), label="reserved"),
            num_in_flight_tokens=in_flight if by_argument else 0,
        )
        if not done:
            return
        accepted = data.draw(st.integers(0, drafts), label="accepted")
        twin.set(num_computed_tokens=computed + new + accepted)
        if computed + new == twin.theirs.num_tokens:  # the step samples tokens
            sampled = min(accepted + 1, self.max_model_len - twin.theirs.num_tokens)
            if sampled < accepted:
                twin.set(num_computed_tokens=computed + new + sampled)
            if sampled:
                tokens = [data.draw(st.integers(70_000, 70_002)) for _ in range(sampled)]
                twin.append(tokens)

    @rule(data=st.data())
    def replace_last_token(self, data: st.DataObject) -> None:
        super().replace_last_token(data)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        twin = self.some(data, "running", "loading", "waiting")
        if twin is None:
            return
        self.free(twin)
        self.twins.remove(twin)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        super().preempt(data)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), way=st.sampled_from(["lease", "reversed", "list"]))
    def give_back(self, data: st.DataObject, way: str) -> None:
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease, groups = self.leases.pop(index)
        if way == "lease":
            self.ours.free_popped(lease)
        elif way == "reversed":
            self.ours.block_pool.free_blocks(reversed(lease))
        else:
            self.ours.block_pool.free_blocks(list(lease)[::-1])
        self.theirs.free_popped(groups)

    # -- the rest of the surface

    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        super().skip(data)

    @precondition(lambda self: self.caching)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        super().pin(data)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        ids = data.draw(st.permutations(self.pins))
        self.pins = []
        pool = self.ours.block_pool
        pool.free_blocks(pool.blocks[block_id] for block_id in ids)
        self.theirs.pool.free_blocks(ids)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        super().evict(data)

    @rule()
    def reset(self) -> None:
        assert self.ours.reset_prefix_cache() == self.theirs.pool.reset_prefix_cache()

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        super().ask(data)

    @rule(data=st.data())
    def begin_step(self, data: st.DataObject) -> None:
        super().begin_step(data)

    @rule()
    def take_events(self) -> None:
        events_agree(self.ours.take_events(), self.theirs.take_events())

    @invariant()
    def same_state(self) -> None:
        if hasattr(self, "ours"):
            self.compare()

    def teardown(self) -> None:
        if hasattr(self, "ours"):
            self.take_events()
            for lease, _ in self.leases:
                self.ours.free_popped(lease)


TestManager = ManagerMachine.TestCase
