"""Payloads of events: equal to what msgspec makes of vLLM's structs, and read back."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import kvyard
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvyard.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    LiveSet,
    WireFormat,
    decode_batch,
    encode_batch,
)

from tests import vllm_events
from tests.helpers import (
    CORRECTED,
    VLLM,
    Lora,
    Media,
    Placeholder,
    admit,
    cache_config,
    full,
    make_manager,
    make_request,
    sliding_window,
)

if TYPE_CHECKING:
    from kvyard.events import KVCacheEvent

numbers = st.one_of(
    st.integers(0, 300), st.integers(0, 2**32 - 1), st.sampled_from([127, 128, 255, 256, 65_535])
)
hashes = st.one_of(st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=32))
members = st.recursive(
    st.one_of(st.text(max_size=40), st.integers(-(2**63), 2**64 - 1), st.binary(max_size=300)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
maybe_text = st.one_of(st.none(), st.text(max_size=300))
maybe_number = st.one_of(st.none(), numbers)
stored_events = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, max_size=20),
    parent_block_hash=st.one_of(st.none(), hashes),
    token_ids=st.lists(numbers, max_size=100),
    block_size=numbers,
    lora_id=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    medium=maybe_text,
    lora_name=maybe_text,
    extra_keys=st.one_of(
        st.none(),
        st.lists(st.one_of(st.none(), st.lists(members, max_size=3).map(tuple)), max_size=20),
    ),
    group_idx=maybe_number,
    kv_cache_spec_kind=maybe_text,
    kv_cache_spec_sliding_window=maybe_number,
)
removed_events = st.builds(
    BlockRemoved,
    block_hashes=st.lists(hashes, max_size=3),
    medium=maybe_text,
    group_idx=maybe_number,
)
events = st.one_of(stored_events, removed_events, st.builds(AllBlocksCleared))
times = st.floats(0, 2e9, allow_nan=False)


@given(st.lists(events, max_size=20), times, st.one_of(st.none(), numbers))
def test_objects_are_encoded_as_msgspec_does(
    events: list[KVCacheEvent], ts: float, rank: int | None
) -> None:
    expected = vllm_events.encode(events, ts, rank)
    assert encode_batch(events, ts, rank, "vllm_0_25") == expected
    assert encode_batch(events, ts, rank, WireFormat.VLLM_0_33) == expected
    # vLLM's own structs are as good as ours.
    structs = [vllm_events.as_struct(event) for event in events]
    assert encode_batch(structs, ts, rank, "vllm_0_25") == expected


@given(st.lists(events, max_size=20), times, numbers, st.sampled_from(list(WireFormat)))
def test_what_is_written_can_be_read(
    events: list[KVCacheEvent], ts: float, rank: int, wire_format: WireFormat
) -> None:
    payload = encode_batch(events, ts, rank, wire_format)
    assert decode_batch(payload) == KVEventBatch(ts, events, rank)
    # msgspec agrees that it is a batch of three, and on what is in it.
    read_ts, read_events, read_rank = msgspec.msgpack.decode(payload)
    assert (read_ts, len(read_events), read_rank) == (ts, len(events), rank)


def busy_manager(
    seed: int, semantics: kvyard.Semantics, algorithm: str = "sha256_cbor", steps: int = 30
) -> kvyard.KVCacheManager:
    """Groups of two kinds, adapters, salts, media, evictions: all that a pool announces."""
    manager = kvyard.KVCacheManager(
        cache_config(24, full(8), sliding_window(4, 8)),
        512,
        enable_kv_cache_events=True,
        semantics=semantics,
    )
    chosen = random.Random(seed)
    for number in range(steps):
        arguments: dict[str, Any] = {}
        if chosen.random() < 0.4:
            arguments["lora_request"] = Lora(chosen.choice(["sql", "x" * 40]), 3)
        if chosen.random() < 0.4:
            arguments["cache_salt"] = chosen.choice(["tenant", "salz", "y" * 300])
        if chosen.random() < 0.4:
            arguments["mm_features"] = [Media("image", Placeholder(5, 12))]
        prefix = chosen.choice([0, 100, 70_000, 2**32 - 64])
        tokens = range(prefix, prefix + chosen.randrange(8, 60))
        request = make_request(f"r{number}", tokens, 4, semantics, algorithm=algorithm, **arguments)
        if admit(manager, request) is not None:
            manager.free(request)
        if chosen.random() < 0.1:
            manager.reset_prefix_cache()
    return manager


@pytest.mark.parametrize("semantics", [CORRECTED, VLLM])
@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash"])
@pytest.mark.parametrize("as_int", ["1", "0"])
def test_the_pool_writes_what_msgspec_would(
    monkeypatch: pytest.MonkeyPatch, semantics: kvyard.Semantics, algorithm: str, as_int: str
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_int)
    kinds: set[str] = set()
    for seed in range(20):
        told, written = (busy_manager(seed, semantics, algorithm) for _ in range(2))
        events = told.take_events()
        kinds.update(type(event).__name__ for event in events)
        payload = written.take_event_batch("vllm_0_25", 3, 12.5)
        assert payload == vllm_events.encode(events, 12.5, 3)
        assert vllm_events.DECODER.decode(payload).data_parallel_rank == 3
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_the_router_format_adds_the_salt_to_every_store() -> None:
    """Rule 9: as a field of its own, also where the first block is not among those stored."""
    manager = make_manager(20, enable_kv_cache_events=True)
    request = make_request("r", range(20), cache_salt="tenant", lora_request=Lora("sql", 3))
    admit(manager, request, num_new_tokens=8)
    admit(manager, make_request("other", range(4)))
    assert manager.allocate_slots(request, 12) is not None
    payload = manager.take_event_batch(ts=1.0)
    assert payload is not None
    ts, (first, plain, second), rank = msgspec.msgpack.decode(payload)
    assert (ts, rank) == (1.0, 0)
    assert (first["cache_salt"], second["cache_salt"]) == ("tenant", "tenant")
    assert "cache_salt" not in plain
    assert first["extra_keys"] == [["sql", "tenant"], ["sql"]]
    assert second["extra_keys"] == [["sql"]] * 3
    assert [event.cache_salt for event in decode_batch(payload).events] == [  # type: ignore[union-attr]
        "tenant",
        None,
        "tenant",
    ]


def test_nothing_waits_nothing_is_written() -> None:
    manager = make_manager(8, enable_kv_cache_events=True)
    assert manager.take_event_batch() is None
    admit(manager, make_request("r", range(8)))
    before = time.time()
    payload = manager.block_pool.take_event_batch("array")
    assert payload is not None
    assert before <= decode_batch(payload).ts <= time.time()
    assert manager.take_event_batch() is None
    assert manager.take_events() == []
    silent = make_manager(8)
    admit(silent, make_request("r", range(8)))
    assert silent.take_event_batch() is None


def test_a_refused_call_takes_nothing() -> None:
    manager = make_manager(8, enable_kv_cache_events=True)
    admit(manager, make_request("r", range(8)))
    wrong: list[tuple[Any, ...]] = [("vllm",), ("router", -1), ("router", None), ("array", None)]
    for arguments in wrong:
        with pytest.raises(kvyard.InvalidArgumentError):
            manager.take_event_batch(*arguments)
    with pytest.raises(kvyard.InvalidArgumentError, match='"vllm_0_25", "vllm_0_33", "array"'):
        manager.take_event_batch("msgpack")
    payload = manager.take_event_batch("vllm_0_25", None)
    assert payload is not None
    assert payload[-1:] == b"\xc0"
    assert len(decode_batch(payload).events) == 1


def test_wrong_objects_are_refused() -> None:
    good = BlockRemoved([1], "GPU", 0)
    wrong: list[Any] = [
        "BlockStored",
        BlockRemoved([2**64], "GPU"),
        BlockRemoved([-1], "GPU"),
        BlockRemoved(["x"], "GPU"),  # type: ignore[list-item]
        BlockRemoved([1], 5),  # type: ignore[arg-type]
        BlockRemoved([1], "GPU", -1),
        BlockStored([1], None, [2**32], 1, None, None, None),
        BlockStored([1], None, [1], 1, None, None, None, [({},)]),
    ]
    for event in wrong:
        with pytest.raises(kvyard.InvalidArgumentError):
            encode_batch([good, event], 0.0)
    with pytest.raises(kvyard.InvalidArgumentError, match="rank"):
        encode_batch([good], 0.0, None)


@given(st.binary(max_size=200))
def test_noise_is_refused(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except kvyard.EventDecodeError as error:
        assert "at byte" in str(error)  # noqa: PT017


def test_sglang_and_older_batches_are_read() -> None:
    """Signed hashes, arrays, missing ranks, unknown fields, tags and nested keys."""
    encode = msgspec.msgpack.encode
    stored = {"block_hashes": [-1], "parent_block_hash": None, "token_ids": [5, 6], "block_size": 2}
    batch = decode_batch(
        encode(
            [
                3,
                [
                    {**stored, "type": "BlockStored", "lora_id": None, "session_id": "s"},
                    {"type": "BlockPinned", "block_hashes": {}},
                    ["BlockStored", [7], -2, [1], 1, None, "GPU", "sql"],
                    ["BlockRemoved", [7, 8], "GPU"],
                    ["AllBlocksCleared"],
                ],
            ]
        )
    )
    assert batch == KVEventBatch(
        3.0,
        [
            BlockStored([2**64 - 1], None, [5, 6], 2, None, None, None),
            BlockStored([7], 2**64 - 2, [1], 1, None, "GPU", "sql"),
            BlockRemoved([7, 8], "GPU"),
            AllBlocksCleared(),
        ],
        None,
    )


def test_batches_taken_by_many_threads_are_whole() -> None:
    """Each event is in exactly one payload, and nobody waits for ever."""
    manager = make_manager(3000, enable_kv_cache_events=True, max_model_len=100_000)
    payloads: list[bytes] = []
    done = threading.Event()

    def drain() -> None:
        while not done.is_set():
            payload = manager.take_event_batch()
            if payload is not None:
                payloads.append(payload)

    threads = [threading.Thread(target=drain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(60):
        request = make_request(f"r{number}", range(number * 4096, (number + 1) * 4096))
        assert admit(manager, request) is not None
        manager.free(request)
    done.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    last = manager.take_event_batch()
    batches = [decode_batch(p) for p in [*payloads, *([last] if last else [])]]
    stored = [
        block_hash
        for batch in batches
        for event in batch.events
        if isinstance(event, BlockStored)
        for block_hash in event.block_hashes
    ]
    assert len(stored) == len(set(stored)) == 60 * 1024


def test_a_manager_and_its_pool_take_turns() -> None:
    """The pool does not know the kinds of its groups, its manager does; each says what it knows."""
    manager = make_manager(12, enable_kv_cache_events=True)
    kinds = []
    sources: list[kvyard.BlockPool | kvyard.KVCacheManager]
    sources = [manager.block_pool, manager, manager.block_pool, manager]
    for at, source in enumerate(sources):
        admit(manager, make_request(f"r{at}", range(at * 100, at * 100 + 5)))
        payload = source.take_event_batch()
        assert payload is not None
        (event,) = decode_batch(payload).events
        assert isinstance(event, kvyard.BlockStored)
        kinds.append(event.kv_cache_spec_kind)
    assert kinds == [None, "full_attention", None, "full_attention"]


def test_a_dump_names_hashes_as_the_stream_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests stay digests, also those of blocks that nobody announced (masked groups)."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    manager = kvyard.KVCacheManager(
        cache_config(100, full(16), sliding_window(4, 8)), 512, enable_kv_cache_events=True
    )
    admit(manager, make_request("r", range(60), 4))
    payload = manager.take_event_batch(ts=7.5)
    assert payload is not None
    live_set = LiveSet()
    assert live_set.latest_ts == 0.0
    live_set.apply(payload)
    assert live_set.latest_ts == 7.5

    def follows(batches: list[bytes]) -> dict[Any, Any]:
        """What each block follows, by its hash and group."""
        followed: dict[Any, Any] = {}
        for event in (event for batch in batches for event in decode_batch(batch).events):
            assert isinstance(event, kvyard.BlockStored)
            before = event.announced_parent_block_hash or event.parent_block_hash
            for block_hash in event.block_hashes:
                followed[block_hash, event.group_idx] = before
                before = block_hash
        return followed

    told = follows([payload])
    assert follows(live_set.dump(8.0)) == told
    hashes = {block_hash for block_hash, _ in told} | set(told.values())
    assert {type(block_hash) for block_hash in hashes} == {bytes, type(None)}
    announced = {block_hash for block_hash, group in told if group == 1}
    assert any(before not in announced for before in told.values() if before is not None)
