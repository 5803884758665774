"""Publishing a manager's events: numbering, a bounded queue, a ring for replay, the full state.

`EventPublisher` does all that does not depend on how batches travel; an `EventTransport` carries
them. `ZmqPublisher` is the publisher over ZMQ that vLLM's and SGLang's consumers understand::

    publisher = ZmqPublisher("tcp://*:5557", "tcp://*:5558", live_set=True)
    ...
    publisher.publish(manager.take_event_batch())  # once a step

What a consumer may rely on: numbers rise by one from batch to batch; a batch that is lost leaves a
number out; a batch gets its number after it has been encoded, so that one that cannot be encoded
leaves none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeAlias

from kvyard._kvyard import LiveSet, encode_batch
from kvyard.errors import ConfigError, InvalidArgumentError, PublisherClosedError
from kvyard.events.endpoints import endpoint_for_rank, zmq_context
from kvyard.events.types import AllBlocksCleared, EventDump, KVEventBatch, WireFormat

if TYPE_CHECKING:
    from types import TracebackType

    from kvyard.events.zmq_transport import ReplayServer

logger = logging.getLogger(__name__)

SEQUENCE_LIMIT = (1 << 64) - 2
"""Numbers stay below: eight bytes of 0xff are the end marker of a replay."""

_SECONDS_TO_CLOSE = 1.0
_SECONDS_TO_CONNECT = 0.3
_SECONDS_TO_GATHER = 0.01
_ARRAY_OF_THREE = b"\x93"
_BATCH_BEFORE_RANK = b"\x93\xcb\0\0\0\0\0\0\0\0\x90"
"""The batch without events at 0.0 s, up to its rank."""

StartSequence: TypeAlias = int | Literal["clock"] | None
"""Number of the first batch; "clock": milliseconds since the epoch; None: by the wire format."""


class EventTransport(Protocol):
    """What carries numbered batches. Both methods are called by one thread, the publisher's own."""

    def send(self, sequence: int, payload: bytes) -> None:
        """Hand one batch over.

        An exception loses the batch for live consumers (it is logged and counted in `num_failed`,
        and the next batch goes on); a call that takes long delays only what is behind it.

        Args:
            sequence: The batch's number.
            payload: The encoded batch.
        """
        ...

    def close(self) -> None:
        """Release what the transport holds; called once, after the last `send`."""
        ...


class _LiveState:
    """A live set, the batches that it has yet to see, and a thread that applies them.

    Its lock is never waited for by `publish` or by the sending thread: a dump of a large pool takes
    a while, and what is published meanwhile waits here, as references to bytes.
    """

    def __init__(self, live_set: LiveSet, next_sequence: int) -> None:
        self.num_failed = 0
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._live_set = live_set
        self._next_sequence = next_sequence
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvyard-live-set", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Batches that wait."""
        return len(self._waiting)

    def append(self, entry: tuple[int, bytes]) -> None:
        """Leave a numbered batch to the thread."""
        self._waiting.append(entry)
        if not self._wake.is_set():  # waking a thread costs more than all else here
            self._wake.set()

    def dump(self, data_parallel_rank: int, wire_format: WireFormat) -> EventDump:
        """The state up to the last batch that was numbered before."""
        with self._lock:
            for _ in range(len(self._waiting)):  # not those that come meanwhile
                self._apply_one()
            # Not earlier than any batch: consumers take what is older than the dump for a part of
            # it, and what is newer, with a lower number, for a restart. Clocks may be set back.
            now = max(time.time(), self._live_set.latest_ts)
            cleared = encode_batch([AllBlocksCleared()], now, data_parallel_rank, wire_format)
            batches = self._live_set.dump(now, data_parallel_rank, wire_format)
            return EventDump([cleared, *batches], self._next_sequence)

    def close(self) -> None:
        """End the thread after the batch at hand; a dump still applies what waits."""
        self._closed = True
        self._wake.set()
        # A dump may hold the thread up; it ends behind that.
        self._thread.join(_SECONDS_TO_CLOSE)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            # Batches gather, so that one wake-up pays for many; cleared before they are looked for.
            time.sleep(_SECONDS_TO_GATHER)
            self._wake.clear()
            # What comes meanwhile is for the next round, so that a dump need not wait for it.
            for _ in range(len(self._waiting)):
                if self._closed:
                    return
                with self._lock:
                    self._apply_one()

    def _apply_one(self) -> None:
        """Apply the oldest batch, if a dump did not; the caller holds the lock."""
        if not self._waiting:
            return
        sequence, payload = self._waiting.popleft()
        try:
            self._live_set.apply(payload)
        except Exception:
            # Consumers cannot read it either, so that leaving it out keeps us equal to them.
            self.num_failed += 1
            logger.exception("batch %d is not in the wire format; it is left out", sequence)
        self._next_sequence = sequence + 1


