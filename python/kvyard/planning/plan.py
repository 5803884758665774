"""The whole way, from the specs of layers and bytes of memory to configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvyard.errors import ConfigError, InvalidArgumentError, PlanningError
from kvyard.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from kvyard.planning.block_sizes import (
    generate_scheduler_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from kvyard.planning.grouping import get_kv_cache_groups
from kvyard.planning.memory import (
    auto_fit_max_model_len,
    check_enough_kv_cache_memory,
    get_kv_cache_capacity,
)
from kvyard.planning.tensors import (
    bytes_per_block,
    get_kv_cache_config_from_groups,
    get_num_blocks,
)
from kvyard.specs.registry import check_kv_cache_spec_registry
from kvyard.specs.uniform import UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvyard.specs.base import KVCacheSpec
    from kvyard.specs.planning_config import PlanningConfig

    _Specs = Mapping[str, KVCacheSpec]
    _Groups = list[KVCacheGroupSpec]


@dataclass(frozen=True)
class Plan:
    """What the planner decided.

    Attributes:
        kv_cache_configs: One configuration per worker.
        scheduler_kv_cache_config: The scheduler's, which a manager takes.
        scheduler_block_size: Tokens that scheduled lengths are rounded to.
        hash_block_size: Tokens per block hash.
        max_model_len: Tokens of the longest request, lowered where that was asked for.
        num_tokens: Tokens that the cache holds, as vLLM counts.
        max_concurrency: How many requests of full length it holds, as vLLM counts.
    """

    kv_cache_configs: Sequence[KVCacheConfig]
    scheduler_kv_cache_config: KVCacheConfig
    scheduler_block_size: int
    hash_block_size: int
    max_model_len: int
    num_tokens: int
    max_concurrency: float


def plan_kv_cache(
    config: PlanningConfig,
    kv_cache_specs: Sequence[_Specs],
    available_memory: Sequence[int],
) -> Plan:
    """Plan the cache of a model.

    Args:
        config: The limits to plan for.
        kv_cache_specs: For each worker its specs by layer.
        available_memory: For each worker the bytes it has for the cache.

    Raises:
        InvalidArgumentError: The arguments are not one per worker, or there is no worker.
        ConfigError: A spec or a limit does not fit the others.
        PlanningError: The layers cannot share a pool.
        InsufficientMemoryError: The longest request does not fit.
    """
    fitted, configs = _plan_workers(config, kv_cache_specs, available_memory)
    scheduler_config = generate_scheduler_kv_cache_config(configs)
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(scheduler_config, fitted)
    capacities = [get_kv_cache_capacity(fitted, worker) for worker in configs]
    num_tokens, max_concurrency = min(capacities, key=lambda capacity: capacity[1])
    return Plan(
        configs,
        scheduler_config,
        scheduler_block_size,
        hash_block_size,
        fitted.max_model_len,
        num_tokens,
        max_concurrency,
    )


def get_kv_cache_configs(
    config: PlanningConfig,
    kv_cache_specs: Sequence[_Specs],
    available_memory: Sequence[int],
) -> list[KVCacheConfig]:
    """The workers' part of `plan_kv_cache`, under vLLM's name.

    Args:
        config: The limits to plan for.
        kv_cache_specs: For each worker its specs by layer.
        available_memory: For each worker the bytes it has for the cache.

    Raises:
        InvalidArgumentError: The arguments are not one per worker, or there is no worker.
        ConfigError: A spec or a limit does not fit the others.
        PlanningError: The layers cannot share a pool.
        InsufficientMemoryError: The longest request does not fit.
    """
    return _plan_workers(config, kv_cache_specs, available_memory)[1]


def _plan_workers(
    config: PlanningConfig, specs_of_workers: Sequence[_Specs], available_memory: Sequence[int]
) -> tuple[PlanningConfig, list[KVCacheConfig]]:
    if not specs_of_workers or len(specs_of_workers) != len(available_memory):
        raise InvalidArgumentError(
            f"available_memory: {len(available_memory)} values for {len(specs_of_workers)} workers"
        )
    merged = _merge_workers(specs_of_workers)
    check_kv_cache_spec_registry(merged)
    groups = get_kv_cache_groups(config, merged)
    projected = [_project(groups, specs) for specs in specs_of_workers]
    memory = list(available_memory)
    if config.num_gpu_blocks_override is not None and groups:
        blocks = config.num_gpu_blocks_override
        memory = [blocks * bytes_per_block(config, worker) for worker in projected]
    if config.auto_fit_max_model_len:
        config = auto_fit_max_model_len(config, projected, memory)
    for worker, available in zip(projected, memory, strict=True):
        if bytes_per_block(config, worker):
            check_enough_kv_cache_memory(config, worker, available)
    _check_all_assigned(groups, merged)
    return config, _lay_out(config, projected, memory)


def _merge_workers(specs_of_workers: Sequence[_Specs]) -> dict[str, KVCacheSpec]:
    merged: dict[str, KVCacheSpec] = {}
    for specs in specs_of_workers:
        for layer, spec in specs.items():
            if merged.setdefault(layer, spec) != spec:
                raise ConfigError(
                    f"layer {layer}: workers have different specs for it, {merged[layer]} and"
                    f" {spec}; give all tensor-parallel ranks the same"
                )
    return merged


def _project(groups: _Groups, specs: _Specs) -> _Groups:
    """The same groups with the layers of one worker; a group may become empty."""
    projected = []
    for group in groups:
        layers = [layer for layer in group.layer_names if layer in specs]
        spec = group.kv_cache_spec
        if layers and isinstance(spec, UniformTypeKVCacheSpecs):
            kept = {layer: spec.kv_cache_specs[layer] for layer in layers}
            spec = UniformTypeKVCacheSpecs(spec.block_size, kept)
        is_eagle_group = group.is_eagle_group and bool(layers)
        projected.append(KVCacheGroupSpec(layers, spec, is_eagle_group))
    return projected


def _check_all_assigned(groups: _Groups, merged: _Specs) -> None:
    assigned = {layer for group in groups for layer in group.layer_names}
    missing = [layer for layer in merged if layer not in assigned]
    if missing:
        kinds = ", ".join(sorted({type(merged[layer]).__name__ for layer in missing}))
        raise PlanningError(
            f"layers {', '.join(missing)}: {kinds} layers get no group beside sliding-window MLA"
            " layers of several kinds; set disable_hybrid_kv_cache_manager=True if all can be"
            " cached in full"
        )


def _lay_out(
    config: PlanningConfig, groups_of_workers: Sequence[_Groups], memory: Sequence[int]
) -> list[KVCacheConfig]:
    """Give all workers the number of blocks of the smallest one, because they share block ids."""
    counts = []
    for groups, available in zip(groups_of_workers, memory, strict=True):
        # Without groups a pool still has its null block.
        count = get_num_blocks(config, groups, available) if groups else 1
        if count is not None:
            counts.append(count)
    num_blocks = min(counts)
    return [
        get_kv_cache_config_from_groups(config, groups, num_blocks) for groups in groups_of_workers
    ]
