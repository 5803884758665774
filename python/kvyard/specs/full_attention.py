"""Caches that keep every token of a request: full attention and its relatives."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kvyard.errors import ConfigError, PlanningError
from kvyard.specs.base import (
    AttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    divide_up,
    get_dtype_size,
    require_alike,
    require_equal,
    require_positive,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvyard.specs.planning_config import GroupMerge, PlanningConfig

# Bytes of one stored row in the two layouts of `fp8_ds_mla`, which fix their own padding.
DEEPSEEK_V4_ROW_BYTES = 584
_FP8_DS_MLA_ROW_BYTES = 656

# What a merged group may collect from layers that differ in it.
_MERGEABLE = ("sliding_window", "attention_chunk_size", "non_causal")

# What vLLM compares in layers of compressed rows; it takes the rest from the first.
MLA_COMPARED = (
    "cache_dtype_str",
    "compress_ratio",
    "model_version",
    "indexes_kv_by_block_stride",
)

_ATTENTION_FIELDS = tuple(f.name for f in dataclasses.fields(AttentionSpec))


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
        require_positive(self, "head_size_v")

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes per block for keys and values alone."""
        width = self.kv_quant_mode.stored_width(self.head_size)
        width += self.kv_quant_mode.stored_width(self.head_size_v or self.head_size)
        return self.block_size * self.num_kv_heads * width * get_dtype_size(self.dtype)

    def max_blocks_per_request(self, config: PlanningConfig) -> int:
        """Blocks that one request needs at most: all of its tokens, split over the ranks.

        Args:
            config: The limits to plan for.
        """
        tokens_per_rank = divide_up(config.max_model_len, config.context_parallel_size)
        return divide_up(tokens_per_rank, self.block_size)

    @property
    def retention(self) -> tuple[object, ...]:
        """What decides which blocks a request keeps: nothing, all are kept."""
        return ("full_attention",)

    def _accepts(self, spec: KVCacheSpec) -> bool:
        return isinstance(spec, FullAttentionSpec)

    @classmethod
    def merge(
        cls, specs: Sequence[KVCacheSpec], group_merge: GroupMerge = "order_independent"
    ) -> KVCacheSpec:
        """The spec of a group of layers; call it on the first spec's class.

        Under "layer_order" the class and `head_size_v` are the first layer's, so that other full
        attention behind it loses what sets it apart (vLLM `FullAttentionSpec.merge`).

        Args:
            specs: The layers' specs, at least one.
            group_merge: Whose rule, as `Semantics.group_merge` names them.

        Raises:
            ConfigError: The layers cannot be one group.
            PlanningError: Two windows or two chunk sizes are recorded in the layers.
        """
        layers = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
        if len(layers) < len(specs) or any(isinstance(spec, MLAAttentionSpec) for spec in layers):
            raise ConfigError(f"layers of one group: {cls.__name__} does not merge with others")
        if group_merge == "order_independent":
            _require_all_equal(layers, ("retention",))
        window = _only_value(layers, "sliding_window")
        chunk = _only_value(layers, "attention_chunk_size")
        if group_merge == "order_independent":
            require_alike(layers, ignoring=_MERGEABLE)
        else:
            _require_all_equal(layers, _ATTENTION_FIELDS)
        if window is not None and chunk is not None:
            raise ConfigError("layers of one group: both a window and a chunk size are recorded")
        return dataclasses.replace(
            layers[0],
            sliding_window=window,
            attention_chunk_size=chunk,
            non_causal=any(spec.non_causal for spec in layers),
        )


def _require_all_equal(specs: Sequence[KVCacheSpec], names: Sequence[str]) -> None:
    """Check that all specs agree with the first in these attributes.

    Raises:
        ConfigError: They do not.
    """
    for spec in specs[1:]:
        require_equal(specs[0], spec, names)


def _only_value(specs: Sequence[FullAttentionSpec], name: str) -> int | None:
    values = {getattr(spec, name) for spec in specs} - {None}
    if len(values) > 1:
        listed = ", ".join(str(value) for value in sorted(values))
        raise PlanningError(
            f"{name}: layers that are cached as full attention have several, {listed}, and one"
            " group records one; leave the hybrid manager enabled, so that each gets its group"
        )
    return values.pop() if values else None


