"""The ZMQ sockets of a publisher: PUB for the stream, ROUTER for replay and dumps.

Requests and replies on the replay socket. A client is a DEALER, which sends and gets an empty
frame first; `[...]` are the frames behind it. A number is 8 bytes, big-endian.

| request | replies |
|---|---|
| `[number]`, as vLLM | `[topic, number, batch]` for each batch from that number on that the ring has, then `[topic, ff x 8, ""]` |
| `["dump"]`, ours | `[topic, next number, batch]` for each batch of the state, then `[topic, ff x 8, next number]` |
| anything else, or a dump without a live set | `[topic, ff x 8, ""]` |

The topic is left out for formats whose consumers expect it so. The first number of a replay tells
what is still available. vLLM and SGLang answer "dump", read as a number, with the end marker.
"""  # noqa: E501, a row of a table has one line

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from kvyard.events.endpoints import bind, connect, is_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvyard.events.types import EventDump

logger = logging.getLogger(__name__)

END_MARKER = b"\xff" * 8
"""Stands where a reply has its number: the answer is complete."""

DUMP_REQUEST = b"dump"
"""Asks for the state instead of a number from which to replay."""

NUMBER_BYTES = 8

_MOST_REQUEST_BYTES = 64 * 1024
_MOST_REPLIES_QUEUED = 16
_FEWEST_BYTES_SHARED = 8 * 1024
_REPLIES_AT_A_TIME = 64
_MOST_WAITING = 1_000
_MOST_REPLAYS = 16
_MOST_DUMPS = 2
_MOST_CLIENTS_OF_A_DUMP = 16
_MILLISECONDS_BETWEEN_TRIES = 5
_SECONDS_WITHOUT_PROGRESS = 30.0
_SECONDS_WITHOUT_PROGRESS_OF_A_DUMP = 10.0
_SECONDS_WHILE_OTHERS_WAIT = 3.0
_MOST_SECONDS_WHILE_OTHERS_WAIT = 30.0
_HEARTBEAT_MILLISECONDS = 10_000
_HEARTBEAT_TIMEOUT_MILLISECONDS = 30_000
_LINGER_MILLISECONDS = 1_000


class ZmqTransport:
    """A PUB socket that sends topic, number and batch.

    Attributes:
        endpoint: The endpoint as bound, with the port that the system picked.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        topic: str,
        hwm: int,
        seconds_to_connect: float = 0.0,
    ) -> None:
        """Open the socket.

        Args:
            context: Owns the socket.
            endpoint: Bound or connected to by vLLM's rule (see `is_bound`).
            topic: First frame of each message.
            hwm: Messages kept for one slow consumer before ZMQ drops.
            seconds_to_connect: How long after the start the first message goes out at the
                earliest. A PUB socket drops what comes before a consumer has connected, and ZMQ
                connects again to a restarted publisher after a tenth of a second.

        Raises:
            EndpointError: The endpoint is in use or malformed.
        """
        self._topic = topic.encode()
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.SNDHWM, hwm)
        try:
            (bind if is_bound(endpoint) else connect)(self._socket, endpoint)
        except BaseException:
            self._socket.close(0)
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._send_from: float | None = time.monotonic() + seconds_to_connect

    def send(self, sequence: int, payload: bytes) -> None:
        """Send one batch; a PUB socket drops it for consumers that are too slow."""
        if self._send_from is not None:
            time.sleep(max(0.0, self._send_from - time.monotonic()))
            self._send_from = None
        number = sequence.to_bytes(NUMBER_BYTES, "big")
        self._socket.send_multipart((self._topic, number, payload))

    def close(self) -> None:
        """Close the socket; what it has accepted still goes out for a second."""
        self._socket.close()


@dataclass(slots=True, eq=False)
class _Answer:
    """What one client is still owed."""

    client: bytes
    start: int | None = None
    """The first number that a replay wants; None for other requests."""
    dump: EventDump | None = None
    """The state that it sends, which answers of the same moment share."""
    replies: Iterator[tuple[bytes, bytes]] = field(default_factory=lambda: iter(()))
    """Pairs of number and payload; none until it is the answer's turn."""
    unsent: tuple[bytes, bytes] | None = None
    begun_at: float = 0.0
    progress_at: float = 0.0


