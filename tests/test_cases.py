"""Small scenarios from public bug reports, each with the value that 0.25.1 gives and the right one.

The names are those of the collection of cases; "both" means that the two semantics agree.
"""

from __future__ import annotations

from typing import Any

import kvyard
import pytest

from tests import helpers
from tests.helpers import (
    VLLM,
    admit,
    both,
    free_order,
    ids_of,
    low_bits,
    make_manager,
    make_request,
    per_semantics,
    row,
)


@both
def test_c02a_negative_count(semantics: kvyard.Semantics) -> None:
    pool = kvyard.BlockPool(11, True, 4, semantics=semantics)
    with pytest.raises(kvyard.InvalidArgumentError):
        pool.get_new_blocks(-1)
    assert pool.get_num_free_blocks() == 10
    assert pool.get_usage() == 0.0


@both
def test_c02b_same_block_twice(semantics: kvyard.Semantics) -> None:
    pool = kvyard.BlockPool(6, True, 4, semantics=semantics)
    first, second = pool.get_new_blocks(2)
    with pytest.raises(kvyard.DoubleFreeError):
        pool.free_blocks([first, first])
    assert (first.ref_cnt, pool.get_num_free_blocks()) == (1, 3)
    pool.free_blocks([first])
    assert (first.ref_cnt, free_order(pool)) == (0, [1, 3, 4, 5])
    assert ids_of(pool.get_new_blocks(4)) == [1, 3, 4, 5]
    assert second.ref_cnt == 1


@both
def test_c02b_two_references_given_back_at_once(semantics: kvyard.Semantics) -> None:
    pool = kvyard.BlockPool(6, True, 4, semantics=semantics)
    first, _ = pool.get_new_blocks(2)
    pool.touch([first])
    assert first.ref_cnt == 2
    pool.free_blocks([first, first])
    assert (first.ref_cnt, pool.get_num_free_blocks()) == (0, 4)
    assert free_order(pool).count(first.block_id) == 1


@per_semantics(right=True, v251=False)
def test_c03_media_keys_of_a_block_that_decoding_fills(
    semantics: kvyard.Semantics, expected: bool
) -> None:
    def hashes(first_item: str, appended: bool) -> list[bytes]:
        tokens = [*range(16), *([9] * 14)]
        request = make_request(
            "r",
            tokens if appended else [*tokens, 7, 7],
            16,
            semantics,
            mm_features=[(first_item, 17, 3), ("B", 22, 6)],
            algorithm="sha256_cbor",
        )
        if appended:
            request.append_output_token_ids([7, 7])
        return request.block_hashes

    assert hashes("A", True)[0] == hashes("Z", True)[0]
    assert (hashes("A", True)[1] != hashes("Z", True)[1]) == expected
    assert (hashes("A", True) == hashes("A", False)) == expected


@per_semantics(right=[False, False], v251=[True, False])
def test_c05a_adapter_and_salt_of_one_name(
    semantics: kvyard.Semantics, expected: list[bool]
) -> None:
    lora = make_request("a", range(8), semantics=semantics, lora_request=helpers.Lora("X", 1))
    salt = make_request("b", range(8), semantics=semantics, cache_salt="X")
    pairs = zip(lora.block_hashes, salt.block_hashes, strict=True)
    assert [ours == theirs for ours, theirs in pairs] == expected


@per_semantics(right=[False, False], v251=[True, True])
def test_c05b_two_adapters_of_one_name(semantics: kvyard.Semantics, expected: list[bool]) -> None:
    hashes = []
    for number in (1, 2):
        lora = helpers.Lora("X", number, f"/p/{number}")
        request = make_request("a", range(8), semantics=semantics, lora_request=lora)
        hashes.append(request.block_hashes)
    assert [ours == theirs for ours, theirs in zip(*hashes, strict=True)] == expected


@both
def test_c05b_lora_path_as_an_argument(semantics: kvyard.Semantics) -> None:
    by_argument = make_request(
        "a", range(8), semantics=semantics, lora_request=helpers.Lora("X", 1), lora_path="/p"
    )
    by_adapter = make_request(
        "a", range(8), semantics=semantics, lora_request=helpers.Lora("X", 1, "/p")
    )
    assert by_argument.block_hashes == by_adapter.block_hashes


@both
def test_c05c_salts_separate(semantics: kvyard.Semantics) -> None:
    manager = make_manager(21, semantics=semantics, enable_kv_cache_events=True)
    cached = make_request("a", range(12), semantics=semantics, cache_salt="x")
    admit(manager, cached)
    hits = []
    for salt in ("x", "y", None):
        request = make_request("b", range(12), semantics=semantics, cache_salt=salt)
        hits.append(manager.get_computed_blocks(request)[1])
    assert hits == [8, 0, 0]
    [event] = manager.take_events()
    assert isinstance(event, kvyard.BlockStored)
    assert event.extra_keys == [("x",), None, None]


