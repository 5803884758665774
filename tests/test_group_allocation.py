"""Models of several groups: what is taken, released and admitted, as small scenarios.

The names are those of the collection of cases; "both" means that the two semantics agree. Worked
examples of the specification are tests of the core (`crates/kvyard-core/tests/groups`).
"""

from __future__ import annotations

import kvyard
import pytest

from tests.group_engine import Engine
from tests.helpers import (
    ATTENTION,
    both,
    chunked_local,
    full,
    low_bits,
    mamba,
    per_semantics,
    sliding_window,
)


@both
@pytest.mark.parametrize(("external", "length", "free"), [(8, 2, 34), (24, 6, 26)])
def test_c01_every_group_is_cut(
    semantics: kvyard.Semantics, external: int, length: int, free: int
) -> None:
    engine = Engine(41, full(4, 1), full(4, 2), sliding_window(4, 8), semantics=semantics)
    a = engine.run("A", range(32))
    third = engine.rows("A")[2]
    engine.manager.free(a)
    engine.manager.evict_blocks(third)
    assert engine.lookup("B", [*range(32), 77]) == (0, [[], [], []])
    b = engine.request("B", [*range(32), 77])
    hit = engine.manager.lookup(b)
    new = engine.manager.allocate_slots(
        b, 0, 0, hit.blocks, num_external_computed_tokens=external, delay_cache_blocks=True
    )
    assert new is not None
    assert [len(row) for row in engine.rows("B")] == [length] * 3
    assert engine.num_free == free


@both
def test_c02c_null_block_of_a_window(semantics: kvyard.Semantics) -> None:
    engine = Engine(21, sliding_window(4, 8), semantics=semantics)
    request = engine.request("A", range(40))
    for num_new in (20, 12, 8):
        engine.step(request, num_new)
    assert engine.rows("A") == [[0, 0, 0, 0, 0, 0, 7, 8, 9, 10]]
    engine.manager.free(request)
    assert engine.manager.block_pool.null_block.ref_cnt == 0
    assert (engine.num_free, engine.manager.usage) == (20, 0.0)


@both
def test_c02d_nulls_of_a_hit_cost_nothing(semantics: kvyard.Semantics) -> None:
    engine = Engine(21, sliding_window(4, 8), semantics=semantics)
    engine.run_and_free("A", range(17))
    tokens = [*range(16), 77, 78]
    assert engine.lookup("B", tokens) == (16, [[0, 0, 3, 4]])
    for reserved, fits in ((18, False), (17, True)):  # 20 free, 1 new + 2 evictable
        request = engine.request("B", tokens)
        hit, num_hit = engine.manager.get_computed_blocks(request)
        new = engine.manager.allocate_slots(request, 2, num_hit, hit, reserved_blocks=reserved)
        assert (new is not None) == fits


@per_semantics(right=[0, 0], v251=[2, 0])
def test_c07_common_prefix(semantics: kvyard.Semantics, expected: list[int]) -> None:
    engine = Engine(41, full(4), sliding_window(4, 8), semantics=semantics)
    engine.run("A1", [*range(8), 50])
    a2 = engine.run("A2", [*range(8), 60])
    engine.run("B1", range(100, 109))
    assert engine.manager.get_num_common_prefix_blocks("A1") == [0, 0]
    lease = engine.manager.pop_blocks_for_free(a2)
    assert engine.manager.get_num_common_prefix_blocks("A1") == expected
    engine.manager.free_popped(lease)
    assert engine.manager.get_num_common_prefix_blocks("A1") == [0, 0]


@both
def test_c08_external_tokens_of_an_aligned_state(semantics: kvyard.Semantics) -> None:
    engine = Engine(5, full(16), mamba(16), semantics=semantics, max_model_len=256)
    before = engine.manager.state_digest()
    request = engine.request("A", range(64))
    assert engine.manager.allocate_slots(request, 16, num_external_computed_tokens=32) is None
    assert engine.manager.state_digest() == before
    assert (engine.num_free, engine.rows("A")) == (4, [[], []])

    engine = Engine(6, full(16), mamba(16), semantics=semantics, max_model_len=256)
    request = engine.request("A", range(64))
    assert engine.manager.allocate_slots(request, 16, num_external_computed_tokens=32) is not None
    assert (engine.num_free, engine.rows("A")) == (0, [[1, 2, 4], [0, 3, 5]])


