"""Models of several groups: what is found again, with and without a drafter, as small scenarios.

The names are those of the collection of cases; "both" means that the two semantics agree. Worked
examples of the specification are tests of the core (`crates/kvyard-core/tests/groups`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.group_engine import Engine
from tests.helpers import (
    CORRECTED,
    VLLM,
    both,
    chunked_local,
    full,
    mamba,
    per_semantics,
    sliding_window,
)

if TYPE_CHECKING:
    import kvyard


@per_semantics(right=44, v251=40)
@pytest.mark.parametrize("flags", [(), (0,), (1,), (0, 1, 2)])
def test_c11_three_groups(
    semantics: kvyard.Semantics, expected: int, flags: tuple[int, ...]
) -> None:
    groups = (full(4), sliding_window(4, 8), sliding_window(4, 16))
    engine = Engine(121, *groups, flags=flags, semantics=semantics, use_eagle=True)
    engine.run_and_free("A", range(48))
    assert engine.lookup("B", range(48))[0] == expected

    engine = Engine(121, *groups, semantics=semantics)
    engine.run_and_free("A", range(48))
    assert engine.lookup("B", range(48))[0] == 44, "without a drafter"


def resend_and_extension(engine: Engine, num_tokens: int, extension: int) -> tuple[int, int]:
    """The hits of the same prompt again, and of a longer one."""
    resend, _ = engine.lookup("B", range(num_tokens))
    longer, _ = engine.lookup("C", [*range(num_tokens), *range(9000, 9000 + extension)])
    return resend, longer


@per_semantics(right=[(40, 40), (44, 44), (44, 44)], v251=[(40, 40), (40, 44), (44, 44)])
def test_c11_two_groups(semantics: kvyard.Semantics, expected: list[tuple[int, int]]) -> None:
    for num_tokens, hits in zip((47, 48, 49), expected, strict=True):
        engine = Engine(121, full(4), sliding_window(4, 8), semantics=semantics, use_eagle=True)
        engine.run_and_free("A", range(num_tokens))
        assert resend_and_extension(engine, num_tokens, 9) == hits


@both
def test_c11_one_group(semantics: kvyard.Semantics) -> None:
    for num_tokens, expected in ((47, 40), (48, 40), (49, 44)):
        engine = Engine(121, full(4), semantics=semantics, use_eagle=True)
        engine.run_and_free("A", range(num_tokens))
        assert engine.lookup("B", range(num_tokens))[0] == expected
    for use_eagle, hit in ((False, (10, [[0, 0, 0, 4, 5]])), (True, (8, [[0, 0, 3, 4]]))):
        engine = Engine(121, sliding_window(2, 4), semantics=semantics, use_eagle=use_eagle)
        engine.run_and_free("A", range(10))
        assert engine.lookup("B", range(11)) == hit


LENGTHS = (127, 128, 129, 160)


@pytest.mark.parametrize(
    ("semantics", "retention", "expected"),
    [
        (VLLM, None, [(64, 64), (64, 96), (96, 96), (96, 128)]),
        (VLLM, 0, [(0, 0), (0, 96), (0, 0), (0, 128)]),
        (CORRECTED, None, [(64, 64), (96, 96), (96, 96), (128, 128)]),
        (CORRECTED, 0, [(64, 64), (96, 96), (96, 96), (128, 128)]),
    ],
)
def test_c12_sparse_retention(
    semantics: kvyard.Semantics, retention: int | None, expected: list[tuple[int, int]]
) -> None:
    for num_tokens, hits in zip(LENGTHS, expected, strict=True):
        engine = Engine(
            400,
            full(32),
            sliding_window(8, 8),
            semantics=semantics,
            use_eagle=True,
            retention_interval=retention,
        )
        engine.run_and_free("A", range(num_tokens))
        assert resend_and_extension(engine, num_tokens, 64) == hits


@pytest.mark.parametrize(
    ("semantics", "retention", "expected"),
    [
        (VLLM, None, [(32, 32), (32, 48), (48, 48), (48, 64)]),
        (VLLM, 0, [(0, 0), (0, 48), (0, 0), (0, 64)]),
        (CORRECTED, None, [(32, 32), (48, 48), (48, 48), (64, 64)]),
        (CORRECTED, 0, [(32, 32), (48, 48), (48, 48), (64, 64)]),
    ],
)
def test_c12_states(
    semantics: kvyard.Semantics, retention: int | None, expected: list[tuple[int, int]]
) -> None:
    """With a drafter and retention 0 a prompt must be able to resume from a state."""
    for num_tokens, hits in zip((63, 64, 65, 80), expected, strict=True):
        engine = Engine(
            100,
            full(16),
            mamba(16),
            semantics=semantics,
            use_eagle=True,
            retention_interval=retention,
        )
        engine.run_and_free("A", range(num_tokens), step=16)
        assert resend_and_extension(engine, num_tokens, 64) == hits


@both
def test_drafter_and_states(semantics: kvyard.Semantics) -> None:
    """0.25.1 finds 32 tokens with 7 blocks of 4, and publishes the eighth unwritten."""
    for mode in ("align", "all"):
        engine = Engine(60, full(4), mamba(4, mode), semantics=semantics, use_eagle=True)
        engine.run_and_free("A", range(32), step=4)
        num_tokens, rows = engine.lookup("B", range(34))
        assert (num_tokens, [len(row) for row in rows]) == (28, [7, 7])
        assert rows[1][:6] == [0] * 6


@both
def test_hits_of_each_group(semantics: kvyard.Semantics) -> None:
    engine = Engine(40, full(4), sliding_window(4, 9), semantics=semantics)
    request = engine.run("A", range(32))
    engine.manager.free(request)
    engine.manager.evict_blocks([14, 15])
    again = engine.request("B", range(34))
    hit = engine.manager.lookup(again)
    assert hit.blocks.get_block_ids() == ([1, 2, 3, 4, 5], [0, 0, 0, 12, 13])
    assert (hit.num_tokens, hit.num_uncached_common_prefix_tokens) == (20, 12)
    assert engine.manager.num_uncached_common_prefix_tokens == 12
    blocks, lengths = engine.manager.find_longest_cache_hit_per_group(again, 33)
    assert (lengths, [len(row) for row in blocks.get_block_ids()]) == ([32, 20], [8, 5])
    # Lists of their own lengths are taken where external tokens fill the difference.
    new = engine.manager.allocate_slots(again, 1, 32, blocks, num_external_computed_tokens=1)
    assert new is not None
    assert [len(row) for row in engine.rows("B")] == [9, 9]
    engine.manager.validate()


# -- right in both versions


@both
def test_window_edge(semantics: kvyard.Semantics) -> None:
    for window, live in ((4, 1), (5, 1), (6, 2), (8, 2), (9, 2)):
        engine = Engine(40, sliding_window(4, window), semantics=semantics)
        engine.run_and_free("A", range(24))
        num_tokens, [row] = engine.lookup("B", range(25))
        assert (num_tokens, sum(block != 0 for block in row)) == (24, live)


@both
def test_chunks(semantics: kvyard.Semantics) -> None:
    for num_tokens, expected in ((15, 12), (16, 12), (17, 16), (20, 16)):
        engine = Engine(40, chunked_local(4, 8), semantics=semantics)
        engine.run_and_free("A", range(num_tokens))
        hit, [row] = engine.lookup("B", range(num_tokens))
        assert (hit, any(row)) == (expected, expected == 12)
    for computed, skipped in ((7, 0), (8, 2), (13, 2), (16, 4)):
        engine = Engine(40, chunked_local(4, 8), semantics=semantics)
        engine.step(engine.request("A", range(20)), 17)
        engine.manager.remove_skipped_blocks("A", computed)
        assert engine.rows("A")[0].count(0) == skipped


# -- kinds that 0.25.1 refuses or cannot make


@both
def test_groups_of_one_spec(semantics: kvyard.Semantics) -> None:
    engine = Engine(40, full(4), full(4), semantics=semantics)
    engine.run_and_free("A", range(24))
    assert engine.lookup("B", range(25)) == (24, [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
    # They are found as one group is: with a drafter, without the look-ahead credit (C11).
    engine = Engine(121, full(4), full(4), semantics=semantics, use_eagle=True)
    engine.run_and_free("A", range(48))
    assert resend_and_extension(engine, 48, 9) == (40, 44)
