"""The block pool of the reference model: free queue, references, prefix map, events."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.model.hashing import Request, Semantics, external_hash, make_key, require, split_key

NULL = 0  # the null block: first one popped from the fresh queue, so always id 0 (manager 1.1)

Row = list[int]  # the block table of one request in one group
Column = tuple[int, ...]  # the blocks of several groups at one position
Event = dict[str, Any]


class Block:
    """References and keys of one block."""

    def __init__(self) -> None:
        self.ref_cnt = 0
        self.key: bytes | None = None  # primary key: hash and group
        self.key_tokens = 0  # how many prefix tokens the primary key covers
        self.aliases: list[bytes] = []  # secondary keys: shorter boundaries (manager 1.3 T7)


class BlockPool:
    """manager 5."""

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_events: bool,
        semantics: Semantics,
        num_withdrawn: int = 0,
    ) -> None:
        require(num_blocks > num_withdrawn, "a pool needs at least the null block")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_events = enable_events
        self.semantics = semantics
        self.blocks = [Block() for _ in range(num_blocks)]
        # manager 2.1: ascending, head first; attention sinks keep the first for ever (groups 2.8).
        self.num_withdrawn = num_withdrawn
        self.free = list(range(1 + num_withdrawn, num_blocks))
        self.cached: dict[bytes, list[int]] = {}  # manager 4.1: copies in the order of insertion
        self.events: list[Event] = []
        self.num_blocks_stored = 0  # blocks that got a key
        self.num_blocks_removed = 0  # blocks that lost their keys, resets left out

    # -- prefix map

    def lookup(self, block_hash: bytes, group_id: int) -> int | None:
        """The earliest inserted copy (manager 4.2)."""
        copies = self.cached.get(make_key(block_hash, group_id))
        return copies[0] if copies else None

    def lookup_column(self, block_hash: bytes, group_ids: list[int]) -> Column | None:
        """One block a group; None if any group misses (manager 4.2)."""
        found = [self.lookup(block_hash, group_id) for group_id in group_ids]
        column = tuple(block_id for block_id in found if block_id is not None)
        return column if len(column) == len(found) else None

    def cache_full_blocks(
        self,
        request: Request,
        row: Row,
        start: int,
        stop: int,
        block_size: int,
        group_id: int,
        mask: list[bool] | None = None,
    ) -> None:
        """Hash the positions [start, stop) of `row` (manager 4.3)."""
        if start >= stop:
            return
        hashes = request.hashes_for(block_size)
        require(len(hashes) >= stop, "not enough hashes")
        stored: list[int] = []
        for position in range(start, stop):
            if row[position] == NULL or (mask is not None and not mask[position - start]):
                continue
            block, covered = self.blocks[row[position]], (position + 1) * block_size
            require(block.ref_cnt > 0, "hashing a block that nobody holds")
            require(block.key_tokens < covered, "block is already fully hashed")
            self._drop_keys(row[position])  # T6: from partial to full
            self._insert(make_key(hashes[position], group_id), row[position], covered)
            stored.append(position)
        if not self.enable_events:
            return
        if self.semantics.sparse_store_event == "one_per_call":
            # manager 8.2: one event a call, with the tokens of the whole span, even if nothing
            # was stored, and with a parent that may never have been announced.
            parent = hashes[start - 1] if start > 0 else None
            self._emit_stored(request, stored, hashes, parent, (start, stop), block_size, group_id)
            return
        for run in contiguous_runs(stored):  # cases C15, C17
            parent = self._nearest_announced(hashes[: run[0]], group_id)[0]
            span = (run[0], run[-1] + 1)
            self._emit_stored(request, run, hashes, parent, span, block_size, group_id)

    def cache_partial_block(
        self, request: Request, block_id: int, num_tokens: int, group_id: int, block_size: int
    ) -> bytes | None:
        """Make a block reachable from a boundary inside it (manager 4.4)."""
        if block_id == NULL:
            return None
        size = self.hash_block_size
        require(block_size > size and block_size % size == 0, "a block of several hash blocks")
        require(num_tokens % block_size != 0 and num_tokens % size == 0, "not an inner boundary")
        index = num_tokens // size - 1
        require(0 <= index < len(request.hashes), "not enough hashes")
        block = self.blocks[block_id]
        key = make_key(request.hashes[index], group_id)
        if block_id in self.cached.get(key, []):
            return key
        if block.key_tokens < num_tokens:
            self._drop_keys(block_id)
        self._insert(key, block_id, num_tokens)
        if self.semantics.sparse_store_event == "one_per_call":
            parent, count = (request.hashes[index - 1] if index > 0 else None), index
        else:  # case C17: a parent that consumers know, and the tokens since it
            parent, count = self._nearest_announced(request.hashes[:index], group_id)
        start = count * size
        last_item = self.semantics.media_cursor == "last_item"
        cursor = -1 if last_item and start > 0 and request.media else 0
        self._emit(
            self._stored(
                request,
                [request.hashes[index]],
                parent,
                request.tokens[start:num_tokens],
                num_tokens - start,
                [request.extra_keys(start, num_tokens, cursor)],
                group_id,
            )
        )
        return key

    def _nearest_announced(self, ancestors: list[bytes], group_id: int) -> tuple[bytes | None, int]:
        """The last of these hashes that is in the prefix map, and how many precede its end."""
        for count in range(len(ancestors), 0, -1):
            if make_key(ancestors[count - 1], group_id) in self.cached:
                return ancestors[count - 1], count
        return None, 0

    def _insert(self, key: bytes, block_id: int, covered: int) -> None:
        block = self.blocks[block_id]
        if block.key is None:
            block.key, block.key_tokens = key, covered
            self.num_blocks_stored += 1
        else:
            block.aliases.append(key)
        self.cached.setdefault(key, []).append(block_id)

    def _drop_keys(self, block_id: int) -> None:
        """Take a block out of the prefix map: primary first, then the aliases (manager 4.5)."""
        block = self.blocks[block_id]
        if block.key is None:
            return
        self.num_blocks_removed += 1
        for number, key in enumerate([block.key, *block.aliases]):
            self.cached[key].remove(block_id)
            last_copy = not self.cached[key]
            if last_copy:
                del self.cached[key]
            if not last_copy and self.semantics.removal_event == "last_copy":  # case C14
                continue
            block_hash, group_id = split_key(key)
            # "alias" is no part of the event: it marks those whose order is free.
            self._emit(
                {
                    "type": "BlockRemoved",
                    "block_hashes": [external_hash(block_hash)],
                    "medium": "GPU",
                    "group_idx": group_id,
                    "alias": number > 0,
                }
            )
        block.key, block.key_tokens, block.aliases = None, 0, []

    # -- events

    def _emit(self, event: Event) -> None:
        if self.enable_events:
            self.events.append(event)

    def _emit_stored(
        self,
        request: Request,
        positions: list[int],
        hashes: list[bytes],
        parent: bytes | None,
        span: tuple[int, int],
        block_size: int,
        group_id: int,
    ) -> None:
        extras = [request.extra_keys(p * block_size, (p + 1) * block_size) for p in positions]
        tokens = request.tokens[span[0] * block_size : span[1] * block_size]
        stored = [hashes[p] for p in positions]
        self._emit(self._stored(request, stored, parent, tokens, block_size, extras, group_id))

    def _stored(
        self,
        request: Request,
        hashes: list[bytes],
        parent: bytes | None,
        tokens: list[int],
        block_size: int,
        extras: list[tuple[Any, ...] | None],
        group_id: int,
    ) -> Event:
        """manager 8.1 and 8.2; kind and window are filled in by the manager."""
        return {
            "type": "BlockStored",
            "block_hashes": [external_hash(block_hash) for block_hash in hashes],
            "parent_block_hash": None if parent is None else external_hash(parent),
            "token_ids": tokens,
            "block_size": block_size,
            "lora_id": request.lora.id if request.lora else None,
            "medium": "GPU",
            "lora_name": request.lora.name if request.lora else None,
            "extra_keys": extras or None,
            "group_idx": group_id,
            "kv_cache_spec_kind": None,
            "kv_cache_spec_sliding_window": None,
        }

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        events, self.events = self.events, []
        return events

    # -- references

    def get_new_blocks(self, n: int) -> list[int]:
        """From the head of the queue; a hashed victim loses its keys (manager 1.3 T1, T2)."""
        require(0 <= n <= len(self.free), "out of blocks")
        taken, self.free = self.free[:n], self.free[n:]
        for block_id in taken:
            self._drop_keys(block_id)
            self.blocks[block_id].ref_cnt = 1
        return taken

    def touch(self, block_ids: list[int]) -> None:
        """T3, T4; the null block has no count (case C02)."""
        for block_id in block_ids:
            if block_id != NULL:
                if self.blocks[block_id].ref_cnt == 0:
                    self.free.remove(block_id)
                self.blocks[block_id].ref_cnt += 1

    def free_blocks(self, block_ids: list[int]) -> None:
        """Unhashed blocks go to the head of the queue, hashed ones to its tail (manager 2.2)."""
        for block_id, times in Counter(block_ids).items():
            held = self.blocks[block_id].ref_cnt
            require(block_id == NULL or held >= times, f"block {block_id} freed too often")
        released = []
        for block_id in block_ids:
            if block_id != NULL:
                self.blocks[block_id].ref_cnt -= 1
                if self.blocks[block_id].ref_cnt == 0:
                    released.append(block_id)
        plain = [b for b in released if self.blocks[b].key is None]
        hashed = [b for b in released if self.blocks[b].key is not None]
        self.free = plain + self.free + hashed

    def evict_blocks(self, block_ids: list[int]) -> None:
        """T11, T12: the place in the queue does not change."""
        for block_id in block_ids:
            require(0 <= block_id < self.num_blocks, "no such block")
            self._drop_keys(block_id)

    def reset_prefix_cache(self) -> bool:
        """T13: only while nothing is held; sinks are no holders (manager 10, row 42)."""
        if len(self.free) != self.num_blocks - 1 - self.num_withdrawn:
            return False
        self.cached = {}
        for block in self.blocks:
            block.key, block.key_tokens, block.aliases = None, 0, []
        self._emit({"type": "AllBlocksCleared"})
        return True

    def usage(self) -> float:
        """manager 5; what sinks keep is no request's (groups 2.8)."""
        usable = self.num_blocks - 1 - self.num_withdrawn
        return 0.0 if usable == 0 else 1.0 - len(self.free) / usable

    def evictable(self, block_ids: list[int]) -> int:
        """How many of these sit in the queue and would leave it when touched (groups 2.1.2)."""
        return sum(1 for b in block_ids if b != NULL and self.blocks[b].ref_cnt == 0)


def contiguous_runs(positions: list[int]) -> list[list[int]]:
    """Ascending positions, split where one is missing."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs
