"""Blocks, snapshots, leases, events: what is handed out to Python, and what it says."""

from __future__ import annotations

import kvyard
import pytest

from tests import helpers
from tests.helpers import CORRECTED, VLLM, admit, free_order, ids_of, low_bits, make_manager, row


def test_blocks_are_the_same_objects_each_time() -> None:
    manager = make_manager(8)
    pool = manager.block_pool
    assert manager.block_pool is pool or manager.block_pool.blocks[1] is pool.blocks[1]
    assert pool.blocks[3] is pool.blocks[3]
    assert pool.null_block is pool.blocks[0]
    request = helpers.make_request("a", range(10))
    admit(manager, request)
    [blocks] = manager.get_blocks("a").blocks
    assert blocks[0] is pool.blocks[1]
    assert pool.free_block_queue.get_all_free_blocks()[0] is pool.blocks[4]
    assert len(pool.blocks) == 8
    assert pool.blocks[-1].block_id == 7
    with pytest.raises(IndexError):
        _ = pool.blocks[8]


def test_a_block_shows_its_present_state() -> None:
    manager = make_manager(8)
    block = manager.block_pool.blocks[1]
    assert (block.ref_cnt, block.block_hash, block.num_hash_tokens) == (0, None, None)
    assert not block.is_null
    assert manager.block_pool.null_block.is_null
    request = helpers.make_request("a", range(10))
    admit(manager, request)
    assert block.ref_cnt == 1
    assert block.block_hash == request.block_hashes[0] + bytes(4)
    assert block.num_hash_tokens == 4
    manager.free(request)
    assert block.ref_cnt == 0


def test_snapshots_do_not_change() -> None:
    manager = make_manager(12)
    request = helpers.make_request("a", range(10))
    admit(manager, request)
    before = manager.get_blocks("a")
    request.append_output_token_ids(list(range(10, 20)))
    manager.allocate_slots(request, 10)
    assert before.get_block_ids() == ([1, 2, 3],)
    assert manager.get_blocks("a").get_block_ids() == ([1, 2, 3, 4, 5],)
    manager.free(request)
    assert before.get_block_ids() == ([1, 2, 3],)
    lists = before.get_block_ids()
    lists[0].append(9)
    before.blocks[0].clear()
    assert before.get_block_ids() == ([1, 2, 3],)


def test_kv_cache_blocks() -> None:
    manager = make_manager(12)
    a, b = helpers.make_request("a", range(10)), helpers.make_request("b", range(50, 56))
    admit(manager, a)
    admit(manager, b)
    both = manager.get_blocks("a") + manager.get_blocks("b")
    assert both.get_block_ids() == ([1, 2, 3, 4, 5],)
    assert both.get_unhashed_block_ids() == [3, 5]
    assert both.get_unhashed_block_ids_all_groups() == [[3, 5]]
    assert manager.get_blocks("a") == manager.get_blocks("a")
    assert manager.get_blocks("a") != manager.get_blocks("b")
    empty = manager.empty_kv_cache_blocks
    assert manager.get_blocks("unknown") is empty
    assert manager.empty_kv_cache_blocks is empty
    assert empty.get_block_ids() == ([],)
    assert empty.get_block_ids(allow_none=True) is None
    assert both.get_block_ids(allow_none=True) == both.get_block_ids()
    fresh = both.new_empty()
    assert fresh == empty
    assert fresh is not empty
    assert (empty + empty) is not empty
    assert manager.create_kv_cache_blocks(([],)) is empty
    made = manager.create_kv_cache_blocks(both.blocks)
    assert made == both


def test_kv_cache_blocks_of_no_groups() -> None:
    manager = kvyard.KVCacheManager(
        helpers.cache_config(8),
        max_model_len=64,
        scheduler_block_size=4,
        hash_block_size=4,
        enable_caching=False,
    )
    request = helpers.make_request("a", range(10))
    blocks = manager.allocate_slots(request, 10)
    assert blocks is not None
    assert blocks.get_block_ids() == ()
    assert blocks.get_block_ids(allow_none=True) is None
    with pytest.raises(kvyard.InvalidArgumentError):
        blocks.get_unhashed_block_ids()


