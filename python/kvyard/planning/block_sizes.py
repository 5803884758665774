"""What the scheduler needs of a plan: one configuration, and its units in tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from kvyard.errors import ConfigError
from kvyard.specs.other import MambaSpec
from kvyard.specs.uniform import UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvyard.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from kvyard.specs.planning_config import PlanningConfig


def generate_scheduler_kv_cache_config(kv_cache_configs: Sequence[KVCacheConfig]) -> KVCacheConfig:
    """The scheduler's configuration, in which each group has a spec that a manager knows.

    Args:
        kv_cache_configs: Those of all workers; the first one's layer names are taken.

    Raises:
        ConfigError: There is none, or the workers have different numbers of blocks.
    """
    if not kv_cache_configs:
        raise ConfigError("kv_cache_configs: there is no worker")
    first = kv_cache_configs[0]
    counts = {config.num_blocks for config in kv_cache_configs}
    if len(counts) > 1:
        raise ConfigError(f"num_blocks: workers have different numbers, {sorted(counts)}")
    groups = []
    for group in first.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        groups.append(dataclasses.replace(group, kv_cache_spec=spec))
    return dataclasses.replace(first, kv_cache_groups=groups)


def resolve_kv_cache_block_sizes(
    kv_cache_config: KVCacheConfig, config: PlanningConfig
) -> tuple[int, int]:
    """The units of scheduling and of hashing.

    Args:
        kv_cache_config: One worker's, or the scheduler's.
        config: The limits to plan for.

    Returns:
        (tokens that scheduled lengths are rounded to, tokens per block hash).

    Raises:
        ConfigError: The groups' block sizes are not multiples of `hash_block_size`, or context
            parallelism is asked of several groups.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    hashes = config.enable_prefix_caching or config.has_kv_connector
    if len(specs) <= 1:
        size = config.block_size
        if specs and size != specs[0].block_size and (hashes or size % specs[0].block_size):
            # The planner or the layer chose other blocks than the engine was asked for; vLLM's
            # manager cannot be built then.
            size = specs[0].block_size
        size *= config.context_parallel_size
        return size, size
    if config.context_parallel_size != 1:
        raise ConfigError(
            f"context parallelism: {len(specs)} groups need decode_context_parallel_size and"
            f" prefill_context_parallel_size 1, and they multiply to"
            f" {config.context_parallel_size}"
        )
    sizes = [spec.block_size for spec in specs]
    scheduler_block_size = math.lcm(*sizes)
    coarse_states = any(
        isinstance(spec, MambaSpec) and spec.block_size != config.block_size for spec in specs
    )
    if not hashes or coarse_states:
        return scheduler_block_size, scheduler_block_size
    hash_block_size = config.hash_block_size or math.gcd(*sizes)
    if any(size % hash_block_size for size in sizes):
        raise ConfigError(
            f"hash_block_size: {hash_block_size} does not divide the groups' block sizes {sizes};"
            f" choose a divisor of {math.gcd(*sizes)}"
        )
    return scheduler_block_size, hash_block_size


def add_kv_sharing_layers_to_kv_cache_groups(
    shared_kv_cache_layers: Mapping[str, str], groups: Sequence[KVCacheGroupSpec]
) -> list[KVCacheGroupSpec]:
    """List layers that reuse the cache of another one with that layer's group.

    Such layers have no spec and no memory of their own, so they are added after planning.

    Args:
        shared_kv_cache_layers: For each such layer the one whose cache it uses, which may itself
            stand earlier in this mapping.
        groups: The planned groups, which stay as they are.

    Returns:
        Groups with the layers appended.

    Raises:
        ConfigError: A layer's target has no cache.
    """
    names = [list(group.layer_names) for group in groups]
    group_of = {layer: i for i, layers in enumerate(names) for layer in layers}
    for layer, target in shared_kv_cache_layers.items():
        if target not in group_of:
            raise ConfigError(
                f"layer {layer}: it reuses the cache of {target}, which has none; name a layer"
                " that has a spec"
            )
        names[group_of[target]].append(layer)
        group_of[layer] = group_of[target]
    return [
        dataclasses.replace(group, layer_names=layers)
        for group, layers in zip(groups, names, strict=True)
    ]
