"""kvyard: the KV-cache manager of an LLM engine, in Rust, under vLLM's names.

A manager hands out blocks of KV cache to requests, finds the longest prefix that is cached already,
and gives blocks back in an order that keeps shared prefixes longest::

    from kvyard import (
        FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request,
        get_hash_fn_by_name, get_request_block_hasher, init_none_hash,
    )

    sha256 = get_hash_fn_by_name("sha256")
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)

    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    config = KVCacheConfig(1000, [], [KVCacheGroupSpec(["layer.0"], spec)])
    manager = KVCacheManager(config, max_model_len=8192)

    request = Request("r0", list(range(100)), block_hasher=hasher)
    hit, num_hit_tokens = manager.get_computed_blocks(request)
    new = manager.allocate_slots(
        request, request.num_tokens - num_hit_tokens, num_hit_tokens, hit
    )
    manager.free(request)
"""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from kvyard._kvyard import (
    BlockHasher,
    BlockLease,
    BlockPool,
    HashFunction,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheEvictionEvent,
    KVCacheManager,
    KVCacheMetricsCollector,
    LostLease,
    PoolBlocks,
    PrefixCacheStats,
    Request,
    Semantics,
)
from kvyard.errors import (
    AlreadyTrackedError,
    ConfigError,
    DoubleFreeError,
    EndpointError,
    EventDecodeError,
    ForeignBlockError,
    HashConflictError,
    InsufficientMemoryError,
    InvalidArgumentError,
    InvariantError,
    KVCacheError,
    MissingDependencyError,
    NotOwnedError,
    OutOfBlocksError,
    OwnershipError,
    PlanningError,
    PoisonedError,
    PublisherClosedError,
    StaleBlockError,
    UnknownRequestError,
)
from kvyard.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from kvyard.hashing import (
    get_hash_fn_by_name,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
)
from kvyard.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
    UniformTypeKVCacheSpecs,
    register_kv_cache_spec,
)

__all__ = [
    "AllBlocksCleared",
    "AlreadyTrackedError",
    "AttentionSpec",
    "BlockHasher",
    "BlockLease",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "ChunkedLocalAttentionSpec",
    "ConfigError",
    "CrossAttentionSpec",
    "DoubleFreeError",
    "EncoderOnlyAttentionSpec",
    "EndpointError",
    "EventDecodeError",
    "ForeignBlockError",
    "FullAttentionSpec",
    "HashConflictError",
    "HashFunction",
    "HiddenStateCacheSpec",
    "InsufficientMemoryError",
    "InvalidArgumentError",
    "InvariantError",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheError",
    "KVCacheEvent",
    "KVCacheEvictionEvent",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheMetricsCollector",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVEventBatch",
    "KVQuantMode",
    "LostLease",
    "MLAAttentionSpec",
    "MambaSpec",
    "MissingDependencyError",
    "NotOwnedError",
    "OutOfBlocksError",
    "OwnershipError",
    "PlanningError",
    "PoisonedError",
    "PrefixCacheStats",
    "PublisherClosedError",
    "RSWASpec",
    "Request",
    "Semantics",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "StaleBlockError",
    "TQFullAttentionSpec",
    "UniformTypeKVCacheSpecs",
    "UnknownRequestError",
    "__version__",
    "get_hash_fn_by_name",
    "get_request_block_hasher",
    "hash_block_tokens",
    "init_none_hash",
    "register_kv_cache_spec",
]

try:
    __version__ = version("kvyard")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

Sequence.register(BlockLease)
Sequence.register(PoolBlocks)