@per_semantics(right=5, v251=4)
def test_c08_prediction(semantics: kvyard.Semantics, expected: int) -> None:
    engine = Engine(20, full(16), mamba(16), semantics=semantics, max_model_len=256)
    for need in range(19):
        request = engine.request("A", range(64))
        new = engine.manager.allocate_slots(
            request, 16, num_external_computed_tokens=32, reserved_blocks=19 - need
        )
        if new is not None:
            assert need == expected
            return
    pytest.fail("it was never admitted")


@both
def test_c09_two_phases(semantics: kvyard.Semantics) -> None:
    engine = Engine(
        13, full(4), sliding_window(4, 64), semantics=semantics, enable_kv_cache_events=True
    )
    engine.run_and_free("A", range(12))
    z = engine.run("Z", range(100, 112))
    engine.manager.free(z)
    assert engine.order == [3, 2, 1, 6, 5, 4, 9, 8, 7, 12, 11, 10]
    engine.manager.take_events()
    request = engine.request("B", [*range(12), *range(200, 204)])
    hit, num_hit = engine.manager.get_computed_blocks(request)
    assert num_hit == 12
    new = engine.manager.allocate_slots(
        request, 0, num_hit, hit, num_external_computed_tokens=4, delay_cache_blocks=True
    )
    assert new is not None
    assert engine.rows("B") == [[1, 2, 3, 9], [4, 5, 6, 8]]
    assert {engine.manager.block_pool.blocks[i].ref_cnt for i in (*range(1, 7), 8, 9)} == {1}
    assert engine.order == [7, 12, 11, 10]
    hashes = [low_bits(h) for h in z.block_hashes]
    assert engine.manager.take_events() == [
        kvyard.BlockRemoved([hashes[2]], "GPU", 0),
        kvyard.BlockRemoved([hashes[1]], "GPU", 0),
    ]


@both
@pytest.mark.parametrize("told_by", ["argument", "request", None])
def test_c10_steps_in_flight(semantics: kvyard.Semantics, told_by: str | None) -> None:
    engine = Engine(41, sliding_window(32, 128), semantics=semantics, max_model_len=512)
    request = engine.request("A", range(159))
    engine.step(request, 158)
    engine.step(request, 1)
    request.append_output_token_ids(7)
    if told_by == "request":
        request.num_in_flight_tokens = 1
    arguments = {"num_in_flight_tokens": 1} if told_by == "argument" else {}
    engine.step(request, 1, **arguments)
    pruned = [0, 2, 3, 4, 5]
    if told_by is None:
        assert engine.rows("A") == [pruned]
        return
    assert engine.rows("A") == [[1, 2, 3, 4, 5]]
    request.num_in_flight_tokens = 0
    request.append_output_token_ids(8)
    engine.step(request, 1)
    assert engine.rows("A")[0][:5] == pruned


def limited(num_blocks: int, semantics: kvyard.Semantics, spec: kvyard.KVCacheSpec) -> Engine:
    """Full attention and another group, with steps of 64 tokens."""
    return Engine(
        num_blocks,
        full(16),
        spec,
        semantics=semantics,
        max_model_len=512,
        max_num_batched_tokens=64,
    )


@both
def test_c22b_window_cap(semantics: kvyard.Semantics) -> None:
    for num_blocks in (23, 24):
        engine = limited(num_blocks, semantics, sliding_window(16, 32))
        request = engine.request("A", range(256))
        new = engine.manager.allocate_slots(request, 64, full_sequence_must_fit=True)
        assert (new is not None) == (num_blocks == 24)
    request.num_computed_tokens = 64
    for _ in range(3):
        engine.step(request, 64)
    assert [sum(block != 0 for block in row) for row in engine.rows("A")] == [16, 6]
    assert engine.num_free == 1


