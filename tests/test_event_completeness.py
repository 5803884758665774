"""Whether who follows a stream knows all that the pool holds, and how much is lost if not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kvyard.events import EventSubscription, KVEventBatch, ZmqPublisher, subscribe

from tests.event_streams import (
    CLEARED,
    batch_of,
    events_of,
    fresh_inproc,
    lossy_stream,
    payload,
    stored,
)
from tests.foreign_engine import (
    LIVE,
    REPLAY,
    Engine025,
    block,
    counters,
    following,
    take,
    told,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)


def test_a_late_consumer_is_told_that_it_knows_a_part() -> None:
    with following(Engine025(), replay=False) as (engine, subscription):
        engine.send(7, block(7))
        assert len(take(subscription, 1)) == 1
        assert not subscription.is_complete
        engine.send(8, payload(CLEARED, stored([8])))
        assert len(take(subscription, 1)) == 1
        assert subscription.is_complete
        engine.send(10, block(10))
        assert told(take(subscription, 1)) == [(10, LIVE, 1)]
        assert not subscription.is_complete


@pytest.mark.parametrize(("first", "is_complete"), [(0, True), (10, False)])
def test_what_a_ring_has_may_be_all_or_a_part(first: int, is_complete: bool) -> None:
    engine = Engine025()
    for i in range(first, first + 3):
        engine.send(i, block(i))
    with following(engine) as (_, subscription):
        assert not subscription.is_complete
        assert len(take(subscription, 3)) == 3
        assert subscription.is_complete == is_complete


def test_a_batch_that_cannot_be_read_may_have_said_anything() -> None:
    with following(Engine025(), replay=False) as (engine, subscription):
        engine.send(0, block(0))
        assert len(take(subscription, 1)) == 1
        assert subscription.is_complete
        engine.send(1, b"\xc1")
        engine.send(2, block(2))
        assert len(take(subscription, 1)) == 1
        assert not subscription.is_complete


@pytest.mark.parametrize("live_set", [False, True])
def test_the_state_makes_a_late_consumer_complete(live_set: bool) -> None:
    endpoint, replay = fresh_inproc(), fresh_inproc()
    with ZmqPublisher(endpoint, replay, live_set=live_set, buffer_steps=2) as publisher:
        for i in range(1, 6):
            publisher.publish(batch_of(i))
        with subscribe(endpoint, replay_endpoint=replay) as subscription:
            for _ in range(2):  # what the ring has, or a reset and the state
                assert subscription.receive(20) is not None
            assert subscription.is_complete == live_set


def test_a_consumer_of_the_predecessor_sees_the_reset_without_replay(tmp_path: Path) -> None:
    """ZMQ connects again a tenth of a second after the restart; the first batch waits for that."""
    endpoint = f"ipc://{tmp_path}/e"
    publisher = ZmqPublisher(endpoint)
    with subscribe(endpoint) as subscription:
        publisher.publish(batch_of(1))
        assert len(received_batches(subscription, 2)) == 2
        publisher.close()
        with ZmqPublisher(endpoint) as publisher:
            publisher.publish(batch_of(2))  # at once
            cleared, stored_again = received_batches(subscription, 2)
        assert [type(event).__name__ for event in cleared.events] == ["AllBlocksCleared"]
        assert stored_again.events == batch_of(2).events
        assert subscription.is_complete
        assert (subscription.num_restarts, subscription.num_lost) == (1, 0)


def received_batches(subscription: EventSubscription, count: int) -> list[KVEventBatch]:
    """The next batches."""
    received = [subscription.receive(20) for _ in range(count)]
    return [item.batch for item in received if item is not None]


# ----------------------------------------------------------------------- losses at the beginning


def test_what_was_lost_before_the_first_batch_counts() -> None:
    """It asked when nothing had been published; 0 to 3 are in no ring any more."""
    with lossy_stream(lambda sequence: sequence < 5, 2, False) as (publisher, subscription):
        assert subscription.receive(0.01) is None
        for i in range(6):
            publisher.publish(batch_of(i + 1))
        # At least one; nobody knows that the numbers began at 0.
        assert told(take(subscription, 2)) == [(4, REPLAY, 1), (5, REPLAY, 0)]
        assert (subscription.num_gaps, subscription.num_lost) == (1, 1)
        assert not subscription.is_complete


def test_without_a_ring_the_first_batch_tells_of_a_loss() -> None:
    with following(Engine025()) as (engine, subscription):
        assert subscription.receive(0.01) is None
        engine.send(3, block(3), lost=True)
        engine.ring.clear()
        subscription.catch_up()
        assert subscription.receive(0.01) is None
        engine.send(4, block(4))
        engine.send(5, block(5))
        assert told(take(subscription, 2)) == [(4, REPLAY, 1), (5, REPLAY, 0)]
        assert (subscription.num_gaps, subscription.num_lost) == (1, 1)
        assert not subscription.is_complete


def test_who_was_not_told_that_nothing_was_published_misses_nothing() -> None:
    """A replay endpoint that is silent says nothing about what was before."""
    options = {"replay_timeout": 0.05}
    with following(Engine025(has_replay=False), **options) as (engine, subscription):
        assert subscription.receive(0.01) is None
        engine.send(7, block(7))
        assert told(take(subscription, 1)) == [(7, LIVE, 0)]
        assert counters(subscription) == {"num_received": 1, "num_failed_requests": 2}
        assert not subscription.is_complete


def test_a_reset_at_the_beginning_loses_nothing() -> None:
    with following(Engine025()) as (engine, subscription):
        assert subscription.receive(0.01) is None
        engine.send(1_000, payload(CLEARED, stored([1])))
        assert told(take(subscription, 1)) == [(1_000, LIVE, 0)]
        assert (subscription.num_gaps, subscription.num_lost) == (0, 0)
        assert subscription.is_complete


def test_a_part_of_a_dump_is_not_complete() -> None:
    endpoint, replay = fresh_inproc(), fresh_inproc()
    with ZmqPublisher(endpoint, replay, live_set=True) as publisher:
        publisher.publish(payload(stored(list(range(1, 1_001)))))
        with subscribe(endpoint, replay_endpoint=replay) as subscription:
            found = 0
            while found < 1_000:
                assert not subscription.is_complete
                received = subscription.receive(20)
                assert received is not None
                found += sum(
                    len(event.get("block_hashes", [])) for event in events_of(received.payload)
                )
            assert subscription.is_complete


def test_who_gets_no_dump_gets_the_ring() -> None:
    """The dumps of a publisher may be in the hands of slow clients; its ring is not."""
    engine = Engine025()
    engine.dump_is_silent = True
    engine.send(0, block(0))
    with following(engine, replay_timeout=0.3) as (_, subscription):
        assert told(take(subscription, 1)) == [(0, REPLAY, 0)]
        assert (subscription.is_complete, subscription.num_failed_requests) == (True, 1)