@per_semantics(right=0, v251=2)
def test_c07_common_prefix_with_deferred_releases(
    semantics: kvyard.Semantics, expected: int
) -> None:
    manager = make_manager(21, semantics=semantics)
    a1 = make_request("A1", [*range(8), 50], semantics=semantics)
    a2 = make_request("A2", [*range(8), 60], semantics=semantics)
    b1 = make_request("B1", range(100, 109), semantics=semantics)
    for request in (a1, a2, b1):
        admit(manager, request)
    assert manager.get_num_common_prefix_blocks("A1") == [0]
    lease = manager.pop_blocks_for_free(a2)
    assert manager.get_num_common_prefix_blocks("A1") == [expected]
    manager.free_popped(lease)
    assert manager.get_num_common_prefix_blocks("A1") == [0]


@both
def test_common_prefix_that_is_one(semantics: kvyard.Semantics) -> None:
    manager = make_manager(21, semantics=semantics)
    for name, last in (("A1", 50), ("A2", 60)):
        admit(manager, make_request(name, [*range(8), last], semantics=semantics))
    assert manager.get_num_common_prefix_blocks("A1") == [2]


@both
def test_c11_eagle_recomputes_the_last_matched_block(semantics: kvyard.Semantics) -> None:
    for length, expected in ((47, 40), (48, 40), (49, 44)):
        manager = make_manager(121, semantics=semantics, use_eagle=True)
        request = make_request("A", range(length), semantics=semantics)
        admit(manager, request)
        manager.free(request)
        again = make_request("B", range(length), semantics=semantics)
        assert manager.get_computed_blocks(again)[1] == expected


@per_semantics(right=False, v251=True)
def test_c14_removal_of_one_of_two_copies(semantics: kvyard.Semantics, expected: bool) -> None:
    manager = make_manager(7, semantics=semantics, enable_kv_cache_events=True)
    a, b = (make_request(name, range(8), semantics=semantics) for name in "AB")
    assert admit(manager, a) == [1, 2]
    assert admit(manager, b) == [3]
    hashes = [low_bits(h) for h in a.block_hashes]
    stored = manager.take_events()[-1]
    assert isinstance(stored, kvyard.BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == (hashes[1:], hashes[0])
    manager.free(a)
    manager.free(b)
    assert free_order(manager.block_pool) == [4, 5, 6, 2, 3, 1]
    c = make_request("C", range(100, 116), semantics=semantics)
    assert admit(manager, c) == [4, 5, 6, 2]
    gone = kvyard.BlockRemoved([hashes[1]], "GPU", 0)
    assert (gone in manager.take_events()) == expected
    d = make_request("D", [*range(8), 55], semantics=semantics)
    assert manager.get_computed_blocks(d)[1] == 8
    admit(manager, make_request("E", range(200, 204), semantics=semantics))
    assert gone in manager.take_events()


@both
def test_c17_parent_of_a_partial_entry(semantics: kvyard.Semantics) -> None:
    pool = kvyard.BlockPool(4, True, 128, True, semantics=semantics)
    request = make_request("A", range(1792), 128, semantics)
    hashes = [low_bits(h) for h in request.block_hashes]
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 1, 1536, 0)
    key = pool.cache_partial_block(request, blocks[1], 1792, 0, 1536)
    assert key == request.block_hashes[13] + bytes(4)
    whole, partial = pool.take_events()
    assert isinstance(whole, kvyard.BlockStored)
    assert isinstance(partial, kvyard.BlockStored)
    assert (whole.block_hashes, whole.parent_block_hash) == ([hashes[11]], None)
    assert partial.block_hashes == [hashes[13]]
    if semantics == VLLM:
        assert (partial.parent_block_hash, partial.block_size) == (hashes[12], 128)
        assert partial.token_ids == list(range(1664, 1792))
    else:
        assert (partial.parent_block_hash, partial.block_size) == (hashes[11], 256)
        assert partial.token_ids == list(range(1536, 1792))


def stats_of(manager: kvyard.KVCacheManager) -> list[int]:
    """The counters since the last call."""
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    return [
        stats.requests,
        stats.queries,
        stats.hits,
        stats.preempted_requests,
        stats.preempted_queries,
        stats.preempted_hits,
    ]


