"""An engine that is not ours, and what a subscription tells about it."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from kvyard.events import BatchSource, EventSubscription, ReceivedBatch, subscribe

from tests.event_streams import CONTEXT, END_MARKER, fresh_inproc, number, payload, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

import zmq

LIVE, REPLAY, DUMP, RESTART = BatchSource


class Engine025:
    """The sockets of an engine that is not ours: PUB, and a ROUTER over all that was published.

    Written from the spec (manager 8.5); with `topic` the replies have five frames, as vLLM 0.33's.
    """

    def __init__(self, *, topic: bytes | None = None, has_replay: bool = True) -> None:
        self.endpoint, self.replay_endpoint = fresh_inproc(), fresh_inproc()
        self.ring: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.dump_is_silent = False
        self._topic = [] if topic is None else [topic]
        self._live_topic = topic or b""
        self._pub = CONTEXT.socket(zmq.PUB)
        self._pub.bind(self.endpoint)
        self._stop = threading.Event()
        self._router = CONTEXT.socket(zmq.ROUTER)
        self._router.bind(self.replay_endpoint)
        self._thread = threading.Thread(target=self._answer)
        if has_replay:
            self._thread.start()

    def send(self, sequence: int, batch: bytes, *, lost: bool = False, burnt: bool = False) -> None:
        """Publish; `lost` on the way, or `burnt`: never sent nor kept."""
        if not burnt:
            self.ring.append((sequence, batch))
        if not lost and not burnt:
            self._pub.send_multipart((self._live_topic, number(sequence), batch))

    def send_frames(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pub.close(0)
        self._router.close(0)

    def _answer(self) -> None:
        while not self._stop.is_set():
            if not self._router.poll(5):
                continue
            client, empty, start = self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if self.dump_is_silent and start == b"dump":
                continue
            for sequence, batch in self.ring:
                if sequence >= self.asked[-1]:
                    reply = [*self._topic, number(sequence), batch]
                    self._router.send_multipart([client, empty, *reply])
            self._router.send_multipart([client, empty, *self._topic, END_MARKER, b""])


@contextmanager
def following(engine: Engine025, **options: Any) -> Iterator[tuple[Engine025, EventSubscription]]:
    """A subscription to an engine; both are closed."""
    with ExitStack() as stack:
        stack.callback(engine.close)
        if options.pop("replay", True):
            options["replay_endpoint"] = engine.replay_endpoint
        subscription = stack.enter_context(subscribe(engine.endpoint, **options))
        time.sleep(0.02)
        yield engine, subscription


def take(subscription: EventSubscription, count: int) -> list[ReceivedBatch]:
    """The next batches, and no more."""
    received = [subscription.receive(20) for _ in range(count)]
    assert subscription.receive(0) is None
    return [item for item in received if item is not None]


def told(items: list[ReceivedBatch]) -> list[tuple[int, str, int]]:
    """Number, source and lost batches of each."""
    return [(item.sequence, item.source, item.num_lost) for item in items]


def counters(subscription: EventSubscription) -> dict[str, int]:
    """Those that are not zero."""
    names = [name for name in dir(subscription) if name.startswith("num_")]
    return {name: value for name in names if (value := getattr(subscription, name))}


def block(i: int) -> bytes:
    """A batch that stores block i."""
    return payload(stored([i]))
