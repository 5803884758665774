"""What a router knows is what an engine would find: the index against the manager's own lookup."""

from __future__ import annotations

import random
import threading
from typing import Any

import kvyard
import msgspec
import pytest
from kvyard.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    LiveSet,
    PrefixIndex,
    decode_batch,
    encode_batch,
)

from tests.helpers import (
    CORRECTED,
    VLLM,
    Lora,
    Media,
    Placeholder,
    admit,
    both,
    cache_config,
    full,
    make_manager,
    make_request,
    mamba,
    sliding_window,
)

SPECS: dict[str, list[kvyard.KVCacheSpec]] = {
    "full": [full(4)],
    "full and window": [full(4), sliding_window(4, 8)],
    "window first": [sliding_window(4, 13), full(4)],
    "block sizes": [full(8), sliding_window(4, 8), sliding_window(8, 24)],
    # Blocks that no aligned lookup can use get no key: case C15.
    "masked": [full(16), sliding_window(4, 4)],
    "states": [full(4), mamba(8)],
}
RUNS: dict[str, list[kvyard.KVCacheSpec]] = {
    "masked runs": [full(16), sliding_window(4, 7)],
    "long masked runs": [sliding_window(4, 13), full(16)],
    "masked runs of several groups": [full(16), sliding_window(4, 6), sliding_window(8, 10)],
}
"""Several blocks before each place where a hit may end; what they follow has no key in any group.
vLLM's events do not say which tokens are theirs."""
IDENTITIES: list[dict[str, Any]] = [
    {},
    {"lora_request": Lora("sql", 3)},
    {"cache_salt": "sql"},
    {"lora_request": Lora("sql", 3), "cache_salt": "tenant"},
    {"mm_features": [Media("image", Placeholder(5, 9))]},
    {"mm_features": [Media("other", Placeholder(5, 9)), Media("image", Placeholder(18, 2))]},
]


def question(identity: dict[str, Any]) -> dict[str, Any]:
    """The same identity for `matched_tokens`."""
    asked: dict[str, Any] = {}
    if "lora_request" in identity:
        asked["lora_name"] = identity["lora_request"].lora_name
    if "cache_salt" in identity:
        asked["cache_salt"] = identity["cache_salt"]
    if "mm_features" in identity:
        asked["extra_keys"] = [
            (media.identifier, media.mm_position.offset) for media in identity["mm_features"]
        ]
    return asked


@pytest.mark.parametrize(
    ("specs", "semantics"),
    [
        pytest.param(specs, semantics, id=f"{name}, {rules}")
        for semantics, rules, kinds in [
            (CORRECTED, "corrected", SPECS | RUNS),
            (VLLM, "vllm", SPECS),
        ]
        for name, specs in kinds.items()
    ],
)
def test_the_index_knows_what_the_manager_would_find(
    specs: list[kvyard.KVCacheSpec], semantics: kvyard.Semantics
) -> None:
    """Three workers of one kind; one is followed by payload, one by objects, one from a dump."""
    rule = str(semantics.removal_event)
    index = PrefixIndex(rule)
    managers = [
        kvyard.KVCacheManager(
            cache_config(40, *specs), 512, enable_kv_cache_events=True, semantics=semantics
        )
        for _ in range(3)
    ]
    live_set = LiveSet(rule)
    # Bare, an adapter and a salt of one name are the same to 0.25.1 (case C05), but not here.
    identities = [
        identity
        for identity in IDENTITIES
        if semantics == CORRECTED or "sql" not in identity.values()
    ]
    chosen = random.Random(7)
    prompts = [
        [branch] * 4 + list(range(70_000, 70_000 + length))
        for branch in range(3)
        for length in (12, 28, 60)
    ]
    hits = 0
    for step in range(300):
        prompt, identity = chosen.choice(prompts), chosen.choice(identities)
        worker = chosen.randrange(3)
        request = make_request(f"r{step}", prompt, 4, semantics, **identity)
        if admit(managers[worker], request) is not None:
            managers[worker].free(request)
        if chosen.random() < 0.01:
            managers[worker].reset_prefix_cache()
        if chosen.random() < 0.2:
            evicted = [chosen.randrange(40) for _ in range(4)]
            managers[worker].evict_blocks(evicted)
        payload = managers[worker].take_event_batch()
        if payload is not None:
            index.apply(worker, decode_batch(payload) if worker == 1 else payload)
            if worker == 2:
                live_set.apply(payload)
        if step % 10 == 0 and semantics == CORRECTED:
            index.remove_worker(2)
            for batch in live_set.dump(0.0):
                index.apply(2, batch)
        asked, wanted = chosen.choice(prompts), chosen.choice(identities)
        # More tokens than any block ends at, as the last one is never taken from the cache.
        asked = [*asked, *range(8)]
        found = index.matched_tokens(asked, **question(wanted))
        for number, manager in enumerate(managers):
            looked = make_request(f"q{step}", asked, 4, semantics, **wanted)
            _, hit = manager.get_computed_blocks(looked)
            assert found.get(number, 0) == hit
            hits += hit > 0
    assert hits > 50


