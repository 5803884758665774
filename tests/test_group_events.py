"""Models of several groups: what events say of each group's keys, as small scenarios.

The names are those of the collection of cases; "both" means that the two semantics agree. Worked
examples of the specification are tests of the core (`crates/kvyard-core/tests/groups`).
"""

from __future__ import annotations

import kvyard

from tests.group_engine import Engine
from tests.helpers import VLLM, both, full, low_bits, per_semantics, sliding_window


@per_semantics(right=0, v251=2)
def test_c14_last_copy_of_each_group(semantics: kvyard.Semantics, expected: int) -> None:
    engine = Engine(
        9, full(4), sliding_window(4, 8), semantics=semantics, enable_kv_cache_events=True
    )
    a, b = engine.run("A", range(8)), engine.run("B", range(8))
    assert (engine.rows("A"), engine.rows("B")) == ([[1, 2], [3, 4]], [[1, 5], [3, 6]])
    engine.manager.free(a)
    engine.manager.free(b)
    assert engine.order == [7, 8, 2, 4, 5, 1, 6, 3]
    engine.manager.take_events()
    engine.run("C", range(100, 107))
    events = engine.manager.take_events()
    removed = [event for event in events if isinstance(event, kvyard.BlockRemoved)]
    assert len(removed) == expected
    assert engine.lookup("D", [*range(8), 55])[0] == 8


@both
def test_c15_stored_event_of_a_masked_group(semantics: kvyard.Semantics) -> None:
    engine = Engine(
        20, full(32), sliding_window(8, 8), semantics=semantics, enable_kv_cache_events=True
    )
    request = engine.run("A", range(64))
    hashes = [low_bits(h) for h in request.block_hashes]
    attention, *window = engine.manager.take_events()
    assert isinstance(attention, kvyard.BlockStored)
    assert attention.block_hashes == [hashes[3], hashes[7]]
    assert (attention.block_size, attention.token_ids) == (32, list(range(64)))
    stored = [
        (event.block_hashes, event.parent_block_hash, event.token_ids)
        for event in window
        if isinstance(event, kvyard.BlockStored)
        and (event.group_idx, event.block_size) == (1, 8)
        and event.kv_cache_spec_kind == "sliding_window"
        and event.kv_cache_spec_sliding_window == 8
    ]
    if semantics == VLLM:
        assert stored == [([hashes[3], hashes[7]], None, list(range(64)))]
    else:  # C17: the parent is announced in this group, or there is none
        assert stored == [
            ([hashes[3]], None, list(range(24, 32))),
            ([hashes[7]], hashes[3], list(range(56, 64))),
        ]


@per_semantics(right=(3, 32, 16), v251=(4, 40, 8))
def test_c17_parent_of_a_partial_entry(
    semantics: kvyard.Semantics, expected: tuple[int, int, int]
) -> None:
    engine = Engine(
        20, full(32), sliding_window(8, 8), semantics=semantics, enable_kv_cache_events=True
    )
    request = engine.request("A", range(64))
    engine.step(request, 63)
    engine.manager.take_events()
    pool = engine.manager.block_pool
    second = pool.blocks[engine.rows("A")[0][1]]
    assert pool.cache_partial_block(request, second, 48, 0, 32) is not None
    [event] = engine.manager.take_events()
    assert isinstance(event, kvyard.BlockStored)
    parent, first_token, block_size = expected
    hashes = [low_bits(h) for h in request.block_hashes]
    assert (event.block_hashes, event.parent_block_hash) == ([hashes[5]], hashes[parent])
    assert (event.token_ids, event.block_size) == (list(range(first_token, 48)), block_size)


@both
def test_keys_of_unwritten_tokens(semantics: kvyard.Semantics) -> None:
    engine = Engine(
        20, full(4), sliding_window(4, 8), semantics=semantics, enable_kv_cache_events=True
    )
    request = engine.run("A", range(24))
    engine.manager.take_events()
    engine.manager.free(request, num_written_tokens=10)
    hashes = [low_bits(h) for h in request.block_hashes]
    assert engine.manager.take_events() == [
        kvyard.BlockRemoved([h], "GPU", group) for group in (0, 1) for h in hashes[2:]
    ]
    assert engine.lookup("B", range(25)) == (8, [[1, 2], [7, 8]])
