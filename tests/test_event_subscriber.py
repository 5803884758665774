"""Following a stream: gaps, replay, dumps, restarts, and what a consumer holds in the end."""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import kvyard
import pytest
from kvyard.events import (
    BatchSource,
    EventSubscription,
    ZmqPublisher,
    subscribe,
)

from tests.event_streams import (
    CLEARED,
    Consumer,
    Engine,
    batch_of,
    endpoints,
    fresh_inproc,
    lossy_stream,
    number,
    number_of,
    payload,
    stored,
    wait_until,
)
from tests.foreign_engine import (
    LIVE,
    REPLAY,
    RESTART,
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

# ----------------------------------------------------------------------------------- the quiet case


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "inproc"])
def test_batches_arrive_in_order(scheme: str, tmp_path: Path) -> None:
    endpoint, replay = endpoints(scheme, tmp_path)
    with ZmqPublisher(endpoint, replay, topic="kv@p@m", start_sequence=0) as publisher:
        publisher.publish(batch_of(1))  # before anybody listens
        with subscribe(
            publisher.endpoint, replay_endpoint=publisher.replay_endpoint, topic="kv@p@"
        ) as subscription:
            first = subscription.receive(20)
            assert first is not None
            assert (first.sequence, first.source) == (0, BatchSource.REPLAY)
            for i in range(2, 100):
                publisher.publish(batch_of(i))
            wait_until(lambda: publisher.num_queued == 0)
            subscription.catch_up()  # what was sent before the connection stood
            received = [first]
            for item in subscription:
                received.append(item)
                if len(received) == 99:
                    break
    assert [item.sequence for item in received] == list(range(99))
    assert [number_of(item.payload) for item in received] == list(range(1, 100))
    assert all(item.batch == batch_with_rank(i + 1) for i, item in enumerate(received))
    assert subscription.num_lost == 0


def batch_with_rank(i: int) -> kvyard.KVEventBatch:
    return kvyard.KVEventBatch(1.5, batch_of(i).events, 0)


def test_a_topic_selects() -> None:
    with following(Engine025(), replay=False, topic="kv@a") as (engine, subscription):
        engine.send_frames(b"kv@b", number(0), block(1))
        engine.send_frames(b"kv@a@m", number(5), block(2))
        assert told(take(subscription, 1)) == [(5, LIVE, 0)]


def test_a_topic_selects_among_replies() -> None:
    engine = Engine025(topic=b"kv@other")
    engine.send(0, block(0))
    with following(engine, topic="kv@x") as (_, subscription):
        assert take(subscription, 0) == []
        assert len(engine.asked) == 2


def test_arrays_and_unknown_fields_are_read() -> None:
    batch = payload(
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None],  # type: ignore[arg-type]
        {**stored([8], parent=7), "session_id": "s", "locality": "LOCAL"},
    )
    with following(Engine025(), replay=False) as (engine, subscription):
        engine.send(0, batch)
        [item] = take(subscription, 1)
    hashes = [e.block_hashes for e in item.batch.events if isinstance(e, kvyard.BlockStored)]
    assert hashes == [[7], [8]]


# ----------------------------------------------------------------------------------------- gaps


def test_a_gap_that_nobody_can_fill_is_told() -> None:
    with following(Engine025(), replay=False) as (engine, subscription):
        engine.send(3, block(3))
        engine.send(4, block(4), lost=True)
        engine.send(5, block(5), lost=True)
        engine.send(6, block(6))
        assert told(take(subscription, 2)) == [(3, LIVE, 0), (6, LIVE, 2)]
        assert counters(subscription) == {"num_received": 2, "num_gaps": 1, "num_lost": 2}


@pytest.mark.parametrize("topic", [None, b"", b"kv@x"], ids=["4 frames", "5 frames", "topic"])
def test_a_gap_is_replayed(topic: bytes | None) -> None:
    with following(Engine025(topic=topic), catch_up=False) as (engine, subscription):
        engine.send(0, block(0))
        engine.send(1, block(1), lost=True)
        engine.send(2, block(2), lost=True)
        engine.send(3, block(3))
        items = take(subscription, 4)
        assert told(items) == [(0, LIVE, 0), (1, REPLAY, 0), (2, REPLAY, 0), (3, REPLAY, 0)]
        assert [number_of(item.payload) for item in items] == [0, 1, 2, 3]
        engine.send(4, block(4))
        assert told(take(subscription, 1)) == [(4, LIVE, 0)]
        assert engine.asked == [1]
        # The live message of 3 came too.
        assert counters(subscription) == {
            "num_received": 5,
            "num_gaps": 1,
            "num_replayed": 3,
            "num_duplicates": 1,
        }


