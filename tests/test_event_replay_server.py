"""Clients of a replay socket that are slow, silent or gone: what they cost, whom they hold up."""

from __future__ import annotations

import gc
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from kvyard.events import EventDump, ZmqPublisher, zmq_transport
from kvyard.events.zmq_transport import ReplayServer

from tests.event_streams import (
    CONTEXT,
    ask,
    endpoints,
    fresh_inproc,
    number,
    payload,
    raw_client,
    resident_bytes,
    stored,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import zmq

pytestmark = pytest.mark.timeout(120)

BIG = payload(stored(list(range(1000))))
"""A batch of about 16 KB."""


@contextmanager
def long_replay(tmp_path: Path) -> Iterator[tuple[str, ReplayServer]]:
    """The replay socket of 5,000 big batches, more than lies in the buffers of a connection."""
    endpoint, replay = endpoints("ipc", tmp_path)
    with ZmqPublisher(endpoint, replay, start_sequence=0) as publisher:
        for _ in range(5_000):
            publisher.publish(BIG)
        assert publisher.replay_server is not None
        yield replay, publisher.replay_server


def test_a_client_that_never_reads_its_replay_keeps_nobody_waiting(tmp_path: Path) -> None:
    with long_replay(tmp_path) as (replay, server), raw_client(replay, hwm=1) as dead:
        for _ in range(3):
            dead.send_multipart((b"", number(0)))
        wait_until(lambda: server.num_requests == 3)
        started = time.monotonic()
        assert len(ask(replay, b"", number(4_000))) == 1_001
        assert time.monotonic() - started < 15
        assert server.num_abandoned == 0


def test_a_client_that_never_reads_its_replay_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "_SECONDS_WITHOUT_PROGRESS", 0.3)
    with long_replay(tmp_path) as (replay, server), raw_client(replay, hwm=1) as dead:
        for _ in range(20):  # more than are answered at a time
            dead.send_multipart((b"", number(0)))
        wait_until(lambda: server.num_requests == 20)
        assert ask(replay, b"", number(4_999))[0][-2] == number(4_999)
        wait_until(lambda: server.num_abandoned == 20, 60)


def test_a_client_that_vanishes_is_given_up(tmp_path: Path) -> None:
    with long_replay(tmp_path) as (replay, server):
        with raw_client(replay, hwm=1) as client:
            client.send_multipart((b"", number(0)))
            assert client.recv_multipart()[1:3] == [b"", number(0)]
        wait_until(lambda: server.num_abandoned == 1)
        assert len(ask(replay, b"", number(4_000))) == 1_001


# ----------------------------------------------------------------------------------------- dumps


class Dumps:
    """Makes dumps of some size."""

    def __init__(self, num_batches: int = 400, batch_bytes: int = 100_000) -> None:
        self.num_made = 0
        self._size = num_batches, batch_bytes

    def __call__(self) -> EventDump:
        num_batches, batch_bytes = self._size
        self.num_made += 1
        return EventDump([b"x" * batch_bytes for _ in range(num_batches)], self.num_made)


