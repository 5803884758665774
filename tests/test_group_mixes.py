"""Managers of several groups and the reference model, driven side by side through valid schedules.

Every answer is compared; after each step the whole visible state is, and the invariants of manager
1.4 and groups 2.12 are checked on it. Configurations in which 0.25.1 itself breaks have machines of
their own. What misuse does is the subject of `test_misuse`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests import helpers
from tests.mixes import HAZARDS, Mix, mixes, prompts
from tests.model import invariants
from tests.model.groups import GroupManager, RSWAManager
from tests.model.mamba import MambaAlignManager
from tests.model.sparse_groups import ChunkedLocalManager, SlidingWindowManager
from tests.twin_machine import TwinMachine
from tests.twins import Requests, Twin, events_agree, extras

if TYPE_CHECKING:
    import kvyard

    from tests.model.manager import Hits


ACTIONS = [
    *["admit"] * 5,
    *["step"] * 8,
    *["schedule"] * 6,
    *["land", "begin_step", "unpin", "reject_drafts"] * 2,
    *["finish", "preempt", "give_back", "replace_last_token", "pin", "occupy", "evict", "reset"],
    *["skip", "ask", "take_events"],
]


class MixMachine(TwinMachine):
    """Schedules of one manager and its model."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Counter[tuple[int, int]] = Counter()  # to a consumer of events
        # Since a request's first block: the most look-ahead, and whether tokens were in flight.
        self.most_lookahead: dict[str, int] = {}
        self.had_in_flight: set[str] = set()

    @initialize(mix=mixes(), algorithm=st.sampled_from(["sha256_cbor", "xxhash"]))
    def build(self, mix: Mix, algorithm: str) -> None:
        self.mix = mix
        self.ours = mix.make_ours()
        self.theirs = mix.make_theirs()
        self.requests = Requests(algorithm, mix.hash_block_size, mix.semantics)
        self.longest = mix.sizes.max_model_len
        self.budget = mix.sizes.max_num_batched_tokens

    # -- choosing

    def reserved(self, data: st.DataObject, twin: Twin, arguments: dict[str, Any]) -> int:
        """Blocks to reserve: often exactly as many as the prediction leaves, or one more."""
        tight = ["all but", "one too many"]
        is_tight = arguments.pop("is_tight", False)
        choices = tight if is_tight else ["none"] * 5 + ["few", *tight]
        how = data.draw(st.sampled_from(choices), label="reserved")
        if how in ("none", "few"):
            return 0 if how == "none" else data.draw(st.integers(1, 4))
        headroom = self.theirs.headroom(twin.theirs, **arguments)
        return max(0, headroom + (how == "one too many"))

    # -- what a scheduler does

    def allocate(
        self,
        data: st.DataObject,
        twin: Twin,
        hits: tuple[kvyard.KVCacheBlocks | None, Hits | None] = (None, None),
        **arguments: Any,
    ) -> bool:
        reserved = self.reserved(data, twin, {**arguments, "new_computed_blocks": hits[1]})
        arguments.pop("is_tight", None)
        arguments["reserved_blocks"] = reserved
        if not self.allocate_slots(twin, hits, **arguments):
            return False
        lookahead = arguments.get("num_lookahead_tokens", 0)
        self.most_lookahead[twin.name] = max(lookahead, self.most_lookahead.get(twin.name, 0))
        for group in self.theirs.managers:
            self.check_row(twin, group)
        return True

    def check_row(self, twin: Twin, group: GroupManager) -> None:
        """What groups 2.12 says of a row after an allocation."""
        if isinstance(group, RSWAManager):
            invariants.check_rswa_gap(group, twin.theirs)
        if twin.name in self.had_in_flight:
            return  # the row keeps what a step in flight may read
        if isinstance(group, MambaAlignManager):
            invariants.check_states(group, twin.name)
        chunk = group.spec.attention_chunk_size
        is_whole = isinstance(group, ChunkedLocalManager) and chunk % group.block_size == 0
        if is_whole or isinstance(group, SlidingWindowManager):
            invariants.check_window_size(group, twin.name, self.most_lookahead[twin.name])

    def forget(self, twin: Twin) -> None:
        self.most_lookahead.pop(twin.name, None)
        self.had_in_flight.discard(twin.name)

    def preempted(self, twin: Twin) -> None:
        self.forget(twin)
        super().preempted(twin)

    def look_up(
        self, data: st.DataObject, twin: Twin
    ) -> tuple[tuple[kvyard.KVCacheBlocks, Hits], int]:
        """A hit on which all groups agree, or each group's own for a connector."""
        request = twin.theirs
        if data.draw(st.integers(0, 5), label="per group?") == 0 and self.mix.caching:
            cap = request.num_tokens - 1
            blocks, lengths = self.ours.find_longest_cache_hit_per_group(twin.shown, cap)
            hits, expected = self.theirs.find_longest_cache_hit_per_group(request, cap)
            assert (list(blocks.get_block_ids()), lengths) == (hits, expected)
            for group, row in zip(self.theirs.managers, hits, strict=True):
                invariants.check_blocks_of_hit(group, request, row)
            return (blocks, hits), max(lengths)
        hit = self.ours.lookup(twin.shown)
        hits, length = self.theirs.get_computed_blocks(request)
        assert (list(hit.blocks.get_block_ids()), hit.num_tokens) == (hits, length)
        exceeded = self.theirs.num_uncached_common_prefix_tokens
        assert hit.num_uncached_common_prefix_tokens == exceeded
        assert self.ours.num_uncached_common_prefix_tokens == exceeded
        invariants.check_hit(self.theirs, request, hits, length)
        return (hit.blocks, hits), length

    # -- requests

    def arrive(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from([0, 8, 16, 24]), label="room")  # for the output
        tokens = data.draw(prompts(), label="prompt")[: max(1, self.longest - room)]
        skip_reading = data.draw(st.integers(0, 9), label="skip reading?") == 1
        self.twins.append(self.requests.make(tokens, data.draw(extras()), skip_reading))

    def admit(self, data: st.DataObject) -> None:
        nobody_waits = all(twin.state != "waiting" for twin in self.twins)
        if len(self.twins) < 6 and (nobody_waits or data.draw(st.booleans(), label="new?")):
            self.arrive(data)
        twin = self.some(data, "waiting")
        if twin is None:
            return
        hits, num_hit = self.look_up(data, twin)
        rest = min(twin.theirs.num_tokens, self.longest) - num_hit
        loads = rest > 1 and data.draw(st.integers(0, 2), label="loads?") == 0
        external = data.draw(st.integers(1, rest), label="external") if loads else 0
        delayed = loads and (external == rest or data.draw(st.booleans(), label="delayed"))
        most = min(rest - external, self.budget)
        # Often all that is left: what drafts do shows only behind the prompt.
        chunk = st.one_of(st.just(most), st.integers(1, max(1, most)))
        new = 0 if delayed else data.draw(chunk, label="new")
        encoder = data.draw(st.integers(0, 9)) if self.mix.has_cross_attention else 0
        admitted = self.allocate(
            data,
            twin,
            hits,
            num_new_tokens=new,
            num_new_computed_tokens=num_hit,
            num_lookahead_tokens=0 if delayed else data.draw(st.sampled_from([0, 0, 2, 5])),
            num_external_computed_tokens=external,
            delay_cache_blocks=delayed,
            num_encoder_tokens=encoder,
            full_sequence_must_fit=data.draw(st.booleans(), label="must fit"),
            has_scheduled_reqs=data.draw(st.booleans(), label="scheduled"),
        )
        if admitted:
            twin.state = "loading" if delayed else "running"
            twin.set(num_computed_tokens=num_hit + external + new)
            if not delayed:
                twin.set(status="RUNNING")

    def land(self, data: st.DataObject) -> None:
        """An asynchronous load ends. Windows keep no blocks to load again a part of it into."""
        twin = self.some(data, "loading")
        if twin is None:
            return
        if data.draw(st.integers(0, 4), label="fails?") == 1:
            self.free(twin)
            self.forget(twin)
            twin.state = "waiting"
            twin.set(num_computed_tokens=0)
            return
        loaded = twin.theirs.num_computed_tokens
        self.ours.cache_blocks(twin.shown, loaded)
        self.theirs.cache_blocks(twin.theirs, loaded)
        twin.state = "running"
        computed = min(loaded, twin.theirs.num_tokens - 1)
        twin.set(num_computed_tokens=computed, status="RUNNING")

    def advance(
        self,
        data: st.DataObject,
        twin: Twin,
        new: int,
        drafts: int,
        rejects_all: bool = False,
        **more: Any,
    ) -> bool:
        """A prefill chunk, or a decode step with drafts, some of which are accepted."""
        computed = twin.theirs.num_computed_tokens
        if not self.allocate(data, twin, num_new_tokens=new + drafts, **more):
            return False
        choices = [0, 0, *range(1, drafts + 1)]
        accepted = 0
        if drafts and not rejects_all:
            accepted = data.draw(st.sampled_from(choices), label="accepted")
        twin.set(num_computed_tokens=computed + new + accepted)
        if computed + new == twin.theirs.num_tokens:  # the step samples tokens
            sampled = min(accepted + 1, self.longest - twin.theirs.num_tokens)
            if sampled < accepted:
                twin.set(num_computed_tokens=computed + new + sampled)
            first = data.draw(st.integers(70_000, 70_002), label="sampled")
            twin.append(list(range(first, first + sampled)))
        return True

    def step(self, data: st.DataObject) -> None:
        twin = self.some(data, "running")
        if twin is None or twin.remaining < 1:
            return
        computed = twin.theirs.num_computed_tokens
        most = min(twin.remaining, self.budget)
        new = data.draw(st.one_of(st.just(most), st.integers(1, most)), label="new")
        room = min(self.longest - computed, self.budget) - new
        drafts = 0
        if new == twin.remaining and data.draw(st.booleans(), label="drafts?"):
            drafts = data.draw(st.integers(0, max(0, min(self.mix.most_drafts, room))))
        in_flight = data.draw(st.sampled_from([0, 0, 0, 1, 4]), label="in flight")
        in_flight = min(in_flight, computed)
        if in_flight:
            self.had_in_flight.add(twin.name)
        by_argument = data.draw(st.booleans(), label="in flight by argument")
        twin.set(num_in_flight_tokens=0 if by_argument else in_flight)
        self.advance(
            data,
            twin,
            new,
            drafts,
            num_lookahead_tokens=data.draw(st.sampled_from([0, 0, 1, 3]), label="lookahead"),
            num_in_flight_tokens=in_flight if by_argument else 0,
        )

    def reject_drafts(self, data: st.DataObject) -> None:
        """All drafts of a step are rejected, and the next has none: the row is too long then."""
        twin = self.some(data, "running")
        if twin is None:
            return
        twin.set(num_in_flight_tokens=0)
        while twin.remaining > 1:
            if not self.advance(data, twin, min(twin.remaining, self.budget), 0):
                return
        room = min(self.longest - twin.theirs.num_tokens, self.budget) - 1
        drafts = min(self.mix.most_drafts, room)
        if drafts > 0 and self.advance(data, twin, 1, drafts, rejects_all=True):
            self.advance(data, twin, 1, 0, is_tight=True)

    def schedule(self, data: st.DataObject) -> None:
        """Steps of the whole batch; who finds no blocks is preempted, the last first."""
        share = data.draw(st.sampled_from([1, 3, 8, 64, 64]), label="share")
        lookahead = data.draw(st.sampled_from([0, 0, 2]), label="lookahead")
        for _ in range(data.draw(st.integers(1, 5), label="steps")):
            self.begin_step(data)
            for twin in [twin for twin in self.twins if twin.state == "running"]:
                if twin.state == "running" and twin.remaining > 0:
                    self.step_of_batch(data, twin, share, lookahead)

    def step_of_batch(self, data: st.DataObject, twin: Twin, share: int, lookahead: int) -> None:
        twin.set(num_in_flight_tokens=0)
        new = min(twin.remaining, self.budget, share)
        while not self.advance(data, twin, new, 0, num_lookahead_tokens=lookahead):
            victim = [other for other in self.twins if other.state == "running"][-1]
            self.free(victim)
            self.preempted(victim)
            if victim is twin:
                return

    def finish(self, data: st.DataObject) -> None:
        """The end of a request; perhaps its last step did not run, or only in part."""
        twin = self.some(data, "running", "loading", "waiting")
        if twin is None:
            return
        written = None
        if data.draw(st.integers(0, 2), label="withdrawn?") == 1:
            written = data.draw(st.integers(0, twin.theirs.num_computed_tokens), label="written")
        self.free(twin, written)
        self.forget(twin)
        self.twins.remove(twin)

    def return_lease(self, index: int, by_lease: bool) -> None:
        lease, groups = self.leases.pop(index)
        if by_lease:
            self.ours.free_popped(lease)
            self.theirs.free_popped(groups)
        else:  # vLLM's way: a flat list is taken in the order given
            self.ours.block_pool.free_blocks(reversed(lease))
            self.theirs.pool.free_blocks([i for row in groups for i in row][::-1])

    def give_back(self, data: st.DataObject) -> None:
        if self.leases:
            index = data.draw(st.integers(0, len(self.leases) - 1))
            self.return_lease(index, by_lease=data.draw(st.booleans(), label="by lease"))

    # -- others who hold blocks, and the rest of the surface

    def occupy(self, data: st.DataObject) -> None:
        count = len(self.theirs.pool.free) * data.draw(st.integers(0, 4)) // 4
        taken = self.theirs.pool.get_new_blocks(count)
        assert helpers.ids_of(self.ours.block_pool.get_new_blocks(count)) == taken
        self.pins += taken

    def unpin(self, data: st.DataObject | None = None) -> None:
        pool, ids = self.ours.block_pool, self.pins
        pool.free_blocks(pool.blocks[block_id] for block_id in ids)
        self.theirs.pool.free_blocks(ids)
        self.pins = []

    def reset(self, data: st.DataObject) -> None:
        assert self.ours.reset_prefix_cache() == self.theirs.pool.reset_prefix_cache()

    def take_events(self, data: st.DataObject | None = None) -> None:
        events = self.theirs.take_events()
        events_agree(self.ours.take_events(), events)
        if self.mix.events:
            invariants.check_consumer(self.theirs.pool, events, self.known)

    # Chosen by weight, and by one rule: Hypothesis would leave single rules out of whole runs.
    @rule(data=st.data(), action=st.sampled_from(ACTIONS))
    def act(self, data: st.DataObject, action: str) -> None:
        is_idle = all(twin.state != "running" for twin in self.twins)
        needs_running = action in ("step", "schedule", "preempt", "finish", "reject_drafts")
        getattr(self, "admit" if is_idle and needs_running else action)(data)

    @invariant()
    def same_state(self) -> None:
        if not hasattr(self, "ours"):
            return
        self.compare()
        references = Counter(self.pins)
        for _, groups in self.leases:
            references.update(i for row in groups for i in row if i != 0)
        for group in self.theirs.managers:
            references.update(invariants.check_rows(group))
        references.pop(0, None)  # the null block has no count
        invariants.check_pool(self.theirs.pool, references)

    def teardown(self) -> None:
        """P10, I15: when all is given back, all is free, and the cache can be reset."""
        if not hasattr(self, "ours"):
            return
        self.take_events()
        for twin in self.twins:
            self.free(twin)
        while self.leases:
            self.return_lease(0, by_lease=True)
        if self.pins:
            self.unpin()
        self.same_state()
        pool = self.theirs.pool
        assert len(pool.free) == pool.num_blocks - 1 - pool.num_withdrawn, "P10, I15"
        assert self.ours.reset_prefix_cache()


class HazardMachine(MixMachine):
    """The same for configurations in which 0.25.1 itself breaks."""

    @initialize(
        mix=st.sampled_from(HAZARDS).flatmap(lambda hazard: mixes(hazard)),
        algorithm=st.sampled_from(["sha256_cbor", "xxhash"]),
    )
    def build(self, mix: Mix, algorithm: str) -> None:
        super().build(mix, algorithm)


TestMixes = MixMachine.TestCase
TestHazards = HazardMachine.TestCase
# There is more to choose here than elsewhere.
TestMixes.settings = settings(max_examples=3 * settings().max_examples)
TestHazards.settings = settings(max_examples=3 * settings().max_examples)
