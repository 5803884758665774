"""Following a KV event stream: batches in order, lost ones fetched again, restarts noticed.

One subscription follows one publisher: vLLM's, SGLang's or ours::

    with subscribe("tcp://engine:5557", replay_endpoint="tcp://engine:5558") as subscription:
        for received in subscription:
            index.apply("engine", received.payload)  # or look at received.batch

A consumer that applies what it receives, in order, holds what the publisher's pool holds: after a
restart, and before a dump, an `AllBlocksCleared` comes first. Where that is impossible, since
nobody has the lost batches any more, `num_lost` says so, and `is_complete` is False until the next
state or reset. It is False too for who came late to a publisher that cannot tell what was before.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kvyard._kvyard import decode_batch, encode_batch, inspect_batch
from kvyard.errors import ConfigError, EventDecodeError
from kvyard.events.endpoints import NoAnswerError, NotConnectedError, connect, zmq_context
from kvyard.events.types import AllBlocksCleared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from kvyard.events.replay_client import ReplayClient
    from kvyard.events.types import KVEventBatch

# How soon a receiving thread notices that another one has closed the subscription.
_SECONDS_BETWEEN_LOOKS = 0.1

_NUMBER_BYTES = 8


class BatchSource(enum.StrEnum):
    """How a batch came."""

    LIVE = "live"
    """As it was published."""
    REPLAY = "replay"
    """From the publisher's ring, after the live message was lost."""
    DUMP = "dump"
    """From the publisher's state: `AllBlocksCleared` first, then what it holds."""
    RESTART = "restart"
    """Made here: an `AllBlocksCleared`, since the publisher began anew."""


@dataclass(frozen=True)
class ReceivedBatch:
    """One batch of a subscription.

    Attributes:
        sequence: Its number. Batches of a dump have the number at which the stream goes on.
        payload: Its bytes as received: what `PrefixIndex` and `LiveSet` take.
        source: How it came.
        num_lost: Batches before it that nobody has any more; what they said is not known. 1 stands
            for one or more where it is the first batch of a subscription that was there before
            anything had been published: it is not known at which number the stream began.
    """

    sequence: int
    payload: bytes
    source: BatchSource = BatchSource.LIVE
    num_lost: int = 0

    @functools.cached_property
    def batch(self) -> KVEventBatch:
        """Its events as objects, made when they are asked for first."""
        return decode_batch(self.payload)


@dataclass(frozen=True, slots=True)
class _Waiting:
    sequence: int
    payload: bytes
    source: BatchSource
    num_lost: int = 0
    is_part: bool = False
    """Of a dump that goes on."""


