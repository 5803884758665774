"""What a KV cache looks like: specs of layers, groups of layers, the whole configuration.

Names and fields are those of vLLM 0.25.1 (`vllm/v1/kv_cache_interface.py`), without torch: a dtype
is a name such as "bfloat16", or a torch dtype where torch is there. All sizes are in tokens, bytes
or elements, as each field says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

from kvyard.errors import ConfigError

_ELEMENT_SIZES = {
    "float64": 8,
    "double": 8,
    "int64": 8,
    "float32": 4,
    "float": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}

# Bytes of one stored row in the two layouts of `fp8_ds_mla`, which fix their own padding.
_DEEPSEEK_V4_ROW_BYTES = 584
_FP8_DS_MLA_ROW_BYTES = 656

_FLOAT32_BYTES = 4


class KVQuantMode(IntEnum):
    """How keys and values are quantised."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5

    @property
    def is_per_token_head(self) -> bool:
        """Whether a float32 scale per token and head is stored beside keys and values."""
        return self in (
            KVQuantMode.INT8_PER_TOKEN_HEAD,
            KVQuantMode.FP8_PER_TOKEN_HEAD,
            KVQuantMode.INT4_PER_TOKEN_HEAD,
        )

    def stored_width(self, head_size: int) -> int:
        """Elements that a head of `head_size` elements takes in storage."""
        if self is KVQuantMode.NVFP4:
            return head_size // 2 + head_size // 16
        if self is KVQuantMode.INT4_PER_TOKEN_HEAD:
            return head_size // 2
        return head_size


def get_dtype_size(dtype: object) -> int:
    """Bytes per element of a dtype.

    Args:
        dtype: A name ("bfloat16", also "torch.bfloat16") or an object with an `itemsize`, such as
            a torch dtype.

    Returns:
        The size in bytes.

    Raises:
        ConfigError: The dtype is unknown.
    """
    if isinstance(dtype, str):
        size = _ELEMENT_SIZES.get(dtype.removeprefix("torch."))
    else:
        size = getattr(dtype, "itemsize", None)
    if not isinstance(size, int) or size <= 0:
        known = ", ".join(sorted(_ELEMENT_SIZES))
        raise ConfigError(f"dtype: {dtype!r} is unknown; known names are {known}")
    return size


def _require_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(
                f"{type(owner).__name__}.{name}: {value!r} is not a positive whole number"
            )


