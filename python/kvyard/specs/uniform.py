"""Layers of different shape under one block table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kvyard.specs.base import KVCacheSpec
from kvyard.specs.windowed import SlidingWindowSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvyard.specs.planning_config import GroupMerge, PlanningConfig


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Specs of layers that need the same tokens in the same blocks, each with its own page.

    A manager is given one of them in its place: see
    `kvyard.planning.generate_scheduler_kv_cache_config`.

    Attributes:
        kv_cache_specs: Specs by layer.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec]

    @property
    def page_size_bytes(self) -> int:
        """Bytes per block: the pages of all layers."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks of the pool that no request gets because of these caches."""
        specs = self.kv_cache_specs.values()
        return max((spec.num_reserved_blocks for spec in specs), default=0)

    def max_blocks_per_request(self, config: PlanningConfig) -> int:
        """Blocks that one request needs at most.

        Args:
            config: The limits to plan for.
        """
        specs = self.kv_cache_specs.values()
        return max((spec.max_blocks_per_request(config) for spec in specs), default=0)

    @classmethod
    def is_uniform_type(
        cls,
        kv_cache_specs: Mapping[str, KVCacheSpec],
        group_merge: GroupMerge = "order_independent",
    ) -> bool:
        """Whether one block table serves all layers.

        Args:
            kv_cache_specs: Specs by layer, at least one.
            group_merge: Whose rule, as `Semantics.group_merge` names them.
        """
        specs = list(kv_cache_specs.values())
        if any(spec.block_size != specs[0].block_size for spec in specs):
            return False
        return specs[0].is_uniform_with_collection(kv_cache_specs, group_merge)

    @classmethod
    def from_specs(
        cls,
        kv_cache_specs: Mapping[str, KVCacheSpec],
        group_merge: GroupMerge = "order_independent",
    ) -> Self | None:
        """The specs of all layers as one, or None where no single table serves them.

        Args:
            kv_cache_specs: Specs by layer, at least one.
            group_merge: Whose rule, as `Semantics.group_merge` names them.
        """
        if not cls.is_uniform_type(kv_cache_specs, group_merge):
            return None
        first = next(iter(kv_cache_specs.values()))
        return cls(first.block_size, dict(kv_cache_specs))

    def get_page_sizes(self) -> list[int]:
        """The different page sizes in bytes, ascending."""
        return sorted({spec.page_size_bytes for spec in self.kv_cache_specs.values()})

    def get_num_layer_tuples(self) -> int:
        """How many layers have the most common page size."""
        counts = Counter(spec.page_size_bytes for spec in self.kv_cache_specs.values())
        return max(counts.values(), default=0)


def get_kv_cache_spec_kind(kv_cache_spec: KVCacheSpec) -> str:
    """The kind that events report for a group with this spec.

    Args:
        kv_cache_spec: Any spec; one that wraps layers of different kinds is "unknown".
    """
    if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs):
        kinds = set(map(get_kv_cache_spec_kind, kv_cache_spec.kv_cache_specs.values()))
        return kinds.pop() if len(kinds) == 1 else KVCacheSpec.kind
    # Its gap is the manager's own business: consumers see full attention.
    return "full_attention" if kv_cache_spec.kind == "rswa" else kv_cache_spec.kind


def get_kv_cache_spec_sliding_window(kv_cache_spec: KVCacheSpec) -> int | None:
    """The window in tokens that events report for a group with this spec, or None.

    Args:
        kv_cache_spec: Any spec.
    """
    if isinstance(kv_cache_spec, UniformTypeKVCacheSpecs):
        specs = kv_cache_spec.kv_cache_specs.values()
        windows = set(map(get_kv_cache_spec_sliding_window, specs))
        return windows.pop() if len(windows) == 1 else None
    return kv_cache_spec.sliding_window if isinstance(kv_cache_spec, SlidingWindowSpec) else None
