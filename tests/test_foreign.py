"""vLLM's own requests, specs and configurations are accepted as they are."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any

import kvyard
import pytest

from tests import helpers
from tests.helpers import ForeignRequest, admit, make_manager, make_request, row

SHAPE: dict[str, Any] = {
    "block_size": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": "bfloat16",
    "kv_quant_mode": 0,
    "page_size_padded": None,
    "indexes_kv_by_block_stride": False,
    "head_size_v": 8,
    "sliding_window": None,
    "attention_chunk_size": None,
    "non_causal": False,
}
MLA = {"cache_dtype_str": None, "alignment": None, "compress_ratio": 1, "model_version": None}


@dataclass
class Group:
    """A group of vLLM's configuration."""

    layer_names: list[str]
    kv_cache_spec: Any
    is_eagle_group: bool = False


@dataclass
class Config:
    """vLLM's configuration."""

    num_blocks: int
    kv_cache_tensors: list[Any] = field(default_factory=list)
    kv_cache_groups: list[Group] = field(default_factory=list)


def spec_of_vllm(name: str, **fields: Any) -> Any:
    """A spec with the name and fields of one of vLLM's classes."""
    values = {**SHAPE, **fields}
    return make_dataclass(name, values, frozen=True)(**values)


def manager_of_vllm(spec: Any) -> kvyard.KVCacheManager:
    """A manager made from vLLM's objects."""
    config = Config(24, [], [Group(["layer.0"], spec)])
    return kvyard.KVCacheManager(config, 64, enable_kv_cache_events=True)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (spec_of_vllm("FullAttentionSpec"), "full_attention"),
        (spec_of_vllm("MLAAttentionSpec", **MLA), "mla_attention"),
        (spec_of_vllm("RSWASpec", rswa_window=6), "full_attention"),
    ],
)
def test_specs(spec: Any, kind: str) -> None:
    manager = manager_of_vllm(spec)
    admit(manager, make_request("a", range(10)))
    [event] = manager.take_events()
    assert isinstance(event, kvyard.BlockStored)
    assert event.kv_cache_spec_kind == kind


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (spec_of_vllm("FullAttentionSpec", future_field=1), "future_field"),
        (spec_of_vllm("HyperAttentionSpec"), "HyperAttentionSpec"),
    ],
)
def test_unknown_fields_and_kinds_are_named(spec: Any, named: str) -> None:
    with pytest.raises(kvyard.ConfigError, match=named):
        manager_of_vllm(spec)


def test_requests() -> None:
    ours, theirs = (make_manager(24, enable_kv_cache_events=True) for _ in range(2))
    for manager, foreign in ((ours, False), (theirs, True)):
        request = make_request(
            "a",
            range(10),
            lora_request=helpers.Lora("L", 3),
            mm_features=[helpers.Media("imgA", helpers.Placeholder(2, 4))],
            cache_salt="S",
        )
        shown: Any = ForeignRequest(request) if foreign else request
        hit, num_hit = manager.get_computed_blocks(shown)
        assert num_hit == 0
        assert manager.allocate_slots(shown, 10, 0, hit) is not None
        assert row(manager, request) == [1, 2, 3]
        request.num_computed_tokens = 10
        request.append_output_token_ids([10, 11])
        assert manager.allocate_slots(shown, 2) is manager.empty_kv_cache_blocks
    assert ours.take_events() == theirs.take_events()
    assert ours.state_digest() == theirs.state_digest()


def test_hashing_of_a_foreign_request() -> None:
    hasher = helpers.make_hasher()
    request = make_request(
        "a",
        range(10),
        mm_features=[helpers.Media("imgA", helpers.Placeholder(2, 4))],
        lora_request=helpers.Lora("L", 3, "/path"),
        cache_salt="S",
    )
    bare: Any = kvyard.Request(
        "a",
        list(range(10)),
        mm_features=[("imgA", 2, 4)],
        lora_request=helpers.Lora("L", 3, "/path"),
        cache_salt="S",
    )
    assert hasher(ForeignRequest(bare)) == request.block_hashes


def test_foreign_hashes_are_taken_as_they_are() -> None:
    manager = make_manager(24)
    request = kvyard.Request("a", list(range(10)))
    request.block_hashes = [bytes([1]) * 32, bytes([2]) * 32]
    shown: Any = ForeignRequest(request)
    manager.allocate_slots(shown, 10)
    found = manager.block_pool.get_cached_block(bytes([2]) * 32, [0])
    assert found is not None
    assert helpers.ids_of(found) == [2]


def test_status_of_any_enum() -> None:
    request = make_request("a", range(4))
    assert request.status == "WAITING"
    request.status = helpers.RequestStatus.RUNNING
    assert request.status == "RUNNING"
    request.status = "WAITING_FOR_REMOTE_KVS"
    assert request.status == "WAITING_FOR_REMOTE_KVS"
    request.status = helpers.RequestStatus.FINISHED_STOPPED
    assert request.status.startswith("FINISHED")


@dataclass
class Params:
    """Sampling or pooling parameters."""

    skip_reading_prefix_cache: bool | None = None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, False),
        ({"sampling_params": Params(True)}, True),
        ({"sampling_params": Params(False), "pooling_params": Params(True)}, False),
        ({"pooling_params": Params(True)}, True),
        ({"sampling_params": Params(True), "skip_reading_prefix_cache": False}, False),
    ],
)
def test_skip_reading_prefix_cache(arguments: dict[str, Any], expected: bool) -> None:
    request = make_request("a", range(4), **arguments)
    assert request.skip_reading_prefix_cache == expected


def test_the_other_arguments_are_kept() -> None:
    request = kvyard.Request(
        "a",
        [1, 2, 3],
        client_index=4,
        arrival_time=1.5,
        cache_salt="S",
        priority=7,
        trace_headers={"k": "v"},
        resumable=True,
    )
    assert (request.request_id, request.priority, request.arrival_time) == ("a", 7, 1.5)
    assert (request.cache_salt, request.client_index) == ("S", 4)
    assert (request.resumable, request.trace_headers) == (True, {"k": "v"})
    assert request.prompt_token_ids == [1, 2, 3]
    request.append_output_token_ids([4, 5])
    assert request.output_token_ids == [4, 5]
    assert request.num_output_tokens == 2
    assert (request.num_tokens, request.num_prompt_tokens) == (5, 3)


def test_streaming_input_continues_a_request() -> None:
    request = make_request("a", range(6))
    request.append_output_token_ids([6, 7, 8])
    request.truncate(8)
    request.extend_prompt([20, 21, 22, 23], [("imgB", 1, 2)])  # counted from the new input
    assert request.all_token_ids == [*range(8), 20, 21, 22, 23]
    assert request.num_prompt_tokens == 12
    once = make_request("b", request.all_token_ids, mm_features=[("imgB", 9, 2)])
    assert request.block_hashes == once.block_hashes
