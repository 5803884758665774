"""The small scenarios about models of several groups, each with 0.25.1's value and the right one.

The names are those of the collection of cases; "both" means that the two semantics agree. Worked
examples of the specification are tests of the core (`crates/kvyard-core/tests/groups`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvyard
import pytest

from tests.helpers import ATTENTION, CORRECTED, VLLM, admit, free_order, low_bits, make_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

both = pytest.mark.parametrize("semantics", [CORRECTED, VLLM], ids=["corrected", "vllm"])


def per_semantics(right: object, v251: object) -> pytest.MarkDecorator:
    """A parametrization over the two semantics with the value that each must give."""
    return pytest.mark.parametrize(
        ("semantics", "expected"), [(CORRECTED, right), (VLLM, v251)], ids=["corrected", "vllm"]
    )


def full(block_size: int, heads: int = 2) -> kvyard.FullAttentionSpec:
    """Full attention; another number of heads is another spec."""
    return kvyard.FullAttentionSpec(block_size=block_size, **{**ATTENTION, "num_kv_heads": heads})


def swa(block_size: int, window: int) -> kvyard.SlidingWindowSpec:
    """A sliding window."""
    return kvyard.SlidingWindowSpec(block_size=block_size, sliding_window=window, **ATTENTION)


def chunked(block_size: int, chunk: int) -> kvyard.ChunkedLocalAttentionSpec:
    """Chunked local attention."""
    return kvyard.ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=chunk, **ATTENTION
    )


def mamba(block_size: int, mode: str = "align", drafts: int = 0) -> kvyard.MambaSpec:
    """A recurrent layer."""
    return kvyard.MambaSpec(
        block_size=block_size,
        shapes=((4, 4),),
        dtypes=("float32",),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


class Engine:
    """A manager of several groups and its requests."""

    def __init__(
        self,
        num_blocks: int,
        *specs: kvyard.KVCacheSpec,
        flags: Sequence[int] = (),
        semantics: kvyard.Semantics = CORRECTED,
        **arguments: Any,
    ) -> None:
        groups = [
            kvyard.KVCacheGroupSpec([f"layer.{i}"], spec, i in flags)
            for i, spec in enumerate(specs)
        ]
        arguments.setdefault("max_model_len", 8192)
        config = kvyard.KVCacheConfig(num_blocks, [], groups)
        self.manager = kvyard.KVCacheManager(config, semantics=semantics, **arguments)
        self.semantics = semantics
        self.hash_block_size = self.manager.block_pool.hash_block_size

    def request(self, name: str, tokens: Iterable[int]) -> kvyard.Request:
        return make_request(name, tokens, self.hash_block_size, self.semantics)

    def run(self, name: str, tokens: Iterable[int], step: int | None = None) -> kvyard.Request:
        """A request that is computed, in steps of so many tokens or at once."""
        request = self.request(name, tokens)
        first = min(step or request.num_tokens, request.num_tokens)
        hit = self.manager.lookup(request)
        new = first if step else request.num_tokens - hit.num_tokens
        assert admit(self.manager, request, num_new_tokens=new) is not None
        while request.num_computed_tokens < request.num_tokens:
            self.manager.new_step_starts()
            self.step(request, min(first, request.num_tokens - request.num_computed_tokens))
        self.manager.validate()
        return request

    def step(self, request: kvyard.Request, num_new: int, **arguments: Any) -> list[list[int]]:
        """A step that fits."""
        new = self.manager.allocate_slots(request, num_new, **arguments)
        assert new is not None
        request.num_computed_tokens += num_new
        return list(new.get_block_ids())

    def run_and_free(self, name: str, tokens: Iterable[int], step: int | None = None) -> None:
        self.manager.free(self.run(name, tokens, step))
        self.manager.new_step_starts()

    def lookup(self, name: str, tokens: Iterable[int]) -> tuple[int, list[list[int]]]:
        """The hit's length and blocks; every group's list is as long as the hit (I16)."""
        request = self.request(name, tokens)
        hit = self.manager.lookup(request)
        rows = list(hit.blocks.get_block_ids())
        assert hit.num_tokens < request.num_tokens
        for group, blocks in zip(self.manager.kv_cache_config.kv_cache_groups, rows, strict=True):
            assert len(blocks) * group.kv_cache_spec.block_size == hit.num_tokens
        assert self.manager.get_computed_blocks(request)[1] == hit.num_tokens
        return hit.num_tokens, rows

    def rows(self, name: str) -> list[list[int]]:
        return list(self.manager.get_block_ids(name))

    @property
    def order(self) -> list[int]:
        return free_order(self.manager.block_pool)

    @property
    def num_free(self) -> int:
        free = self.manager.block_pool.get_num_free_blocks()
        assert free == len(self.order), "the counter is the list's length"
        return free


@both
@pytest.mark.parametrize(("external", "length", "free"), [(8, 2, 34), (24, 6, 26)])
def test_c01_every_group_is_cut(
    semantics: kvyard.Semantics, external: int, length: int, free: int
) -> None:
    engine = Engine(41, full(4, 1), full(4, 2), swa(4, 8), semantics=semantics)
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
    engine = Engine(21, swa(4, 8), semantics=semantics)
    request = engine.request("A", range(40))
    for num_new in (20, 12, 8):
        engine.step(request, num_new)
    assert engine.rows("A") == [[0, 0, 0, 0, 0, 0, 7, 8, 9, 10]]
    engine.manager.free(request)
    assert engine.manager.block_pool.null_block.ref_cnt == 0
    assert (engine.num_free, engine.manager.usage) == (20, 0.0)


@both
def test_c02d_nulls_of_a_hit_cost_nothing(semantics: kvyard.Semantics) -> None:
    engine = Engine(21, swa(4, 8), semantics=semantics)
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
    engine = Engine(41, full(4), swa(4, 8), semantics=semantics)
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
    engine = Engine(13, full(4), swa(4, 64), semantics=semantics, enable_kv_cache_events=True)
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
    engine = Engine(41, swa(32, 128), semantics=semantics, max_model_len=512)
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


@per_semantics(right=44, v251=40)
@pytest.mark.parametrize("flags", [(), (0,), (1,), (0, 1, 2)])
def test_c11_three_groups(
    semantics: kvyard.Semantics, expected: int, flags: tuple[int, ...]
) -> None:
    groups = (full(4), swa(4, 8), swa(4, 16))
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
        engine = Engine(121, full(4), swa(4, 8), semantics=semantics, use_eagle=True)
        engine.run_and_free("A", range(num_tokens))
        assert resend_and_extension(engine, num_tokens, 9) == hits


@both
def test_c11_one_group(semantics: kvyard.Semantics) -> None:
    for num_tokens, expected in ((47, 40), (48, 40), (49, 44)):
        engine = Engine(121, full(4), semantics=semantics, use_eagle=True)
        engine.run_and_free("A", range(num_tokens))
        assert engine.lookup("B", range(num_tokens))[0] == expected
    for use_eagle, hit in ((False, (10, [[0, 0, 0, 4, 5]])), (True, (8, [[0, 0, 3, 4]]))):
        engine = Engine(121, swa(2, 4), semantics=semantics, use_eagle=use_eagle)
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
            swa(8, 8),
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


@per_semantics(right=0, v251=2)
def test_c14_last_copy_of_each_group(semantics: kvyard.Semantics, expected: int) -> None:
    engine = Engine(9, full(4), swa(4, 8), semantics=semantics, enable_kv_cache_events=True)
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
    engine = Engine(20, full(32), swa(8, 8), semantics=semantics, enable_kv_cache_events=True)
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
    engine = Engine(20, full(32), swa(8, 8), semantics=semantics, enable_kv_cache_events=True)
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
        engine = limited(num_blocks, semantics, swa(16, 32))
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
        engine = limited(num_blocks, semantics, chunked(16, 128))
        request = engine.request("A", range(256))
        new = engine.manager.allocate_slots(request, 64, full_sequence_must_fit=True)
        assert (new is not None) == fits


@per_semantics(right=[6, 3, 7, 8, 9, 10, 11, 2, 1, 5, 4], v251=[6, 3, 7, 8, 9, 10, 11, 5, 4, 2, 1])
def test_order_of_a_deferred_free(semantics: kvyard.Semantics, expected: list[int]) -> None:
    engine = Engine(12, full(4), swa(4, 20), semantics=semantics)
    lease = engine.manager.pop_blocks_for_free(engine.run("A", range(10)))
    assert not engine.manager.reset_prefix_cache()
    engine.manager.free_popped(lease)
    assert engine.order == expected
    assert engine.manager.reset_prefix_cache()


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
def test_keys_of_unwritten_tokens(semantics: kvyard.Semantics) -> None:
    engine = Engine(20, full(4), swa(4, 8), semantics=semantics, enable_kv_cache_events=True)
    request = engine.run("A", range(24))
    engine.manager.take_events()
    engine.manager.free(request, num_written_tokens=10)
    hashes = [low_bits(h) for h in request.block_hashes]
    assert engine.manager.take_events() == [
        kvyard.BlockRemoved([h], "GPU", group) for group in (0, 1) for h in hashes[2:]
    ]
    assert engine.lookup("B", range(25)) == (8, [[1, 2], [7, 8]])


@both
def test_hits_of_each_group(semantics: kvyard.Semantics) -> None:
    engine = Engine(40, full(4), swa(4, 9), semantics=semantics)
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
        engine = Engine(40, swa(4, window), semantics=semantics)
        engine.run_and_free("A", range(24))
        num_tokens, [row] = engine.lookup("B", range(25))
        assert (num_tokens, sum(block != 0 for block in row)) == (24, live)


@both
def test_chunks(semantics: kvyard.Semantics) -> None:
    for num_tokens, expected in ((15, 12), (16, 12), (17, 16), (20, 16)):
        engine = Engine(40, chunked(4, 8), semantics=semantics)
        engine.run_and_free("A", range(num_tokens))
        hit, [row] = engine.lookup("B", range(num_tokens))
        assert (hit, any(row)) == (expected, expected == 12)
    for computed, skipped in ((7, 0), (8, 2), (13, 2), (16, 4)):
        engine = Engine(40, chunked(4, 8), semantics=semantics)
        engine.step(engine.request("A", range(20)), 17)
        engine.manager.remove_skipped_blocks("A", computed)
        assert engine.rows("A")[0].count(0) == skipped


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


@both
def test_groups_of_one_spec(semantics: kvyard.Semantics) -> None:
    engine = Engine(40, full(4), full(4), semantics=semantics)
    engine.run_and_free("A", range(24))
    assert engine.lookup("B", range(25)) == (24, [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
    # They are found as one group is: with a drafter, without the look-ahead credit (C11).
    engine = Engine(121, full(4), full(4), semantics=semantics, use_eagle=True)
    engine.run_and_free("A", range(48))
    assert resend_and_extension(engine, 48, 9) == (40, 44)
