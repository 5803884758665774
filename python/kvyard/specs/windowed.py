"""Caches that drop what no later token attends to: sliding windows and local chunks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kvyard.errors import ConfigError
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
from kvyard.specs.full_attention import (
    DEEPSEEK_V4_ROW_BYTES,
    MLA_COMPARED,
    FullAttentionSpec,
    MLAAttentionSpec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvyard.specs.planning_config import GroupMerge, PlanningConfig


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Sliding window: a token attends to itself and to the `sliding_window - 1` before it.

    Attributes:
        sliding_window: The window in tokens.
        head_size_v: Elements per head and value; None means `head_size`.
    """

    kind: ClassVar[str] = "sliding_window"

    sliding_window: int = field(kw_only=True)
    head_size_v: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check sizes and fill in `head_size_v`.

        Raises:
            ConfigError: A size is not a positive whole number, or the dtype is unknown.
        """
        super().__post_init__()
        require_positive(self, "sliding_window")
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        require_positive(self, "head_size_v")

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes per block for keys and values alone.

        INT4 takes the full width here, as in vLLM, whose full attention packs two to a byte.
        """
        is_nvfp4 = self.kv_quant_mode is KVQuantMode.NVFP4
        mode = self.kv_quant_mode if is_nvfp4 else KVQuantMode.NONE
        width = mode.stored_width(self.head_size)
        width += mode.stored_width(self.head_size_v or self.head_size)
        return self.block_size * self.num_kv_heads * width * get_dtype_size(self.dtype)

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Blocks that one request holds at most at one time.

        The planner's sizing and the manager's admission both use it, so that what one promises
        the other admits.

        Args:
            max_num_batched_tokens: Tokens computed per step.
            max_model_len: Tokens per request.
        """
        tokens = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        # One more, because the window may begin in the middle of a block.
        return divide_up(tokens, self.block_size) + 1

    def max_blocks_per_request(self, config: PlanningConfig) -> int:
        """Blocks that one request needs at most.

        Args:
            config: The limits to plan for.

        Raises:
            ConfigError: Decode context parallelism is on, which splits no sliding window.
        """
        if config.decode_context_parallel_size != 1:
            raise ConfigError(
                "decode_context_parallel_size: sliding windows need 1, not"
                f" {config.decode_context_parallel_size}"
            )
        return self.max_admission_blocks_per_request(
            config.max_num_batched_tokens, config.max_model_len
        )

    def as_full_attention(self, block_size: int, group_merge: GroupMerge) -> KVCacheSpec:
        """Full attention that records the window.

        Args:
            block_size: Not read; its own blocks are kept.
            group_merge: Under "layer_order" the stride flag is lost, as in vLLM.
        """
        return FullAttentionSpec(
            self.block_size,
            self.num_kv_heads,
            self.head_size,
            self.dtype,
            self.kv_quant_mode,
            self.page_size_padded,
            self.indexes_kv_by_block_stride and group_merge == "order_independent",
            head_size_v=self.head_size_v,
            sliding_window=self.sliding_window,
        )

    @property
    def retention(self) -> tuple[object, ...]:
        """What decides which blocks a request keeps: the window."""
        return ("sliding_window", self.sliding_window)

    def _accepts(self, spec: KVCacheSpec) -> bool:
        return isinstance(spec, SlidingWindowSpec) and spec.sliding_window == self.sliding_window


@dataclass(frozen=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A sliding window over compressed rows.

    Attributes:
        cache_dtype_str: The cache's dtype as the user named it, for example "fp8_ds_mla".
        alignment: Bytes that a block is padded to a multiple of; None for no padding.
        compress_ratio: Tokens that share one stored row.
        model_version: None, or "deepseek_v4" for its layout of `fp8_ds_mla`.
    """

    kind: ClassVar[str] = "sliding_window_mla"

    cache_dtype_str: str | None = None
    alignment: int | None = None
    compress_ratio: int = 1
    model_version: str | None = None

    def __post_init__(self) -> None:
        """Check sizes and derive `page_size_padded` from `alignment`; `head_size_v` stays None.

        Raises:
            ConfigError: A size is not a positive whole number, or the dtype is unknown.
        """
        AttentionSpec.__post_init__(self)
        require_positive(self, "sliding_window", "compress_ratio")
        if self.alignment is not None:
            require_positive(self, "alignment")
        self._pad_to_alignment(self.alignment)

    @property
    def storage_block_size(self) -> int:
        """Stored rows per block."""
        return self.block_size // self.compress_ratio

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes per block for the compressed rows alone.

        Raises:
            ConfigError: The model version is unknown.
        """
        if self.model_version not in (None, "deepseek_v4"):
            raise ConfigError(
                f"model_version: {self.model_version!r} is neither None nor 'deepseek_v4'"
            )
        if self.model_version == "deepseek_v4" and self.cache_dtype_str == "fp8_ds_mla":
            return self.storage_block_size * DEEPSEEK_V4_ROW_BYTES
        row = self.num_kv_heads * self.head_size * get_dtype_size(self.dtype)
        return self.storage_block_size * row

    def as_full_attention(self, block_size: int, group_merge: GroupMerge) -> KVCacheSpec:
        """Latent attention in the blocks of the model's full attention.

        Args:
            block_size: Tokens per block of the model's full attention.
            group_merge: Under "layer_order" quantisation and stride flag are lost, as in vLLM.
        """
        keeps_all = group_merge == "order_independent"
        return MLAAttentionSpec(
            block_size,
            self.num_kv_heads,
            self.head_size,
            self.dtype,
            self.kv_quant_mode if keeps_all else KVQuantMode.NONE,
            self.page_size_padded,
            self.indexes_kv_by_block_stride and keeps_all,
            cache_dtype_str=self.cache_dtype_str,
            alignment=self.alignment,
            compress_ratio=self.compress_ratio,
            model_version=self.model_version,
        )

    def _accepts(self, spec: KVCacheSpec) -> bool:
        return isinstance(spec, SlidingWindowMLASpec) and super()._accepts(spec)

    @classmethod
    def merge(
        cls, specs: Sequence[KVCacheSpec], group_merge: GroupMerge = "order_independent"
    ) -> KVCacheSpec:
        """The spec of a group of layers; call it on the first spec's class.

        Under "layer_order" sizes are the first layer's, are not compared, and the quantisation is
        forgotten (vLLM `SlidingWindowMLASpec.merge`).

        Args:
            specs: The layers' specs, at least one.
            group_merge: Whose rule, as `Semantics.group_merge` names them.

        Raises:
            ConfigError: The layers cannot be one group.
        """
        layers = [spec for spec in specs if isinstance(spec, SlidingWindowMLASpec)]
        if len(layers) < len(specs):
            raise ConfigError(f"layers of one group: {cls.__name__} does not merge with others")
        if group_merge == "order_independent":
            require_alike(layers, ignoring=("alignment",))
            return dataclasses.replace(layers[0], alignment=None)
        for spec in layers[1:]:
            require_equal(layers[0], spec, (*MLA_COMPARED, "sliding_window"))
        return dataclasses.replace(
            layers[0], alignment=None, kv_quant_mode=KVQuantMode.NONE, head_size_v=None
        )


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Local attention: a token attends to those before it in its own chunk.

    Attributes:
        attention_chunk_size: The chunk in tokens.
    """

    kind: ClassVar[str] = "chunked_local_attention"

    attention_chunk_size: int = field(kw_only=True)

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: A size is not a positive whole number, or the dtype is unknown.
        """
        super().__post_init__()
        require_positive(self, "attention_chunk_size")

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Blocks that one request holds at most at one time.

        Args:
            max_num_batched_tokens: Tokens computed per step.
            max_model_len: Tokens per request.
        """
        tokens = min(self.attention_chunk_size + max_num_batched_tokens, max_model_len)
        return divide_up(tokens, self.block_size)

    def max_blocks_per_request(self, config: PlanningConfig) -> int:
        """Blocks that one request needs at most.

        Args:
            config: The limits to plan for.
        """
        return self.max_admission_blocks_per_request(
            config.max_num_batched_tokens, config.max_model_len
        )

    def as_full_attention(self, block_size: int, group_merge: GroupMerge) -> KVCacheSpec:
        """Full attention that records the chunk size.

        Args:
            block_size: Not read; its own blocks are kept.
            group_merge: Under "layer_order" quantisation and stride flag are lost, as in vLLM.
        """
        keeps_all = group_merge == "order_independent"
        return FullAttentionSpec(
            self.block_size,
            self.num_kv_heads,
            self.head_size,
            self.dtype,
            self.kv_quant_mode if keeps_all else KVQuantMode.NONE,
            self.page_size_padded,
            self.indexes_kv_by_block_stride and keeps_all,
            attention_chunk_size=self.attention_chunk_size,
        )

    @property
    def retention(self) -> tuple[object, ...]:
        """What decides which blocks a request keeps: the chunk."""
        return (self.kind, self.attention_chunk_size)

    def _accepts(self, spec: KVCacheSpec) -> bool:
        return isinstance(spec, ChunkedLocalAttentionSpec) and spec.retention == self.retention
