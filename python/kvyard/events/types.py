"""What a pool announces about its prefix cache.

Fields and their order are those of vLLM 0.25.1 (`vllm/distributed/kv_events.py`); a field that has
a default is left out on the wire where it equals that default. Hashes are the low 64 bits of a
block's digest, as an unsigned integer, or the digest itself as bytes.

Events come in the order of the changes that they announce. A consumer counts per (hash, group):
plus one for each hash stored, minus one for each removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

ExternalBlockHash: TypeAlias = int | bytes
"""A block's hash as events carry it."""

ExtraKeys: TypeAlias = tuple[object, ...]
"""What besides the tokens decides about a block: adapter, media, salt, embeddings."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became reachable by their hashes.

    Attributes:
        block_hashes: Hashes of the blocks stored, in table order.
        parent_block_hash: Hash of the block before the first one; None at the start of a prompt.
        token_ids: The tokens that the event covers.
        block_size: Tokens per block, over all context-parallel ranks.
        lora_id: The adapter's number, or None.
        medium: Where the blocks lie; the pool says "GPU".
        lora_name: The adapter's name, or None.
        extra_keys: One entry per hash: its extra keys, or None.
        group_idx: The KV-cache group.
        kv_cache_spec_kind: Kind of the group's spec, for example "full_attention".
        kv_cache_spec_sliding_window: Window in tokens of a sliding-window spec.
        cache_salt: The request's salt where the sender tells it in a field of its own, as SGLang
            and the format `router` do. `take_events` leaves it unset: vLLM has no such field.
        group_block_size: In the format `router`, for a boundary inside a block, where `block_size`
            is what the event covers: tokens per block of the group. `take_events` leaves it unset.
        announced_parent_block_hash: In the format `router`, where the block before the first one
            has no key or is gone, and `parent_block_hash` names an earlier one: that block. The
            tokens are those that follow it. `take_events` leaves it unset.
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None
    group_block_size: int | None = None
    announced_parent_block_hash: ExternalBlockHash | None = None


FURTHER_FIELDS = ("cache_salt", "group_block_size", "announced_parent_block_hash")
"""Fields of `BlockStored` that vLLM 0.25.1 does not have; only the format `router` writes them."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A hash no longer leads to a block.

    Attributes:
        block_hashes: Exactly one hash where the pool emits the event.
        medium: Where the block lay; the pool says "GPU".
        group_idx: The KV-cache group.
    """

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache was reset."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
"""Any event of the pool."""


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The events of one engine step.

    Attributes:
        ts: Seconds since the epoch.
        events: The events, oldest first.
        data_parallel_rank: Rank of the engine that sends them, or None.
    """

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None


class WireFormat(StrEnum):
    """How a batch of events is written, chosen by its consumers."""

    VLLM_0_25 = "vllm_0_25"
    """Byte for byte what vLLM 0.25.1 sends: an event is a map of its fields."""

    VLLM_0_33 = "vllm_0_33"
    """What vLLM 0.33 sends: the same payload, as its further fields are unset; replays differ."""

    ARRAY = "array"
    """An event is an array of its fields, for consumers from before June 2026."""

    ROUTER = "router"
    """vLLM 0.25's maps, and the `FURTHER_FIELDS`, such as the salt, where they say something."""


@dataclass(frozen=True, slots=True)
class EventDump:
    """The full state of a publisher's pool.

    Attributes:
        batches: Encoded batches, `AllBlocksCleared` first and parents before their children;
            whoever applies them in order holds what the pool holds.
        next_sequence: Number of the first batch that the dump does not contain: go on there.
    """

    batches: list[bytes]
    next_sequence: int
