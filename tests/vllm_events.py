"""vLLM's event structs, from the field table of manager 8.1, for msgspec to encode and decode."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import kvyard


class Event(msgspec.Struct, array_like=False, omit_defaults=True, gc=False, tag=True):
    """The base of vLLM's events: a map whose first key is "type"."""


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


CLASSES = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}
DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def as_struct(event: kvyard.KVCacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
    """The same event as vLLM's struct."""
    struct_class = CLASSES[type(event).__name__]
    fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    known = {name: fields[name] for name in struct_class.__struct_fields__}
    struct: BlockStored | BlockRemoved | AllBlocksCleared = struct_class(**known)
    return struct


def encode(
    events: list[kvyard.KVCacheEvent], ts: float, data_parallel_rank: int | None = 0
) -> bytes:
    """What vLLM's publisher sends."""
    structs = [as_struct(event) for event in events]
    return msgspec.msgpack.encode(KVEventBatch(ts, structs, data_parallel_rank))