class EventSubscription:
    """Batches of one publisher; made by `subscribe`.

    No thread stands behind it: messages wait in the socket until `receive` or the iteration asks.

    Attributes:
        is_complete: Whether whoever applied all that was delivered so far holds all that the pool
            held then: the stream was followed from its first batch, a reset, or a dump on, and
            nothing was lost since. In a stream that numbers from 0 it can be wrong: if an engine
            restarts, and has published as many batches as its predecessor before one of them
            arrives, that one bears the number that should come next, and nothing tells. Streams
            of `start_sequence="clock"`, the default of the format `router`, are free of that.
        num_received: Batches delivered.
        num_gaps: Times that numbers were missing.
        num_replayed: Batches that came from the publisher's ring.
        num_dumps: Times that the state came from a dump.
        num_lost: Batches that could not be recovered, at the least (see `ReceivedBatch`).
        num_restarts: Times that the publisher began anew, with a lower number, or with a jump to
            an `AllBlocksCleared`.
        num_duplicates: Live messages left out since they had been recovered before.
        num_malformed: Messages that are not of the stream: frames, or bytes that do not decode.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None,
        topic: str,
        catch_up: bool,
        hwm: int,
        replay_timeout: float,
    ) -> None:
        """Connect; see `subscribe`."""
        if hwm < 0:
            raise ConfigError(f"hwm: {hwm} is negative; 0 sets no limit")
        if replay_timeout <= 0:
            raise ConfigError(f"replay_timeout: {replay_timeout} s is no time to wait")
        context = zmq_context()
        import zmq

        from kvyard.events.replay_client import ReplayClient

        self.is_complete = False
        self.num_received = self.num_gaps = self.num_replayed = self.num_dumps = 0
        self.num_lost = self.num_restarts = self.num_duplicates = self.num_malformed = 0
        self._waiting: deque[_Waiting] = deque()
        self._next: int | None = None
        """The number that should come next; None: any."""
        self._came_first = False
        """Whether nothing had been published when the publisher was asked."""
        self._last_live = -1
        self._recovered_until = float("-inf")
        """Publisher's time up to which recovered batches reach."""
        self._must_catch_up = catch_up
        """Whether the receiving thread is to ask for what is missing."""
        self._closed = False
        self._lock = threading.RLock()
        self._client: ReplayClient | None = None
        if replay_endpoint is not None:
            self._client = ReplayClient(
                context,
                replay_endpoint,
                topic=topic,
                timeout=replay_timeout,
                is_closed=lambda: self._closed,
            )
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, hwm)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        try:
            connect(self._socket, endpoint)
        except BaseException:
            self._socket.close()
            raise

    def receive(self, timeout: float | None = None) -> ReceivedBatch | None:
        """The next batch.

        Args:
            timeout: Seconds to wait for a message; None: as long as it takes. Asking the replay
                endpoint takes its own time.

        Returns:
            The batch; None if none came in time or the subscription was closed.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._closed:
                self._catch_up_if_wanted()
                while self._waiting:
                    received = self._checked(self._waiting.popleft())
                    if received is not None:
                        return received
                wait = min(deadline - time.monotonic(), _SECONDS_BETWEEN_LOOKS)
                if self._socket.poll(max(int(wait * 1000), 0)):
                    self._take(self._socket.recv_multipart())
                elif wait <= 0:
                    break
        return None

    def catch_up(self) -> None:
        """Ask the replay endpoint, if there is one, for what is missing up to now.

        The first time it is asked for the state, or, if it keeps none, for all that it has.
        Afterwards a gap is found when the next batch comes; this finds one at the end. While
        another thread receives, it is that one which asks, within a tenth of a second, and this
        returns at once.
        """
        self._must_catch_up = True
        if self._lock.acquire(blocking=False):
            try:
                self._catch_up_if_wanted()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the iteration and close the socket; harmless twice, allowed from any thread."""
        self._closed = True
        with self._lock:
            self._socket.close()

    @property
    def next_sequence(self) -> int | None:
        """The number that should come next; None before the first batch."""
        return self._next

    @property
    def num_failed_requests(self) -> int:
        """Questions to the replay endpoint that were not, or not wholly, answered."""
        return 0 if self._client is None else self._client.num_failed

    def __iter__(self) -> Iterator[ReceivedBatch]:
        """Batches until the subscription is closed."""
        while (received := self.receive()) is not None:
            yield received

    def __enter__(self) -> Self:
        """The subscription itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _catch_up_if_wanted(self) -> None:
        """Do what `catch_up` says; the caller holds the lock."""
        if not self._must_catch_up or self._closed:
            return
        self._must_catch_up = False
        if self._client is None:
            return
        if self._next is not None:
            self._recover(self._client, self._next)
            return
        try:
            if self._take_dump(self._client):
                return
        except NotConnectedError:
            return
        except NoAnswerError:
            pass  # others may hold its dumps; batches are replayed besides
        with contextlib.suppress(NoAnswerError):
            batches = self._client.replay(0)
            self._append_replayed(batches)
            self._came_first = not batches

    def _take(self, frames: list[bytes]) -> None:
        """Sort one live message in."""
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            self.num_malformed += 1
            return
        sequence, payload = int.from_bytes(frames[1], "big"), frames[2]
        if self._began_anew(sequence, payload):
            self.num_restarts += 1
            cleared = encode_batch([AllBlocksCleared()], time.time())
            self._waiting.append(_Waiting(sequence, cleared, BatchSource.RESTART))
            self._next = 0
            self._recovered_until = float("-inf")
            if self._client is not None and sequence > 0:
                self._recover(self._client, sequence)
        elif self._skips(sequence) and not _is_cleared_first(payload):
            self.num_gaps += 1
            if self._client is not None:
                self._recover(self._client, sequence)
        self._last_live = sequence
        if self._next is None or sequence >= self._next:
            self._append(sequence, payload, BatchSource.LIVE)
        else:
            self.num_duplicates += 1

    def _skips(self, sequence: int) -> bool:
        """Whether a number tells that others before it are missing."""
        if self._next is None:
            return self._came_first and sequence > 0
        return sequence > self._next

    def _began_anew(self, sequence: int, payload: bytes) -> bool:
        """Whether a number lower than expected is a new beginning, not a recovered batch again.

        Live numbers of one publisher only rise. What was recovered may come again, but is no
        newer, by the publisher's own clock, than the last that was recovered.
        """
        if self._next is None or sequence >= self._next:
            return False
        if sequence <= self._last_live:
            return True
        try:
            ts, _ = inspect_batch(payload)
        except EventDecodeError:
            return False
        return ts > self._recovered_until

    def _recover(self, client: ReplayClient, before: int) -> None:
        """Get the batches from `_next` up to `before`, or the state, or what there is."""
        expected = self._next or 0
        try:
            batches = client.replay(expected)
        except NoAnswerError:
            return
        for sequence, payload in batches:
            if sequence != expected and not _is_cleared_first(payload):
                break
            expected = sequence + 1
        else:
            if expected >= before:
                self._append_replayed(batches)
                return
        has_state = False
        with contextlib.suppress(NoAnswerError):
            has_state = self._take_dump(client)
        if not has_state:
            self._append_replayed(batches)

    def _append_replayed(self, batches: list[tuple[int, bytes]]) -> None:
        for sequence, payload in batches:
            self._append(sequence, payload, BatchSource.REPLAY)

    def _take_dump(self, client: ReplayClient) -> bool:
        """Go on from the publisher's state; whether it has one."""
        dump = client.dump()
        if dump is None:
            return False
        batches, sequence = dump
        self.num_dumps += 1
        self._waiting.extend(
            _Waiting(sequence, payload, BatchSource.DUMP, is_part=number < len(batches))
            for number, payload in enumerate(batches, 1)
        )
        self._next = sequence
        return True

    def _append(self, sequence: int, payload: bytes, source: BatchSource) -> None:
        num_lost = 0
        if self._next is None:
            # Something was published before this, at least the batch whose number is one lower.
            num_lost = int(self._skips(sequence) and not _is_cleared_first(payload))
        elif sequence > self._next:
            if _is_cleared_first(payload):
                self.num_restarts += 1
            else:
                num_lost = sequence - self._next
        self.num_lost += num_lost
        self.num_replayed += source is BatchSource.REPLAY
        self._waiting.append(_Waiting(sequence, payload, source, num_lost))
        self._next = sequence + 1

    def _checked(self, waiting: _Waiting) -> ReceivedBatch | None:
        try:
            ts, begins_with_cleared = inspect_batch(waiting.payload)
        except EventDecodeError:
            self.num_malformed += 1
            self.is_complete = False
            return None
        if waiting.source is BatchSource.DUMP:
            self.is_complete = not waiting.is_part
        elif waiting.sequence == 0 or begins_with_cleared:
            self.is_complete = True
        elif waiting.num_lost > 0:
            self.is_complete = False
        if waiting.source in (BatchSource.REPLAY, BatchSource.DUMP):
            self._recovered_until = max(self._recovered_until, ts)
        self.num_received += 1
        return ReceivedBatch(waiting.sequence, waiting.payload, waiting.source, waiting.num_lost)


