"""The KV event stream: what a pool announces about its prefix cache.

`KVCacheManager.take_event_batch` answers the waiting events as one payload; `encode_batch` and
`decode_batch` are for events as objects.
"""

from __future__ import annotations

from kvyard._kvyard import LiveSet, PrefixIndex, decode_batch, encode_batch
from kvyard.events.endpoints import endpoint_for_rank, pod_topic
from kvyard.events.publisher import EventPublisher, EventTransport, ZmqPublisher
from kvyard.events.subscriber import BatchSource, EventSubscription, ReceivedBatch, subscribe
from kvyard.events.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventDump,
    ExternalBlockHash,
    ExtraKeys,
    KVCacheEvent,
    KVEventBatch,
    WireFormat,
)

__all__ = [
    "AllBlocksCleared",
    "BatchSource",
    "BlockRemoved",
    "BlockStored",
    "EventDump",
    "EventPublisher",
    "EventSubscription",
    "EventTransport",
    "ExternalBlockHash",
    "ExtraKeys",
    "KVCacheEvent",
    "KVEventBatch",
    "LiveSet",
    "PrefixIndex",
    "ReceivedBatch",
    "WireFormat",
    "ZmqPublisher",
    "decode_batch",
    "encode_batch",
    "endpoint_for_rank",
    "pod_topic",
    "subscribe",
]