@per_semantics(right=[0, 0, 0, 0, 0, 0], v251=[3, 180, 0, 0, 0, 0])
def test_c21_refused_requests_do_not_count(
    semantics: kvyard.Semantics, expected: list[int]
) -> None:
    manager = make_manager(11, semantics=semantics, log_stats=True)
    request = make_request("A", range(60), semantics=semantics)
    for _ in range(3):
        assert admit(manager, request, full_sequence_must_fit=True) is None
    assert stats_of(manager) == expected
    assert admit(manager, request, num_new_tokens=20) is not None
    assert stats_of(manager) == [1, 60, 0, 0, 0, 0]
    assert manager.allocate_slots(request, 4) is not None
    assert stats_of(manager) == [0] * 6


@both
def test_c21_preempted_requests_count_apart(semantics: kvyard.Semantics) -> None:
    manager = make_manager(11, semantics=semantics, log_stats=True)
    request = make_request("A", range(9), semantics=semantics)
    admit(manager, request)
    manager.free(request)
    request.num_computed_tokens = 0
    request.num_preemptions = 1
    request.status = "PREEMPTED"
    admit(manager, request)
    assert stats_of(manager) == [1, 9, 0, 1, 9, 8]


@both
def test_statistics_tell_a_reset(semantics: kvyard.Semantics) -> None:
    manager = make_manager(11, semantics=semantics, log_stats=True)
    assert manager.reset_prefix_cache()
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert stats.reset
    after = manager.make_prefix_cache_stats()
    assert after is not None
    assert not after.reset
    silent = make_manager(11, semantics=semantics)
    assert silent.make_prefix_cache_stats() is None


@both
def test_c22a_the_null_block_is_not_usable(semantics: kvyard.Semantics) -> None:
    for length, fits in ((97, False), (96, True)):
        manager = make_manager(13, helpers.full(8), semantics=semantics, max_model_len=104)
        request = make_request("A", range(length), 8, semantics)
        admitted = admit(manager, request, full_sequence_must_fit=True)
        assert (admitted is not None) == fits


@both
def test_c22c_reserved_blocks(semantics: kvyard.Semantics) -> None:
    manager = make_manager(11, semantics=semantics)
    request = make_request("A", range(32), semantics=semantics)
    load: dict[str, Any] = {"num_external_computed_tokens": 16, "delay_cache_blocks": True}
    assert manager.allocate_slots(request, 0, **load, reserved_blocks=7) is None
    assert manager.allocate_slots(request, 0, **load, reserved_blocks=6) is not None
    assert row(manager, request) == [1, 2, 3, 4]


@both
def test_c22d_watermark(semantics: kvyard.Semantics) -> None:
    manager = make_manager(11, semantics=semantics, watermark=0.3)
    assert manager.watermark_blocks == 3
    request = make_request("A", range(32), semantics=semantics)
    assert admit(manager, request) is None
    assert admit(manager, request, has_scheduled_reqs=False) == [1, 2, 3, 4, 5, 6, 7, 8]


@both
def test_c23f_lookahead_ends_at_max_model_len(semantics: kvyard.Semantics) -> None:
    manager = make_manager(21, helpers.full(16), semantics=semantics, max_model_len=64)
    request = make_request("A", range(64), 16, semantics)
    admit(manager, request, num_new_tokens=60)
    manager.allocate_slots(request, 4, num_lookahead_tokens=4)
    assert row(manager, request) == [1, 2, 3, 4]


@per_semantics(right=[1, 2, 3, 4], v251=None)
def test_a_lone_request_does_not_starve_for_lookahead(
    semantics: kvyard.Semantics, expected: list[int] | None
) -> None:
    manager = make_manager(5, semantics=semantics)
    request = make_request("A", range(16), semantics=semantics)
    arguments: dict[str, Any] = {"num_lookahead_tokens": 3, "full_sequence_must_fit": True}
    assert admit(manager, request, **arguments) == expected


@per_semantics(right=None, v251=[2, 3])
def test_the_gate_counts_lookahead(semantics: kvyard.Semantics, expected: list[int] | None) -> None:
    manager = make_manager(6, semantics=semantics)
    admit(manager, make_request("B", range(50, 53), semantics=semantics))
    request = make_request("A", range(16), semantics=semantics)
    arguments: dict[str, Any] = {"num_lookahead_tokens": 3, "full_sequence_must_fit": True}
    assert admit(manager, request, num_new_tokens=4, **arguments) == expected


@per_semantics(right=[1, 2], v251=[1, 2, 3])
def test_computed_ids_under_context_parallelism(
    semantics: kvyard.Semantics, expected: list[int]
) -> None:
    manager = make_manager(
        12,
        semantics=semantics,
        scheduler_block_size=8,
        hash_block_size=8,
        dcp_world_size=2,
    )
    admit(manager, make_request("A", range(20), 8, semantics))
    assert manager.get_block_ids_for_computed_tokens("A", 9) == (expected,)


