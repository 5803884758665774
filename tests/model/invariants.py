"""What must hold after every operation: manager 1.4 and groups 2.12, on the state of the model.

The model's state is compared with kvyard's, so what holds for one holds for the other.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.model.hashing import ceil_div, external_hash, split_key
from tests.model.pool import NULL, BlockPool, Event, Row
from tests.model.sparse_groups import ChunkedLocalManager, SlidingWindowManager

if TYPE_CHECKING:
    from tests.model.coordinator import Hits
    from tests.model.groups import GroupManager, RSWAManager
    from tests.model.hashing import Request
    from tests.model.mamba import MambaAlignManager
    from tests.model.manager import KVCacheManager


def check_pool(pool: BlockPool, references: Counter[int]) -> None:
    """Invariants of the pool; `references`: how often each block is held, by whomever."""
    assert len(set(pool.free)) == len(pool.free), "I1"
    null = pool.blocks[NULL]
    assert NULL not in pool.free, "I7"
    assert (null.ref_cnt, null.key, null.aliases) == (0, None, []), "I7"
    withdrawn = range(1, 1 + pool.num_withdrawn)
    for block_id, block in enumerate(pool.blocks):
        if block_id != NULL and block_id not in withdrawn:
            assert (block_id in pool.free) == (block.ref_cnt == 0), f"I2, P3: block {block_id}"
        assert block.ref_cnt == references[block_id], f"I4, P2: block {block_id}"
        keys = [*block.aliases, *([] if block.key is None else [block.key])]
        assert len(set(keys)) == len(keys), "I6"
        assert block.key is not None or not keys, "I6"
        assert all(block_id in pool.cached[key] for key in keys), "I6"
        assert (block.key is None) == (block.key_tokens == 0), "I9"
        assert block.key_tokens % pool.hash_block_size == 0, "I9"
    held = sum(1 for number in references.values() if number > 0)
    assert len(pool.free) + held + pool.num_withdrawn + 1 == pool.num_blocks, "I3, I15, P10"
    for key, copies in pool.cached.items():
        assert copies, "I5"
        assert len(set(copies)) == len(copies), "I5"
        for block_id in copies:
            assert key in [pool.blocks[block_id].key, *pool.blocks[block_id].aliases], "I5"
    told = [event for event in pool.events if event["type"] != "AllBlocksCleared"]
    assert pool.enable_caching or not (pool.cached or told), "I8"
    assert 0 <= pool.usage() <= 1, "I13"


def check_rows(manager: GroupManager) -> Counter[int]:
    """Invariants of one group's rows; answers how often each block occurs in them."""
    references: Counter[int] = Counter()
    for request_id, row in manager.rows.items():
        real = [block_id for block_id in row if block_id != NULL]
        assert len(set(real)) == len(real), "a block twice in one row"
        references.update(real)
        assert manager.num_cached.get(request_id, 0) <= len(row), "I10, P5"
        for position, block_id in enumerate(row):
            block = manager.pool.blocks[block_id]
            if block.key is not None:
                assert split_key(block.key)[1] == manager.group_id, "I9: group"
                assert block.key_tokens == (position + 1) * manager.block_size, "I9: tokens"
        if isinstance(manager, SlidingWindowManager | ChunkedLocalManager):
            assert NULL not in row[_leading_nulls(row) :], f"P4: {row}"
    assert set(manager.num_cached) <= set(manager.rows), "I10"
    return references


def check_rswa_gap(manager: RSWAManager, request: Request) -> None:
    """P4: real blocks, nulls behind the prompt, real blocks."""
    row = manager.row(request.id)
    nulls = [position for position, block_id in enumerate(row) if block_id == NULL]
    if nulls:
        assert nulls == list(range(nulls[0], nulls[-1] + 1)), f"P4: {row}"
        assert nulls[0] >= ceil_div(request.num_prompt_tokens, manager.block_size), f"P4: {row}"


def check_window_size(manager: GroupManager, request_id: str, num_lookahead_tokens: int) -> None:
    """P6, also with look-ahead, which 0.25.1's cap forgets; steps no longer than the budget."""
    real = [block_id for block_id in manager.row(request_id) if block_id != NULL]
    cap = manager.admission_cap(num_lookahead_tokens)
    assert cap is None or len(real) <= cap, f"P6: {len(real)} blocks, {cap} at most"


def check_states(manager: MambaAlignManager, request_id: str) -> None:
    """P8, after an allocation.

    With drafts, the upper bound needs steps as a scheduler cuts them in this mode (whole blocks,
    then one token and all drafts): one earlier state is remembered, and it is kept as long as a
    rejection may lead back to it. Steps here are of any length.
    """
    row, least = manager.row(request_id), 1 + manager.drafts
    real = sum(1 for block_id in row if block_id != NULL)
    assert real >= least, f"P8: {row}"
    assert manager.drafts > 0 or real <= least + 1, f"P8: {row}"
    assert NULL not in row[-least:], f"P8: {row}"


def check_hit(manager: KVCacheManager, request: Request, hits: Hits, length: int) -> None:
    """I16, P7 for a hit on which the groups agree, and that the request can go on from it."""
    if not manager.enable_caching or request.skip_reading_prefix_cache:
        assert not any(hits)
        return
    align = manager.managers[0].sizes.scheduler_block_size
    if len(manager.managers) == 1:
        align = manager.managers[0].block_size
    assert length % align == 0, f"I16: {length}"
    assert length <= request.num_tokens - 1, f"I16: {length}"
    for group, row in zip(manager.managers, hits, strict=True):
        assert len(row) * group.block_size == length, f"I16, C01: {hits}"
        check_blocks_of_hit(group, request, row)


def check_blocks_of_hit(group: GroupManager, request: Request, row: Row) -> None:
    """I11, I17: what stands in a hit is cached under the request's own hashes, and is enough."""
    hashes = request.hashes_for(group.block_size)
    for position, block_id in enumerate(row):
        key = group.pool.blocks[block_id].key
        if block_id != NULL:
            assert key is not None, "I11"
            assert split_key(key) == (hashes[position], group.group_id), "I17"
    straddles = group.spec.attention_chunk_size % group.block_size != 0
    # 0.25.1's lookup grants the block that lies across a chunk's start unseen (groups 2.5).
    assert straddles or group.is_readable(row, len(row) * group.block_size), f"unreadable: {row}"


def check_consumer(pool: BlockPool, events: list[Event], known: Counter[tuple[int, int]]) -> None:
    """I12: `known` is what a consumer of all events knows; the last ones are taken in here.

    Where each copy's removal is told, a consumer counts; else it keeps a set.
    """
    counts = pool.semantics.removal_event == "every_copy"
    for event in events:
        if event["type"] == "AllBlocksCleared":
            known.clear()
            continue
        for block_hash in event["block_hashes"]:
            key = (block_hash, event["group_idx"])
            if event["type"] == "BlockStored":
                known[key] = known[key] + 1 if counts else 1
            else:
                assert known[key] > 0, "I12: removed, but never stored"
                known[key] -= 1
    expected: Counter[tuple[int, int]] = Counter()
    for key_bytes, copies in pool.cached.items():
        block_hash, group_id = split_key(key_bytes)
        expected[external_hash(block_hash), group_id] += len(copies) if counts else 1
    assert +known == expected, "I12"


def _leading_nulls(row: Row) -> int:
    return next((position for position, block_id in enumerate(row) if block_id != NULL), len(row))