@dataclass(frozen=True)
class TQFullAttentionSpec(FullAttentionSpec):
    """Full attention whose rows have a packed layout of its own.

    Attributes:
        tq_slot_size: Bytes per token and head for key and value together; 0 for the plain layout.
    """

    tq_slot_size: int = 0

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes per block for keys and values alone."""
        if self.tq_slot_size > 0:
            return self.block_size * self.num_kv_heads * self.tq_slot_size
        return super().real_page_size_bytes

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
            PlanningError: Two windows or two chunk sizes are recorded in the layers.
        """
        merged = super().merge(specs, group_merge)
        _require_all_equal(specs, ("tq_slot_size",))
        return merged


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
        require_positive(self, "compress_ratio")
        if self.alignment is not None:
            require_positive(self, "alignment")
        self._pad_to_alignment(self.alignment)

    @property
    def storage_block_size(self) -> int:
        """Stored rows per block."""
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes per block for the compressed rows alone."""
        if self.cache_dtype_str == "fp8_ds_mla":
            if self.model_version == "deepseek_v4":
                return self.storage_block_size * DEEPSEEK_V4_ROW_BYTES
            return self.block_size * _FP8_DS_MLA_ROW_BYTES
        width = self.head_size
        if self.kv_quant_mode is KVQuantMode.INT4_PER_TOKEN_HEAD:
            width //= 2
        return self.storage_block_size * self.num_kv_heads * width * get_dtype_size(self.dtype)

    @classmethod
    def merge(
        cls, specs: Sequence[KVCacheSpec], group_merge: GroupMerge = "order_independent"
    ) -> KVCacheSpec:
        """The spec of a group of layers; call it on the first spec's class.

        Under "layer_order" sizes are the first layer's and are not compared (vLLM
        `MLAAttentionSpec.merge`). The alignment is spent: the padding that came of it stays.

        Args:
            specs: The layers' specs, at least one.
            group_merge: Whose rule, as `Semantics.group_merge` names them.

        Raises:
            ConfigError: The layers cannot be one group.
        """
        layers = [spec for spec in specs if isinstance(spec, MLAAttentionSpec)]
        if len(layers) < len(specs):
            raise ConfigError(f"layers of one group: {cls.__name__} does not merge with others")
        if group_merge == "order_independent":
            require_alike(layers, ignoring=(*_MERGEABLE, "alignment", "head_size_v"))
        else:
            _require_all_equal(layers, MLA_COMPARED)
        return dataclasses.replace(
            layers[0],
            alignment=None,
            head_size_v=None,
            sliding_window=None,
            attention_chunk_size=None,
            non_causal=False,
        )


@dataclass(frozen=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """Hidden states that are kept for extraction; the planner fits them to the other pages."""


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
        require_positive(self, "rswa_window")

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
            PlanningError: Two windows or two chunk sizes are recorded in the layers.
        """
        _require_all_equal(specs, ("rswa_window",))
        return super().merge(specs, group_merge)

    def as_full_attention(self, block_size: int, group_merge: GroupMerge) -> KVCacheSpec:
        """Plain full attention, which keeps the gap as well; itself under "layer_order".

        Args:
            block_size: Not read; its own blocks are kept.
            group_merge: Whose rule, as `Semantics.group_merge` names them.
        """
        if group_merge == "layer_order":
            return self
        inherited = {f.name: getattr(self, f.name) for f in dataclasses.fields(FullAttentionSpec)}
        return FullAttentionSpec(**inherited)

    @property
    def retention(self) -> tuple[object, ...]:
        """What decides which blocks a request keeps: the window."""
        return (self.kind, self.rswa_window)


@dataclass(frozen=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with tokens in front that all requests share.

    Attributes:
        sink_len: How many shared tokens; None where they are not known yet.
    """

    kind: ClassVar[str] = "sink_full_attention"

    sink_len: int | None = None

    @property
    def retention(self) -> tuple[object, ...]:
        """What decides which blocks a request keeps: all, behind the shared ones."""
        return (self.kind, self.sink_len)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks of the pool that the shared tokens take for good."""
        return divide_up(self.sink_len or 0, self.block_size)
