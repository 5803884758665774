"""The stream is complete: who applies it from the start, or a dump and then the stream, holds
exactly what the pool holds.

Schedules of all kinds of groups; the payloads are read by msgspec as vLLM's structs, so that
nothing of ours stands between the bytes and the verdict, which is the reference model's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from kvyard.events import (
    BlockStored,
    KVCacheEvent,
    LiveSet,
    PrefixIndex,
    WireFormat,
    decode_batch,
)
from kvyard.events.types import FURTHER_FIELDS

from tests import vllm_events
from tests.helpers import event_as_dict
from tests.mixes import Mix, mixes
from tests.model import invariants
from tests.model.hashing import external_hash, split_key
from tests.test_group_mixes import MixMachine
from tests.twins import sort_alias_runs

Key = tuple[int, int]


class Consumer:
    """Keeps what events tell: a count where copies are counted, else a set."""

    def __init__(self, counts: bool) -> None:
        self.counts = counts
        self.known: Counter[Key] = Counter()

    def apply(self, payload: bytes) -> None:
        for event in vllm_events.DECODER.decode(payload).events:
            if isinstance(event, vllm_events.AllBlocksCleared):
                self.known.clear()
                continue
            for block_hash in event.block_hashes:
                assert isinstance(block_hash, int)
                assert event.group_idx is not None
                key = (block_hash, event.group_idx)
                if isinstance(event, vllm_events.BlockRemoved):
                    assert self.known[key] > 0, "removed, but never stored"
                    self.known[key] -= 1
                else:
                    self.known[key] = self.known[key] + 1 if self.counts else 1
        self.known = +self.known


class StreamMachine(MixMachine):
    """The schedules of `MixMachine`, told as bytes."""

    @initialize(mix=mixes(), algorithm=st.sampled_from(["sha256_cbor", "xxhash"]))
    def build(self, mix: Mix, algorithm: str) -> None:
        super().build(replace(mix, events=True), algorithm)
        rule = str(self.mix.semantics.removal_event)
        self.counts = rule == "every_copy"
        self.consumer = Consumer(self.counts)
        self.live_set = LiveSet(rule)
        self.late: list[Consumer] = []
        self.index = PrefixIndex(rule)

    def content(self) -> Counter[Key]:
        """What the pool holds, by the model."""
        content: Counter[Key] = Counter()
        for key_bytes, copies in self.theirs.pool.cached.items():
            block_hash, group_id = split_key(key_bytes)
            content[external_hash(block_hash), group_id] += len(copies) if self.counts else 1
        return content

    def take_events(self, data: st.DataObject | None = None) -> None:
        expected = self.theirs.take_events()
        alias = [event.get("alias", False) for event in expected]
        plain = [{k: v for k, v in event.items() if k != "alias"} for event in expected]
        wire_format = WireFormat.VLLM_0_25
        if data is not None:
            wire_format = data.draw(st.sampled_from([wire_format, WireFormat.ROUTER]))
        payload = self.ours.take_event_batch(wire_format, ts=1.0)
        if payload is None:
            assert not expected
        else:
            told = [without_salt(event) for event in decode_batch(payload).events]
            assert sort_alias_runs(told, alias) == sort_alias_runs(plain, alias)
            self.live_set.apply(payload)
            self.index.apply("worker", payload)
            for consumer in [self.consumer, *self.late]:
                consumer.apply(payload)
        content = self.content()
        assert len(self.live_set) == len(content)
        for consumer in [self.consumer, *self.late]:
            assert consumer.known == content
        invariants.check_consumer(self.theirs.pool, expected, self.known)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        super().act(data)
        self.take_events(data)

    @rule(wire_format=st.sampled_from([WireFormat.VLLM_0_25, WireFormat.ROUTER]))
    def come_late(self, wire_format: WireFormat) -> None:
        """A consumer that knows nothing gets a dump, and the stream from here on."""
        late = Consumer(self.counts)
        dump = self.live_set.dump(2.0, 0, wire_format)
        parents: set[Key] = set()
        for payload in dump:
            late.apply(payload)
            for event in decode_batch(payload).events:
                self.check_store(event, parents)
        assert late.known == self.content()
        self.late = [*self.late[-1:], late]
        # And a set that is made of a dump is as good as the one it came from.
        again = LiveSet(str(self.mix.semantics.removal_event))
        for payload in dump:
            again.apply(payload)
        assert len(again) == len(self.live_set)

    def check_store(self, event: KVCacheEvent, parents: set[Key]) -> None:
        stored = without_salt(event)
        assert stored["type"] == "BlockStored"
        [block_hash] = stored["block_hashes"]
        group = stored["group_idx"]
        parent = stored["parent_block_hash"]
        assert parent is None or (parent, group) in parents, "a child before its parent"
        parents.add((block_hash, group))
        if self.mix.semantics.sparse_store_event == "one_per_run":
            assert len(stored["token_ids"]) == stored["block_size"]
        assert stored["kv_cache_spec_kind"] == self.event_kind(group)

    def event_kind(self, group: int) -> str:
        kind = self.mix.groups[group].kind
        return "full_attention" if kind == "rswa" else kind


def without_salt(event: KVCacheEvent) -> dict[str, Any]:
    """An event as vLLM has it."""
    if isinstance(event, BlockStored):
        unset: dict[str, Any] = dict.fromkeys(FURTHER_FIELDS)
        event = replace(event, **unset)
    return event_as_dict(event)


TestStream = StreamMachine.TestCase
TestStream.settings = settings(max_examples=2 * settings().max_examples)