class EventPublisher:
    """Numbers batches and hands them to a transport from a thread of its own.

    `publish` never waits for the transport. A batch that finds the queue full is dropped for live
    consumers and counted in `num_dropped`; its number is used up, so that they see the gap, and it
    stays in the ring, so that they can have it replayed.

    All methods may be called by any thread. Use it as a context manager, or call `close`.

    Attributes:
        wire_format: How batches are written.
        data_parallel_rank: The rank that batches carry.
    """

    def __init__(
        self,
        transport: EventTransport,
        *,
        data_parallel_rank: int = 0,
        buffer_steps: int = 10_000,
        max_queue_size: int = 100_000,
        wire_format: WireFormat | str = WireFormat.ROUTER,
        start_sequence: StartSequence = None,
        live_set: bool | LiveSet = False,
    ) -> None:
        """Start the thread.

        Args:
            transport: Carries the batches; closed with the publisher.
            data_parallel_rank: Rank of the engine, 0 or more.
            buffer_steps: Batches that the ring keeps for replay: at least the last one, by which
                a consumer sees that it is behind.
            max_queue_size: Batches that may wait for the transport.
            wire_format: How event objects are written; batches that come encoded stay as they are.
            start_sequence: Number of the first batch. None: "clock" for the router format, so that
                a restarted publisher begins above its predecessor, else 0. Unless it is 0,
                `AllBlocksCleared` goes out before the first batch that is published (not earlier:
                consumers have yet to connect when a publisher is made).
            live_set: Whether to keep the state for dumps; or the empty set to keep it in: for a
                pool whose `removal_event` is "every_copy" (vLLM's), a `LiveSet("every_copy")`.

        Raises:
            ConfigError: An argument is out of range.
        """
        self.wire_format = _wire_format(wire_format)
        self.data_parallel_rank = data_parallel_rank
        self._encoded_rank = _encoded_rank(data_parallel_rank)
        _at_least("buffer_steps", buffer_steps, 1)
        _at_least("max_queue_size", max_queue_size, 1)
        self._next_sequence = _first_sequence(start_sequence, self.wire_format)
        self._cleared_first = self._next_sequence != 0
        self._max_queue_size = max_queue_size
        self._queue: deque[tuple[int, bytes]] = deque()
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._live = _live_state(live_set, self._next_sequence)
        self._transport = transport
        self._changed = threading.Condition()
        self._closed = False
        self._deadline = float("inf")
        self._num_dropped = 0
        self._num_failed = 0
        self._num_published = 0
        self._thread = threading.Thread(target=self._run, name="kvyard-events", daemon=True)
        self._thread.start()

    def publish(self, batch: bytes | bytearray | memoryview | KVEventBatch | None) -> None:
        """Number a batch and queue it; returns at once, whatever consumers do.

        Args:
            batch: Encoded (`take_event_batch`), with the publisher's rank; it keeps its wire
                format. Or as objects, with that rank or None, which becomes it. None, which is
                what a step without events gives, is nothing.

        Raises:
            InvalidArgumentError: It cannot be encoded, is no batch, or has another rank, which
                consumers would take for another engine's; no number is used up.
            PublisherClosedError: The publisher has been closed.
        """
        if self._closed:
            raise _closed_error()
        if batch is None:
            return
        if isinstance(batch, bytes | bytearray | memoryview):
            payload = self._checked(bytes(batch))
        else:
            payload = self._encode(batch)
        with self._changed:
            if self._closed:
                raise _closed_error()
            room = self._max_queue_size
            if self._cleared_first:
                self._cleared_first = False
                room += 1  # it comes besides the batch, not in its place
                self._append(self._encode(KVEventBatch(time.time(), [AllBlocksCleared()])), room)
            self._append(payload, room)
            self._changed.notify()

    def dump(self) -> EventDump:
        """The pool's content, and the number from which the stream continues it.

        Batches published during the call are not in it; they carry that number or a higher one.

        Raises:
            ConfigError: The publisher keeps no live set.
        """
        if self._live is None:
            raise ConfigError("the publisher keeps no state to dump; make it with live_set=True")
        return self._live.dump(self.data_parallel_rank, self.wire_format)

    def buffered(self, start: int) -> list[tuple[int, bytes]]:
        """What the ring still has.

        Args:
            start: The first number that is wanted.

        Returns:
            Numbers and payloads from `start` on, ascending. The first is higher than `start` if
            the ring has lost that one.
        """
        with self._changed:
            ring = list(self._ring)
        return [entry for entry in ring if entry[0] >= start]

    def close(self, timeout: float = _SECONDS_TO_CLOSE) -> None:
        """Send what is queued, as far as time allows, and close the transport; harmless twice.

        Batches that are still queued after the time count as dropped.

        Args:
            timeout: Seconds to wait for the transport.
        """
        with self._changed:
            if not self._closed:
                self._closed = True
                self._deadline = time.monotonic() + timeout
                self._changed.notify()
        # Some time beyond the deadline, to close sockets; a transport that hangs is left behind.
        self._thread.join(timeout + _SECONDS_TO_CLOSE)
        if self._thread.is_alive():
            logger.warning("the transport did not return in %g s; its thread is left", timeout)
        with self._changed:
            self._num_dropped += len(self._queue)
            self._queue.clear()
        if self._live is not None:
            self._live.close()

    @property
    def next_sequence(self) -> int:
        """Number of the next batch."""
        return self._next_sequence

    @property
    def num_published(self) -> int:
        """Batches handed to the transport."""
        return self._num_published

    @property
    def num_dropped(self) -> int:
        """Batches that live consumers did not get because the queue was full or closing."""
        return self._num_dropped

    @property
    def num_failed(self) -> int:
        """Batches that the transport refused with an exception."""
        return self._num_failed

    @property
    def num_unreadable(self) -> int:
        """Batches that came encoded, and that the live set could not read."""
        return 0 if self._live is None else self._live.num_failed

    @property
    def num_unapplied(self) -> int:
        """Batches that the live set has yet to take in; they are kept in memory until then."""
        return 0 if self._live is None else len(self._live)

    @property
    def num_queued(self) -> int:
        """Batches that wait for the transport."""
        return len(self._queue)

    def __enter__(self) -> Self:
        """The publisher itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _encode(self, batch: KVEventBatch) -> bytes:
        if not isinstance(batch, KVEventBatch):
            raise InvalidArgumentError(
                f"batch: bytes or a KVEventBatch is expected, not {type(batch).__name__}"
            )
        rank = self.data_parallel_rank
        if batch.data_parallel_rank not in (None, rank):
            raise InvalidArgumentError(
                f"batch: its data_parallel_rank is {batch.data_parallel_rank!r}, the publisher's is"
                f" {rank}; leave it None, which becomes that"
            )
        try:
            return encode_batch(batch.events, batch.ts, rank, self.wire_format)
        except TypeError as error:
            raise InvalidArgumentError(f"batch: {error}") from error

    def _checked(self, payload: bytes) -> bytes:
        """Refuse what is clearly no batch of this rank; reading all of it would cost too much."""
        if not payload.startswith(_ARRAY_OF_THREE):
            raise InvalidArgumentError(
                f"batch: {payload[:8]!r}... is no encoded batch, which is a msgpack array of three"
            )
        if not payload.endswith(self._encoded_rank):
            rank = self.data_parallel_rank
            raise InvalidArgumentError(
                f"batch: its data_parallel_rank is not {rank}, the publisher's; encode it with"
                f" take_event_batch(data_parallel_rank={rank})"
            )
        return payload

    def _append(self, payload: bytes, room: int) -> None:
        """Number a payload, and queue it if fewer than `room` wait; the caller holds the lock."""
        entry = (self._next_sequence, payload)
        self._next_sequence += 1
        self._ring.append(entry)
        if self._live is not None:
            self._live.append(entry)
        if len(self._queue) < room:
            self._queue.append(entry)
        else:
            self._num_dropped += 1

    def _run(self) -> None:
        while (entry := self._wait_for_batch()) is not None:
            try:
                self._transport.send(*entry)
                self._num_published += 1
            except Exception:
                self._num_failed += 1
                logger.exception("batch %d could not be sent", entry[0])
        try:
            self._transport.close()
        except Exception:
            logger.exception("the transport could not be closed")

    def _wait_for_batch(self) -> tuple[int, bytes] | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            if not self._queue or time.monotonic() > self._deadline:
                return None
            return self._queue.popleft()


class ZmqPublisher(EventPublisher):
    """Publishes over a ZMQ PUB socket, as vLLM 0.25.1's `ZmqEventPublisher` does and better.

    A message has three frames: topic, number (8 bytes, big-endian), batch. A ROUTER socket replays
    what the ring still has, and dumps the state (see `ReplayServer`).
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        data_parallel_rank: int = 0,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        wire_format: WireFormat | str = WireFormat.ROUTER,
        start_sequence: StartSequence = None,
        live_set: bool | LiveSet = False,
    ) -> None:
        """Open the sockets and start the threads.

        Args:
            endpoint: Where consumers listen, for rank 0 (see `endpoint_for_rank`). It is bound if
                it contains `*` or `::`, or is of ipc or inproc; else connected to.
            replay_endpoint: Where they ask for replay, always bound; None: nowhere.
            topic: First frame of each message, by which consumers filter (see `pod_topic`).
            data_parallel_rank: Rank of the engine, 0 or more.
            buffer_steps: Batches that the ring keeps for replay.
            hwm: Messages that ZMQ keeps for one slow consumer before it drops (0: no limit).
            max_queue_size: Batches that may wait for the sending thread.
            wire_format: How event objects are written, and whether replies of the replay socket
                have the topic: `router` and `vllm_0_33` have it, `vllm_0_25` and `array` not.
            start_sequence: As for `EventPublisher`. Unless it is 0, the first batch goes out 0.3 s
                after the start at the earliest, so that consumers of a predecessor are there.
            live_set: As for `EventPublisher`.

        Raises:
            ConfigError: An argument is out of range, or an endpoint is malformed.
            EndpointError: An endpoint is in use or cannot be bound.
            MissingDependencyError: pyzmq is not installed.
        """
        context = zmq_context()
        from kvyard.events.zmq_transport import ReplayServer, ZmqTransport

        _at_least("hwm", hwm, 0)
        _at_least("data_parallel_rank", data_parallel_rank, 0)
        endpoint = endpoint_for_rank(endpoint, data_parallel_rank)
        if replay_endpoint is not None:
            replay_endpoint = endpoint_for_rank(replay_endpoint, data_parallel_rank)
        start_sequence = _first_sequence(start_sequence, _wire_format(wire_format))
        transport = ZmqTransport(
            context,
            endpoint,
            topic=topic,
            hwm=hwm,
            # Whoever knew the predecessor must not miss the `AllBlocksCleared`.
            seconds_to_connect=0.0 if start_sequence == 0 else _SECONDS_TO_CONNECT,
        )
        self._endpoint = transport.endpoint
        self._replay_server: ReplayServer | None = None
        try:
            super().__init__(
                transport,
                data_parallel_rank=data_parallel_rank,
                buffer_steps=buffer_steps,
                max_queue_size=max_queue_size,
                wire_format=wire_format,
                start_sequence=start_sequence,
                live_set=live_set,
            )
        except BaseException:
            transport.close()
            raise
        if replay_endpoint is None:
            return
        with_topic = self.wire_format in (WireFormat.ROUTER, WireFormat.VLLM_0_33)
        try:
            self._replay_server = ReplayServer(
                context,
                replay_endpoint,
                buffered=self.buffered,
                dump=self.dump if self._live is not None else None,
                topic=topic.encode() if with_topic else None,
            )
        except BaseException:
            super().close(0)
            raise

    @property
    def endpoint(self) -> str:
        """Where consumers listen; with the port or path that the system picked."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where consumers ask for replay, or None."""
        return None if self._replay_server is None else self._replay_server.endpoint

    @property
    def replay_server(self) -> ReplayServer | None:
        """Answers replay and dump requests, and counts them; or None."""
        return self._replay_server

    def close(self, timeout: float = _SECONDS_TO_CLOSE) -> None:
        """As `EventPublisher.close`; also ends the replay socket."""
        super().close(timeout)
        if self._replay_server is not None:
            self._replay_server.close()


