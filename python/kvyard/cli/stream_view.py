"""What a KV event stream tells about a pool: live blocks, rates and prefixes, per group."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvyard.events import AllBlocksCleared, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from kvyard.events import ExternalBlockHash, KVEventBatch

_SECONDS_OF_RATES = 10
_TOKENS_SHOWN = 8


class Rate:
    """Things a second, over the last ten whole and part seconds."""

    def __init__(self) -> None:
        """Begin with none."""
        self._buckets: deque[tuple[int, int]] = deque()
        self._first: float | None = None

    def add(self, count: int, now: float) -> None:
        """Count things.

        Args:
            count: How many.
            now: A clock in seconds that does not go back.
        """
        if self._first is None:
            self._first = now
        second = int(now)
        if self._buckets and self._buckets[-1][0] == second:
            count += self._buckets.pop()[1]
        self._buckets.append((second, count))
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Things a second up to now."""
        if self._first is None:
            return 0.0
        self._forget(now)
        seconds = min(max(now - self._first, 1.0), float(_SECONDS_OF_RATES))
        return sum(count for _, count in self._buckets) / seconds

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] <= now - _SECONDS_OF_RATES:
            self._buckets.popleft()


@dataclass(slots=True)
class Prefix:
    """Live blocks that descend from one first block.

    There may be a great many, so that three numbers have to do to tell how busy one is.

    Attributes:
        tokens: The first tokens of the first block, as far as the stream told them.
        num_live: Live blocks.
    """

    tokens: list[int]
    num_live: int = 0
    _period: int = 0
    _stores: int = 0
    _stores_before: int = 0

    def store(self, now: float) -> None:
        """Count one stored block."""
        self._turn(now)
        self._stores += 1

    def stores_lately(self, now: float) -> int:
        """Blocks stored in this period of ten seconds and in the one before."""
        self._turn(now)
        return self._stores + self._stores_before

    def _turn(self, now: float) -> None:
        period = int(now / _SECONDS_OF_RATES)
        if period != self._period:
            self._stores_before = self._stores if period == self._period + 1 else 0
            self._stores = 0
            self._period = period


@dataclass
class GroupView:
    """One KV-cache group.

    Attributes:
        kind: Its attention kind, or "" if the stream does not tell.
        block_size: Tokens per block: of the group where the stream told that, else of the last
            store, which for a boundary inside a block has the tokens that it covers.
        live: Hash of each live block, with the hash of the first block of its prefix.
        prefixes: The prefixes of live blocks, by the hash of their first block.
        num_stored: Blocks stored since the beginning.
        num_removed: Blocks removed since the beginning.
        peak: Most live blocks at any time.
        is_block_size_told: Whether the stream told the group's block size.
    """

    kind: str = ""
    block_size: int = 0
    live: dict[ExternalBlockHash, ExternalBlockHash] = field(default_factory=dict)
    prefixes: dict[ExternalBlockHash, Prefix] = field(default_factory=dict)
    num_stored: int = 0
    num_removed: int = 0
    peak: int = 0
    is_block_size_told: bool = False
    stores: Rate = field(default_factory=Rate)
    removals: Rate = field(default_factory=Rate)

    def store(self, event: BlockStored, now: float, *, counts: bool) -> None:
        """Add the event's blocks; one that is live already stays where it is."""
        self.kind = event.kv_cache_spec_kind or self.kind
        if event.group_block_size is not None:
            self.block_size, self.is_block_size_told = event.group_block_size, True
        elif not self.is_block_size_told:
            self.block_size = event.block_size
        parent = event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            root = self.live.get(block_hash)
            if root is None:
                root = block_hash if parent is None else self.live.get(parent, block_hash)
                self.live[block_hash] = root
                self._prefix(root, event, i).num_live += 1
            if counts:
                self._prefix(root, event, i).store(now)
            parent = block_hash
        if counts:
            self.num_stored += len(event.block_hashes)
            self.stores.add(len(event.block_hashes), now)
        self.peak = max(self.peak, len(self.live))

    def remove(self, event: BlockRemoved, now: float) -> None:
        """Take the event's blocks away; unknown ones are passed over."""
        for block_hash in event.block_hashes:
            root = self.live.pop(block_hash, None)
            if root is None:
                continue
            prefix = self.prefixes[root]
            prefix.num_live -= 1
            if prefix.num_live == 0:
                del self.prefixes[root]
        self.num_removed += len(event.block_hashes)
        self.removals.add(len(event.block_hashes), now)

    def clear(self) -> None:
        """Forget all blocks; those of an engine that began anew may have another size."""
        self.is_block_size_told = False
        self.live.clear()
        self.prefixes.clear()

    def _prefix(self, root: ExternalBlockHash, event: BlockStored, position: int) -> Prefix:
        prefix = self.prefixes.get(root)
        if prefix is None:
            first = position * event.block_size
            tokens = event.token_ids[first : first + min(_TOKENS_SHOWN, event.block_size)]
            prefix = self.prefixes[root] = Prefix(list(tokens))
        return prefix


class StreamView:
    """The state of a stream. Blocks are sets, as routers keep them: one removal is the end.

    Attributes:
        groups: The groups that the stream named, by their index; None for streams without groups.
    """

    def __init__(self) -> None:
        """Begin with an empty pool."""
        self.groups: dict[int | None, GroupView] = {}

    def apply(self, batch: KVEventBatch, now: float, *, is_dump: bool = False) -> None:
        """Take one batch in.

        Args:
            batch: Its events.
            now: When it came: a clock in seconds that does not go back.
            is_dump: Whether it tells what is there, not what happens: then it adds to no rate.
        """
        for event in batch.events:
            match event:
                case BlockStored():
                    self._group(event.group_idx).store(event, now, counts=not is_dump)
                case BlockRemoved():
                    self._group(event.group_idx).remove(event, now)
                case AllBlocksCleared():
                    for group in self.groups.values():
                        group.clear()

    def sorted_groups(self) -> list[tuple[int | None, GroupView]]:
        """The groups by index."""
        return sorted(self.groups.items(), key=lambda item: -1 if item[0] is None else item[0])

    def busiest(self, count: int, now: float) -> list[tuple[int | None, Prefix]]:
        """The prefixes with the most blocks stored recently, then with the most live blocks."""
        prefixes = (
            (index, prefix)
            for index, group in self.sorted_groups()
            for prefix in group.prefixes.values()
        )
        return heapq.nlargest(
            count, prefixes, key=lambda item: (item[1].stores_lately(now), item[1].num_live)
        )

    def report(self, now: float) -> list[dict[str, Any]]:
        """The groups as plain data."""
        return [
            {
                "group": index,
                "kind": group.kind,
                "block_size": group.block_size,
                "live_blocks": len(group.live),
                "peak_blocks": group.peak,
                "stored_blocks": group.num_stored,
                "removed_blocks": group.num_removed,
                "stored_per_second": group.stores.per_second(now),
                "removed_per_second": group.removals.per_second(now),
            }
            for index, group in self.sorted_groups()
        ]

    def _group(self, index: int | None) -> GroupView:
        return self.groups.setdefault(index, GroupView())
