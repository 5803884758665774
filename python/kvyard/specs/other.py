"""Caches that do not grow with the tokens of a request: states, encoder outputs, nothing."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from kvyard.errors import ConfigError
from kvyard.specs.base import (
    AttentionSpec,
    KVCacheSpec,
    divide_up,
    get_dtype_size,
    padded_size,
)

if TYPE_CHECKING:
    from kvyard.specs.planning_config import PlanningConfig

_MAMBA_CACHE_MODES = ("none", "all", "align")


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """The states of a Mamba, gated delta net or short convolution layer.

    Attributes:
        shapes: The shape of each state, in elements.
        dtypes: The type of each state's elements, by name or as a torch dtype.
        page_size_padded: Bytes per block after padding; None for no padding.
        mamba_type: Which kernel; kept, never read.
        mamba_cache_mode: "none" keeps the last state, "all" one per block, "align" the last two.
        num_speculative_blocks: States for drafted tokens, one each.
    """

    kind: ClassVar[str] = "mamba"

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[object, ...]
    page_size_padded: int | None = None
    mamba_type: object = "mamba2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        """Check shapes, dtypes and mode.

        Raises:
            ConfigError: One of them is not what it should be.
        """
        super().__post_init__()
        # Specs are keys of dicts, which lists would forbid.
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        object.__setattr__(self, "dtypes", tuple(self.dtypes))
        if len(self.shapes) != len(self.dtypes):
            raise ConfigError(f"dtypes: {len(self.dtypes)} for {len(self.shapes)} states")
        if not self.shapes or any(size <= 0 for shape in self.shapes for size in shape):
            raise ConfigError(f"shapes: {self.shapes} hold no state")
        if self.mamba_cache_mode not in _MAMBA_CACHE_MODES:
            known = ", ".join(_MAMBA_CACHE_MODES)
            raise ConfigError(f"mamba_cache_mode: {self.mamba_cache_mode!r} is none of {known}")
        if self.num_speculative_blocks < 0:
            raise ConfigError(f"num_speculative_blocks: {self.num_speculative_blocks} is negative")
        _ = self.page_size_bytes  # raises where the padding is too small

    @property
    def page_size_bytes(self) -> int:
        """Bytes per block, padding included; the block size has no part in it.

        Raises:
            ConfigError: `page_size_padded` is smaller than the states.
        """
        states = zip(self.shapes, self.dtypes, strict=True)
        size = sum(prod(shape) * get_dtype_size(dtype) for shape, dtype in states)
        return padded_size(size, self.page_size_padded)

    def max_blocks_per_request(self, config: PlanningConfig) -> int:
        """Blocks that one request needs at most.

        Args:
            config: The limits to plan for; its mode, if any, goes before the spec's.
        """
        mode = config.mamba_cache_mode or self.mamba_cache_mode
        if mode == "all":
            states = divide_up(config.max_model_len, self.block_size)
        else:
            states = 2 if mode == "align" else 1
        return states + self.num_speculative_blocks

    @property
    def retention(self) -> tuple[object, ...]:
        """What decides which blocks a request keeps: the mode, and how many are for drafts."""
        return (self.kind, self.mamba_cache_mode, self.num_speculative_blocks)

    def _accepts(self, spec: KVCacheSpec) -> bool:
        return (
            isinstance(spec, MambaSpec)
            and spec.num_speculative_blocks == self.num_speculative_blocks
        )


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of an encoder's output, which a decoder attends to."""

    kind: ClassVar[str] = "cross_attention"

    def max_blocks_per_request(self, config: PlanningConfig) -> int:
        """Blocks that one request needs at most: those of the longest encoder output.

        Args:
            config: The limits to plan for.
        """
        return divide_up(config.max_num_encoder_input_tokens, self.block_size)


@dataclass(frozen=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention inside an encoder: computed once, never cached; planners and managers refuse it."""

    kind: ClassVar[str] = "encoder_only_attention"

    def max_blocks_per_request(self, config: PlanningConfig) -> int:
        """Blocks that one request needs: none.

        Args:
            config: Not read.
        """
        del config
        return 0