@dataclass(frozen=True)
class KVCacheSpec:
    """The cache of one layer.

    Attributes:
        block_size: Tokens per block on one context-parallel rank.
    """

    kind: ClassVar[str] = "unknown"
    """The kind's name in recorded scenarios; a subclass of unknown kind is refused by a manager."""

    block_size: int

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: A size is not a positive whole number.
        """
        _require_positive(self, "block_size")

    @property
    def storage_block_size(self) -> int:
        """Stored rows per block."""
        return self.block_size

    @property
    def page_size_bytes(self) -> int:
        """Bytes per block."""
        raise NotImplementedError(f"{type(self).__name__} does not say how large a block is")


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """The keys and values of an attention layer.

    Attributes:
        num_kv_heads: Heads that keys and values have.
        head_size: Elements per head and key.
        dtype: Type of a stored element, by name or as a torch dtype.
        kv_quant_mode: How keys and values are quantised.
        page_size_padded: Bytes per block after padding; None for no padding.
        indexes_kv_by_block_stride: Whether the kernel steps over blocks by their stride.
    """

    num_kv_heads: int
    head_size: int
    dtype: object
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    indexes_kv_by_block_stride: bool = False

    def __post_init__(self) -> None:
        """Check sizes and dtype.

        Raises:
            ConfigError: A size is not a positive whole number, or the dtype is unknown.
        """
        super().__post_init__()
        _require_positive(self, "num_kv_heads", "head_size")
        get_dtype_size(self.dtype)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes per block for keys and values alone."""
        width = self.kv_quant_mode.stored_width(self.head_size)
        return 2 * self.block_size * self.num_kv_heads * width * get_dtype_size(self.dtype)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes per block with quantisation scales, without padding."""
        scales = 0
        if self.kv_quant_mode.is_per_token_head:
            scales = 2 * self.block_size * self.num_kv_heads * _FLOAT32_BYTES
        return self.real_page_size_bytes + scales

    @property
    def page_size_bytes(self) -> int:
        """Bytes per block, padding included.

        Raises:
            ConfigError: `page_size_padded` is smaller than the block.
        """
        size = self.unpadded_page_size_bytes
        if self.page_size_padded is None:
            return size
        if self.page_size_padded < size:
            raise ConfigError(
                f"page_size_padded: {self.page_size_padded} bytes cannot hold a block of {size}"
            )
        return self.page_size_padded


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Full attention: every token attends to all before it.

    Attributes:
        head_size_v: Elements per head and value; None means `head_size`.
        sliding_window: Window in tokens where a windowed layer is cached as full attention.
        attention_chunk_size: Chunk in tokens where a chunked layer is cached as full attention.
        non_causal: Whether tokens also attend to later ones.
    """

    kind: ClassVar[str] = "full_attention"

    head_size_v: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    non_causal: bool = False

    def __post_init__(self) -> None:
        """Check sizes and fill in `head_size_v`.

        Raises:
            ConfigError: A size is not a positive whole number, or the dtype is unknown.
        """
        super().__post_init__()
        if self.head_size_v is None:
            # Two specs that mean the same must compare equal, whichever way they were written.
            object.__setattr__(self, "head_size_v", self.head_size)
        _require_positive(self, "head_size_v")

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes per block for keys and values alone."""
        width = self.kv_quant_mode.stored_width(self.head_size)
        width += self.kv_quant_mode.stored_width(self.head_size_v or self.head_size)
        return self.block_size * self.num_kv_heads * width * get_dtype_size(self.dtype)


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one compressed row per token or per few tokens.

    Attributes:
        cache_dtype_str: The cache's dtype as the user named it, for example "fp8_ds_mla".
        alignment: Bytes that a block is padded to a multiple of; None for no padding.
        compress_ratio: Tokens that share one stored row.
        model_version: Layout of `fp8_ds_mla`, for example "deepseek_v4".
    """

    kind: ClassVar[str] = "mla_attention"

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def __post_init__(self) -> None:
        """Check sizes and derive `page_size_padded` from `alignment`.

        Raises:
            ConfigError: A size is not a positive whole number, or the dtype is unknown.
        """
        super().__post_init__()
        _require_positive(self, "compress_ratio")
        if self.alignment is None:
            return
        _require_positive(self, "alignment")
        size = self.unpadded_page_size_bytes
        padded = -(-size // self.alignment) * self.alignment
        if padded != size:
            object.__setattr__(self, "page_size_padded", padded)

    @property
    def storage_block_size(self) -> int:
        """Stored rows per block."""
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes per block for the compressed rows alone."""
        if self.cache_dtype_str == "fp8_ds_mla":
            if self.model_version == "deepseek_v4":
                return self.storage_block_size * _DEEPSEEK_V4_ROW_BYTES
            return self.block_size * _FP8_DS_MLA_ROW_BYTES
        width = self.head_size
        if self.kv_quant_mode is KVQuantMode.INT4_PER_TOKEN_HEAD:
            width //= 2
        return self.storage_block_size * self.num_kv_heads * width * get_dtype_size(self.dtype)


@dataclass(frozen=True)
class RSWASpec(FullAttentionSpec):
    """Full attention over the prompt and a window at the end, with a gap between them.

    Attributes:
        rswa_window: The window in tokens.
    """

    kind: ClassVar[str] = "rswa"

    rswa_window: int = field(kw_only=True)

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: A size is not a positive whole number, or the dtype is unknown.
        """
        super().__post_init__()
        _require_positive(self, "rswa_window")


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