def test_nothing_new_is_the_shared_empty_object() -> None:
    manager = make_manager(12)
    request = helpers.make_request("a", range(6))
    admit(manager, request)
    request.append_output_token_ids(6)
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks


def test_lease() -> None:
    manager = make_manager(12)
    request = helpers.make_request("a", range(10))
    admit(manager, request)
    lease = manager.pop_blocks_for_free(request)
    assert len(lease) == 3
    assert lease.request_id == "a"
    assert lease.group_bounds == [3]
    assert ids_of(list(lease)) == [1, 2, 3]
    assert ids_of(list(reversed(lease))) == [3, 2, 1]
    assert lease[-1].block_id == 3
    assert ids_of(lease[1:]) == [2, 3]
    assert isinstance(lease[1:], list)
    assert not lease.released
    manager.block_pool.free_blocks(reversed(lease))
    assert lease.released
    assert free_order(manager.block_pool)[0] == 3
    nothing = manager.pop_blocks_for_free(request)
    assert len(nothing) == 0


# -- worked examples of the free queue and of allocation


def test_e1_who_is_evicted_next() -> None:
    manager = make_manager(8, enable_kv_cache_events=True)
    pool = manager.block_pool
    assert free_order(pool) == [1, 2, 3, 4, 5, 6, 7]
    a = helpers.make_request("a", range(10))
    assert admit(manager, a) == [1, 2, 3]
    assert free_order(pool) == [4, 5, 6, 7]
    assert manager.usage == pytest.approx(3 / 7)
    manager.free(a)
    assert free_order(pool) == [3, 4, 5, 6, 7, 2, 1]
    b = helpers.make_request("b", [*range(8), 90, 91, 92, 93])
    assert admit(manager, b) == [3]
    assert row(manager, b) == [1, 2, 3]
    manager.free(b)
    assert free_order(pool) == [4, 5, 6, 7, 3, 2, 1]
    manager.take_events()
    c = helpers.make_request("c", range(100, 124))
    assert admit(manager, c) == [4, 5, 6, 7, 3, 2]
    assert free_order(pool) == [1]
    removed = [e for e in manager.take_events() if isinstance(e, kvyard.BlockRemoved)]
    expected = [[low_bits(b.block_hashes[2])], [low_bits(b.block_hashes[1])]]
    assert [event.block_hashes for event in removed] == expected


def test_e2_two_requests_freed() -> None:
    manager = make_manager(12)
    a, b = helpers.make_request("a", range(10)), helpers.make_request("b", range(50, 64))
    admit(manager, a)
    admit(manager, b)
    manager.free(a)
    assert free_order(manager.block_pool) == [3, 8, 9, 10, 11, 2, 1]
    manager.free(b)
    assert free_order(manager.block_pool) == [7, 3, 8, 9, 10, 11, 2, 1, 6, 5, 4]


def test_drafts_are_not_cached() -> None:
    manager = make_manager(12)
    request = helpers.make_request("a", range(6))
    admit(manager, request)
    request.append_output_token_ids(6)
    new = manager.allocate_slots(request, 4, num_lookahead_tokens=3)
    assert new is not None
    assert new.get_block_ids() == ([3, 4],)
    assert len(manager.block_pool.cached_block_hash_to_block) == 1


def test_lookahead_stops_at_max_model_len() -> None:
    manager = make_manager(12, max_model_len=10)
    request = helpers.make_request("a", range(10))
    assert admit(manager, request, num_lookahead_tokens=5) == [1, 2, 3]


def test_watermark() -> None:
    manager = make_manager(10, watermark=0.25)
    assert manager.watermark_blocks == 2
    request = helpers.make_request("a", range(32))
    assert admit(manager, request) is None
    assert admit(manager, request, has_scheduled_reqs=False) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_full_sequence_gate() -> None:
    manager = make_manager(6)
    request = helpers.make_request("a", range(40))
    assert admit(manager, request, num_new_tokens=4, full_sequence_must_fit=True) is None
    assert admit(manager, request, num_new_tokens=4) == [1]


