"""Publishing events: cases C18 and C19, numbering, dumps."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import kvyard
import msgspec
import pytest
from kvyard.events import (
    EventPublisher,
    KVEventBatch,
    WireFormat,
    ZmqPublisher,
    endpoint_for_rank,
    pod_topic,
)

from tests.event_streams import (
    CLEARED,
    END_MARKER,
    Recorder,
    ask,
    batch_of,
    endpoints,
    events_of,
    fresh_inproc,
    number,
    number_of,
    payload,
    raw_consumer,
    removed,
    stored,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)

FIVE_FRAMES = [WireFormat.ROUTER, WireFormat.VLLM_0_33]
FOUR_FRAMES = [WireFormat.VLLM_0_25, WireFormat.ARRAY]


# ------------------------------------------------------------------------------- C19a: endpoints


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 1, "tcp://*:5558"),
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:0", 1, "tcp://*:0"),
        ("tcp://*:*", 1, "tcp://*:*"),
        ("tcp://[::]:5557", 3, "tcp://[::]:5560"),
        ("inproc://c", 1, "inproc://c_dp1"),
        ("inproc://c", 0, "inproc://c"),
        ("ipc://e.sock", 1, "ipc://e.sock_dp1"),
        ("ipc://tcp:7.sock", 1, "ipc://tcp:7.sock_dp1"),
        ("ipc://*", 1, "ipc://*"),
    ],
)
def test_each_rank_has_its_own_endpoint(endpoint: str, rank: int, expected: str) -> None:
    assert endpoint_for_rank(endpoint, rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "rank", "message"),
    [
        ("tcp://host:port", 1, "port number"),
        ("tcp://host", 0, "port number"),
        ("tcp://host:", 0, "port number"),
        ("tcp://*:65535", 1, "65536"),
        ("udp://host:1", 0, "expected tcp"),
        ("e.sock", 0, "expected tcp"),
        ("ipc://", 0, "expected tcp"),
        ("tcp://*:5557", -1, "negative"),
    ],
)
def test_malformed_endpoints_are_named(endpoint: str, rank: int, message: str) -> None:
    with pytest.raises(kvyard.ConfigError, match=message):
        endpoint_for_rank(endpoint, rank)


def test_ranks_publish_beside_each_other(tmp_path: Path) -> None:
    endpoint, replay = endpoints("ipc", tmp_path)
    for rank in range(3):
        with ZmqPublisher(endpoint, replay, data_parallel_rank=rank) as publisher:
            assert publisher.endpoint == endpoint_for_rank(endpoint, rank)
            publisher.publish(batch_of(rank))
            assert publisher.replay_endpoint == endpoint_for_rank(replay, rank)
            *replies, _ = ask(publisher.replay_endpoint, b"", number(0))
            assert number_of(replies[-1][-1]) == rank


def test_llm_d_topic() -> None:
    assert pod_topic("pod-1", "org/model") == "kv@pod-1@org/model"
    for pod, model in (("", "m"), ("p", ""), ("a@b", "m"), ("p", "m@1")):
        with pytest.raises(kvyard.InvalidArgumentError, match="topic"):
            pod_topic(pod, model)


# --------------------------------------------------------------------------- C19b: back-pressure


def test_a_full_queue_drops_whole_batches_and_leaves_the_gap() -> None:
    transport = Recorder()
    transport.open.clear()
    publisher = EventPublisher(transport, max_queue_size=1, start_sequence=0)
    publisher.publish(batch_of(0))
    assert transport.entered.wait(20)  # number 0 is stuck in the transport
    started = time.monotonic()
    for i in range(1, 4):
        publisher.publish(batch_of(i))  # 1 waits; 2 and 3 find the queue full
    assert time.monotonic() - started < 5
    assert publisher.num_dropped == 2
    transport.open.set()
    wait_until(lambda: len(transport.sent) == 2)
    publisher.publish(batch_of(4))
    publisher.close()
    assert [sequence for sequence, _ in transport.sent] == [0, 1, 4]
    assert [number_of(batch) for _, batch in transport.sent] == [0, 1, 4]
    # What live consumers miss can still be replayed.
    assert [sequence for sequence, _ in publisher.buffered(0)] == [0, 1, 2, 3, 4]
    assert (publisher.num_published, publisher.num_dropped) == (3, 2)


def test_close_with_a_full_queue_and_a_transport_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = Recorder()
    transport.open.clear()
    publisher = EventPublisher(transport, max_queue_size=2, start_sequence=0)
    for i in range(5):
        publisher.publish(batch_of(i))
    wait_until(transport.entered.is_set)
    started = time.monotonic()
    publisher.close(timeout=0.1)
    assert time.monotonic() - started < 10
    assert "did not return" in caplog.text
    transport.open.set()
    wait_until(lambda: transport.closed)
    assert len(transport.sent) + publisher.num_dropped == 5


def test_close_takes_no_longer_than_it_may() -> None:
    class Slow(Recorder):
        def send(self, sequence: int, payload: bytes) -> None:
            time.sleep(0.02)
            super().send(sequence, payload)

    transport = Slow()
    publisher = EventPublisher(transport, start_sequence=0)
    for i in range(500):
        publisher.publish(batch_of(i))
    started = time.monotonic()
    publisher.close(timeout=0.2)
    assert time.monotonic() - started < 5  # all of them would take ten seconds
    assert transport.closed
    assert publisher.num_dropped > 0
    assert len(transport.sent) + publisher.num_dropped == 500


def test_close_sends_what_is_queued() -> None:
    transport = Recorder()
    with EventPublisher(transport, max_queue_size=1000) as publisher:
        for i in range(500):
            publisher.publish(batch_of(i))
    assert transport.closed
    assert [number_of(batch) for _, batch in transport.sent[1:]] == list(range(500))
    assert (publisher.num_dropped, publisher.num_queued) == (0, 0)


def test_close_with_a_full_queue_closes_the_sockets(tmp_path: Path) -> None:
    endpoint, replay = endpoints("ipc", tmp_path)
    for _ in range(3):  # the next one could not bind if the sockets were open
        publisher = ZmqPublisher(endpoint, replay, max_queue_size=1)
        for i in range(200):
            publisher.publish(batch_of(i))
        publisher.close()
        publisher.close()
        assert publisher.num_published + publisher.num_dropped == 201


def test_publish_after_close_is_an_error() -> None:
    publisher = EventPublisher(Recorder())
    publisher.close()
    for batch in (batch_of(0), payload(), None):
        with pytest.raises(kvyard.PublisherClosedError, match="has been closed"):
            publisher.publish(batch)
    with pytest.raises(RuntimeError):  # what vLLM raises
        publisher.publish(batch_of(0))


# ---------------------------------------------------------------------------- C18: replay protocol


@pytest.mark.parametrize("wire_format", FIVE_FRAMES + FOUR_FRAMES)
def test_replay_protocol(wire_format: WireFormat) -> None:
    with (
        ZmqPublisher(
            endpoint := fresh_inproc(),
            replay := fresh_inproc(),
            topic="kv@x",
            buffer_steps=3,
            wire_format=wire_format,
            start_sequence=0,
        ) as publisher,
        raw_consumer(endpoint) as consumer,
    ):
        for i in range(3):
            publisher.publish(batch_of(i))
        with pytest.raises(kvyard.InvalidArgumentError):
            publisher.publish(KVEventBatch(1.5, [object()]))  # type: ignore[list-item]
        for i in range(3, 6):
            publisher.publish(batch_of(i))
        live = [consumer.recv_multipart() for _ in range(6)]
        assert [frames[:2] for frames in live] == [[b"kv@x", number(i)] for i in range(6)]
        assert not consumer.poll(20)
        wait_until(lambda: publisher.num_published == 6)
        assert publisher.num_queued == 0

        topic = [b"kv@x"] if wire_format in FIVE_FRAMES else []
        expected = [[b"", *topic, *frames[1:]] for frames in live[3:]]
        end = [b"", *topic, END_MARKER, b""]
        assert ask(replay, b"", number(0)) == [*expected, end]
        assert ask(replay, b"", number(5)) == [expected[2], end]
        assert ask(replay, b"", number(6)) == [end]
        malformed = [
            (number(0),),
            (b"", number(0), b""),
            (b"x", number(0)),
            (b"", b"\0"),
            (b"",),
            (b"", b"DUMP"),
        ]
        for i, frames in enumerate(malformed):
            assert ask(replay, *frames) == [end], frames
            assert publisher.replay_server is not None
            assert publisher.replay_server.num_malformed == i + 1
        # No live set: a dump is refused, in a form that no number has.
        assert ask(replay, b"", b"dump") == [end]
        with pytest.raises(kvyard.ConfigError, match="live_set=True"):
            publisher.dump()


def test_vllm_bytes_on_the_wire() -> None:
    """The sample of the spec (manager 8.5): topic kv, number 2, one `AllBlocksCleared` at 2.0."""
    frames = [
        bytes.fromhex("6b76"),
        number(2),
        bytes.fromhex("93cb40000000000000009181a474797065b0416c6c426c6f636b73436c656172656400"),
    ]
    options: dict[str, Any] = {"topic": "kv", "buffer_steps": 2, "wire_format": "vllm_0_25"}
    with (
        ZmqPublisher(endpoint := fresh_inproc(), replay := fresh_inproc(), **options) as publisher,
        raw_consumer(endpoint) as consumer,
    ):
        for ts in range(3):
            publisher.publish(KVEventBatch(float(ts), [kvyard.AllBlocksCleared()]))
        assert [consumer.recv_multipart() for _ in range(3)][2] == frames
        replies = ask(replay, b"", number(0))
        assert [frames[1] for frames in replies] == [number(1), number(2), END_MARKER]
        assert replies[1] == [b"", *frames[1:]]


def test_a_dump_has_the_state_and_the_number_to_go_on_from() -> None:
    publisher = ZmqPublisher(
        fresh_inproc(), replay := fresh_inproc(), topic="t", start_sequence=7, live_set=True
    )
    with publisher:
        end = [b"", b"t", END_MARKER, number(7)]
        *replies, last = ask(replay, b"", b"dump")
        assert [frames[:3] for frames in replies] == [[b"", b"t", number(7)]]
        assert (events_of(replies[0][3]), last) == ([CLEARED], end)
        publisher.publish(payload(stored([1, 2]), stored([3], parent=2)))
        publisher.publish(payload(removed([2])))
        *replies, last = ask(replay, b"", b"dump")
        # Two batches and the `AllBlocksCleared` before them.
        assert last == [b"", b"t", END_MARKER, number(10)]
        assert {frames[2] for frames in replies} == {number(10)}
        cleared, *stores = [event for frames in replies for event in events_of(frames[3])]
        assert cleared == CLEARED
        assert [event["block_hashes"] for event in stores] == [[1], [3]]
        # The parent of 3 is gone; its nearest live ancestor is 1.
        assert [event["parent_block_hash"] for event in stores] == [None, 1]
        dump = publisher.dump()
        assert dump.next_sequence == 10
        assert [e["type"] for e in events_of(dump.batches[0])] == ["AllBlocksCleared"]


def test_publishing_goes_on_while_a_dump_takes_its_time() -> None:
    class SlowSet:
        """Its dump takes as long as the test likes."""

        latest_ts = 0.0

        def __init__(self) -> None:
            self.applied: list[int] = []
            self.dumping, self.go_on = threading.Event(), threading.Event()

        def __len__(self) -> int:
            return len(self.applied)

        def apply(self, batch: bytes) -> None:
            self.applied.append(number_of(batch))

        def dump(self, *_: object) -> list[bytes]:
            held = list(self.applied)
            self.dumping.set()
            assert self.go_on.wait(60)
            return [payload(stored([i])) for i in held]

    state = SlowSet()
    live_set: Any = state
    options: dict[str, Any] = {"start_sequence": 0, "max_queue_size": 10, "live_set": live_set}
    with EventPublisher(transport := Recorder(), **options) as publisher:
        for i in range(5):
            publisher.publish(payload(stored([i])))
        dumps: list[kvyard.events.EventDump] = []
        thread = threading.Thread(target=lambda: dumps.append(publisher.dump()))
        thread.start()
        assert state.dumping.wait(20)
        for i in range(5, 500):
            publisher.publish(payload(stored([i])))
        assert len(state.applied) == 5
        state.go_on.set()
        thread.join()
        [dump] = dumps
        assert dump.next_sequence == 5
        assert [number_of(batch) for batch in dump.batches[1:]] == list(range(5))
        assert publisher.dump().next_sequence == 500
        assert state.applied == list(range(500))
        publisher.publish(payload(stored([500])))
        wait_until(lambda: len(state.applied) == 501)  # without being asked for a dump
    assert len(transport.sent) + publisher.num_dropped == 501


def test_other_threads_run_while_a_large_pool_is_dumped() -> None:
    with EventPublisher(Recorder(), live_set=True, buffer_steps=10) as publisher:
        for i in range(200):
            hashes = list(range(i * 1000 + 1, i * 1000 + 1001))
            publisher.publish(payload(stored(hashes, block_size=16)))
        publisher.dump()
        stop = threading.Event()
        moments: list[float] = []

        def work() -> None:
            while not stop.is_set():
                moments.append(time.monotonic())
                time.sleep(0.001)

        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: len(moments) > 1)
        started = time.monotonic()
        batches = publisher.dump().batches
        took = time.monotonic() - started
        stop.set()
        thread.join()
    assert sum(len(events_of(batch)) for batch in batches) == 200_001
    assert max(b - a for a, b in itertools.pairwise(moments)) < max(took * 0.7, 0.05)


# ------------------------------------------------------------------------ numbering and beginning


def test_the_clock_numbers_the_first_batch_and_a_restart_begins_with_cleared() -> None:
    before = time.time_ns() // 1_000_000
    first, second = Recorder(), Recorder()
    with EventPublisher(first) as publisher:
        assert publisher.wire_format is WireFormat.ROUTER
        publisher.publish(batch_of(1))
        publisher.publish(batch_of(2))
    time.sleep(0.005)
    with EventPublisher(second) as publisher:
        publisher.publish(batch_of(3))
    numbers = [sequence for sequence, _ in first.sent + second.sent]
    assert numbers[0] >= before
    assert numbers[:3] == [numbers[0] + i for i in range(3)]
    assert numbers[3] > numbers[2]
    assert numbers[4] == numbers[3] + 1
    assert events_of(first.sent[0][1]) == events_of(second.sent[0][1]) == [CLEARED]
    assert [number_of(batch) for _, batch in first.sent[1:]] == [1, 2]


@pytest.mark.parametrize("wire_format", [WireFormat.VLLM_0_25, WireFormat.VLLM_0_33])
def test_vllm_formats_begin_at_0(wire_format: WireFormat) -> None:
    transport = Recorder()
    with EventPublisher(transport, wire_format=wire_format) as publisher:
        publisher.publish(batch_of(1))
    assert [sequence for sequence, _ in transport.sent] == [0]


def test_a_step_without_events_publishes_nothing() -> None:
    transport = Recorder()
    with EventPublisher(transport) as publisher:
        publisher.publish(None)
    assert transport.sent == []


def test_the_rank_is_filled_in() -> None:
    transport = Recorder()
    with EventPublisher(transport, data_parallel_rank=3, start_sequence=0) as publisher:
        publisher.publish(batch_of(1))
        publisher.publish(KVEventBatch(1.5, [], 3))
    assert [batch[-1] for _, batch in transport.sent] == [3, 3]


@pytest.mark.parametrize("rank", [0, 3, 200, 70_000])
@pytest.mark.parametrize("other", [None, 1, 4, 201, 70_001])
def test_batches_of_another_rank_are_refused(rank: int, other: int | None) -> None:
    """Consumers would take them for another engine's (rule 1: the rank is what tells)."""
    transport = Recorder()
    encoded = msgspec.msgpack.encode([1.5, [stored([1])], other])
    with EventPublisher(transport, data_parallel_rank=rank, start_sequence=0) as publisher:
        remedy = rf"take_event_batch\(data_parallel_rank={rank}\)"
        with pytest.raises(kvyard.InvalidArgumentError, match=remedy):
            publisher.publish(encoded)
        if other is not None:
            with pytest.raises(kvyard.InvalidArgumentError, match=f"the publisher's is {rank}"):
                publisher.publish(KVEventBatch(1.5, [], other))
        assert publisher.next_sequence == 0
        publisher.publish(payload(stored([1]), rank=rank))
        publisher.publish(kvyard.events.encode_batch([], 1.5, rank))
    assert [msgspec.msgpack.decode(batch)[2] for _, batch in transport.sent] == [rank, rank]


