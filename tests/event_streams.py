"""Streams for tests: bytes made by msgspec, sockets that know nothing of kvyard, real managers."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import kvyard
import msgspec
import zmq
from kvyard.events import (
    BlockRemoved,
    BlockStored,
    EventPublisher,
    EventSubscription,
    KVCacheEvent,
    KVEventBatch,
    LiveSet,
    subscribe,
)
from kvyard.events.zmq_transport import ReplayServer, ZmqTransport

from tests.helpers import cache_config, full, low_bits, make_hasher, sliding_window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

END_MARKER = b"\xff" * 8
CONTEXT: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()

Content = set[tuple[int, int]]
"""Pairs of hash (64 bits) and group."""

_names = itertools.count()


def fresh_inproc() -> str:
    """An inproc endpoint that no other test has."""
    return f"inproc://test-{next(_names)}"


def endpoints(scheme: str, tmp_path: Path) -> tuple[str, str]:
    """Endpoints of a stream and of its replay that nobody else has; of tcp, any free ports."""
    if scheme == "tcp":
        return "tcp://*:0", "tcp://*:0"
    if scheme == "ipc":
        return f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    return fresh_inproc(), fresh_inproc()


def stored(
    hashes: list[int], parent: int | None = None, group: int = 0, block_size: int = 2
) -> dict[str, Any]:
    """A store as vLLM 0.25.1 writes it (spec manager 8.4)."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(len(hashes) * block_size)),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": group,
    }


def removed(hashes: list[int], group: int = 0) -> dict[str, Any]:
    """A removal as vLLM 0.25.1 writes it."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": group}


CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: dict[str, Any], ts: float = 1.5, rank: int = 0) -> bytes:
    """A batch in bytes."""
    return msgspec.msgpack.encode([ts, events, rank])


def events_of(batch: bytes) -> list[dict[str, Any]]:
    """The events of a batch of maps."""
    _, events, _ = msgspec.msgpack.decode(batch)
    return list(events)


def batch_of(number: int) -> KVEventBatch:
    """A batch that stores one block, by which tests know it."""
    return KVEventBatch(
        1.5, [BlockStored([number], None, [number, number], 2, None, "GPU", None, group_idx=0)]
    )


def number_of(batch: bytes) -> int:
    """The number that `batch_of` was given."""
    [event] = events_of(batch)
    return int(event["block_hashes"][0])


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that happens in another thread."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def resident_bytes() -> float:
    """What this process takes of the machine's memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))


class Recorder:
    """A transport that keeps what it gets; while `open` is clear, it hangs in `send`."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.entered = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.closed = False

    def send(self, sequence: int, payload: bytes) -> None:
        self.entered.set()
        self.open.wait(60)
        self.sent.append((sequence, payload))

    def close(self) -> None:
        self.closed = True


class LossyTransport(ZmqTransport):
    """Loses the messages of some numbers."""

    def __init__(self, endpoint: str, is_lost: Callable[[int], bool]) -> None:
        super().__init__(CONTEXT, endpoint, topic="", hwm=0)
        self._is_lost = is_lost

    def send(self, sequence: int, payload: bytes) -> None:
        if not self._is_lost(sequence):
            super().send(sequence, payload)


@contextmanager
def lossy_stream(
    is_lost: Callable[[int], bool],
    buffer_steps: int,
    live_set: LiveSet | bool,
    start_sequence: int = 0,
) -> Iterator[tuple[EventPublisher, EventSubscription]]:
    """A publisher some of whose messages are lost, and who follows it.

    What is lost can be asked for: by number, and with a live set as a dump.
    """
    transport = LossyTransport(fresh_inproc(), is_lost)
    with ExitStack() as stack:
        publisher = stack.enter_context(
            EventPublisher(
                transport,
                buffer_steps=buffer_steps,
                live_set=live_set,
                start_sequence=start_sequence,
            )
        )
        server = ReplayServer(
            CONTEXT,
            fresh_inproc(),
            buffered=publisher.buffered,
            dump=None if live_set is False else publisher.dump,
            topic=b"",
        )
        stack.callback(server.close)
        subscription = subscribe(transport.endpoint, replay_endpoint=server.endpoint)
        yield publisher, stack.enter_context(subscription)


@contextmanager
def raw_consumer(endpoint: str, topic: bytes = b"", hwm: int = 0) -> Iterator[zmq.Socket[bytes]]:
    """A SUB socket that nobody reads for us."""
    with CONTEXT.socket(zmq.SUB) as consumer:
        consumer.setsockopt(zmq.LINGER, 0)
        consumer.setsockopt(zmq.RCVHWM, hwm)
        consumer.setsockopt(zmq.RCVTIMEO, 20_000)
        consumer.setsockopt(zmq.SUBSCRIBE, topic)
        consumer.connect(endpoint)
        # A PUB socket looks for new subscriptions when it sends, at most every few milliseconds.
        time.sleep(0.02)
        yield consumer


@contextmanager
def raw_client(endpoint: str, hwm: int = 0) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER socket at a replay socket, for requests of any form."""
    with CONTEXT.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVHWM, hwm)
        client.setsockopt(zmq.RCVTIMEO, 20_000)
        client.connect(endpoint)
        yield client


