"""What all specs share: sizes of elements and blocks, and how layers become one group.

Names, fields and formulas are those of vLLM 0.25.1 (`vllm/v1/kv_cache_interface.py`). How specs
merge has two rules, named as in `Semantics.group_merge`: under "layer_order" the first layer's
class and fields decide, as in vLLM; under "order_independent" layers merge only if they are alike.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from kvyard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvyard.specs.planning_config import GroupMerge, PlanningConfig

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

_FLOAT32_BYTES = 4


def divide_up(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


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


def get_kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """How a cache dtype named on vLLM's command line is quantised.

    Args:
        kv_cache_dtype: For example "auto", "fp8_e4m3" or "int4_per_token_head".
    """
    modes = {
        "int4_per_token_head": KVQuantMode.INT4_PER_TOKEN_HEAD,
        "int8_per_token_head": KVQuantMode.INT8_PER_TOKEN_HEAD,
        "fp8_per_token_head": KVQuantMode.FP8_PER_TOKEN_HEAD,
        "nvfp4": KVQuantMode.NVFP4,
    }
    if kv_cache_dtype in modes:
        return modes[kv_cache_dtype]
    per_tensor = kv_cache_dtype.startswith("fp8")
    return KVQuantMode.FP8_PER_TENSOR if per_tensor else KVQuantMode.NONE


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


def require_positive(owner: object, *names: str) -> None:
    """Check attributes.

    Raises:
        ConfigError: One of them is not a positive whole number.
    """
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(
                f"{type(owner).__name__}.{name}: {value!r} is not a positive whole number"
            )


def require_alike(specs: Sequence[KVCacheSpec], ignoring: Collection[str] = ()) -> None:
    """Check that specs have one class and equal fields.

    Args:
        specs: At least one.
        ignoring: Fields that may differ.

    Raises:
        ConfigError: They differ elsewhere.
    """
    first = specs[0]
    compared = [f.name for f in dataclasses.fields(first) if f.name not in ignoring]
    for spec in specs[1:]:
        if type(spec) is not type(first):
            raise ConfigError(
                f"layers of one group: {type(first).__name__} and {type(spec).__name__} do not"
                " merge"
            )
        require_equal(first, spec, compared)


def require_equal(first: KVCacheSpec, spec: KVCacheSpec, names: Collection[str]) -> None:
    """Check that two specs agree.

    Args:
        first: The spec that decides.
        spec: The other one.
        names: Fields of `first`; one that `spec` lacks differs.

    Raises:
        ConfigError: They differ.
    """
    for name in names:
        theirs = getattr(spec, name, None)
        if getattr(first, name) != theirs:
            raise ConfigError(
                f"layers of one group: {name} differs, {getattr(first, name)!r} and {theirs!r}"
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
        require_positive(self, "block_size")

    @property
    def storage_block_size(self) -> int:
        """Stored rows per block."""
        return self.block_size

    @property
    def page_size_bytes(self) -> int:
        """Bytes per block."""
        raise NotImplementedError(f"{type(self).__name__} does not say how large a block is")

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks of the pool that no request gets because of this cache."""
        return 0

    def max_blocks_per_request(self, config: PlanningConfig) -> int:
        """Blocks that one request of `config.max_model_len` tokens needs at most.

        Args:
            config: The limits to plan for.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what a request needs")

    def max_memory_usage_bytes(self, config: PlanningConfig) -> int:
        """Bytes that one request of `config.max_model_len` tokens needs at most.

        Args:
            config: The limits to plan for.

        Raises:
            ConfigError: The cache does not support what `config` asks for.
        """
        return self.max_blocks_per_request(config) * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same spec with another block size in tokens; a padded page stays as it was."""
        return dataclasses.replace(self, block_size=block_size)

    @classmethod
    def merge(
        cls, specs: Sequence[KVCacheSpec], group_merge: GroupMerge = "order_independent"
    ) -> KVCacheSpec:
        """The spec of a group of layers; call it on the first spec's class.

        Args:
            specs: The layers' specs, at least one.
            group_merge: Whose rule, as `Semantics.group_merge` names them.

        Raises:
            ConfigError: The layers cannot be one group.
            PlanningError: They could be one but for two windows; another grouping does not help.
        """
        del group_merge  # equality has no order
        for spec in specs[1:]:
            if spec != specs[0]:
                require_alike([specs[0], spec])
        return specs[0]

    def is_uniform_with_collection(
        self,
        kv_cache_specs: Mapping[str, KVCacheSpec],
        group_merge: GroupMerge = "order_independent",
    ) -> bool:
        """Whether one block table serves this first layer and all of `kv_cache_specs`.

        Args:
            kv_cache_specs: Specs by layer.
            group_merge: Whose rule, as `Semantics.group_merge` names them.
        """
        specs = kv_cache_specs.values()
        if group_merge == "order_independent":
            return all(spec.retention == self.retention for spec in specs)
        return all(self._accepts(spec) for spec in specs)

    def as_full_attention(self, block_size: int, group_merge: GroupMerge) -> KVCacheSpec:
        """The spec that keeps every token in place of this one, or itself where there is none.

        Args:
            block_size: Tokens per block of the model's full attention.
            group_merge: Under "layer_order" some fields are lost, as in vLLM.
        """
        del block_size, group_merge
        return self

    @property
    def retention(self) -> tuple[object, ...]:
        """What decides which blocks a request keeps; layers that agree can share a table."""
        return (self.kind,)

    def _accepts(self, spec: KVCacheSpec) -> bool:
        """Whether vLLM lets `spec` share a table in which this spec is the first."""
        return isinstance(spec, type(self))


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
        require_positive(self, "num_kv_heads", "head_size")
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
        return padded_size(self.unpadded_page_size_bytes, self.page_size_padded)

    def _pad_to_alignment(self, alignment: int | None) -> None:
        """Set `page_size_padded` where a block is no multiple of `alignment` bytes.

        An alignment that changes nothing leaves an inherited padding alone, as in vLLM.
        """
        if alignment is None:
            return
        size = self.real_page_size_bytes
        padded = divide_up(size, alignment) * alignment
        if padded != size:
            object.__setattr__(self, "page_size_padded", padded)


def padded_size(size: int, padded: int | None) -> int:
    """Bytes of a block of `size` bytes after padding.

    Raises:
        ConfigError: `padded` is smaller than the block.
    """
    if padded is None:
        return size
    if padded < size:
        raise ConfigError(f"page_size_padded: {padded} bytes cannot hold a block of {size}")
    return padded


AnyAttentionSpec = TypeVar("AnyAttentionSpec", bound=AttentionSpec)


def with_padding(spec: AnyAttentionSpec, page_size_padded: int) -> AnyAttentionSpec:
    """A copy that is padded to exactly so many bytes per block, whatever its alignment says."""
    copy = dataclasses.replace(spec)
    object.__setattr__(copy, "page_size_padded", page_size_padded)
    return copy