@pytest.mark.parametrize("specs", RUNS.values(), ids=RUNS)
def test_masked_runs_of_vllm_are_never_promised(specs: list[kvyard.KVCacheSpec]) -> None:
    """Case C15: the answer may be too low, since nobody can place such blocks, but not too high."""
    manager = kvyard.KVCacheManager(
        cache_config(100, *specs), 512, enable_kv_cache_events=True, semantics=VLLM
    )
    index = PrefixIndex("every_copy")
    for number, length in enumerate((100, 20, 60)):
        prompt = [number % 2] * 8 + list(range(length))
        admit(manager, make_request(f"r{number}", prompt, 4, VLLM))
        payload = manager.take_event_batch()
        if payload is not None:
            index.apply("w", payload)
        for asked in (prompt, prompt[:50], list(range(80))):
            asked = [*asked, *range(8)]
            _, hit = manager.get_computed_blocks(make_request("q", asked, 4, VLLM))
            assert index.matched_tokens(asked).get("w", 0) <= hit


@both
def test_boundaries_inside_blocks_do_not_mislead(semantics: kvyard.Semantics) -> None:
    """Case C17: blocks of 1,536 tokens, keys every 128; prompts end inside the second block."""
    rule = str(semantics.removal_event)
    pool = kvyard.BlockPool(60, True, 128, True, semantics=semantics)
    index, dumped, live_set = PrefixIndex(rule), PrefixIndex(rule), LiveSet(rule)
    last = KVEventBatch(0.0, [])
    boundary = 2944
    for number in range(15):  # more tokens behind such boundaries than in whole blocks
        prompt = [*range(1536), *[number] * (boundary - 1536)]
        request = make_request(f"r{number}", prompt, 128, semantics)
        blocks = pool.get_new_blocks(2)
        if number == 0:
            pool.cache_full_blocks(request, blocks, 0, 1, 1536, 0)
        assert pool.cache_partial_block(request, blocks[1], boundary, 0, 1536) is not None
        payload = pool.take_event_batch()
        assert payload is not None
        index.apply("w", payload)
        live_set.apply(payload)
        for batch in live_set.dump(0.0):
            dumped.apply("w", batch)
        last = decode_batch(payload)
        for router in (index, dumped):
            assert router.matched_tokens(range(3072)) == {"w": 1536}
        dumped.remove_worker("w")
    [boundary_store] = last.events
    assert isinstance(boundary_store, BlockStored)
    assert boundary_store.group_block_size == 1536
    assert boundary_store.block_size == (1408 if semantics == CORRECTED else 128)


def test_sglang_workers() -> None:
    """Pages of one token, signed hashes, no groups, one removal for many hashes."""
    encode = msgspec.msgpack.encode
    index = PrefixIndex()
    index.add_worker("sglang")
    assert index.matched_tokens([1, 2, 3]) == {"sglang": 0}

    def stored(hashes: list[int], parent: int | None, tokens: list[int]) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": 1,
            "lora_id": None,
            "medium": "GPU",
        }

    index.apply("sglang", encode([1.0, [stored([-1, -2], None, [1, 2]), stored([5], -2, [3])], 0]))
    assert index.matched_tokens([1, 2, 3, 4]) == {"sglang": 3}
    assert index.matched_tokens([1, 7, 3, 4]) == {"sglang": 1}
    # Signed or not, it is the same hash.
    removed = {"type": "BlockRemoved", "block_hashes": [2**64 - 2, 5], "medium": "GPU"}
    index.apply("sglang", encode([1.0, [removed], None]))
    assert index.matched_tokens([1, 2, 3, 4]) == {"sglang": 1}
    index.apply("sglang", encode([2.0, [["AllBlocksCleared"]], 0]))
    assert index.matched_tokens([1, 2, 3, 4]) == {"sglang": 0}
    array = ["BlockStored", [9], None, [1], 1, None, "GPU"]
    salted = {**stored([8], None, [2]), "cache_salt": "tenant"}
    index.apply("sglang", encode([2.0, [array, salted]]))
    assert index.matched_tokens([1, 2]) == {"sglang": 1}
    assert index.matched_tokens([2, 2]) == {"sglang": 0}
    assert index.matched_tokens([2, 2], cache_salt="tenant") == {"sglang": 1}