def test_asynchronous_load() -> None:
    manager = make_manager(12)
    request = helpers.make_request("a", range(12))
    loaded = manager.allocate_slots(
        request, 0, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    assert loaded is manager.empty_kv_cache_blocks
    assert row(manager, request) == [1, 2]
    assert len(manager.block_pool.cached_block_hash_to_block) == 0
    request.num_computed_tokens = 8
    manager.cache_blocks(request, 8)
    assert len(manager.block_pool.cached_block_hash_to_block) == 2
    new = manager.allocate_slots(request, 4)
    assert new is not None
    assert new.get_block_ids() == ([3],)


def test_synchronous_load() -> None:
    manager = make_manager(12)
    request = helpers.make_request("a", range(12))
    new = manager.allocate_slots(request, 4, num_external_computed_tokens=8)
    assert new is not None
    assert new.get_block_ids() == ([3],)
    assert row(manager, request) == [1, 2, 3]
    assert len(manager.block_pool.cached_block_hash_to_block) == 3


def test_a_hit_that_is_free_counts_as_needed() -> None:
    manager = make_manager(6)
    a = helpers.make_request("a", range(8))
    admit(manager, a)
    manager.free(a)
    b = helpers.make_request("b", range(24))
    assert admit(manager, b) is None
    assert manager.block_pool.get_num_free_blocks() == 5


def test_rswa_gap() -> None:
    manager = make_manager(12, helpers.rswa(4, 6))
    request = helpers.make_request("a", range(10))
    admit(manager, request)
    rows = {}
    for computed in range(10, 31):
        request.num_computed_tokens = computed
        request.append_output_token_ids(computed)
        manager.allocate_slots(request, 1)
        rows[computed] = row(manager, request)
    assert rows[21][:6] == [1, 2, 3, 4, 5, 6]
    assert rows[22][:6] == [1, 2, 3, 0, 5, 6]
    assert rows[26][:6] == [1, 2, 3, 0, 0, 6]
    assert rows[30][:6] == [1, 2, 3, 0, 0, 0]
    assert manager.take_new_block_ids() == []


# -- events


def test_store_event() -> None:
    manager = make_manager(12, enable_kv_cache_events=True)
    request = helpers.make_request(
        "a",
        range(10),
        lora_request=helpers.Lora("L", 3),
        cache_salt="S",
        mm_features=[("imgA", 2, 4)],
    )
    admit(manager, request)
    request.append_output_token_ids([10, 11])
    manager.allocate_slots(request, 2)
    hashes: list[int | bytes] = [low_bits(h) for h in request.block_hashes]
    assert manager.take_events() == [
        kvyard.BlockStored(
            hashes[:2],
            None,
            list(range(8)),
            4,
            3,
            "GPU",
            "L",
            [("L", ("imgA", 2), "S"), ("L", ("imgA", -2))],
            0,
            "full_attention",
            None,
        ),
        kvyard.BlockStored(
            hashes[2:],
            hashes[1],
            [8, 9, 10, 11],
            4,
            3,
            "GPU",
            "L",
            [("L",)],
            0,
            "full_attention",
            None,
        ),
    ]
    assert manager.take_events() == []


def test_kinds_in_events() -> None:
    mla = kvyard.MLAAttentionSpec(block_size=4, **helpers.ATTENTION)
    kinds = [(helpers.full(4), "full_attention"), (mla, "mla_attention")]
    kinds.append((helpers.rswa(4, 6), "full_attention"))
    for spec, kind in kinds:
        manager = make_manager(12, spec, enable_kv_cache_events=True)
        admit(manager, helpers.make_request("a", range(10)))
        [event] = manager.take_events()
        assert isinstance(event, kvyard.BlockStored)
        assert event.kv_cache_spec_kind == kind
        assert event.extra_keys == [None, None]


def test_the_pool_does_not_annotate() -> None:
    pool = kvyard.BlockPool(4, True, 4, True)
    pool.cache_full_blocks(helpers.make_request("a", range(4)), pool.get_new_blocks(1), 0, 1, 4, 2)
    [event] = pool.take_events()
    assert isinstance(event, kvyard.BlockStored)
    assert (event.group_idx, event.kv_cache_spec_kind) == (2, None)


@pytest.mark.parametrize("semantics", [CORRECTED, VLLM])
def test_masked_store(semantics: kvyard.Semantics) -> None:
    """Masked positions: one event that covers them (0.25.1), or one for each run."""
    pool = kvyard.BlockPool(12, True, 4, True, semantics=semantics)
    request = helpers.make_request("a", range(24), semantics=semantics)
    blocks = pool.get_new_blocks(6)
    mask = [False, True, True, False, False, True]
    pool.cache_full_blocks(request, blocks, 0, 6, 4, 0, mask)
    hashes = [low_bits(h) for h in request.block_hashes]
    events = pool.take_events()
    assert all(isinstance(event, kvyard.BlockStored) for event in events)
    got = [(e.block_hashes, e.parent_block_hash, e.token_ids) for e in events]  # type: ignore[union-attr]
    if semantics == VLLM:
        assert got == [([hashes[1], hashes[2], hashes[5]], None, list(range(24)))]
    else:
        assert got == [
            (hashes[1:3], None, list(range(4, 12))),
            ([hashes[5]], hashes[2], list(range(20, 24))),
        ]


@pytest.mark.parametrize("semantics", [CORRECTED, VLLM])
def test_store_of_nothing(semantics: kvyard.Semantics) -> None:
    pool = kvyard.BlockPool(12, True, 4, True, semantics=semantics)
    request = helpers.make_request("a", range(8), semantics=semantics)
    pool.cache_full_blocks(request, pool.get_new_blocks(2), 0, 2, 4, 0, [False, False])
    events = pool.take_events()
    if semantics == VLLM:
        stored = kvyard.BlockStored([], None, list(range(8)), 4, None, "GPU", None, None, 0)
        assert events == [stored]
    else:
        assert events == []


def test_reset_says_only_that() -> None:
    manager = make_manager(12, enable_kv_cache_events=True)
    request = helpers.make_request("a", range(10))
    admit(manager, request)
    manager.free(request)
    manager.take_events()
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [kvyard.AllBlocksCleared()]


def test_without_events_there_are_none() -> None:
    manager = make_manager(12)
    admit(manager, helpers.make_request("a", range(10)))
    assert manager.take_events() == []


# -- statistics


def test_usage_and_new_block_ids() -> None:
    manager = make_manager(5)
    assert manager.usage == 0
    request = helpers.make_request("a", range(8))
    admit(manager, request)
    assert manager.usage == pytest.approx(0.5)
    assert manager.take_new_block_ids() == [1, 2]
    assert manager.take_new_block_ids() == []
    untracked = make_manager(5, track_new_blocks=False)
    admit(untracked, helpers.make_request("a", range(8)))
    assert untracked.take_new_block_ids() == []
    assert make_manager(1).usage == 0


def test_metrics() -> None:
    collector = kvyard.KVCacheMetricsCollector(1.0, seed=1)
    manager = make_manager(4, metrics_collector=collector)
    a = helpers.make_request("a", range(9))
    for _ in range(3):
        admit(manager, a)
        manager.free(a)
        a.num_computed_tokens = 0
    assert collector.sample_rate == 1.0
    collector.drain_events()
    admit(manager, helpers.make_request("b", range(50, 62)))
    events = collector.drain_events()
    assert len(events) == 3
    assert all(e.lifetime_seconds >= e.idle_seconds >= 0 for e in events)
    assert sorted(len(e.reuse_gaps_seconds) for e in events) == [0, 1, 1]
    assert collector.drain_events() == []


def test_semantics_are_values() -> None:
    assert kvyard.Semantics.corrected() == CORRECTED != VLLM
    assert hash(kvyard.Semantics.corrected()) == hash(CORRECTED)
    changed = VLLM.replace(removal_event="last_copy", gate_counts_lookahead=True)
    assert (changed.removal_event, changed.gate_counts_lookahead) == ("last_copy", True)
    assert changed.hash_domains == "bare"
    assert "last_copy" in repr(changed)
    for wrong in ({"nonsense": True}, {"removal_event": "sometimes"}, {"stats_on": True}):
        with pytest.raises(kvyard.InvalidArgumentError):
            VLLM.replace(**wrong)