@both
def test_c22b_chunk_cap(semantics: kvyard.Semantics) -> None:
    for num_blocks, fits in ((28, False), (29, True)):
        engine = limited(num_blocks, semantics, chunked_local(16, 128))
        request = engine.request("A", range(256))
        new = engine.manager.allocate_slots(request, 64, full_sequence_must_fit=True)
        assert (new is not None) == fits


@per_semantics(right=[6, 3, 7, 8, 9, 10, 11, 2, 1, 5, 4], v251=[6, 3, 7, 8, 9, 10, 11, 5, 4, 2, 1])
def test_order_of_a_deferred_free(semantics: kvyard.Semantics, expected: list[int]) -> None:
    engine = Engine(12, full(4), sliding_window(4, 20), semantics=semantics)
    lease = engine.manager.pop_blocks_for_free(engine.run("A", range(10)))
    assert not engine.manager.reset_prefix_cache()
    engine.manager.free_popped(lease)
    assert engine.order == expected
    assert engine.manager.reset_prefix_cache()


# -- right in both versions


@both
@pytest.mark.parametrize(("drafts", "most"), [(0, 2), (2, 4)])
def test_aligned_states_while_decoding(semantics: kvyard.Semantics, drafts: int, most: int) -> None:
    engine = Engine(20, mamba(16, drafts=drafts), semantics=semantics)
    request = engine.request("A", range(16))
    engine.step(request, 16)
    while request.num_computed_tokens < 64:
        request.append_output_token_ids(1)
        engine.step(request, 1)
        [row] = engine.rows("A")
        assert sum(block != 0 for block in row) <= most
        assert all(row[-1 - drafts :])
    engine.manager.free(request)
    assert engine.num_free == 19


@both
def test_state_of_the_same_step(semantics: kvyard.Semantics) -> None:
    engine = Engine(20, full(16), mamba(16), semantics=semantics)
    engine.step(engine.request("A", range(40)), 16)
    request = engine.request("B", [*range(16), *range(100, 110)])
    hit, num_hit = engine.manager.get_computed_blocks(request)
    assert num_hit == 16
    before = engine.manager.state_digest()
    assert engine.manager.allocate_slots(request, 10, num_hit, hit) is None
    assert engine.manager.state_digest() == before
    engine.manager.new_step_starts()
    assert engine.manager.allocate_slots(request, 10, num_hit, hit) is not None


# -- kinds that 0.25.1 refuses or cannot make


@both
def test_sinks(semantics: kvyard.Semantics) -> None:
    spec = kvyard.SinkFullAttentionSpec(block_size=16, sink_len=32, **ATTENTION)
    engine = Engine(10, spec, semantics=semantics)
    assert engine.num_free == 7
    request = engine.run("A", range(16))
    assert engine.rows("A") == [[3]]
    assert not engine.manager.reset_prefix_cache()
    engine.manager.free(request)
    assert engine.manager.usage == 0.0
    assert engine.manager.reset_prefix_cache()
    with pytest.raises(kvyard.ConfigError):
        Engine(10, kvyard.SinkFullAttentionSpec(block_size=16, sink_len=24, **ATTENTION))


@both
def test_cross_attention(semantics: kvyard.Semantics) -> None:
    spec = kvyard.CrossAttentionSpec(block_size=16, **ATTENTION)
    engine = Engine(200, full(16), spec, semantics=semantics, enable_caching=False)
    request = engine.request("A", range(5))
    engine.step(request, 5, num_encoder_tokens=1500)
    request.append_output_token_ids(1)
    assert engine.step(request, 1) == [[], []]
    assert [len(row) for row in engine.rows("A")] == [1, 94]
    engine.manager.free(request)
    assert engine.num_free == 199
    with pytest.raises(kvyard.ConfigError):
        Engine(200, full(16), spec, semantics=semantics)