def test_a_number_that_the_engine_burnt_is_lost_once() -> None:
    """vLLM uses a number up for a batch that cannot be encoded (spec manager 8.5)."""
    with following(Engine025(), catch_up=False) as (engine, subscription):
        for i in range(5):
            engine.send(i, block(i), burnt=i == 2)
        assert told(take(subscription, 4)) == [
            (0, LIVE, 0),
            (1, LIVE, 0),
            (3, REPLAY, 1),
            (4, REPLAY, 0),
        ]
        # It asks for the batches, then for a dump, which is no number that any engine reaches.
        assert engine.asked == [2, int.from_bytes(b"dump", "big")]
        assert subscription.num_lost == 1
        engine.send(5, block(5))
        assert told(take(subscription, 1)) == [(5, LIVE, 0)]


def test_the_end_of_a_stream_can_be_asked_for() -> None:
    with following(Engine025(), catch_up=False) as (engine, subscription):
        engine.send(0, block(0))
        assert len(take(subscription, 1)) == 1
        engine.send(1, block(1), lost=True)
        assert subscription.receive(0.05) is None
        subscription.catch_up()
        assert told(take(subscription, 1)) == [(1, REPLAY, 0)]


def test_a_late_consumer_begins_with_what_the_ring_has() -> None:
    engine = Engine025()
    for i in range(10, 13):
        engine.send(i, block(i))
    with following(engine) as (_, subscription):
        assert told(take(subscription, 3)) == [(i, REPLAY, 0) for i in range(10, 13)]
        engine.send(13, block(13))
        assert told(take(subscription, 1)) == [(13, LIVE, 0)]


def test_a_replay_endpoint_that_is_silent_costs_its_time_only() -> None:
    options = {"replay_timeout": 0.05}
    with following(Engine025(has_replay=False), **options) as (engine, subscription):
        engine.send(0, block(0))
        engine.send(2, block(2))
        assert told(take(subscription, 2)) == [(0, LIVE, 0), (2, LIVE, 1)]
        # At the start for a dump and a replay, then for the gap.
        assert subscription.num_failed_requests == 3


def test_the_first_batch_may_be_lost_to_who_was_there_before_it() -> None:
    with following(Engine025()) as (engine, subscription):
        assert subscription.receive(0.01) is None
        engine.send(0, block(0), lost=True)
        engine.send(1, block(1))
        assert told(take(subscription, 2)) == [(0, REPLAY, 0), (1, REPLAY, 0)]
        assert subscription.is_complete
        assert counters(subscription) == {
            "num_received": 2,
            "num_gaps": 1,
            "num_replayed": 2,
            "num_duplicates": 1,
        }


def test_the_first_numbers_of_a_clock_may_be_lost() -> None:
    with lossy_stream(lambda sequence: sequence < 1_001, 1000, False, 1_000) as (
        publisher,
        subscription,
    ):
        assert subscription.receive(0.01) is None
        publisher.publish(batch_of(0))  # 1000 clears
        publisher.publish(batch_of(1))
        items = take(subscription, 3)
        assert [(item.sequence, item.num_lost) for item in items] == [
            (1_000, 0),
            (1_001, 0),
            (1_002, 0),
        ]
        assert subscription.is_complete
        assert (subscription.num_gaps, subscription.num_restarts) == (1, 0)


# ---------------------------------------------------------------------------------------- restarts