def test_sets_and_counts() -> None:
    """Rule 12: two stores and one removal; gone for a set, not for who counts."""
    stored = BlockStored([1], None, [5, 6], 2, None, "GPU", None, None, 0, "full_attention")
    removed = BlockRemoved([1], "GPU", 0)
    index = PrefixIndex()
    index.add_worker("vllm", removal_event="every_copy")
    for worker in ("vllm", "ours"):
        index.apply(worker, KVEventBatch(0.0, [stored, stored, removed]))
    assert index.matched_tokens([5, 6, 7]) == {"vllm": 2, "ours": 0}
    index.apply("vllm", KVEventBatch(0.0, [removed]))
    assert index.matched_tokens([5, 6, 7]) == {"vllm": 0, "ours": 0}


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_payloads_may_lie_in_any_buffer(kind: type[bytes]) -> None:
    stored = BlockStored([1], None, [5, 6], 2, None, "GPU", None)
    payload = kind(encode_batch([stored], 0.0))
    index, live_set = PrefixIndex(), LiveSet()
    index.apply("a", payload)
    live_set.apply(payload)
    assert index.matched_tokens([5, 6]) == {"a": 2}
    assert len(live_set) == 1
    assert decode_batch(payload).events == [stored]


def test_workers_by_any_name() -> None:
    stored = BlockStored([1], None, [5, 6], 2, None, "GPU", None)
    index = PrefixIndex()
    names: list[Any] = ["a", 1, ("host", 0), ("host", 1)]
    for name in names:
        index.apply(name, encode_batch([stored], 0.0))
    assert index.matched_tokens([5, 6]) == dict.fromkeys(names, 2)
    assert (len(index), index.num_blocks(("host", 1)), index.num_blocks("b")) == (4, 1, 0)
    index.remove_worker(1)
    index.remove_worker("nobody")
    assert index.matched_tokens([5, 6]) == {"a": 2, ("host", 0): 2, ("host", 1): 2}
    index.apply("b", KVEventBatch(0.0, [AllBlocksCleared()]))
    assert index.matched_tokens([5, 6])["b"] == 0
    assert index.num_bytes > 0
    assert repr(index) == "PrefixIndex(4 workers)"


def test_misuse_is_refused() -> None:
    index = PrefixIndex()
    index.add_worker("a")
    wrong: list[tuple[Any, ...]] = [("a",), ("b", "sometimes")]
    for arguments in wrong:
        with pytest.raises(kvyard.InvalidArgumentError):
            index.add_worker(*arguments)
    with pytest.raises(kvyard.InvalidArgumentError):
        PrefixIndex("sometimes")
    with pytest.raises(kvyard.InvalidArgumentError):
        LiveSet("sometimes")
    with pytest.raises(kvyard.EventDecodeError):
        index.apply("c", b"\x93")
    with pytest.raises(kvyard.InvalidArgumentError):
        index.apply("c", [1])  # type: ignore[arg-type]
    with pytest.raises(kvyard.InvalidArgumentError, match="not str") as told:
        index.apply("c", "x" * 10_000)  # type: ignore[arg-type]
    assert len(str(told.value)) < 200
    with pytest.raises(TypeError):
        index.apply([], encode_batch([], 0.0))  # type: ignore[arg-type]
    assert len(index) == 1
    with pytest.raises(kvyard.InvalidArgumentError):
        index.matched_tokens([2**32])
    with pytest.raises(kvyard.InvalidArgumentError, match="sorted"):
        index.matched_tokens([1], extra_keys=[("a", 2), ("b", 1)])
    live_set = LiveSet()
    with pytest.raises(kvyard.EventDecodeError):
        live_set.apply(b"")
    with pytest.raises(TypeError, match="bytes are expected, not str"):
        live_set.apply("")  # type: ignore[arg-type]
    with pytest.raises(kvyard.InvalidArgumentError):
        live_set.dump(0.0, None)
    assert live_set.dump(0.0, None, "vllm_0_25") == []


def test_many_threads_may_use_one() -> None:
    index = PrefixIndex()
    manager = make_manager(100, enable_kv_cache_events=True)
    admit(manager, make_request("r", range(40)))
    payload = manager.take_event_batch()
    assert payload is not None
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for turn in range(300):
                index.apply(turn % 7, payload)
                assert index.matched_tokens(range(40))[turn % 7] == 40
                if thread == 0:
                    index.remove_worker(100 + turn)
                    index.apply(100 + turn, payload)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert len(index) == 7 + 300
