"""Changes that nobody wants to know are left out where they happen, and nothing else is."""

from __future__ import annotations

import random
from typing import Any

import kvyard
import pytest
from kvyard.events import BlockRemoved, BlockStored, KVCacheEvent

from tests.helpers import (
    CORRECTED,
    admit,
    both,
    cache_config,
    full,
    low_bits,
    make_manager,
    make_request,
    sliding_window,
)


def told(semantics: kvyard.Semantics, **arguments: Any) -> list[KVCacheEvent]:
    """The events of one schedule over groups with blocks of 8, 4 and 16 tokens."""
    manager = kvyard.KVCacheManager(
        cache_config(30, full(8), sliding_window(4, 8), full(16)),
        512,
        enable_kv_cache_events=True,
        semantics=semantics,
        **arguments,
    )
    chosen = random.Random(3)
    events = []
    for step in range(80):
        base = 1000 * chosen.randrange(4)
        tokens = range(base, base + chosen.choice([20, 60, 64]))
        request = make_request(f"r{step}", tokens, 4, semantics)
        if admit(manager, request) is not None:
            manager.free(request)
        if chosen.random() < 0.2:
            manager.evict_blocks([chosen.randrange(30) for _ in range(3)])
        if chosen.random() < 0.05:
            manager.reset_prefix_cache()
        # Taken in between: what is left out stays left out.
        events += manager.take_events()
    return events


def group_of(event: KVCacheEvent) -> int | None:
    return None if isinstance(event, kvyard.AllBlocksCleared) else event.group_idx


@both
@pytest.mark.parametrize("groups", [[0], [1], [2, 0], [], [0, 1, 2]], ids=str)
def test_by_group(semantics: kvyard.Semantics, groups: list[int]) -> None:
    events = told(semantics)
    assert {type(event) for event in events} == {
        kvyard.BlockStored,
        kvyard.BlockRemoved,
        kvyard.AllBlocksCleared,
    }
    expected = [event for event in events if group_of(event) in [None, *groups]]
    assert told(semantics, event_groups=groups) == expected


@both
@pytest.mark.parametrize(("least", "groups"), [(0, [0, 1, 2]), (5, [0, 2]), (9, [2]), (17, [])])
def test_by_tokens_of_a_block(semantics: kvyard.Semantics, least: int, groups: list[int]) -> None:
    expected = [event for event in told(semantics) if group_of(event) in [None, *groups]]
    assert told(semantics, min_event_block_tokens=least) == expected
    assert told(semantics, min_event_block_tokens=least, event_groups=[0]) == [
        event for event in expected if group_of(event) in (None, 0)
    ]


@both
def test_boundaries_inside_a_block(semantics: kvyard.Semantics) -> None:
    """Blocks of 16: boundaries at 4 and 12 tokens of the second one, of which 8 must be covered.

    One that was not told is no ancestor (case C17), and its removal is not told either.
    """
    arguments: dict[str, Any] = {"semantics": semantics, "min_event_block_tokens": 8}
    pool = kvyard.BlockPool(4, True, 4, True, **arguments)
    request = make_request("r", range(32), 4, semantics)
    hashes = [low_bits(block_hash) for block_hash in request.block_hashes]
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 1, 16, 0)
    pool.cache_partial_block(request, blocks[1], 20, 0, 16)
    [whole] = pool.take_events()
    assert isinstance(whole, BlockStored)
    assert whole.block_hashes == [hashes[3]]
    pool.cache_partial_block(request, blocks[1], 28, 0, 16)
    [partial] = pool.take_events()
    assert isinstance(partial, BlockStored)
    assert partial.block_hashes == [hashes[6]]
    if semantics == CORRECTED:
        assert (partial.parent_block_hash, partial.token_ids) == (hashes[3], list(range(16, 28)))
    # The full block takes the place of what was told of a part of it.
    pool.cache_full_blocks(request, blocks, 1, 2, 16, 0)
    gone, whole = pool.take_events()
    assert gone == BlockRemoved([hashes[6]], "GPU", 0)
    assert isinstance(whole, BlockStored)
    assert (whole.block_hashes, whole.parent_block_hash) == ([hashes[7]], hashes[3])


def test_groups_must_exist() -> None:
    for wrong in ([1], [-1], [0, 2**40]):
        with pytest.raises(kvyard.ConfigError, match="event_groups"):
            make_manager(8, enable_kv_cache_events=True, event_groups=wrong)
    with pytest.raises(kvyard.ConfigError, match="event_groups"):
        kvyard.BlockPool(8, True, 4, True, event_groups=[2**16])
    with pytest.raises(kvyard.ConfigError, match="min_event_block_tokens"):
        make_manager(8, enable_kv_cache_events=True, min_event_block_tokens=-1)
