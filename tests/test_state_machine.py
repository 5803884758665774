"""kvyard's manager and the reference model, driven side by side through random valid schedules.

Every answer is compared, and after each step the whole visible state: free order, reference counts,
keys, usage, events. The schedules keep the contract of a scheduler (what misuse does is the subject
of `test_misuse`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import kvyard
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests import helpers
from tests.mixes import prompts
from tests.model import manager as model_manager
from tests.twin_machine import TwinMachine
from tests.twins import (
    ALGORITHMS,
    Requests,
    Twin,
    extras,
    semantics_choices,
    semantics_of_model,
)

if TYPE_CHECKING:
    from tests.model.manager import Hits


class ManagerMachine(TwinMachine):
    """Schedules of a manager with one group, or none."""

    @initialize(
        kind=st.sampled_from(["full_attention"] * 3 + ["rswa"] * 3 + ["mla_attention", ""]),
        block_size=st.integers(1, 4),
        ranks=st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2)]),
        room=st.integers(0, 16),
        max_model_len=st.integers(12, 48),
        window=st.sampled_from([1, 2, 2, 3, 5, 9]),
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
        room: int,
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
        self.longest = self.budget = max_model_len
        # From none to four requests of 32 tokens.
        num_blocks = 2 + room * -(-min(max_model_len, 32) // self.block_size) // 4
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

    def arrive(self, data: st.DataObject) -> None:
        room = data.draw(st.sampled_from([0, 8, 16, 24]), label="room")  # for the output
        tokens = data.draw(prompts(), label="prompt")[: max(1, self.longest - room)]
        skip_reading = data.draw(st.integers(0, 5), label="skip reading?") == 1
        twin = self.requests.make(tokens, data.draw(extras()), skip_reading)
        twin.foreign = self.foreign
        self.twins.append(twin)

    def look_up(
        self, data: st.DataObject, twin: Twin
    ) -> tuple[tuple[kvyard.KVCacheBlocks, Hits], int]:
        hit, length = self.ours.get_computed_blocks(twin.shown)
        expected, expected_length = self.theirs.get_computed_blocks(twin.theirs)
        assert (list(hit.get_block_ids()), length) == (expected, expected_length)
        return (hit, expected), length

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


TestManager = ManagerMachine.TestCase