@contextmanager
def dump_server(
    scheme: str, tmp_path: Path, dumps: Dumps
) -> Iterator[tuple[ReplayServer, list[zmq.Socket[bytes]]]]:
    """A server of dumps, and forty-eight clients that are connected and read nothing yet."""
    _, endpoint = endpoints(scheme, tmp_path)
    with ExitStack() as stack:
        server = ReplayServer(CONTEXT, endpoint, buffered=lambda _: [], dump=dumps, topic=b"")
        stack.callback(server.close)
        connected = server.endpoint.replace("0.0.0.0", "127.0.0.1")
        clients = [stack.enter_context(raw_client(connected, hwm=1)) for _ in range(48)]
        for client in clients:
            client.send_multipart((b"", number(0)))
            assert len(client.recv_multipart()) == 4
        yield server, clients


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_clients_that_do_not_read_share_two_dumps(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 clients ask for 40 MB each, and nobody reads: 1.9 GB, were it kept for each of them."""
    monkeypatch.setattr(zmq_transport, "_SECONDS_WHILE_OTHERS_WAIT", 60.0)
    dumps = Dumps()
    with dump_server(scheme, tmp_path, dumps) as (server, clients):
        gc.collect()
        before, most = resident_bytes(), 0.0
        for client in clients:
            client.send_multipart((b"", b"dump"))
        wait_until(lambda: server.num_requests == 96)
        for _ in range(20):
            time.sleep(0.05)
            most = max(most, resident_bytes() - before)
        # Two dumps, one that is being made or taken apart, and what lies in 48 clients' sockets.
        assert most < 200e6
        assert dumps.num_made == 2
        # Who reads gets it all.
        wanted = next(client for client in clients if client.poll(0))
        replies = [wanted.recv_multipart() for _ in range(401)]
        assert [len(frames[3]) for frames in replies[:-1]] == [100_000] * 400
        assert replies[-1][2:] == [b"\xff" * 8, replies[0][2]]


def test_who_waits_at_the_same_time_gets_the_same_dump() -> None:
    """One that was made after all of them asked: an older one could lack what they know."""
    entered, go_on = threading.Event(), threading.Event()
    dumps = Dumps(3, 10)

    def dump() -> EventDump:
        entered.set()
        assert go_on.wait(60)
        return dumps()

    with ExitStack() as stack:
        server = ReplayServer(CONTEXT, fresh_inproc(), buffered=lambda _: [], dump=dump, topic=b"")
        stack.callback(server.close)
        clients = [stack.enter_context(raw_client(server.endpoint)) for _ in range(21)]
        clients[0].send_multipart((b"", b"dump"))
        assert entered.wait(20)
        for client in clients[1:]:
            client.send_multipart((b"", b"dump"))
        go_on.set()
        got = [[client.recv_multipart() for _ in range(4)][-1][-1] for client in clients]
    # The first, then sixteen, which is the most that share, then the others.
    assert got == [number(1)] + [number(2)] * 16 + [number(3)] * 4
    assert server.num_dumps == 3


def test_clients_that_do_not_read_keep_no_dump_waiting_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "_SECONDS_WHILE_OTHERS_WAIT", 0.3)
    dumps = Dumps()
    with dump_server("ipc", tmp_path, dumps) as (server, clients):
        for client in clients:
            client.send_multipart((b"", b"dump"))
        wait_until(lambda: server.num_requests == 96)
        started = time.monotonic()
        *replies, _ = ask(server.endpoint, b"", b"dump")
        assert len(replies) == 400
        assert time.monotonic() - started < 9  # a dump's ten seconds do not count while others wait
        assert server.num_abandoned >= 16
        assert server.num_dumps == dumps.num_made


def test_a_dump_without_progress_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier than a replay: it is memory of its own."""
    monkeypatch.setattr(zmq_transport, "_SECONDS_WITHOUT_PROGRESS_OF_A_DUMP", 0.2)
    with dump_server("ipc", tmp_path, Dumps()) as (server, [client, *_]):
        client.send_multipart((b"", b"dump"))
        wait_until(lambda: server.num_abandoned == 1)


def test_a_dump_that_fails_is_counted_and_the_next_one_goes_on() -> None:
    dumps = Dumps(1, 10)

    def dump() -> EventDump:
        made = dumps()
        if made.next_sequence == 1:
            raise MemoryError("no room")
        return made

    server = ReplayServer(CONTEXT, fresh_inproc(), buffered=lambda _: [], dump=dump, topic=None)
    with raw_client(server.endpoint) as client:
        client.send_multipart((b"", b"dump"))
        wait_until(lambda: server.num_abandoned == 1)
        assert len(ask(server.endpoint, b"", b"dump")) == 2
        assert not client.poll(0)
        assert (server.num_dumps, server.num_requests) == (1, 2)
    server.close()


# ------------------------------------------------------------------------------------- heartbeats


def test_a_peer_that_vanished_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that says no more after ZMTP's greeting and `READY`, as if its network were gone."""
    monkeypatch.setattr(zmq_transport, "_HEARTBEAT_MILLISECONDS", 50)
    monkeypatch.setattr(zmq_transport, "_HEARTBEAT_TIMEOUT_MILLISECONDS", 200)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    with ZmqPublisher("tcp://*:0", "tcp://*:0") as publisher:
        assert publisher.replay_endpoint is not None
        port = int(publisher.replay_endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as peer:
            peer.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
            heard = b""
            with suppress(ConnectionResetError):
                while said := peer.recv(4096):
                    heard += said
        assert b"READY" in heard
        assert b"PING" in heard


def test_a_client_whose_socket_is_full_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That frees what is queued for it; it does so before the answer is given up."""
    monkeypatch.setattr(zmq_transport, "_HEARTBEAT_MILLISECONDS", 50)
    monkeypatch.setattr(zmq_transport, "_HEARTBEAT_TIMEOUT_MILLISECONDS", 500)
    with long_replay(tmp_path) as (replay, server), raw_client(replay, hwm=1) as dead:
        dead.send_multipart((b"", number(0)))
        wait_until(lambda: server.num_abandoned == 1)