def test_encoded_batches_keep_their_format() -> None:
    transport = Recorder()
    batch = kvyard.events.encode_batch(batch_of(1).events, 1.5, wire_format="array")
    with EventPublisher(transport, start_sequence=0) as publisher:
        publisher.publish(batch)
    assert transport.sent == [(0, batch)]


def test_the_reset_takes_no_place_of_a_batch() -> None:
    transport = Recorder()
    transport.open.clear()
    publisher = EventPublisher(transport, max_queue_size=1)
    publisher.publish(batch_of(1))
    assert publisher.num_dropped == 0
    transport.open.set()
    publisher.close()
    assert events_of(transport.sent[0][1]) == [CLEARED]
    assert number_of(transport.sent[1][1]) == 1


# ---------------------------------------------------------------- what is no batch, or is one


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_whatever_holds_bytes_is_a_batch(kind: type[bytes]) -> None:
    transport = Recorder()
    with EventPublisher(transport, start_sequence=0, live_set=True) as publisher:
        publisher.publish(kind(payload(stored([1]))))
        assert publisher.dump().next_sequence == 1
    [(_, sent)] = transport.sent
    assert type(sent) is bytes
    assert sent == payload(stored([1]))
    assert events_of(sent) == [stored([1])]


@pytest.mark.parametrize(
    "batch",
    [
        KVEventBatch("soon", []),  # type: ignore[arg-type]
        KVEventBatch(1.0, None),  # type: ignore[arg-type]
        KVEventBatch(1.0, [3]),  # type: ignore[list-item]
        KVEventBatch(1.0, [], "first"),  # type: ignore[arg-type]
        KVEventBatch(1.0, [], -1),
        [],
        "batch",
        b"",
        bytearray(b"\xc0"),
    ],
    ids=repr,
)
def test_what_is_no_batch_uses_no_number(batch: Any) -> None:
    with EventPublisher(transport := Recorder(), start_sequence=0) as publisher:
        with pytest.raises(kvyard.InvalidArgumentError):
            publisher.publish(batch)
        assert publisher.next_sequence == 0
    assert transport.sent == []


