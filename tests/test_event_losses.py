"""Batches are lost on the way, and recovered by replay or dump: nothing is missing in the end.

Schedules of all kinds of groups under both rules of removal, as in `test_event_stream.py`; here
they go through a publisher, a transport that loses what Hypothesis says, and a subscription.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from kvyard.events import BatchSource, LiveSet, WireFormat

from tests.event_streams import lossy_stream
from tests.mixes import Mix, mixes
from tests.test_event_stream import StreamMachine
from tests.test_group_mixes import MixMachine

if TYPE_CHECKING:
    from tests.test_event_stream import Key


class LossyMachine(StreamMachine):
    """The schedules of `MixMachine`, published, lost in part, and followed."""

    @initialize(
        mix=mixes(),
        algorithm=st.sampled_from(["sha256_cbor", "xxhash"]),
        buffer_steps=st.sampled_from([1, 3, 1000]),
        has_live_set=st.booleans(),
    )
    def build_stream(self, mix: Mix, algorithm: str, buffer_steps: int, has_live_set: bool) -> None:
        super().build(replace(mix, events=True), algorithm)
        removal_event = str(self.mix.semantics.removal_event)
        self.stack = ExitStack()
        self.lost: set[int] = set()
        live_set = LiveSet(removal_event) if has_live_set or buffer_steps < 1000 else False
        self.publisher, self.subscription = self.stack.enter_context(
            lossy_stream(self.lost.__contains__, buffer_steps, live_set)
        )
        self.held: dict[int, Counter[Key]] = {0: Counter()}
        """The pool's content before the batch of each number."""

    def build(self, mix: Mix, algorithm: str) -> None:
        """`build_stream` stands for it."""

    def come_late(self, wire_format: WireFormat) -> None:
        """Consumers come late through the subscription."""

    def take_events(self, data: st.DataObject | None = None) -> None:
        """Publish what happened; it may be lost."""
        self.theirs.take_events()
        payload = self.ours.take_event_batch(ts=1.0)
        if payload is not None:
            if data is not None and data.draw(st.booleans(), label="lost"):
                self.lost.add(self.publisher.next_sequence)
            self.publisher.publish(payload)
            self.held[self.publisher.next_sequence] = self.content()

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        MixMachine.act(self, data)
        self.take_events(data)
        # Seldom, so that more is lost than a small ring holds.
        reading = data.draw(st.sampled_from([None] * 8 + ["live", "all"]), label="read")
        if reading == "live":
            self.read()
        elif reading == "all":
            self.read_to_the_end()

    def read(self) -> None:
        """After each batch, and each dump, the consumer has what the pool had then."""
        before_dump = None
        while (item := self.subscription.receive(0.005)) is not None:
            if before_dump is not None and item.source is not BatchSource.DUMP:
                assert self.consumer.known == self.held[before_dump]
            self.consumer.apply(item.payload)
            before_dump = item.sequence if item.source is BatchSource.DUMP else None
            if before_dump is None:
                assert self.consumer.known == self.held[item.sequence + 1]
        if before_dump is not None:
            assert self.consumer.known == self.held[before_dump]

    def read_to_the_end(self) -> None:
        self.subscription.catch_up()
        self.read()
        assert self.consumer.known == self.content()
        assert self.subscription.next_sequence in (None, self.publisher.next_sequence)
        # A reset behind lost batches looks like a new beginning, which loses nothing either.
        assert self.subscription.num_lost == 0

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            with self.stack:
                self.read_to_the_end()
        super().teardown()


TestLosses = LossyMachine.TestCase
TestLosses.settings = settings(max_examples=settings().max_examples)
