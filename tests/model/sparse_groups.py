"""Groups that keep what the next token reads: sliding windows and local chunks."""

from __future__ import annotations

from tests.model.groups import GroupManager, Mask
from tests.model.hashing import ceil_div, floor_to
from tests.model.pool import NULL, Column, Row


class SlidingWindowManager(GroupManager):
    """Sliding window, also over latent keys and values (groups 2.3)."""

    def admission_cap(self, num_lookahead_tokens: int) -> int:
        """groups 1.4; its known gap, look-ahead slots, is filled by `gate_counts_lookahead`."""
        step = self.sizes.max_num_batched_tokens + num_lookahead_tokens
        tokens = min(self.spec.sliding_window - 1 + step, self.sizes.max_model_len)
        return ceil_div(tokens, self.block_size) + 1

    def num_skipped_tokens(self, n: int) -> int:
        """What lies before the window of the next token."""
        return max(0, n - self.spec.sliding_window + 1)

    def num_window_blocks(self, eagle: bool) -> int:
        """How many blocks in a row a hit needs."""
        return ceil_div(self.spec.sliding_window - 1, self.block_size) + (1 if eagle else 0)

    def find_hit(
        self, hashes: list[bytes], max_length: int, group_ids: list[int], drop: bool, align: int
    ) -> list[Column]:
        """Right to left, for the first run of blocks that is as long as the window."""
        size, need = self.block_size, self.num_window_blocks(drop)
        count = min(max_length // size, len(hashes))
        hit: list[Column] = [(NULL,) * len(group_ids)] * count
        run = 0  # length of the run of cached blocks that begins at the current position
        for i in reversed(range(count)):
            found = self.pool.lookup_column(hashes[i], group_ids)
            if found is None:
                run = 0
                continue
            end = (i if drop else i + 1) * size  # where a hit ends whose last block this is
            if run == 0 and size != align and end % align != 0:
                continue
            hit[i] = found
            run += 1
            if run >= need:
                hit = hit[: i + run]
                break
        else:  # the run reaches back to position 0: a prefix shorter than the window
            hit = self.aligned(hit[:run], align)
        return self.aligned(hit[:-1], align) if drop else hit

    def reachable_mask(self, start: int, stop: int, num_prompt_tokens: int) -> Mask:
        """Only blocks that an aligned lookup can use are worth a key."""
        align, retention = self.sizes.scheduler_block_size, self.sizes.retention_interval
        need, shift = self.num_window_blocks(self.use_eagle), 1 if self.use_eagle else 0
        reachable: set[int] = set()
        segment = align if retention is None else retention
        if segment > 0:  # retention 0: no periodic boundaries at all
            period = segment // self.block_size
            if need >= period:
                return None
            candidates = range(shift, stop)
            reachable |= {i for i in candidates if (i - shift) % period >= period - need}
        if retention is not None:
            for boundary in self.replay_boundaries(num_prompt_tokens):
                edge = boundary // self.block_size + shift
                reachable |= set(range(edge - need, edge))
        return [i in reachable for i in range(start, stop)]

    def is_readable(self, row: Row, length: int) -> bool:
        """A window of one token reads nothing of the cache."""
        return self.spec.sliding_window == 1 or super().is_readable(row, length)


class ChunkedLocalManager(GroupManager):
    """Local attention within chunks (groups 2.5)."""

    def admission_cap(self, num_lookahead_tokens: int) -> int:
        """groups 1.4; look-ahead as for sliding windows."""
        step = self.sizes.max_num_batched_tokens + num_lookahead_tokens
        tokens = min(self.spec.attention_chunk_size + step, self.sizes.max_model_len)
        return ceil_div(tokens, self.block_size)

    def num_skipped_tokens(self, n: int) -> int:
        """The chunks before the one of the next token."""
        return floor_to(n, self.spec.attention_chunk_size)

    def find_hit(
        self, hashes: list[bytes], max_length: int, group_ids: list[int], drop: bool, align: int
    ) -> list[Column]:
        """Longest aligned length whose own chunk is there up to that length.

        0.25.1 knows only `align` equal to the block size. To cut a longer hit would leave the nulls
        of an earlier chunk where the shorter length reads.
        """
        if self.block_size == align:
            return self._current_chunk(hashes, max_length, group_ids)
        for length in reversed(range(0, max_length + 1, align)):
            hit = self._current_chunk(hashes, length, group_ids)
            if len(hit) * self.block_size == length:
                return hit
        return []

    def _current_chunk(
        self, hashes: list[bytes], max_length: int, group_ids: list[int]
    ) -> list[Column]:
        """Everything left of the current chunk is granted without any lookup."""
        first = self.num_skipped_blocks(max_length)
        hit: list[Column] = [(NULL,) * len(group_ids)] * first
        for block_hash in hashes[first : max_length // self.block_size]:
            found = self.pool.lookup_column(block_hash, group_ids)
            if found is None:
                break
            hit.append(found)
        return hit