class ReplayServer:
    """Answers replay and dump requests from a thread of its own.

    A client that does not read costs sixteen replies in its socket's queue. The rest of its answer
    waits as references into the ring, or to a dump that it shares with who asked at the same time;
    two dumps are held at once. An answer is given up without progress: a replay after half a
    minute, a dump after ten seconds, or three if others wait for one. Peers that vanished without a
    word, or whose sockets are full, miss ZMQ's heartbeats: after half a minute they are
    disconnected, and what is queued for them is freed.

    Attributes:
        endpoint: The endpoint as bound, with the port that the system picked.
        num_requests: Requests received.
        num_malformed: Requests among them that were neither a replay nor a dump.
        num_dumps: Dumps made: fewer than were asked for where clients shared one.
        num_abandoned: Answers given up because their client was gone or did not read.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        buffered: Callable[[int], Iterable[tuple[int, bytes]]],
        dump: Callable[[], EventDump] | None,
        topic: bytes | None,
    ) -> None:
        """Bind the socket and start the thread.

        Args:
            context: Owns the socket.
            endpoint: Always bound.
            buffered: Numbers and payloads from a number on, ascending.
            dump: The state; None if it is not kept.
            topic: Frame before the number; None: there is none.

        Raises:
            EndpointError: The endpoint is in use or malformed.
        """
        self.num_requests = 0
        self.num_malformed = 0
        self.num_dumps = 0
        self.num_abandoned = 0
        self._num_sent = 0
        self._buffered = buffered
        self._dump = dump
        self._prefix = (b"",) if topic is None else (b"", topic)
        self._waiting: deque[_Answer] = deque()
        self._waiting_for_dump: deque[_Answer] = deque()
        self._active: list[_Answer] = []
        self._socket = context.socket(zmq.ROUTER)
        self._set_options()
        try:
            bind(self._socket, endpoint)
        except BaseException:
            self._socket.close(0)
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kvyard-replay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the socket; harmless twice."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_write)
        os.close(self._wake_read)

    def _set_options(self) -> None:
        self._socket.setsockopt(zmq.LINGER, 0)
        # ZMQ keeps these for a client that does not read until it is gone.
        self._socket.setsockopt(zmq.SNDHWM, _MOST_REPLIES_QUEUED)
        # Larger replies are queued as references, so that clients of one dump share its memory.
        self._socket.copy_threshold = _FEWEST_BYTES_SHARED
        # A peer that sends more than any request holds is disconnected.
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        # With this a full or vanished client is an error that we see, not a reply lost in silence.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MILLISECONDS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MILLISECONDS)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        # Readable also when a full queue has room again. (POLLOUT tells that some client has room,
        # which is always so.) It may be missed while we send, hence the time between tries.
        poller.register(self._socket.getsockopt(zmq.FD), zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        progress = False
        while not self._closing:
            timeout = None
            if self._active or self._waiting or self._waiting_for_dump:
                timeout = 0 if progress else _MILLISECONDS_BETWEEN_TRIES
            ready = dict(poller.poll(timeout))
            if self._socket in ready:
                self._take_requests()
            progress = self._continue_answers()
        self._socket.close()

    def _take_requests(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                client, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
                self.num_requests += 1
                if len(self._waiting) + len(self._waiting_for_dump) >= _MOST_WAITING:
                    self.num_abandoned += 1
                else:
                    self._take_request(client, frames)

    def _take_request(self, client: bytes, frames: list[bytes]) -> None:
        """Put a request in its line; what is waiting holds neither frames nor replies."""
        if len(frames) == 2 and frames[0] == b"" and len(frames[1]) == NUMBER_BYTES:
            self._waiting.append(_Answer(client, start=int.from_bytes(frames[1], "big")))
        elif frames == [b"", DUMP_REQUEST] and self._dump is not None:
            self._waiting_for_dump.append(_Answer(client))
        else:
            if frames != [b"", DUMP_REQUEST]:
                self.num_malformed += 1
                if self.num_malformed == 1:  # the others are counted, so that no log is flooded
                    logger.warning(
                        "malformed request on %s: %d frames", self.endpoint, len(frames) + 1
                    )
            self._waiting.append(_Answer(client))

    def _continue_answers(self) -> bool:
        """Send some replies of each active answer; whether any could be sent."""
        self._begin_replays()
        self._begin_dump()
        before = self._num_sent
        self._active = [answer for answer in self._active if self._is_unfinished(answer)]
        return self._num_sent > before

    def _begin_replays(self) -> None:
        num_active = sum(answer.dump is None for answer in self._active)
        for _ in range(min(len(self._waiting), _MOST_REPLAYS - num_active)):
            answer = self._waiting.popleft()
            replies = iter(()) if answer.start is None else self._replay(answer.start)
            self._begin(answer, replies, b"")

    def _replay(self, start: int) -> Iterator[tuple[bytes, bytes]]:
        for sequence, payload in self._buffered(start):
            yield sequence.to_bytes(NUMBER_BYTES, "big"), payload

    def _begin_dump(self) -> None:
        """Make one dump for those who wait; none of them asked after it was made."""
        held = {id(answer.dump) for answer in self._active if answer.dump is not None}
        if not self._waiting_for_dump or len(held) >= _MOST_DUMPS or self._dump is None:
            return
        count = min(len(self._waiting_for_dump), _MOST_CLIENTS_OF_A_DUMP)
        answers = [self._waiting_for_dump.popleft() for _ in range(count)]
        try:
            dump = self._dump()
        except Exception as error:
            self.num_abandoned += count
            logger.warning("a dump for %d clients of %s failed: %s", count, self.endpoint, error)
            return
        self.num_dumps += 1
        number = dump.next_sequence.to_bytes(NUMBER_BYTES, "big")
        for answer in answers:
            answer.dump = dump
            self._begin(answer, zip(itertools.repeat(number), dump.batches), number)

    def _begin(
        self, answer: _Answer, replies: Iterable[tuple[bytes, bytes]], end_payload: bytes
    ) -> None:
        answer.replies = itertools.chain(replies, [(END_MARKER, end_payload)])
        answer.begun_at = answer.progress_at = time.monotonic()
        self._active.append(answer)

    def _is_unfinished(self, answer: _Answer) -> bool:
        """Send some of its replies; whether there are more."""
        try:
            for _ in range(_REPLIES_AT_A_TIME):
                reply = answer.unsent or next(answer.replies, None)
                if reply is None:
                    return False
                answer.unsent = reply
                frames = (answer.client, *self._prefix, *reply)
                self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
                answer.unsent = None
                answer.progress_at = time.monotonic()
                self._num_sent += 1
        except zmq.Again:
            if time.monotonic() < self._give_up_at(answer):
                return True
            self.num_abandoned += 1
            return False
        except Exception as error:
            self.num_abandoned += 1
            logger.warning("an answer on %s was given up: %s", self.endpoint, error)
            return False
        return True

    def _give_up_at(self, answer: _Answer) -> float:
        """When an answer that makes no progress just now is given up."""
        if answer.dump is None:
            return answer.progress_at + _SECONDS_WITHOUT_PROGRESS
        # There are two, since each is memory; who reads must not wait long for who reads slowly.
        if self._waiting_for_dump:
            return min(
                answer.progress_at + _SECONDS_WHILE_OTHERS_WAIT,
                answer.begun_at + _MOST_SECONDS_WHILE_OTHERS_WAIT,
            )
        return answer.progress_at + _SECONDS_WITHOUT_PROGRESS_OF_A_DUMP
