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
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
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
_REPLIES_AT_A_TIME = 64
_MOST_WAITING = 1_000
_MOST_ACTIVE = 16
_MILLISECONDS_BETWEEN_TRIES = 5
_SECONDS_WITHOUT_PROGRESS = 30.0
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


@dataclass(slots=True)
class _Answer:
    """What one client is still owed."""

    client: bytes
    replies: Iterator[tuple[bytes, bytes]]
    """Pairs of number and payload."""
    unsent: tuple[bytes, bytes] | None = None
    give_up_at: float = 0.0


class ReplayServer:
    """Answers replay and dump requests from a thread of its own.

    A client that does not read gets what its socket holds and no more: the rest waits, as
    references into the ring, and is given up after half a minute without progress.

    Attributes:
        endpoint: The endpoint as bound, with the port that the system picked.
        num_requests: Requests received.
        num_malformed: Requests among them that were neither a replay nor a dump.
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
        self.num_abandoned = 0
        self._num_sent = 0
        self._buffered = buffered
        self._dump = dump
        self._prefix = (b"",) if topic is None else (b"", topic)
        # A few are answered at a time, so that clients that do not read hold few dumps.
        self._waiting: deque[_Answer] = deque()
        self._active: list[_Answer] = []
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A peer that sends more than any request holds is disconnected.
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        # With this a full or vanished client is an error that we see, not a reply lost in silence.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
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

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        progress = False
        while not self._closing:
            timeout = None
            if self._active or self._waiting:
                timeout = 0 if progress else _MILLISECONDS_BETWEEN_TRIES
            ready = dict(poller.poll(timeout))
            if self._socket in ready:
                self._take_requests()
            progress = self._continue_answers()
        self._socket.close()

    def _take_requests(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
                self.num_requests += 1
                if len(self._waiting) >= _MOST_WAITING:
                    self.num_abandoned += 1
                    continue
                self._waiting.append(_Answer(frames[0], self._answer(frames[1:])))

    def _answer(self, frames: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Replies to one request: lazily, so that waiting requests cost nothing."""
        end = b""
        if len(frames) == 2 and frames[0] == b"" and len(frames[1]) == NUMBER_BYTES:
            for sequence, payload in self._buffered(int.from_bytes(frames[1], "big")):
                yield sequence.to_bytes(NUMBER_BYTES, "big"), payload
        elif frames == [b"", DUMP_REQUEST]:
            if self._dump is not None:
                dump = self._dump()
                end = dump.next_sequence.to_bytes(NUMBER_BYTES, "big")
                for payload in dump.batches:
                    yield end, payload
        else:
            self.num_malformed += 1
            if self.num_malformed == 1:  # the others are counted, so that no log is flooded
                logger.warning("malformed request on %s: %d frames", self.endpoint, len(frames) + 1)
        yield END_MARKER, end

    def _continue_answers(self) -> bool:
        """Send some replies of each active answer; whether any could be sent."""
        while self._waiting and len(self._active) < _MOST_ACTIVE:
            answer = self._waiting.popleft()
            answer.give_up_at = time.monotonic() + _SECONDS_WITHOUT_PROGRESS
            self._active.append(answer)
        before = self._num_sent
        self._active = [answer for answer in self._active if self._is_unfinished(answer)]
        return self._num_sent > before

    def _is_unfinished(self, answer: _Answer) -> bool:
        """Send some of its replies; whether there are more."""
        try:
            for _ in range(_REPLIES_AT_A_TIME):
                reply = answer.unsent or next(answer.replies, None)
                if reply is None:
                    return False
                answer.unsent = reply
                self._socket.send_multipart((answer.client, *self._prefix, *reply), zmq.DONTWAIT)
                answer.unsent = None
                answer.give_up_at = time.monotonic() + _SECONDS_WITHOUT_PROGRESS
                self._num_sent += 1
        except zmq.Again:
            if time.monotonic() < answer.give_up_at:
                return True
            self.num_abandoned += 1
            return False
        except Exception as error:
            self.num_abandoned += 1
            logger.warning("an answer on %s was given up: %s", self.endpoint, error)
            return False
        return True