def test_a_restart_from_0_clears_first() -> None:
    with following(Engine025(), replay=False) as (engine, subscription):
        consumer = Consumer()
        for i in range(3):
            engine.send(i, block(i))
        for item in take(subscription, 3):
            consumer.apply(item.batch)
        engine.send(0, block(100))
        engine.send(1, block(101))
        items = take(subscription, 3)
        assert told(items) == [(0, RESTART, 0), (0, LIVE, 0), (1, LIVE, 0)]
        for item in items:
            consumer.apply(item.batch)
        assert consumer.content == {(100, 0), (101, 0)}
        assert counters(subscription) == {"num_received": 6, "num_restarts": 1}


def test_a_restart_whose_beginning_was_missed_is_replayed() -> None:
    """Also after a replay, from an engine whose clock stands still."""
    with following(Engine025(), catch_up=False) as (engine, subscription):
        for i in range(5):
            engine.send(i, block(i), lost=i == 2)
        assert len(take(subscription, 5)) == 5
        assert subscription.num_replayed == 3
        engine.ring.clear()
        engine.send(0, block(100), lost=True)
        engine.send(1, block(101), lost=True)
        engine.send(2, block(102))
        items = take(subscription, 4)
        assert told(items) == [(2, RESTART, 0), (0, REPLAY, 0), (1, REPLAY, 0), (2, REPLAY, 0)]
        assert [number_of(item.payload) for item in items[1:]] == [100, 101, 102]
        assert (subscription.num_restarts, subscription.num_lost) == (1, 0)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_low_number_after_a_replay_is_a_duplicate_or_a_restart(restarted: bool) -> None:
    """No live message came before, so that only its time tells."""
    engine = Engine025()
    for i in range(10):
        engine.send(i, payload(stored([i]), ts=100.0 + i))
    with following(engine) as (_, subscription):
        assert len(take(subscription, 10)) == 10
        if restarted:
            engine.ring.clear()
            engine.send(0, payload(stored([100]), ts=200.0))
            assert told(take(subscription, 2)) == [(0, RESTART, 0), (0, LIVE, 0)]
        else:  # it had been on its way
            engine.send_frames(b"", number(9), payload(stored([9]), ts=109.0))
            assert take(subscription, 0) == []
        assert subscription.num_duplicates == (not restarted)
        assert subscription.num_restarts == restarted


@pytest.mark.parametrize("replay", [False, True])
def test_a_restart_that_jumps_ahead_loses_nothing(replay: bool) -> None:
    with following(Engine025(), replay=replay, catch_up=False) as (engine, subscription):
        engine.send(0, block(0))
        engine.send(1_000_000, payload(CLEARED), lost=replay)
        if replay:
            engine.ring.pop(0)
        engine.send(1_000_001, block(1))
        items = take(subscription, 3)
        source = REPLAY if replay else LIVE
        assert told(items) == [(0, LIVE, 0), (1_000_000, source, 0), (1_000_001, source, 0)]
        assert (subscription.num_restarts, subscription.num_lost) == (1, 0)
        assert subscription.num_gaps == replay


@pytest.mark.parametrize("live_set", [False, True])
def test_our_publisher_restarts_under_a_consumer(live_set: bool, tmp_path: Path) -> None:
    """The consumer stays; whatever it missed, it ends with the second pool's content."""
    endpoint, replay = endpoints("ipc", tmp_path)
    consumer = Consumer()

    def read_until(subscription: EventSubscription, content: set[tuple[int, int]]) -> None:
        while consumer.content != content:
            item = subscription.receive(20)
            assert item is not None
            consumer.apply(item.batch)

    options: dict[str, Any] = {"replay_endpoint": replay, "live_set": live_set}
    with ExitStack() as stack:
        publisher = ZmqPublisher(endpoint, **options)
        subscription = stack.enter_context(subscribe(endpoint, replay_endpoint=replay))
        publisher.publish(payload(stored([1])))
        publisher.publish(payload(stored([2])))
        read_until(subscription, {(1, 0), (2, 0)})
        publisher.close()
        time.sleep(0.005)
        publisher = stack.enter_context(ZmqPublisher(endpoint, **options))
        for i in range(3, 6):
            publisher.publish(payload(stored([i])))
            time.sleep(0.05)
        subscription.catch_up()
        read_until(subscription, {(3, 0), (4, 0), (5, 0)})
        assert subscription.num_lost == 0