def subscribe(
    endpoint: str,
    *,
    replay_endpoint: str | None = None,
    topic: str = "",
    catch_up: bool = True,
    hwm: int = 100_000,
    replay_timeout: float = 5.0,
) -> EventSubscription:
    """Follow a publisher's events.

    Args:
        endpoint: Where it publishes, for example `tcp://engine:5557`.
        replay_endpoint: Where it replays; with it lost batches are asked for, by number, and where
            the publisher does not have them any more, its state (only our publishers keep one).
        topic: Only messages whose topic begins with it; "" takes all.
        catch_up: Whether to begin with the publisher's state, or with all that its ring has.
        hwm: Messages that wait in the socket before ZMQ drops; 0: no limit.
        replay_timeout: Seconds without a reply after which a question has failed.

    Returns:
        An iterator of batches; close it, or use it as a context manager.

    Raises:
        ConfigError: A limit is out of range.
        EndpointError: An endpoint is malformed.
        MissingDependencyError: pyzmq is not installed.
    """
    return EventSubscription(
        endpoint,
        replay_endpoint=replay_endpoint,
        topic=topic,
        catch_up=catch_up,
        hwm=hwm,
        replay_timeout=replay_timeout,
    )


def _is_cleared_first(payload: bytes) -> bool:
    """Whether a batch makes what came before it irrelevant."""
    try:
        _, begins_with_cleared = inspect_batch(payload)
    except EventDecodeError:
        return False
    return begins_with_cleared
