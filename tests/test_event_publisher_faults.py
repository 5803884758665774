"""What goes wrong around a publisher: each is a clear error or a counted loss."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import kvyard
import pytest
import zmq
from kvyard.events import (
    EventPublisher,
    ZmqPublisher,
)

from tests.event_streams import (
    CONTEXT,
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
    raw_client,
    raw_consumer,
    removed,
    resident_bytes,
    stored,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.timeout(120)


# ------------------------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize("batch", ["text", 7, [1], bytearray(b"x"), b"", b"text", b"\x92\x01\x90"])
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    transport = Recorder()
    with EventPublisher(transport, start_sequence=0) as publisher:
        with pytest.raises(kvyard.InvalidArgumentError, match=r"a KVEventBatch|array of three"):
            publisher.publish(batch)
        publisher.publish(batch_of(1))
    assert [sequence for sequence, _ in transport.sent] == [0]


def test_a_transport_that_fails_is_counted_and_the_next_batch_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Recorder):
        def send(self, sequence: int, payload: bytes) -> None:
            if sequence == 1:
                raise OSError("the cable is cut")
            super().send(sequence, payload)

        def close(self) -> None:
            super().close()
            raise OSError("the cable is still cut")

    transport = Failing()
    with EventPublisher(transport, start_sequence=0) as publisher:
        transport.open.set()
        for i in range(3):
            publisher.publish(batch_of(i))
    # A publisher that begins above 0 begins with `AllBlocksCleared`, this one does not.
    assert [sequence for sequence, _ in transport.sent] == [0, 2]
    assert (publisher.num_failed, publisher.num_published) == (1, 2)
    assert transport.closed
    assert "the cable is cut" in caplog.text


def test_bytes_that_are_no_batch_are_left_out_of_the_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = Recorder()
    with EventPublisher(transport, start_sequence=0, live_set=True) as publisher:
        publisher.publish(payload(stored([1])))
        publisher.publish(b"\x93\xc1 is not msgpack\0")
        publisher.publish(payload(stored([2])))
        dump = publisher.dump()
    assert dump.next_sequence == 3
    held = [event["block_hashes"] for batch in dump.batches[1:] for event in events_of(batch)]
    assert held == [[1], [2]]
    assert publisher.num_unreadable == 1
    assert "left out" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hwm": -1}, "hwm"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"max_queue_size": 0}, "max_queue_size"),
        ({"data_parallel_rank": -1}, "data_parallel_rank"),
        ({"data_parallel_rank": None}, "data_parallel_rank"),
        ({"wire_format": "json"}, "router"),
        ({"start_sequence": -1}, "start_sequence"),
        ({"start_sequence": "now"}, "start_sequence"),
        ({"start_sequence": 1 << 64}, "start_sequence"),
    ],
)
def test_arguments_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    endpoint = fresh_inproc()
    with pytest.raises(kvyard.ConfigError, match=message):
        ZmqPublisher(endpoint, **options)
    ZmqPublisher(endpoint).close()  # the endpoint is free again


def test_a_live_set_that_holds_something_is_refused() -> None:
    live_set = kvyard.events.LiveSet()
    live_set.apply(payload(stored([1])))
    with pytest.raises(kvyard.ConfigError, match="empty"):
        EventPublisher(Recorder(), live_set=live_set)


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "inproc"])
@pytest.mark.parametrize("which", ["endpoint", "replay endpoint"])
def test_an_endpoint_in_use_is_named(scheme: str, which: str, tmp_path: Path) -> None:
    def endpoint(name: str) -> str:
        if scheme == "tcp":
            return "tcp://*:0"
        return f"ipc://{tmp_path}/{name}" if scheme == "ipc" else fresh_inproc()

    def use(taken: str) -> str:
        return taken.replace("0.0.0.0", "*")

    with ZmqPublisher(endpoint("e"), endpoint("r")) as publisher:
        assert publisher.replay_endpoint is not None
        taken = use(publisher.endpoint if which == "endpoint" else publisher.replay_endpoint)
        arguments = (taken, None) if which == "endpoint" else (endpoint("e2"), taken)
        with pytest.raises(kvyard.EndpointError, match="in use") as error:
            ZmqPublisher(*arguments)
        assert taken in str(error.value)
        assert isinstance(error.value, OSError)
        # The one that was there first still works.
        publisher.publish(batch_of(1))
        assert len(ask(publisher.replay_endpoint, b"", number(0))) == 3
    ZmqPublisher(*arguments).close()


def test_an_ipc_file_that_a_crash_left_behind_is_no_obstacle(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as leftover:
        leftover.bind(f"{tmp_path}/e")
    assert (tmp_path / "e").exists()
    ZmqPublisher(f"ipc://{tmp_path}/e").close()


def test_an_endpoint_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    with pytest.raises(kvyard.EndpointError, match="missing/e"):
        ZmqPublisher(f"ipc://{tmp_path}/missing/e")
    with pytest.raises(kvyard.EndpointError, match="no:such:host"):
        ZmqPublisher("tcp://no:such:host*:1")


def test_without_pyzmq_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['zmq'] = None; import kvyard.events as e\n"
        "for make in (e.ZmqPublisher, lambda: e.subscribe('tcp://h:1')):\n"
        "    try: make()\n"
        "    except ImportError as error: print(type(error).__name__, error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert len(lines) == 2
    assert all("MissingDependencyError" in line and "kvyard[events]" in line for line in lines)


def test_a_connecting_publisher_reaches_a_consumer_that_binds() -> None:
    with CONTEXT.socket(zmq.SUB) as consumer:
        consumer.setsockopt(zmq.LINGER, 0)
        consumer.setsockopt(zmq.SUBSCRIBE, b"")
        port = consumer.bind_to_random_port("tcp://127.0.0.1")
        with ZmqPublisher(f"tcp://127.0.0.1:{port}", start_sequence=0) as publisher:
            deadline = time.monotonic() + 20
            while not consumer.poll(20):  # until the connection stands, messages go nowhere
                assert time.monotonic() < deadline
                publisher.publish(batch_of(1))
            assert number_of(consumer.recv_multipart()[2]) == 1


# ------------------------------------------------------------------------- slow and dead consumers

BIG = payload(stored(list(range(1000))))
"""A batch of about 16 KB."""


def test_a_consumer_that_does_not_read_stops_nobody(tmp_path: Path) -> None:
    """Whoever does not read loses messages; the publisher's memory stays, others get all."""
    endpoint, _ = endpoints("ipc", tmp_path)
    with (
        ZmqPublisher(endpoint, hwm=100, buffer_steps=10, start_sequence=0) as publisher,
        raw_consumer(publisher.endpoint, hwm=1) as idle,
    ):
        memory = resident_bytes()
        started = time.monotonic()
        for _ in range(20_000):
            publisher.publish(BIG)
        wait_until(lambda: publisher.num_queued == 0, 60)
        assert time.monotonic() - started < 60
        assert publisher.num_dropped == 0
        assert publisher.num_failed == 0
        # 20,000 batches of 16 KB passed; one consumer's share is 100 of them and socket buffers.
        assert resident_bytes() - memory < 50e6
        publisher.publish(payload(stored([1])))
        frames: list[bytes] = idle.recv_multipart()
        seen = [int.from_bytes(frames[1], "big")]
        while idle.poll(200):
            seen.append(int.from_bytes(idle.recv_multipart()[1], "big"))
        assert len(seen) < 20_000
        assert seen == sorted(set(seen))