def ask(endpoint: str, *frames: bytes) -> list[list[bytes]]:
    """What a replay socket answers to a request, the end marker included."""
    replies = []
    with raw_client(endpoint) as client:
        client.send_multipart(frames)
        while True:
            replies.append(client.recv_multipart())
            if replies[-1][-2] == END_MARKER:
                return replies


def number(value: int) -> bytes:
    """A sequence number on the wire."""
    return value.to_bytes(8, "big")


class Consumer:
    """What somebody holds who applies batches in order, as sets."""

    def __init__(self) -> None:
        self.content: Content = set()

    def apply(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.content |= {(_hash(h), event.group_idx or 0) for h in event.block_hashes}
            elif isinstance(event, BlockRemoved):
                self.content -= {(_hash(h), event.group_idx or 0) for h in event.block_hashes}
            else:
                self.content.clear()


def _hash(value: int | bytes) -> int:
    assert isinstance(value, int)
    return value


class Engine:
    """A real manager under random load: two groups, a small pool, evictions all the time."""

    def __init__(self, seed: int, num_blocks: int = 60) -> None:
        self.manager = kvyard.KVCacheManager(
            cache_config(num_blocks, full(4), sliding_window(4, 8)),
            max_model_len=512,
            enable_kv_cache_events=True,
        )
        self._hasher = make_hasher()
        self._random = random.Random(seed)
        self._count = 0
        self._prefixes = [self._tokens(24) for _ in range(6)]
        self._running: list[kvyard.Request] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(30_000) for _ in range(count)]

    def step(self, wire_format: str = "router") -> bytes | None:
        """Admit a request, perhaps end some; the batch of the step, if any."""
        self._schedule()
        return self.manager.take_event_batch(wire_format)

    def step_events(self) -> list[KVCacheEvent]:
        """The same, as objects."""
        self._schedule()
        return self.manager.take_events()

    def _schedule(self) -> None:
        self.manager.new_step_starts()
        while self._running and self._random.random() < 0.6:
            self.manager.free(self._running.pop(0))
        self._count += 1
        prefix = self._random.choice(self._prefixes)
        tokens = prefix + self._tokens(self._random.randrange(12))
        request = kvyard.Request(f"r{self._count}", tokens, block_hasher=self._hasher)
        hit, num_hit = self.manager.get_computed_blocks(request)
        new = self.manager.allocate_slots(request, len(tokens) - num_hit, num_hit, hit)
        if new is not None:
            request.num_computed_tokens = len(tokens)
            self._running.append(request)

    def content(self) -> Content:
        """What the pool holds."""
        keys = [block.block_hash for block in self.manager.block_pool.blocks]
        return {
            (low_bits(key[:-4]), int.from_bytes(key[-4:], "big")) for key in keys if key is not None
        }


def follow(consumer: Consumer, received: Iterable[Any]) -> None:
    """Apply batches as a subscription delivers them."""
    for item in received:
        consumer.apply(item.batch)
