"""The KV event stream: what a pool announces about its prefix cache."""

from __future__ import annotations

from kvyard.events.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalBlockHash,
    ExtraKeys,
    KVCacheEvent,
    KVEventBatch,
)

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "ExternalBlockHash",
    "ExtraKeys",
    "KVCacheEvent",
    "KVEventBatch",
]