def test_each_restart_has_a_clock_of_its_own() -> None:
    """What the first engine replayed is newer than the third's batches, by the second's clock."""
    with following(Engine025()) as (engine, subscription):
        for i in range(3):
            engine.send(i, payload(stored([i]), ts=100.0 + i), lost=i < 2)
        assert told(take(subscription, 3)) == [(i, REPLAY, 0) for i in range(3)]
        engine.ring.clear()
        engine.send(0, payload(stored([100]), ts=50.0))
        assert told(take(subscription, 2)) == [(0, RESTART, 0), (0, LIVE, 0)]
        for i in range(1, 5):
            engine.send(i, payload(stored([100 + i]), ts=50.0 + i), lost=True)
        subscription.catch_up()
        assert told(take(subscription, 4)) == [(i, REPLAY, 0) for i in range(1, 5)]
        # Lower than expected and higher than the last live one: only its time tells.
        engine.ring.clear()
        for i in range(3):
            engine.send(i, payload(stored([200 + i]), ts=60.0 + i), lost=i < 2)
        items = take(subscription, 4)
        assert told(items) == [(2, RESTART, 0), (0, REPLAY, 0), (1, REPLAY, 0), (2, REPLAY, 0)]
        assert [number_of(item.payload) for item in items[1:]] == [200, 201, 202]
        assert (subscription.num_restarts, subscription.num_lost) == (2, 0)


# ------------------------------------------------------------------------------ what is not a batch


def test_what_does_not_belong_to_the_stream_is_counted() -> None:
    with following(Engine025(), replay=False) as (engine, subscription):
        engine.send_frames(b"", b"\0", block(0))
        engine.send_frames(b"", number(0))
        engine.send(0, b"\xc1")
        engine.send(1, payload({"type": "BlockPinned"}))
        engine.send(2, block(2))
        unknown, item = take(subscription, 2)
        assert unknown.batch.events == []
        assert item.sequence == 2
        assert subscription.num_malformed == 3
        assert subscription.num_lost == 0


@pytest.mark.parametrize(("option", "value"), [("hwm", -1), ("replay_timeout", 0)])
def test_options_out_of_range_are_named(option: str, value: int) -> None:
    with pytest.raises(kvyard.ConfigError, match=option):
        subscribe(fresh_inproc(), **{option: value})  # type: ignore[arg-type]


def test_a_malformed_endpoint_is_named() -> None:
    with pytest.raises(kvyard.EndpointError, match="nowhere"):
        subscribe("nowhere")


def test_closing_ends_the_iteration_of_another_thread() -> None:
    with following(Engine025(), replay=False) as (engine, subscription):
        received: list[int] = []
        thread = threading.Thread(
            target=lambda: received.extend(item.sequence for item in subscription)
        )
        thread.start()
        engine.send(0, block(0))
        wait_until(lambda: received == [0])
        subscription.close()
        thread.join(20)
        assert not thread.is_alive()
        subscription.close()
        assert subscription.receive(0) is None
        assert list(subscription) == []
        subscription.catch_up()


def test_catching_up_while_another_thread_receives() -> None:
    """That thread asks; the call returns at once."""
    with following(Engine025(), catch_up=False) as (engine, subscription):
        engine.send(0, block(0))
        received: list[int] = []
        thread = threading.Thread(
            target=lambda: received.extend(item.sequence for item in subscription)
        )
        thread.start()
        wait_until(lambda: received == [0])
        engine.send(1, block(1), lost=True)
        started = time.monotonic()
        subscription.catch_up()
        assert time.monotonic() - started < 1
        wait_until(lambda: received == [0, 1])
        assert engine.asked == [1]
        subscription.close()
        thread.join(20)
        assert not thread.is_alive()


# ------------------------------------------------------- losing batches of a real manager


