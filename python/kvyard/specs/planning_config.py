"""What caches are planned for: limits of the engine, and whose decisions to take."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvyard._kvyard import Semantics
from kvyard.errors import ConfigError

# Two literals rather than one of two values: mypy's stubtest takes both for a union.
GroupMerge: TypeAlias = Literal["layer_order"] | Literal["order_independent"]

_MAMBA_CACHE_MODES = (None, "none", "all", "align")

# Fields that count something and must be 1 or more where they are set.
_POSITIVE = (
    "max_model_len",
    "max_num_batched_tokens",
    "block_size",
    "hash_block_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "num_gpu_blocks_override",
)


@dataclass(frozen=True)
class PlanningConfig:
    """Limits and switches of the engine, under vLLM's names.

    Attributes:
        max_model_len: Tokens of the longest request.
        max_num_batched_tokens: Tokens computed per step; 0 means `max_model_len`.
        block_size: Tokens per block that the engine was asked for.
        hash_block_size: Tokens per block hash; None lets the planner choose.
        enable_prefix_caching: Whether blocks are hashed and found again.
        has_kv_connector: Whether a connector needs block hashes.
        decode_context_parallel_size: Ranks that split a request's cache while decoding.
        prefill_context_parallel_size: The same while prefilling.
        disable_hybrid_kv_cache_manager: Whether all layers must share one block table.
        enable_cross_layers_blocks: Whether the pages of all layers of a block lie together.
        mamba_cache_mode: "none", "all" or "align"; None means what each spec says.
        num_gpu_blocks_override: Blocks to plan for, whatever the memory holds; None for no such.
        max_num_encoder_input_tokens: Tokens of the longest encoder output.
        auto_fit_max_model_len: Whether `max_model_len` may be lowered to what fits.
        use_eagle: Whether a drafter recomputes the last matched block.
        semantics: Whose decisions to take.
    """

    max_model_len: int
    max_num_batched_tokens: int = 0
    block_size: int = 16
    hash_block_size: int | None = None
    enable_prefix_caching: bool = True
    has_kv_connector: bool = False
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    disable_hybrid_kv_cache_manager: bool = False
    enable_cross_layers_blocks: bool = False
    mamba_cache_mode: str | None = None
    num_gpu_blocks_override: int | None = None
    max_num_encoder_input_tokens: int = 0
    auto_fit_max_model_len: bool = False
    use_eagle: bool = False
    semantics: Semantics = dataclasses.field(default_factory=Semantics.corrected)

    def __post_init__(self) -> None:
        """Fill in what follows from other fields, and check all.

        Raises:
            ConfigError: A field has a value that means nothing.
        """
        if self.max_num_batched_tokens == 0:
            object.__setattr__(self, "max_num_batched_tokens", self.max_model_len)
        for name in _POSITIVE:
            value = getattr(self, name)
            unset = value is None and name in ("hash_block_size", "num_gpu_blocks_override")
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not unset and (not whole or value <= 0):
                raise ConfigError(f"{name}: {value!r} is not a positive whole number")
        if self.max_num_encoder_input_tokens < 0:
            count = self.max_num_encoder_input_tokens
            raise ConfigError(f"max_num_encoder_input_tokens: {count} is negative")
        if self.mamba_cache_mode not in _MAMBA_CACHE_MODES:
            raise ConfigError(
                f"mamba_cache_mode: {self.mamba_cache_mode!r} is none of none, all, align"
            )

    @property
    def context_parallel_size(self) -> int:
        """Ranks that split a request's cache."""
        return self.decode_context_parallel_size * self.prefill_context_parallel_size

    @property
    def reserves_null_block(self) -> bool:
        """Whether the memory check leaves out blocks that no request can have."""
        return self.semantics.planner_reserves_null

    @property
    def group_merge(self) -> GroupMerge:
        """How specs of layers become the spec of a group."""
        return self.semantics.group_merge

    def with_max_model_len(self, max_model_len: int) -> PlanningConfig:
        """The same limits for requests of another length in tokens."""
        return dataclasses.replace(self, max_model_len=max_model_len)