def test_garbage_on_the_sockets_is_survived() -> None:
    with ZmqPublisher("tcp://*:0", "tcp://*:0", start_sequence=0) as publisher:
        assert publisher.replay_endpoint is not None
        for endpoint in (publisher.endpoint, publisher.replay_endpoint):
            port = int(endpoint.rpartition(":")[2])
            with (
                socket.create_connection(("127.0.0.1", port)) as peer,
                suppress(OSError),
            ):
                peer.sendall(os.urandom(1000))
        replay = publisher.replay_endpoint
        with raw_client(replay) as peer, raw_client(replay) as many:
            peer.send_multipart((b"", bytes(1_000_000)))
            many.send_multipart([b""] * 10_000)
            assert many.poll(20_000)
            assert many.recv_multipart()[-2] == END_MARKER
            assert not peer.poll(100)
        publisher.publish(batch_of(4))
        assert len(ask(publisher.replay_endpoint, b"", number(0))) == 2


# ------------------------------------------------------------------------------------ flat memory


def test_ten_million_events_pass_with_flat_memory() -> None:
    """2,000 batches of 5,000 stores or removals, the same blocks again and again."""
    hashes = [hash_ * 0x9E3779B97F4A7C15 % (1 << 64) for hash_ in range(1, 5_001)]
    arriving = payload(*(stored([h]) for h in hashes))
    leaving = payload(*(removed([h]) for h in hashes))
    transport = Recorder()
    transport.sent = Sink()
    options: dict[str, Any] = {"buffer_steps": 20, "max_queue_size": 20, "live_set": True}
    with EventPublisher(transport, **options) as publisher:
        events = 0
        memory = 0.0
        while events < 10_000_000:
            for batch in (arriving, leaving):
                publisher.publish(bytes(bytearray(batch)))  # bytes of their own, as an encoder's
                wait_until(lambda: publisher.num_queued < 20 and publisher.num_unapplied < 20)
                events += len(hashes)
            if events == 1_000_000:
                memory = resident_bytes()
        publisher.publish(arriving)
        assert resident_bytes() - memory < 30e6
        dump = publisher.dump()
        assert publisher.num_dropped == 0
    assert sum(len(events_of(batch)) for batch in dump.batches) == 1 + len(hashes)


class Sink(list[tuple[int, bytes]]):
    """Keeps nothing."""

    def append(self, item: tuple[int, bytes]) -> None:
        del item


def test_publishing_from_many_threads_numbers_each_batch_once() -> None:
    transport = Recorder()
    with EventPublisher(transport, start_sequence=0, live_set=True) as publisher:

        def publish(first: int) -> None:
            for i in range(first, first + 200):
                publisher.publish(payload(stored([i + 1])))

        threads = [threading.Thread(target=publish, args=(i * 200,)) for i in range(4)]
        for thread in threads:
            thread.start()
        dumps = [publisher.dump() for _ in range(20)]
        for thread in threads:
            thread.join()
    assert [sequence for sequence, _ in transport.sent] == list(range(800))
    # Every dump is the sum of the batches below its number.
    for dump in dumps:
        held = [e["block_hashes"][0] for batch in dump.batches[1:] for e in events_of(batch)]
        before = [number_of(batch) for _, batch in transport.sent[: dump.next_sequence]]
        assert sorted(held) == sorted(before)