# ------------------------------------------------------------------------- a transport that hangs


def test_a_transport_that_hangs_holds_no_call_up() -> None:
    """Neither `publish` nor the sending thread applies a batch; all are applied all the same."""
    applied: list[int] = []
    by: set[str] = set()

    class SlowSet:
        latest_ts = 0.0

        def __len__(self) -> int:
            return 0

        def apply(self, batch: bytes) -> None:
            time.sleep(0.002)
            by.add(threading.current_thread().name)
            applied.append(number_of(batch))

    live_set: Any = SlowSet()
    transport = Recorder()
    transport.open.clear()
    publisher = EventPublisher(transport, start_sequence=0, max_queue_size=1, live_set=live_set)
    publisher.publish(batch_of(0))
    assert transport.entered.wait(20)
    started = time.monotonic()
    for i in range(1, 1000):
        publisher.publish(batch_of(i))
    assert time.monotonic() - started < 1  # to apply them takes two seconds
    assert publisher.num_unapplied > 0
    wait_until(lambda: publisher.num_unapplied == 0)
    wait_until(lambda: applied == list(range(1000)))
    assert by.isdisjoint({threading.current_thread().name, "kvyard-events"})
    assert transport.sent == []
    transport.open.set()
    publisher.close()


def test_the_live_set_holds_no_batch_up() -> None:
    """Consumers get a batch before the set has taken in those before it."""
    go_on = threading.Event()
    known = set(threading.enumerate())

    class HangingSet:
        latest_ts = 0.0

        def __len__(self) -> int:
            return 0

        def apply(self, batch: bytes) -> None:
            assert go_on.wait(60)

        def dump(self, *_: object) -> list[bytes]:
            return []

    live_set: Any = HangingSet()
    transport = Recorder()
    publisher = EventPublisher(transport, start_sequence=0, live_set=live_set)
    for i in range(10):
        publisher.publish(batch_of(i))
        time.sleep(0.005)
    wait_until(lambda: len(transport.sent) == 10)
    assert publisher.num_unapplied >= 9
    go_on.set()
    publisher.close()
    assert set(threading.enumerate()) <= known
    # A dump after the end applies what the thread left.
    assert publisher.dump().next_sequence == 10
    assert publisher.num_unapplied == 0


def test_a_dump_is_no_older_than_the_batches_in_it() -> None:
    """Clocks are set back: what a consumer has, with a lower number, would be newer than it."""
    with EventPublisher(Recorder(), start_sequence=0, live_set=True) as publisher:
        before = time.time()
        publisher.publish(payload(stored([1]), ts=1.5))
        times = [msgspec.msgpack.decode(batch)[0] for batch in publisher.dump().batches]
        assert all(before <= ts <= time.time() for ts in times)
        publisher.publish(payload(stored([2]), ts=before + 1000))
        times = [msgspec.msgpack.decode(batch)[0] for batch in publisher.dump().batches]
        assert times == [before + 1000] * 2
