"""The event stream beside vLLM 0.25.1's: we follow its publisher, its classes read our bytes.

Needs vLLM 0.25.1 on the Python path, as `test_planning_vllm.py` explains.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import kvyard
import pytest
from kvyard.events import BatchSource, EventSubscription, ZmqPublisher, subscribe
from kvyard.events.types import FURTHER_FIELDS

from tests.event_streams import Engine, ask, fresh_inproc, number, raw_consumer

if TYPE_CHECKING:
    from collections.abc import Iterator

vllm_events: Any = pytest.importorskip(
    "vllm.distributed.kv_events", reason="vLLM 0.25.1 is not on the Python path"
)
msgspec: Any = pytest.importorskip("msgspec")

pytestmark = pytest.mark.timeout(120)


def stored(hash_: int, tokens: list[Any]) -> Any:
    """A batch of vLLM's classes."""
    event = vllm_events.BlockStored([hash_], None, tokens, 2, None, "GPU", None, group_idx=0)
    return vllm_events.KVEventBatch(ts=1.5, events=[event])


@contextmanager
def following_vllm(**options: Any) -> Iterator[tuple[Any, EventSubscription]]:
    """VLLM's publisher with a ring of 100 batches, and a subscription of ours."""
    endpoint, replay = fresh_inproc(), fresh_inproc()
    publisher = vllm_events.ZmqEventPublisher(
        0, endpoint=endpoint, replay_endpoint=replay, buffer_steps=100
    )
    try:
        with subscribe(endpoint, replay_endpoint=replay, **options) as subscription:
            yield publisher, subscription
    finally:
        publisher.shutdown()


def take(subscription: EventSubscription, count: int) -> list[tuple[int, str, int, list[Any]]]:
    """Number, source, lost batches, and hashes of the next batches."""
    taken: list[tuple[int, str, int, list[Any]]] = []
    for _ in range(count):
        item = subscription.receive(20)
        assert item is not None
        hashes = [e.block_hashes for e in item.batch.events if isinstance(e, kvyard.BlockStored)]
        taken.append((item.sequence, item.source, item.num_lost, hashes))
    return taken


def test_a_late_consumer_gets_vllms_ring_and_then_its_stream() -> None:
    with following_vllm() as (publisher, subscription):
        for i in range(5):
            publisher.publish(stored(i + 1, [1, 2]))
        while publisher._event_queue.unfinished_tasks:
            pass
        assert take(subscription, 5) == [(i, BatchSource.REPLAY, 0, [[i + 1]]) for i in range(5)]
        publisher.publish(stored(1 << 63, [1, 2]))
        assert take(subscription, 1) == [(5, BatchSource.LIVE, 0, [[1 << 63]])]


def test_a_number_that_vllm_burns_is_lost_once() -> None:
    with following_vllm(catch_up=False) as (publisher, subscription):
        publisher.publish(stored(1, [1, 2]))
        assert [taken[0] for taken in take(subscription, 1)] == [0]
        publisher.publish(stored(2, [object(), 2]))
        publisher.publish(stored(3, [1, 2]))
        [(sequence, _, num_lost, hashes)] = take(subscription, 1)
        assert (sequence, num_lost, hashes) == (2, 1, [[3]])
        assert subscription.num_failed_requests == 0


def test_vllms_classes_read_our_stream_and_replay() -> None:
    """Every field of every event, as `take_events` of a twin tells them."""
    decoder = msgspec.msgpack.Decoder(vllm_events.KVEventBatch)
    engine, twin = Engine(5), Engine(5)
    endpoint, replay = fresh_inproc(), fresh_inproc()
    with (
        ZmqPublisher(endpoint, replay, wire_format="vllm_0_25") as publisher,
        raw_consumer(endpoint) as consumer,
    ):
        told = []
        for _ in range(100):
            publisher.publish(engine.step("vllm_0_25"))
            told.append(twin.step_events())
        told = [events for events in told if events]
        live = [consumer.recv_multipart() for _ in told]
        for i, (frames, events) in enumerate(zip(live, told, strict=True)):
            assert frames[:2] == [b"", number(i)]
            batch = decoder.decode(frames[2])
            assert batch.data_parallel_rank == 0
            assert [as_fields(event) for event in batch.events] == [
                {k: v for k, v in as_fields(event).items() if k not in FURTHER_FIELDS}
                for event in events
            ]
        *replies, _ = ask(replay, b"", number(0))
        assert [frames[1:] for frames in replies] == [frames[1:] for frames in live]


def as_fields(event: Any) -> dict[str, Any]:
    """The event's name and fields, of a struct or a dataclass."""
    if dataclasses.is_dataclass(event):
        names = [field.name for field in dataclasses.fields(event)]
    else:
        names = list(event.__struct_fields__)
    fields = {name: getattr(event, name) for name in names}
    if fields.get("extra_keys") is not None:
        fields["extra_keys"] = [None if key is None else tuple(key) for key in fields["extra_keys"]]
    return {"type": type(event).__name__, **fields}
