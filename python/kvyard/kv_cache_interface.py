"""What a KV cache looks like: specs of layers, groups of layers, the whole configuration.

Names and fields are those of vLLM 0.25.1 (`vllm/v1/kv_cache_interface.py`), without torch: a dtype
is a name such as "bfloat16", or a torch dtype where torch is there. All sizes are in tokens, bytes
or elements, as each field says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvyard.specs.base import (
    AttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    get_dtype_size,
    get_kv_quant_mode,
)
from kvyard.specs.full_attention import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    TQFullAttentionSpec,
)
from kvyard.specs.other import CrossAttentionSpec, EncoderOnlyAttentionSpec, MambaSpec
from kvyard.specs.registry import register_kv_cache_spec, registered_kv_cache_specs
from kvyard.specs.uniform import (
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from kvyard.specs.windowed import (
    ChunkedLocalAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "FullAttentionSpec",
    "HiddenStateCacheSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVQuantMode",
    "MLAAttentionSpec",
    "MambaSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "TQFullAttentionSpec",
    "UniformTypeKVCacheSpecs",
    "get_dtype_size",
    "get_kv_cache_spec_kind",
    "get_kv_cache_spec_sliding_window",
    "get_kv_quant_mode",
    "register_kv_cache_spec",
    "registered_kv_cache_specs",
]


@dataclass(frozen=True)
class KVCacheTensor:
    """One allocation of device memory.

    Attributes:
        size: Bytes.
        shared_by: Names of the layers that use it.
        offset: Bytes from the start of the backing allocation.
        block_stride: Bytes from one block to the next; 0 means that blocks are adjacent.
    """

    size: int
    shared_by: Sequence[str]
    offset: int = 0
    block_stride: int = 0


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    Attributes:
        layer_names: The layers.
        kv_cache_spec: The spec that all of them have.
        is_eagle_group: Whether the group's last matched block is computed again for a drafter.
    """

    layer_names: Sequence[str]
    kv_cache_spec: KVCacheSpec
    is_eagle_group: bool = False


@dataclass(frozen=True)
class KVCacheConfig:
    """The whole cache of one worker.

    Attributes:
        num_blocks: Blocks in the pool, the null block included.
        kv_cache_tensors: The device memory; a manager does not read it.
        kv_cache_groups: The groups; a group's position is its id.
    """

    num_blocks: int
    kv_cache_tensors: Sequence[KVCacheTensor]
    kv_cache_groups: Sequence[KVCacheGroupSpec]

    @property
    def has_mamba_layers(self) -> bool:
        """Whether a group keeps states."""
        return any(isinstance(group.kv_cache_spec, MambaSpec) for group in self.kv_cache_groups)

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether new blocks must be filled with zeros before they are written."""
        return self.has_mamba_layers