# -- right in both versions


@both
def test_asynchronous_load_that_ends_inside_a_block(semantics: kvyard.Semantics) -> None:
    manager = make_manager(21, semantics=semantics)
    request = make_request("A", range(30), semantics=semantics)
    manager.allocate_slots(request, 0, num_external_computed_tokens=10, delay_cache_blocks=True)
    other = make_request("B", range(30), semantics=semantics)
    assert manager.get_computed_blocks(other)[1] == 0
    request.num_computed_tokens = 10
    manager.cache_blocks(request, 10)
    assert len(row(manager, request)) == 3
    assert len(manager.block_pool.cached_block_hash_to_block) == 2
    assert manager.get_computed_blocks(other)[1] == 8


@both
def test_drafts(semantics: kvyard.Semantics) -> None:
    manager = make_manager(21, semantics=semantics)
    request = make_request("A", range(6), semantics=semantics)
    admit(manager, request)
    request.append_output_token_ids(6)
    manager.allocate_slots(request, 4, num_lookahead_tokens=3)
    assert len(row(manager, request)) == 4
    assert len(manager.block_pool.cached_block_hash_to_block) == 1


@both
def test_preemption_and_resumption(semantics: kvyard.Semantics) -> None:
    manager = make_manager(7, helpers.full(16), semantics=semantics)
    r0 = make_request("r0", range(34), 16, semantics)
    r1 = make_request("r1", range(100, 134), 16, semantics)
    assert admit(manager, r0) == [1, 2, 3]
    assert admit(manager, r1) == [4, 5, 6]
    r0.append_output_token_ids(list(range(15)))
    assert manager.allocate_slots(r0, 15) is None
    manager.free(r1)
    r1.num_computed_tokens = 0
    assert free_order(manager.block_pool) == [6, 5, 4]
    new = manager.allocate_slots(r0, 15)
    assert new is not None
    assert new.get_block_ids() == ([6],)
    assert manager.get_computed_blocks(r1)[1] == 32
    assert admit(manager, r1) is None
    manager.free(r0)
    assert manager.get_computed_blocks(r1)[1] == 32
    assert admit(manager, r1) == [6]
    assert row(manager, r1) == [4, 5, 6]


@both
def test_reset_waits_for_all_blocks(semantics: kvyard.Semantics) -> None:
    manager = make_manager(11, semantics=semantics, enable_kv_cache_events=True)
    request = make_request("A", range(10), semantics=semantics)
    admit(manager, request)
    manager.take_events()
    assert not manager.reset_prefix_cache()
    lease = manager.pop_blocks_for_free(request)
    assert not manager.reset_prefix_cache()
    assert manager.take_events() == []
    manager.free_popped(lease)
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [kvyard.AllBlocksCleared()]
    again = make_request("B", range(10), semantics=semantics)
    assert manager.get_computed_blocks(again)[1] == 0


@both
def test_eviction_in_the_middle_of_a_chain(semantics: kvyard.Semantics) -> None:
    manager = make_manager(11, semantics=semantics)
    request = make_request("A", range(20), semantics=semantics)
    admit(manager, request)
    manager.free(request)
    manager.evict_blocks({3})
    again = make_request("B", range(20), semantics=semantics)
    assert manager.get_computed_blocks(again)[1] == 8
    assert free_order(manager.block_pool) == [6, 7, 8, 9, 10, 5, 4, 3, 2, 1]


@both
def test_eviction_of_running_blocks_is_not_undone(semantics: kvyard.Semantics) -> None:
    manager = make_manager(11, semantics=semantics)
    request = make_request("A", range(12), semantics=semantics)
    admit(manager, request)
    manager.evict_blocks({1, 2, 3})
    manager.cache_blocks(request, 12)
    again = make_request("B", range(12), semantics=semantics)
    assert manager.get_computed_blocks(again)[1] == 0


@both
def test_events_of_an_eviction(semantics: kvyard.Semantics) -> None:
    manager = make_manager(4, semantics=semantics, enable_kv_cache_events=True)
    a = make_request("A", range(8), semantics=semantics)
    admit(manager, a)
    manager.free(a)
    manager.take_events()
    b = make_request("B", range(100, 112), semantics=semantics)
    assert admit(manager, b) == [3, 2, 1]
    first, second, third = manager.take_events()
    hashes = [low_bits(h) for h in a.block_hashes]
    assert first == kvyard.BlockRemoved([hashes[1]], "GPU", 0)
    assert second == kvyard.BlockRemoved([hashes[0]], "GPU", 0)
    assert isinstance(third, kvyard.BlockStored)
    assert third.block_hashes == [low_bits(h) for h in b.block_hashes]
