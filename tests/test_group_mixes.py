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
from hypothesis.stateful import initialize

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
        self.most_drafts = mix.most_drafts

    # -- what a scheduler does

    def allocate(
        self,
        data: st.DataObject,
        twin: Twin,
        hits: tuple[kvyard.KVCacheBlocks | None, Hits | None] = (None, None),
        **arguments: Any,
    ) -> bool:
        if arguments.get("num_in_flight_tokens") or twin.theirs.num_in_flight_tokens:
            self.had_in_flight.add(twin.name)
        if not super().allocate(data, twin, hits, **arguments):
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

    def num_encoder_tokens(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, 9)) if self.mix.has_cross_attention else 0

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

    def take_events(self, data: st.DataObject | None = None) -> None:
        events = self.theirs.take_events()
        events_agree(self.ours.take_events(), events)
        if self.mix.events:
            invariants.check_consumer(self.theirs.pool, events, self.known)

    def compare(self) -> None:
        super().compare()
        references = Counter(self.pins)
        for _, groups in self.leases:
            references.update(i for row in groups for i in row if i != 0)
        for group in self.theirs.managers:
            references.update(invariants.check_rows(group))
        references.pop(0, None)  # the null block has no count
        invariants.check_pool(self.theirs.pool, references)


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