def _wire_format(wire_format: WireFormat | str) -> WireFormat:
    try:
        return WireFormat(wire_format)
    except ValueError as error:
        known = ", ".join(WireFormat)
        raise ConfigError(f"wire_format: {wire_format!r} is none of {known}") from error


def _first_sequence(start: object, wire_format: WireFormat) -> int:
    if start is None:
        start = "clock" if wire_format is WireFormat.ROUTER else 0
    if start == "clock":
        return time.time_ns() // 1_000_000
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < SEQUENCE_LIMIT:
        raise ConfigError(
            f'start_sequence: {start!r} is neither "clock" nor a number from 0 to {SEQUENCE_LIMIT}'
        )
    return start


def _live_state(live_set: bool | LiveSet, next_sequence: int) -> _LiveState | None:
    if live_set is False:
        return None
    live_set = LiveSet() if live_set is True else live_set
    if len(live_set) > 0:
        raise ConfigError(
            f"live_set: it holds {len(live_set)} blocks that no consumer was told of; pass an"
            " empty one"
        )
    return _LiveState(live_set, next_sequence)


def _encoded_rank(data_parallel_rank: int) -> bytes:
    """The rank as it stands at the end of each batch."""
    _at_least("data_parallel_rank", data_parallel_rank, 0)
    try:
        empty = encode_batch([], 0.0, data_parallel_rank)
    except (OverflowError, InvalidArgumentError) as error:
        raise ConfigError(f"data_parallel_rank: {data_parallel_rank} is too large") from error
    return empty[len(_BATCH_BEFORE_RANK) :]


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: {value!r} is not a whole number, {least} or more")


def _closed_error() -> PublisherClosedError:
    return PublisherClosedError("the publisher has been closed; make a new one to go on")
