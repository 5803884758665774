"""Managers, requests and schedules that most tests need, in one line each."""

from __future__ import annotations

import dataclasses
import enum
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kvyard
import pytest
from kvyard.events.types import FURTHER_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CORRECTED = kvyard.Semantics.corrected()
VLLM = kvyard.Semantics.vllm_0_25_1()

both = pytest.mark.parametrize("semantics", [CORRECTED, VLLM], ids=["corrected", "vllm"])
"""Runs a test under the two semantics, which agree."""


def per_semantics(right: object, v251: object) -> pytest.MarkDecorator:
    """A parametrization over the two semantics with the value that each must give."""
    return pytest.mark.parametrize(
        ("semantics", "expected"), [(CORRECTED, right), (VLLM, v251)], ids=["corrected", "vllm"]
    )


ATTENTION: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Lora:
    """An adapter as a request carries it."""

    lora_name: str
    lora_int_id: int
    lora_path: str | None = None


class ForeignRequest:
    """A request that is not ours, with the attributes that vLLM's has; ours stands behind it."""

    def __init__(self, request: kvyard.Request) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        if name not in _VLLM_ATTRIBUTES:
            raise AttributeError(name)
        value = getattr(self._request, name)
        return RequestStatus[value] if name == "status" else value


_VLLM_ATTRIBUTES = (
    "request_id",
    "num_tokens",
    "num_prompt_tokens",
    "num_computed_tokens",
    "num_preemptions",
    "status",
    "block_hashes",
    "all_token_ids",
    "skip_reading_prefix_cache",
    "lora_request",
    "mm_features",
    "cache_salt",
    "prompt_embeds",
)


class RequestStatus(enum.IntEnum):
    """Some of vLLM's states, in its order."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()


@dataclass(frozen=True)
class Placeholder:
    """Where a media item lies."""

    offset: int
    length: int


@dataclass(frozen=True)
class Media:
    """A media item as vLLM's requests carry it."""

    identifier: str
    mm_position: Placeholder


def full(block_size: int, num_kv_heads: int = 2) -> kvyard.FullAttentionSpec:
    """A full-attention spec; another number of heads makes it another spec."""
    shape = {**ATTENTION, "num_kv_heads": num_kv_heads}
    return kvyard.FullAttentionSpec(block_size=block_size, **shape)


def sliding_window(block_size: int, window: int) -> kvyard.SlidingWindowSpec:
    """A sliding-window spec; the window is in tokens."""
    return kvyard.SlidingWindowSpec(block_size=block_size, sliding_window=window, **ATTENTION)


def chunked_local(block_size: int, chunk: int) -> kvyard.ChunkedLocalAttentionSpec:
    """A chunked-local spec; the chunk is in tokens."""
    return kvyard.ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=chunk, **ATTENTION
    )


def mamba(block_size: int, mode: str = "align", drafts: int = 0) -> kvyard.MambaSpec:
    """A spec of recurrent states, with blocks for so many drafts."""
    return kvyard.MambaSpec(
        block_size=block_size,
        shapes=((4, 4),),
        dtypes=("float32",),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


def rswa(block_size: int, window: int) -> kvyard.RSWASpec:
    """An R-SWA spec."""
    return kvyard.RSWASpec(block_size=block_size, rswa_window=window, **ATTENTION)


def cache_config(
    num_blocks: int, *specs: kvyard.KVCacheSpec, is_eagle_group: bool = False
) -> kvyard.KVCacheConfig:
    """A configuration with one group per spec."""
    groups = [
        kvyard.KVCacheGroupSpec([f"layer.{i}"], spec, is_eagle_group)
        for i, spec in enumerate(specs)
    ]
    return kvyard.KVCacheConfig(num_blocks, [], groups)


def make_manager(
    num_blocks: int, spec: kvyard.KVCacheSpec | None = None, **arguments: Any
) -> kvyard.KVCacheManager:
    """A manager of one group, full attention with blocks of 4 unless said."""
    arguments.setdefault("max_model_len", 8192)
    return kvyard.KVCacheManager(cache_config(num_blocks, spec or full(4)), **arguments)


def make_hasher(
    block_size: int = 4,
    semantics: kvyard.Semantics = CORRECTED,
    algorithm: str = "sha256",
) -> kvyard.BlockHasher:
    """A hasher whose root is the hash of "0"."""
    function = kvyard.get_hash_fn_by_name(algorithm)
    return kvyard.BlockHasher(function, function("0"), block_size, semantics)


def make_request(
    name: str,
    tokens: Iterable[int],
    block_size: int = 4,
    semantics: kvyard.Semantics = CORRECTED,
    **arguments: Any,
) -> kvyard.Request:
    """A request that hashes its own blocks."""
    hasher = make_hasher(block_size, semantics, arguments.pop("algorithm", "sha256"))
    return kvyard.Request(name, list(tokens), block_hasher=hasher, **arguments)


def admit(
    manager: kvyard.KVCacheManager, request: kvyard.Request, **arguments: Any
) -> list[int] | None:
    """Look up, allocate all that is missing; ids of the new blocks, or None.

    A success is taken as computed.
    """
    hit, num_hit = manager.get_computed_blocks(request)
    num_new = arguments.pop("num_new_tokens", request.num_tokens - num_hit)
    new = manager.allocate_slots(request, num_new, num_hit, hit, **arguments)
    if new is None:
        return None
    external = arguments.get("num_external_computed_tokens", 0)
    request.num_computed_tokens = min(num_hit + external + num_new, request.num_tokens)
    return [i for group in new.get_block_ids() for i in group]


def free_order(pool: kvyard.BlockPool) -> list[int]:
    """The free queue, next victim first."""
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def row(manager: kvyard.KVCacheManager, request: kvyard.Request) -> list[int]:
    """The only group's table of a request."""
    [ids] = manager.get_block_ids(request.request_id)
    return ids


def take(pool: kvyard.BlockPool, count: int) -> list[kvyard.KVCacheBlock]:
    """New blocks from the pool."""
    return pool.get_new_blocks(count)


def ids_of(blocks: Sequence[kvyard.KVCacheBlock]) -> list[int]:
    """Their ids."""
    return [block.block_id for block in blocks]


def low_bits(block_hash: bytes) -> int:
    """A hash as events carry it."""
    return int.from_bytes(block_hash[-8:], "big")


def event_as_dict(event: kvyard.KVCacheEvent) -> dict[str, Any]:
    """An event of `take_events` with the name of its type and vLLM's fields."""
    fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    for further in FURTHER_FIELDS:
        assert fields.pop(further, None) is None
    return {"type": type(event).__name__, **fields}


def environment_without_colors() -> dict[str, str]:
    """The environment for a command whose output is compared."""
    return {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
