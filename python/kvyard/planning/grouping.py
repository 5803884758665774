"""From the specs of layers to groups of layers that share a block table.

The rules are vLLM 0.25.1's (`vllm/v1/core/kv_cache_utils.py`, `get_kv_cache_groups`), tried in
order: all layers alike; all of one type; DeepSeek-V4's pattern; pages made equal and layers dealt
into groups of equal length. `Semantics.group_merge` decides what "alike" means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvyard.errors import ConfigError, PlanningError
from kvyard.kv_cache_interface import KVCacheGroupSpec
from kvyard.planning.deepseek_v4 import has_latent_windows, latent_groups
from kvyard.planning.page_size import (
    fit_hidden_states,
    split_hidden_states,
    unify_kv_cache_spec_page_size,
)
from kvyard.specs.base import KVCacheSpec, divide_up
from kvyard.specs.full_attention import FullAttentionSpec
from kvyard.specs.uniform import UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvyard.specs.planning_config import GroupMerge, PlanningConfig

_Specs = dict[str, KVCacheSpec]


def get_kv_cache_groups(
    config: PlanningConfig, kv_cache_specs: Mapping[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """Split layers into groups.

    Args:
        config: The limits to plan for.
        kv_cache_specs: Specs by layer; their order decides the order of the groups.

    Returns:
        The groups; none for a model without a cache.

    Raises:
        ConfigError: The hybrid manager is disabled, and the layers are not of one type.
        PlanningError: The layers cannot share a pool.
    """
    rule = config.group_merge
    specs = dict(kv_cache_specs)
    if config.disable_hybrid_kv_cache_manager:
        specs = unify_hybrid_kv_cache_specs(specs, rule)
    if not specs:
        return []
    if is_kv_cache_spec_uniform(specs, rule):
        return [_group(specs, list(specs), rule)]
    uniform = UniformTypeKVCacheSpecs.from_specs(specs, rule)
    if uniform is not None:
        return [KVCacheGroupSpec(list(specs), uniform)]
    if has_latent_windows(specs):
        return latent_groups(specs, use_eagle=config.use_eagle, group_merge=rule)
    others, hidden = split_hidden_states(specs)
    groups = _equal_groups(unify_kv_cache_spec_page_size(others), rule)
    return groups + fit_hidden_states(hidden, groups)


def is_kv_cache_spec_uniform(
    kv_cache_specs: Mapping[str, KVCacheSpec], group_merge: GroupMerge = "order_independent"
) -> bool:
    """Whether all layers merge into one spec.

    Args:
        kv_cache_specs: Specs by layer.
        group_merge: Whose rule, as `Semantics.group_merge` names them.

    Raises:
        PlanningError: They would but for two windows; no other grouping is tried.
    """
    specs = list(kv_cache_specs.values())
    try:
        if specs:
            specs[0].merge(specs, group_merge)
    except PlanningError:
        raise
    except ConfigError:
        return False
    return True


def unify_hybrid_kv_cache_specs(
    kv_cache_specs: Mapping[str, KVCacheSpec], group_merge: GroupMerge = "order_independent"
) -> _Specs:
    """Turn layers that forget into layers that keep everything, so that one table serves all.

    Args:
        kv_cache_specs: Specs by layer.
        group_merge: Whose rule, as `Semantics.group_merge` names them.

    Returns:
        The specs, converted where necessary.

    Raises:
        ConfigError: There still is more than one type.
        PlanningError: The layers have two different windows.
    """
    specs = dict(kv_cache_specs)
    if not specs or _is_one_type(specs, group_merge):
        return specs
    full = [spec for spec in specs.values() if isinstance(spec, FullAttentionSpec)]
    if full:
        block_size = full[0].block_size
        specs = {k: v.as_full_attention(block_size, group_merge) for k, v in specs.items()}
    if not _is_one_type(specs, group_merge):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in kv_cache_specs.values()}))
        raise ConfigError(
            f"disable_hybrid_kv_cache_manager: {kinds} do not become one type; enable the hybrid"
            " manager"
        )
    return specs


def _is_one_type(specs: _Specs, group_merge: GroupMerge) -> bool:
    if is_kv_cache_spec_uniform(specs, group_merge):
        return True
    return UniformTypeKVCacheSpecs.is_uniform_type(specs, group_merge)


def _group(specs: _Specs, layers: list[str], group_merge: GroupMerge) -> KVCacheGroupSpec:
    merged = [specs[layer] for layer in layers]
    return KVCacheGroupSpec(layers, merged[0].merge(merged, group_merge))


def _equal_groups(specs: _Specs, group_merge: GroupMerge) -> list[KVCacheGroupSpec]:
    """Deal layers of equal spec into groups of about equal length.

    Args:
        specs: Specs by layer, with pages of one size.
        group_merge: Whose rule, as `Semantics.group_merge` names them.
    """
    buckets: dict[KVCacheSpec, list[str]] = {}
    for layer, spec in specs.items():
        buckets.setdefault(spec, []).append(layer)
    smallest = min(map(len, buckets.values()))
    largest = max(map(len, buckets.values()))
    # Buckets of similar size become a group each; a few empty places cost less than more tables.
    length = largest if 2 * largest < 3 * smallest else smallest
    groups = []
    for layers in buckets.values():
        count = divide_up(len(layers), length)
        # Strides, not runs: every pipeline stage then has about as many layers of each group.
        groups += [_group(specs, layers[i::count], group_merge) for i in range(count)]
    return groups
