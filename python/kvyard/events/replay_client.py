"""Asking a publisher's replay socket for lost batches or for its state.

Understands both forms of reply: with the topic (vLLM 0.33, ours) and without (vLLM 0.25, SGLang).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import zmq

from kvyard.events.endpoints import NoAnswerError, NotConnectedError, connect
from kvyard.events.zmq_transport import DUMP_REQUEST, END_MARKER, NUMBER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_SECONDS_BETWEEN_LOOKS = 0.1
_MOST_SECONDS_TO_CONNECT = 1.0


class ReplayClient:
    """Asks one replay socket; every question has a socket of its own, so that answers never mix.

    Attributes:
        num_failed: Questions whose answer did not come, or broke off.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        topic: str,
        timeout: float,
        is_closed: Callable[[], bool],
    ) -> None:
        """Remember whom to ask.

        Args:
            context: Owns the sockets.
            endpoint: The replay endpoint.
            topic: Replies of other topics are left out, as a SUB socket would.
            timeout: Seconds without a reply after which a question has failed; it takes the server
                a while to make a dump. Nobody to connect to is known after a second.
            is_closed: Whether nobody wants the answer any more.
        """
        self.num_failed = 0
        self._context = context
        self._endpoint = endpoint
        self._topic = topic.encode()
        self._timeout = timeout
        self._is_closed = is_closed

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """What the publisher still has from a number on.

        Args:
            start: The first number wanted.

        Returns:
            Numbers and payloads, ascending. They begin above `start` where the ring has lost it,
            and end early where the answer broke off.

        Raises:
            NoAnswerError: No reply came.
        """
        replies, _ = self._ask(start.to_bytes(NUMBER_BYTES, "big"))
        ascending: list[tuple[int, bytes]] = []
        for sequence, payload in replies:
            if sequence >= (ascending[-1][0] + 1 if ascending else start):
                ascending.append((sequence, payload))
        return ascending

    def dump(self) -> tuple[list[bytes], int] | None:
        """The publisher's state: its batches and the number that follows.

        Returns:
            None if it keeps none, or if the answer broke off.

        Raises:
            NoAnswerError: No reply came.
        """
        replies, end = self._ask(DUMP_REQUEST)
        if end is None or len(end) != NUMBER_BYTES:
            return None
        return [payload for _, payload in replies], int.from_bytes(end, "big")

    def _ask(self, request: bytes) -> tuple[list[tuple[int, bytes]], bytes | None]:
        """Replies and the end marker's payload, or None if that did not come."""
        replies: list[tuple[int, bytes]] = []
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            # vLLM's server drops replies that do not fit; what it has is bounded by its ring.
            dealer.setsockopt(zmq.RCVHWM, 0)
            # It can send only once it is connected.
            dealer.setsockopt(zmq.IMMEDIATE, 1)
            connect(dealer, self._endpoint)
            if not self._poll(dealer, zmq.POLLOUT, min(self._timeout, _MOST_SECONDS_TO_CONNECT)):
                self.num_failed += 1
                raise NotConnectedError
            dealer.send_multipart((b"", request))
            while self._poll(dealer, zmq.POLLIN, self._timeout):
                frames = dealer.recv_multipart()
                if len(frames) not in (3, 4):
                    continue
                number, payload = frames[-2:]
                if number == END_MARKER:
                    return replies, payload
                if len(frames) == 3 or frames[1].startswith(self._topic):
                    replies.append((int.from_bytes(number, "big"), payload))
        self.num_failed += 1
        if not replies:
            raise NoAnswerError
        return replies, None

    def _poll(self, dealer: zmq.Socket[bytes], event: int, timeout: float) -> bool:
        """Wait for a socket, but not for longer than somebody wants the answer."""
        deadline = time.monotonic() + timeout
        while not self._is_closed():
            wait = min(deadline - time.monotonic(), _SECONDS_BETWEEN_LOOKS)
            if dealer.poll(max(int(wait * 1000), 0), event):
                return True
            if wait <= 0:
                break
        return False