@pytest.mark.parametrize(
    ("buffer_steps", "live_set"),
    [(10_000, False), (10_000, True), (5, True), (1, True)],
    ids=["replay", "replay, dump at first", "replay or dump", "mostly dump"],
)
@pytest.mark.parametrize("seed", range(3))
def test_after_losses_a_consumer_holds_what_the_pool_holds(
    seed: int, buffer_steps: int, live_set: bool
) -> None:
    """At every batch, not only in the end: nothing is lost and nothing applied twice."""
    generator = random.Random(seed)
    engine, consumer = Engine(seed), Consumer()
    held: dict[int, set[tuple[int, int]]] = {}
    with lossy_stream(lambda _: generator.random() < 0.3, buffer_steps, live_set) as (
        publisher,
        subscription,
    ):
        for _ in range(300):
            batch = engine.step()
            publisher.publish(batch)
            if batch is not None:
                held[publisher.next_sequence - 1] = engine.content()
            if generator.random() < 0.1:
                read_all(subscription, consumer, held)
        subscription.catch_up()
        read_all(subscription, consumer, held)
        wait_until(lambda: publisher.num_queued == 0)
        assert len(held) > 200
        assert consumer.content == engine.content()
        assert subscription.num_lost == 0
        assert subscription.num_gaps > 5
        assert buffer_steps == 1 or subscription.num_replayed > 5
        assert (subscription.num_dumps > (buffer_steps < 10)) == live_set


def read_all(
    subscription: EventSubscription, consumer: Consumer, held: dict[int, set[tuple[int, int]]]
) -> None:
    """Apply what there is; after each batch the consumer has what the pool had then."""
    item = subscription.receive(0.005)
    while item is not None:
        consumer.apply(item.batch)
        following = subscription.receive(0.005)
        if item.source is not BatchSource.DUMP:
            assert consumer.content == held[item.sequence]
        elif following is None or following.source is not BatchSource.DUMP:
            assert consumer.content == held.get(item.sequence - 1, set())
        item = following


@pytest.mark.parametrize("live_set", [False, True])
def test_a_slow_consumer_has_all_in_the_end(live_set: bool, tmp_path: Path) -> None:
    """ZMQ drops what a consumer does not read in time; it gets that by replay, or the state."""
    endpoint, replay = endpoints("ipc", tmp_path)
    batches = [
        payload(stored(list(range(i * 20 + 1, i * 20 + 21)), block_size=200)) for i in range(500)
    ]
    options: dict[str, Any] = {"hwm": 10, "live_set": live_set, "start_sequence": 0}
    options["buffer_steps"] = 10 if live_set else 10_000
    consumer = Consumer()
    with (
        ZmqPublisher(endpoint, replay, **options) as publisher,
        subscribe(endpoint, replay_endpoint=replay, hwm=1, catch_up=False) as subscription,
    ):
        publisher.publish(batches[0])
        first = subscription.receive(0.05)
        while first is None:  # until the connection stands
            publisher.publish(batches[0])
            first = subscription.receive(0.05)
        consumer.apply(first.batch)
        for batch in batches[1:]:
            publisher.publish(batch)
        wait_until(lambda: publisher.num_queued == 0)
        subscription.catch_up()
        while (item := subscription.receive(0.2)) is not None:
            consumer.apply(item.batch)
        assert subscription.num_gaps + subscription.num_duplicates > 0
        assert (subscription.num_replayed > 0, subscription.num_dumps > 0) == (
            not live_set,
            live_set,
        )
        assert subscription.num_lost == 0
        assert subscription.next_sequence == publisher.next_sequence
    assert consumer.content == {(i, 0) for i in range(1, 10_001)}


def test_a_dump_while_the_pool_goes_on_fits_the_stream() -> None:
    """Many consumers join at any moment; each ends with the pool's content."""
    endpoint, replay = fresh_inproc(), fresh_inproc()
    engine = Engine(11)
    consumers = [Consumer() for _ in range(8)]
    stop = threading.Event()

    with ZmqPublisher(endpoint, replay, live_set=True) as publisher:

        def join(consumer: Consumer) -> None:
            with subscribe(endpoint, replay_endpoint=replay) as subscription:
                while (item := subscription.receive(0.2)) is not None or not stop.is_set():
                    if item is not None:
                        consumer.apply(item.batch)
                assert (subscription.num_lost, subscription.num_restarts) == (0, 0)

        threads = [threading.Thread(target=join, args=(consumer,)) for consumer in consumers]
        for i in range(400):
            publisher.publish(engine.step())
            if i % 50 == 20:
                threads[i // 50].start()
            time.sleep(0.001)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert all(consumer.content == engine.content() for consumer in consumers)
